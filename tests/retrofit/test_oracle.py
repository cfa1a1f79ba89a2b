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
from tests.retrofit.architectures import META, ROUNDED, base, error, logits, retrofitted, train_like, with_meta_tokens

HEADS, SIZE, LAYERS = 3, 10, (0, 2)


def rotated(x: Tensor, slot: int) -> Tensor:
    """Rotate each pair of features (i, i + size / 2), as a complex number, by the slot's angle."""
    turned = x.clone()
    for i in range(SIZE // 2):
        angle = slot * 10_000.0 ** (-2 * i / SIZE)
        number = complex(x[i], x[i + SIZE // 2]) * complex(math.cos(angle), math.sin(angle))
        turned[i], turned[i + SIZE // 2] = number.real, number.imag
    return turned


def meta_attention(states: Tensor, slots: list[int], weights: dict[str, Tensor]) -> Tensor:
    """What is added at one row's meta-tokens; states (meta-tokens, width)."""
    mean, variance = states.mean(-1, keepdim=True), states.var(-1, keepdim=True, correction=0)
    normed = (states - mean) / (variance + 1e-5).sqrt() * weights["norm.weight"]
    q, k, v = (normed @ part.T for part in weights["attention.qkv_proj.weight"].chunk(3))
    out = torch.zeros(len(slots), HEADS * SIZE)
    for head in range(HEADS):
        own = slice(head * SIZE, (head + 1) * SIZE)
        for i, slot in enumerate(slots):
            scores = [rotated(q[i, own], slot) @ rotated(k[j, own], slots[j]) / math.sqrt(SIZE) for j in range(i + 1)]
            shares = torch.stack(scores).softmax(0)
            out[i, own] = sum(share * v[j, own] for j, share in enumerate(shares))
    return out @ weights["attention.out_proj.weight"].T


def added_to(x: Tensor, ids: Tensor, added: dict[str, Tensor], prefix: str) -> None:
    """Add one block's meta-attention to the states x, (batch, length, width), in place."""
    own = {name.removeprefix(prefix): weight for name, weight in added.items() if name.startswith(prefix)}
    for row in range(len(ids)):
        slots = (ids[row] == META).nonzero()[:, 0].tolist()
        x[row, slots] += meta_attention(x[row, slots], slots, own)


@torch.no_grad()
@pytest.mark.parametrize("layers", [LAYERS, ()])
def test_a_llama_with_meta_attention(layers: tuple[int, ...], tmp_path: Path) -> None:
    ids, options = with_meta_tokens(), {"heads": HEADS, "head_size": SIZE, "layers": layers}
    model = train_like(add_meta_attention(base("llama"), meta_token_id=META, **options))
    model.get_input_embeddings().meta_token.weight.normal_(0, 0.08)
    save_meta(model, tmp_path)
    added = load_file(tmp_path / "meta_tokens.safetensors")
    plain = base("llama")
    x = plain.model.embed_tokens(ids)
    x[ids == META] = added["model.embed_tokens.meta_token.weight"]
    positions = torch.arange(ids.shape[1])[None]
    rotary, mask = plain.model.rotary_emb(x, positions), create_causal_mask(plain.config, x, None, None)
    for index, block in enumerate(plain.model.layers):
        normed = block.input_layernorm(x)
        x = x + block.self_attn(normed, position_embeddings=rotary, attention_mask=mask, position_ids=positions)[0]
        if index in layers:
            added_to(x, ids, added, f"model.layers.{index}.meta_attention.")
        x = x + block.mlp(block.post_attention_layernorm(x))
    expected = plain.lm_head(plain.model.norm(x))[..., :META]
    assert error(logits(model, ids), expected) < ROUNDED
    assert len(added) == 1 + 3 * len(layers)


@torch.no_grad()
def test_a_bloom_with_meta_attention(tmp_path: Path) -> None:
    """BLOOM's attention receives the residual stream, and returns the sum."""
    ids = with_meta_tokens()
    model = train_like(add_meta_attention(base("bloom"), meta_token_id=META, heads=HEADS, head_size=SIZE))
    save_meta(model, tmp_path)
    added = load_file(tmp_path / "meta_tokens.safetensors")
    plain = base("bloom").transformer
    x = plain.word_embeddings(ids)
    x[ids == META] = added["transformer.word_embeddings.meta_token.weight"]
    x, present = plain.word_embeddings_layernorm(x), torch.ones_like(ids)
    alibi = plain.build_alibi_tensor(present, plain.num_heads, x.dtype)
    mask = create_causal_mask(plain.config, x, None, None)
    for index, block in enumerate(plain.h):
        x = block.self_attention(block.input_layernorm(x), x, attention_mask=mask, alibi=alibi)[0]
        added_to(x, ids, added, f"transformer.h.{index}.meta_attention.")
        x = block.mlp(block.post_attention_layernorm(x), x)
    assert error(logits(model, ids), base("bloom").lm_head(plain.ln_f(x))[..., :META]) < ROUNDED


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3_text"])
def test_meta_tokens_put_in_while_text_is_generated(name: str) -> None:
    """After every second new token, by a loop that reads the whole sequence for each token."""
    model, ids = retrofitted(name), with_meta_tokens()[:1]
    sequence, new = ids[0].tolist(), []
    for count in range(9):
        sequence += [META] * (count in (2, 4, 6, 8))
        new.append(int(logits(model, torch.tensor([sequence]))[0, -1].argmax()))
        sequence.append(new[-1])
    got = model.generate(ids, max_new_tokens=9, do_sample=False, meta_every=2, eos_token_id=None)
    assert got[0, ids.shape[1] :].tolist() == new
    plain = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert not torch.equal(got, plain)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_no_meta_token_is_put_in_beyond_a_learned_table(name: str) -> None:
    model = retrofitted(name)
    most = model.config.max_position_embeddings
    ids = torch.randint(3, META, (1, most - 8), generator=torch.Generator().manual_seed(0))
    options = {"do_sample": False, "eos_token_id": None}
    assert model.generate(ids, max_new_tokens=8, **options).shape[1] == most
    with pytest.raises(UserError, match=f"longer than the {most} learned positions of this model"):
        model.generate(ids, max_new_tokens=8, meta_every=2, **options)
    # A collator that inserts meta-tokens makes sequences longer than the table.
    longer = torch.cat([ids, torch.full((1, 9), META)], dim=1)
    assert model(longer[:, 1:]).logits.shape[1] == most
    for mask in ({}, {"attention_mask": torch.ones_like(longer)}):
        with pytest.raises(
            UserError, match=f"of {most + 1} tokens is longer than the {most} learned positions of this"
        ):
            model(longer, **mask)
    # Padding has no positions.
    rows = torch.cat([ids, ids])
    mask = (torch.arange(most - 8) >= 20).long().expand(2, -1)
    assert model.generate(rows, attention_mask=mask, max_new_tokens=8, meta_every=2, **options).shape[1] == most
