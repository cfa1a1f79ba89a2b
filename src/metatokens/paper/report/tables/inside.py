"""Tables of what was measured inside the models: sharpness, caching, rate and distortion; a column for each model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from statistics import fmean

from metatokens.paper.report.derive import RATES
from metatokens.paper.report.frame import MODELS, Cell, Fields, Inputs
from metatokens.paper.report.labels import in_order
from metatokens.paper.report.tables.table import Table, span, worded
from metatokens.paper.report.text import NOT_RUN, count, name, nats, percent, with_interval
from metatokens.paper.report.words import table_words
from metatokens.records import QUANTILES

DISTANCES = (1, 2, 3, 4, 8, 16, 32)  # tokens before a meta-token
PLACES = {"last meta-token": ("meta", ""), "no position": ("meta", "no_pos"), "text before it": ("text", "")}
MODULES = {"attention": "attention", "second_attention": "second attention"}
# Of each analysis, figures that every model has, of one value a prompt.
_SHARPNESS: Fields = {"metric": "output_entropy_change", "marker": "final"}
_RESIDUAL: Fields = {"metric": "attention_weight", "module": "attention", "keys": "itself"}
_DEPENDENT = "heads and seeds read the same prompts and are taken as wholly dependent (half-widths averaged)"

Form = Callable[[float | None], str]


def sharpness(inputs: Inputs) -> Table:
    """Figure 2, left and middle: what the meta-tokens' embeddings change."""
    rows: list[tuple[str, Form, Fields]] = []
    seen = {"logit": "logit at a meta-token", "log_odds": "log-odds at it", "entropy": "entropy of rows that see one"}
    for (module, which), (change, what) in product(MODULES.items(), seen.items()):
        rows.append(
            (f"{which} {what}", nats, {"metric": f"attention_{change}_change", "module": module, "layer": None})
        )
    output = {"top_logit": "top output logit", "entropy": "output entropy"}
    for (change, what), marker in product(output.items(), ("context", "final")):
        place = "within the prompt" if marker == "context" else "at the end"
        rows.append((f"{what} {place}", nats, {"metric": f"output_{change}_change", "marker": marker}))
    rows.append(("the answer's logit at the end", nats, {"metric": "output_answer_logit_change", "marker": "final"}))
    for module, which in MODULES.items():
        fields = {"module": module, "layer": None}
        label = f"{which}, premise: rows with \u03b1 > exp(\u2212H), %"
        rows.append((label, percent, fields | {"metric": "premise_holds"}))
        for premise, boosted in product((True, False), repeat=2):
            label = f"premise {'held' if premise else 'missing'}, key {'boosted' if boosted else 'not'}"
            fell = {"metric": "entropy_fell", "premise": premise, "boosted": boosted}
            rows.append((f"{which}, entropy fell; {label}, %", percent, fields | fell))
    return _by_model(inputs, "sharpness", _models(inputs, _SHARPNESS), rows, _SHARPNESS)


def premise(inputs: Inputs) -> Table:
    """Where Theorem 4.1's premise holds, head by head; a column for each model and attention."""
    measured = {"metric": "premise_holds"}
    models = {
        f"{label}\n{which}": {**about, **measured, "module": module}
        for (label, about), (module, which) in product(_models(inputs, _SHARPNESS).items(), MODULES.items())
        if len(inputs.select(**measured, **about, module=module))
    }
    heads = product(inputs.values("layer", **measured), inputs.values("head", **measured))
    rows = [(f"layer {layer}, head {head}", percent, {"layer": layer, "head": head}) for layer, head in heads]
    return _by_model(inputs, "premise", models, rows, _SHARPNESS)


def output_changes(inputs: Inputs) -> Table:
    """How the changes of output logits and of entropy are spread over prompts, a row for each seed."""
    changes = {"top logit": "top_logit", "answer's logit": "answer_logit", "entropy": "entropy"}
    places = {"within": "context", "at the end": "final"}
    rows = []
    for (label, about), what, place in product(_models(inputs, _SHARPNESS).items(), changes, places):
        model = label.partition("\n")[0]
        found = inputs.select(**about, metric=f"output_{changes[what]}_change", marker=places[place])
        for one in found.sort_values("seed").itertuples():
            spread = (nats(value, 2) for value in one.quantiles)
            rows.append((f"{model}, {what} {place}, seed {one.seed:g}", *spread, count(one.n)))
    header = [*(f"{share:.0%}" for share in QUANTILES), "n (meta-tokens)"]
    return worded(table_words("output-changes").of(), header, rows)


def caching(inputs: Inputs) -> Table:
    """Figure 2, right: cosine with the text tokens before, of meta-token and text control, after the last block."""
    cosine = {"metric": "similarity_centred", "marker": "context"}
    models = {
        label: about | cosine | {"layer": max(inputs.values("layer", **about, **cosine), default=0)}
        for label, about in _models(inputs, _RESIDUAL).items()
    }
    rows = [
        (f"{distance} before, {what}", nats, {"distance": distance, "subject": subject})
        for distance, (subject, what) in product(DISTANCES, {"meta": "meta-token", "text": "text control"}.items())
    ]
    return _by_model(inputs, "caching", models, rows, _RESIDUAL)


