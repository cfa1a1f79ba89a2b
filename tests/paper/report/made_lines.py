"""Lines of made-up runs, written by hand and never by the code under test: no figure here was measured."""

import json
from collections.abc import Sequence
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

Line = dict[str, Any]

MODELS = ("gpt2", "pause", "twin", "meta")
GRID_LENGTHS = (128, 512, 1024)
DEMO_TASKS = ("list_recall", "parity")
CHANCE = {"list_recall": 0.1, "segment_counting": 0.2, "parity": 0.5, "copying": 0.0}
SKILL = {"gpt2": 0.05, "pause": 0.1, "twin": 0.6, "meta": 0.99}


def wilson(value: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval by its formula."""
    z = 1.959963984540054
    middle = value + z**2 / (2 * n)
    reach = z * sqrt(value * (1 - value) / n + (z / (2 * n)) ** 2)
    scale = 1 + z**2 / n
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def accuracy(value: float | None, n: int = 500, /, **fields: Any) -> Line:
    """Exact match of the plain runs of preset `small`, but for the given fields; None cannot be run."""
    low, high = (None, None) if value is None else wilson(value, n)
    line = {
        "model": "meta",
        "position_embedding": "rope",
        "task": "list_recall",
        "condition": "paper",
        "train_condition": "paper",
        "train_length": 512,
        "length": 512,
        "metric": "exact_match",
        "value": value,
        "n": 0 if value is None else n,
        "low": low,
        "high": high,
        "seed": 0,
        "recipe": "small",
    }
    line |= fields
    return {"chance": CHANCE.get(str(line["task"]))} | line


def perplexity(value: float, spread: float | None = None, /, **fields: Any) -> Line:
    line = accuracy(
        None,
        task=None,
        train_condition=None,
        train_length=None,
        condition="none",
        length=1024,
        chance=412,
    )
    line |= {"metric": "perplexity", "value": value, "n": 51234}
    if spread:
        line |= {"low": value - spread, "high": value + spread}
    return line | fields


def shortcut(rate: float, task: str, length: int, /, **fields: Any) -> Line:
    line = {
        "model": "the last bit",
        "task": task,
        "condition": "paper",
        "length": length,
        "metric": "shortcut",
        "value": rate,
        "n": 500,
        "seed": 2026,
        "recipe": "small",
    }
    return line | fields


def inner(
    analysis: str,
    metric: str,
    value: float,
    spread: float | None = 0.05,
    /,
    **fields: Any,
) -> Line:
    """What was measured inside a model of list recall."""
    line: Line = {
        "analysis": analysis,
        "metric": metric,
        "value": value,
        "n": 100,
        "seed": 0,
        "recipe": "small",
        "model": "meta",
        "position_embedding": "rope",
        "task": "list_recall",
        "condition": "paper",
        "train_condition": "paper",
        "train_length": 512,
        "length": 256,
    }
    if spread:
        line |= {"low": value - spread, "high": value + spread}
    return line | fields


def recall(step: int, exact_match: float, **fields: Any) -> Line:
    """A point of a learning curve, of 3,000 text tokens a step."""
    line = {
        "model": "meta",
        "position_embedding": "rope",
        "seed": 0,
        "step": step,
        "text_tokens": 3000 * step,
        "task": "list_recall",
        "train_length": 128,
        "recipe": "small",
        "exact_match": exact_match,
        "n": 200,
    }
    return line | fields


def timing(benchmark: str, model: str, ratio: float, /, **fields: Any) -> Line:
    line = {
        "benchmark": benchmark,
        "model": model,
        "against": "gpt2",
        "shape": "paper",
        "length": 512,
        "batch": 1,
        "text_tokens": 461,
        "n": 5,
        "rounds": [2.0],
        "seconds": 2 * ratio,
        "threads": 2,
        "ratio": ratio,
        "ratio_low": ratio - 0.01,
        "ratio_high": ratio + 0.01,
        "limit": 1.0,
        "device": "an A100",
        "dtype": "float32",
        "parameters": 9,
        "repeats": 1,
        "low": 1.0,
        "high": 3.0,
        "ratio_per_text_token": 1.0,
        "limit_per_text_token": 1.0,
        "over_products": 1.0,
        "compiled": False,
    }
    return line | fields


def example(task: str, prompt: str, completion: str, **fields: Any) -> Line:
    """A shown example; each ` _PAUSE_` of its prompt is a meta-token."""
    offsets = [offset for offset in range(len(prompt)) if prompt.startswith(" _PAUSE_", offset)]
    return {
        "task": task,
        "prompt": prompt,
        "completion": completion,
        "markers": offsets,
    } | fields


LITERAL = "A literal _PAUSE_ and <script>alert('x')</script> & more are text, so_is_this | too:"
EXAMPLES = [
    example(
        "list_recall",
        "Fruits: orange peach\nQ: What is item 2 of Fruits? _PAUSE_",
        " peach",
        n_tokens=71,
    ),
    example(
        "copying",
        LITERAL + " _PAUSE_ the span _PAUSE_ ends.\nQ: Copy it. _PAUSE_",
        " the span",
        phase=1,
    ),
]
EXAMPLES[1]["markers"] = EXAMPLES[1]["markers"][1:]  # the first is text
COVERED_PROMPT = (
    "Fruits: orange <u>peach\nQ: none _PAUSE_ pear\nQ: What is item 2 of Fruits? _PAUSE_"
)

RUN: Line = {
    "command": "metatokens reproduce --preset demo",
    "preset": "demo",
    "platform": "Linux",
    "cores": 2,
    "versions": {"metatokens": "0.1.0", "torch": "2.13.0"},
    "corpus": {"spec": "builtin", "tokens": 1234},
    "recipes": {"pretrain": {"training": {"max_steps": 400, "betas": [0.9, 0.95]}}},
    "created": "2026-01-02T03:04:05+00:00",
    "finished": "2026-01-02T03:17:35+00:00",
    "stages": [
        {"name": "tokenize", "seconds": 12.5, "cpu_seconds": 12.5},
        {"name": "pretrain-gpt2", "seconds": 75.0, "cpu_seconds": 75.0},
    ],
    "models": {
        "gpt2": {"parameters": 361984, "description": "what gpt2 is"},
        "pause": {"parameters": 361984, "description": "what pause is"},
        "twin": {"parameters": 394880, "description": "what twin is"},
        "meta": {"parameters": 394880, "description": "what meta is"},
    },
}


def write(folder: Path, run: Line | None = None, **lines: Sequence[Line]) -> Path:
    """A run's folder of the named files of lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in lines.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    if run is not None:
        (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return folder


def skilled(model: str, task: str, length: int, trained: int = 128) -> float:
    """Falls beyond the train length; guessing is the floor. Of 500 prompts, so a multiple of 1/500."""
    value = CHANCE[task] + (1 - CHANCE[task]) * SKILL[model] * min(1.0, (trained / length) ** 0.7)
    return round(500 * value) / 500


def demo(folder: Path) -> Path:
    """A run that is no grid: four models and two tasks at two lengths, list recall in two marker conditions."""
    plain: Line = {"train_length": 128, "recipe": "demo"}
    results = []
    for task, model, length in product(DEMO_TASKS, MODELS, (128, 512)):
        tested = plain | {"model": model, "task": task, "length": length}
        results.append(accuracy(skilled(model, task, length), **tested))
        if task == "list_recall":
            results.append(accuracy(CHANCE[task], **tested, condition="decoy"))
    for model, value in zip(MODELS, (80, 79, 78, 77), strict=True):
        results.append(
            accuracy(0.9, 9000, metric="token_accuracy", model=model, length=128, **plain)
        )
        results.append(perplexity(value, 2, model=model, recipe="demo"))
    results += [shortcut(0.52, "parity", length, recipe="demo") for length in (128, 512)]
    return write(folder, RUN, results=results, examples=EXAMPLES)


def covered(folder: Path) -> Path:
    """The demo's run, in which `pause` and `meta` were also asked about list recall with the text covered."""
    run = demo(folder)
    answered = {
        "task": "list_recall",
        "condition": "paper",
        "length": 128,
        "metric": "exact_match",
    }
    results = []
    for text in (run / "results.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        results.append(line | {"answer": " peach"} if answered.items() <= line.items() else line)
    for model, value, answer in (("pause", 0.004, "<i>\n"), ("meta", 0.998, " peach")):
        results.append(
            accuracy(
                value,
                model=model,
                answer=answer,
                train_length=128,
                length=128,
                recipe="demo",
                intervention="landmarks_alone",
                kv_kept=0.013,
            )
        )
    example_with_marker = example("list_recall", COVERED_PROMPT, " peach")
    return write(run, RUN, results=results, examples=[example_with_marker, *EXAMPLES[1:]])


def grid(folder: Path) -> list[Path]:
    """A run of the preset `small`, of a few of its stages, and a benchmark's file next to it: what a report reads."""
    stages = [
        {"name": "tokenize", "kind": "tokenize", "seconds": 3600.0, "cpu_seconds": 3600.0},
        {"name": "pretrain-meta", "kind": "pretrain", "seconds": 3600.0, "cpu_seconds": 3600.0},
        {
            "name": "finetune-meta-parity",
            "kind": "finetune",
            "seconds": 3600.0,
            "cpu_seconds": 3600.0,
        },
    ]
    run = write(
        folder / "small",
        RUN | {"preset": "small", "stages": stages},
        results=[*_plain_results(), *_other_results()],
        analysis=_analysis(),
        curves=_curves(),
        examples=EXAMPLES,
    )
    speeds = []
    for benchmark in ("decode", "prefill"):
        for model, ratio in (
            ("gpt2", 1.0),
            ("meta, inserting", 1.05),
            ("dense, inserting", 1.4),
            ("dense", 1.6),
        ):
            speeds.append(timing(benchmark, model, ratio))
    write(folder, decode=speeds)
    return [run, folder / "decode.jsonl"]


def _plain_results() -> list[Line]:
    """Two tasks, two train lengths and one to three seeds of each model."""
    results = []
    for model, seeds in {"gpt2": 3, "pause": 1, "twin": 3, "meta": 3}.items():
        for seed, task, trained, length in product(
            range(seeds), ("list_recall", "parity"), (512, 128), GRID_LENGTHS
        ):
            tested: Line = {
                "model": model,
                "task": task,
                "train_length": trained,
                "length": length,
                "seed": seed,
            }
            results.append(accuracy(skilled(model, task, length, trained) - seed / 50, **tested))
            results.append(accuracy(0.9, 1500, **tested, metric="token_accuracy", chance=None))
    return results


def _other_results() -> list[Line]:
    """A little of every other test of the preset."""
    results = []
    among_landmarks = {
        "condition": "landmark",
        "train_condition": "landmark",
        "recipe": "small/landmark",
    }
    for length in GRID_LENGTHS:
        results += [
            accuracy(0.5, length=length, seed=0, intervention="no_pos"),
            accuracy(0.6, length=length, seed=1, intervention="no_pos"),
            accuracy(
                None if length > 512 else 0.4,
                length=length,
                position_embedding="learned",
            ),
            accuracy(0.2, length=length, train_length=128, condition="long_prompt"),
            accuracy(0.3, length=length, train_length=128, **among_landmarks),
            accuracy(0.9, length=length, train_length=1024, recipe="small/yarn4"),
            shortcut(0.52, "parity", length),
        ]
    short: Line = {"length": 128, "train_length": 128}
    for kind, seed in product(("half-rate", "longer"), range(2)):
        results.append(accuracy(0.6 + seed / 10, **short, recipe=f"small/{kind}", seed=seed))
    for scale in ("0.1", "1"):
        results.append(accuracy(0.7, 100, length=128, intervention=f"noise:{scale}"))
    for model, value in zip(MODELS, (80, 79, 78, 77), strict=True):
        results.append(accuracy(0.2, condition="landmark", model=model))
        results.append(accuracy(0.2, condition="decoy", model=model))
        results.append(perplexity(value, 2, model=model))
    return [*results, perplexity(79, 3, seed=1)]


def _curves() -> list[Line]:
    """The learning curves of three runs."""
    curves = []
    for (model, seed), steps_needed in {
        ("gpt2", 0): 900,
        ("meta", 0): 300,
        ("meta", 1): 400,
    }.items():
        for step in range(100, 1001, 100):
            curves.append(recall(step, min(1.0, step / steps_needed), model=model, seed=seed))
    return curves


def _analysis() -> list[Line]:
    """A little of each analysis, of meta's seeds 0 and 1."""
    return [*_sharpness(), *_similarity(), *_rate_distortion()]


def _sharpness() -> list[Line]:
    lines: list[Line] = []
    for seed, head in product(range(3), ({}, {"layer": 0, "head": 0}, {"layer": 0, "head": 1})):
        for metric, module in product(
            ("logit", "log_odds", "entropy"), ("attention", "second_attention")
        ):
            fields = {"module": module, "seed": seed} | head
            lines.append(inner("sharpness", f"attention_{metric}_change", 1.5 - seed, **fields))
        lines.append(
            inner("sharpness", "premise_holds", 0.3, module="attention", seed=seed, **head)
        )
    for seed, marker in product(range(3), ("context", "final")):
        for metric in (
            "output_top_logit_change",
            "output_answer_logit_change",
            "output_entropy_change",
        ):
            lines.append(inner("sharpness", metric, 2.0, marker=marker, seed=seed))
    return lines


def _similarity() -> list[Line]:
    lines: list[Line] = []
    for seed, distance, subject in product(range(3), (1, 2, 3, 4, 8, 16, 32), ("meta", "text")):
        fields = {
            "marker": "context",
            "subject": subject,
            "layer": 2,
            "distance": distance,
            "seed": seed,
        }
        lines.append(
            inner("residual", "similarity_centred", (0.6 - seed / 10) / distance, **fields)
        )
    for keys, layer in product(("itself", "earlier_meta", "near"), (None, 0)):
        for metric in ("attention_weight", "attention_weight_if_uniform"):
            lines.append(inner("residual", metric, 0.2, module="attention", keys=keys, layer=layer))
    for layer, position in product(range(3), range(10)):
        subject = "meta" if position in (4, 9) else "text"
        fields = {"layer": layer, "position": position, "subject": subject, "n": 1}
        lines.append(
            inner("residual", "similarity_to_final_centred", position / 10, None, **fields)
        )
    return lines


def _rate_distortion() -> list[Line]:
    lines: list[Line] = []
    for split, model in product(("held_out", "fit"), ("gpt2", "meta")):
        measured: Line = {
            "model": model,
            "split": split,
            "train_length": 128,
            "length": 128,
            "marker": "final",
        }
        lines.append(inner("rate_distortion", "answer_entropy", 2.3, None, **measured))
        for subject, beta, fit in product(("meta", "text"), (0.1, 0.5, 0.8), range(2)):
            fields = measured | {"subject": subject, "beta": beta, "fit_seed": fit}
            lines.append(inner("rate_distortion", "rate", 5 * (1 - beta), None, **fields))
            lines.append(
                inner("rate_distortion", "distortion", 1 + beta + fit / 10, None, **fields)
            )
    return lines
