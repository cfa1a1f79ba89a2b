"""What the paper claims of the inside of its models: sharper attention, cached context, compression."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from metatokens.report.estimates import Difference, Estimate, difference
from metatokens.report.grid import Grid
from metatokens.report.verdicts import Claim, Comparison, mean_gap, shifted
from metatokens.report.wording import percent

if TYPE_CHECKING:
    from metatokens.analysis.records import Measurement

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


def mean(ones: "Sequence[Measurement]") -> Estimate | None:
    """The mean of several measurements that do not depend on each other, such as those of different seeds."""
    values = [one.value for one in ones if one.value is not None]
    if not values:
        return None
    value, bounded = sum(values) / len(values), [one for one in ones if one.low is not None and one.high is not None]
    if len(bounded) < len(values):
        return Estimate(value, None, None, sum(one.n for one in ones), None)
    reaches = [
        sum((getattr(one, end) - (one.value or 0.0)) ** 2 for one in bounded) ** 0.5 / len(values)
        for end in ("low", "high")
    ]
    return Estimate(value, value - reaches[0], value + reaches[1], sum(one.n for one in ones), None)


def _above(
    grid: Grid, metric: str, label: str, where: dict[str, Any], *, sign: int = 1, bound: float = 0.0
) -> list[Comparison]:
    """Whether a measurement of meta's sharpness lies above a bound, or with sign -1 below it, in each setting."""
    found = []
    for place, ones in _by(setting, grid.measured("sharpness", metric, model="meta", **where)).items():
        figure = mean(ones)
        gap = shifted(figure, bound) if figure else None
        if gap and sign < 0:
            gap = Difference(-gap.value, -gap.high, -gap.low)
        seeds = tuple(sign * ((one.value or 0.0) - bound) for one in ones)
        found.append(Comparison(f"{label}, {place}", gap, seeds if len(seeds) > 1 else ()))
    return found or [Comparison(label)]


def _sharpness(grid: Grid) -> list[Claim]:
    everywhere: dict[str, Any] = {"module": "attention", "layer": None}
    within, end = {"marker": "context"}, {"marker": "final"}
    claimed = {
        ("Meta-tokens' embeddings raise attention logits at them", "Figure 2, left", "nats"): [
            *_above(grid, "attention_logit_change", "attention logit", everywhere),
            *_above(grid, "attention_log_odds_change", "attention log-odds", everywhere),
        ],
        ("They raise output logits there", "Figure 2, left", "nats"): [
            *_above(grid, "output_top_logit_change", "top output logit, within the prompt", within),
            *_above(grid, "output_top_logit_change", "top output logit, at the end", end),
            *_above(grid, "output_answer_logit_change", "the answer's logit, at the end", end),
        ],
        ("They lower the entropy of attention and output", "Figure 2, middle", "nats"): [
            *_above(grid, "attention_entropy_change", "attention", everywhere, sign=-1),
            *_above(grid, "output_entropy_change", "output, within the prompt", within, sign=-1),
            *_above(grid, "output_entropy_change", "output, at the end", end, sign=-1),
        ],
        ("Theorem 4.1's premise, \u03b1 > exp(\u2212H), holds in most rows", "Theorem 4.1", "points"): _above(
            grid, "premise_holds", "rows above half", everywhere, bound=0.5
        ),
        ("Where it holds, a boost lowers entropy more often", "Theorem 4.1", "points"): (_fell(grid)),
    }
    rates = [
        mean(ones)
        for ones in _by(setting, grid.measured("sharpness", "premise_holds", model="meta", **everywhere)).values()
    ]
    held = " and ".join(f"{percent(rate.value)}\u00a0%" for rate in rates if rate)
    return [
        Claim(
            text,
            source,
            "sharpness",
            tuple(comparisons),
            negligible=0.0,
            unit=cast(Any, unit),
            decisive=f"{held} of rows" if held and "premise" in text else "",
        )
        for (text, source, unit), comparisons in claimed.items()
    ]


def _fell(grid: Grid) -> list[Comparison]:
    where: dict[str, Any] = {"model": "meta", "module": "attention", "layer": None, "boosted": True}
    held, missing = (
        _by(setting, grid.measured("sharpness", "entropy_fell", premise=premise, **where)) for premise in (True, False)
    )
    return [_minus(place, held[place], missing.get(place, [])) for place in held] or [Comparison("rows")]


