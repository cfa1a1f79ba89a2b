"""Generation with inserted meta-tokens.

A model is never trained to predict a meta-token, so its logit is suppressed, and one is inserted after every
`meta_every` tokens of generated text. An inserted token and the text token before it go through one forward pass. The
loops of transformers (greedy, sampling, beam search) only see text tokens; the meta-tokens are added where the inputs
of a step are prepared.
"""

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    Cache,
    ContinuousBatchingConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
)
from transformers.generation import GenerationMode
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from metatokens.errors import UserError
from metatokens.model.configuration import never_generated
from metatokens.model.continuous_batching import MetaManager, further_layers
from metatokens.model.mixins import add_mixin
from metatokens.model.positions import (
    position_ids_from_mask,
    rotates_by_length,
)
from metatokens.model.releases import (
    CACHE,
    PEFTS_CACHE,
    SPLITS_LATER_TURNS,
    cache_among,
    with_cache_renamed,
)

READ_AT_ONCE = 512  # tokens of a prompt in one forward pass of a model with a `text_window`
# Arguments of a step that this module adds. They have names of their own, since transformers would take `meta_every`
# for a field of its configuration.
_STEP_ARGUMENTS = ("insert_every", "prompt_length")


def register_architecture(architecture: str, model: type) -> None:
    """Make a class an attribute of the module transformers, where its server and TRL look an architecture up.

    Two module objects of that name exist, so it is set on their common class.
    """
    setattr(type(transformers), architecture, model)


class SuppressMetaToken(SuppressTokensLogitsProcessor):
    """Suppress tokens, in continuous batching too."""

    supports_continuous_batching = True


