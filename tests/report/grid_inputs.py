"""A made-up grid of runs with records of every kind: no figure here was measured."""

import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from metatokens.evaluation.intervals import wilson_interval
from metatokens.records import Measurement, Result, append_records
from tests.report.report_inputs import CHANCE, EXAMPLES, RUN, TASKS, curves

MADE = {"versions": {"metatokens": "0.1.0"}, "created": "2026-01-02T03:04:05+00:00"}
TRAINED = (128, 256, 512)
LENGTHS = {128: 500, 256: 500, 512: 500, 1024: 500, 2048: 200, 4096: 200}
SKILL = {"gpt2": 0.05, "pause": 0.1, "twin": 0.6, "meta": 0.99, "gpt-neo": 0.3}
INTERVENTIONS = {"no_pos": 1.0, "no_embed": 0.2, "neither": 0.15}
NOISE = {"0.1": 1.0, "0.5": 0.98, "1": 0.8, "2": 0.6}

# What a line of a benchmark holds beside what the report shows.
UNSHOWN = {
    "parameters": 9, "repeats": 1, "low": 1.0, "high": 3.0, "ratio_per_text_token": 1.0, "limit_per_text_token": 1.0,
    "over_products": 1.0, "compiled": False,
}  # fmt: skip

Fields = dict[str, Any]
_wilson = cache(wilson_interval)


def accuracy(value: float | None, n: int = 500, /, **fields: Any) -> Result:
    """One exact-match record of the plain grid, but for the fields given."""
    hits = None if value is None else round(value * n)
    low, high = (None, None) if hits is None else _wilson(hits, n)
    record = {
        "model": "meta", "position_embedding": "rope", "task": "list_recall", "condition": "paper",
        "train_condition": "paper", "train_length": 512, "length": 512, "metric": "exact_match", "seed": 0,
        "value": None if hits is None else hits / n, "n": 0 if hits is None else n, "low": low, "high": high,
        "chance": CHANCE.get(str(fields.get("task", "list_recall"))), "recipe": "small", **MADE,
    }  # fmt: skip
    return Result.model_validate(record | fields)


def skilled(model: str, task: str, trained: int, length: int, factor: float = 1.0) -> float:
    """Falls beyond the train length; guessing is the floor."""
    skill = SKILL[model] * factor * min(1.0, (trained / length) ** 0.7) * (0.8 if task == "segment_counting" else 1.0)
    return CHANCE[task] + (1 - CHANCE[task]) * skill


def _seeds(model: str, position: str) -> range:
    return range(3) if position == "rope" and model in ("gpt2", "twin", "meta") else range(1)


def _grid() -> Iterator[Result]:
    """Tables 7 to 10, conditions `none` and `decoy`, beyond a learned table no value."""
    models = [*product(("gpt2", "pause", "twin", "meta"), ("rope", "learned", "none")), ("gpt-neo", "learned")]
    for (model, position), task, trained in product(models, TASKS, TRAINED):
        for seed, (length, n) in product(_seeds(model, position), LENGTHS.items()):
            if length > 2048 and position != "rope":
                continue
            fields: Fields = {"model": model, "position_embedding": position, "task": task, "seed": seed}
            fields |= {"train_length": trained, "length": length}
            cut = length > 1024 and position == "learned"
            yield accuracy(None if cut else skilled(model, task, trained, length, 1 - seed / 50), n, **fields)
            if not cut:
                yield accuracy(0.5, 3 * n, **fields | {"metric": "token_accuracy", "chance": None})
            if position == "rope" and length <= 1024:
                for condition, kept in (("none", 0.1), ("decoy", 0.7)):
                    yield accuracy(skilled(model, task, trained, length, kept), n, **fields, condition=condition)


