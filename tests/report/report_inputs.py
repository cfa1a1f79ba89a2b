"""Made-up runs for the report's tests: no figure here was measured."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from metatokens.evaluation.intervals import wilson_interval
from metatokens.records import Result, append_records

MODELS = ("gpt2", "pause", "twin", "meta")
TASKS = ("list_recall", "segment_counting", "parity", "copying")
LENGTHS = (128, 256, 512, 1024)
CHANCE = {"list_recall": 0.1, "segment_counting": 0.2, "parity": 0.5, "copying": 0.0}
SOLVED = {"gpt2": 0.0, "pause": 0.1, "twin": 0.7, "meta": 1.0}

Score = Callable[[str, str, str, int], float | None]


def meta_best(model: str, task: str, condition: str, length: int) -> float | None:
    """`meta` above `twin` above the others; all fall with length; without markers nobody gains."""
    skill = SOLVED[model] * (1.0 if length == 128 else math.exp(-length / 1500))
    skill *= {"paper": 1.0, "none": 0.05, "decoy": 0.8}[condition] * (0.6 if task == "segment_counting" else 1.0)
    return CHANCE[task] + (1 - CHANCE[task]) * skill


def all_equal(model: str, task: str, condition: str, length: int) -> float | None:
    """Every model the same."""
    return CHANCE[task] + 0.3


def beyond_table(model: str, task: str, condition: str, length: int) -> float | None:
    """As `meta_best`, where `gpt2` and `pause` cannot be run beyond a learned table of 256."""
    return None if model in ("gpt2", "pause") and length > 256 else meta_best(model, task, condition, length)


def accuracy(model: str, task: str, condition: str, length: int, value: float | None, /, **fields: object) -> Result:
    """One exact-match record with n as in the demo."""
    n = 500 if length == 128 else 200
    hits = None if value is None else round(value * n)
    low, high = (None, None) if hits is None else wilson_interval(hits, n)
    record = {
        "model": model, "position_embedding": "rope", "task": task, "condition": condition, "train_condition": "paper",
        "train_length": 128, "length": length, "metric": "exact_match", "value": None if hits is None else hits / n,
        "n": 0 if hits is None else n, "low": low, "high": high, "chance": CHANCE.get(task), "seed": 0,
        "recipe": "demo", "versions": {"python": "3.11", "metatokens": "0.1.0"}, "created": "2026-01-02T03:04:05+00:00",
    }  # fmt: skip
    return Result.model_validate(record | fields)


def accuracies(score: Score, models: Sequence[str] = MODELS, tasks: Sequence[str] = TASKS) -> list[Result]:
    """Exact match for every model, task and length; conditions `none` and `decoy` for list recall only."""
    return [
        accuracy(model, task, condition, length, score(model, task, condition, length))
        for task in tasks
        for condition in (("paper", "none", "decoy") if task == "list_recall" else ("paper",))
        for model in models
        for length in LENGTHS
    ]


def other_results(models: Sequence[str] = MODELS) -> list[Result]:
    """Token accuracy, perplexity with and without inserted meta-tokens, and majority rates."""
    template = accuracy("-", "parity", "paper", 128, 0.5).model_dump()
    blank = template | {"low": None, "high": None, "chance": None, "train_length": None, "train_condition": None}
    records = []
    for place, model in enumerate(models):
        for length in LENGTHS:
            records.append(
                template | {"model": model, "task": "copying", "metric": "token_accuracy", "value": 0.9, "n": 9000}
                | {"length": length, "chance": None}
            )  # fmt: skip
        for placement, value in (("none", 80.0 + place), ("uniform", 79.0 + place if place else None)):
            perplexity = {"metric": "perplexity", "value": value, "n": 51234, "chance": 412.5}
            records.append(blank | perplexity | {"model": model, "task": None, "condition": placement, "length": None})
    for task, rate in (("parity", 0.52), ("segment_counting", 0.41)):
        for length in LENGTHS:
            majority = {"metric": "majority_rate", "task": task, "length": length, "value": rate, "n": 500}
            records.append(blank | majority | {"position_embedding": None, "seed": 2026})
    return [Result.model_validate(record) for record in records]


def curves(models: Sequence[str] = MODELS, tasks: Sequence[str | None] = (None, *TASKS)) -> list[dict[str, object]]:
    """Losses that fall the faster the more a model has; `gpt2` learns no task."""
    rate = {"gpt2": 0.0, "pause": 0.006, "twin": 0.01, "meta": 0.02}
    points: list[dict[str, object]] = []
    for task in tasks:
        for model in models:
            for step in range(10, 1001, 10):
                wobble = 1 + 0.1 * math.sin(step)
                loss = 5 + 3 * math.exp(-step / 100) if task is None else 2.3 * math.exp(-rate[model] * step) * wobble
                points.append(
                    {"model": model, "position_embedding": "rope", "task": task, "seed": 0, "step": step, "loss": loss}
                    | {"train_length": None if task is None else 128}
                )  # fmt: skip
    return points


EXAMPLES = [
    {
        "task": "list_recall", "phase": 1, "seed": 0, "index": 3, "split": "test", "condition": "paper",
        "prompt": "Fruits: orange peach banana plum\nTools: hammer wrench level pliers\nAnimals: cat tiger wolf fox\n"
        "Professions: teacher nurse lawyer architect\nProfessions: teacher nurse lawyer _PAUSE_ architect\n"
        "Q: What is item 3 of Professions? _PAUSE_",
        "completion": " lawyer", "input_ids": [1, 2, 3], "answer_start": 2, "n_tokens": 71,
    },
    {
        "task": "segment_counting", "phase": 1, "split": "test", "condition": "paper",
        "prompt": "Fruits: orange peach banana plum\nTools: _PAUSE_ hammer wrench level wrench pliers _PAUSE_\n"
        "Sports: boxing baseball boxing golf\n"
        "Q: How many times does wrench appear between the pauses around Tools? _PAUSE_",
        "completion": " 2", "n_tokens": 58,
    },
    {
        "task": "parity", "phase": 1, "split": "test", "condition": "paper",
        "prompt": "Bits: 0 1 1 _PAUSE_ 1 0 0\nQ: What is the XOR of all bits before this pause? _PAUSE_",
        "completion": " 0", "n_tokens": 22,
    },
    {
        "task": "copying", "phase": 1, "split": "test", "condition": "paper",
        "prompt": "A literal _PAUSE_ and <script>alert('x')</script> & more are text, so_is_this | too:"
        " _PAUSE_ the span\nthat is copied _PAUSE_ ends there.\nQ: Copy the bracketed text. _PAUSE_",
        "completion": " the span\nthat is copied", "n_tokens": 44,
    },
]  # fmt: skip
for example in EXAMPLES:
    prompt = str(example["prompt"])
    offsets = [place for place in range(len(prompt)) if prompt.startswith(" _PAUSE_", place)]
    example["markers"] = offsets[1:] if "literal" in prompt else offsets

RUN = {
    "command": "metatokens reproduce --preset demo --out runs/demo", "preset": "demo", "python": "3.11.2",
    "platform": "Linux-6.1-x86_64", "cores": 2, "versions": {"metatokens": "0.1.0", "torch": "2.13.0"},
    "recipes": {
        "pretrain": {"data": {"fraction": 0.1, "block_size": 128}, "training": {"max_steps": 400}},
        "list_recall": {"training": {"max_steps": 1000, "betas": [0.9, 0.95]}},
    },
    "created": "2026-01-02T03:04:05+00:00", "finished": "2026-01-02T03:17:35+00:00", "wall_seconds": 810.4,
    "stages": [{"name": "tokenize", "seconds": 12.5}, {"name": "pretrain gpt2", "seconds": 75.0}],
    "corpus": {"spec": "builtin", "documents": 1234, "tokens": {"train": 900000, "held_out": 47000}},
    "models": {
        "gpt2": {"parameters": 361984, "description": "no meta-tokens in pretraining, no second attention"},
        "pause": {"parameters": 361984, "description": "meta-tokens in pretraining, no second attention"},
        "twin": {"parameters": 394880, "description": "meta-tokens in pretraining, second causal attention"},
        "meta": {"parameters": 394880, "description": "meta-tokens in pretraining, meta-attention"},
    },
}  # fmt: skip


def write_run(folder: Path, score: Score = meta_best, models: Sequence[str] = MODELS) -> Path:
    """A complete run folder."""
    folder.mkdir(parents=True)
    append_records(folder / "results.jsonl", [*accuracies(score, models), *other_results(models)])
    for name, records in (("curves", curves(models)), ("examples", EXAMPLES)):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
        )
    (folder / "run.json").write_text(json.dumps(RUN), encoding="utf-8")
    return folder
