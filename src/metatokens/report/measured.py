"""Tables of what is no accuracy: learning, perplexity, speed; and the comparisons behind claims."""

from collections.abc import Iterable
from itertools import product
from typing import Any

from metatokens.report.cells import POSITIONS, counts, one_seed
from metatokens.report.cost_claims import TEXTS, compared, tokens_to_learn
from metatokens.report.estimates import MODELS, Difference
from metatokens.report.grid import Cell, Grid
from metatokens.report.paper import paper_table
from metatokens.report.tables import Table
from metatokens.report.verdicts import Claim
from metatokens.report.wording import EN_DASH, NOT_RUN, NOT_YET, compact, count


def evidence(claims: Iterable[Claim]) -> list[Table]:
    """The comparisons behind each claim."""
    tables = []
    for claim in claims:
        rows = tuple(
            (
                one.label,
                one.figures,
                _order(one.gap) if claim.section == "learning" else claim.interval(one.gap),
                " / ".join(claim.amount(gap).split()[0] for gap in one.by_seed),
                claim.says(one),
            )
            for one in claim.comparisons
        )
        spread = "quartiles of the rounds" if claim.section == "speed" else "95 % interval"
        header = ("comparison", "figures", f"difference ({spread})", "by seed", "says")
        tables.append(Table(f"{claim.text}: {claim.verdict}", header, rows))
    return tables


def _order(gap: Difference | None) -> str:
    """Of two sides' seeds, which learned first; 1, 0 or -1 is no amount."""
    return NOT_YET if gap is None else {1.0: "all before", 0.0: "seeds overlap", -1.0: "all after"}[gap.value]


def learning(grid: Grid) -> Table:
    """Text tokens until list recall stays at 90 % or more: a row for each model, seeds in order."""
    rows = []
    for (model, position), seeds in sorted(grid.recall().items(), key=lambda item: (item[0][1] != "rope", item[0])):
        reached = {seed: tokens_to_learn(points) for seed, points in seeds.items()}
        seen = max(points[-1].text_tokens for points in seeds.values())
        ns = {point.n for points in seeds.values() for point in points if point.n}
        each = " / ".join("not reached" if one is None else compact(one) for one in reached.values())
        rows.append((f"{model}, {POSITIONS[position]}", each, compact(seen), " / ".join(map(str, sorted(ns)))))
    header = ("model", "text tokens to 90 %, by seed", "text tokens in all", "n (prompts)")
    return Table("List recall, trained to 128 tokens", header, tuple(rows))


def perplexity(grid: Grid) -> Table:
    """A row for each model and recipe, a column for each text and placement of meta-tokens."""
    places = list(product(TEXTS, ("none", "uniform", "periodic")))
    notes = grid.values("note", metric="perplexity")
    rows, measured = [], []
    for note, model, position in product(notes, (*MODELS, "gpt-neo"), POSITIONS):
        about: dict[str, Any] = {"model": model, "position_embedding": position}
        cells = [grid.perplexity(note, **about, text=text, condition=placement) for text, placement in places]
        if any(cells):
            label = ", ".join(filter(None, [model, POSITIONS[position], note]))
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
    values = [f"{one.value:,.2f}" for one in cell.seeds.values() if one.value is not None]
    if pooled is None or pooled.value is None:
        return NOT_RUN
    ends = "" if pooled.low is None or pooled.high is None else f" ({pooled.low:,.2f}{EN_DASH}{pooled.high:,.2f})"
    return f"{pooled.value:,.2f}{ends}" + (f"\n{' / '.join(values)}" if len(values) > 1 else "")


def speed(grid: Grid) -> Table:
    """Table 3 beside the benchmark's lines; the paper's code was dense."""
    paper = paper_table(3)
    slow, first = (paper.value(metric=metric, model="meta") or 0.0 for metric in ("slowdown", "first_token_ms"))
    first /= paper.value(metric="first_token_ms", model="gpt2") or 1.0
    papers = {("decode", "dense, inserting", "gpt2"): slow, ("prefill", "dense", "gpt2"): first}
    shown = [
        line
        for line in sorted(compared(grid.inputs.speeds), key=lambda line: line.benchmark)
        if line.against in ("gpt2", "meta", "meta, inserting")
    ]
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
