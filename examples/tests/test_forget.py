"""The experiment results/forget, whole, with a tiny Llama and a tiny tokenizer."""

import copy
import gzip
import json
import re
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from metatokens import add_meta_attention
from metatokens.checkpoint import load_model, save_model
from metatokens.data.tokenizer import load_tokenizer
from metatokens.evaluation.accuracy import TEST_SEED
from metatokens.records import Result
from metatokens.retrofit import hooks
from metatokens.tasks import TASKS
from metatokens.tasks.curriculum import task_texts
from results.forget import layers as blocks
from results.forget import run, speed, texts

# PEFT's.
pytestmark = pytest.mark.filterwarnings(
    "ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning"
)
SENTENCES = (
    "He came home, and ate. She read a long book; it rained all day! Was it late? They slept.\n\n"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forget")
    facts = [
        texts.FACT.format(*pair)
        for pair in zip(texts.CITIES.split() * 6, texts.WORDS, strict=False)
    ]
    with gzip.open(folder / "novel.txt.gz", "wt") as file:
        file.write("".join(f"On day {day} {SENTENCES}" for day in range(400)))
    corpus = [SENTENCES * 5, "".join(facts), texts.QUESTION]
    tokenizer = load_tokenizer("train:700", corpus=corpus, extra_texts=task_texts())
    tokenizer.pad_token = tokenizer.eos_token
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    plain = LlamaForCausalLM(
        LlamaConfig(vocab_size=704, num_key_value_heads=1, head_dim=16, **sizes)
    )
    for name, chosen in (("base-meta", None), ("base-tokens", [])):
        model = add_meta_attention(
            copy.deepcopy(plain), tokenizer, heads=2, head_size=8, layers=chosen
        )
        (folder / name).mkdir()
        save_model(model, tokenizer, folder / name)
    return folder


@pytest.fixture(autouse=True)
def _undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_visibility", hooks._visibility)  # which the script replaces


def test_separators_are_kept_as_a_dense_mask_keeps_them(base: Path) -> None:
    tokenizer = load_tokenizer(str(base / "base-tokens"))
    read = texts.Texts(tokenizer, [str(base / "novel.txt.gz")])
    options = Namespace(out=base, length=256, device="cpu", blocks=3)
    one = run.Run(run.Arm("separators", 8, 0), options, read)
    model, ids = one.model(one.base).eval(), read.prose(np.random.default_rng(0), 100)
    seen = torch.zeros(1, 1, 100, 100, dtype=torch.bool)
    for query in range(100):
        for key in range(query + 1):
            has_separator = any(mark in tokenizer.decode([ids[key]]) for mark in ".?!")
            seen[..., query, key] = key < 4 or query - key < one.window or has_separator
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits
        cached = model(torch.tensor([ids[60:]]), past_key_values=run.read(model, ids[:60])).logits
        plain = load_model(base / "base-tokens").eval()
        expected = plain(torch.tensor([ids]), attention_mask=seen).logits
        assert not torch.allclose(found, plain(torch.tensor([ids])).logits, atol=1e-4)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cached, expected[:, 60:], atol=1e-5, rtol=1e-5)


def test_facts_are_asked_for_and_no_test_fact_is_trained(base: Path) -> None:
    tokenizer = load_tokenizer(str(base / "base-tokens"))
    read = texts.Texts(tokenizer, [str(base / "novel.txt.gz")])
    known = {"train": set(), "test": set()}
    for split, facts in known.items():
        for number in range(20):
            ids, questions = read.asked(np.random.default_rng(number), 300, split, 80)
            assert len(ids) == 300
            whole = tokenizer.decode(ids)
            for question, answer in questions:
                before, after = texts.QUESTION.split("{}")
                city = tokenizer.decode(question).removeprefix(before).removesuffix(after)
                word = tokenizer.decode(answer).removeprefix(" ")
                assert whole.count(f" The code word for {city} is {word}.") == 1
                assert " The code word" not in tokenizer.decode(ids[-80:])
                facts.add((city, word))
    assert len(known["test"]) > 50
    assert not known["train"] & known["test"]


