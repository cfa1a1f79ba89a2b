"""Generation with inserted meta-tokens.

A model is never trained to predict a meta-token, so its logit is suppressed, and one is inserted after every
`meta_every` tokens of generated text. An inserted token and the text token before it go through one forward pass. The
loops of transformers (greedy, sampling, beam search) only see text tokens; the meta-tokens are added where the inputs
of a step are prepared.
"""

import math
from collections.abc import Sequence
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

from metatokens.errors import UserError
from metatokens.model.cache import InsertedTokens, give, size_of
from metatokens.model.configuration import MetaGPT2Config, never_generated
from metatokens.model.continuous_batching import MetaManager, further_layers
from metatokens.model.positions import check_length, check_positions, position_ids_from_mask, steady_length
from metatokens.model.releases import CACHE, PEFTS_CACHE, cache_among, check_learned_prompts, with_cache_renamed

READ_AT_ONCE = 512  # tokens of a prompt in one forward pass of a model with a `text_window`
# The inputs of a step that are split if a prompt is read in chunks.
_SPLIT = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "meta_token_mask", "meta_positions")


def register_architecture(architecture: str, model: type) -> None:
    """Make a class an attribute of the module transformers, where its server and TRL look an architecture up.

    Two module objects of that name exist, so it is set on their common class.
    """
    setattr(type(transformers), architecture, model)


def keep_meta_every(generation_config: GenerationConfig | None) -> None:
    """Have transformers load `meta_every` again; it drops custom settings derived from a model's configuration."""
    if generation_config is not None and getattr(generation_config, "meta_every", None) is not None:
        generation_config._from_model_config = False


def _same_places(places: Sequence[int], ids: Tensor) -> Tensor:
    """Places of meta-tokens that are equal in all rows, (batch, places), which spare the model a device sync."""
    return torch.tensor(places, dtype=torch.int64, device=ids.device).expand(len(ids), -1)


