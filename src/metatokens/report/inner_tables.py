"""Tables of what was measured inside the models: sharpness, caching, rate and distortion."""

from collections.abc import Iterable, Mapping
from itertools import product
from statistics import fmean
from typing import Any

from metatokens.records import QUANTILES, Measurement
from metatokens.report.estimates import MODELS, mean
from metatokens.report.grid import Grid
from metatokens.report.inner_claims import CLOSE, FAR, RATES, by_seed, curves, distortion_at, setting
from metatokens.report.tables import Row, Table
from metatokens.report.wording import EN_DASH, MINUS, NOT_RUN, NOT_YET, count, percent

PLACES = {"meta": ("meta", None), "no position": ("meta", "no_pos"), "text before it": ("text", None)}
MODULES = {"attention": "", "second_attention": "second "}
# Of each analysis, lines that every model has, of one value a prompt.
_OF_EVERY = {
    "sharpness": ("output_entropy_change", {"marker": "final"}),
    "residual": ("attention_weight", {"module": "attention", "keys": "itself"}),
}
_DEPENDENT = "heads and seeds read the same prompts and are taken as wholly dependent (half-widths averaged)"


def sharpness(grid: Grid) -> Table:
    """Figure 2, left and middle: what the meta-tokens' embeddings change; a column for each model."""
    models = _settings(grid, "sharpness")
    rows = []

    def row(label: str, metric: str, in_percent: bool = False, **where: Any) -> None:
        cells = (grid.measured("sharpness", metric, **about, **where) for about in models.values())
        rows.append((label, *(_figure(ones, in_percent, absent=NOT_RUN) for ones in cells)))

    for module, which in MODULES.items():
        everywhere: dict[str, Any] = {"module": module, "layer": None}
        row(f"{which}attention logit at a meta-token", "attention_logit_change", **everywhere)
        row(f"{which}attention log-odds at it", "attention_log_odds_change", **everywhere)
        row(f"{which}attention entropy of rows that see one", "attention_entropy_change", **everywhere)
    for (metric, label), (marker, place) in product(
        {"output_top_logit_change": "top output logit", "output_entropy_change": "output entropy"}.items(),
        {"context": "within the prompt", "final": "at the end"}.items(),
    ):
        row(f"{label} {place}", metric, marker=marker)
    row("the answer's logit at the end", "output_answer_logit_change", marker="final")
    for module, which in MODULES.items():
        everywhere = {"module": module, "layer": None}
        row(f"{which}attention, premise: rows with \u03b1 > exp(\u2212H), %", "premise_holds", True, **everywhere)
        for premise, boosted in product((True, False), repeat=2):
            label = f"premise {'held' if premise else 'missing'}, key {'boosted' if boosted else 'not'}"
            where = everywhere | {"premise": premise, "boosted": boosted}
            row(f"{which}attention, entropy fell; {label}, %", "entropy_fell", True, **where)
    note = (
        f"{_counts(grid, 'sharpness')} All keys of meta's second attention are meta-tokens, so that the premise always "
        "holds there (the largest weight is never below exp(\u2212H)), and its log-odds change by nothing on average. "
        "twin's is over all positions. Log-odds: the key's logit less the log-sum-exp of the others'. Key boosted: "
        "with the embeddings the log-odds of the meta-token of the row's largest weight are higher."
    )
    title = "What the meta-tokens' embeddings change, nats; shares of rows, %"
    return Table(title, ("change", *models), tuple(rows), note=note)


def premise(grid: Grid) -> Table:
    """Where Theorem 4.1's premise holds, head by head; a column for each model and attention."""
    models = {
        f"{label}\n{which}attention": about | {"module": module}
        for (label, about), (module, which) in product(_settings(grid, "sharpness").items(), MODULES.items())
        if grid.measured("sharpness", "premise_holds", **about, module=module)
    }
    ones = grid.measured("sharpness", "premise_holds")
    heads = sorted({(one.layer, one.head) for one in ones if one.layer is not None and one.head is not None})
    rows = tuple(
        (
            f"layer {layer}, head {head}",
            *(
                _figure(grid.measured("sharpness", "premise_holds", **about, layer=layer, head=head), True)
                for about in models.values()
            ),
        )
        for layer, head in heads
    )
    title = "Rows with \u03b1 > exp(\u2212H) at the meta-token of the largest weight, %"
    return Table(title, ("head", *models), rows, note=_counts(grid, "sharpness"))


def output_changes(grid: Grid) -> Table:
    """How the changes of output logits and entropy are spread over prompts, a row for each seed."""

    metrics = {
        "top logit": "output_top_logit_change",
        "answer's logit": "output_answer_logit_change",
        "entropy": "output_entropy_change",
    }
    rows = []
    for (label, about), (what, metric), marker in product(
        _settings(grid, "sharpness").items(), metrics.items(), ("context", "final")
    ):
        place = "within" if marker == "context" else "at the end"
        for one in sorted(grid.measured("sharpness", metric, **about, marker=marker), key=lambda one: one.seed):
            if one.quantiles:
                spread = (f"{value:z.2f}".replace("-", MINUS) for value in one.quantiles)
                rows.append((f"{label.partition(chr(10))[0]}, {what} {place}, seed {one.seed}", *spread, count(one.n)))
    header = ("model, change", *(f"{share:.0%}" for share in QUANTILES), "n (meta-tokens)")
    return Table("Quantiles of the changes of output logits and entropy, nats", header, tuple(rows))


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
            cells.append(_figure(one for one in ones if one.layer == last))
        rows.append((f"{distance} before, {'meta-token' if subject == 'meta' else 'text control'}", *cells))
    note = "Centred: the states less the mean of the prompt's text tokens. " + _counts(grid, "residual")
    return Table("Cosine with the tokens before, after the last block", ("distance", *models), tuple(rows), note=note)


