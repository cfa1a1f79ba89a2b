"""Tables of what is no accuracy: learning, perplexity, speed, and what was measured inside the models."""

from collections.abc import Iterable, Mapping
from itertools import product
from statistics import fmean
from typing import Any

from metatokens.report.cost_claims import TEXTS, tokens_to_learn
from metatokens.report.estimates import Estimate
from metatokens.report.grid import Grid
from metatokens.report.inner_claims import CLOSE, FAR, RATES, curves, distortion_at, mean, setting
from metatokens.report.paper import paper_table
from metatokens.report.tables import Row, Table
from metatokens.report.verdicts import Claim
from metatokens.report.wording import MINUS, NOT_YET, compact, percent

MODELS = ("gpt2", "pause", "twin", "meta", "gpt-neo")
CURVES = {"meta": ("meta", None), "no position": ("meta", "no_pos"), "text before it": ("text", None)}


def evidence(claims: Iterable[Claim]) -> list[Table]:
    """The comparisons behind each claim."""
    sides = {1: "for", -1: "against", 0: "open"}
    tables = []
    for claim in claims:
        rows = tuple(
            (
                one.label,
                one.figures,
                claim.interval(one.gap),
                " / ".join(claim.amount(gap).split()[0] for gap in one.by_seed),
                NOT_YET if one.gap is None else sides[one.side(claim.margin)] if one.is_informative else "no room",
            )
            for one in claim.comparisons
        )
        header = ("comparison", "figures", "difference (95 % interval)", "by seed", "says")
        tables.append(Table(f"{claim.text}: {claim.verdict}", header, rows))
    return tables


def learning(grid: Grid) -> Table:
    """Text tokens until list recall stays at 90 % or more: a row for each model, seeds in order."""
    rows = []
    for (model, position), seeds in sorted(grid.recall().items(), key=lambda item: (item[0][1] != "rope", item[0])):
        reached = {seed: tokens_to_learn(points) for seed, points in seeds.items()}
        seen = max(points[-1].text_tokens for points in seeds.values())
        ns = {point.n for points in seeds.values() for point in points if point.n}
        each = " / ".join("not reached" if one is None else compact(one) for one in reached.values())
        rows.append((f"{model}, {position}", each, compact(seen), " / ".join(map(str, sorted(ns)))))
    header = ("model", "text tokens to 90 %, by seed", "text tokens in all", "n (prompts)")
    return Table("List recall, trained to 128 tokens", header, tuple(rows))


def perplexity(grid: Grid) -> Table:
    """A row for each model and recipe, a column for each text and placement of meta-tokens."""
    places = list(product(TEXTS, ("none", "uniform", "periodic")))
    notes = grid.values("note", metric="perplexity")
    rows = []
    for note, model, position in product(notes, MODELS, ("rope", "learned", "none")):
        about: dict[str, Any] = {"model": model, "position_embedding": position}
        cells = [grid.perplexity(note, **about, text=text, condition=placement) for text, placement in places]
        if any(cells):
            label = ", ".join(filter(None, [model, position if position != "none" else "no positions", note]))
            rows.append((label, *(_perplexity(cell.seeds.values()) if cell else "" for cell in cells)))
    header = [f"{TEXTS[text]}, {'alone' if place == 'none' else place}" for text, place in places]
    note = "Meta-tokens inserted or not, the same text tokens are scored; several figures are those of the seeds."
    return Table("Perplexity of text tokens", ("model", *header), tuple(rows), note=note)


def _perplexity(seeds: Iterable[Estimate]) -> str:
    values = [one.value for one in seeds if one.value is not None]
    mean_of = f"{fmean(values):,.2f}" if values else NOT_YET
    return mean_of if len(values) < 2 else f"{mean_of}\n{' / '.join(f'{value:,.2f}' for value in values)}"


