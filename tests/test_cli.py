"""The command: each verb on small files, and one sentence for each mistake, with nothing lost."""

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig

from metatokens import cli, encode_prompt
from metatokens.analysis.records import Measurement
from metatokens.cli.app import progress_bar
from metatokens.data.sharding import Plan
from metatokens.data.store import TokenStore
from metatokens.data.writing import write_token_store
from metatokens.errors import UserError
from metatokens.evaluation.results import read_results
from metatokens.evaluation.speed import Timing
from metatokens.model.checkpoint import load_model, write_manifest
from metatokens.tasks.example import read_examples
from metatokens.training.run_folder import open_run

SMALL = " ".join(
    f"--set {setting}"
    for setting in (
        "data.tokens=tokens", "data.block_size=32", "model.hidden_size=16", "model.num_hidden_layers=1",
        "model.num_attention_heads=2", "training.max_steps=2", "training.save_steps=2", "training.logging_steps=1",
    )
)  # fmt: skip
PRETRAIN = f"pretrain --recipe demo {SMALL}"
FINETUNE = "finetune --set training.max_steps=2 --set training.save_steps=2 --set training.logging_steps=1"

Run = Callable[[str], tuple[int, str, str]]
Contents = Callable[[Path], dict[str, bytes]]


# --- each verb