class MetaTokenGenerationMixin(GenerationMixin):
    """`generate()` of a model that may have meta-tokens."""

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        meta_every: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """`GenerationMixin.generate` with inserted meta-tokens.

        Args:
            inputs: prompt ids, (batch, length), which may contain meta-tokens.
            generation_config: as in `GenerationMixin.generate`. If the argument `meta_every` is None, its `meta_every`
                is used, and after that the one of the model's `generation_config`.
            *args: as in `GenerationMixin.generate`.
            meta_every: insert a meta-token after every `meta_every` generated text tokens, counted from the end of the
                prompt in all rows alike; 0, or None everywhere, inserts none. `max_new_tokens` counts text tokens, and
                the returned ids omit the inserted ones.
            **kwargs: as in `GenerationMixin.generate`. A cache, by either of its names, may hold the start of the
                sequence, whose ids are given as well, unless meta-tokens were inserted into it.

        Raises:
            UserError: if `meta_every` is below 0, the model has no meta-token, or another argument does not support
                inserted meta-tokens; if a configuration has `meta_every` and the model is in training mode.
        """
        if kwargs.get("meta_token_mask") is not None:
            raise UserError(
                "meta_token_mask is for a forward pass; generate() finds meta-tokens by their ids."
            )
        asked = vars(generation_config or self.generation_config) | kwargs
        if asked.get("assistant_early_exit"):
            raise UserError(
                "assistant_early_exit changes the number of blocks, which meta-attention depends on: give an "
                "assistant_model."
            )
        ids: Any = kwargs.get("input_ids", inputs)
        is_healed = bool(asked.get("token_healing")) and ids is not None
        if is_healed and torch.isin(ids, ids.new_tensor(never_generated(self.config))).any():
            raise UserError(
                "token_healing writes the prompt as text, which has no meta-tokens: leave it out."
            )
        insert_every = self._insert_every(meta_every, generation_config)
        kwargs = with_cache_renamed(kwargs)
        cache = kwargs.get(CACHE)
        inserted = getattr(cache, "inserted", None)
        # None is left in a cache that was reset, or cropped to the prompt.
        if cache is not None and inserted and cache.get_seq_length() > inserted[0]:
            raise UserError(
                "meta-tokens were inserted into what this cache holds, and the ids have none: begin a new cache."
            )
        if insert_every is not None:
            if self.training and meta_every is None:
                raise UserError(
                    "a setting inserts meta-tokens in training mode: a trainer that generates, such as TRL's GRPO, "
                    "would learn from ids without them. Put meta-tokens into the prompts, or call model.eval() first."
                )
            kwargs |= {
                "insert_every": insert_every,
                "prompt_length": _prompt_length(inputs, kwargs),
            }
        return super().generate(inputs, generation_config, *args, **kwargs)

    def generate_batch(
        self,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        *args: Any,
        meta_every: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """`generate_batch` of transformers, which would ignore `meta_every`; that is as in `generate`."""
        if meta_every is not None:
            generation_config = copy(generation_config or self.generation_config)
            generation_config.meta_every = meta_every
        return super().generate_batch(inputs, generation_config, *args, **kwargs)

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The engine of `generate_batch` and `transformers serve`; a `meta_every` of the configuration holds for it.

        Raises:
            UserError: if the model does something that a paged cache does not support, or `meta_every` is wrong.
        """
        settings = copy(continuous_batching_config) or ContinuousBatchingConfig()
        meta_every = self._insert_every(None, generation_config)
        if further_layers(self):
            settings.max_blocks_per_request = 0  # no kernel can read the second attention's pages
        if meta_every is not None:
            # Its next batch would begin before it is known what is inserted.
            settings.use_async_batching = False
        manager = super().init_continuous_batching(generation_config, settings, *args, **kwargs)
        add_mixin(manager, MetaManager)
        manager.meta_every = meta_every
        return manager

    def _insert_every(
        self, meta_every: int | None, generation_config: GenerationConfig | None
    ) -> int | None:
        """The `meta_every` that holds: the argument's, or that of a generation configuration; None for 0."""
        if getattr(generation_config, "is_assistant", False):
            return None  # a draft writes text alone, whatever its model's setting
        for config in (generation_config, self.generation_config):
            if meta_every is None:
                meta_every = getattr(config, "meta_every", None)
        if not meta_every:
            return None
        if self.config.meta_token_id is None:
            raise UserError("meta_every needs a model with a meta_token_id; this one has none.")
        if type(meta_every) is not int or meta_every < 1:
            raise UserError(
                f"meta_every is {meta_every!r}; it must be a whole number, at least 1, or 0 for none."
            )
        return meta_every

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        """The processors of transformers, after one that suppresses meta-tokens and unused rows."""
        processors = super()._get_logits_processor(*args, **kwargs)
        suppressed = never_generated(self.config)
        if suppressed:
            processors.insert(
                0, SuppressMetaToken(suppressed, device=kwargs.get("device") or self.device)
            )
        return processors

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *,
        insert_every: int | None = None,
        prompt_length: int = 0,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The inputs of one step: the text so far and its meta-tokens, without what is cached.

        Args:
            input_ids: the text so far, (batch, length).
            insert_every: insert a meta-token after so many generated tokens.
            prompt_length: text tokens of the prompt, if meta-tokens are inserted.
            cache, past_key_values: the cache, by either name.
            attention_mask, inputs_embeds: as the model's forward takes them, of the whole sequence.
            **kwargs: further inputs of the model.
        """
        cache = cache_among({"cache": cache, "past_key_values": past_key_values})
        if insert_every is None:
            inputs = kwargs | {CACHE: cache, "inputs_embeds": inputs_embeds}
            return self._prepared_inputs(input_ids, attention_mask, inputs)

        first = prompt_length + insert_every
        # For each inserted meta-token, the number of text tokens in front of it.
        text_before = [*range(first, input_ids.shape[1] + 1, insert_every)]
        cached = 0
        if cache is not None:
            cache.inserted = text_before
            cached = int(cache.get_seq_length())
        length = input_ids.shape[1] + len(text_before)
        if cached >= length:
            raise UserError(
                "the cache holds more tokens than the sequence has: give the whole sequence as input_ids. Meta-tokens "
                "cannot be inserted after learned prompts, which have no ids."
            )
        is_meta = torch.zeros(length, dtype=torch.bool, device=input_ids.device)
        is_meta[[count + earlier for earlier, count in enumerate(text_before)]] = True
        text_indices = (~is_meta).cumsum(0) - 1  # of the last text token up to each token
        ids = input_ids[:, text_indices].masked_fill(is_meta, self.config.meta_token_id)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = mask[:, text_indices]  # a meta-token that is inserted behind padding is padding
        positions = position_ids_from_mask(mask)
        axes = kwargs.get("position_ids")
        if axes is not None and axes.ndim == 3:
            # A multimodal model has three axes of positions. A meta-token moves each by one.
            positions = axes[..., text_indices] + is_meta.cumsum(0)
        unread = {
            CACHE: cache,
            "position_ids": positions[..., cached:].clone(memory_format=torch.contiguous_format),
            "next_sequence_length": length - cached,
        }
        step = self._prepared_inputs(ids, mask, kwargs | unread)
        if cached and step[PEFTS_CACHE] is not cache:
            raise UserError(
                "this base drops its cache at a length where its positions change, and meta-tokens cannot be inserted "
                "into text that is read again."
            )
        return step

    def _prepared_inputs(
        self, input_ids: Tensor, mask: Tensor | None, inputs: dict[str, Any]
    ) -> dict[str, Any]:
        """The inputs of one step as transformers prepares them.

        With a `text_window`, the mask stays as it is: one of four dimensions would replace the window. The cache gets
        the name by which PEFT looks for it among these inputs.
        """
        step = super().prepare_inputs_for_generation(input_ids, attention_mask=mask, **inputs)
        step[PEFTS_CACHE] = step.pop(CACHE, None)
        if self.config.text_window is not None:
            step["attention_mask"] = mask
        return step

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: Any,
        is_first_iteration: bool = True,
    ) -> Any:
        """Read the prompt as transformers does; with a `text_window` in chunks, so that its cache stays small.

        No meta-token is inserted into a prompt, so its chunks are read without the arguments of this class.
        """
        generation_config = copy(generation_config)
        generation_config.prefill_chunk_size = self._chunk_size(generation_config, model_kwargs)
        if generation_config.prefill_chunk_size is not None:
            model_kwargs = _without_step_arguments(model_kwargs)
        return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)

    def _chunk_size(
        self, generation_config: GenerationConfig, inputs: Mapping[str, Any]
    ) -> int | None:
        """The tokens of a prompt that are read at once; None: all.

        Chunks would not give the same where the hidden states or the weights of the whole prompt are to be returned,
        and where the rotary frequencies depend on the length of the text. transformers does not split embeddings and
        images, and older releases do not split what follows a filled cache. PEFT's learned prompts are put in front
        of the ids by the step that reads them all.
        """
        cache = inputs.get(CACHE)
        is_later_turn = cache is not None and int(cache.get_seq_length()) > 0
        unsplit = ("inputs_embeds", *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
        if (
            generation_config.output_hidden_states
            or generation_config.output_attentions
            or rotates_by_length(self.config)
            or self._has_learned_prompt()
            or any(inputs.get(name) is not None for name in unsplit)
            or (is_later_turn and not SPLITS_LATER_TURNS)
        ):
            return None
        forgets = self.config.text_window is not None and cache is not None
        return generation_config.prefill_chunk_size or (READ_AT_ONCE if forgets else None)

    def _has_learned_prompt(self) -> bool:
        """Whether PEFT generates, and puts learned embeddings in front of the ids."""
        # While PEFT generates, this is a method of its model.
        peft_model = getattr(self.prepare_inputs_for_generation, "__self__", None)
        adapter = getattr(peft_model, "active_peft_config", None)
        return bool(getattr(adapter, "is_prompt_learning", False))

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        # transformers expects the names in `prepare_inputs_for_generation`, which PEFT replaces by one with **kwargs.
        super()._validate_model_kwargs(_without_step_arguments(model_kwargs))

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        every = model_kwargs.get("insert_every")  # None: no meta-tokens are inserted
        if every is not None and generation_config.guidance_scale not in (None, 1):
            raise UserError(
                "guidance_scale does not support inserted meta-tokens: its second prompt would have none."
            )
        is_assisted = (
            generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        )
        if is_assisted and (every is not None or self.config.text_window is not None):
            raise UserError(
                "assisted generation supports neither inserted meta-tokens nor a text_window."
            )
        if every is not None:  # a static cache needs room for these, too
            max_cache_length += (max_cache_length - model_kwargs["prompt_length"]) // every + 1
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if model_kwargs.get(CACHE) is None and self._has_learned_prompt():
            raise UserError(
                "learned prompts of PEFT need a cache: call generate() with use_cache=True."
            )


def _without_step_arguments(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name not in _STEP_ARGUMENTS}


def _prompt_length(inputs: Tensor | None, kwargs: Mapping[str, Any]) -> int:
    """The text tokens of a prompt that meta-tokens are inserted after; refuses arguments that do not support them."""
    if kwargs.get("position_ids") is not None:
        raise UserError(
            "position_ids do not support inserted meta-tokens, which take positions of their own."
        )
    prompt, mask = kwargs.get("input_ids", inputs), kwargs.get("attention_mask")
    has_other_inputs = prompt is None or kwargs.get("inputs_embeds") is not None
    if has_other_inputs or (mask is not None and mask.shape != prompt.shape):
        raise UserError(
            "to insert meta-tokens, give generate() the whole sequence as input_ids, cached tokens included, and an "
            "attention_mask, if any, of the same shape."
        )
    return prompt.shape[1]
