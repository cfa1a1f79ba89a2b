"""What the paper claims of the inside of its models: sharper attention, cached context, compression."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from metatokens.records import Measurement
from metatokens.report.estimates import MODELS, Estimate, difference, mean
from metatokens.report.grid import Grid
from metatokens.report.verdicts import SMALL, Claim, Comparison, mean_gap
from metatokens.report.wording import MINUS, NOT_YET, percent

CLOSE = (1, 2, 3, 4)  # tokens before a meta-token
FAR = 16
RATES = (0.5, 1.0, 2.0, 4.0)  # nats, at which distortions are compared

Curve = Sequence[tuple[float, float]]
"""Points (rate, distortion), rates ascending, from rate 0 on."""


def claims(grid: Grid) -> list[Claim]:
    """The claims of Figures 2 and 3 and of the paper's two theorems."""
    return [*_sharpness(grid), *_caching(grid), *_rate_distortion(grid)]


def setting(one: "Measurement") -> str:
    """Which model, trained and tested how: `rope, list recall, 512 → 256`."""
    task = (one.task or "no task").replace("_", " ")
    return f"{one.position_embedding}, {task}, {one.train_length} \u2192 {one.length}"


def by_seed(ones: "Iterable[Measurement]") -> dict[int, Estimate]:
    """The mean of each seed of the model, seeds in order."""
    means = {seed: mean(own) for seed, own in sorted(_by(lambda one: one.seed, ones).items())}
    return {seed: one for seed, one in means.items() if one}


def _above(
    grid: Grid, metric: str, label: str, where: dict[str, Any], *, bound: float = 0.0, is_below: bool = False
) -> list[Comparison]:
    """Whether a measurement of meta's sharpness lies above a bound, or below it, in each setting."""
    found = []
    for place, ones in _by(setting, grid.measured("sharpness", metric, model="meta", **where)).items():
        figures = by_seed(ones)
        bounds = dict.fromkeys(figures, Estimate(bound, bound, bound, 0, None))
        found.append(_minus(f"{label}, {place}", *((bounds, figures) if is_below else (figures, bounds))))
    return found or [Comparison(label)]


def _sharpness(grid: Grid) -> list[Claim]:
    # Of the premise, and of log-odds, meta's second attention says nothing: all of its keys are meta-tokens. The
    # largest of all weights is never below exp(-H), and of two keys one's log-odds are the other's, its sign turned.
    first, second = ({"module": module, "layer": None} for module in ("attention", "second_attention"))
    within, end = {"marker": "context"}, {"marker": "final"}
    claimed = {
        ("Meta-tokens' embeddings raise attention logits at them", "Figure 2, left"): [
            *_above(grid, "attention_logit_change", "attention logit", first),
            *_above(grid, "attention_log_odds_change", "attention log-odds", first),
            *_above(grid, "attention_logit_change", "second attention logit", second),
        ],
        ("They raise output logits there", "Figure 2, left"): [
            *_above(grid, "output_top_logit_change", "top output logit, within the prompt", within),
            *_above(grid, "output_top_logit_change", "top output logit, at the end", end),
            *_above(grid, "output_answer_logit_change", "the answer's logit, at the end", end),
        ],
        ("They lower the entropy of attention and output", "Figure 2, middle"): [
            *_above(grid, "attention_entropy_change", "attention", first, is_below=True),
            *_above(grid, "attention_entropy_change", "second attention", second, is_below=True),
            *_above(grid, "output_entropy_change", "output, within the prompt", within, is_below=True),
            *_above(grid, "output_entropy_change", "output, at the end", end, is_below=True),
        ],
    }
    told = {"They lower the entropy of attention and output": _falls(grid)}
    return [
        Claim(text, source, "sharpness", tuple(comparisons), negligible=0.0, unit="nats", decisive=told.get(text, ""))
        for (text, source), comparisons in claimed.items()
    ]


def _falls(grid: Grid) -> str:
    """By how much entropies fall in each model with rope: pause and twin have no meta-attention."""
    said = []
    for what, metric, where in (
        ("attention", "attention_entropy_change", {"module": "attention", "layer": None}),
        ("output at the end", "output_entropy_change", {"marker": "final"}),
    ):
        about: dict[str, Any] = {"position_embedding": "rope"} | where
        found = {model: mean(grid.measured("sharpness", metric, model=model, **about)) for model in MODELS}
        changes = [f"{model} {one.value:+.2f}".replace("-", MINUS) for model, one in found.items() if one]
        said += [f"{what}: {', '.join(changes)}"] if changes else []
    return "; ".join(said)