@pytest.mark.parametrize("form", texts.FORMS)
def test_facts_of_other_forms_are_in_their_texts(form: str, base: Path) -> None:
    tokenizer, (cities, fact, asks) = load_tokenizer(str(base / "base-tokens")), texts.FORMS[form]
    ((ids, questions),) = texts.Texts(tokenizer, [str(base / "novel.txt.gz")]).tests(
        8, 500, 80, form
    )
    asked = {tokenizer.decode(question): tokenizer.decode(answer) for question, answer in questions}
    answered = {
        city: asked[asks.format(city)] for city in cities.split() if asks.format(city) in asked
    }
    assert len(answered) == 8
    assert all(
        tokenizer.decode(ids).count(fact.format(city, word[1:])) == 1
        for city, word in answered.items()
    )
    assert (cities == texts.CITIES) or not set(cities.split()) & set(texts.CITIES.split())


def test_the_whole_path(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    novel, out = str(base / "novel.txt.gz"), base
    sizes = [
        "--steps",
        "2",
        "--length",
        "256",
        "--beyond",
        "80",
        "--excerpts",
        "2",
        "--prompts",
        "1",
    ]
    line = ["run", "--train", novel, "--held-out", novel, "--out", str(out), *sizes]
    monkeypatch.setattr(sys, "argv", [*line, "--facts", "256:8", "--device", "cpu"])
    few = [run.Arm("full", 1, 0), run.Arm("separators", 8, 2), run.Arm("meta", 8, 2, teacher=True)]
    few.append(run.Arm("window", 2, 2, full=(1,), batch=4))
    monkeypatch.setattr(run, "plan", lambda steps: iter(few))
    run.main()
    written = (out / "results.jsonl.gz").read_bytes()
    lines = [Result.model_validate_json(one) for one in gzip.decompress(written).splitlines()]
    rules = {(one.task, one.model): one for one in lines if one.metric == "shortcut"}
    lines = [one for one in lines if one.metric != "shortcut"]
    assert {task for task, _ in rules} == {*TASKS}
    data = texts.Texts(load_tokenizer(str(base / "base-tokens")), [novel]).task("parity", TEST_SEED)
    example = data.test(0, texts.TASK_LENGTH)
    asked = re.findall(r"[01]", example.prompt[: example.markers[0]])
    is_right = str(sum(map(int, asked)) % 2) == example.completion.strip()
    assert rules["parity", "the XOR of the bits before the first marker"].value == is_right
    assert {(one.model, one.metric) for one in lines} == {
        (arm.name, metric) for arm in few for metric in ("perplexity", "exact_match")
    }
    assert [one.kv_kept for one in lines if one.model == "full"] == [1.0] * (
        7 + len(texts.FORMS) - 1
    )
    prose = {one.model: one for one in lines if one.text is not None}
    assert max(prose["separators"].kv_kept, prose["meta"].kv_kept) < 0.2
    half = prose["window"]  # a third of 256 tokens, and 64 in each of the other two blocks
    assert (half.recipe, half.text_window) == ("forget/window-1-2-full-1-brief", 60)
    assert half.kv_kept == pytest.approx((256 + 2 * 64) / (3 * 256), abs=1e-4)
    run.main()  # finds everything done
    assert (out / "results.jsonl.gz").read_bytes() == written
    capsys.readouterr()
    line = [
        "speed",
        "--out",
        str(out),
        "--text",
        novel,
        "--lengths",
        "600",
        "--rounds",
        "1",
        "--device",
        "cpu",
    ]
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setitem(speed.CONTESTANTS, "blocks", ("base-tokens", 28, None, (1,)))
    speed.main()
    found = {one["model"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    # Entries, keys and values, layers, width, bytes.
    assert found["full"]["cache_bytes"] == (600 + 31) * 2 * 3 * 16 * 2
    assert found["tokens"]["cache_bytes"] < found["full"]["cache_bytes"]
    assert 1 / 3 < found["blocks"]["cache_bytes"] / found["full"]["cache_bytes"] < 0.5
    capsys.readouterr()
    monkeypatch.setattr(
        sys,
        "argv",
        ["layers", "--out", str(out), "--train", novel, "--texts", "1", "--length", "256"],
    )
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--beyond", "80", "--device", "cpu"])
    blocks.main()
    found = [json.loads(one) for one in capsys.readouterr().out.splitlines()]
    assert [(one["block"], one["n"]) for one in found] == [(None, 8), (0, 8), (1, 8), (2, 8)]
    assert len({one["loss"] for one in found}) == 4
