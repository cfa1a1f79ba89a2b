"""The language model: GPT-2 with meta-attention between causal attention and the feed-forward layer.

Paper, section 3 and Appendix A. Where the paper's text and the code base it names differ, the code base holds:
LayerNorm before each module, exact GELU, a tied head without bias. `second_attention="none"` is GPT-2.
"""

from copy import copy
from dataclasses import dataclass
from os import PathLike
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, Cache, GenerationConfig, GPT2LMHeadModel, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, eager_attention_forward
from transformers.utils.generic import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from metatokens.errors import UserError
from metatokens.model.attention import (
    Attention,
    AttentionFunction,
    CausalAttention,
    MetaAttention,
    linear,
    residual_linear,
)
from metatokens.model.cache import MetaTokenCache, entries_in_second_store, give_second_stores
from metatokens.model.configuration import MetaGPT2Config, SecondAttention
from metatokens.model.generation import MetaTokenGenerationMixin, mark_as_own
from metatokens.model.gpt2 import configuration_of, weights_of
from metatokens.model.labels import without_meta_tokens
from metatokens.model.positions import Rotary, are_packed, check_positions, position_ids_from_mask
from metatokens.model.rows import Index, MetaRows, QueryRows, asked_positions, least_rows, positions_of
from metatokens.model.vocabulary import MetaVocabulary


