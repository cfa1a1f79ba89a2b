"""Tables of what was measured inside the models: sharpness, caching, rate and distortion; a column for each model."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import fmean

from metatokens.records import QUANTILES
from metatokens.report.decisive import CLOSE, FAR, INSIDE, inside
from metatokens.report.derive import RATES
from metatokens.report.frame import MODELS, Cell, Fields, Inputs
from metatokens.report.tables.table import Table, span
from metatokens.report.text import NOT_RUN, NOT_YET, count, nats, percent

PLACES = {"meta": ("meta", ""), "no position": ("meta", "no_pos"), "text before it": ("text", "")}
MODULES = {"attention": "", "second_attention": "second "}
# Of each analysis, figures that every model has, of one value a prompt.
_OF_EVERY: Mapping[str, Fields] = {
    "sharpness": {"metric": "output_entropy_change", "marker": "final"},
    "residual": {"metric": "attention_weight", "module": "attention", "keys": "itself"},
}
_DEPENDENT = "heads and seeds read the same prompts and are taken as wholly dependent (half-widths averaged)"


def sharpness(inputs: Inputs) -> Table:
    """Figure 2, left and middle: what the meta-tokens' embeddings change; a column for each model."""
    models = _models(inputs, "sharpness")
    rows = []

    def row(label: str, metric: str, form: Callable[[float | None], str] = nats, **where: object) -> None:
        cells = inputs.cells([{**about, "metric": metric, **where} for about in models.values()])
        rows.append((label, *(_figure(cell, form, absent=NOT_RUN) for cell in cells)))

    for module, which in MODULES.items():
        row(f"{which}attention logit at a meta-token", "attention_logit_change", module=module, layer=None)
        row(f"{which}attention log-odds at it", "attention_log_odds_change", module=module, layer=None)
        row(f"{which}attention entropy of rows that see one", "attention_entropy_change", module=module, layer=None)
    for (metric, label), (marker, place) in product(
        {"output_top_logit_change": "top output logit", "output_entropy_change": "output entropy"}.items(),
        {"context": "within the prompt", "final": "at the end"}.items(),
    ):
        row(f"{label} {place}", metric, marker=marker)
    row("the answer's logit at the end", "output_answer_logit_change", marker="final")
    for module, which in MODULES.items():
        rows_of = {"module": module, "layer": None, "form": percent}
        row(f"{which}attention, premise: rows with \u03b1 > exp(\u2212H), %", "premise_holds", **rows_of)
        for premise, boosted in product((True, False), repeat=2):
            label = f"premise {'held' if premise else 'missing'}, key {'boosted' if boosted else 'not'}"
            what = f"{which}attention, entropy fell; {label}, %"
            row(what, "entropy_fell", **rows_of, premise=premise, boosted=boosted)
    note = (
        f"{_counts(inputs, 'sharpness')} All keys of meta's second attention are meta-tokens, so that the premise always "
        "holds there (the largest weight is never below exp(\u2212H)), and its log-odds change by nothing on average. "
        "twin's is over all positions. Log-odds: the key's logit less the log-sum-exp of the others'. Key boosted: "
        "with the embeddings the log-odds of the meta-token of the row's largest weight are higher."
    )
    title = "What the meta-tokens' embeddings change, nats; shares of rows, %"
    return Table(title, ("change", *models), tuple(rows), note=note)


def premise(inputs: Inputs) -> Table:
    """Where Theorem 4.1's premise holds, head by head; a column for each model and attention."""
    measured = {"metric": "premise_holds"}
    models = {
        f"{label}\n{which}attention": {**about, **measured, "module": module}
        for (label, about), (module, which) in product(_models(inputs, "sharpness").items(), MODULES.items())
        if len(inputs.select(**measured, **about, module=module))
    }
    heads = sorted(product(inputs.values("layer", **measured), inputs.values("head", **measured)))
    rows = []
    for layer, head in heads:
        cells = inputs.cells([about | {"layer": layer, "head": head} for about in models.values()])
        rows.append((f"layer {layer}, head {head}", *(_figure(cell, percent) for cell in cells)))
    title = "Rows with \u03b1 > exp(\u2212H) at the meta-token of the largest weight, %"
    return Table(title, ("head", *models), tuple(rows), note=_counts(inputs, "sharpness"))


