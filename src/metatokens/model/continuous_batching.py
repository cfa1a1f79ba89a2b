"""Continuous batching, in `generate_batch` and `transformers serve`: generated text gets meta-tokens there too.

The engine reads an inserted meta-token and the token before it like the last piece of a prompt. Its cache is described
in `paged_cache.py`.
"""

from copy import copy
from math import ceil
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from metatokens.errors import UserError
from metatokens.model.mixins import add_mixin

# Each mixin goes in front of a class of transformers, whose root class Python requires here too. `Any` has that class's
# methods for mypy.
AnyManager: Any = object
AnyRequest: Any = object


class MetaManager(AnyManager):
    """Mixin for the engine: its cache has layers for the second attention, and it inserts meta-tokens.

    Attributes:
        meta_every: as in `generate`; None: none are inserted.
    """

    model: PreTrainedModel
    meta_every: int | None

    def _create_batch_processor(self) -> Any:
        model = self.model
        self.model = _with_further_layers(model)
        try:
            processor = super()._create_batch_processor()
        finally:
            self.model = model
        scheduler = processor.scheduler
        add_waiting_request = scheduler.add_waiting_request

        def add_with_meta_tokens(state: Any) -> None:
            add_mixin(state, MetaRequest)
            state.meta_token_id = model.config.meta_token_id
            state.meta_every = self.meta_every
            add_waiting_request(state)

        scheduler.add_waiting_request = add_with_meta_tokens
        return processor


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
        if not is_complete and self._is_meta_token_due():
            self.generated_tokens.append(self.meta_token_id)
            self.remaining_prefill_tokens = [token_id, self.meta_token_id]
            self.status = RequestStatus.PREFILLING
        return is_complete

    def _is_meta_token_due(self) -> bool:
        if self.meta_every is None:
            return False
        prompt_length = self._true_initial_tokens  # 0 before the engine has taken a request again
        generated_before = self.initial_tokens[prompt_length:] if prompt_length else []
        return len(self._text(generated_before + self.generated_tokens)) % self.meta_every == 0

    def create_equivalent_initial_request(self) -> Any:
        """The request that goes on from here, after its cache was given to others."""
        request = super().create_equivalent_initial_request()
        if request.max_new_tokens is not None:  # transformers subtracted inserted tokens too
            request.max_new_tokens = self.max_new_tokens - self.generated_len()
            request.__post_init__()
        return request

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
    config = model.config
    text_config = config.get_text_config()
    if (
        getattr(config, "text_window", None) is not None
        or getattr(config, "attention_scale", "") == "log_length"
    ):
        raise UserError(
            "continuous batching does not go with a text_window, or with attention_scale 'log_length'; call generate()."
        )
    if not model._supports_attention_backend:
        raise UserError(
            "continuous batching is not for this model, whose attention reads no pages."
        )
    modules = [module for module in model.modules() if getattr(module, "is_second", False)]
    if any(module.needs_all_rows for module in modules):
        raise UserError(
            "continuous batching knows no second attention of this kind; call generate()."
        )
    second = [module.config for module in modules]
    has_window = getattr(text_config, "sliding_window", None) is not None
    if second and has_window and getattr(text_config, "layer_types", None) is None:
        raise UserError(
            "continuous batching needs a block without a sliding window; call generate() instead."
        )
    page_features = find_num_key_value_heads(text_config) * find_head_dim(text_config)
    return sum(
        ceil(settings.num_attention_heads * settings.head_size / page_features)
        for settings in second
    )


def _with_further_layers(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the further layers in its configuration, for an engine that makes its cache by it."""
    count = further_layers(model)
    config = copy(model.config.get_text_config())
    config.first_further_layer = config.num_hidden_layers
    config.num_hidden_layers += count
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        config.layer_types = [*layer_types, *["full_attention"] * count]
    model = copy(model)
    model.config = config
    return model