def layer_norm(config: MetaGPT2Config) -> nn.LayerNorm:
    """A LayerNorm over the residual stream."""
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon, bias=config.bias)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: MetaGPT2Config):
        super().__init__()
        assert config.intermediate_size is not None  # the configuration fills it in
        self.in_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.out_proj = residual_linear(config.intermediate_size, config.hidden_size, bias=config.bias)
        # GPT-2's approximate GELU, which transformers spells out in eight operations, in one.
        is_gelu_new = config.activation == "gelu_new"
        self.activation = nn.GELU(approximate="tanh") if is_gelu_new else ACT2FN[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape, each position by itself."""
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
        if config.second_attention == "meta":
            self.second_attention = MetaAttention(config, layer_index)
        elif config.second_attention == "causal":
            self.second_attention = CausalAttention(config, layer_index, second=True)
        self.mlp_norm = layer_norm(config)
        self.mlp = FeedForward(config)

    @property
    def takes_queries(self) -> bool:
        """Whether attention can leave positions out: in the modules made here, under sdpa's masks."""
        return type(self.second_attention) in (type(None), MetaAttention, CausalAttention)

    def forward(
        self,
        x: Tensor,
        *,
        rotary: Rotary | None,
        mask: Tensor | None,
        meta_rows: MetaRows | None,
        meta_rotary: Rotary | None,
        meta_mask: Tensor | None,
        log_keys: Tensor | None,
        meta_log_keys: Tensor | None,
        attend: AttentionFunction,
        past_key_values: MetaTokenCache | None,
        keep: Index | None = None,
        queries: QueryRows | None = None,
    ) -> Tensor:
        """One block's step of the residual stream, (batch, length, width), or what `keep` takes of it.

        Attention leaves out what is not in `queries`: the positions that `keep` takes and, for meta-attention to see
        them, the meta-tokens. A second causal attention sees the first one's output everywhere, so that alone skips.
        """
        second = self.second_attention
        whole = {"rotary": rotary, "mask": mask, "attend": attend, "cache": past_key_values, "log_keys": log_keys}
        if queries is None or isinstance(second, CausalAttention):
            x = x + self.attention(self.attention_norm(x), **whole)[0]
        else:
            x = queries.gather(x) + self.attention(self.attention_norm(x), **whole, queries=queries)[0]
            meta_rows = None if meta_rows is None else meta_rows.among(queries)
            meta_mask = None if meta_mask is None else queries.gather(meta_mask)
        if isinstance(second, CausalAttention):
            if queries is None:
                x = x + second(self.second_norm(x), **whole)[0]
            else:
                x = queries.gather(x) + second(self.second_norm(x), **whole, queries=queries)[0]
        elif second is not None and meta_rows is not None:
            meta = self.second_norm(meta_rows.gather(x))
            own = {"rotary": meta_rotary, "mask": meta_mask, "attend": attend, "cache": past_key_values}
            meta, _ = second(meta, rows=meta_rows, **own, log_keys=meta_log_keys)
            x = meta_rows.scatter_add(x, meta)
        if keep is not None:  # the feed-forward layer sees each position by itself
            x = x[keep] if queries is None else queries.take(x, keep)
        return x + self.mlp(self.mlp_norm(x))


class MetaGPT2PreTrainedModel(PreTrainedModel):
    """What transformers needs to know of the family: loading, saving, initial weights."""

    config_class = MetaGPT2Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("MetaGPT2Block",)
    _skip_keys_device_placement = ("past_key_values",)
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {  # noqa: RUF012  (transformers reads a plain dict)
        "hidden_states": MetaGPT2Block,
        "attentions": OutputRecorder(CausalAttention, index=1, layer_name="attention"),
        "meta_attentions": OutputRecorder(Attention, index=1, layer_name="second_attention"),
    }

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: see `MetaGPT2Config.register_for_auto_class`."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if getattr(module, "writes_to_residual", False):
            std = self.config.initializer_range / (2 * self.config.num_hidden_layers) ** 0.5
            init.normal_(module.weight, std=std)
        if isinstance(module, Attention) and module.length_scale is not None:
            init.constant_(module.length_scale, module.first_length_scale)


class MetaGPT2Model(MetaGPT2PreTrainedModel):
    """Embedding, blocks and final LayerNorm."""

    def __init__(self, config: MetaGPT2Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.learned_positions = self.rotary_emb = None
        if config.position_embedding == "learned":
            self.learned_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        elif config.position_embedding == "rope":
            # By the name of its class transformers knows a module whose frequencies `from_pretrained` has to compute.
            self.rotary_emb = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleList(MetaGPT2Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = layer_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MetaTokenCache | None = None,
        inputs_embeds: Tensor | None = None,
        meta_token_mask: Tensor | None = None,
        meta_positions: Tensor | None = None,
        use_cache: bool | None = None,
        keep: Index | None = None,
        **kwargs: Unpack[TransformersKwargs],  # type: ignore[misc]  # mypy does not follow transformers
    ) -> BaseModelOutputWithPast:
        """Hidden states of `input_ids` (batch, length).

        Arguments that are not described here are those of `MetaGPT2ForCausalLM.forward`.

        Args:
            keep: an index of (batch, length). Only the final states that it takes are computed and returned; of the
                last block, half of a two-layer model, not much more than keys and values is computed elsewhere.
            **kwargs: output flags of transformers; `output_meta_attentions` for the second module's weights, which
                `output_attentions` has to go with.

        Raises:
            UserError: if a learned table is too short, sequences are packed into one, or the cache is another's.
        """
        if input_ids is None and inputs_embeds is None:
            raise UserError("the model needs input_ids or inputs_embeds.")
        is_packed = are_packed(attention_mask, position_ids)
        if is_packed or kwargs.get("cu_seq_lens_q") is not None:
            self._check_packing(past_key_values, is_packed=is_packed)
        use_cache = not is_packed and (self.config.use_cache if use_cache is None else use_cache)
        if use_cache and past_key_values is None and not self.training:
            past_key_values = MetaTokenCache(self.config)
        elif past_key_values is not None and self.config.second_attention != "none":
            give_second_stores(past_key_values, self.config)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        length = x.shape[1]
        cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        padding_mask = None if attention_mask is None or attention_mask.ndim == 4 else attention_mask
        # Beside a static cache a mask may be longer than what was read.
        is_static = past_key_values is not None and past_key_values.is_compileable
        new = torch.arange(length, device=x.device) + cached if is_static else slice(-length, None)
        if position_ids is None and padding_mask is not None:
            position_ids = position_ids_from_mask(padding_mask)[:, new]
        elif position_ids is None:
            position_ids = torch.arange(length, device=x.device)[None] + cached

        is_meta = None  # where it has to be found out
        if self.config.second_attention != "meta":
            meta_positions = None
        elif meta_positions is None:
            is_meta = self._is_meta(input_ids, x) if meta_token_mask is None else meta_token_mask.bool()
            is_meta = is_meta if padding_mask is None else is_meta & padding_mask[:, new].bool()
            # Of a static cache the second store is made with the first tokens, before anything is compiled.
            meta_positions = positions_of(is_meta, least=max(least_rows(self), int(is_static)))
        elif (missing := least_rows(self) - meta_positions.shape[1]) > 0:
            meta_positions = nn.functional.pad(meta_positions, (0, missing), value=-1)
        if self.learned_positions is not None:
            if not torch.compiler.is_compiling():  # of a static cache the device alone knows how long it is
                check_positions(self.config, int(cached) + length, position_ids)
            x = x + self.learned_positions(position_ids)
        rotary = None if self.rotary_emb is None else self.rotary_emb(x, position_ids)
        meta_rows = None if meta_positions is None else MetaRows.at(meta_positions, cached, position_ids)
        meta_rotary = meta_mask = None
        if meta_rows is not None and rotary is not None:
            meta_rotary = (meta_rows.gather(rotary[0]), meta_rows.gather(rotary[1]))
        log_keys = meta_log_keys = None
        if self.config.attention_scale == "log_length":
            if attention_mask is None:
                counts = torch.arange(1, length + 1, device=x.device)[None] + cached
            elif padding_mask is not None:
                counts = padding_mask.long().cumsum(dim=1)[:, new]
            else:
                is_seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask > -1e4
                counts = is_seen[:, 0].sum(dim=-1)
            log_keys = _log(counts, x.dtype)
            if meta_rows is not None:
                before = entries_in_second_store(past_key_values)
                meta_log_keys = _log(meta_rows.valid.cumsum(dim=1) + before, x.dtype)

        config = self.config
        is_eager = config._attn_implementation == "eager"
        if kwargs.get("output_attentions", config.output_attentions) and not is_eager:
            config, is_eager = copy(config), True  # no other function returns weights
            config._attn_implementation = "eager"
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention_forward)
        # At any jump of the positions that it gets, transformers begins a new sequence.
        mask = create_causal_mask(config, x, attention_mask, past_key_values, position_ids if is_packed else None)
        if is_eager and mask.dtype == torch.bool:  # one of four dimensions, as it was given; that function adds it
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)
        if is_eager or (attention_mask is not None and attention_mask.ndim == 4):
            meta_mask = mask
        if meta_rows is not None and past_key_values is not None and not torch.compiler.is_compiling():
            past_key_values.layers[0].check_second(meta_rows, is_masked=meta_mask is not None)
        last, queries, is_sdpa = self.layers[-1], None, config._attn_implementation == "sdpa"
        if keep is not None and length > 2 and is_sdpa and last.takes_queries:  # a decoding step is not worth it
            queries = QueryRows.at(asked_positions(keep, x, is_meta, meta_positions), length)
        for index, layer in enumerate(self.layers):
            is_rotated = config.rope_layers is None or index in config.rope_layers
            x = layer(
                x,
                rotary=rotary if is_rotated else None,
                mask=mask,
                meta_rows=meta_rows,
                meta_rotary=meta_rotary if is_rotated else None,
                meta_mask=meta_mask,
                log_keys=log_keys,
                meta_log_keys=meta_log_keys,
                attend=attend,
                past_key_values=past_key_values,
                keep=keep if layer is last else None,
                queries=queries if layer is last else None,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)

    def _check_packing(self, cache: Cache | None, *, is_packed: bool) -> None:
        """Refuse packed sequences where more than one causal attention would have to keep them apart."""
        config = self.config
        is_plain = config.second_attention == "none" and config.attention_scale == "constant" and cache is None
        if not (is_plain and is_packed):
            raise UserError("packed sequences would see one another; give each a row of its own, padded.")

    def _is_meta(self, input_ids: Tensor | None, embeddings: Tensor) -> Tensor:
        """Which tokens are meta-tokens, (batch, length): by their ids or, where only embeddings are known, by those."""
        meta = self.config.meta_token_id
        if input_ids is not None:
            return input_ids == meta
        return (embeddings == self.embed_tokens(torch.tensor(meta, device=embeddings.device))).all(dim=-1)