def speed(grid: Grid) -> Table:
    """Table 3 beside the benchmark's lines."""
    paper = paper_table(3)
    slow, first = (paper.value(metric=metric, model="meta") or 0.0 for metric in ("slowdown", "first_token_ms"))
    first /= paper.value(metric="first_token_ms", model="gpt2") or 1.0
    papers = {("decode", "meta, inserting"): slow, ("decode", "dense, inserting"): slow, ("prefill", "dense"): first}
    papers |= {("prefill", "meta"): first}
    rows = []
    for line in grid.inputs.speeds:
        if line.benchmark in ("decode", "prefill") and line.against in ("gpt2", "meta", "meta, inserting"):
            theirs = papers.get((line.benchmark, line.model)) if line.against == "gpt2" else None
            ratio = f"{line.ratio:.3f} ({line.ratio_low:.3f} to {line.ratio_high:.3f})"
            rows.append(
                (
                    f"{'first token' if line.benchmark == 'prefill' else 'decoding'}, batch {line.batch}",
                    line.model if line.model == line.against else f"{line.model} / {line.against}",
                    f"{line.text_tokens / line.seconds:,.0f}",
                    "" if line.model == line.against else ratio,
                    "" if theirs is None else f"{theirs:.2f}",
                    "" if line.model == line.against else f"{line.limit:.3f}",
                )
            )
    about = {
        f"{line.device}, {line.threads} threads, {line.dtype}, size \u201c{line.shape}\u201d"
        for line in grid.inputs.speeds
    }
    header = ("what", "model / compared with", "text tokens a second", "times as long", "paper", "least possible")
    rates, waits = (
        [f"{paper.value(metric=metric, model=model)}" for model in ("gpt2", "meta")]
        for metric in ("tokens_per_second", "first_token_ms")
    )
    note = (
        f"Brackets: quartiles of the rounds. The paper: {' and '.join(rates)} tokens a second, {' and '.join(waits)} "
        f"ms to the first token, without and with meta-tokens, on an A100. Here: {'; '.join(sorted(about))}."
    )
    return Table("Inference with meta-tokens (Table 3)", header, tuple(rows), text_columns=2, note=note)


def sharpness(grid: Grid) -> Table:
    """Figure 2, left and middle: what the meta-tokens' embeddings change; a column for each model."""
    everywhere: dict[str, Any] = {"module": "attention", "layer": None}
    metrics: dict[str, tuple[str, dict[str, Any]]] = {
        "attention logit at a meta-token": ("attention_logit_change", everywhere),
        "attention log-odds at it": ("attention_log_odds_change", everywhere),
        "attention entropy of rows that see one": ("attention_entropy_change", everywhere),
        "top output logit within the prompt": ("output_top_logit_change", {"marker": "context"}),
        "top output logit at the end": ("output_top_logit_change", {"marker": "final"}),
        "the answer's logit at the end": ("output_answer_logit_change", {"marker": "final"}),
        "output entropy within the prompt": ("output_entropy_change", {"marker": "context"}),
        "output entropy at the end": ("output_entropy_change", {"marker": "final"}),
    }
    shares = {"premise: rows with \u03b1 > exp(\u2212H), %": ("premise_holds", everywhere)} | {
        f"entropy fell; premise {'held' if premise else 'missing'}, key {'boosted' if boosted else 'not'}, %": (
            "entropy_fell", everywhere | {"premise": premise, "boosted": boosted},
        )
        for premise, boosted in product((True, False), repeat=2)
    }  # fmt: skip
    models = _settings(grid, "sharpness")
    rows = []
    for label, (metric, where) in (metrics | shares).items():
        cells = [mean(grid.measured("sharpness", metric, **about, **where)) for about in models.values()]
        rows.append((label, *((_percents if label in shares else _nats)(cell) for cell in cells)))
    title = "What the meta-tokens' embeddings change, nats; shares of rows, %"
    return Table(title, ("change", *models), tuple(rows), note=_counts(grid, "sharpness"))


def caching(grid: Grid) -> Table:
    """Figure 2, right: cosine with the text tokens before, of meta-token and text control, after the last block."""
    models = _settings(grid, "residual")
    rows = []
    for distance, subject in product((*CLOSE, 8, FAR, 32), ("meta", "text")):
        cells = []
        for about in models.values():
            ones = grid.measured(
                "residual", "similarity_centred", **about, marker="context", subject=subject, distance=distance
            )
            last = max((one.layer or 0 for one in ones), default=0)
            cells.append(_nats(mean([one for one in ones if one.layer == last])))
        rows.append((f"{distance} before, {'meta-token' if subject == 'meta' else 'text control'}", *cells))
    note = "Centred: the states less the mean of the prompt's text tokens. " + _counts(grid, "residual")
    return Table("Cosine with the tokens before, after the last block", ("distance", *models), tuple(rows), note=note)