def attention_of_final(inputs: Inputs) -> Table:
    """Figure 3, left: what the final meta-token attends to, all layers and heads together, and even attention."""
    models = _models(inputs, _RESIDUAL)
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
            rows.append((f"{which}: {keys.replace('_', ' ')}", *figures))
    return worded(table_words("attention-of-final").of(counts=_counts(inputs, _RESIDUAL)), models, rows)


def rate_distortion(inputs: Inputs) -> Table:
    """Figure 3, right: distortion at some rates, on prompts held out, and the paper's way below."""
    splits = {"held_out": "held out", "fit": "as the paper, on the 50 fitted"}
    rows = []
    for split, place, model in product(splits, PLACES, ("gpt2", "twin", "meta")):
        subject, intervention = PLACES[place]
        where = {"metric": "distortion_at_rate", "model": model, "position_embedding": "rope", "split": split}
        where |= {"subject": subject, "intervention": intervention}
        cells = inputs.cells([where | {"rate": rate} for rate in RATES], by=("seed", "fit_seed"))
        if any(cells):
            ns = " / ".join(map(count, inputs.values("n", metric="distortion", model=model, split=split)))
            rows.append((f"{splits[split]}: {model}, {place}", *(_of_fits(cell) for cell in cells if cell), ns))
    header = [*(f"{rate:g} nats" for rate in RATES), "n (prompts)"]
    return worded(table_words("rate-distortion").of(entropies=_entropies(inputs)), header, rows)


def _by_model(
    inputs: Inputs, key: str, models: Mapping[str, Fields], rows: Iterable[tuple[str, Form, Fields]], of_every: Fields
) -> Table:
    """A table by the label, form and fields of each row, and the header and fields of each model."""
    lines = []
    for label, form, fields in rows:
        cells = inputs.cells([about | fields for about in models.values()])
        lines.append((label, *(_figure(cell, form) for cell in cells)))
    return worded(table_words(key).of(counts=_counts(inputs, of_every)), models, lines)


def _entropies(inputs: Inputs) -> str:
    """The entropy of the answers of either split."""
    names = {"held_out": "held out", "fit": "of the 50 fitted"}
    cells = inputs.cells([{"metric": "answer_entropy", "split": split} for split in names])
    told = [f"{nats(cell.value)} {text}" for text, cell in zip(names.values(), cells, strict=True) if cell]
    return f" ({', '.join(told)})" if told else ""


def _of_fits(cell: Cell) -> str:
    """The mean of distortions by (seed, fit), their range, and each seed's mean where there are several."""
    seeds: dict[int, list[float]] = {}
    for seed, fit in cell.seeds:
        seeds.setdefault(seed, []).append(cell[seed, fit])
    means = [fmean(values) for values in seeds.values()]
    ends = f"{min(cell.values()):.3f} to {max(cell.values()):.3f}"
    return f"{fmean(means):.3f}\n{ends}{_by_seed(means, '{:.3f}'.format)}"


def _models(inputs: Inputs, of_every: Fields) -> dict[str, Fields]:
    """The models that an analysis was made of, with the fields that select them."""
    columns = ["model", "position_embedding", "task", "train_length", "length"]
    found = inputs.select(**of_every)[columns].drop_duplicates().to_dict("records")
    models = in_order(one["model"] for one in found)
    found.sort(key=lambda one: (models.index(one["model"]), one["position_embedding"]))
    form = "{model}, {position_embedding}\n{what}, {train_length:g} \u2192 {length:g}"
    return {form.format(what=name(one["task"]).lower(), **one): one for one in found}


def _counts(inputs: Inputs, of_every: Fields) -> str:
    """Which seeds there are, on how many prompts, and what the intervals are of."""
    ns = inputs.values("n", **of_every)
    if not ns:
        return ""
    by_model = {model: inputs.values("seed", **of_every, model=model) for model in MODELS}
    seeds = "; ".join(f"{model} {', '.join(map(str, own))}" for model, own in by_model.items() if own)
    prompts = span(map(count, sorted({ns[0], ns[-1]})))
    return f"In brackets: 95\u00a0% intervals over prompts (n = {prompts} a seed); {_DEPENDENT}. Seeds: {seeds}."


def _figure(cell: Cell | None, form: Form) -> str:
    """The mean and its interval, and each seed's own mean where there are several."""
    pooled = cell.pooled() if cell else None
    return with_interval(pooled, form, " to ") + _by_seed(cell.values(), form) if cell and pooled else NOT_RUN


def _by_seed(values: Sequence[float], form: Form) -> str:
    return "\nseeds " + " / ".join(map(form, values)) if len(values) > 1 else ""