def controls(grid: Grid) -> list[Claim]:
    """What the corrected Theorem 4.1 rests on, and text tokens beside meta-tokens, which the paper leaves out."""
    where: dict[str, Any] = {"module": "attention", "layer": None}
    rates = [
        " / ".join(percent(one.value) for one in by_seed(ones).values())
        for ones in _by(setting, grid.measured("sharpness", "premise_holds", model="meta", **where)).values()
    ]
    held = " and ".join(f"{rate}\u00a0%" for rate in rates if rate)
    about = ("control", "sharpness")
    return [
        Claim(
            "Theorem 4.1 needs \u03b1 > exp(\u2212H): so it is in most rows",
            *about,
            tuple(_above(grid, "premise_holds", "rows above half", where, bound=0.5)),
            negligible=0.0,
            decisive=f"{held} of rows" if held else "",
        ),
        Claim("Where that holds, a boost lowers entropy more often", *about, tuple(_fell(grid)), negligible=0.0),
        _beside_text(grid),
    ]


def _fell(grid: Grid) -> list[Comparison]:
    where: dict[str, Any] = {"model": "meta", "module": "attention", "layer": None, "boosted": True}
    held, missing = (
        _by(setting, grid.measured("sharpness", "entropy_fell", premise=premise, **where)) for premise in (True, False)
    )
    found = [_minus(place, by_seed(held[place]), by_seed(missing.get(place, []))) for place in held]
    return found or [Comparison("rows")]


def _caching(grid: Grid) -> list[Claim]:
    falls, looks = [], []
    for place, by_place in _similarities(grid).items():
        for layer in _passed(by_place):
            near, far = (by_seed(by_place.get((layer, distance, "meta"), [])) for distance in (CLOSE[0], FAR))
            falls.append(_minus(f"after layer {layer - 1}, {place}", near, far))
    keys = {"model": "meta", "module": "attention", "keys": "earlier_meta"}
    weights, uniform = (
        grid.measured("residual", metric, **keys) for metric in ("attention_weight", "attention_weight_if_uniform")
    )
    for place, ones in _by(setting, weights).items():
        even = by_seed(_by(setting, uniform).get(place, []))
        for layer, heads in _by(lambda one: one.layer, ones).items():
            looks.append(_minus(f"in layer {layer}, {place}", by_seed(heads), even))
    return [
        Claim(
            "A meta-token's likeness to what it follows falls with distance",
            "Figure 2, right",
            "caching",
            tuple(falls) or (Comparison("similarity"),),
            unit="plain",
        ),
        Claim(
            "The final meta-token attends to earlier ones",
            "Figure 3, left",
            "caching",
            tuple(looks) or (Comparison("attention"),),
            negligible=0.0,
        ),
    ]


def _beside_text(grid: Grid) -> Claim:
    """Whether meta-tokens stand out: text, too, is most like what stands nearest."""
    spikes = []
    for place, by_place in _similarities(grid).items():
        for layer, distance in product(_passed(by_place), CLOSE):
            meta, text = (by_seed(by_place.get((layer, distance, subject), [])) for subject in ("meta", "text"))
            spikes.append(_minus(f"after layer {layer - 1}, {distance} before, {place}", meta, text))
    return Claim(
        "A meta-token is more like what it follows than text is",
        "control",
        "caching",
        tuple(spikes) or (Comparison("similarity"),),
        unit="plain",
    )


def _similarities(grid: Grid) -> dict[str, dict[Any, "list[Measurement]"]]:
    """The cosines of meta's centred states to those before them: by setting, then layer, distance and subject."""
    ones = grid.measured("residual", "similarity_centred", model="meta", marker="context")
    return {
        place: _by(lambda one: (one.layer, one.distance, one.subject), own) for place, own in _by(setting, ones).items()
    }


def _passed(by_place: Mapping[Any, Any]) -> list[int]:
    """The layers passed; after none of them there is no context yet."""
    return sorted({layer for layer, _, _ in by_place if layer})


def distortion_at(curve: Curve, rate: float) -> float:
    """The distortion of a curve at a rate: linear between its points, and that of the last one beyond it."""
    rates, distortions = zip(*curve, strict=True)
    return float(np.interp(rate, rates, distortions))