def _log(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithm of numbers (batch, length) from 1 on, (batch, length, 1)."""
    return counts.clamp(min=1).to(torch.promote_types(dtype, torch.float32)).log().to(dtype)[..., None]


@dataclass
class MetaGPT2Output(CausalLMOutputWithPast):
    """transformers' output, and the second module's attention weights.

    Attributes:
        meta_attentions: for each layer (batch, heads, length, total), like `attentions`. Of meta-attention the rows
            and columns of text are 0.
    """

    meta_attentions: tuple[Tensor, ...] | None = None


class MetaGPT2ForCausalLM(MetaVocabulary, MetaGPT2PreTrainedModel, MetaTokenGenerationMixin):
    """The language model; meta-tokens are wherever `input_ids == config.meta_token_id`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  (a plain dict, as above)
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012  (the same)

    def __init__(self, config: MetaGPT2Config):
        super().__init__(config)
        self.model = MetaGPT2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MetaTokenCache | None = None,
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
            attention_mask: (batch, cached + length), 1 at real tokens; padding may be on either side. Or of four
                dimensions, (batch, heads or 1, length, cached + length), True where a query sees a key, or what is
                added to its logits: it replaces the causal mask, of meta-attention too.
            position_ids: (batch, length); default: real tokens counted from 0 in each row. Where they begin again,
                and there is no `attention_mask`, a new sequence does, which sees nothing before it; only a model with
                `second_attention="none"` takes such rows.
            past_key_values: a `MetaTokenCache` with the tokens before. A `DynamicCache` is made one, in place.
            inputs_embeds: (batch, length, width), in place of what the table gives for `input_ids`.
            meta_token_mask: (batch, length), true at meta-tokens. Default: where `input_ids` are the meta-token's or,
                without them, where `inputs_embeds` has exactly the meta-token's embedding.
            meta_positions: (batch, most), where the meta-tokens of `input_ids` are, ascending, -1 where a row has
                fewer: what `positions_of` gives. To find them is to wait for the device.
            labels: (batch, length), the input's own ids, -100 where nothing is to be predicted; shifted here. A
                meta-token is never predicted, so its label counts as -100 (section 3).
            scored_positions: (batch, most), the positions ahead of those whose label counts, -1 where a row has fewer.
                (Not named after labels, which a Trainer would take for some.)
            use_cache: whether to return a cache; default: the configuration's, never in training.
            logits_to_keep: compute logits for the last so many positions only (0: all), or for these indices.
            output_attentions: return the weights of both attentions, which "eager", whatever the configured attention
                function, then computes.
            **kwargs: `num_items_in_batch` divides the summed loss (Trainer passes it: labels other than -100, so that
                meta-tokens among them are taken off); output flags of transformers.

        Returns:
            Logits (batch, positions, vocabulary). In training mode with labels, only those that a label scores are
            computed, as (labels, vocabulary): the head is the widest product of a small model. With `scored_positions`,
            those at them, (batch, most, vocabulary).

        Raises:
            UserError: if the sequence is longer than a learned table of positions, or several are packed into a row.
        """
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        if labels is not None:
            labels, kwargs = without_meta_tokens(labels, self.config.meta_token_id, kwargs)
        keep: Index
        targets = loss = None
        if labels is not None and self.training:
            targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
            if scored_positions is None:
                keep = targets != -100
                targets = targets[keep]
            else:
                keep = torch.arange(len(targets), device=targets.device)[:, None], scored_positions.clamp(min=0)
                targets = targets[keep].masked_fill(scored_positions < 0, -100)
        else:
            keep = slice(None), slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        everywhere = kwargs.get("output_hidden_states", self.config.output_hidden_states)  # all of them, whole
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            meta_token_mask=meta_token_mask,
            meta_positions=meta_positions,
            use_cache=use_cache,
            keep=None if everywhere else keep,
            output_attentions=output_attentions,
            output_meta_attentions=output_attentions and self.config.second_attention != "none",
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        logits = linear(self.lm_head, hidden[keep] if everywhere else hidden)
        if targets is not None:
            loss = self.loss_function(logits, None, self.config.vocab_size, shift_labels=targets, **kwargs)
        elif labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        meta_attentions = outputs.get("meta_attentions")
        if meta_attentions == ():  # where there is no meta-token, meta-attention is not called
            meta_attentions = tuple(map(torch.zeros_like, outputs.attentions))
        return MetaGPT2Output(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            meta_attentions=meta_attentions,
        )

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        if (kind := generation_config.cache_implementation) not in (None, "dynamic", "static"):
            raise UserError(
                f"cache_implementation {kind!r} is not available for this model; give 'dynamic' or 'static'."
            )
        if kind != "static":
            generation_config.cache_implementation = None  # but this model's own
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache and kind != "static":
            model_kwargs["past_key_values"] = MetaTokenCache(self.config)
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        """As transformers', with the `meta_every` of its generation configuration."""
        mark_as_own(self.generation_config)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def from_gpt2(cls, hf_model: GPT2LMHeadModel, second_attention: SecondAttention = "none") -> "MetaGPT2ForCausalLM":
        """Convert a transformers GPT-2; the logits of its vocabulary stay the same.

        With a second attention module, its output projection starts at zero, so that the function is unchanged until
        it is trained, and the vocabulary is padded to a multiple of 64 rows of which the first new one is the
        meta-token, its embedding the mean of the others. With `"none"` the vocabulary is kept as it is.

        Args:
            hf_model: the model to convert; it is not changed.
            second_attention: the module to add.

        Raises:
            UserError: if the model is no GPT-2, or uses an option of GPT-2 that this family lacks.
        """
        if not isinstance(hf_model, GPT2LMHeadModel):
            raise UserError(f"a {type(hf_model).__name__} cannot be converted; give transformers' GPT2LMHeadModel.")
        config = configuration_of(hf_model.config, second_attention)
        model = cls(config).to(hf_model.dtype)
        weights = weights_of(hf_model)
        embedding = weights["model.embed_tokens.weight"]
        new_rows = embedding.mean(dim=0).expand(config.vocab_size - len(embedding), -1)
        weights["model.embed_tokens.weight"] = torch.cat([embedding, new_rows])
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected
        assert all("second_" in name or name == "lm_head.weight" for name in missing)
        model.tie_weights()
        for layer in model.model.layers if second_attention != "none" else ():
            nn.init.zeros_(layer.second_attention.out_proj.weight)
        return model.to(hf_model.device).train(hf_model.training)


# `from_pretrained` of the Auto classes looks the class up by the configuration's; Trainer, for the loss of
# label_smoothing_factor, and pipelines know a causal language model by its name among these.
AutoModel.register(MetaGPT2Config, MetaGPT2Model, exist_ok=True)
AutoModelForCausalLM.register(MetaGPT2Config, MetaGPT2ForCausalLM, exist_ok=True)
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MetaGPT2Config.model_type] = MetaGPT2ForCausalLM.__name__
