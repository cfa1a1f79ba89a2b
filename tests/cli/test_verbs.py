"""The commands in order, from text to figures, and then again."""

import json
from pathlib import Path

import pytest

from metatokens.data.store import TokenStore
from metatokens.records import Result, read_lines
from tests.cli.command_lines import FINETUNE, PRETRAIN, SMALL, Contents, Models, Run


def test_from_text_to_figures_verb_by_verb(workplace: Path, metatokens: Run) -> None:
    status, output, error = metatokens("tokenize --corpus text.txt --tokenizer train:768 --held-out 0.2 --out tokens")
    counts = json.loads((workplace / "tokens" / "manifest.json").read_text())["splits"]
    sizes = [f"{split}: {c['tokens']:,} tokens in {c['documents']:,} documents" for split, c in counts.items()]
    assert (status, output, error.splitlines()) == (0, "", sizes)

    status, output, error = metatokens(f"{PRETRAIN} --set training.seed=5 --out base")
    assert (status, output, error.splitlines()[-1]) == (0, "", "model: base")
    status, output, error = metatokens(
        f"{FINETUNE} --model base --task parity --train-lengths 64,128 --set training.seed=3 --out tuned"
    )
    assert (status, output, error.splitlines()[-1]) == (0, "", "models: tuned/128, tuned/64")

    evaluation = "evaluate --model tuned/64 --task parity --lengths 64,128 -n 3"
    status, output, error = metatokens(f"{evaluation} --json")
    assert (status, error) == (0, "")
    (workplace / "printed.jsonl").write_text(output)
    printed = read_lines(workplace / "printed.jsonl", Result)
    assert [(r.length, r.metric) for r in printed] == [
        (length, metric) for length in (64, 128) for metric in ("exact_match", "token_accuracy")
    ]
    assert {(r.model, r.train_length, r.train_condition, r.seed) for r in printed} == {("tuned/64", 64, "paper", 3)}

    measure = "perplexity --model base --block-size 32"
    for line in (
        evaluation,
        f"{measure} --corpus tokens --placement uniform",
        f"{measure} --corpus text.txt",
        f"{measure} --corpus text.txt --max-tokens 60",
    ):
        status, output, error = metatokens(f"{line} --name meta --out figures.jsonl")  # appended
        assert (status, output.startswith("model meta, "), error) == (0, True, "")
    figures = read_lines(workplace / "figures.jsonl", Result)
    assert [r.value for r in figures[:4]] == [r.value for r in printed]
    assert [(r.metric, r.condition) for r in figures[4:]] == [
        ("perplexity", "uniform"), ("perplexity", "none"), ("perplexity", "none")
    ]  # fmt: skip
    assert {r.seed for r in figures[4:]} == {5}
    assert figures[4].n < figures[5].n  # the held-out split, and the whole
    assert figures[6].n == 2 * 28  # two blocks of 29 text tokens

    status, output, error = metatokens("report figures.jsonl --out report")
    assert (status, output, error.splitlines()[-1]) == (0, "", "report: report/index.html")


def test_a_corpus_of_one_document_holds_nothing_out_and_says_so(workplace: Path, metatokens: Run) -> None:
    text = Path("text.txt").read_text(encoding="utf-8")[:4_000]
    Path("old.txt").write_bytes(text.replace("\n", "\r").encode() * 20)  # lines as in old files of Macs
    Path("short.txt").write_text(text)
    for name, says_so in (("old", False), ("short", True)):
        status, _, error = metatokens(f"tokenize --corpus {name}.txt --tokenizer train:300 --out {name}")
        assert (status, "Nothing is held out, since the corpus has only one document" in error) == (0, says_so)


def test_finished_work_is_not_repeated(
    workplace: Path, contents: Contents, metatokens: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "tokenize --corpus text.txt --tokenizer train:768 --out tokens",
        f"{PRETRAIN} --out base",
        f"{FINETUNE} --model base --task parity --train-lengths 64 --out tuned",
    ]
    first = [metatokens(line) for line in lines]
    before = contents(workplace)
    monkeypatch.setattr("metatokens.training.trainer.MetaTokenTrainer.train", None)
    monkeypatch.setattr("metatokens.data.writing._begin", None)
    again = [metatokens(line) for line in lines]
    assert again[0] == first[0]
    finished = "the run in {} is finished; to train its model further, start a new run with `{}`."
    assert [error.splitlines() for *_, error in again[1:]] == [
        [finished.format("base", "pretrain --init base"), "model: base"],
        [finished.format("tuned", "finetune --model tuned/64"), "models: tuned/64"],
    ]
    assert {status for status, *_ in again} == {0}
    assert contents(workplace) == before
    longer = PRETRAIN.replace("training.max_steps=2", "training.max_steps=3")
    advice = "was 2 and is now 3); give a new folder, and start from this model (pretrain --init, finetune --model), or"
    assert advice in metatokens(f"{longer} --out base")[2]


def test_pretraining_starts_from_a_model_of_the_hub(
    workplace: Path, small_model: Models, small_store: TokenStore, metatokens: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"someone/small": small_model()}
    monkeypatch.setattr("metatokens.checkpoint.snapshot_download", lambda name, **_: str(models[name]))
    line = f"{PRETRAIN} --set data.tokens={small_store.path} --init"
    assert metatokens(f"{line} hf:someone/small --out fetched")[0] == 0
    assert metatokens(f"{line} {models['someone/small']} --out local")[0] == 0
    fetched, local = (Path(out, "model.safetensors").read_bytes() for out in ("fetched", "local"))
    assert fetched == local


def test_a_model_is_measured_with_interventions_and_extended(
    workplace: Path, small_model: Models, small_store: TokenStore, metatokens: Run
) -> None:
    model = small_model(max_position_embeddings=32)
    evaluation = f"evaluate --model {model} --task parity --lengths 64 -n 4 --name meta --json"
    lines = {
        given: [json.loads(line) for line in metatokens(f"{evaluation} {given}")[1].splitlines()]
        for given in ("", "--intervention noise:0", "--intervention noise:50 --noise-seed 3")
    }
    plain, none, noisy = ([(line.get("intervention"), line["value"]) for line in found] for found in lines.values())
    assert [name for name, _ in (*plain, *none, *noisy)] == [None, None, "noise:0", "noise:0", "noise:50", "noise:50"]
    assert [value for _, value in plain] == [value for _, value in none]

    settings = SMALL.replace("data.tokens=tokens", f"data.tokens={small_store.path}")
    status, _, error = metatokens(f"extend --model {model} --factor 2 --recipe demo {settings} --out longer")
    assert (status, error.splitlines()[-1]) == (0, "model: longer")
    rope = json.loads((workplace / "longer" / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 2.0, 32)
