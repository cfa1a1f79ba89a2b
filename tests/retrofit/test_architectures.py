"""Decoders of transformers with meta-attention: only meta-tokens change anything, and all ways to run them agree."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig, OPTConfig, OPTForCausalLM

from metatokens import add_meta_attention
from metatokens.errors import UserError
from metatokens.model.releases import CACHE
from tests.retrofit.architectures import (
    ADDED,
    CHECKS,
    META,
    ROUNDED,
    ROWS,
    SOME,
    base,
    error,
    logits,
    outcome,
    retrofitted,
    text,
    train_like,
    with_meta_tokens,
)


@pytest.mark.quick(name=SOME[::2])
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", SOME)
def test_an_architecture(name: str, check: str) -> None:
    measure, limit = CHECKS[check]
    assert measure(name) <= limit


def test_a_table_that_is_narrower_than_the_blocks(tmp_path: Path) -> None:
    """As in OPT-350m, which projects its embeddings."""
    sizes = {
        "vocab_size": ROWS,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 96,
    }
    torch.manual_seed(0)
    plain = OPTForCausalLM(
        OPTConfig(**sizes, word_embed_proj_dim=32, do_layer_norm_before=False)
    ).eval()
    expected, ids = logits(plain, text()), with_meta_tokens()
    model = train_like(add_meta_attention(plain, **ADDED)).eval()

    assert torch.equal(logits(model, text()), expected)
    with torch.no_grad():
        model.get_input_embeddings().meta_token.weight.normal_()
    changed = logits(model, ids)
    assert error(changed, logits(model, torch.where(ids == META, 5, ids))) > 1e-3
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids), changed)


@pytest.mark.quick(name=["bloom", "gpt_oss", "llama", "qwen3_next"])
@pytest.mark.parametrize("name", SOME)
def test_meta_attention_does_something_at_meta_tokens_and_behind_them(name: str) -> None:
    ids, model, untrained = (
        with_meta_tokens(),
        retrofitted(name),
        add_meta_attention(base(name), **ADDED),
    )
    if hasattr(model.config, "_experts_implementation"):
        # Each token alone: products over groups of other sizes round differently.
        model.set_experts_implementation("batched_mm")
        untrained.set_experts_implementation("batched_mm")
    before, after = logits(untrained, ids), logits(model, ids)

    assert torch.equal(before[0, :3], after[0, :3])
    assert error(before[0, 3], after[0, 3]) > 0.01
    # No position sees later ones: first as many meta-tokens elsewhere, so that products have equal shapes, then more.
    elsewhere, others = ids.clone(), ids.clone()
    elsewhere[:, 20:], others[:, 20:] = ids[:, 20:].flip(1), META
    assert not torch.equal(elsewhere == META, ids == META)
    assert torch.equal(logits(model, elsewhere)[:, :20], after[:, :20])
    assert error(logits(model, others)[:, :20], after[:, :20]) < ROUNDED


# One type for each outcome of the sweep in `conformance`.
OUTCOMES = {
    "emu3": ("taken", ""),  # AutoModelForCausalLM finds no class for its own folder
    "gemma4": ("taken", ""),  # settings in `text_config`, a table of embeddings per layer
    "gemma4_text": ("taken", ""),
    "glmga:multimodal": ("taken", ""),  # shares its class with another type
    "mllama": ("taken", ""),  # its head has fewer rows than its table
    "qwen2_vl:multimodal": ("taken", ""),
    "whisper": ("taken", ""),  # a learned table of another name
    "deepseek_v32": ("taken", "the base's own cache"),
    "bert": ("refused", "has no attention whose output joins the residual stream"),
    "ernie4_5_vl_moe:multimodal": ("refused", "save what was added by save_meta"),
    "jamba": ("refused", "two tokens read in one step give other logits than one by one"),
    "kosmos-2:multimodal": ("refused", "it must read text alone"),
    "pix2struct:multimodal": ("refused", "an encoder-decoder; give a decoder"),
    "prophetnet": ("refused", "only supported for `decoder_input_ids` of length 1"),
    "recurrent_gemma": ("refused", f"has no attribute '{CACHE}'"),
    "dbrx": ("not built", "AttributeError"),
}


@pytest.mark.quick(name=["gemma4_text", "bert", "jamba", "dbrx"])
@pytest.mark.filterwarnings("ignore")  # from types that ignore some settings
@pytest.mark.parametrize("name", OUTCOMES)
def test_a_type_of_the_sweep(name: str) -> None:
    kind, sentence = outcome(name)
    assert kind == OUTCOMES[name][0], sentence
    assert OUTCOMES[name][1] in sentence


def test_blocks_that_share_keys_and_values_get_no_module(tmp_path: Path) -> None:
    """Gemma 4's small models have such blocks, which read only the positions whose logits are kept."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 8,
        "sliding_window": 8,
    }
    sizes |= {"vocab_size": 320, "head_dim": 16, "global_head_dim": 16}
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma4TextConfig(
        **sizes, num_hidden_layers=4, layer_types=kinds, num_kv_shared_layers=2
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()

    with pytest.raises(
        UserError, match=r"layers is \[1, 2\]; give a list of some of 0 to 1, ascending"
    ):
        add_meta_attention(model, meta_token_id=META, layers=[1, 2])
    model = train_like(add_meta_attention(model, **ADDED))
    assert model.config.meta_attention["layers"] == [0, 1]
    model.save_pretrained(tmp_path)
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), with_meta_tokens()
    whole = logits(model, ids)
    assert error(logits(model, ids, logits_to_keep=1), whole[:, -1:]) < ROUNDED
    options = {
        "max_new_tokens": 9,
        "meta_every": 2,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    assert torch.equal(
        model.generate(ids, **options), model.generate(ids, use_cache=False, **options)
    )


@pytest.mark.parametrize("name", ["mllama", "moshi"])
def test_a_head_with_fewer_rows_than_the_table(name: str) -> None:
    assert base(name).get_input_embeddings().weight.shape[0] > ROWS
    with pytest.raises(
        UserError,
        match="has 320 rows, fewer than the table of embeddings: give, without a tokenizer",
    ):
        add_meta_attention(base(name), meta_token_id=ROWS)
    model = retrofitted(name)
    assert torch.equal(logits(model, text()), logits(base(name), text()))


def test_a_table_of_embeddings_for_each_layer_holds_no_positions() -> None:
    model, ids = retrofitted("gemma4_text"), torch.full((1, 300), 5)
    assert model.config.position_embedding == "rope"
    assert model.config.max_position_embeddings < 300
    assert model.generate(ids, max_new_tokens=4, meta_every=2, do_sample=False).shape[1] > 300
    model = retrofitted("whisper")
    with pytest.raises(UserError, match="is longer than the 256 learned positions of this model"):
        model.generate(ids, max_new_tokens=4, meta_every=2, do_sample=False)