def attention_of_final(grid: Grid) -> Table:
    """Figure 3, left: what the final meta-token attends to, all layers and heads together, and even attention."""
    models = _settings(grid, "residual")
    classes = ("earlier_meta", "before_meta", "after_meta", "itself", "near", "first", "other")
    rows = []
    for module, keys in product(("attention", "second_attention"), classes):
        where: dict[str, Any] = {"module": module, "keys": keys}
        cells = []
        for about in models.values():
            weight = mean(grid.measured("residual", "attention_weight", **about, **where))
            even = mean(grid.measured("residual", "attention_weight_if_uniform", **about, **where))
            evenly = f"\nevenly {percent(even.value)}" if even else ""
            cells.append(f"{percent(weight.value)}{evenly}" if weight else "")
        if any(cells):
            rows.append(
                (f"{'attention' if module == 'attention' else 'second attention'}: {keys.replace('_', ' ')}", *cells)
            )
    return Table("What the final meta-token attends to, % of its weight", ("keys", *models), tuple(rows))


def rate_distortion(grid: Grid) -> Table:
    """Figure 3, right: held-out distortion at some rates; the paper's own way in a second table's place below."""
    rows: list[Row] = []
    for split, (what, (subject, intervention)), model in product(
        ("held_out", "fit"), CURVES.items(), ("gpt2", "twin", "meta")
    ):
        found = curves(grid, model, subject, intervention, split)
        if found:
            where = "held out" if split == "held_out" else "as the paper, on the 50 fitted"
            cells = ([distortion_at(curve, rate) for curve in found.values()] for rate in RATES)
            rows.append(
                (
                    f"{where}: {model}, {'last meta-token' if what == 'meta' else what}",
                    *(f"{fmean(cell):.3f}\n{min(cell):.3f} to {max(cell):.3f}" for cell in cells),
                )
            )
    header = ("scored, model, place", *(f"{rate:g} nats" for rate in RATES))
    note = (
        "Second line: the range over seeds of the models and of the fits. No position: at the meta-tokens, as in "
        "section 5.2."
    )
    return Table("Distortion (nats) at a rate", header, tuple(rows), note=note)


def _settings(grid: Grid, analysis: str) -> Mapping[str, dict[str, Any]]:
    """The models that an analysis was made of, with the fields that select them."""
    metric = {"sharpness": "premise_holds", "residual": "similarity_centred"}[analysis]
    found: dict[str, dict[str, Any]] = {}
    for one in sorted(
        grid.measured(analysis, metric), key=lambda one: (MODELS.index(one.model), one.position_embedding)
    ):
        position, _, rest = setting(one).partition(", ")
        found[f"{one.model}, {position}\n{rest}"] = {
            name: getattr(one, name) for name in ("model", "position_embedding", "task", "train_length", "length")
        }
    return found


def _counts(grid: Grid, analysis: str) -> str:
    metric = {"sharpness": "premise_holds", "residual": "similarity_centred"}[analysis]
    seeds = {one.seed for one in grid.measured(analysis, metric)}
    return (
        f"In brackets: 95\u00a0% intervals over prompts; seeds {', '.join(map(str, sorted(seeds)))}." if seeds else ""
    )


def _nats(cell: Estimate | None) -> str:
    if cell is None or cell.value is None:
        return NOT_YET
    if cell.low is None or cell.high is None:
        return f"{cell.value:.3f}".replace("-", MINUS)
    return f"{cell.value:.3f} ({cell.low:.3f} to {cell.high:.3f})".replace("-", MINUS)


def _percents(cell: Estimate | None) -> str:
    if cell is None or cell.value is None:
        return NOT_YET
    ends = "" if cell.low is None or cell.high is None else f" ({percent(cell.low)} to {percent(cell.high)})"
    return percent(cell.value) + ends
