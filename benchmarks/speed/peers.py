"""The models that the benchmarks compare, at shapes from the demo's to the paper's.

This package's own models have the project's names: `gpt2`, `pause`, `twin`, `meta`. `dense` is `meta` computed as the
paper computes it, under a mask over all positions. `transformers` is that library's GPT-2 in its default form (learned
positions, biases, the tanh approximation of GELU). `gpt2-learned` is the same function in this package.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, GPT2Config, GPT2LMHeadModel

from metatokens.model.attention import AttentionFunction, CausalAttention
from metatokens.model.cache import Entries
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.linear import linear
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.model.positions import Rotary
from metatokens.model.rows import GatheredRows


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    width: int
    layers: int
    heads: int
    vocabulary: int


ShapeName = Literal["tiny", "demo", "small", "medium", "paper"]
SHAPES: dict[ShapeName, Shape] = {
    "tiny": Shape(32, 2, 2, 256),
    "demo": Shape(64, 2, 4, 2112),
    "small": Shape(256, 4, 4, 4096),
    "medium": Shape(512, 8, 8, 16384),
    "paper": Shape(768, 12, 12, 50304),  # 123.6M parameters; 151.9M with a second attention
}


class DenseMetaAttention(CausalAttention):
    """Meta-attention as the paper computes it: over all positions, under a mask.

    It replaces `MetaAttention` in a block. As a `CausalAttention` it gets all positions from the block; a hook
    (`dense_model`) gives it the places of the meta-tokens. Its part of the cache stores every token.
    """

    def __init__(self, config: MetaGPT2Config, block: int):
        super().__init__(config, block, second=True)
        self.block = block
        # (batch, length), position in the sequence of each meta-token, -1 at text.
        self.slots = torch.empty(0)
        # (batch, 1, length, keys), 0 where a query sees a key, minus infinity elsewhere.
        self.mask = torch.empty(0)

    def forward(
        self,
        x: Tensor,
        *,
        rotary: Rotary | None,
        mask: Tensor | None,
        attend: AttentionFunction,
        cache: Cache | None,
        log_keys: Tensor | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, None]:
        """Attend, as `CausalAttention.forward`, without `mask` and `attend`."""
        q, k, v = self.project(x, rotary, log_keys=log_keys)
        if cache is not None:
            k, v, _ = cache.layers[self.block].update_second(Entries(k, v, self.slots))
        out = scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=self.scaling)
        out = linear(self.out_proj, out.transpose(1, 2).reshape(x.shape))
        return out.masked_fill(self.slots[:, :, None] < 0, 0.0), None


def dense_model(model: MetaGPT2ForCausalLM) -> MetaGPT2ForCausalLM:
    """Replace the gathered meta-attention of a model, in place, by the dense one with the same parameters."""
    modules: list[DenseMetaAttention] = []
    for layer in model.model.layers:
        dense = DenseMetaAttention(model.config, len(modules)).to(model.device, model.dtype)
        dense.load_state_dict(layer.get_submodule("second_attention").state_dict())
        layer.second_attention = dense
        modules.append(dense)

    def find(_: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> None:
        """Make the mask once per forward pass, before the first block."""
        (x,), meta, cache = args, kwargs["meta"], kwargs["past_key_values"]
        slots, mask = dense_mask(x, None if meta is None else meta["rows"], cache)
        for dense in modules:
            dense.slots, dense.mask = slots, mask

    model.model.layers[0].register_forward_pre_hook(find, with_kwargs=True)
    return model


def dense_mask(x: Tensor, rows: GatheredRows | None, cache: Cache | None) -> tuple[Tensor, Tensor]:
    """The places of the meta-tokens in x (batch, length, width), and the paper's matrices M + P, ready to be added.

    Returns:
        (batch, length) int64, the slot of each meta-token and -1 elsewhere; (batch, 1, length, keys), 0 or minus
        infinity, over all keys including cached ones. A text query sees itself, so that every row has a key.
    """
    slots = torch.full(x.shape[:2], -1, device=x.device)
    if rows is not None:
        # Padding points at some position too.
        slots = slots.scatter_reduce(1, rows.indices, rows.slots, "amax")
    second = None if cache is None else cache.layers[0].second
    keys = slots if second is None else torch.cat([second.slots, slots], dim=1)
    seen = (keys[:, None, :] >= 0) & (keys[:, None, :] <= slots[:, :, None])
    seen[:, :, -x.shape[1] :] |= torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return slots, torch.zeros(seen.shape, dtype=dtype, device=x.device).masked_fill(
        ~seen, -torch.inf
    )[:, None]


def gpt2_of_transformers(config: MetaGPT2Config) -> GPT2LMHeadModel:
    """A GPT-2 of transformers with the sizes of a configuration, without dropout, as in the paper."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_position_embeddings,
            n_embd=config.hidden_size,
            n_layer=config.num_hidden_layers,
            n_head=config.num_attention_heads,
            activation_function=config.activation,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


@dataclass(frozen=True)
class Peer:
    """How to build a compared model.

    Attributes:
        make: builds it from its configuration.
        fields: settings that differ from the configuration's defaults.
        inserts: whether its input has meta-tokens.
        dense: whether its meta-attention covers all positions, under a mask.
    """

    make: Callable[[MetaGPT2Config], nn.Module]
    fields: Mapping[str, Any]
    inserts: bool = False
    dense: bool = False

    def config(self, shape: Shape, length: int) -> MetaGPT2Config:
        """The configuration at a shape, for sequences of up to `length` tokens; generation never stops early."""
        return MetaGPT2Config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            max_position_embeddings=length,
            meta_token_id=shape.vocabulary - 1 if self.inserts else None,
            bos_token_id=None,
            eos_token_id=None,
            **self.fields,
        )


_PLAIN = {"second_attention": "none"}
_LEARNED = _PLAIN | {"position_embedding": "learned", "bias": True, "activation": "gelu_new"}


PEERS = {
    "gpt2": Peer(MetaGPT2ForCausalLM, _PLAIN),
    "pause": Peer(MetaGPT2ForCausalLM, _PLAIN, inserts=True),
    "twin": Peer(MetaGPT2ForCausalLM, {"second_attention": "causal"}, inserts=True),
    "meta": Peer(MetaGPT2ForCausalLM, {"second_attention": "meta"}, inserts=True),
    "dense": Peer(
        lambda config: dense_model(MetaGPT2ForCausalLM(config)),
        {"second_attention": "meta"},
        inserts=True,
        dense=True,
    ),
    "transformers": Peer(gpt2_of_transformers, _LEARNED),
    "gpt2-learned": Peer(MetaGPT2ForCausalLM, _LEARNED),
}
