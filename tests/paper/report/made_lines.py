"""Lines of made-up runs, written by hand and never by the code under test: no figure here was measured."""

import json
from collections.abc import Sequence
from itertools import product
from math import exp, sqrt
from pathlib import Path
from typing import Any

Line = dict[str, Any]

MODELS = ("gpt2", "pause", "twin", "meta")
TASKS = ("list_recall", "segment_counting", "parity", "copying")
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
CHANCE = {"list_recall": 0.1, "segment_counting": 0.2, "parity": 0.5, "copying": 0.0}
SKILL = {"gpt2": 0.05, "pause": 0.1, "twin": 0.6, "meta": 0.99, "gpt-neo": 0.3}


def wilson(value: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval by its formula."""
    z = 1.959963984540054
    middle, reach = value + z**2 / (2 * n), z * sqrt(value * (1 - value) / n + (z / (2 * n)) ** 2)
    return max(0.0, (middle - reach) / (1 + z**2 / n)), min(1.0, (middle + reach) / (1 + z**2 / n))


def accuracy(value: float | None, n: int = 500, /, **fields: Any) -> Line:
    """Exact match of the plain runs of preset `small`, but for the fields given; None cannot be run."""
    low, high = (None, None) if value is None else wilson(value, n)
    line = {
        "model": "meta", "position_embedding": "rope", "task": "list_recall", "condition": "paper",
        "train_condition": "paper", "train_length": 512, "length": 512, "metric": "exact_match", "value": value,
        "n": 0 if value is None else n, "low": low, "high": high, "seed": 0, "recipe": "small",
    } | fields  # fmt: skip
    return {"chance": CHANCE.get(str(line["task"]))} | line


def perplexity(value: float, spread: float | None = None, /, **fields: Any) -> Line:
    line = accuracy(None, task=None, train_condition=None, train_length=None, condition="none", length=1024, chance=412)
    ends = {"low": value - spread, "high": value + spread} if spread else {}
    return line | {"metric": "perplexity", "value": value, "n": 51234} | ends | fields


def shortcut(rate: float, task: str, length: int, /, **fields: Any) -> Line:
    line = {"model": "the last bit", "task": task, "condition": "paper", "length": length, "metric": "shortcut"}
    return line | {"value": rate, "n": 500, "seed": 2026, "recipe": "small"} | fields


def inner(analysis: str, metric: str, value: float, spread: float | None = 0.05, /, **fields: Any) -> Line:
    """What was measured inside a model of list recall."""
    line: Line = {"analysis": analysis, "metric": metric, "value": value, "n": 100, "seed": 0, "recipe": "small"}
    line |= {"model": "meta", "position_embedding": "rope", "task": "list_recall", "condition": "paper"}
    line |= {"train_condition": "paper", "train_length": 512, "length": 256}
    return line | ({"low": value - spread, "high": value + spread} if spread else {}) | fields


def loss(step: int, value: float, **fields: Any) -> Line:
    line = {"model": "meta", "position_embedding": "rope", "seed": 0, "step": step, "loss": value, "recipe": "small"}
    return line | fields


def recall(step: int, exact_match: float, **fields: Any) -> Line:
    """A point of a learning curve, of 3,000 text tokens a step."""
    line = {"model": "meta", "position_embedding": "rope", "seed": 0, "step": step, "text_tokens": 3000 * step}
    about = {"task": "list_recall", "train_length": 128, "recipe": "small"}
    return line | about | {"exact_match": exact_match, "n": 200} | fields


def timing(benchmark: str, model: str, ratio: float, /, **fields: Any) -> Line:
    line = {
        "benchmark": benchmark, "model": model, "against": "gpt2", "shape": "paper", "length": 512, "batch": 1,
        "text_tokens": 461, "n": 5, "rounds": [2.0], "seconds": 2 * ratio, "threads": 2,
        "ratio": ratio, "ratio_low": ratio - 0.01, "ratio_high": ratio + 0.01, "limit": 1.0, "device": "an A100",
        "dtype": "float32", "parameters": 9, "repeats": 1, "low": 1.0, "high": 3.0, "ratio_per_text_token": 1.0,
        "limit_per_text_token": 1.0, "over_products": 1.0, "compiled": False,
    }  # fmt: skip
    return line | fields


def example(task: str, prompt: str, completion: str, **fields: Any) -> Line:
    """A shown example; each ` _PAUSE_` of its prompt is a meta-token."""
    offsets = [place for place in range(len(prompt)) if prompt.startswith(" _PAUSE_", place)]
    return {"task": task, "prompt": prompt, "completion": completion, "markers": offsets} | fields


LITERAL = "A literal _PAUSE_ and <script>alert('x')</script> & more are text, so_is_this | too:"
EXAMPLES = [
    example("list_recall", "Fruits: orange peach\nQ: What is item 2 of Fruits? _PAUSE_", " peach", n_tokens=71),
    example("copying", LITERAL + " _PAUSE_ the span _PAUSE_ ends.\nQ: Copy it. _PAUSE_", " the span", phase=1),
]
EXAMPLES[1]["markers"] = EXAMPLES[1]["markers"][1:]  # the first is text

RUN: Line = {
    "command": "metatokens reproduce --preset demo", "preset": "demo", "python": "3.11.2", "platform": "Linux",
    "cores": 2, "versions": {"metatokens": "0.1.0", "torch": "2.13.0"}, "corpus": {"spec": "builtin", "tokens": 1234},
    "recipes": {"pretrain": {"training": {"max_steps": 400, "betas": [0.9, 0.95]}}},
    "created": "2026-01-02T03:04:05+00:00", "finished": "2026-01-02T03:17:35+00:00", "wall_seconds": 810.4,
    "stages": [{"name": "tokenize", "seconds": 12.5}, {"name": "pretrain-gpt2", "seconds": 75.0}],
    "models": {
        model: {"parameters": 361984 + 32896 * (model in ("twin", "meta")), "description": f"what {model} is"}
        for model in MODELS
    },
}  # fmt: skip


def write(folder: Path, run: Line | None = None, **lines: Sequence[Line]) -> Path:
    """A run's folder of the named files of lines, with what does not apply left out or null, as older runs have it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, own in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own), encoding="utf-8")
    if run is not None:
        (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return folder


def skilled(model: str, task: str, length: int, trained: int = 128) -> float:
    """Falls beyond the train length; guessing is the floor. Of 500 prompts, so a multiple of 1/500."""
    value = CHANCE[task] + (1 - CHANCE[task]) * SKILL[model] * min(1.0, (trained / length) ** 0.7)
    return round(500 * value) / 500


def demo(folder: Path) -> Path:
    """A run that is no grid: four models and tasks at four lengths, list recall in three marker conditions."""
    plain: Line = {"train_length": 128, "recipe": "demo"}
    results = [
        accuracy(skilled(model, task, length) if condition == "paper" else CHANCE[task],
                 model=model, task=task, condition=condition, length=length, **plain)
        for task, model, length in product(TASKS, MODELS, LENGTHS[:4])
        for condition in (("paper", "none", "decoy") if task == "list_recall" else ("paper",))
    ]  # fmt: skip
    results += [accuracy(0.9, 9000, metric="token_accuracy", model=one, length=128, **plain) for one in MODELS]
    results += [perplexity(80 - place, 2, model=one, recipe="demo") for place, one in enumerate(MODELS)]
    results += [shortcut(0.52, "parity", length, recipe="demo") for length in LENGTHS[:4]]
    rates = {"gpt2": 0.0, "pause": 0.006, "twin": 0.01, "meta": 0.02}
    curves = [
        loss(step, 2.3 * exp(-rates[model] * step), model=model, task=task, train_length=128, recipe="demo")
        for task, model, step in product(TASKS, MODELS, range(50, 1001, 50))
    ]
    curves += [loss(step, 5 + exp(-step / 100), model=model, recipe="demo") for model in MODELS for step in (100, 200)]
    return write(folder, RUN, results=results, curves=curves, examples=EXAMPLES)


def covered(folder: Path) -> Path:
    """The demo's run, in which `pause` and `meta` were also asked about list recall with the text covered."""
    run = demo(folder)
    results = [json.loads(line) for line in (run / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    shown = {"task": "list_recall", "condition": "paper", "length": 128, "metric": "exact_match"}
    results = [line | {"answer": " peach"} if shown.items() <= line.items() else line for line in results]
    about: Line = {"train_length": 128, "length": 128, "recipe": "demo", "intervention": "landmarks_alone"}
    results += [
        accuracy(value, model=model, answer=answer, kv_kept=0.013, **about)
        for model, value, answer in (("pause", 0.004, "<i>\n"), ("meta", 0.998, " peach"))
    ]
    example_with_marker = example("list_recall", COVERED_PROMPT, " peach")
    return write(run, RUN, results=results, examples=[example_with_marker, *EXAMPLES[1:]])


COVERED_PROMPT = "Fruits: orange <u>peach\nQ: none _PAUSE_ pear\nQ: What is item 2 of Fruits? _PAUSE_"


def grid(folder: Path) -> list[Path]:
    """A run of the preset `small`, of a few of its stages, and a benchmark's file next to it: what a report reads."""
    results = []
    for (model, seeds), length in product({"gpt2": 2, "pause": 1, "twin": 3, "meta": 3}.items(), LENGTHS):
        for seed, (task, trained) in product(
            range(seeds), (("list_recall", 512), ("list_recall", 128), ("parity", 512), ("parity", 128))
        ):
            about: Line = {"model": model, "task": task, "train_length": trained, "length": length, "seed": seed}
            value = skilled(model, task, length, trained) - seed / 50
            results += [accuracy(value, **about), accuracy(0.9, 1500, **about, metric="token_accuracy", chance=None)]
    for length, seed in product(LENGTHS[:5], range(2)):
        results.append(accuracy(0.5 + seed / 10, length=length, seed=seed, intervention="no_pos"))
    for length in LENGTHS[:5]:
        beyond = None if length > 1024 else 0.4
        results.append(accuracy(beyond, length=length, position_embedding="learned"))
        results.append(accuracy(0.2, length=length, train_length=128, condition="long_prompt"))
        about = {"condition": "landmark", "train_condition": "landmark", "recipe": "small/landmark"}
        results.append(accuracy(0.3, length=length, train_length=128, **about))
        results.append(accuracy(0.9, length=length, train_length=1024, recipe="small/yarn4"))
    for kind, seed in product(("half-rate", "longer"), range(2)):
        about = {"length": 128, "train_length": 128, "recipe": f"small/{kind}", "seed": seed}
        results.append(accuracy(0.6 + seed / 10, **about))
    for draw, scale in product(range(2), ("0.1", "1")):
        results.append(accuracy(0.7, 100, length=128, intervention=f"noise:{scale}", noise_seed=draw))
    results += [accuracy(0.2, condition=condition, model=one) for condition in ("landmark", "decoy") for one in MODELS]
    results += [perplexity(80 - place, 2, model=one) for place, one in enumerate(MODELS)]
    results += [perplexity(79, 3, seed=1)] + [shortcut(0.52, "parity", length) for length in LENGTHS]
    curves = [
        loss(step, 2.3 * exp(-step / 200), model=model, task="list_recall", train_length=128)
        for model, step in product(("gpt2", "meta"), range(50, 1001, 50))
    ]
    curves += [
        recall(step, min(1.0, step / needed), model=model, seed=seed)
        for (model, seed), needed in {("gpt2", 0): 900, ("meta", 0): 300, ("meta", 1): 400}.items()
        for step in range(100, 1001, 100)
    ]
    names = ("tokenize", "pretrain-meta", "finetune-meta-parity")
    stages = [{"name": name, "kind": name.split("-")[0], "seconds": 3600.0} for name in names]
    run = RUN | {"preset": "small", "stages": stages}
    write(folder / "small", run, results=results, analysis=_analysis(), curves=curves, examples=EXAMPLES)
    speeds = [
        timing(benchmark, model, ratio)
        for benchmark in ("decode", "prefill")
        for model, ratio in (("gpt2", 1.0), ("meta, inserting", 1.05), ("dense, inserting", 1.4), ("dense", 1.6))
    ]
    return [folder / "small", write(folder, decode=speeds) / "decode.jsonl"]


def _analysis() -> list[Line]:
    """A little of each analysis, of meta's seeds 0 and 1."""
    lines: list[Line] = []
    spread = {"quantiles": [-2.0, -1.5, -0.5, 0.0, 0.5, 1.5, 2.0]}
    for seed, place in product(range(2), ({}, {"layer": 0, "head": 0}, {"layer": 0, "head": 1})):
        for metric, module in product(("logit", "log_odds", "entropy"), ("attention", "second_attention")):
            about = {"module": module, "seed": seed} | spread | place
            lines.append(inner("sharpness", f"attention_{metric}_change", 1.5 - seed, **about))
        lines.append(inner("sharpness", "premise_holds", 0.3, module="attention", seed=seed, **place))
    for seed, marker in product(range(2), ("context", "final")):
        for metric in ("output_top_logit_change", "output_answer_logit_change", "output_entropy_change"):
            lines.append(inner("sharpness", metric, 2.0, marker=marker, seed=seed, **spread))
    for seed, distance, subject in product(range(2), (1, 2, 3, 4, 8, 16, 32), ("meta", "text")):
        about = {"marker": "context", "subject": subject, "layer": 2, "distance": distance, "seed": seed}
        lines.append(inner("residual", "similarity_centred", (0.6 - seed / 10) / distance, **about))
    for keys, layer in product(("itself", "earlier_meta", "near"), (None, 0)):
        for metric in ("attention_weight", "attention_weight_if_uniform"):
            lines.append(inner("residual", metric, 0.2, module="attention", keys=keys, layer=layer))
    for layer, position in product(range(3), range(10)):
        about = {"layer": layer, "position": position, "subject": "meta" if position in (4, 9) else "text", "n": 1}
        lines.append(inner("residual", "similarity_to_final_centred", position / 10, None, **about))
    for split, model in product(("held_out", "fit"), ("gpt2", "meta")):
        own: Line = {"model": model, "split": split, "train_length": 128, "length": 128, "marker": "final"}
        lines.append(inner("rate_distortion", "answer_entropy", 2.3, None, **own))
        for subject, beta, fit in product(("meta", "text"), (0.1, 0.5, 0.8), range(2)):
            for metric, value in (("rate", 5 * (1 - beta)), ("distortion", 1 + beta + fit / 10)):
                about = {"subject": subject, "beta": beta, "fit_seed": fit}
                lines.append(inner("rate_distortion", metric, value, None, **own, **about))
    return lines
