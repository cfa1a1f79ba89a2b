"""Generation with inserted meta-tokens.

A model is never trained to predict a meta-token, so its logit is suppressed, and one is inserted after every
`meta_every` tokens of generated text. An inserted token and the text token before it go through one forward pass. The
loops of transformers (greedy, sampling, beam search) only see text tokens; the meta-tokens are added where the inputs
of a step are prepared.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    Cache,
    ContinuousBatchingConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
)
from transformers.generation import GenerationMode

from metatokens.errors import UserError
from metatokens.model.cache import InsertedTokens
from metatokens.model.configuration import MetaGPT2Config, never_generated
from metatokens.model.continuous_batching import MetaManager, further_layers
from metatokens.model.mixins import add_mixin
from metatokens.model.positions import (
    check_length,
    check_positions,
    position_ids_from_mask,
    steady_length,
)
from metatokens.model.releases import (
    CACHE,
    PEFTS_CACHE,
    cache_among,
    check_learned_prompts,
    with_cache_renamed,
)

READ_AT_ONCE = 512  # tokens of a prompt in one forward pass of a model with a `text_window`
# The inputs of a step that are split if a prompt is read in chunks.
_SPLIT = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "meta_token_mask",
    "meta_positions",
)
# Arguments of a step that this module adds. They have names of their own, since transformers would take `meta_every`
# for a field of its configuration.
_STEP_ARGUMENTS = ("insert_every", "prompt_length", "chooses_text")


def register_architecture(architecture: str, model: type) -> None:
    """Make a class an attribute of the module transformers, where its server and TRL look an architecture up.

    Two module objects of that name exist, so it is set on their common class.
    """
    setattr(type(transformers), architecture, model)


class SuppressMetaToken(SuppressTokensLogitsProcessor):
    """Suppress tokens, in continuous batching too."""

    supports_continuous_batching = True

    def __init__(self, tokens: Sequence[int], device: Any = "cpu"):
        super().__init__(tokens, device)
        self.last = max(tokens)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (batch, vocabulary); unlike the base, without a search through the vocabulary."""
        tokens = self.suppress_tokens.to(scores.device)
        vocabulary = scores.shape[-1]
        if self.last >= vocabulary:  # an assistant's, which may have no such tokens
            tokens = tokens[tokens < vocabulary]
        return scores.index_fill(-1, tokens, -math.inf)


