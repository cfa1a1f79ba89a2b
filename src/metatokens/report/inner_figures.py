"""The figures of what is inside the models of a grid: sharpness, caching, rate and distortion."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from metatokens.report.figures import Style, line, small_multiples
from metatokens.report.grid import Grid
from metatokens.report.grid_figures import PAPER, STYLES, Panel, or_nan
from metatokens.report.inner_claims import mean

# The ends of a bar among a record's quantiles, and its width in points.
_QUANTILE_BARS = ((0, -1, 0.8), (1, -2, 2.0), (2, -3, 5.0))


def sharpness(grid: Grid, width: float) -> Figure:
    """Figure 2, left and middle: the distribution of changes of logits and of entropy, by layer and head."""
    metrics = {
        "Change of logits at meta-tokens": ("attention_logit_change", "nats"),
        "Change of entropy": ("attention_entropy_change", "nats"),
    }
    about: dict[str, Any] = {"module": "attention"}

    def panel(metric: str, unit: str, position: str) -> Panel:
        def draw(axes: Axes) -> None:
            ones = grid.measured("sharpness", metric, model="meta", position_embedding=position, **about)
            heads = sorted((one for one in ones if one.layer is not None), key=lambda one: (one.layer, one.head))
            for place, one in enumerate(heads):
                if one.quantiles:
                    for low, high, thick in _QUANTILE_BARS:
                        ends = one.quantiles[low], one.quantiles[high]
                        axes.vlines(place, *ends, color=STYLES["meta"].colour, linewidth=thick, alpha=0.55)
                    axes.plot(place, one.quantiles[len(one.quantiles) // 2], "o", color="#22211f", markersize=3.5)
            axes.axhline(0, color=PAPER.colour, linewidth=0.8)
            axes.set_xticks(range(len(heads)), [f"{one.layer}.{one.head}" for one in heads], rotation=90)
            axes.set_xlabel("layer.head")
            axes.set_ylabel(unit)

        return draw

    positions = sorted({one.position_embedding for one in grid.measured("sharpness", "premise_holds", model="meta")})
    panels = {
        f"{title}, {position}": panel(metric, unit, position)
        for position, (title, (metric, unit)) in product(reversed(positions), metrics.items())
    }
    return small_multiples(panels, STYLES, width, across=2)


def similarity(grid: Grid, width: float) -> Figure:
    """Figure 2, right: centred cosine with the text tokens before, by distance; meta-token and text control."""
    looks = {"meta": ("meta-token", STYLES["meta"]), "text": ("text token (control)", STYLES["gpt2"])}

    def panel(model: str, position: str) -> Panel:
        def draw(axes: Axes) -> None:
            about: dict[str, Any] = {"model": model, "position_embedding": position, "marker": "context"}
            for subject, (label, style) in looks.items():
                ones = grid.measured("residual", "similarity_centred", **about, subject=subject)
                last = max((one.layer or 0 for one in ones), default=0)
                by_distance = defaultdict(list)
                for one in ones:
                    if one.layer == last and one.distance is not None:
                        by_distance[one.distance].append(one)
                means = {distance: mean(found) for distance, found in sorted(by_distance.items())}
                xs = [distance for distance, cell in means.items() if cell]
                middle, low, high = (
                    [or_nan(getattr(cell, field)) for cell in means.values() if cell]
                    for field in ("value", "low", "high")
                )
                axes.plot(xs, middle, label=label, **line(style))
                axes.fill_between(xs, low, high, color=style.colour, alpha=0.13, linewidth=0)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xlabel("tokens before it")
            axes.set_ylabel("cosine, centred")

        return draw

    models = sorted({(one.model, one.position_embedding) for one in grid.measured("residual", "similarity_centred")})
    models.sort(key=lambda model: (model[0] != "meta", model[1] != "rope"))
    return small_multiples({f"{m}, {p}": panel(m, p) for m, p in models}, STYLES, width, across=2)


def heat_map(grid: Grid, width: float) -> Figure:
    """Figure 3, left: of one prompt, the similarity of each state to the final meta-token's, by layer and position."""

    def panel(position: str) -> Panel:
        def draw(axes: Axes) -> None:
            about: dict[str, Any] = {"model": "meta", "position_embedding": position}
            ones = grid.measured("residual", "similarity_to_final_centred", **about)
            seed = min(one.seed for one in ones)
            ones = [one for one in ones if one.seed == seed]
            layers, places = (1 + max(getattr(one, end) or 0 for one in ones) for end in ("layer", "position"))
            values = np.full((layers, places), math.nan)
            for one in ones:
                values[one.layer or 0, one.position or 0] = or_nan(one.value)
            axes.imshow(values, aspect="auto", origin="lower", cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
            metas = sorted({one.position for one in ones if one.subject == "meta" and one.position is not None})
            axes.set_xticks(metas, [f"{one}" for one in metas])
            axes.set_yticks(range(layers))
            axes.grid(visible=False)
            axes.set_xlabel("position (ticks: meta-tokens)")
            axes.set_ylabel("blocks passed")

        return draw

    found = grid.measured("residual", "similarity_to_final_centred", model="meta")
    positions = sorted({one.position_embedding for one in found}, reverse=True)
    return small_multiples(
        {f"meta, {its}: cosine, blue \u22121 to red +1": panel(its) for its in positions}, STYLES, width, across=1
    )


def rate_distortion(grid: Grid, width: float) -> Figure:
    """Figure 3, right: distortion by rate (symlog, linear to 20 nats); bands: seeds of the models and of the fits."""
    places = {
        "meta": ("meta", "meta", None, STYLES["meta"]),
        "meta, no position": ("meta", "meta", "no_pos", Style("#a3478a", (7, 2), "v", 5.0)),
        "meta, text before": ("meta", "text", None, Style("#d55e00", (1, 1.2), "o", 5.0, "none")),
        "twin": ("twin", "meta", None, STYLES["twin"]),
        "gpt2": ("gpt2", "meta", None, STYLES["gpt2"]),
    }

    def panel(split: str) -> Panel:
        def draw(axes: Axes) -> None:
            for label, (model, subject, intervention, style) in places.items():
                by_beta = _points(grid, split, model, subject, intervention)
                if by_beta:
                    rates = [fmean(rate for rate, _ in points) for points in by_beta]
                    distortions = [[distortion for _, distortion in points] for points in by_beta]
                    axes.plot(rates, list(map(fmean, distortions)), label=label, **line(style))
                    ends = list(map(min, distortions)), list(map(max, distortions))
                    axes.fill_between(rates, *ends, color=style.colour, alpha=0.13, linewidth=0)
            axes.set_xscale("symlog", linthresh=20)
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xlabel("rate, nats")
            axes.set_ylabel("distortion, nats")

        return draw

    titles = {"held_out": "Held-out prompts", "fit": "As in the paper: the 50 fitted"}
    return small_multiples({title: panel(split) for split, title in titles.items()}, STYLES, width, across=2)


def _points(
    grid: Grid, split: str, model: str, subject: str, intervention: str | None
) -> list[Sequence[tuple[float, float]]]:
    """The (rate, distortion) of every seed, a list for each beta, rates ascending."""
    where: dict[str, Any] = {"model": model, "position_embedding": "rope", "subject": subject, "split": split}
    where["intervention"] = intervention
    rates = {(one.beta, one.seed, one.fit_seed): one.value for one in grid.measured("rate_distortion", "rate", **where)}
    found: Mapping[Any, list[tuple[float, float]]] = defaultdict(list)
    for one in grid.measured("rate_distortion", "distortion", **where):
        rate = rates.get((one.beta, one.seed, one.fit_seed))
        if rate is not None and one.value is not None:
            found[one.beta].append((rate, one.value))
    return sorted(found.values(), key=lambda points: fmean(rate for rate, _ in points))