class SuppressMetaToken(SuppressTokensLogitsProcessor):
    """Suppress tokens, in continuous batching too."""

    supports_continuous_batching = True

    def __init__(self, tokens: Sequence[int], device: Any = "cpu"):
        super().__init__(tokens, device)
        self.last = max(tokens)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (batch, vocabulary); unlike the base, without a search through the vocabulary."""
        tokens = self.suppress_tokens.to(scores.device)
        if self.last >= scores.shape[-1]:  # an assistant's, which may have no such tokens
            tokens = tokens[tokens < scores.shape[-1]]
        return scores.index_fill(-1, tokens, -math.inf)


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
        is_argument, meta_every = meta_every is not None, self._checked_every(meta_every, generation_config)
        kwargs = with_cache_renamed(kwargs)
        if meta_every is not None or getattr(kwargs.get(CACHE), "inserted", None):
            if self.training and not is_argument:
                raise UserError(
                    "a setting inserts meta-tokens in training mode: a trainer that generates, such as TRL's GRPO, "
                    "would learn from ids without them. Put meta-tokens into the prompts, or call model.eval() first."
                )
            if kwargs.get("position_ids") is not None:
                raise UserError("position_ids do not support inserted meta-tokens, which take positions of their own.")
            prompt, mask = kwargs.get("input_ids", inputs), kwargs.get("attention_mask")
            has_embeddings = kwargs.keys() & {"inputs_embeds", "meta_token_mask"}
            if prompt is None or has_embeddings or (mask is not None and mask.shape != prompt.shape):
                raise UserError(
                    "to insert meta-tokens, or to use a cache that contains inserted ones, give generate() the whole "
                    "sequence as input_ids, cached tokens included, and an attention_mask, if any, of the same shape."
                )
            cache = kwargs.get(CACHE)
            if not isinstance(cache, Cache | None):
                raise UserError(f"{CACHE} is a {type(cache).__name__}; meta_every needs a cache.")
            # Under another name, since transformers would take `meta_every` for a field of its configuration.
            kwargs |= {"insert_every": meta_every, "prompt_length": prompt.shape[1]}
        # A processor of the caller's may choose a meta-token, and an assistant would be given this argument too.
        others = ("logits_processor", "custom_generate", "assistant_model")
        if isinstance(self.config, MetaGPT2Config) and not (args or any(kwargs.get(name) for name in others)):
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
        engine = copy(continuous_batching_config) or ContinuousBatchingConfig()
        meta_every = self._checked_every(None, generation_config)
        if further_layers(self):
            engine.max_blocks_per_request = 0  # no kernel can read the second attention's pages
        if meta_every is not None:
            engine.use_async_batching = False  # its next batch would begin before it is known what is inserted
        manager = super().init_continuous_batching(generation_config, engine, *args, **kwargs)
        give(manager, MetaManager)
        manager.meta_every = meta_every
        return manager

    def _checked_every(self, meta_every: int | None, generation_config: GenerationConfig | None) -> int | None:
        """The `meta_every` that holds: what is given, or what a generation configuration has; None for 0."""
        for config in (generation_config, self.generation_config):
            meta_every = getattr(config, "meta_every", None) if meta_every is None else meta_every
        if meta_every is None or meta_every == 0:
            return None
        if self.config.meta_token_id is None:
            raise UserError("meta_every needs a model with a meta_token_id; this one has none.")
        if type(meta_every) is not int or meta_every < 1:
            raise UserError(f"meta_every is {meta_every!r}; it must be a whole number, at least 1, or 0 for none.")
        return meta_every

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        """The processors of transformers, after one that suppresses meta-tokens and unused rows."""
        processors = super()._get_logits_processor(*args, **kwargs)
        if suppressed := never_generated(self.config):
            processors.insert(0, SuppressMetaToken(suppressed, device=kwargs.get("device") or self.device))
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
        """The inputs of one step: the text so far and its meta-tokens, without what is cached."""
        cache = cache_among({"cache": cache, "past_key_values": past_key_values})
        if prompt_length is not None:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            return self._inputs_with_inserted(
                input_ids,
                mask,
                cache,
                kwargs,
                every=insert_every,
                prompt_length=prompt_length,
                chooses_text=chooses_text,
            )
        given = {CACHE: cache, "inputs_embeds": inputs_embeds}
        step = self._prepared_inputs(input_ids, attention_mask, given | kwargs)
        if chooses_text and kwargs.get("next_sequence_length") == 1 and not kwargs.get("is_first_iteration"):
            step["meta_positions"] = _same_places((), step["input_ids"])
        if meta_token_mask is not None:
            read = step["input_ids"] if step.get("inputs_embeds") is None else step["inputs_embeds"]
            step["meta_token_mask"] = meta_token_mask[:, -read.shape[1] :]
        return step

    def _prepared_inputs(self, input_ids: Tensor, mask: Tensor | None, given: dict[str, Any]) -> dict[str, Any]:
        """The inputs of one step as transformers prepares them.

        With a `text_window`, the mask stays as it is: one of four dimensions would replace the window. The cache gets
        the name by which PEFT looks for it among these inputs.
        """
        step = super().prepare_inputs_for_generation(input_ids, attention_mask=mask, **given)
        step[PEFTS_CACHE] = step.pop(CACHE, None)
        return step if self.config.text_window is None else step | {"attention_mask": mask}

    def _inputs_with_inserted(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        cache: Any,
        given: dict[str, Any],
        *,
        every: int | None,
        prompt_length: int,
        chooses_text: bool,
    ) -> dict[str, Any]:
        """The inputs of one step, with the meta-tokens that were inserted before and those that are inserted now."""
        text = input_ids.shape[1]
        inserted = [ids for ids in getattr(cache, "inserted", ()) if ids <= prompt_length]
        if every is not None:
            inserted += range(prompt_length + every, text + 1, every)
        length = text + len(inserted)
        is_text = torch.ones(length, dtype=torch.bool, device=input_ids.device)
        is_text[[ids + number for number, ids in enumerate(inserted)]] = False
        ids = input_ids.new_full((input_ids.shape[0], length), self.config.meta_token_id)
        mask = attention_mask.new_ones((input_ids.shape[0], length))
        ids[:, is_text], mask[:, is_text] = input_ids, attention_mask
        mask[:, ~is_text] = attention_mask[:, [ids - 1 for ids in inserted]]  # behind padding they are padding
        cached = 0
        if cache is not None:
            cached, room = int(cache.get_seq_length()), size_of(cache)
            if room is not None and self.config.text_window is None and length > room:
                raise UserError(f"a cache of {room} tokens has no room for {length}, inserted meta-tokens included.")
            give(cache, InsertedTokens)
            cache.inserted = inserted
            if given.get("is_first_iteration"):
                cache.hide(mask)
        if cached >= length:
            raise UserError(
                f"the cache holds {cached} tokens and the sequence has {length}: give the whole sequence as input_ids. "
                "Meta-tokens cannot be inserted after learned prompts, which have no ids."
            )
        positions, axes = position_ids_from_mask(mask), given.get("position_ids")
        check_positions(self.config, length, positions)
        if axes is not None and axes.ndim == 3:  # a multimodal model's: a meta-token moves all axes by one
            positions = axes[..., is_text.cumsum(0) - 1] + (~is_text).cumsum(0)
        own = {
            CACHE: cache,
            "position_ids": positions[..., cached:].clone(memory_format=torch.contiguous_format),
            "next_sequence_length": length - cached,
        }
        step = self._prepared_inputs(ids, mask, given | own)
        if cached and step[PEFTS_CACHE] is not cache:
            raise UserError(
                f"this base drops its cache at {length} tokens, where its positions change, and meta-tokens cannot be "
                "inserted into text that is read again."
            )
        places = [ids + number - cached for number, ids in enumerate(inserted)]
        new = [place for place in places if place >= 0]
        if chooses_text and cached - (len(places) - len(new)) >= prompt_length:  # the whole prompt was read
            step["meta_positions"] = _same_places(new, step["input_ids"])
        return step

    def _prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: Any, is_first_iteration: bool = True
    ) -> Any:
        """Read the prompt, in chunks if `prefill_chunk_size` or a `text_window` asks for them.

        A window asks for none where they would have several rotary frequencies.

        Into a cache that grows, this class reads the chunks itself: transformers would split the ids, in which inserted
        meta-tokens are missing, and its release 5.19 would read cached ids again.
        """
        size, cache = generation_config.prefill_chunk_size, model_kwargs.get(CACHE)
        embeddings = model_kwargs.get("inputs_embeds") if is_first_iteration else None
        length, mask = (input_ids if embeddings is None else embeddings).shape[1], model_kwargs.get("attention_mask")
        seen = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
        total = max(length, seen or 0) + len(getattr(cache, "inserted", ()))
        steady = steady_length(self.config)
        is_steady = steady is None or total <= steady
        is_shown = generation_config.output_hidden_states or generation_config.output_attentions
        if size is None and self.config.text_window is not None and not is_shown and is_steady:
            size = READ_AT_ONCE
        is_static = cache is not None and cache.is_compileable and self.config.text_window is None
        is_placed = "prompt_length" in model_kwargs or model_kwargs.get("meta_token_mask") is not None
        if size is not None and is_static and is_placed:
            raise UserError(
                "prefill_chunk_size and a cache of a fixed size do not go together with inserted meta-tokens or a "
                "meta_token_mask: leave one of the two out."
            )
        if size is None or cache is None or is_static:
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        if embeddings is not None or seen == length:  # cached tokens are given as well
            length -= int(cache.get_seq_length())
        own: Any = {"next_sequence_length": length, "is_first_iteration": is_first_iteration}
        step = self.prepare_inputs_for_generation(input_ids, **own, **model_kwargs)
        if step[PEFTS_CACHE] is not cache:  # Phi-3 begins anew where its positions change
            generation_config = copy(generation_config)
            generation_config.prefill_chunk_size = None
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        if not is_steady and size < length:
            raise UserError(
                f"the rotary frequencies of this model depend on the length of a text of more than {steady} tokens, "
                f"and a prompt of {length} in chunks of {size} would have several: leave prefill_chunk_size out."
            )
        if any(isinstance(value, Tensor) for name, value in step.items() if name not in _SPLIT):  # images, say
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        return self._read_in_chunks(step, size)

    def _read_in_chunks(self, step: dict[str, Any], size: int) -> Any:
        """Run the model on the inputs of one step, `size` tokens at a time; return the last output."""
        split = {name: one for name in _SPLIT if (one := step.pop(name, None)) is not None}
        length = next(one.shape[1] for name, one in split.items() if name in ("input_ids", "inputs_embeds"))
        mask = split.pop("attention_mask", None)
        for end in range(size, length + size, size):
            chunk = {}
            for name, one in split.items():  # positions may have three axes; length is the last
                chunk[name] = one[:, end - size : end] if name == "inputs_embeds" else one[..., end - size : end]
            if mask is not None:
                chunk["attention_mask"] = mask[:, : mask.shape[1] - max(length - end, 0)]
            outputs = self(**chunk, **step)
        return outputs

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        # transformers expects the names in `prepare_inputs_for_generation`, which PEFT replaces by one with **kwargs.
        own = ("insert_every", "prompt_length", "chooses_text")
        super()._validate_model_kwargs({name: value for name, value in model_kwargs.items() if name not in own})

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        if (mask := model_kwargs.get("meta_token_mask")) is not None:  # generated tokens are text
            new = kwargs.get("num_new_tokens", 1)
            model_kwargs["meta_token_mask"] = torch.nn.functional.pad(mask, (0, new))
        return model_kwargs

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        if "prompt_length" in model_kwargs and generation_mode == GenerationMode.ASSISTED_GENERATION:
            raise UserError("assisted generation does not support inserted meta-tokens.")
        if "prompt_length" in model_kwargs and generation_config.guidance_scale not in (None, 1):
            raise UserError("guidance_scale does not support inserted meta-tokens: its second prompt would have none.")
        if self.config.text_window is not None and generation_config.assistant_early_exit:
            raise UserError("assistant_early_exit does not support a text_window.")
        inserted = 0
        if every := model_kwargs.get("insert_every"):  # a static cache needs room for these, too
            inserted = (max_cache_length - model_kwargs["prompt_length"]) // every + 1
        is_static = generation_config.cache_implementation == "static"
        if is_static and isinstance(self.config, MetaGPT2Config):
            check_length(self.config, max_cache_length + inserted)
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length + inserted
        )
        cache = model_kwargs.get(CACHE)
        check_learned_prompts(self.prepare_inputs_for_generation, self.device, uses_cache=cache is not None)
        if self.config.text_window is not None and generation_config.is_assistant and cache is not None:
            cache.keeps_all = True  # tokens that the other model does not take are removed from it