def output_changes(inputs: Inputs) -> Table:
    """How the changes of output logits and of entropy are spread over prompts, a row for each seed."""
    metrics = {
        "top logit": "output_top_logit_change",
        "answer's logit": "output_answer_logit_change",
        "entropy": "output_entropy_change",
    }
    rows = []
    for (label, about), (what, metric), marker in product(
        _models(inputs, "sharpness").items(), metrics.items(), ("context", "final")
    ):
        place = "within" if marker == "context" else "at the end"
        for one in inputs.select(metric=metric, **about, marker=marker).sort_values("seed").itertuples():
            spread = (nats(value, 2) for value in one.quantiles)
            rows.append((f"{label.partition(chr(10))[0]}, {what} {place}, seed {one.seed:g}", *spread, count(one.n)))
    header = ("model, change", *(f"{share:.0%}" for share in QUANTILES), "n (meta-tokens)")
    return Table("Quantiles of the changes of output logits and entropy, nats", header, tuple(rows))


def caching(inputs: Inputs) -> Table:
    """Figure 2, right: cosine with the text tokens before, of meta-token and text control, after the last block."""
    models = _models(inputs, "residual")
    cosine = {"metric": "similarity_centred", "marker": "context"}
    rows = []
    for distance, subject in product((*CLOSE, 8, FAR, 32), ("meta", "text")):
        settings = [
            {**about, **cosine, "subject": subject, "distance": distance, "layer": max(layers, default=0)}
            for about in models.values()
            for layers in [inputs.values("layer", **cosine, **about, subject=subject, distance=distance)]
        ]
        what = f"{distance} before, {'meta-token' if subject == 'meta' else 'text control'}"
        rows.append((what, *map(_figure, inputs.cells(settings))))
    note = "Centred: the states less the mean of the prompt's text tokens. " + _counts(inputs, "residual")
    return Table("Cosine with the tokens before, after the last block", ("distance", *models), tuple(rows), note=note)


def attention_of_final(inputs: Inputs) -> Table:
    """Figure 3, left: what the final meta-token attends to, all layers and heads together, and even attention."""
    models = _models(inputs, "residual")
    classes = ("earlier_meta", "before_meta", "after_meta", "itself", "near", "first", "other")
    rows = []
    for (module, which), keys in product(MODULES.items(), classes):
        weights, even = (
            inputs.cells([{**about, "metric": metric, "module": module, "keys": keys} for about in models.values()])
            for metric in ("attention_weight", "attention_weight_if_uniform")
        )
        figures = [
            _figure(weight, percent, absent="") + (f"\nevenly {percent(pooled.value)}" if weight else "")
            for weight, uniform in zip(weights, even, strict=True)
            for pooled in [uniform.pooled() if uniform else None]
            if not weight or pooled
        ]
        if any(figures):
            rows.append((f"{which}attention: {keys.replace('_', ' ')}", *figures))
    title = "What the final meta-token attends to, % of its weight"
    note = (
        "Before and after meta: the text tokens beside an earlier meta-token. Near: the last 8 text tokens. First: the "
        f"first token. Each key is of the first class that fits it. {_counts(inputs, 'residual')}"
    )
    return Table(title, ("keys", *models), tuple(rows), note=note)