def attention_of_final(grid: Grid) -> Table:
    """Figure 3, left: what the final meta-token attends to, all layers and heads together, and even attention."""
    models = _settings(grid, "residual")
    classes = ("earlier_meta", "before_meta", "after_meta", "itself", "near", "first", "other")
    rows = []
    for (module, which), keys in product(MODULES.items(), classes):
        where: dict[str, Any] = {"module": module, "keys": keys}
        cells = []
        for about in models.values():
            ones = grid.measured("residual", "attention_weight", **about, **where)
            even = mean(grid.measured("residual", "attention_weight_if_uniform", **about, **where))
            cells.append(_figure(ones, True, absent="") + (f"\nevenly {percent(even.value)}" if ones and even else ""))
        if any(cells):
            rows.append((f"{which}attention: {keys.replace('_', ' ')}", *cells))
    title = "What the final meta-token attends to, % of its weight"
    note = (
        "Before and after meta: the text tokens beside an earlier meta-token. Near: the last 8 text tokens. First: the "
        f"first token. Each key is of the first class that fits it. {_counts(grid, 'residual')}"
    )
    return Table(title, ("keys", *models), tuple(rows), note=note)


def rate_distortion(grid: Grid) -> Table:
    """Figure 3, right: distortion at some rates, on prompts held out, and the paper's way below."""
    rows: list[Row] = []
    for split, (what, (subject, intervention)), model in product(
        ("held_out", "fit"), PLACES.items(), ("gpt2", "twin", "meta")
    ):
        found = curves(grid, model, subject, intervention, split)
        if found:
            where = "held out" if split == "held_out" else "as the paper, on the 50 fitted"
            cells = ({key: distortion_at(curve, rate) for key, curve in found.items()} for rate in RATES)
            ones = grid.measured("rate_distortion", "distortion", model=model, split=split)
            ns = " / ".join(map(count, sorted({one.n for one in ones})))
            place = "last meta-token" if what == "meta" else what
            rows.append((f"{where}: {model}, {place}", *map(_of_fits, cells), ns))
    header = ("scored, model, place", *(f"{rate:g} nats" for rate in RATES), "n (prompts)")
    note = (
        "The mean over seeds of the models, each the mean of its fits; below it the range over seeds and fits, and "
        "each seed's mean. At rate 0 the distortion is the entropy of the answers: nothing is told of them"
        f"{_entropies(grid)}. A distortion above it is the head's misfit, and so is that part of a difference. No "
        "position: at the meta-tokens, as in section 5.2."
    )
    return Table("Distortion (nats) at a rate", header, tuple(rows), note=note)


def _entropies(grid: Grid) -> str:
    """The entropy of the answers of either split."""
    names = {"held_out": "held out", "fit": "of the 50 fitted"}
    found = {
        text: mean(grid.measured("rate_distortion", "answer_entropy", split=split)) for split, text in names.items()
    }
    told = [f"{_nats(one.value)} {text}" for text, one in found.items() if one]
    return f" ({', '.join(told)})" if told else ""


def _of_fits(values: Mapping[tuple[int, int | None], float]) -> str:
    """The mean of distortions by (seed, fit), their range, and each seed's mean where there are several."""
    seeds = sorted({seed for seed, _ in values})
    means = [fmean(value for (own, _), value in values.items() if own == seed) for seed in seeds]
    lines = [f"{fmean(means):.3f}", f"{min(values.values()):.3f} to {max(values.values()):.3f}"]
    if len(seeds) > 1:
        lines.append("seeds " + " / ".join(f"{one:.3f}" for one in means))
    return "\n".join(lines)


def _settings(grid: Grid, analysis: str) -> Mapping[str, dict[str, Any]]:
    """The models that an analysis was made of, with the fields that select them."""
    found: dict[str, dict[str, Any]] = {}
    for one in sorted(_of_every(grid, analysis), key=lambda one: (MODELS.index(one.model), one.position_embedding)):
        position, _, rest = setting(one).partition(", ")
        found[f"{one.model}, {position}\n{rest}"] = {
            name: getattr(one, name) for name in ("model", "position_embedding", "task", "train_length", "length")
        }
    return found


def _of_every(grid: Grid, analysis: str) -> "list[Measurement]":
    metric, where = _OF_EVERY[analysis]
    return grid.measured(analysis, metric, **where)


def _counts(grid: Grid, analysis: str) -> str:
    """Which seeds there are, on how many prompts, and what the intervals are of."""
    ones = _of_every(grid, analysis)
    if not ones:
        return ""
    models: dict[str, set[int]] = {}
    for one in ones:
        models.setdefault(one.model, set()).add(one.seed)
    seeds = "; ".join(f"{model} {', '.join(map(str, sorted(models[model])))}" for model in MODELS if model in models)
    prompts = EN_DASH.join(map(count, sorted({min(one.n for one in ones), max(one.n for one in ones)})))
    return f"In brackets: 95\u00a0% intervals over prompts (n = {prompts} a seed); {_DEPENDENT}. Seeds: {seeds}."


def _figure(ones: "Iterable[Measurement]", in_percent: bool = False, absent: str = NOT_YET) -> str:
    """The mean and its interval, and each seed's own mean where there are several."""
    ones = list(ones)
    cell, seeds = mean(ones), by_seed(ones)
    if cell is None or cell.value is None:
        return absent
    form = percent if in_percent else _nats
    interval = "" if cell.low is None or cell.high is None else f" ({form(cell.low)} to {form(cell.high)})"
    own = "\nseeds " + " / ".join(form(one.value) for one in seeds.values()) if len(seeds) > 1 else ""
    return form(cell.value) + interval + own


def _nats(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:z.3f}".replace("-", MINUS)