class Interleaved(NamedTuple):
    """A batch of text with inserted meta-tokens, which are at the same indices in all rows.

    Attributes:
        ids: (batch, length).
        mask: (batch, length); a meta-token that is inserted behind padding is padding.
        text_before: for each inserted meta-token, the number of text tokens in front of it.
        meta_indices: where meta-tokens were inserted.
        text_indices: (length,), for each token the last text token up to it.
    """

    ids: Tensor
    mask: Tensor
    text_before: list[int]
    meta_indices: list[int]
    text_indices: Tensor

    @classmethod
    def of(
        cls, text: Tensor, mask: Tensor, text_before: list[int], meta_token_id: int
    ) -> "Interleaved":
        """Insert a meta-token behind each of these numbers of text tokens, ascending."""
        meta_indices = [count + earlier for earlier, count in enumerate(text_before)]
        length = text.shape[1] + len(meta_indices)
        is_meta = torch.zeros(length, dtype=torch.bool, device=text.device)
        is_meta[meta_indices] = True
        text_indices = (~is_meta).cumsum(0) - 1
        ids = text[:, text_indices].masked_fill(is_meta, meta_token_id)
        return cls(ids, mask[:, text_indices], text_before, meta_indices, text_indices)


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
                sequence, whose ids are given as well; meta-tokens inserted when it was filled are put back into them.

        Raises:
            UserError: if `meta_every` is below 0, the model has no meta-token, or another argument does not support
                inserted meta-tokens; if a configuration has `meta_every` and the model is in training mode.
        """
        insert_every = self._insert_every(meta_every, generation_config)
        kwargs = with_cache_renamed(kwargs)
        if insert_every is not None or getattr(kwargs.get(CACHE), "inserted", None):
            if self.training and meta_every is None:
                raise UserError(
                    "a setting inserts meta-tokens in training mode: a trainer that generates, such as TRL's GRPO, "
                    "would learn from ids without them. Put meta-tokens into the prompts, or call model.eval() first."
                )
            kwargs |= {
                "insert_every": insert_every,
                "prompt_length": _prompt_length(inputs, kwargs),
            }
        # A processor of the caller's may choose a meta-token, and an assistant would be given this argument too.
        may_choose_meta_tokens = args or any(
            kwargs.get(name) for name in ("logits_processor", "custom_generate", "assistant_model")
        )
        if isinstance(self.config, MetaGPT2Config) and not may_choose_meta_tokens:
            kwargs["chooses_text"] = True
        return super().generate(inputs, generation_config, *args, **kwargs)

    def generate_batch(
        self,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        *args: Any,
        meta_every: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """`generate_batch` of transformers, with inserted meta-tokens; arguments are those of `generate`, and its own.

        Args:
            inputs: the ids of each prompt, which may contain meta-tokens.
            generation_config: as in `generate`.
            *args: as in transformers.
            meta_every: as in `generate`.
            **kwargs: as in transformers.
        """
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
        for config in (generation_config, self.generation_config):
            if meta_every is None:
                meta_every = getattr(config, "meta_every", None)
        if meta_every is None or meta_every == 0:
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
        prompt_length: int | None = None,
        chooses_text: bool = False,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        meta_token_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The inputs of one step: the text so far and its meta-tokens, without what is cached.

        Args:
            input_ids: the text so far, (batch, length).
            insert_every: insert a meta-token after so many generated tokens.
            prompt_length: text tokens of the prompt, if meta-tokens are inserted now or were inserted before.
            chooses_text: whether no generated token can be a meta-token.
            cache, past_key_values: the cache, by either name.
            attention_mask, inputs_embeds, meta_token_mask: as the model's forward takes them, of the whole sequence.
            **kwargs: further inputs of the model.
        """
        cache = cache_among({"cache": cache, "past_key_values": past_key_values})
        if prompt_length is not None:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            text_before = _inserted_behind(cache, prompt_length, insert_every, input_ids.shape[1])
            sequence = Interleaved.of(input_ids, mask, text_before, self.config.meta_token_id)
            return self._inputs_of(
                sequence, cache, kwargs, text_after=prompt_length if chooses_text else None
            )
        step = self._prepared_inputs(
            input_ids, attention_mask, kwargs | {CACHE: cache, "inputs_embeds": inputs_embeds}
        )
        if (
            chooses_text
            and kwargs.get("next_sequence_length") == 1
            and not kwargs.get("is_first_iteration")
        ):
            step["meta_positions"] = _in_all_rows([], step["input_ids"])
        if meta_token_mask is not None:
            unread = (
                step["input_ids"] if step.get("inputs_embeds") is None else step["inputs_embeds"]
            )
            step["meta_token_mask"] = meta_token_mask[:, -unread.shape[1] :]
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

    def _inputs_of(
        self,
        sequence: Interleaved,
        cache: Any,
        inputs: dict[str, Any],
        *,
        text_after: int | None,
    ) -> dict[str, Any]:
        """The inputs of one step with inserted meta-tokens; the cache is told of them.

        Args:
            sequence: the whole sequence.
            cache: what was read of the sequence.
            inputs: further inputs of the model.
            text_after: all text behind so many text tokens is known to have no other meta-tokens; None: no text is.
        """
        length = sequence.ids.shape[1]
        cached = self._tell_cache(cache, sequence, inputs)
        if cached >= length:
            raise UserError(
                f"the cache holds {cached} tokens and the sequence has {length}: give the whole sequence as input_ids. "
                "Meta-tokens cannot be inserted after learned prompts, which have no ids."
            )
        positions = self._positions_of(sequence, inputs.get("position_ids"))
        unread = {
            CACHE: cache,
            "position_ids": positions[..., cached:].clone(memory_format=torch.contiguous_format),
            "next_sequence_length": length - cached,
        }
        step = self._prepared_inputs(sequence.ids, sequence.mask, inputs | unread)
        if cached and step[PEFTS_CACHE] is not cache:
            raise UserError(
                f"this base drops its cache at {length} tokens, where its positions change, and meta-tokens cannot be "
                "inserted into text that is read again."
            )
        new = [index - cached for index in sequence.meta_indices if index >= cached]
        cached_text = cached - (len(sequence.meta_indices) - len(new))
        if text_after is not None and cached_text >= text_after:
            step["meta_positions"] = _in_all_rows(new, step["input_ids"])
        return step

    def _tell_cache(self, cache: Any, sequence: Interleaved, inputs: dict[str, Any]) -> int:
        """Record in a cache where meta-tokens are inserted; return how many tokens it holds."""
        if cache is None:
            return 0
        add_mixin(cache, InsertedTokens)
        cache.inserted = sequence.text_before
        if inputs.get("is_first_iteration"):
            cache.hide(sequence.mask)
        return int(cache.get_seq_length())

    def _positions_of(self, sequence: Interleaved, axes: Tensor | None) -> Tensor:
        """The positions of a sequence; of a multimodal model (3, batch, length), from those of its text, `axes`."""
        positions = position_ids_from_mask(sequence.mask)
        length = positions.shape[1]
        check_positions(self.config, length, positions)
        if axes is None or axes.ndim != 3:
            return positions
        text_indices = sequence.text_indices
        earlier_meta_tokens = torch.arange(length, device=axes.device) - text_indices
        return axes[..., text_indices] + earlier_meta_tokens  # a meta-token moves all axes by one

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: Any,
        is_first_iteration: bool = True,
    ) -> Any:
        """Read the prompt, in chunks if `prefill_chunk_size` or a `text_window` asks for them.

        Into a cache that grows, this class reads the chunks itself: transformers would split the ids, in which inserted
        meta-tokens are missing, and its release 5.19 would read cached ids again.
        """
        cache, mask = model_kwargs.get(CACHE), model_kwargs.get("attention_mask")
        embeddings = model_kwargs.get("inputs_embeds") if is_first_iteration else None
        length = (input_ids if embeddings is None else embeddings).shape[1]
        mask_length = (
            getattr(generation_config, "_mask_length", 0) if mask is None else mask.shape[1]
        )
        text_length = max(length, mask_length) + len(getattr(cache, "inserted", ()))
        steady = steady_length(self.config)
        is_steady = steady is None or text_length <= steady
        size = self._chunk_size(generation_config, model_kwargs, is_steady=is_steady)
        if size is None:
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        if embeddings is not None or mask_length == length:  # cached tokens are given as well
            length -= int(cache.get_seq_length())
        unread: Any = {"next_sequence_length": length, "is_first_iteration": is_first_iteration}
        step = self.prepare_inputs_for_generation(input_ids, **unread, **model_kwargs)
        if step[PEFTS_CACHE] is not cache:  # Phi-3 begins anew where its positions change
            generation_config = copy(generation_config)
            generation_config.prefill_chunk_size = None
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        if not is_steady and size < length:
            raise UserError(
                f"the rotary frequencies of this model depend on the length of a text of more than {steady} tokens, "
                f"and a prompt of {length} in chunks of {size} would have several: leave prefill_chunk_size out."
            )
        # Images, say.
        if any(isinstance(value, Tensor) for name, value in step.items() if name not in _SPLIT):
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        return self._read_in_chunks(step, size)

    def _chunk_size(
        self, generation_config: GenerationConfig, inputs: Mapping[str, Any], *, is_steady: bool
    ) -> int | None:
        """How many tokens of a prompt this class reads at once; None: transformers reads the prompt.

        A `text_window` asks for chunks, except where the hidden states or the weights of the whole prompt are to be
        returned, or where chunks would have several rotary frequencies.
        """
        size, cache = generation_config.prefill_chunk_size, inputs.get(CACHE)
        has_window = self.config.text_window is not None
        returns_all = generation_config.output_hidden_states or generation_config.output_attentions
        if size is None and has_window and is_steady and not returns_all:
            size = READ_AT_ONCE
        if size is None or cache is None:
            return None
        if has_window or not cache.is_compileable:
            return size
        if "prompt_length" in inputs or inputs.get("meta_token_mask") is not None:
            raise UserError(
                "prefill_chunk_size and a cache of a fixed size do not go together with inserted meta-tokens or a "
                "meta_token_mask: leave one of the two out."
            )
        return None

    def _read_in_chunks(self, step: dict[str, Any], size: int) -> Any:
        """Run the model on the inputs of one step, `size` tokens at a time; return the last output."""
        shared = {name: value for name, value in step.items() if name not in _SPLIT}
        split = {name: step[name] for name in _SPLIT if step.get(name) is not None}
        mask = split.pop("attention_mask", None)
        embeddings = split.pop("inputs_embeds", None)
        length = split["input_ids"].shape[1] if embeddings is None else embeddings.shape[1]
        for start in range(0, length, size):
            end = min(start + size, length)
            # Positions may have three axes.
            chunk = {name: value[..., start:end] for name, value in split.items()}
            if embeddings is not None:
                chunk["inputs_embeds"] = embeddings[:, start:end]
            if mask is not None:
                chunk["attention_mask"] = mask[:, : mask.shape[1] - (length - end)]
            outputs = self(**chunk, **shared)
        return outputs

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        # transformers expects the names in `prepare_inputs_for_generation`, which PEFT replaces by one with **kwargs.
        theirs = {
            name: value for name, value in model_kwargs.items() if name not in _STEP_ARGUMENTS
        }
        super()._validate_model_kwargs(theirs)

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, **kwargs
        )
        mask = model_kwargs.get("meta_token_mask")
        if mask is not None:  # generated tokens are text
            model_kwargs["meta_token_mask"] = pad(mask, (0, kwargs.get("num_new_tokens", 1)))
        return model_kwargs

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        has_window = self.config.text_window is not None
        prompt_length: Any = model_kwargs.get("prompt_length")  # None: no meta-tokens are inserted
        if prompt_length is not None and generation_mode == GenerationMode.ASSISTED_GENERATION:
            raise UserError("assisted generation does not support inserted meta-tokens.")
        if prompt_length is not None and generation_config.guidance_scale not in (None, 1):
            raise UserError(
                "guidance_scale does not support inserted meta-tokens: its second prompt would have none."
            )
        if has_window and generation_config.assistant_early_exit:
            raise UserError("assistant_early_exit does not support a text_window.")
        every = model_kwargs.get("insert_every")
        if every is not None:  # a static cache needs room for these, too
            max_cache_length += (max_cache_length - prompt_length) // every + 1
        if generation_config.cache_implementation == "static" and isinstance(
            self.config, MetaGPT2Config
        ):
            check_length(self.config, max_cache_length)
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        cache = model_kwargs.get(CACHE)
        check_learned_prompts(
            self.prepare_inputs_for_generation, self.device, uses_cache=cache is not None
        )
        if has_window and generation_config.is_assistant and cache is not None:
            cache.keeps_all = True  # tokens that the other model does not take are removed from it