def _interventions() -> Iterator[Result]:
    for position, task, trained in product(("rope", "learned"), TASKS, TRAINED):
        for seed, (length, n) in product(_seeds("meta", position), list(LENGTHS.items())[:5]):
            if length > 1024 and position == "learned":
                continue
            fields: Fields = {"position_embedding": position, "task": task, "train_length": trained, "length": length}
            for intervention, kept in INTERVENTIONS.items():
                kept = kept * (1.2 if intervention == "no_pos" and length > trained else 1.0)
                value = min(1.0, skilled("meta", task, trained, length, kept * (1 - seed / 50)))
                yield accuracy(value, n, **fields, intervention=intervention, seed=seed)
    for model, trained, length in product(("gpt2", "pause", "twin"), TRAINED, list(LENGTHS)[:4]):
        for intervention in INTERVENTIONS:
            yield accuracy(0.01, model=model, train_length=trained, length=length, intervention=intervention)
    for model, position, task in product(("gpt2", "meta"), ("rope", "learned"), ("list_recall", "copying")):
        for trained, length, (scale, kept), draw in product(TRAINED, (128, 512), NOISE.items(), range(5)):
            fields = {"model": model, "position_embedding": position, "task": task}
            fields |= {"train_length": trained, "length": length, "noise_seed": draw}
            kept = kept if position == "rope" else kept**2
            for place in ("", ":meta", ":raw", ":meta:raw"):
                value = skilled(model, task, trained, length, kept)
                yield accuracy(value, 100, **fields, intervention=f"noise:{scale}{place}")


