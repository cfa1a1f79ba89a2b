"""The baseline `gpt-neo`, transformers' own with a meta-token: from scratch, and from a published checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.model.configuration import MetaGPT2Config
from metatokens.training.positions import jumped_positions, position_jumps
from metatokens.training.pretrain import new_gpt_neo

NEO = (
    "architecture=gpt_neo",
    "position_embedding=learned",
    "second_attention=none",
    "max_position_embeddings=72",
)
NEO_MODEL = tuple(f"model.{setting}" for setting in NEO)
STEPS = "--set training.max_steps=2 --set training.save_steps=2 --set training.logging_steps=1"
WHOLE = "--set training.train_base=true"
Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def published(store: TokenStore, folder: Path) -> GPTNeoForCausalLM:
    """A small random GPT-Neo as it is published: with a tokenizer, without a meta-token."""
    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=store.manifest.vocab_size,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=16,
        max_position_embeddings=72,
        bos_token_id=store.tokenizer.eos_token_id,
        eos_token_id=store.tokenizer.eos_token_id,
    )
    model = GPTNeoForCausalLM(config)
    model.save_pretrained(folder)
    store.tokenizer.save_pretrained(folder)
    return model


# --- from scratch


def test_a_new_one_has_the_sizes_asked_for_and_every_second_layer_local(
    small_store: TokenStore,
) -> None:
    config = MetaGPT2Config(
        num_hidden_layers=3,
        intermediate_size=40,
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=48,
        position_embedding="learned",
        second_attention="none",
        activation="relu",
        layer_norm_epsilon=1e-3,
        initializer_range=0.05,
    )
    model = new_gpt_neo(config, small_store.tokenizer)
    kinds = [block.attn.attention_type for block in model.transformer.h]
    assert kinds == ["global", "local", "global"]
    assert model.config.window_size == 256
    assert model.config.activation_function == "relu"
    assert model.config.layer_norm_epsilon == 1e-3
    assert model.transformer.wpe.weight.shape == (48, 32)
    assert model.transformer.h[0].mlp.c_fc.weight.shape == (40, 32)
    assert model.transformer.wte.weight[:768].std().item() == pytest.approx(0.05, rel=0.1)


def test_verb_by_verb(small_store: TokenStore, metatokens: Run) -> None:
    sizes = ("data.block_size=32", "data.placement=none", "model.hidden_size=16", *NEO_MODEL)
    settings = " ".join(
        f"--set {setting}" for setting in (f"data.tokens={small_store.path}", *sizes)
    )
    status, _, said = metatokens(f"pretrain --recipe demo {settings} {STEPS} --out base")
    assert (status, said.splitlines()[-1]) == (0, "model: base")
    status, _, said = metatokens(
        f"finetune --model base --task parity --set task.train_lengths=[64] {STEPS} {WHOLE} --out tuned"
    )
    assert (status, said.splitlines()[-1]) == (0, "models: tuned/64")
    status, output, _ = metatokens(
        "evaluate --model tuned/64 --task parity --lengths 64 -n 4 --name gpt-neo --json"
    )
    first = json.loads(output.splitlines()[0])
    fields = {
        "model": "gpt-neo",
        "position_embedding": "learned",
        "train_length": 64,
        "length": 64,
        "task": "parity",
    }
    assert status == 0
    assert first == first | fields
    status, output, _ = metatokens("generate --model base 'the cat' --max-new-tokens 4")
    assert (status, output.startswith("the cat")) == (0, True)


# --- a published one


def test_masks_in_an_old_file_are_passed_over_and_other_tensors_are_not(
    small_store: TokenStore, tmp_path: Path
) -> None:
    plain = published(small_store, tmp_path).eval()
    file, block = tmp_path / "model.safetensors", "transformer.h.1.attn.attention"
    weights, ids = load_file(file), torch.arange(20)[None]
    old = {
        f"{block}.masked_bias": torch.tensor(-1e9),
        f"{block}.bias": torch.zeros(1, 1, 72, 72, dtype=torch.uint8),
    }
    save_file(weights | old, file, metadata={"format": "pt"})
    torch.testing.assert_close(load_model(tmp_path)(ids).logits, plain(ids).logits)
    save_file(weights | {f"{block}.q_proj.bias": torch.zeros(16)}, file, metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=rf"do not fit its configuration: see {block}\.q_proj\.bias"
    ):
        load_model(tmp_path)


def test_positions_that_jump_stay_one_sequence(small_store: TokenStore, tmp_path: Path) -> None:
    published(small_store, tmp_path)
    model = load_model(tmp_path).train()
    ids, table = torch.arange(40).reshape(2, 20), model.transformer.wpe.weight
    torch.manual_seed(3)
    positions = jumped_positions(2, 20, 72)
    assert positions.diff().max() > 1
    torch.manual_seed(3)
    with position_jumps(model, 72):
        losses = model(ids, labels=ids).loss
    expected = []
    for row, row_positions in zip(ids, positions, strict=True):
        with torch.no_grad():  # by a table whose first rows are those of the positions
            before = table.clone()
            table[:20] = before[row_positions]
            logits = model(row[None]).logits[0]
            table.copy_(before)
        expected.append(cross_entropy(logits[:-1], row[1:]))
    torch.testing.assert_close(losses, torch.stack(expected).mean())


# --- lengths, and mistakes