def _prompt_length(inputs: Tensor | None, kwargs: Mapping[str, Any]) -> int:
    """The text tokens of a prompt that meta-tokens are inserted after; refuses arguments that do not support them."""
    if kwargs.get("position_ids") is not None:
        raise UserError(
            "position_ids do not support inserted meta-tokens, which take positions of their own."
        )
    prompt, mask = kwargs.get("input_ids", inputs), kwargs.get("attention_mask")
    has_other_inputs = prompt is None or "inputs_embeds" in kwargs or "meta_token_mask" in kwargs
    if has_other_inputs or (mask is not None and mask.shape != prompt.shape):
        raise UserError(
            "to insert meta-tokens, or to use a cache that contains inserted ones, give generate() the whole "
            "sequence as input_ids, cached tokens included, and an attention_mask, if any, of the same shape."
        )
    return prompt.shape[1]


def _inserted_behind(
    cache: Any, prompt_length: int, every: int | None, text_length: int
) -> list[int]:
    """The numbers of text tokens in front of each meta-token that was inserted before or is inserted now.

    A cache knows those that were inserted into the prompt, when it was filled.
    """
    before = [count for count in getattr(cache, "inserted", ()) if count <= prompt_length]
    if every is None:
        return before
    return [*before, *range(prompt_length + every, text_length + 1, every)]


def _in_all_rows(indices: Sequence[int], ids: Tensor) -> Tensor:
    """Indices of meta-tokens that are equal in all rows, (batch, indices), which spare the model a device sync."""
    return torch.tensor(indices, dtype=torch.int64, device=ids.device).expand(len(ids), -1)