def _departures() -> Iterator[Result]:
    """Whatever departs from the plain recipes: random positions, markers, placement, YaRN."""
    for model, task, (length, n) in product(("gpt2", "twin", "meta"), TASKS, LENGTHS.items()):
        fields: Fields = {"model": model, "task": task, "train_length": 128, "length": length}
        held = {"gpt2": 0.2, "twin": 0.7, "meta": 0.999}[model]
        yield accuracy(held, n, **fields, recipe="small/random-positions")
        yield accuracy(0.3 + held / 2, n, **fields, recipe="small/random-ranges")
        if task == "list_recall":
            yield accuracy(skilled(model, task, 128, length), n, **fields, recipe="small/one-length")
    for model, trained, (length, n) in product(("gpt2", "twin", "meta"), TRAINED, LENGTHS.items()):
        fields = {"model": model, "train_length": trained, "length": length, "recipe": "small/unmarked"}
        for condition in ("paper", "none"):
            value = skilled(model, "list_recall", trained, length, 0.5)
            yield accuracy(value, n, **fields, condition=condition, train_condition="none")
    for note, trained, (length, n) in product(("periodic", "k=0", "k=0.05", "k=0.2"), TRAINED, LENGTHS.items()):
        value = skilled("meta", "list_recall", trained, length, 0.5 if note == "k=0" else 1.0)
        yield accuracy(value, n, train_length=trained, length=length, recipe=f"small/{note}")
    for note, task, trained in product(("yarn4", "yarn8"), ("list_recall", "segment_counting"), (512, 1024, 2048)):
        window = {"yarn4": 1024, "yarn8": 2048}[note]
        if trained in (window, window // 2):
            for length in (256, 512, 1024, 2048, 4096):
                fields = {"task": task, "train_length": trained, "length": length, "recipe": f"small/{note}"}
                value = skilled("meta", task, trained, length)
                yield accuracy(value, 200, **fields)
                yield accuracy(value, 400, **fields, metric="token_accuracy")


def _others() -> Iterator[Result]:
    blank: Fields = {"task": None, "train_condition": None, "train_length": None, "metric": "perplexity"}
    blank |= {"n": 51234, "chance": 412.5, "length": 1024}
    for (place, model), text in product(enumerate(("gpt2", "pause", "twin", "meta")), ("held_out", "book")):
        for seed, placement in product(_seeds(model, "rope"), ("none", "uniform")):
            value = 80 - place + 0.1 * seed + (5 if text == "book" else 0)
            figure = {"value": value, "low": value - 2, "high": value + 2}
            if placement == "none" or model != "gpt2":
                yield accuracy(0.5, **blank | figure, model=model, condition=placement, text=text, seed=seed)
        figure = {"value": 76.0, "low": 74.0, "high": 78.0, "text": text, "condition": "none"}
        if model != "meta":
            yield accuracy(0.5, **blank | figure, model=model, recipe="small/equal-compute")
    for task, rate in (("parity", 0.52), ("segment_counting", 0.25)):
        for length in LENGTHS:
            rates = {"metric": "majority_rate", "model": "-", "position_embedding": None, "seed": 2026}
            yield accuracy(rate, task=task, length=length, **rates, train_length=None, train_condition=None)


@cache
def results() -> list[Result]:
    """Every result of the grid."""
    return [*_grid(), *_interventions(), *_departures(), *_others()]


def measurement(value: float, spread: float = 0.05, /, **fields: Any) -> Measurement:
    """One analysis record of list recall."""
    record = {
        "model": "meta", "position_embedding": "rope", "task": "list_recall", "condition": "paper",
        "train_condition": "paper", "train_length": 512, "length": 256, "seed": 0, "recipe": "small",
        "value": value, "n": 100, "low": value - spread, "high": value + spread, **MADE,
    }  # fmt: skip
    return Measurement.model_validate(record | fields)


def _quantiles(value: float) -> tuple[float, ...]:
    return tuple(value + shift for shift in (-2.0, -1.5, -0.5, 0.0, 0.5, 1.5, 2.0))


def _sharpness(model: str, position: str) -> Iterator[Measurement]:
    about: Fields = {"analysis": "sharpness", "model": model, "position_embedding": position}
    places: list[Fields] = [{}, *({"layer": layer, "head": head} for layer, head in product(range(2), range(2)))]
    values = {
        "attention_logit_change": 1.5, "attention_log_odds_change": 1.2, "attention_entropy_kept": 1.0,
        "attention_entropy_zeroed": 1.4, "attention_entropy_change": -0.4,
    }  # fmt: skip
    modules = ("attention", *(("second_attention",) if model in ("meta", "twin") else ()))
    for place, module in product(places, modules):
        own = about | {"module": module} | place
        for metric, value in values.items():
            yield measurement(value, metric=metric, quantiles=_quantiles(value), **own)
        yield measurement(0.3, metric="premise_holds", **own)
        for premise, boosted in product((True, False), repeat=2):
            value = 0.9 if premise and boosted else 0.4
            yield measurement(value, metric="entropy_fell", premise=premise, boosted=boosted, **own)
    for marker in ("context", "final"):
        for metric, value in (("output_top_logit_change", 2.0), ("output_entropy_change", -0.6)):
            yield measurement(value, metric=metric, marker=marker, quantiles=_quantiles(value), **about)
    for metric in ("output_answer_logit_change", "output_answer_log_probability_change"):
        yield measurement(3.0, metric=metric, marker="final", quantiles=_quantiles(3.0), **about)


def _residual(model: str, position: str) -> Iterator[Measurement]:
    about: Fields = {"analysis": "residual", "model": model, "position_embedding": position}
    for layer, distance, subject in product(range(3), (1, 2, 3, 4, 8, 16, 32, 64), ("meta", "text")):
        value = (0.6 if subject == "meta" else 0.3) / distance**0.5
        for ending, marker in product(("", "_centred"), ("context", "final")):
            own = about | {"marker": marker, "subject": subject, "layer": layer, "distance": distance}
            yield measurement(value, metric=f"similarity{ending}", **own)
    for module in ("attention", *(("second_attention",) if model in ("meta", "twin") else ())):
        own = about | {"module": module}
        for keys, even in (("itself", 0.01), ("earlier_meta", 0.02), ("near", 0.1), ("other", 0.87)):
            yield measurement(even, metric="attention_weight_if_uniform", keys=keys, **own)
            for layer, head in product(range(2), range(2)):
                value = 0.4 if keys == "earlier_meta" else 0.2
                yield measurement(value, metric="attention_weight", keys=keys, layer=layer, head=head, **own)
    single: Fields = {"n": 1, "low": None, "high": None}
    for layer, position_ in product(range(3), range(30)):
        own = about | single | {"layer": layer, "position": position_}
        own |= {"subject": "meta" if position_ in (12, 29) else "text"}
        for ending in ("", "_centred"):
            yield measurement(math.cos(position_ / 10), metric=f"similarity_to_final{ending}", **own)
        if layer < 2:
            yield measurement(1 / 30, metric="attention_of_final", module="attention", **own)


def _rate_distortion(model: str, intervention: str | None) -> Iterator[Measurement]:
    about: Fields = {"analysis": "rate_distortion", "model": model, "intervention": intervention, "marker": "final"}
    about |= {"train_length": 128, "length": 128}
    level = {"meta": 1.0, "twin": 1.2, "gpt2": 1.8}[model] - (0.1 if intervention else 0.0)
    for split in ("fit", "train", "held_out"):
        yield measurement(2.3, metric="answer_entropy", split=split, low=None, high=None, **about)
        for subject, beta, fit in product(("meta", "text"), (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0), range(3)):
            rate = 4 * (1 - beta) ** 3 * (30 if beta == 0.01 else 1)
            distortion = level * (1.3 if subject == "text" else 1.0) * math.exp(-rate / 3) + 0.01 * fit
            own = about | {"subject": subject, "beta": beta, "fit_seed": fit, "split": split}
            for metric, value in (("rate", rate), ("distortion", distortion), ("information", rate / 2)):
                yield measurement(value, metric=metric, **own)


@cache
def measurements() -> list[Measurement]:
    """Every analysis record of the grid."""
    made: list[Measurement] = []
    for model, position in (("pause", "rope"), ("twin", "rope"), ("meta", "rope"), ("meta", "learned")):
        made += [*_sharpness(model, position), *_residual(model, position)]
    for model, intervention in product(("gpt2", "twin", "meta"), (None, "no_pos")):
        made += _rate_distortion(model, intervention)
    return made


def learning() -> list[Fields]:
    """Accuracy on list recall by text tokens: `meta` is quickest, one `gpt2` never learns."""
    needed = {("gpt2", 0): 900, ("gpt2", 1): 800, ("gpt2", 2): 9000, ("twin", 0): 500, ("twin", 1): 600}
    needed |= {("twin", 2): 700, ("meta", 0): 300, ("meta", 1): 350, ("meta", 2): 400, ("pause", 0): 9000}
    points: list[Fields] = []
    for (model, seed), steps in needed.items():
        for step in range(50, 1001, 50):
            point: Fields = {"model": model, "position_embedding": "rope", "recipe": "small", "seed": seed}
            point |= {"task": "list_recall", "train_length": 128, "step": step, "text_tokens": 3000 * step}
            points.append(point | {"n": 200, "exact_match": min(1.0, step / steps)})
    return points


def speeds() -> list[Fields]:
    """Lines of `metatokens benchmark decode` and `prefill`."""
    texts = {("prefill", "gpt2"): 512, ("prefill", "meta"): 461, ("prefill", "dense"): 461}
    lines: list[Fields] = []
    for batch, (benchmark, model, against, ratio) in product(
        (1, 8),
        (
            ("decode", "gpt2", "gpt2", 1.0),
            ("decode", "meta", "gpt2", 1.01),
            ("decode", "meta, inserting", "gpt2", 1.05),
            ("decode", "dense, inserting", "gpt2", 1.4),
            ("decode", "dense, inserting", "meta, inserting", 1.35),
            ("prefill", "gpt2", "gpt2", 1.0),
            ("prefill", "meta", "gpt2", 1.06),
            ("prefill", "dense", "gpt2", 1.6),
        ),
    ):
        text = texts.get((benchmark, model), 61)
        lines.append(
            {"benchmark": benchmark, "model": model, "against": against, "shape": "paper", "length": 512}
            | {"batch": batch, "text_tokens": text * batch, "n": 5, "rounds": [2.0], "seconds": 2 * ratio * batch}
            | {"ratio": ratio, "ratio_low": ratio - 0.01, "ratio_high": ratio + 0.01, "limit": 1.0, "threads": 2}
            | {"device": "a made-up A100", "dtype": "float32"}
            | UNSHOWN
        )
    return lines


def write_grid(folder: Path, keep: Callable[[Result], bool] = lambda result: True) -> list[Path]:
    """A run folder of the grid, and a benchmark's file beside it: what to give to the report."""
    run = folder / "small"
    run.mkdir(parents=True)
    append_records(run / "results.jsonl", [result for result in results() if keep(result)])
    append_records(run / "analysis.jsonl", measurements())
    losses = [point | {"recipe": "small"} for point in curves()]
    stages = [{"name": name, "seconds": 3600.0} for name in ("tokenize", "pretrain-meta", "finetune-meta-parity")]
    about = RUN | {"preset": "small", "stages": stages, "command": "metatokens reproduce --preset small"}
    (run / "run.json").write_text(json.dumps(about), encoding="utf-8")
    for file, lines in (
        (run / "curves.jsonl", [*losses, *learning()]),
        (run / "examples.jsonl", EXAMPLES),
        (folder / "decode.jsonl", speeds()),
    ):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return [run, folder / "decode.jsonl"]