def curves(
    grid: Grid, model: str, subject: str, intervention: str | None = None, split: str = "held_out"
) -> dict[tuple[int, int | None], Curve]:
    """The rate-distortion curves of a model with rope at a place, by seed of the model and of the fit."""
    where: dict[str, Any] = {"model": model, "position_embedding": "rope", "intervention": intervention, "split": split}
    entropies = {one.seed: one.value for one in grid.measured("rate_distortion", "answer_entropy", **where)}
    where["subject"] = subject
    rates, distortions = (
        {(one.seed, one.fit_seed, one.beta): one.value for one in grid.measured("rate_distortion", metric, **where)}
        for metric in ("rate", "distortion")
    )
    points: dict[tuple[int, int | None], list[tuple[float, float]]] = defaultdict(list)
    for (seed, fit, beta), rate in rates.items():
        distortion = distortions.get((seed, fit, beta))
        if rate is not None and distortion is not None:
            points[seed, fit].append((rate, distortion))
    return {
        (seed, fit): sorted([(0.0, entropies.get(seed) or max(d for _, d in found)), *found])
        for (seed, fit), found in points.items()
    }


def text_gaps(grid: Grid) -> str:
    """By how much each model's distortion at the last meta-token is below that at the text before it, at one rate."""
    gaps = {
        model: _lower("", curves(grid, model, "meta"), curves(grid, model, "text"), RATES[-1]).gap
        for model in ("meta", "gpt2", "twin")
    }
    told = (f"{model} {f'{gap.value:+.2f}'.replace('-', MINUS) if gap else NOT_YET}" for model, gap in gaps.items())
    return f"at {RATES[-1]:g} nats: {', '.join(told)}" if any(gaps.values()) else ""


def _rate_distortion(grid: Grid) -> list[Claim]:
    meta, zeroed = (curves(grid, "meta", "meta", intervention) for intervention in (None, "no_pos"))
    others = {other: curves(grid, other, "meta") for other in ("gpt2", "twin")}

    def claim(text: str, source: str, ours: Mapping[Any, Curve], others: Mapping[str, Any], **fields: Any) -> Claim:
        comparisons = tuple(
            _lower(f"{label}, {rate:g} nats", ours, other, rate) for label, other in others.items() for rate in RATES
        )
        return Claim(text, source, "rate-distortion", comparisons, unit="nats", **fields)

    text_before = {"text before it": curves(grid, "meta", "text")}
    no_more = f"No more of it ({SMALL:g} nats) than gpt2 and twin have at the same place"
    about = "Less distortion at a rate than at the text before"
    return [
        claim(about, "Figure 3, right", meta, text_before, decisive=text_gaps(grid)),
        claim(no_more, "Theorem 5.1", meta, others, margin=-SMALL, negligible=-SMALL),
        claim("No Pos lowers the distortion (list recall)", "section 5.2", zeroed, {"no_pos": meta}),
    ]


def _lower(label: str, ours: Mapping[Any, Curve], theirs: Mapping[Any, Curve], rate: float) -> Comparison:
    """By how much our distortion is the lower at a rate, of the seeds of models and fits that both have.

    The interval is over seeds of the models, each the mean of its fits; only of a single seed is it over its fits,
    which say nothing of another training of the model.
    """
    gaps = {key: distortion_at(theirs[key], rate) - distortion_at(ours[key], rate) for key in ours if key in theirs}
    seeds = tuple(fmean(gaps[key] for key in keys) for _, keys in sorted(_by(lambda key: key[0], gaps).items()))
    if len(seeds) > 1:
        return Comparison(label, mean_gap(seeds), seeds, figures=f"{len(seeds)} seeds")
    return Comparison(label, mean_gap(list(gaps.values())), figures=f"1 seed, {len(gaps)} fits" if gaps else "")


def _minus(label: str, ours: Mapping[int, Estimate], theirs: Mapping[int, Estimate]) -> Comparison:
    """The difference of two figures, by the seeds that both have."""
    seeds = [seed for seed in ours if seed in theirs]
    a, b = (mean(side[seed] for seed in seeds) for side in (ours, theirs))
    gaps = tuple((ours[seed].value or 0.0) - (theirs[seed].value or 0.0) for seed in seeds)
    return Comparison(label, difference(a, b) if a and b else None, gaps if len(gaps) > 1 else ())


def _by(key: Any, ones: Iterable[Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for one in ones:
        found[key(one)].append(one)
    return found