def rate_distortion(inputs: Inputs) -> Table:
    """Figure 3, right: distortion at some rates, on prompts held out, and the paper's way below."""
    rows = []
    for split, (what, (subject, intervention)), model in product(
        ("held_out", "fit"), PLACES.items(), ("gpt2", "twin", "meta")
    ):
        about = {"model": model, "position_embedding": "rope", "split": split}
        at_rate = about | {"metric": "distortion_at_rate", "subject": subject, "intervention": intervention}
        cells = inputs.cells([at_rate | {"rate": rate} for rate in RATES], by=("seed", "fit_seed"))
        if any(cells):
            where = "held out" if split == "held_out" else "as the paper, on the 50 fitted"
            ns = " / ".join(map(count, inputs.values("n", metric="distortion", model=model, split=split)))
            place = "last meta-token" if what == "meta" else what
            rows.append((f"{where}: {model}, {place}", *(_of_fits(cell) for cell in cells if cell), ns))
    header = ("scored, model, place", *(f"{rate:g} nats" for rate in RATES), "n (prompts)")
    note = (
        "The mean over seeds of the models, each the mean of its fits; below it the range over seeds and fits, and "
        "each seed's mean. At rate 0 the distortion is the entropy of the answers: nothing is told of them"
        f"{_entropies(inputs)}. A distortion above it is the head's misfit, and so is that part of a difference. No "
        "position: at the meta-tokens, as in section 5.2."
    )
    return Table("Distortion (nats) at a rate", header, tuple(rows), note=note)


def _entropies(inputs: Inputs) -> str:
    """The entropy of the answers of either split."""
    names = {"held_out": "held out", "fit": "of the 50 fitted"}
    cells = inputs.cells([{"metric": "answer_entropy", "split": split} for split in names])
    told = [f"{nats(one.value)} {text}" for text, cell in zip(names.values(), cells) if cell and (one := cell.pooled())]
    return f" ({', '.join(told)})" if told else ""


def _of_fits(cell: Cell) -> str:
    """The mean of distortions by (seed, fit), their range, and each seed's mean where there are several."""
    values = {key: one.value or 0.0 for key, one in cell.seeds.items()}
    seeds = sorted({seed for seed, _ in values})
    means = [fmean(value for (own, _), value in values.items() if own == seed) for seed in seeds]
    lines = [f"{fmean(means):.3f}", f"{min(values.values()):.3f} to {max(values.values()):.3f}"]
    if len(seeds) > 1:
        lines.append("seeds " + " / ".join(f"{one:.3f}" for one in means))
    return "\n".join(lines)


def _models(inputs: Inputs, analysis: str) -> Mapping[str, Fields]:
    """The models that an analysis was made of, with the fields that select them."""
    columns = ["model", *INSIDE]
    found = inputs.select(**_OF_EVERY[analysis])[columns].drop_duplicates().to_dict("records")
    found.sort(key=lambda one: (MODELS.index(one["model"]), one["position_embedding"]))
    models = {}
    for one in found:
        about = one | {end: int(one[end]) for end in ("train_length", "length")}
        position, _, rest = inside("", about).partition(", ")
        models[f"{about['model']}, {position}\n{rest}"] = about
    return models


def _counts(inputs: Inputs, analysis: str) -> str:
    """Which seeds there are, on how many prompts, and what the intervals are of."""
    where = _OF_EVERY[analysis]
    ns = inputs.values("n", **where)
    if not ns:
        return ""
    by_model = {model: inputs.values("seed", **where, model=model) for model in MODELS}
    seeds = "; ".join(f"{model} {', '.join(map(str, own))}" for model, own in by_model.items() if own)
    prompts = span(map(count, sorted({ns[0], ns[-1]})))
    return f"In brackets: 95\u00a0% intervals over prompts (n = {prompts} a seed); {_DEPENDENT}. Seeds: {seeds}."


def _figure(cell: Cell | None, form: Callable[[float | None], str] = nats, absent: str = NOT_YET) -> str:
    """The mean and its interval, and each seed's own mean where there are several."""
    pooled = cell.pooled() if cell else None
    if cell is None or pooled is None:
        return absent
    interval = "" if pooled.low is None or pooled.high is None else f" ({form(pooled.low)} to {form(pooled.high)})"
    several: Sequence[str] = [form(one.value) for one in cell.seeds.values()] if len(cell.seeds) > 1 else ()
    return form(pooled.value) + interval + ("\nseeds " + " / ".join(several) if several else "")
