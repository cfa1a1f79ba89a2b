"""The baseline `gpt-neo`, transformers' own with a meta-token: from scratch, and from a published checkpoint."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from metatokens.checkpoint import load_model, verify_manifest
from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.evaluation.accuracy import draw_test_examples, evaluate
from metatokens.evaluation.perplexity import perplexity
from metatokens.model.configuration import MetaGPT2Config
from metatokens.recipe import PretrainRecipe
from metatokens.records import About
from metatokens.retrofit.classes import MetaModel
from metatokens.training.positions import jumped_positions, position_jumps
from metatokens.training.pretrain import new_gpt_neo, pretrain
from tests.numbers import ROUNDED_PERPLEXITY
from tests.training.conftest import curve, interrupt, result

NEO = ("architecture=gpt_neo", "position_embedding=learned", "second_attention=none", "max_position_embeddings=72")
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
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": 16, "max_position_embeddings": 72}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), store.manifest.eos_token_id)
    kinds = [[["global", "local"], 1]]
    model = GPTNeoForCausalLM(GPTNeoConfig(vocab_size=store.manifest.vocab_size, attention_types=kinds, **sizes, **ids))
    model.save_pretrained(folder)
    store.tokenizer.save_pretrained(folder)
    return model


# --- from scratch


def test_a_new_one_learns_and_is_saved_with_its_meta_token(
    pretraining: Callable[..., PretrainRecipe], small_store: TokenStore, tmp_path: Path
) -> None:
    steps = ("training.max_steps=60", "training.save_steps=60", "training.learning_rate=0.02")
    pretrain(pretraining(*NEO_MODEL, *steps, "data.placement=none"), tmp_path / "run")
    losses = [point["loss"] for point in curve(tmp_path / "run") if "loss" in point]
    assert losses[0] == pytest.approx(math.log(832), abs=0.5)  # 769 entries padded to 832, all equally likely
    assert sum(losses[-10:]) / 10 < 0.6 * losses[0]
    verify_manifest(tmp_path / "run")
    model = load_model(tmp_path / "run")
    assert isinstance(model, GPTNeoForCausalLM)
    assert isinstance(model, MetaModel)
    assert (model.config.meta_token_id, model.config.vocab_size) == (small_store.manifest.meta_token_id, 832)


@pytest.mark.parametrize(
    ("layers", "kinds"), [(1, ["global"]), (2, ["global", "local"]), (5, ["global", "local"] * 2 + ["global"])]
)
def test_a_new_one_has_the_sizes_asked_for_and_every_second_layer_local(
    layers: int, kinds: list[str], small_store: TokenStore
) -> None:
    shared = {"num_hidden_layers": layers, "intermediate_size": 40, "layer_norm_epsilon": 1e-3, "hidden_size": 32}
    positions = {"position_embedding": "learned", "second_attention": "none", "max_position_embeddings": 48}
    config = MetaGPT2Config(**shared, **positions, num_attention_heads=4, activation="relu", initializer_range=0.05)
    model = new_gpt_neo(config, small_store.tokenizer)
    assert [block.attn.attention_type for block in model.transformer.h] == kinds
    assert (model.config.window_size, model.config.activation_function) == (256, "relu")
    assert model.config.layer_norm_epsilon == 1e-3
    assert model.transformer.wpe.weight.shape == (48, 32)
    assert model.transformer.h[0].mlp.c_fc.weight.shape == (40, 32)
    assert model.transformer.wte.weight[:768].std().item() == pytest.approx(0.05, rel=0.1)


def test_a_run_that_was_cut_off_ends_like_one_that_was_not(
    pretraining: Callable[..., PretrainRecipe], steps: Any, tmp_path: Path
) -> None:
    recipe = pretraining(*NEO_MODEL, "data.placement=none")
    pretrain(recipe, tmp_path / "undisturbed")
    interrupt(partial(pretrain, recipe, tmp_path / "run"), steps, 5)
    rest = steps()
    pretrain(recipe, tmp_path / "run", progress=rest)
    assert rest == [5, 6, 7, 8]
    assert result(tmp_path / "run") == result(tmp_path / "undisturbed")


def test_verb_by_verb(small_store: TokenStore, metatokens: Run, tmp_path: Path) -> None:
    sizes = ("data.block_size=32", "data.placement=none", "model.hidden_size=16", *NEO_MODEL)
    settings = " ".join(f"--set {setting}" for setting in (f"data.tokens={small_store.path}", *sizes))
    status, _, said = metatokens(f"pretrain --recipe demo {settings} {STEPS} --out base")
    assert (status, said.splitlines()[-1]) == (0, "model: base")
    status, _, said = metatokens(f"finetune --model base --task parity --train-lengths 64 {STEPS} {WHOLE} --out tuned")
    assert (status, said.splitlines()[-1]) == (0, "models: tuned/64")
    status, output, _ = metatokens("evaluate --model tuned/64 --task parity --lengths 64 -n 4 --name gpt-neo --json")
    results = [json.loads(line) for line in output.splitlines()]
    assert (status, [result["metric"] for result in results]) == (0, ["exact_match", "token_accuracy"])
    about = {"model": "gpt-neo", "position_embedding": "learned", "train_length": 64, "length": 64, "task": "parity"}
    assert all(about.items() <= result.items() for result in results)
    status, output, _ = metatokens(f"perplexity --model base --corpus {small_store.path} --block-size 32 --json")
    assert (status, json.loads(output)["position_embedding"]) == (0, "learned")
    status, output, _ = metatokens("generate --model base 'the cat' --max-new-tokens 4")
    assert (status, output.startswith("the cat")) == (0, True)


# --- a published one


def retrofitted(metatokens: Run) -> str:
    """The folder of `neo` with a meta-token, and nothing else."""
    assert metatokens("retrofit --model neo --layers none --out neo-meta")[0] == 0
    return "neo-meta"


def test_its_answers_are_scored_like_transformers_own(small_store: TokenStore, metatokens: Run, tmp_path: Path) -> None:
    plain = published(small_store, tmp_path / "neo")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
    plain.save_pretrained(tmp_path / "neo")
    model = load_model(tmp_path / retrofitted(metatokens))
    tests = draw_test_examples("parity", 64, 40, small_store.tokenizer, condition="paper", documents=())
    meta = small_store.manifest.meta_token_id
    plain.resize_token_embeddings(meta + 1)
    right = total = 0
    with torch.no_grad():
        plain.transformer.wte.weight[meta] = model.transformer.wte.meta_token.weight
        for example in tests:
            logits = plain.eval()(torch.tensor([example.input_ids])).logits[0, :, :meta]
            for place in range(example.answer_start, len(example.input_ids)):
                right += int(logits[place - 1].argmax() == example.input_ids[place])
                total += 1
    result = evaluate(model, {64: tests}, About(model="gpt-neo", task="parity"))[1]
    assert (result.value, result.n) == (right / total, total)


def test_perplexity_is_that_of_transformers_own(small_store: TokenStore, metatokens: Run, tmp_path: Path) -> None:
    plain = published(small_store, tmp_path / "neo")
    text = small_store.tokens("held_out")[:320]
    ids = torch.tensor(text).reshape(10, 32)
    expected = math.exp(plain.eval()(ids, labels=ids).loss.item())
    for folder in ("neo", retrofitted(metatokens)):
        model = load_model(tmp_path / folder)
        result = perplexity(model, text, About(model="gpt-neo"), block_size=32, fraction=0.0, placement="none")
        assert result.value == pytest.approx(expected, rel=ROUNDED_PERPLEXITY)


def test_masks_in_an_old_file_are_passed_over_and_other_tensors_are_not(
    small_store: TokenStore, tmp_path: Path
) -> None:
    plain = published(small_store, tmp_path).eval()
    file, block = tmp_path / "model.safetensors", "transformer.h.1.attn.attention"
    weights, ids = load_file(file), torch.arange(20)[None]
    old = {f"{block}.masked_bias": torch.tensor(-1e9), f"{block}.bias": torch.zeros(1, 1, 72, 72, dtype=torch.uint8)}
    save_file(weights | old, file, metadata={"format": "pt"})
    torch.testing.assert_close(load_model(tmp_path)(ids).logits, plain(ids).logits)
    save_file(weights | {f"{block}.q_proj.bias": torch.zeros(16)}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"do not fit its configuration: see {block}\.q_proj\.bias"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "config.json is not a model configuration"),
        ({"activation_function": "step"}, "the weights in .* cannot be read: .*step"),
        ({"attention_layers": ["global", "sparse"]}, "Only attn layer types 'global' and 'local' exist"),
    ],
)
def test_a_folder_that_is_damaged_is_refused(
    changes: dict[str, Any], message: str, small_store: TokenStore, tmp_path: Path
) -> None:
    published(small_store, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=message) as refusal:
        load_model(tmp_path)
    assert "\n" not in str(refusal.value)


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
    for row, own in zip(ids, positions, strict=True):  # by a table whose first rows are those of the positions
        with torch.no_grad():
            before = table.clone()
            table[:20] = before[own]
            logits = model(row[None]).logits[0]
            table.copy_(before)
        expected.append(cross_entropy(logits[:-1], row[1:]))
    torch.testing.assert_close(losses, torch.stack(expected).mean())


def test_the_settings_of_a_run_from_a_published_one_state_its_sizes(
    pretraining: Callable[..., PretrainRecipe], small_store: TokenStore, tmp_path: Path
) -> None:
    published(small_store, tmp_path / "neo")
    pretrain(pretraining("data.placement=none"), tmp_path / "run", init=tmp_path / "neo")
    stated = json.loads((tmp_path / "run" / "settings.json").read_text())["recipe"]["model"]
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 72}
    kinds = {"architecture": "gpt_neo", "position_embedding": "learned", "second_attention": "none"}
    assert stated == stated | sizes | kinds


# --- lengths, and mistakes


def test_a_length_beyond_its_positions_has_no_figure(small_store: TokenStore, metatokens: Run, tmp_path: Path) -> None:
    published(small_store, tmp_path / "neo")
    tests = {
        length: draw_test_examples("parity", length, 2, small_store.tokenizer, condition="paper", documents=())
        for length in (64, 128)
    }
    results = evaluate(load_model(tmp_path / retrofitted(metatokens)), tests, About(model="gpt-neo", task="parity"))
    assert [(result.length, result.n > 0, result.value is None) for result in results[::2]] == [
        (64, True, False),
        (128, False, True),
    ]


MISTAKES = {
    "evaluate --model neo-meta --task parity --lengths 64,128 -n 2": "a sequence of 128 tokens is longer than the 72",
    "evaluate --model neo-meta --task parity --lengths 64 -n 2 --intervention no_pos": "for this package's own models",
    "analyze residual --model neo-meta --task parity --length 64 -n 2": "computes its attention itself",
    "finetune --model neo --task parity --out new": "has no meta_token_id, which markers need; `metatokens retrofit`",
    "finetune --model neo-meta --task parity --train-lengths 128 --out new": "longer than the 72 learned positions",
    "perplexity --model neo --corpus STORE --block-size 90": "longer than the 72 learned positions",
    "generate --model neo-meta the --max-new-tokens 80": "longer than the 72 learned positions",
    "extend --model neo --factor 2 --recipe demo --set data.tokens=STORE --out new": "position_embedding 'learned'",
    "pretrain --recipe demo --set data.tokens=STORE --set model.architecture=gpt_neo --out new": (
        "set model.position_embedding=learned, model.second_attention=none and model.attention_scale=constant"
    ),
    "pretrain --recipe demo --set data.tokens=STORE --set model.architecture=gpt_neox --out new": (
        "model.architecture is 'gpt_neox': input should be 'gpt_neo'"
    ),
}


@pytest.mark.parametrize(("line", "said"), MISTAKES.items(), ids=list(MISTAKES))
def test_a_mistake_is_one_sentence(
    line: str, said: str, small_store: TokenStore, metatokens: Run, tmp_path: Path
) -> None:
    published(small_store, tmp_path / "neo")
    if "neo-meta" in line:
        retrofitted(metatokens)
    status, output, error = metatokens(line.replace("STORE", str(small_store.path)))
    assert (status, output) == (2, "")
    assert error.startswith("metatokens: ")
    assert error.endswith(".\n")
    assert error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "new").exists()