@pytest.fixture
def workplace(small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder but for a corpus, and the current one."""
    shutil.copy(small_corpus, tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_text_to_figures_verb_by_verb(workplace: Path, metatokens: Run) -> None:
    status, output, error = metatokens("tokenize --corpus text.txt --tokenizer train:768 --held-out 0.2 --out tokens")
    counts = json.loads((workplace / "tokens" / "manifest.json").read_text())["splits"]
    sizes = [f"{split}: {c['tokens']:,} tokens in {c['documents']:,} documents" for split, c in counts.items()]
    assert (status, output, error.splitlines()) == (0, "", sizes)

    status, output, error = metatokens(f"{PRETRAIN} --set training.seed=5 --out base")
    assert (status, output, error.splitlines()[-1]) == (0, "", "model: base")
    status, output, error = metatokens(
        f"{FINETUNE} --model base --task parity --train-length 64,128 --set training.seed=3 --out tuned"
    )
    assert (status, output, error.splitlines()[-1]) == (0, "", "models: tuned/128, tuned/64")

    evaluation = "evaluate --model tuned/64 --task parity --lengths 64,128 -n 3"
    status, output, error = metatokens(evaluation)
    assert (status, error) == (0, "")
    (workplace / "printed.jsonl").write_text(output)
    printed = read_results([workplace / "printed.jsonl"])
    assert [(r.length, r.metric) for r in printed] == [
        (length, metric) for length in (64, 128) for metric in ("exact_match", "token_accuracy")
    ]
    assert {(r.model, r.train_length, r.train_condition, r.seed) for r in printed} == {("tuned/64", 64, "paper", 3)}

    assert metatokens(f"{evaluation} --name meta --out figures.jsonl") == (0, "", "")
    measure = "perplexity --model base --block-size 32 --name meta --out figures.jsonl"
    assert metatokens(f"{measure} --corpus tokens --placement uniform") == (0, "", "")
    assert metatokens(f"{measure} --corpus text.txt") == (0, "", "")  # appended
    assert metatokens(f"{measure} --corpus text.txt --tokens 60") == (0, "", "")
    figures = read_results([workplace / "figures.jsonl"])
    assert [r.value for r in figures[:4]] == [r.value for r in printed]
    assert [(r.metric, r.condition) for r in figures[4:]] == [
        ("perplexity", "uniform"), ("perplexity", "none"), ("perplexity", "none")
    ]  # fmt: skip
    assert {r.seed for r in figures[4:]} == {5}
    assert figures[4].n < figures[5].n  # the held-out split, and the whole
    assert figures[6].n == 2 * 28  # two blocks of 29 text tokens

    status, output, error = metatokens("report figures.jsonl --out report")
    assert (status, output, error) == (0, "", "report: report/index.html\n")


OWN = [
    {"prompt": "the cat _PAUSE_ sat", "markers": [7], "completion": " hills"},
    {"prompt": "the cat _PAUSE_ sat", "completion": " river"},
    {"prompt": "two dogs ran over", "completion": " river in spring"},
]


def test_own_records_are_trained_on_and_measured(
    workplace: Path, small_model: Callable[..., Path], metatokens: Run
) -> None:
    for name, records in (("own", OWN[:2]), ("held_out", OWN[1:])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tuned = (
        f"finetune --model {small_model()} --data own.jsonl --train-length 64 --set training.max_steps=60 "
        "--set training.save_steps=60 --set training.learning_rate=0.02 --set training.warmup_steps=1"
    )
    status, output, error = metatokens(f"{tuned} --eval-data held_out.jsonl --out tuned")
    assert (status, error.splitlines()[0], error.splitlines()[-1]) == (
        0,
        "--train-length is ignored: the records of --data are trained on as they are, whatever their length.",
        "models: tuned/data",
    )
    assert "held-out loss" in error.splitlines()[-2]
    assert "held-out exact match 50.0%" in error.splitlines()[-2]
    curve = [json.loads(line) for line in Path("tuned/data/curve.jsonl").read_text().splitlines()]
    measured = [point for point in curve if "eval_loss" in point]
    assert [point["step"] for point in measured] == list(range(6, 61, 6))
    assert measured[0].keys() == {"step", "eval_loss", "eval_exact_match"}
    assert measured[-1]["eval_exact_match"] == 0.5
    Path("printed.jsonl").write_text(output)
    exact, tokens = read_results([Path("printed.jsonl")])
    assert (exact.metric, exact.value, exact.n, exact.task, exact.length, exact.condition, exact.chance) == (
        "exact_match", 0.5, 2, None, None, None, None
    )  # fmt: skip
    assert (tokens.metric, tokens.model, exact.low is not None) == ("token_accuracy", "tuned/data", True)

    # Neither the weights nor the losses depend on what was measured.
    assert metatokens(f"{tuned} --out plain")[0] == 0
    assert Path("plain/data/model.safetensors").read_bytes() == Path("tuned/data/model.safetensors").read_bytes()
    losses = [json.loads(line) for line in Path("plain/data/curve.jsonl").read_text().splitlines()]
    assert losses == [point for point in curve if "loss" in point]

    evaluation = "evaluate --model tuned/data --data held_out.jsonl --predictions answers.jsonl"
    status, output, error = metatokens(evaluation)
    assert (status, error, [json.loads(line)["value"] for line in output.splitlines()]) == (0, "", [0.5, tokens.value])
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [answer["exact"] for answer in answers] == [True, False]
    for answer, record in zip(answers, OWN[1:], strict=True):
        assert answer.keys() == {"prompt", "markers", "completion", "prediction", "exact"}
        assert {"markers": []} | record == {name: answer[name] for name in ("prompt", "markers", "completion")}
        assert (answer["prediction"] == record["completion"]) == answer["exact"]

    status, output, _ = metatokens(
        "evaluate --model tuned/data --task parity --lengths 64,128 -n 6 --predictions parity.jsonl"
    )
    answers = [json.loads(line) for line in Path("parity.jsonl").read_text().splitlines()]
    values = [line["value"] for line in map(json.loads, output.splitlines()) if line["metric"] == "exact_match"]
    assert values == [sum(answer["exact"] for answer in answers[start : start + 6]) / 6 for start in (0, 6)]


def test_figures_are_printed_where_no_terminal_is(workplace: Path, small_store: TokenStore, metatokens: Run) -> None:
    (workplace / "tokens").symlink_to(small_store.path)
    longer = PRETRAIN.replace("training.max_steps=2", "training.max_steps=4") + " --set training.eval_steps=3"
    number = r"[0-9.,e+-]+"
    figures = rf"loss {number},( held-out loss {number},)? learning rate {number}, {number} tokens/s"
    lines = metatokens(f"{longer} --out base")[2].splitlines()
    assert [re.sub(figures, "FIGURES", line) for line in lines] == [
        "pretrain 1/4: FIGURES", "pretrain 4/4: FIGURES", "model: base"
    ]  # fmt: skip
    assert ["held-out" in line for line in lines] == [False, True, False]


def test_lines_of_figures_are_half_a_minute_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(sys.modules["metatokens.cli.app"], "time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress_bar("finetune") as progress:
        for step in range(1, 1001):
            now[0] += 1.0
            progress(step, 1000, {} if step < 5 else {"loss": 2.5, "eval_exact_match": 0.5})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "finetune 5/1,000: loss 2.5, held-out exact match 50.0%"
    steps = [int(line.split()[1].split("/")[0].replace(",", "")) for line in lines]
    assert all(later - earlier <= 31 for earlier, later in pairwise(steps))
    assert len(steps) < 40
    assert steps[-1] == 1000
    monkeypatch.setenv("RANK", "1")  # of processes that train together, the first one speaks
    with progress_bar("finetune") as progress:
        progress(4, 4, {"loss": 1.0})
    assert capsys.readouterr().err == ""


def test_the_bar_on_a_terminal_shows_the_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with progress_bar("pretrain") as progress:
        progress(5, 10, {"loss": 2.5, "learning_rate": 6e-4, "tokens_per_second": 12345.6, "eval_loss": 2.75})
    shown = capsys.readouterr().err
    assert "loss 2.5, held-out loss 2.75, learning rate 0.0006, 12,346 tokens/s" in shown
    assert "5/10" in shown


def test_finished_work_is_not_repeated(
    workplace: Path, contents: Contents, metatokens: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "tokenize --corpus text.txt --tokenizer train:768 --out tokens",
        f"{PRETRAIN} --out base",
        f"{FINETUNE} --model base --task parity --train-length 64 --out tuned",
    ]
    first = [metatokens(line) for line in lines]
    before = contents(workplace)
    monkeypatch.setattr("metatokens.training.trainer.MetaTokenTrainer.train", None)
    monkeypatch.setattr("metatokens.data.writing._begin", None)
    again = [metatokens(line) for line in lines]
    assert again[0] == first[0]
    finished = "the run in {} is finished; to train its model further, start a new one with `{}`."
    assert [error.splitlines() for *_, error in again[1:]] == [
        [finished.format("base", "pretrain --init base"), "model: base"],
        [finished.format("tuned", "finetune --model tuned/64"), "models: tuned/64"],
    ]
    assert {status for status, *_ in again} == {0}
    assert contents(workplace) == before
    longer = PRETRAIN.replace("training.max_steps=2", "training.max_steps=3")
    status, _, error = metatokens(f"{longer} --out base")
    assert (status, error.splitlines()) == (
        2,
        [
            "metatokens: base holds a run with other settings (recipe.training.max_steps was 2 and is now 3); give a "
            "new folder, with --init (of finetune --model) to train its model further, or --overwrite to replace it."
        ],
    )


def test_samples_are_records(workplace: Path, small_store: TokenStore, metatokens: Run) -> None:
    common = f"-n 3 --tokenizer {small_store.path / 'tokenizer'}"
    for task, corpus in (("parity", ""), ("copying", "--corpus text.txt")):
        status, output, error = metatokens(f"sample {task} {common} {corpus} --split train --condition decoy --seed 4")
        assert (status, error) == (0, "")
        (workplace / f"{task}.jsonl").write_text(output)
        examples = read_examples(workplace / f"{task}.jsonl", small_store.tokenizer)
        assert [(e.task, e.split, e.condition, e.seed, e.index) for e in examples] == [
            (task, "train", "decoy", 4, index) for index in range(3)
        ]
    assert metatokens(f"sample parity {common} --phase 2 --out own.jsonl") == (0, "", "")
    assert metatokens(f"sample parity {common} --phase 3 --out own.jsonl") == (0, "", "")
    phases = [example.phase for example in read_examples(workplace / "own.jsonl", small_store.tokenizer)]
    assert phases == [2, 2, 2, 3, 3, 3]
    status, output, _ = metatokens("sample parity --tokenizer train:768 --corpus text.txt")
    assert (status, json.loads(output)["task"]) == (0, "parity")


def test_generation_continues_the_prompt(small_model: Callable[..., Path], metatokens: Run) -> None:
    model = small_model()
    prompt = "the cat _PAUSE_ sat <|endoftext|>"
    generate = f"generate --model {model} {shlex.quote(prompt)} --max-new-tokens 20"
    status, greedy, error = metatokens(generate)
    assert (status, error) == (0, "")
    assert greedy.startswith(prompt)
    assert len(greedy) > len(prompt) + 20
    assert metatokens(generate)[1] == greedy
    assert metatokens(f"{generate} --meta-every 2")[1] != greedy
    sampled = [metatokens(f"{generate} --temperature 1 --seed {seed}")[1] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_prompt_with_meta_tokens(
    workplace: Path, small_model: Callable[..., Path], small_store: TokenStore, metatokens: Run
) -> None:
    model, tokenizer = load_model(small_model()).eval(), small_store.tokenizer
    folder = small_model()
    text = "the cat _PAUSE_ sat _PAUSE_"
    ids = torch.tensor([encode_prompt(tokenizer, text, markers="_PAUSE_")])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    new = model.generate(ids, **options)[0, ids.shape[1] :]
    expected = tokenizer.decode(new, skip_special_tokens=True)
    generate = f"generate --model {folder} --max-new-tokens 6"
    assert metatokens(f"{generate} --marker _PAUSE_ '{text}'") == (0, f"{text}{expected}\n", "")
    assert metatokens(f"{generate} '{text}'")[1] != f"{text}{expected}\n"  # there it stays text
    shown = f"the cat<|meta|> sat<|meta|>{tokenizer.decode(new)}\n"
    assert metatokens(f"{generate} --marker _PAUSE_ --show-meta '{text}'") == (0, shown, "")

    whole = metatokens(f"{generate} --marker _PAUSE_ --show-meta --meta-every 2 '{text}'")[1]
    assert whole.count("<|meta|>") == 4  # two of the prompt, behind the second and the fourth token

    lines = [{"prompt": text, "markers": [7, 19]}, {"prompt": text}, {"prompt": "the", "completion": " cat"}]
    Path("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, output, error = metatokens(f"{generate} --data prompts.jsonl")
    answers = [json.loads(line) for line in output.splitlines()]
    assert (status, error) == (0, "")
    assert answers[0] == {"prompt": text, "markers": [7, 19], "continuation": expected}
    assert [answer["prompt"] for answer in answers] == [text, text, "the"]
    assert text + answers[1]["continuation"] + "\n" == metatokens(f"{generate} '{text}'")[1]
    (first, *_) = metatokens(f"{generate} --data prompts.jsonl --show-meta")[1].splitlines()
    assert json.loads(first)["with_meta"] == shown.strip()


def test_interventions_analyses_and_extension(
    workplace: Path, small_model: Callable[..., Path], small_store: TokenStore, metatokens: Run
) -> None:
    model = small_model(max_position_embeddings=32)
    evaluation = f"evaluate --model {model} --task parity --lengths 64 -n 4 --name meta"
    lines = {
        given: [json.loads(line) for line in metatokens(f"{evaluation} {given}")[1].splitlines()]
        for given in ("", "--intervention noise:0", "--intervention noise:50 --noise-seed 3")
    }
    plain, none, noisy = ([(line["intervention"], line["value"]) for line in found] for found in lines.values())
    assert [name for name, _ in (*plain, *none, *noisy)] == [None, None, "noise:0", "noise:0", "noise:50", "noise:50"]
    assert [value for _, value in plain] == [value for _, value in none]

    for kind, metrics in {
        "sharpness": {"attention_entropy_change", "premise_holds"},
        "residual": {"similarity", "attention_of_final"},
        "rate-distortion": {"rate", "distortion"},
    }.items():
        n = 70 if kind == "rate-distortion" else 3
        status, output, error = metatokens(
            f"analyze {kind} --model {model} --task parity --length 64 -n {n} --fits 1 --name meta"
        )
        assert (status, error) == (0, "")
        measured = [Measurement.model_validate_json(line) for line in output.splitlines()]
        assert metrics <= {one.metric for one in measured}
        assert {(one.model, one.task, one.length, one.condition) for one in measured} == {
            ("meta", "parity", 64, "paper")
        }

    settings = SMALL.replace("data.tokens=tokens", f"data.tokens={small_store.path}")
    status, _, error = metatokens(f"extend --model {model} --factor 2 --recipe demo {settings} --out longer")
    assert (status, error.splitlines()[-1]) == (0, "model: longer")
    rope = json.loads((workplace / "longer" / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 2.0, 32)


def test_a_benchmark_prints_timings_and_draws_them(workplace: Path, metatokens: Run) -> None:
    line = "benchmark train --shape tiny --length 32 --rounds 2 --warmup 1 --threads 1 --no-memory --only meta"
    status, output, error = metatokens(f"{line} --figure ratios.png")
    assert status == 0
    timings = [Timing.model_validate_json(line) for line in output.splitlines()]
    assert [(one.model, one.against) for one in timings] == [("gpt2", "gpt2"), ("meta", "gpt2")]
    assert all(len(one.rounds) == one.n == 2 and one.seconds > 0 for one in timings)
    assert "meta / gpt2" in error
    assert (workplace / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_prints_the_stages_and_their_cost(metatokens: Run, tmp_path: Path) -> None:
    status, output, error = metatokens(f"reproduce --preset demo --out {tmp_path / 'new'} --only table9 --dry-run")
    assert status == 0
    stages = [line.split() for line in output.splitlines()]
    assert stages[0][1:] == ["min", "tokenize"]
    assert {"finetune-meta-parity", "evaluate-gpt2-parity"} <= {name for _, _, name in stages}
    assert not [name for _, _, name in stages if "copying" in name]
    count, total = len(stages), sum(float(minutes) for minutes, _, _ in stages) / 60
    assert error.startswith(f"{count} stages, an estimated ")
    assert float(error.split()[4]) == pytest.approx(total, abs=0.05 * count)
    assert not (tmp_path / "new").exists()


def test_the_installed_command_is_this_one() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="metatokens")
    assert script.load() is cli.main


def test_without_a_verb_the_verbs_are_listed(metatokens: Run) -> None:
    verbs = (
        "reproduce", "tokenize", "pretrain", "extend", "finetune", "report",
        "sample", "evaluate", "analyze", "perplexity", "generate", "benchmark",
    )  # fmt: skip
    status, output, error = metatokens("")
    assert status == 2
    assert all(f" {verb} " in output + error for verb in verbs)
    assert metatokens("--help")[0] == 0


# --- mistakes


@pytest.fixture(scope="module")
def ground(
    small_corpus: Path,
    small_store: TokenStore,
    small_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder of good and of bad things, which no command below may change."""
    ground = tmp_path_factory.mktemp("ground")
    shutil.copy(small_corpus, ground / "text.txt")
    shutil.copytree(small_store.path, ground / "tokens")
    settings = write_token_store(ground / "other-tokens", str(ground / "text.txt"), "train:300").manifest.settings
    (ground / "unfinished" / ".partial" / "train").mkdir(parents=True)
    plan = Plan(settings=settings, parts=(), shard_characters=1, first=())
    (ground / "unfinished" / ".partial" / "plan.json").write_text(plan.model_dump_json())
    (ground / "unfinished" / ".lock").touch()  # as a process that was killed leaves it
    shutil.copytree(ground / "tokens", ground / "damaged-tokens")
    (ground / "damaged-tokens" / "held_out" / "00000-00000.arrow").write_bytes(b"ARROW1")
    (ground / "empty.txt").write_text(" \n\n")
    (ground / "empty.jsonl").write_text("")
    (ground / "short.txt").write_text("a few words")
    (ground / "latin.txt").write_bytes("the cat\nd\xe9j\xe0 vu".encode("latin-1"))
    (ground / "broken.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": \n')
    (ground / "records.jsonl").write_text('{"prompt": "a", "completion": " b"}\n\n{"prompt": "a", "completion": }\n')
    (ground / "long.jsonl").write_text(json.dumps({"prompt": "the cat " * 60, "completion": " sat"}))
    (ground / "marked.jsonl").write_text(json.dumps({"prompt": "the _PAUSE_", "markers": [3]}))
    (ground / "notes").mkdir()
    (ground / "notes" / "thesis.txt").write_text("years of work")

    shutil.copytree(small_model(), ground / "model")
    shutil.copytree(small_model(position_embedding="learned", max_position_embeddings=48), ground / "learned")
    shutil.copytree(small_model(second_attention="none", meta_token_id=None), ground / "unmarked")
    for name in ("cut", "flipped", "flipped-config", "gone", "foreign-cut", "foreign-config", "pickled", "bert"):
        shutil.copytree(ground / "model", ground / name)
    weights = (ground / "model" / "model.safetensors").read_bytes()
    (ground / "cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (ground / "flipped" / "model.safetensors").write_bytes(weights[:-9] + bytes([weights[-9] ^ 1]) + weights[-8:])
    config = (ground / "model" / "config.json").read_bytes()
    (ground / "flipped-config" / "config.json").write_bytes(config.replace(b'"bias": false', b'"bias": fals\x67'))
    (ground / "gone" / "tokenizer.json").unlink()
    # Without a manifest, as other programs save models.
    for name in ("foreign-cut", "foreign-config", "pickled", "bert"):
        (ground / name / "manifest.json").unlink()
    (ground / "foreign-cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (ground / "foreign-config" / "config.json").write_text('{"model_type": "meta_gpt2", "hidden_size": "wide"}')
    (ground / "pickled" / "model.safetensors").unlink()
    torch.save({}, ground / "pickled" / "pytorch_model.bin")
    BertConfig().save_pretrained(ground / "bert")

    settings = {"verb": "pretrain", "recipe": {"training": {"seed": 5}}}
    with open_run(ground / "run", settings):
        pass
    (ground / "run" / "model.safetensors").write_bytes(weights)
    write_manifest(ground / "run")
    with open_run(ground / "reproduced", {"preset": "demo", "corpus": "builtin"}):
        pass
    return ground


TUNE = "finetune --out new --model model"
EVALUATE = "evaluate --lengths 64 -n 2 --task parity"
MISTAKES = {
    # recipes
    f"{PRETRAIN} --out new --set training.eval_steps=-1": "training.eval_steps is -1: input should be",
    f"{PRETRAIN} --out new --set training.eval_steps=1 --set data.tokens=null --set data.corpus=text.txt "
    "--set data.tokenizer=model": "a stream (data.corpus) has no held-out split",
    f"{TUNE} --task parity --set training.eval_steps=1": "which needs held-out records: give --eval-data",
    f"{TUNE} --task parity --eval-data nowhere.jsonl": "cannot read the records in nowhere.jsonl",
    "evaluate --model model": "give either --task or --data",
    "evaluate --model model --task parity --data nowhere.jsonl": "give either --task or --data",
    "evaluate --model model --data nowhere.jsonl": "cannot read the records in nowhere.jsonl",
    "evaluate --model model --data nowhere.jsonl -n 3": "-n says which prompts of a task are drawn; the records of",
    "evaluate --model model --data nowhere.jsonl --lengths 64": "--lengths says which prompts of a task are drawn",
    f"{EVALUATE} --model model --predictions nowhere/answers.jsonl": "nowhere/answers.jsonl",
    f"{PRETRAIN} --out new --set training.max_stepz=1": "training.max_stepz is not a setting; allowed are max_steps",
    "pretrain --recipe nowhere.yaml --out new": "no recipe at nowhere.yaml; give a YAML file or one of: demo",
    "pretrain --recipe notes --out new": "no recipe at notes; give a YAML file or one of: demo",
    "pretrain --recipe latin.txt --out new": "recipe latin.txt cannot be read as YAML",
    "pretrain --recipe demo --out new": "the recipe must name data.tokens",
    f"{PRETRAIN} --out new --set data.fraction=0.51": "meta-tokens is 0.51, but must lie in [0, 0.5]",
    f"{PRETRAIN} --out new --set data.fraction=-0.1": "meta-tokens is -0.1, but must lie in [0, 0.5]",
    f"{PRETRAIN} --out new --set data.placement=random": "should be 'uniform', 'periodic' or 'none'",
    f"{PRETRAIN} --out new --set model.num_attention_heads=3": "hidden_size 16 is not a multiple of",
    f"{PRETRAIN} --out new --set model.activation=step": "activation 'step' is unknown; allowed are",
    f"{PRETRAIN} --out new --set training.report_to=paper": "names the tracker 'paper', which is not installed",
    # corpora
    "tokenize --corpus nowhere.txt --tokenizer train:300 --out new": "no file matches the corpus nowhere.txt",
    "tokenize --corpus notes --tokenizer train:300 --out new": "the corpus notes is a folder",
    "tokenize --corpus empty.txt --tokenizer train:300 --out new": "the corpus empty.txt holds no text",
    "tokenize --corpus empty.jsonl --tokenizer train:300 --out new": "the corpus empty.jsonl holds no text",
    "tokenize --corpus latin.txt --tokenizer train:300 --out new": "latin.txt, line 2 is not UTF-8",
    "tokenize --corpus broken.jsonl --tokenizer train:300 --out new": "broken.jsonl, line 3 is not JSON",
    "tokenize --corpus text.txt --tokenizer train:20 --out new": "train:N with N from 300 to",
    "tokenize --corpus text.txt --tokenizer train:60000 --out new": "too little text for the tokenizer train:60000",
    "tokenize --corpus text.txt --tokenizer word --out new": "no tokenizer 'word': give an existing folder, gpt2, or",
    "tokenize --corpus text.txt --tokenizer notes --out new": "the folder notes holds no tokenizer",
    "tokenize --corpus text.txt --tokenizer train:300 --held-out 0 --out new": "must lie between 0 and 1",
    f"{PRETRAIN} --out new --set data.block_size=90000": "too few for one block of 90000",
    f"{PRETRAIN} --out new --set data.tokens=nowhere": "nowhere holds no complete token store",
    f"{PRETRAIN} --out new --set data.tokens=text.txt": "text.txt holds no complete token store",
    "perplexity --model model --corpus empty.txt": "the corpus empty.txt holds no text",
    "perplexity --model model --corpus short.txt": "perplexity needs two blocks of 231",
    "perplexity --model model --corpus latin.txt": "latin.txt, line 2 is not UTF-8",
    "perplexity --model model --corpus model": "model/manifest.json is not the manifest of a token store",
    "perplexity --model model --corpus other-tokens": "other-tokens was made with another tokenizer than the model's",
    "perplexity --model model --corpus damaged-tokens": "held_out/00000-00000.arrow is missing, cut short or altered",
    "perplexity --model model --corpus text.txt --fraction 0.6": "meta-tokens is 0.6, but must lie in [0, 0.5]",
    "perplexity --model model --corpus text.txt --placement random": "unknown placement 'random': choose from",
    "perplexity --model unmarked --corpus text.txt --placement uniform": "unmarked has no meta_token_id",
    # records
    f"{TUNE} --data nowhere.jsonl": "cannot read the records in nowhere.jsonl: No such file or directory",
    f"{TUNE} --data notes": "cannot read the records in notes: Is a directory",
    f"{TUNE} --data records.jsonl": "records.jsonl, line 3: ",
    f"{TUNE} --data latin.txt": "latin.txt, line 1: ",
    f"{TUNE} --data empty.jsonl": "empty.jsonl holds no record",
    TUNE: "give either --task or --data",
    f"{TUNE} --task parity --data long.jsonl": "give either --task or --data",
    # tasks
    f"{TUNE} --task chess": "unknown task 'chess'; the tasks are list_recall",
    f"{TUNE} --task parity --train-length long": "lengths 'long' must be positive numbers separated by commas",
    f"{TUNE} --task parity --train-length 4": "no parity prompt of phase 1 and 1 to 4 tokens was found",
    f"{TUNE} --task parity --set task.condition=bar": "should be 'paper', 'none' or 'decoy'",
    f"{TUNE} --task copying --corpus short.txt": "copying needs a document of at least",
    "sample chess --tokenizer tokens/tokenizer": "unknown task 'chess'; the tasks are list_recall",
    "sample parity --tokenizer tokens/tokenizer --phase 6": "unknown phase 6; the phases are 1 to 5",
    "sample parity --tokenizer tokens/tokenizer --condition bar": "unknown condition 'bar'; the conditions are",
    "sample parity --tokenizer tokens/tokenizer --split all": "unknown split 'all'; the splits are",
    f"{EVALUATE} --model model --task chess": "unknown task 'chess'; the tasks are list_recall",
    f"{EVALUATE} --model model --condition bar": "unknown condition 'bar'; the conditions are",
    f"{EVALUATE} --model model --lengths 64,,128": "lengths '64,,128' must be positive numbers",
    f"{EVALUATE} --model model --lengths 0": "lengths '0' must be positive numbers",
    "reproduce --preset huge --out new": "no preset 'huge'; the presets are",
    "reproduce --preset demo --out new --only table0": "no stage of this preset answers 'table0'; --only takes",
    "reproduce --preset demo --out reproduced --dry-run --only x": "no stage of this preset answers 'x'; --only takes",
    # models
    f"{EVALUATE} --model nowhere": "there is no model in nowhere",
    f"{EVALUATE} --model text.txt": "there is no model in text.txt",
    f"{EVALUATE} --model cut": "cut/model.safetensors is damaged",
    f"{EVALUATE} --model flipped": "flipped/model.safetensors is damaged",
    f"{EVALUATE} --model flipped-config": "flipped-config/config.json is damaged",
    f"{EVALUATE} --model gone": "gone/tokenizer.json is missing",
    f"{EVALUATE} --model foreign-cut": "the weights in foreign-cut cannot be read",
    f"{EVALUATE} --model foreign-config": "foreign-config/config.json is not a model configuration",
    f"{EVALUATE} --model pickled": "the weights in pickled cannot be read",
    f"{EVALUATE} --model bert": "bert holds a bert model; allowed are meta_gpt2, gpt2 and gpt_neo",
    f"{EVALUATE} --model unmarked": "the model in unmarked has no meta_token_id",
    "generate --model cut the": "cut/model.safetensors is damaged",
    "generate --model unmarked the --meta-every 4": "meta_every needs a model with a meta_token_id",
    "perplexity --model nowhere --corpus text.txt": "there is no model in nowhere",
    "perplexity --model flipped --corpus text.txt": "flipped/model.safetensors is damaged",
    "finetune --out new --task parity --model nowhere": "there is no model in nowhere",
    "finetune --out new --task parity --model flipped": "flipped/model.safetensors is damaged",
    "finetune --out new --task parity --model unmarked": "the model in unmarked has no meta_token_id",
    f"{PRETRAIN} --out new --init nowhere": "there is no model in nowhere",
    f"{PRETRAIN} --out new --init cut": "cut/model.safetensors is damaged",
    f"{PRETRAIN} --out new --init unmarked": "the model's meta_token_id is None and that of the text's",
    "generate --model model ''": "the prompt is empty",
    "generate --model model": "give either a prompt or --data",
    "generate --model model the --data records.jsonl": "give either a prompt or --data",
    "generate --model model --marker _PAUSE_ --data records.jsonl": "--marker goes with a prompt",
    "generate --model model --marker _PAUSE_ the": "the marker '_PAUSE_' is not in the prompt",
    "generate --model model --marker '' the": "the marker is empty",
    "generate --model unmarked --marker _PAUSE_ 'the _PAUSE_'": "the model in unmarked has no meta_token_id",
    "generate --model unmarked --data marked.jsonl": "the model in unmarked has no meta_token_id",
    f"{EVALUATE} --model model --intervention no_heads": "no intervention 'no_heads'; allowed are no_pos",
    f"{EVALUATE} --model model --intervention noise:much": "no intervention 'noise:much'; allowed are no_pos",
    "benchmark sleep": "unknown benchmark 'sleep'; choose train, answers",
    "benchmark train --shape huge": "unknown shape 'huge'; the shapes are",
    "benchmark train --length 128,256": "the benchmark train takes one length",
    "benchmark train --only bert": "'bert' takes no part in the benchmark train",
    "benchmark train --dtype int8": "dtype 'int8' is unknown; allowed are float32, bfloat16",
    "analyze dreams --model model": "unknown analysis 'dreams'; choose sharpness",
    "analyze sharpness --model unmarked": "the model in unmarked has no meta_token_id",
    "analyze residual --model model --intervention no_pos": "--intervention goes with rate-distortion alone",
    "analyze rate-distortion --model model --task parity --length 64 -n 20": "20 examples, 4 of them held out, do not",
    f"extend --model learned --factor 2 --recipe demo {SMALL} --out new": "position_embedding 'learned'",
    f"extend --model model --factor 1 --recipe demo {SMALL} --out new": "factor",
    # lengths beyond learned positions
    f"{EVALUATE} --model learned": "a sequence of 64 tokens is longer than the 48 learned positions",
    "finetune --out new --model learned --task parity --train-length 32,64": "longer than the 48 learned positions",
    "finetune --out new --model learned --data long.jsonl": "longer than the 48 learned positions",
    "perplexity --model learned --corpus text.txt --block-size 64": "longer than the 48 learned positions",
    "generate --model learned the --max-new-tokens 60": "longer than the 48 learned positions",
    f"{PRETRAIN} --out new --init learned --set data.block_size=49": "longer than the 48 learned positions",
    f"{PRETRAIN} --out new --set model.position_embedding=learned --set model.max_position_embeddings=31": (
        "a sequence of 32 tokens is longer than the 31 learned positions"
    ),
    # output folders
    f"{PRETRAIN} --out run": "run holds a run with other settings (batch was None",
    f"{PRETRAIN} --out reproduced": "reproduced holds a run with other settings",
    f"{PRETRAIN} --out notes": "notes is not empty and holds no run",
    f"{PRETRAIN} --out notes --overwrite": "notes is not empty and holds no run",
    f"{PRETRAIN} --out text.txt": "text.txt cannot be used as a run folder",
    f"{PRETRAIN} --out text.txt/new": "text.txt/new cannot be used as a run folder",
    "finetune --model model --task parity --out run": "run holds a run with other settings",
    "finetune --model model --task parity --out notes": "notes is not empty and holds no run",
    "finetune --model model --task parity --out text.txt/new": "text.txt/new cannot be used as a run folder",
    "tokenize --corpus text.txt --tokenizer train:300 --out tokens": "tokens holds a token store made with other",
    "tokenize --corpus text.txt --tokenizer train:310 --out unfinished": "an unfinished token store made with",
    "tokenize --corpus text.txt --tokenizer train:300 --out model": "model/manifest.json is not the manifest of a",
    "tokenize --corpus text.txt --tokenizer train:300 --out notes": "notes is not empty and holds no token store",
    "tokenize --corpus text.txt --tokenizer train:300 --out text.txt": "the token store text.txt cannot be written",
    "tokenize --corpus text.txt --tokenizer train:300 --out text.txt/new": "text.txt/new cannot be written",
    "reproduce --preset smoke --out reproduced": "preset was 'demo' and is now 'smoke'",
    "reproduce --preset smoke --out notes": "notes is not empty and holds no run",
    "reproduce --preset smoke --out text.txt/new": "text.txt/new cannot be used as a run folder",
    "sample parity --tokenizer tokens/tokenizer --out notes": "cannot write to notes: Is a directory",
    f"{EVALUATE} --model model --out text.txt/new.jsonl": "cannot write results to text.txt/new.jsonl: Not a directory",
    "report nowhere.jsonl --out new": "nowhere.jsonl",
    # a folder in which nobody can write, root included
    f"{PRETRAIN} --out /proc/new": "/proc/new cannot be used as a run folder",
    "finetune --model model --task parity --out /proc/new": "/proc/new cannot be used as a run folder",
    "tokenize --corpus text.txt --tokenizer train:300 --out /proc/new": "the token store /proc/new cannot be written",
    "reproduce --preset smoke --out /proc/new": "/proc/new cannot be used as a run folder",
    f"{EVALUATE} --model model --out /proc/new": "cannot write results to /proc/new",
    "perplexity --model model --corpus text.txt --out /proc/new": "cannot write results to /proc/new",
}  # fmt: skip


def is_one_sentence(error: str) -> bool:
    return error.startswith("metatokens: ") and error.endswith(".\n") and error.count("\n") == 1


@pytest.mark.parametrize(("line", "said"), MISTAKES.items(), ids=[line.replace(SMALL, "...") for line in MISTAKES])
def test_a_mistake_is_one_sentence_and_nothing_is_lost(
    line: str, said: str, ground: Path, contents: Contents, metatokens: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ground)
    before = contents(ground)
    status, output, error = metatokens(line)
    assert (status, output) == (2, "")
    assert is_one_sentence(error), error
    assert said in error
    assert contents(ground) == before


def test_a_result_file_is_tried_before_anything_is_measured(
    ground: Path, tmp_path: Path, metatokens: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ground)
    monkeypatch.setattr("metatokens.evaluation.accuracy.evaluate", None)  # would end in a TypeError
    assert metatokens(f"{EVALUATE} --model model --out notes")[0] == 2
    out = tmp_path / "new.jsonl"
    assert metatokens(f"{EVALUATE} --model cut --out {out}")[0] == 2
    assert not out.exists()  # the try leaves nothing behind


def test_wrong_usage_of_a_verb_exits_with_2_as_well(metatokens: Run) -> None:
    for line in ("trane", "pretrain", "generate --model m --max-new-tokens many the"):
        status, output, error = metatokens(line)
        assert (status, output) == (2, "")
        assert "Traceback" not in error


def test_debug_shows_the_traceback(metatokens: Run) -> None:
    with pytest.raises(UserError, match="no preset 'huge'"):
        metatokens("--debug reproduce --preset huge --out new")


@pytest.mark.parametrize(
    "line",
    [
        "tokenize --corpus broken.jsonl --tokenizer train:300 --out new",
        "evaluate --model learned --task parity --lengths 32,64",
    ],
)
def test_a_mistake_in_a_process_of_its_own(line: str, ground: Path) -> None:
    quiet = {"TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"}  # the command has to see to that itself
    done = subprocess.run(
        [sys.executable, "-c", "from metatokens.cli import main; main()", *shlex.split(line)],
        cwd=ground,
        env={key: value for key, value in os.environ.items() if key not in quiet},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert is_one_sentence(done.stderr), done.stderr
    assert not list(ground.glob("new/*"))


def test_debug_in_a_process_of_its_own(ground: Path) -> None:
    line = ["--debug", "tokenize", "--corpus", "broken.jsonl", "--tokenizer", "train:300", "--out", "new"]
    done = subprocess.run(
        [sys.executable, "-c", "from metatokens.cli import main; main()", *line],
        cwd=ground,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert "UserError: broken.jsonl, line 3 is not JSON" in done.stderr
