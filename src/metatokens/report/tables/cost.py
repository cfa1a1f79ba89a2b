"""Tables of what is no accuracy: learning, perplexity, speed, and the runs themselves."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from metatokens.report.decisive import TEXTS
from metatokens.report.derive import recall_curves, slowdowns
from metatokens.report.frame import MODELS, Cell, Inputs, one_seed
from metatokens.records import ModelInfo, Stage
from metatokens.report.paper import first_token_ratio, paper_table
from metatokens.report.tables.table import POSITIONS, Row, Table, counts
from metatokens.report.text import EN_DASH, NOT_RUN, compact, count, duration, learned_at


def learning(inputs: Inputs) -> Table:
    """Text tokens until list recall stays at 90 % or more: a row for each model, seeds in order."""
    curves = recall_curves(inputs.curves)
    models = dict.fromkeys((model, position) for model, position, _ in curves)
    rows = []
    for model, position in sorted(models, key=lambda one: (one[1] != "rope", one)):
        own = [points for (name, its, _), points in curves.items() if (name, its) == (model, position)]
        cell = inputs.cell(metric="tokens_to_learn", model=model, position_embedding=position)
        each = " / ".join(learned_at(one.value) for one in cell.seeds.values()) if cell else ""
        seen = max(points["text_tokens"].iloc[-1] for points in own)
        ns = sorted({int(n) for points in own for n in points["n"].dropna()})
        rows.append((f"{model}, {POSITIONS[position]}", each, compact(seen), " / ".join(map(str, ns))))
    header = ("model", "text tokens to 90 %, by seed", "text tokens in all", "n (prompts)")
    return Table("List recall, trained to 128 tokens", header, tuple(rows))


def perplexity(inputs: Inputs) -> Table:
    """A row for each model and recipe, a column for each text and placement of meta-tokens."""
    places = list(product(TEXTS, ("none", "uniform", "periodic")))
    rows, measured = [], []
    variants = sorted(set(inputs.select(metric="perplexity")["variant"]))
    for variant, model, position in product(variants, (*MODELS, "gpt-neo"), POSITIONS):
        about = {"metric": "perplexity", "variant": variant, "model": model, "position_embedding": position}
        cells = inputs.cells([about | {"text": text, "condition": placement} for text, placement in places])
        if any(cells):
            label = ", ".join(filter(None, [model, POSITIONS[position], variant]))
            measured.append(cells)
            rows.append((label + one_seed(cells), *(_perplexity(cell) if cell else "" for cell in cells)))
    columns = zip(*measured, strict=True) if measured else [()] * len(places)
    header = [f"{TEXTS[text]}, {'alone' if place == 'none' else place}" for text, place in places]
    return Table(
        "Perplexity of text tokens",
        ("model", *header),
        tuple(rows),
        (("n (text tokens)", *map(counts, columns)),),
        note="Meta-tokens inserted or not, the same text tokens are scored. In brackets: 95\u00a0% intervals over the "
        "blocks of text, of several seeds the lowest and the highest end; below them the seeds' own figures.",
    )


def _perplexity(cell: Cell) -> str:
    pooled = cell.pooled()
    values = [f"{one.value:,.2f}" for one in cell.seeds.values()]
    if pooled is None:
        return NOT_RUN
    ends = "" if pooled.low is None or pooled.high is None else f" ({pooled.low:,.2f}{EN_DASH}{pooled.high:,.2f})"
    return f"{pooled.value:,.2f}{ends}" + (f"\n{' / '.join(values)}" if len(values) > 1 else "")


def speed(inputs: Inputs) -> Table:
    """Table 3 beside the benchmark's lines; the paper's code was dense."""
    paper = paper_table(3)
    papers = {
        ("decode", "dense, inserting", "gpt2"): paper.value(metric="slowdown", model="meta"),
        ("prefill", "dense", "gpt2"): first_token_ratio(),
    }
    lines = sorted(slowdowns(inputs.speeds), key=lambda line: line.benchmark)
    shown = [line for line in lines if line.against in ("gpt2", "meta", "meta, inserting")]
    rows = []
    for line in shown:
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
    about = {f"{line.device}, {line.threads} threads, {line.dtype}, size \u201c{line.shape}\u201d" for line in shown}
    header = (
        "what", "model / compared with", "text tokens a second", "ms to the first token",
        "times as long", "paper", "by operations", "n (rounds)",
    )  # fmt: skip
    rates, waits = (
        [f"{paper.value(metric=metric, model=model)}" for model in ("gpt2", "meta")]
        for metric in ("tokens_per_second", "first_token_ms")
    )
    note = (
        "Times as long: decoding per text token, the first token after as many positions, of which meta-tokens leave "
        "fewer to the text; the median of the rounds' ratios, in brackets their quartiles. Tokens a second: of the "
        "median time. "
        "By operations: the ratio of what must be computed, in decoding of what must be read; times vary about it. "
        f"The paper: {' and '.join(rates)} tokens a second, {' and '.join(waits)} ms to the first token, without and "
        f"with meta-tokens, on an A100. Here: {'; '.join(sorted(about))}."
    )
    return Table("Inference with meta-tokens (Table 3)", header, tuple(rows), text_columns=2, note=note)


def models(infos: Mapping[str, ModelInfo]) -> Table:
    """The models of a run: parameters and description."""
    rows = tuple(
        (model, info.description, NOT_RUN if info.parameters is None else count(info.parameters))
        for model, info in infos.items()
    )
    return Table("Models", ("model", "what it is", "parameters"), rows, text_columns=2)


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
