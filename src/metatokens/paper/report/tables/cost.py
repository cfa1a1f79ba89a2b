"""Tables of what is no accuracy: learning, perplexity, speed, and the runs themselves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import isfinite
from typing import Any

from metatokens.paper.report.compare import TEXTS
from metatokens.paper.report.derive import learned_from, learning_curves, slowdowns
from metatokens.paper.report.frame import MODELS, TASKS, Cell, Fields, Inputs, one_seed
from metatokens.paper.report.paper import first_token_ratio, paper_table
from metatokens.paper.report.tables.table import POSITIONS, Row, Table, counts, worded
from metatokens.paper.report.text import (
    EN_DASH,
    NOT_RUN,
    NOT_YET,
    compact,
    count,
    duration,
    learned_at,
    name,
    with_interval,
)
from metatokens.paper.report.words import table_words
from metatokens.records import ModelInfo, Stage


def learning(inputs: Inputs) -> Table:
    """Text tokens until list recall stays at 90 % or more: a row for each model, seeds in order."""
    curves = learning_curves(inputs.curves)
    models = dict.fromkeys((model, position) for model, position, _ in curves)
    rows = []
    for model, position in sorted(models, key=lambda one: (one[1] != "rope", one)):
        own = [points for (name, its, _), points in curves.items() if (name, its) == (model, position)]
        cell = inputs.cell(metric="tokens_to_learn", model=model, position_embedding=position)
        each = " / ".join(learned_at(one.value) for one in cell.seeds.values()) if cell else ""
        seen = max(points["text_tokens"].iloc[-1] for points in own)
        ns = sorted({int(n) for points in own for n in points["n"].dropna()})
        rows.append((f"{model}, {POSITIONS[position]}", each, compact(seen), " / ".join(map(str, ns))))
    header = ("text tokens to 90 %, by seed", "text tokens in all", "n (prompts)")
    return worded(table_words("learning").of(), header, rows)


def sooner(inputs: Inputs) -> Table:
    """Steps until a share of each task's prompts is answered from then on (rope): a row for each model and share."""
    curves = {task: learning_curves(inputs.curves, task) for task in TASKS}
    rows = []
    for model, share in product(MODELS, (0.8, 0.95)):
        own = [[points for about, points in found.items() if about[:2] == (model, "rope")] for found in curves.values()]
        steps = ([learned_from(points, share)[0] for points in seeds] for seeds in own)
        each = (" / ".join(count(one) if isfinite(one) else EN_DASH for one in seeds) or NOT_YET for seeds in steps)
        if any(own):
            rows.append((f"{model}, {100 * share:.0f} %", *each))
    asked = sorted({int(n) for found in curves.values() for points in found.values() for n in points["n"].dropna()})
    footer = ("n (prompts)", *[" / ".join(map(str, asked))] * len(TASKS))
    return worded(table_words("sooner").of(), map(name, TASKS), rows, (footer,) if rows else ())


def perplexity(inputs: Inputs, rows: Sequence[tuple[str, Fields]]) -> Table:
    """By the label and the fields of each row; a column for each text and placement that was measured."""
    places = [
        {"metric": "perplexity", "text": text, "condition": placement}
        for text, placement in product(TEXTS, ("none", "uniform", "periodic"))
        if inputs.values("model", metric="perplexity", text=text, condition=placement)
    ]
    header = [f"{TEXTS[at['text']]}, {'alone' if at['condition'] == 'none' else at['condition']}" for at in places]
    found = [(label, inputs.cells([fields | place for place in places])) for label, fields in rows]
    lines = [
        (label + one_seed(cells), *(_perplexity(cell) if cell else "" for cell in cells))
        for label, cells in found
        if any(cells)
    ]
    columns = [[cells[number] for _, cells in found] for number in range(len(places))]
    unigrams = (next((cell.chance for cell in column if cell and cell.chance), None) for column in columns)
    footer = (
        ("unigram", *(NOT_RUN if one is None else f"{one:,.1f}" for one in unigrams)),
        ("n (text tokens)", *map(counts, columns)),
    )
    return worded(table_words("perplexity").of(), header, lines, footer)


def _perplexity(cell: Cell) -> str:
    pooled = cell.pooled()
    seeds = "\n" + " / ".join(map(_two_digits, cell.values())) if len(cell.seeds) > 1 else ""
    return with_interval(pooled, _two_digits) + seeds if pooled else NOT_RUN


def _two_digits(value: float | None) -> str:
    return f"{value or 0.0:,.2f}"


def speed(inputs: Inputs) -> Table:
    """Table 3 beside the benchmark's lines; the paper's code was dense."""
    paper = paper_table(3)
    papers = {
        ("decode", "dense, inserting", "gpt2"): paper.value(metric="slowdown", model="meta"),
        ("prefill", "dense", "gpt2"): first_token_ratio(),
    }
    lines = sorted(slowdowns(inputs.read.timings), key=lambda line: line.benchmark)
    lines = [line for line in lines if line.against in ("gpt2", "meta", "meta, inserting")]
    rows = []
    for line in lines:
        reads, alone = line.benchmark == "prefill", line.model == line.against
        what = f"first token after {count(line.text_tokens / line.batch)} of text" if reads else "decoding"
        theirs = papers.get((line.benchmark, line.model, line.against))
        rows.append(
            (
                f"{what}, batch {line.batch}",
                line.model if alone else f"{line.model} / {line.against}",
                f"{line.text_tokens / line.seconds:,.0f}",
                count(1000 * line.seconds) if reads else "",
                "" if alone else f"{line.ratio:.3f} ({line.ratio_low:.3f} to {line.ratio_high:.3f})",
                "" if theirs is None else f"{theirs:.2f}",
                "" if alone else f"{line.limit:.3f}",
                count(line.n),
            )
        )
    about = {f"{line.device}, {line.threads} threads, {line.dtype}, size \u201c{line.shape}\u201d" for line in lines}
    rates, waits = (
        " and ".join(f"{paper.value(metric=metric, model=model)}" for model in ("gpt2", "meta"))
        for metric in ("tokens_per_second", "first_token_ms")
    )
    words = table_words("speed").of(rates=rates, waits=waits, here="; ".join(sorted(about)))
    header = (
        "model / compared with", "text tokens a second", "ms to the first token",
        "times as long", "paper", "by operations", "n (rounds)",
    )  # fmt: skip
    return replace(worded(words, header, rows), text_columns=2)


def models(infos: Mapping[str, ModelInfo]) -> Table:
    """The models of a run: parameters and description."""
    sizes = {model: NOT_RUN if one.parameters is None else count(one.parameters) for model, one in infos.items()}
    rows = ((model, info.description, sizes[model]) for model, info in infos.items())
    return Table("Models", ("model", "what it is", "parameters"), tuple(rows), text_columns=2)


def settings(title: str, values: Mapping[str, Any]) -> Table:
    """Nested settings as dotted keys and values."""
    return Table(title, ("setting", "value"), tuple(_flat(values)), text_columns=2)


def stages(times: Sequence[Stage]) -> Table:
    """The stages of a run and the time that each took."""
    rows = ((stage.name, duration(stage.seconds), duration(stage.cost)) for stage in times)
    return Table("Time of each stage", ("stage", "by the clock", "of one core"), tuple(rows))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[Row]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _setting(value)


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_setting, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return count(value)
    return NOT_RUN if value is None else str(value)
