"""The language model: GPT-2 with meta-attention (paper, section 3 and Appendix A).

- A pre-norm decoder: LayerNorm before each module, exact GELU, a head tied to the embedding and without bias. Where the
  paper's text and the code base that it names differ, this model follows the code base.
- Meta-attention between causal attention and the feed-forward layer: meta-tokens attend to meta-tokens alone, and only
  their rows are computed (`attention.py`, `rows.py`).
- Two controls: `second_attention="causal"` has the same parameters but attends over all positions; `"none"` is GPT-2.
- Rotary positions, in all layers or in some; learned positions; or none (`positions.py`).
- Meta-tokens are never predicted: they count for no loss and are never generated (`labels.py`, `generation.py`).
- One place that decides who sees whom (`visibility.py`): padding, packed rows, masks, a text window, caches.
- A key-value cache with a second store for the second attention (`cache.py`), which may forget text (`forgetting.py`).
- The conventions of transformers: padding and masks, attention functions, static caches, `torch.compile`, gradient
  checkpointing, layers on several devices.

One block; x is the residual stream, (batch, length, width):

    x
    |----------> LayerNorm -> causal attention -----------.    softmax(Q K^T / sqrt(d) + M) V
    + <---------------------------------------------------'
    |-- gather -> LayerNorm -> meta-attention -> scatter --.    softmax(Q K^T / sqrt(d) + M + P) V
    + <---------------------------------------------------'
    |----------> LayerNorm -> feed-forward layer ----------.    GELU(x W_1) W_2
    + <---------------------------------------------------'
    x
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils.generic import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from metatokens.errors import UserError
from metatokens.model.attention import (
    Attention,
    AttentionKwargs,
    CausalAttention,
    MetaAttention,
    MetaAttentionKwargs,
)
from metatokens.model.cache import add_second_stores
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.generation import MetaTokenGenerationMixin, register_architecture
from metatokens.model.labels import scored_labels, without_meta_tokens
from metatokens.model.linear import linear, residual_linear
from metatokens.model.paged_cache import engine_of
from metatokens.model.positions import Rotary, packed_sequences
from metatokens.model.releases import CACHE, CACHE_NAMES, cache_among
from metatokens.model.rows import minimum_rows
from metatokens.model.visibility import (
    MetaAttentionForm,
    Visibility,
    meta_attention_form,
    meta_tokens,
)
from metatokens.model.vocabulary import MetaVocabulary, check_ids


def layer_norm(config: MetaGPT2Config) -> nn.LayerNorm:
    """A LayerNorm over the residual stream."""
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon, bias=config.bias)


class FeedForward(nn.Module):
    """GELU(x W_1) W_2, for each position separately."""

    def __init__(self, config: MetaGPT2Config):
        super().__init__()
        assert config.intermediate_size is not None  # the configuration fills it in
        self.in_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.out_proj = residual_linear(
            config.intermediate_size, config.hidden_size, bias=config.bias
        )
        # GPT-2's approximate GELU: one operation here, eight in transformers.
        is_gelu_new = config.activation == "gelu_new"
        self.activation = nn.GELU(approximate="tanh") if is_gelu_new else ACT2FN[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        return linear(self.out_proj, self.activation(linear(self.in_proj, x)))


class MetaGPT2Block(GradientCheckpointingLayer):
    """Causal attention, then the second attention, then the feed-forward layer, each with its LayerNorm."""

    def __init__(self, config: MetaGPT2Config, layer_index: int):
        super().__init__()
        self.attention_norm = layer_norm(config)
        self.attention = CausalAttention(config, layer_index)
        self.second_attention: MetaAttention | CausalAttention | None = None
        if config.second_attention != "none":
            self.second_norm = layer_norm(config)
        further_layer = config.num_hidden_layers + layer_index  # of the cache
        if config.second_attention == "meta":
            self.second_attention = MetaAttention(config, layer_index, further_layer)
        elif config.second_attention == "causal":
            self.second_attention = CausalAttention(config, further_layer, second=True)
        for module in (self.attention, self.second_attention):
            if module is not None:
                module.is_rotated = config.rope_layers is None or layer_index in config.rope_layers
        self.mlp_norm = layer_norm(config)
        self.mlp = FeedForward(config)

    # transformers' gradient checkpointing and accelerate look for the cache by the name of its argument, `CACHE`.
    def forward(
        self,
        x: Tensor,
        *,
        causal: AttentionKwargs,
        meta: MetaAttentionKwargs | None,
        **named: Cache | None,
    ) -> Tensor:
        """The residual stream (batch, length, width) after this block; `meta` is None where there is no meta-token."""
        cache = named[CACHE]
        # softmax(Q K^T / sqrt(d) + M) V
        x = x + self.attention(self.attention_norm(x), cache=cache, **causal)[0]
        if isinstance(self.second_attention, CausalAttention):
            x = x + self.second_attention(self.second_norm(x), cache=cache, **causal)[0]
        elif self.second_attention is not None and meta is not None:
            # softmax(Q K^T / sqrt(d) + M + P) V, P = 0 between meta-tokens: only their rows are computed
            y, _ = self.second_attention(
                self.second_norm(meta["rows"].gather(x)), cache=cache, **meta
            )
            x = meta["rows"].scatter_add(x, y)
        return x + self.mlp(self.mlp_norm(x))


class MetaGPT2PreTrainedModel(PreTrainedModel):
    """How transformers loads, saves and initialises the family."""

    config_class = MetaGPT2Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("MetaGPT2Block",)
    _skip_keys_device_placement = CACHE_NAMES
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {  # noqa: RUF012  (transformers reads a dict)
        "hidden_states": MetaGPT2Block,
        "attentions": OutputRecorder(CausalAttention, index=1, layer_name="attention"),
        "meta_attentions": OutputRecorder(Attention, index=1, layer_name="second_attention"),
    }

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing; see `MetaGPT2Config.register_for_auto_class`."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if getattr(module, "writes_to_residual", False):
            std = self.config.initializer_range / (2 * self.config.num_hidden_layers) ** 0.5
            init.normal_(module.weight, std=std)
        if isinstance(module, Attention) and module.length_scale is not None:
            init.constant_(module.length_scale, 1 / math.log(module.usual_keys))


class MetaGPT2Model(MetaGPT2PreTrainedModel):
    """Embedding, blocks and final LayerNorm."""

    def __init__(self, config: MetaGPT2Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.learned_positions = self.rotary_emb = None
        if config.position_embedding == "learned":
            self.learned_positions = nn.Embedding(
                config.max_position_embeddings, config.hidden_size
            )
        elif config.position_embedding == "rope":
            # `from_pretrained` recognises a module whose frequencies it has to compute by the name of this class.
            self.rotary_emb = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleList(
            MetaGPT2Block(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = layer_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        meta_token_mask: Tensor | None = None,
        meta_positions: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],  # type: ignore[misc]  # mypy does not follow transformers
    ) -> BaseModelOutputWithPast:
        """Final hidden states, (batch, length, width); the arguments are those of `MetaGPT2ForCausalLM.forward`.

        Args:
            **kwargs: output flags of transformers; `output_meta_attentions` returns the second module's weights, and
                needs `output_attentions`.

        Raises:
            UserError: if a learned table is too short, packed sequences have a cache or no positions, the cache is of
                another kind, or something does not go together with a `text_window`.
        """
        if input_ids is None and inputs_embeds is None:
            raise UserError("the model needs input_ids or inputs_embeds.")
        cache = cache_among({"past_key_values": past_key_values, **kwargs})
        engine = engine_of(kwargs)  # packs requests into a row, and keeps them apart
        lengths = kwargs.get("cu_seq_lens_q")
        sequences = (
            None if engine else packed_sequences(attention_mask, position_ids, cache, lengths)
        )
        cache = self._prepare_cache(cache, use_cache=use_cache if sequences is None else False)

        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        visibility = Visibility.of(
            self.config,
            self._meta_tokens(input_ids, x, meta_token_mask),
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            sequences=sequences,
            engine=engine,
            form=self._meta_attention_form(cache, engine, meta_positions),
            meta_places=meta_positions,
            minimum_rows=minimum_rows(self),
            needs_weights=kwargs.get("output_attentions", self.config.output_attentions),
        )
        x, rotary = self._with_positions(x, visibility.positions)
        by_block, meta = visibility.of_blocks(self.config, x, rotary)
        for layer, causal in zip(self.layers, by_block, strict=True):
            x = layer(x, causal=causal, meta=meta, **{CACHE: cache})
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **{CACHE: cache})

    def _with_positions(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Rotary | None]:
        """The embeddings with what the positions add to them, and the rotary tables."""
        if self.learned_positions is not None:  # e_t = E(x_t) + p_t
            return x + self.learned_positions(positions), None
        if self.rotary_emb is not None:  # the angles t / theta^(2i/d), as cosines and sines
            return x, self.rotary_emb(x, positions)
        return x, None

    def _meta_tokens(
        self, input_ids: Tensor | None, x: Tensor, meta_token_mask: Tensor | None
    ) -> Tensor:
        """Where the meta-tokens are, (batch, length) bool; nowhere if nothing in the model depends on it."""
        if self.config.second_attention != "meta" and self.config.text_window is None:
            return x.new_zeros(x.shape[:2], dtype=torch.bool)
        return meta_tokens(
            self.embed_tokens, self.config.meta_token_id, input_ids, x, meta_token_mask
        )

    def _meta_attention_form(
        self, cache: Any, engine: Mapping[str, Any], meta_positions: Tensor | None
    ) -> MetaAttentionForm | None:
        if self.config.second_attention != "meta":
            return None
        if self._second_needs_all_rows:
            return "dense"
        return meta_attention_form(cache, engine, gathers_in_graph=meta_positions is not None)

    @property
    def _second_needs_all_rows(self) -> bool:
        """Whether the second attention computes the rows of text too, as a further kind of it may."""
        blocks: Any = self.layers
        return any(
            block.second_attention is not None and block.second_attention.needs_all_rows
            for block in blocks
        )

    def _prepare_cache(self, cache: Any, *, use_cache: bool | None) -> Any:
        """The cache to use: the given one, with second stores, or a new one where one is wanted."""
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and cache is None and not self.training:
            cache = DynamicCache()
        if cache is not None:
            add_second_stores(cache, self.config, holds_all_rows=self._second_needs_all_rows)
        return cache


@dataclass
class MetaGPT2Output(CausalLMOutputWithPast):
    """transformers' output, and the second module's attention weights.

    Attributes:
        meta_attentions: for each layer (batch, heads, length, total), like `attentions`. In meta-attention, the rows
            and columns of text are 0. Empty if there was no meta-token.
    """

    meta_attentions: tuple[Tensor, ...] | None = None


class MetaGPT2ForCausalLM(MetaVocabulary, MetaGPT2PreTrainedModel, MetaTokenGenerationMixin):
    """The language model. Meta-tokens are wherever `input_ids == config.meta_token_id`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  (transformers reads a dict)

    def __init__(self, config: MetaGPT2Config):
        super().__init__(config)
        self.model = MetaGPT2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.has_trained = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        meta_token_mask: Tensor | None = None,
        meta_positions: Tensor | None = None,
        labels: Tensor | None = None,
        scored_positions: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],  # type: ignore[misc]  # mypy does not follow transformers
    ) -> MetaGPT2Output:
        """Next-token logits, and the loss if there are labels.

        Args:
            input_ids: (batch, length).
            attention_mask: (batch, cached + length), 1 at real tokens; padding may be on either side. Or a mask of four
                dimensions, (batch, heads or 1, length, cached + length), True where a query sees a key, or added to the
                logits; it replaces the causal mask, in meta-attention too.
            position_ids: (batch, length); default: real tokens counted from 0 in each row. Without an `attention_mask`,
                a new sequence begins where they do not grow, and sees nothing before it. Such rows have no cache.
            past_key_values: a `DynamicCache` or `StaticCache` with the tokens before, which may be given as `cache`
                instead. It gets room for the second attention, in place.
            inputs_embeds: (batch, length, width), used instead of the embeddings of `input_ids`.
            meta_token_mask: (batch, length), true at meta-tokens. Default: where `input_ids` are the meta-token's or,
                without them, where `inputs_embeds` equals the meta-token's embedding exactly.
            meta_positions: (batch, most), the meta-tokens' places in `input_ids`, ascending, -1 where a row has fewer,
                as `positions_of` returns them. They spare the model a device sync.
            labels: (batch, length), the input's own ids, -100 where nothing is to be predicted; shifted here. A
                meta-token is never predicted, so its label counts as -100 (section 3).
            scored_positions: (batch, most), the positions just before the labels that count, -1 where a row has fewer.
                (The name avoids "labels", by which a Trainer would take them for labels.)
            use_cache: whether to make a cache if none is given; default: as configured. Training mode makes none, even
                with True.
            logits_to_keep: compute logits for this many last positions only (0: all), or for these indices.
            output_attentions: return the weights of both attentions; the eager attention function then computes them.
            **kwargs: `num_items_in_batch` divides the summed loss (Trainer counts all labels other than -100, so
                meta-tokens among them are subtracted); `shift_labels`, (batch, length), replace the shifted `labels`;
                output flags of transformers.

        Returns:
            Logits (batch, positions, vocabulary). In training mode with `labels` and `scored_positions` only those that
            a label scores, (batch, most, vocabulary), whatever `logits_to_keep` is.

        Raises:
            UserError: if the sequence is longer than a learned table of positions; if several are packed into a row
                and have a cache, or `cu_seq_lens_q` without `position_ids`; if `meta_token_mask` has another shape than
                the input; or if an argument does not go together with a `text_window`.
        """
        output_attentions = (
            self.config.output_attentions if output_attentions is None else output_attentions
        )
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            meta_token_mask=meta_token_mask,
            meta_positions=meta_positions,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_meta_attentions=output_attentions and self.config.second_attention != "none",
            **kwargs,
        )
        if self.training and not (
            torch.compiler.is_compiling() or self.has_trained or input_ids is None
        ):
            check_ids(input_ids, self.config.unpadded_vocab_size)
            self.has_trained = True
        if labels is not None:
            labels, kwargs = without_meta_tokens(labels, self.config.meta_token_id, kwargs)
        hidden = outputs.last_hidden_state
        if (
            self.training
            and labels is not None
            and scored_positions is not None
            and kwargs.get("shift_labels") is None
        ):
            # The head is the widest product of a small model.
            scored, targets = scored_labels(labels, scored_positions)
            logits = linear(self.lm_head, hidden[scored])
            kwargs["shift_labels"] = targets
            loss = self.loss_function(logits, None, self.config.vocab_size, **kwargs)
        else:
            last = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            )
            logits, loss = linear(self.lm_head, hidden[:, last]), None
            if labels is not None:
                loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return MetaGPT2Output(
            loss=loss,
            logits=logits,
            **{CACHE: outputs.get(CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            meta_attentions=outputs.get("meta_attentions"),
        )


# The Auto classes find the class by its configuration's. Trainer (for label_smoothing_factor) and pipelines recognise a
# causal language model by its name in this mapping.
AutoModel.register(MetaGPT2Config, MetaGPT2Model, exist_ok=True)
AutoModelForCausalLM.register(MetaGPT2Config, MetaGPT2ForCausalLM, exist_ok=True)
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MetaGPT2Config.model_type] = MetaGPT2ForCausalLM.__name__
register_architecture(MetaGPT2ForCausalLM.__name__, MetaGPT2ForCausalLM)