def _caching(grid: Grid) -> list[Claim]:
    spikes, falls = [], []
    about: dict[str, Any] = {"model": "meta", "marker": "context"}
    for place, ones in _by(setting, grid.measured("residual", "similarity_centred", **about)).items():
        by_place = _by(lambda one: (one.layer, one.distance, one.subject), ones)
        for layer in sorted({one.layer for one in ones if one.layer}):  # layer 0 holds embeddings, not context
            for distance in CLOSE:
                meta, text = (by_place.get((layer, distance, subject), []) for subject in ("meta", "text"))
                spikes.append(_minus(f"layer {layer}, {distance} before, {place}", meta, text))
            near, far = (by_place.get((layer, distance, "meta"), []) for distance in (CLOSE[0], FAR))
            falls.append(_minus(f"layer {layer}, {place}", near, far))
    looks = []
    keys = {"model": "meta", "module": "attention", "keys": "earlier_meta"}
    weights, uniform = (
        grid.measured("residual", metric, **keys) for metric in ("attention_weight", "attention_weight_if_uniform")
    )
    for place, ones in _by(setting, weights).items():
        even = mean(_by(setting, uniform).get(place, []))
        for layer, heads in _by(lambda one: one.layer, ones).items():
            figure = mean(heads)
            gap = shifted(figure, even.value) if figure and even and even.value is not None else None
            looks.append(Comparison(f"layer {layer}, {place}", gap))
    return [
        Claim(
            "A meta-token is more like what it follows than text is",
            "Figure 2, right",
            "caching",
            tuple(spikes) or (Comparison("similarity"),),
            unit="plain",
        ),
        Claim(
            "That similarity falls with distance",
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


def distortion_at(curve: Curve, rate: float) -> float:
    """The distortion of a curve at a rate: linear between its points, and that of the last one beyond it."""
    best = curve[0][1]
    for (r0, _), (r1, d1) in pairwise(curve):
        if rate <= r1:
            return best if d1 >= best else best + (d1 - best) * (rate - r0) / (r1 - r0)
        best = min(best, d1)
    return best


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


def _rate_distortion(grid: Grid) -> list[Claim]:
    meta = curves(grid, "meta", "meta")
    pairs: dict[str, tuple[str, list[tuple[str, Mapping[Any, Curve]]]]] = {
        "Less distortion at a rate than at the text before": (
            "Figure 3, right",
            [("text before it", curves(grid, "meta", "text"))],
        ),
        "Less than gpt2 and twin have at the same place": (
            "Theorem 5.1",
            [(other, curves(grid, other, "meta")) for other in ("gpt2", "twin")],
        ),
    }
    found = [
        Claim(
            text,
            source,
            "rate-distortion",
            tuple(_lower(f"{label}, {rate:g} nats", meta, other, rate) for label, other in others for rate in RATES),
            unit="nats",
        )
        for text, (source, others) in pairs.items()
    ]
    zeroed = curves(grid, "meta", "meta", intervention="no_pos")
    comparisons = tuple(_lower(f"no_pos, {rate:g} nats", zeroed, meta, rate) for rate in RATES)
    text = "No Pos lowers the distortion"
    return [*found, Claim(text, "section 5.2", "rate-distortion", comparisons, unit="nats")]


def _lower(label: str, ours: Mapping[Any, Curve], theirs: Mapping[Any, Curve], rate: float) -> Comparison:
    """By how much our distortion is the lower at a rate, over the seeds of models and fits that both have."""
    gaps = {key: distortion_at(theirs[key], rate) - distortion_at(ours[key], rate) for key in ours if key in theirs}
    by_seed = _by(lambda key: key[0], gaps)
    seeds = tuple(sum(gaps[key] for key in keys) / len(keys) for keys in by_seed.values())
    return Comparison(label, mean_gap(list(gaps.values())), seeds if len(seeds) > 1 else ())


def _minus(label: str, ours: "Sequence[Measurement]", theirs: "Sequence[Measurement]") -> Comparison:
    a, b = mean(ours), mean(theirs)
    return Comparison(label, difference(a, b) if a and b else None)


def _by(key: Any, ones: Iterable[Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for one in ones:
        found[key(one)].append(one)
    return found
