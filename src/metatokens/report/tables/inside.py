"""Tables of what was measured inside the models: sharpness, caching, rate and distortion; a column for each model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from statistics import fmean

from metatokens.records import QUANTILES
from metatokens.report.derive import RATES
from metatokens.report.frame import MODELS, Cell, Fields, Inputs
from metatokens.report.tables.table import Row, Table, span
from metatokens.report.text import NOT_RUN, NOT_YET, count, name, nats, percent
from metatokens.report.words import table_words

DISTANCES = (1, 2, 3, 4, 8, 16, 32)  # tokens before a meta-token
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
        rows_of: Fields = {"module": module, "layer": None, "form": percent}
        row(f"{which}attention, premise: rows with \u03b1 > exp(\u2212H), %", "premise_holds", **rows_of)
        for premise, boosted in product((True, False), repeat=2):
            label = f"premise {'held' if premise else 'missing'}, key {'boosted' if boosted else 'not'}"
            what = f"{which}attention, entropy fell; {label}, %"
            row(what, "entropy_fell", **rows_of, premise=premise, boosted=boosted)
    return _table("sharpness", models, rows, counts=_counts(inputs, "sharpness"))


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
    return _table("premise", models, rows, counts=_counts(inputs, "sharpness"))


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
    header = [*(f"{share:.0%}" for share in QUANTILES), "n (meta-tokens)"]
    return _table("output-changes", header, rows)


def caching(inputs: Inputs) -> Table:
    """Figure 2, right: cosine with the text tokens before, of meta-token and text control, after the last block."""
    models = _models(inputs, "residual")
    cosine = {"metric": "similarity_centred", "marker": "context"}
    rows = []
    for distance, subject in product(DISTANCES, ("meta", "text")):
        settings = [
            {**about, **cosine, "subject": subject, "distance": distance, "layer": max(layers, default=0)}
            for about in models.values()
            for layers in [inputs.values("layer", **cosine, **about, subject=subject, distance=distance)]
        ]
        what = f"{distance} before, {'meta-token' if subject == 'meta' else 'text control'}"
        rows.append((what, *map(_figure, inputs.cells(settings))))
    return _table("caching", models, rows, counts=_counts(inputs, "residual"))


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
            f"{_figure(weight, percent)}\nevenly {percent(uniform.value)}" if weight and uniform else ""
            for weight, uniform in zip(weights, even, strict=True)
        ]
        if any(figures):
            rows.append((f"{which}attention: {keys.replace('_', ' ')}", *figures))
    return _table("attention-of-final", models, rows, counts=_counts(inputs, "residual"))


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
    header = [*(f"{rate:g} nats" for rate in RATES), "n (prompts)"]
    return _table("rate-distortion", header, rows, entropies=_entropies(inputs))


def _table(key: str, header: Iterable[str], rows: Sequence[Row], **values: str) -> Table:
    words = table_words(key).of(**values)
    return Table(words.title, (words.corner, *header), tuple(rows), note=words.text)


def _entropies(inputs: Inputs) -> str:
    """The entropy of the answers of either split."""
    names = {"held_out": "held out", "fit": "of the 50 fitted"}
    cells = inputs.cells([{"metric": "answer_entropy", "split": split} for split in names])
    told = [f"{nats(cell.value)} {text}" for text, cell in zip(names.values(), cells, strict=True) if cell]
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
    columns = ["model", "position_embedding", "task", "train_length", "length"]
    found = inputs.select(**_OF_EVERY[analysis])[columns].drop_duplicates().to_dict("records")
    found.sort(key=lambda one: (MODELS.index(one["model"]), one["position_embedding"]))
    return {
        f"{one['model']}, {one['position_embedding']}\n{name(one['task']).lower()}, {one['train_length']:g} \u2192 "
        f"{one['length']:g}": one
        for one in found
    }


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
