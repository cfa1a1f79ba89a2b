"""The commands in order, from text to figures, and then again."""

from pathlib import Path

import pytest

from metatokens.data.store import TokenStore
from tests.cli.command_lines import (
    FINETUNE,
    PRETRAIN,
    SMALL,
    Contents,
    Models,
    Run,
    Succeed,
    column,
    json_of,
    read_lines,
)

TOKENIZE = "tokenize --corpus text.txt --tokenizer train:768 --out tokens"
TUNE = f"{FINETUNE} --model base --task parity --set training.seed=3 --out tuned"


def test_from_text_to_figures_verb_by_verb(workplace: Path, run: Succeed) -> None:
    _, told = run(TOKENIZE)
    splits = json_of("tokens/manifest.json")["splits"]
    train, held_out = splits["train"], splits["held_out"]
    assert told.splitlines() == [
        f"train: {train['tokens']:,} tokens in {train['documents']:,} documents",
        f"held_out: {held_out['tokens']:,} tokens in {held_out['documents']:,} documents",
    ]

    _, told = run(f"{PRETRAIN} --set training.seed=5 --out base")
    assert told.splitlines()[-1] == "model: base"
    _, told = run(f"{TUNE} --set task.train_lengths=[64,128]")
    assert told.splitlines()[-1] == "models: tuned/128, tuned/64"

    evaluate = "evaluate --model tuned/64 --task parity --lengths 64,128 -n 3"
    output, _ = run(f"{evaluate} --json")
    printed = read_lines(output)
    assert column(printed, "length") == [64, 64, 128, 128]
    assert column(printed, "metric") == ["exact_match", "token_accuracy"] * 2
    trained = {"model": "tuned/64", "train_length": 64, "train_condition": "paper", "seed": 3}
    assert printed[0] | trained == printed[0]

    measure = "perplexity --model base --block-size 32"
    measurements = (
        evaluate,
        f"{measure} --corpus tokens --placement uniform",
        f"{measure} --corpus text.txt",
        f"{measure} --corpus text.txt --max-tokens 60",
    )
    for line in measurements:
        output, _ = run(f"{line} --out figures.jsonl")
        assert output.startswith("model ")
    *accuracies, held_out, whole, two_blocks = read_lines(Path("figures.jsonl").read_text())
    assert column(accuracies, "value") == column(printed, "value")
    assert column([held_out, whole, two_blocks], "text") == ["tokens", "text.txt", "text.txt"]
    assert (held_out["condition"], whole["condition"]) == ("uniform", "none")
    assert held_out["seed"] == 5
    assert held_out["n"] < whole["n"]
    assert two_blocks["n"] == 2 * 28  # of 29 text tokens

    _, told = run("report figures.jsonl --out report")
    assert told.splitlines()[-1] == "report: report/index.html"


@pytest.mark.parametrize(("repeats", "is_warned"), [(1, True), (20, False)])
def test_a_corpus_of_one_document_holds_nothing_out_and_says_so(
    repeats: int, is_warned: bool, workplace: Path, run: Succeed
) -> None:
    text = Path("text.txt").read_text(encoding="utf-8")[:4_000]
    # Lines as in old files of Macs.
    Path("old.txt").write_bytes(text.replace("\n", "\r").encode() * repeats)
    _, error = run("tokenize --corpus old.txt --tokenizer train:300 --out old")
    assert ("Nothing is held out, since the corpus has only one document" in error) == is_warned


def test_finished_work_is_not_repeated(
    workplace: Path,
    contents: Contents,
    run: Succeed,
    metatokens: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tune = f"{TUNE} --set task.train_lengths=[64]"
    tokenized = run(TOKENIZE)
    run(f"{PRETRAIN} --out base")
    run(tune)
    before = contents(workplace)
    monkeypatch.setattr("metatokens.training.trainer.MetaTokenTrainer.train", None)
    monkeypatch.setattr("metatokens.data.writing._begin", None)

    output, tokenized_again = run(TOKENIZE)
    notice = "tokens was finished earlier: the corpus is not read again without --overwrite.\n"
    assert (output, tokenized_again) == (tokenized[0], notice + tokenized[1])
    _, pretrained = run(f"{PRETRAIN} --out base")
    _, tuned = run(tune)

    advice = "is finished; to train its model further, start a new run with"
    assert pretrained.splitlines() == [
        f"the run in base {advice} `pretrain --init base`.",
        "model: base",
    ]
    assert tuned.splitlines() == [
        f"the run in tuned {advice} `finetune --model tuned/64`.",
        "models: tuned/64",
    ]
    assert contents(workplace) == before
    longer = PRETRAIN.replace("training.max_steps=2", "training.max_steps=3")
    _, _, error = metatokens(f"{longer} --out base")
    assert "was 2 and is now 3); give a new folder, or --overwrite" in error


def test_a_model_is_measured_with_interventions(small_model: Models, run: Succeed) -> None:
    evaluate = f"evaluate --model {small_model()} --task parity --lengths 64 -n 4 --json"
    outputs = [
        run(evaluate),
        run(f"{evaluate} --intervention noise:0"),
        run(f"{evaluate} --intervention no_pos"),
    ]

    plain, noiseless, without_positions = (read_lines(output)[0] for output, _ in outputs)

    assert "intervention" not in plain
    assert noiseless["intervention"] == "noise:0"
    assert noiseless["value"] == plain["value"]
    assert without_positions["intervention"] == "no_pos"


@pytest.mark.parametrize(("option", "original"), [("", 32), ("--original-length 16", 16)])
def test_a_model_is_extended(
    option: str,
    original: int,
    workplace: Path,
    small_model: Models,
    small_store: TokenStore,
    run: Succeed,
) -> None:
    model = small_model(max_position_embeddings=32)
    settings = SMALL.replace("data.tokens=tokens", f"data.tokens={small_store.path}")

    _, told = run(
        f"extend --model {model} --factor 2 {option} --recipe demo {settings} --out longer"
    )

    rope = json_of("longer/config.json")["rope_parameters"]
    assert told.splitlines()[-1] == "model: longer"
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == (
        "yarn",
        2.0,
        original,
    )
