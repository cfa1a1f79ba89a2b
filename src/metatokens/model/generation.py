"""Generation with meta-tokens inserted by policy.

A model is never trained to predict a meta-token, so it must not be asked for one: its logit is suppressed, and every
`meta_every` tokens of generated text one is inserted. The inserted token is known before the step that follows the
text token ahead of it, so both go through one forward pass. The loops of transformers (greedy, sampling, beam
search) only ever see text tokens; the meta-tokens are added where a step's inputs are prepared.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, SuppressTokensLogitsProcessor
from transformers.generation import GenerationMode

from metatokens.errors import UserError
from metatokens.model.cache import MetaTokenCache


class SuppressMetaToken(SuppressTokensLogitsProcessor):
    """A type of its own, since `generate()` drops its own processor for one of the same type that is passed in."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (batch, vocabulary), without looking the vocabulary through for the one token, as the base does."""
        return scores.index_fill(-1, self.suppress_tokens.to(scores.device), -math.inf)


class MetaTokenGenerationMixin(GenerationMixin):
    """`generate()` of a model that may have meta-tokens."""

    def generate(self, inputs: Tensor | None = None, *args: Any, meta_every: int | None = None, **kwargs: Any) -> Any:
        """`GenerationMixin.generate` with a policy for meta-tokens.

        Args:
            inputs: prompt ids, (batch, length); meta-tokens in it are used as they stand.
            *args: as in `GenerationMixin.generate`.
            meta_every: insert a meta-token after every so many generated text tokens, counted from the prompt's end
                alike for all rows; None inserts none. `max_new_tokens` counts text tokens, and the returned ids
                omit the inserted ones.
            **kwargs: as in `GenerationMixin.generate`. A cache in `past_key_values` may hold the sequence's start, if
                no meta-tokens were inserted when it was filled.

        Raises:
            UserError: if `meta_every` is below 1, the model has no meta-token, or the other arguments do not go with
                them.
        """
        if getattr(kwargs.get("past_key_values"), "inserted", 0):
            raise UserError(
                "the cache in past_key_values holds meta-tokens that generate() inserted, which input_ids lack; "
                "start from a new cache."
            )
        meta_id = self.config.meta_token_id
        if meta_id is not None:
            suppress = SuppressMetaToken([meta_id], device=self.device)
            kwargs["logits_processor"] = LogitsProcessorList([*(kwargs.get("logits_processor") or ()), suppress])
        if meta_every is not None:
            if meta_id is None:
                raise UserError("meta_every needs a model with a meta_token_id, and this one has none.")
            if meta_every < 1:
                raise UserError(f"meta_every is {meta_every}; it must be at least 1.")
            prompt, mask = kwargs.get("input_ids", inputs), kwargs.get("attention_mask")
            if prompt is None or (mask is not None and mask.shape != prompt.shape):
                raise UserError(
                    "meta_every needs the whole sequence as input_ids, what is cached included, and an attention_mask, "
                    "if any, of the same shape."
                )
            kwargs |= {"meta_every": meta_every, "prompt_length": prompt.shape[1]}
        return super().generate(inputs, *args, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *,
        meta_every: int | None = None,
        prompt_length: int = 0,
        past_key_values: MetaTokenCache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The inputs of one step: the text so far, with its meta-tokens, less what is cached."""
        if meta_every is None:
            return super().prepare_inputs_for_generation(
                input_ids, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs
            )
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        inserted = (input_ids.shape[1] - prompt_length) // meta_every
        length = input_ids.shape[1] + inserted
        is_text = torch.ones(length, dtype=torch.bool, device=input_ids.device)
        is_text[prompt_length + meta_every :: meta_every + 1] = False
        ids = input_ids.new_full((input_ids.shape[0], length), self.config.meta_token_id)
        mask = attention_mask.new_ones((input_ids.shape[0], length))
        ids[:, is_text], mask[:, is_text] = input_ids, attention_mask
        cached = 0
        if past_key_values is not None:
            cached, past_key_values.inserted = past_key_values.get_seq_length(), inserted
        return {
            "input_ids": ids[:, cached:].to(self.device),
            "attention_mask": mask.to(self.device),
            "past_key_values": past_key_values,
            "use_cache": kwargs.get("use_cache"),
            "logits_to_keep": kwargs.get("logits_to_keep", 1),
        }

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise UserError(
                f"cache_implementation {generation_config.cache_implementation!r} is not available for this model, "
                "whose cache grows; leave it out."
            )
        assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        if "meta_every" in model_kwargs and (assisted or generation_config.prefill_chunk_size):
            raise UserError("meta_every does not go with assisted generation or prefill_chunk_size.")
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache:
            model_kwargs["past_key_values"] = MetaTokenCache(self.config)
