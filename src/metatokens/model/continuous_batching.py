"""Continuous batching, in `generate_batch` and `transformers serve`: an engine owns the batch and its paged cache.

The engine puts tokens of many requests into one row, and their keys and values into pages. The second attention module
gets layers of its own in these pages, after those of the model, so that the engine shares prefixes, copies and offloads
its entries like all others (`pages.py`).

Generated text gets meta-tokens too. The engine reads an inserted meta-token and the token before it like the last piece
of a prompt.
"""

from abc import ABC
from copy import copy
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads

from metatokens.errors import UserError
from metatokens.model.mixins import add_mixin

if TYPE_CHECKING:  # each mixin goes in front of one of these
    from transformers.generation.continuous_batching import ContinuousBatchingManager as AnyManager
    from transformers.generation.continuous_batching.requests import RequestState as AnyRequest
    from transformers.generation.continuous_batching.scheduler import Scheduler as AnyScheduler
else:
    AnyManager, AnyRequest, AnyScheduler = object, object, ABC  # the root class of each; Python requires the same here


class MetaManager(AnyManager):
    """Mixin for the engine: its cache has layers for the second attention, and it inserts meta-tokens.

    Attributes:
        meta_every: as in `generate`; None: none are inserted.
    """

    model: PreTrainedModel
    meta_every: int | None

    def _create_batch_processor(self) -> Any:
        model = self.model
        self.model = _with_layers(model, further_layers(model))
        try:
            processor = super()._create_batch_processor()
        finally:
            self.model = model
        add_mixin(processor.scheduler, MetaScheduler)
        processor.scheduler.meta_token_id, processor.scheduler.meta_every = model.config.meta_token_id, self.meta_every
        return processor


class MetaScheduler(AnyScheduler):
    """Mixin for the engine's scheduler: its requests get meta-tokens."""

    meta_token_id: int | None
    meta_every: int | None

    def add_waiting_request(self, state: Any) -> None:
        """Take a request."""
        add_mixin(state, MetaRequest)
        state.meta_token_id, state.meta_every = self.meta_token_id, self.meta_every
        super().add_waiting_request(state)


class MetaRequest(AnyRequest):
    """Mixin for a request: meta-tokens are inserted into the generated text, and the output omits them."""

    meta_token_id: int | None
    meta_every: int | None

    def generated_len(self) -> int:
        """The number of text tokens generated, since the engine took the request, or took it again."""
        return len(self._text(self.generated_tokens))

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        """Take a generated token; return whether it is the last. A meta-token after it is read like a prompt's end."""
        is_complete = super().update_and_check_completion(token_id, logprob)
        read = self.initial_tokens[self._true_initial_tokens :] if self._true_initial_tokens else []
        if not is_complete and self.meta_every and len(self._text(read + self.generated_tokens)) % self.meta_every == 0:
            self.generated_tokens.append(self.meta_token_id)
            self.remaining_prefill_tokens = [token_id, self.meta_token_id]
            self.status = RequestStatus.PREFILLING
        return is_complete

    def create_equivalent_initial_request(self) -> Any:
        """The request that goes on from here, after its cache was given to others."""
        again = super().create_equivalent_initial_request()
        if again.max_new_tokens is not None:  # transformers subtracted inserted tokens too
            again.max_new_tokens = self.max_new_tokens - self.generated_len()
            again.__post_init__()
        return again

    def to_generation_output(self) -> Any:
        """The output, without inserted meta-tokens."""
        output = super().to_generation_output()
        output.generated_tokens = self._text(output.generated_tokens)
        return output

    def _text(self, tokens: list[int]) -> list[int]:
        return [token for token in tokens if token != self.meta_token_id]


def further_layers(model: PreTrainedModel) -> int:
    """How many further layers of an engine's cache the second attention of a model needs.

    Raises:
        UserError: if the model does something that a paged cache does not support.
    """
    config, text = model.config, model.config.get_text_config()
    if getattr(config, "text_window", None) is not None or getattr(config, "attention_scale", "") == "log_length":
        raise UserError(
            "continuous batching does not go with a text_window, or with attention_scale 'log_length'; call generate()."
        )
    if not model._supports_attention_backend:
        raise UserError(f"continuous batching is not for a {type(model).__name__}, whose attention reads no pages.")
    second = [module.config for module in model.modules() if getattr(module, "is_second", False)]
    if second and getattr(text, "layer_types", None) is None and getattr(text, "sliding_window", None) is not None:
        raise UserError("continuous batching needs a block without a sliding window; call generate() instead.")
    room = find_num_key_value_heads(text) * find_head_dim(text)
    return sum(-(-one.num_attention_heads * one.head_size // room) for one in second)


def _with_layers(model: PreTrainedModel, further: int) -> PreTrainedModel:
    """The model with so many further layers in its configuration, for an engine that makes its cache by it."""
    model, config = copy(model), copy(model.config.get_text_config())
    config.first_further_layer = config.num_hidden_layers
    config.num_hidden_layers += further
    if (types := getattr(config, "layer_types", None)) is not None:
        config.layer_types = [*types, *["full_attention"] * further]
    model.config = config
    return model
