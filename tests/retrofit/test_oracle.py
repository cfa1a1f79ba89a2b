"""Meta-attention in a Llama against the paper's formula (section 3), computed token by token in blocks run by hand."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from metatokens import add_meta_attention, save_meta
from metatokens.errors import UserError
from tests.retrofit.architectures import (
    META,
    ROUNDED,
    base,
    error,
    logits,
    shared,
    train_like,
    with_meta_tokens,
)

HEADS, SIZE, LAYERS = 3, 10, (0, 2)
IDS = with_meta_tokens()


def rotated(x: Tensor, position: int) -> Tensor:
    """Rotate each pair of features (i, i + size / 2), as a complex number, by the position's angle."""
    turned = x.clone()
    for i in range(SIZE // 2):
        angle = position * 10_000.0 ** (-2 * i / SIZE)
        number = complex(x[i], x[i + SIZE // 2]) * complex(math.cos(angle), math.sin(angle))
        turned[i], turned[i + SIZE // 2] = number.real, number.imag
    return turned


def meta_attention(states: Tensor, positions: list[int], weights: dict[str, Tensor]) -> Tensor:
    """What is added at one row's meta-tokens; states (meta-tokens, width)."""
    mean, variance = states.mean(-1, keepdim=True), states.var(-1, keepdim=True, correction=0)
    normed = (states - mean) / (variance + 1e-5).sqrt() * weights["norm.weight"]
    queries, keys, values = (
        normed @ part.T for part in weights["attention.qkv_proj.weight"].chunk(3)
    )
    out = torch.zeros(len(positions), HEADS * SIZE)
    for head in range(HEADS):
        features = slice(head * SIZE, (head + 1) * SIZE)
        for i, position in enumerate(positions):
            query = rotated(queries[i, features], position)
            scores = [
                query @ rotated(keys[j, features], positions[j]) / math.sqrt(SIZE)
                for j in range(i + 1)
            ]
            shares = torch.stack(scores).softmax(0)
            out[i, features] = shares @ values[: i + 1, features]
    return out @ weights["attention.out_proj.weight"].T


def add_by_formula(x: Tensor, added: dict[str, Tensor], prefix: str) -> None:
    """Add one block's meta-attention to the states x, (batch, length, width), in place."""
    weights = {
        name.removeprefix(prefix): weight
        for name, weight in added.items()
        if name.startswith(prefix)
    }
    for row, ids in enumerate(IDS):
        positions = (ids == META).nonzero()[:, 0].tolist()
        x[row, positions] += meta_attention(x[row, positions], positions, weights)


@torch.no_grad()
@pytest.mark.parametrize("layers", [LAYERS, ()])
def test_a_llama_with_meta_attention(layers: tuple[int, ...], tmp_path: Path) -> None:
    model = add_meta_attention(
        base("llama"), meta_token_id=META, heads=HEADS, head_size=SIZE, layers=layers
    )
    train_like(model).get_input_embeddings().meta_token.weight.normal_(0, 0.08)
    save_meta(model, tmp_path)
    added, plain = load_file(tmp_path / "meta_tokens.safetensors"), base("llama")
    assert len(added) == 1 + 3 * len(layers)

    x = plain.model.embed_tokens(IDS)
    x[IDS == META] = added["model.embed_tokens.meta_token.weight"]
    positions = torch.arange(IDS.shape[1])[None]
    rotary, mask = (
        plain.model.rotary_emb(x, positions),
        create_causal_mask(plain.config, x, None, None),
    )
    for index, block in enumerate(plain.model.layers):
        normed = block.input_layernorm(x)
        x = (
            x
            + block.self_attn(
                normed, position_embeddings=rotary, attention_mask=mask, position_ids=positions
            )[0]
        )
        if index in layers:
            add_by_formula(x, added, f"model.layers.{index}.meta_attention.")
        x = x + block.mlp(block.post_attention_layernorm(x))

    expected = plain.lm_head(plain.model.norm(x))[..., :META]
    assert error(logits(model, IDS), expected) < ROUNDED


def test_a_delta_is_not_saved_where_a_whole_model_is(tmp_path: Path) -> None:
    model = add_meta_attention(base("llama"), meta_token_id=META)
    model.save_pretrained(tmp_path)

    with pytest.raises(UserError, match="holds a whole model, which would be loaded"):
        save_meta(model, tmp_path)


@torch.no_grad()
def test_a_bloom_with_meta_attention(tmp_path: Path) -> None:
    """BLOOM's attention receives the residual stream, and returns the sum."""
    model = train_like(
        add_meta_attention(base("bloom"), meta_token_id=META, heads=HEADS, head_size=SIZE)
    )
    save_meta(model, tmp_path)
    added, plain = load_file(tmp_path / "meta_tokens.safetensors"), base("bloom")
    body = plain.transformer

    x = body.word_embeddings(IDS)
    x[IDS == META] = added["transformer.word_embeddings.meta_token.weight"]
    x = body.word_embeddings_layernorm(x)
    alibi = body.build_alibi_tensor(torch.ones_like(IDS), body.num_heads, x.dtype)
    mask = create_causal_mask(body.config, x, None, None)
    for index, block in enumerate(body.h):
        x = block.self_attention(block.input_layernorm(x), x, attention_mask=mask, alibi=alibi)[0]
        add_by_formula(x, added, f"transformer.h.{index}.meta_attention.")
        x = block.mlp(block.post_attention_layernorm(x), x)

    assert error(logits(model, IDS), plain.lm_head(body.ln_f(x))[..., :META]) < ROUNDED


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_no_meta_token_is_put_in_beyond_a_learned_table(name: str) -> None:
    model = shared(name)
    size = model.config.max_position_embeddings
    ids = torch.randint(3, META, (1, size - 8), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert model.generate(ids, **options).shape[1] == size
    with pytest.raises(UserError, match=f"longer than the {size} learned positions of this model"):
        model.generate(ids, meta_every=2, **options)

    # A collator that inserts meta-tokens makes sequences longer than the table.
    longer = torch.cat([ids, torch.full((1, 9), META)], dim=1)
    with pytest.raises(
        UserError, match=f"of {size + 1} tokens is longer than the {size} learned positions of this"
    ):
        model(longer)
    assert model(longer[:, 1:]).logits.shape[1] == size
