"""The baseline `gpt-neo` by the same commands as the other models: from scratch, and from a published checkpoint."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoConfig, GPTNeoForCausalLM

from metatokens.checkpoint import load_model, verify_manifest
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import load_tokenizer
from metatokens.evaluation.accuracy import evaluate
from metatokens.evaluation.accuracy import test_examples as draw_tests
from metatokens.evaluation.perplexity import perplexity
from metatokens.recipe import PretrainRecipe
from metatokens.training.finetune import check_meta_token
from metatokens.training.pretrain import pretrain

NEO = ("architecture=gpt_neo", "position_embedding=learned", "second_attention=none", "max_position_embeddings=72")
NEO_MODEL = tuple(f"model.{setting}" for setting in NEO)
STEPS = "--set training.max_steps=2 --set training.save_steps=2 --set training.logging_steps=1"
Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def published(store: TokenStore, folder: Path, *, padding: int = 0) -> GPTNeoForCausalLM:
    """A small random GPT-Neo as it is published: with a tokenizer, without a meta-token, perhaps with unused rows."""
    torch.manual_seed(0)
    model = GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=store.manifest.vocab_size + padding,
            hidden_size=16,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            window_size=16,
            max_position_embeddings=72,
            bos_token_id=store.manifest.eos_token_id,
            eos_token_id=store.manifest.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    store.tokenizer.save_pretrained(folder)
    return model


def curve(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]


# --- from scratch


def test_a_new_one_learns_and_is_saved_in_transformers_format(
    pretraining: Callable[..., PretrainRecipe], small_store: TokenStore, tmp_path: Path
) -> None:
    steps = ("training.max_steps=60", "training.save_steps=60", "training.learning_rate=0.02")
    pretrain(pretraining(*NEO_MODEL, *steps, "data.placement=none"), tmp_path / "run")
    losses = [point["loss"] for point in curve(tmp_path / "run") if "loss" in point]
    assert losses[0] == pytest.approx(math.log(832), abs=0.5)  # 769 entries padded to 832, none of them preferred
    assert sum(losses[-10:]) / 10 < 0.6 * losses[0]
    verify_manifest(tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert type(model) is GPTNeoForCausalLM
    assert (model.config.meta_token_id, model.config.vocab_size) == (small_store.manifest.meta_token_id, 832)


def test_a_run_that_was_cut_off_ends_like_one_that_was_not(
    pretraining: Callable[..., PretrainRecipe], steps: Any, tmp_path: Path
) -> None:
    recipe = pretraining(*NEO_MODEL, "data.placement=none")
    pretrain(recipe, tmp_path / "undisturbed")
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe, tmp_path / "run", progress=steps(stop_at=5))
    rest = steps()
    pretrain(recipe, tmp_path / "run", progress=rest)
    assert rest == [5, 6, 7, 8]
    for name in ("model.safetensors", "config.json", "curve.jsonl", "settings.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name


def test_verb_by_verb(small_store: TokenStore, metatokens: Run, tmp_path: Path) -> None:
    sizes = ("data.block_size=32", "data.placement=none", "model.hidden_size=16", *NEO_MODEL)
    settings = " ".join(f"--set {setting}" for setting in (f"data.tokens={small_store.path}", *sizes))
    status, _, said = metatokens(f"pretrain --recipe demo {settings} {STEPS} --out base")
    assert (status, said.splitlines()[-1]) == (0, "model: base")
    status, _, said = metatokens(f"finetune --model base --task parity --train-lengths 64 {STEPS} --out tuned")
    assert (status, said.splitlines()[-1]) == (0, "models: tuned/64")
    status, output, _ = metatokens("evaluate --model tuned/64 --task parity --lengths 64 -n 4 --name gpt-neo")
    results = [json.loads(line) for line in output.splitlines()]
    assert (status, [result["metric"] for result in results]) == (0, ["exact_match", "token_accuracy"])
    about = {"model": "gpt-neo", "position_embedding": "learned", "train_length": 64, "length": 64, "task": "parity"}
    assert all(about.items() <= result.items() for result in results)
    status, output, _ = metatokens(f"perplexity --model base --corpus {small_store.path} --block-size 32")
    assert (status, json.loads(output)["position_embedding"]) == (0, "learned")
    status, output, _ = metatokens("generate --model base 'the cat' --max-new-tokens 4")
    assert (status, output.startswith("the cat")) == (0, True)


# --- a published one


def test_a_published_one_is_fine_tuned_and_evaluated(small_store: TokenStore, metatokens: Run, tmp_path: Path) -> None:
    plain = published(small_store, tmp_path / "neo")
    status, _, said = metatokens(f"finetune --model neo --task list_recall --train-lengths 64 {STEPS} --out tuned")
    assert (status, said.splitlines()[-1]) == (0, "models: tuned/64")
    tuned = load_model(tmp_path / "tuned" / "64")
    assert tuned.config.meta_token_id == small_store.manifest.meta_token_id == small_store.tokenizer.meta_token_id
    assert tuned.config.vocab_size == plain.config.vocab_size + 1
    moved = tuned.transformer.h[0].attn.attention.q_proj.weight - plain.transformer.h[0].attn.attention.q_proj.weight
    assert moved.abs().max() > 1e-5
    status, output, _ = metatokens("evaluate --model tuned/64 --task list_recall --lengths 64 -n 4")
    assert (status, json.loads(output.splitlines()[0])["n"]) == (0, 4)


def test_its_answers_are_scored_like_transformers_own(small_store: TokenStore, tmp_path: Path) -> None:
    plain = published(small_store, tmp_path)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
    plain.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    tests = draw_tests("parity", 64, 40, small_store.tokenizer, condition="paper", documents=())
    meta, mean = small_store.manifest.meta_token_id, plain.transformer.wte.weight.mean(dim=0, keepdim=True)
    plain.resize_token_embeddings(meta + 1)
    right = total = 0
    with torch.no_grad():
        plain.transformer.wte.weight[meta] = mean[0]
        for example in tests:
            logits = plain.eval()(torch.tensor([example.input_ids])).logits[0, :, :meta]
            for place in range(example.answer_start, len(example.input_ids)):
                right += int(logits[place - 1].argmax() == example.input_ids[place])
                total += 1
    result = evaluate(model, {64: tests}, task="parity", name="gpt-neo")[1]
    assert (result.value, result.n) == (right / total, total)


def test_the_settings_of_a_run_from_a_published_one_state_its_sizes(
    pretraining: Callable[..., PretrainRecipe], small_store: TokenStore, tmp_path: Path
) -> None:
    published(small_store, tmp_path / "neo")
    pretrain(pretraining("data.placement=none"), tmp_path / "run", init=tmp_path / "neo")
    stated = json.loads((tmp_path / "run" / "settings.json").read_text())["recipe"]["model"]
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 72}
    kinds = {"architecture": "gpt_neo", "position_embedding": "learned", "second_attention": "none"}
    assert stated == stated | sizes | kinds | {"activation": "gelu_new"}


def test_perplexity_is_that_of_transformers_own(small_store: TokenStore, tmp_path: Path) -> None:
    plain = published(small_store, tmp_path)
    text = small_store.tokens("held_out")[:320]
    result = perplexity(load_model(tmp_path), text, block_size=32, fraction=0.0, placement="none", name="gpt-neo")
    ids = torch.tensor(text).reshape(10, 32)
    expected = math.exp(plain.eval()(ids, labels=ids).loss.item())
    # The meta-token's share moves no loss by more than log(1 + 1 / 768).
    assert expected <= result.value * (1 + 1e-5)
    assert result.value <= expected * (1 + 1 / 768) * (1 + 1e-5)


def test_the_gpt2_vocabulary_gets_the_papers_meta_token(shared_data: Path, tmp_path: Path) -> None:
    load_tokenizer(str(shared_data / "gpt2_tokenizer")).save_pretrained(tmp_path)
    sizes = {"hidden_size": 8, "num_heads": 2, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    plain = GPTNeoForCausalLM(GPTNeoConfig(**sizes, max_position_embeddings=16)).eval()
    plain.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert (model.config.meta_token_id, model.config.vocab_size) == (50257, 50258)
    check_meta_token(model.config, load_tokenizer(str(tmp_path)), tmp_path)
    ids = torch.tensor([[0, 50256, 31337, 1000]])
    torch.testing.assert_close(model(ids).logits[..., :50257], plain(ids).logits)


# --- lengths, and mistakes


def test_a_length_beyond_its_positions_has_no_figure(small_store: TokenStore, tmp_path: Path) -> None:
    published(small_store, tmp_path)
    tests = {
        length: draw_tests("parity", length, 2, small_store.tokenizer, condition="paper", documents=())
        for length in (64, 128)
    }
    results = evaluate(load_model(tmp_path), tests, task="parity", name="gpt-neo")
    assert [(result.length, result.n > 0, result.value is None) for result in results[::2]] == [
        (64, True, False),
        (128, False, True),
    ]


MISTAKES = {
    "evaluate --model neo --task parity --lengths 64,128 -n 2": "a sequence of 128 tokens is longer than the 72",
    "evaluate --model neo --task parity --lengths 64 -n 2 --intervention no_pos": "for this package's own models",
    "analyze residual --model neo --task parity --length 64 -n 2": "computes its attention itself",
    "finetune --model neo --task parity --train-lengths 128 --out new": "longer than the 72 learned positions",
    "finetune --model padded --task parity --out new": "meta_token_id 772, and its tokenizer's meta-token is 768",
    "finetune --model hf:a/b/c --task parity --out new": "the Hugging Face Hub gave no model 'a/b/c'",
    "perplexity --model neo --corpus STORE --block-size 90": "longer than the 72 learned positions",
    "generate --model neo the --max-new-tokens 80": "longer than the 72 learned positions",
    "generate --model neo the --meta-every 2": "a gpt_neo generates without meta-tokens",
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
    published(small_store, tmp_path / "padded", padding=4)
    status, output, error = metatokens(line.replace("STORE", str(small_store.path)))
    assert (status, output) == (2, "")
    assert error.startswith("metatokens: ")
    assert error.endswith(".\n")
    assert error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "new").exists()
