"""The figures of what is inside the models of a grid: sharpness, caching, rate and distortion."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from metatokens.records import Measurement
from metatokens.report.estimates import mean
from metatokens.report.figures import Style, line, small_multiples
from metatokens.report.grid import Grid
from metatokens.report.grid_figures import PAPER, STYLES, Panel, or_nan
from metatokens.report.inner_claims import curves, distortion_at

# What a bar covers: its ends among a record's quantiles, and its width in points.
_BARS = {"98 % of values": (0, -1, 0.8), "90 %": (1, -2, 1.6), "50 %": (2, -3, 2.8)}
_LINEAR = 20  # nats, up to which the axis of rates is linear
_RATES = (0, 5, 10, 15, 20, 30, 50, 100, 200, 500, 1000)


def sharpness(grid: Grid, width: float) -> Figure:
    """Figure 2, left and middle: how changes of logits and of entropy are spread, meta's seeds side by side."""
    changes = {
        "logits": ("attention_logit_change", "output_top_logit_change"),
        "entropy": ("attention_entropy_change",),
    }
    modules = {"Attention": "attention", "Second attention": "second_attention"}
    panels = {}
    found = grid.measured("sharpness", "attention_logit_change", model="meta")
    for position in sorted({one.position_embedding for one in found}, reverse=True):
        about: dict[str, Any] = {"model": "meta", "position_embedding": position}
        for (what, (metric, *_)), (title, module) in product(changes.items(), modules.items()):
            heads = defaultdict(list)
            for one in grid.measured("sharpness", metric, **about, module=module):
                if one.layer is not None:
                    heads[one.layer, one.head].append(one)
            named = {f"{layer}.{head}": ones for (layer, head), ones in sorted(heads.items())}
            panels[f"{title} {what}, {position}"] = _spreads(named, "layer.head")
        panels[f"Output logits, {position}"] = _spreads(
            {
                "top, within": grid.measured("sharpness", "output_top_logit_change", **about, marker="context"),
                "top, at the end": grid.measured("sharpness", "output_top_logit_change", **about, marker="final"),
                "answer's": grid.measured("sharpness", "output_answer_logit_change", **about),
            }
        )
        panels[f"Output entropy, {position}"] = _spreads(
            {
                "within": grid.measured("sharpness", "output_entropy_change", **about, marker="context"),
                "at the end": grid.measured("sharpness", "output_entropy_change", **about, marker="final"),
            }
        )
    return small_multiples(panels, STYLES, width, across=2)


def _spreads(groups: "Mapping[str, Sequence[Measurement]]", what: str = "") -> Panel:
    """A panel of bars: quantiles of each group's values, its seeds side by side."""

    def draw(axes: Axes) -> None:
        for place, ones in enumerate(groups.values()):
            for number, one in enumerate(sorted(ones, key=lambda one: one.seed)):
                if one.quantiles:
                    x = place + 0.26 * (number - (len(ones) - 1) / 2)
                    for label, (low, high, thick) in _BARS.items():
                        ends = one.quantiles[low], one.quantiles[high]
                        colour = STYLES["meta"].colour
                        axes.vlines(x, *ends, color=colour, linewidth=thick, alpha=0.55, label=label)
                    middle = one.quantiles[len(one.quantiles) // 2]
                    axes.plot(x, middle, "o", color="#22211f", markersize=2.6, label="median")
        axes.axhline(0, color=PAPER.colour, linewidth=0.8)
        is_many = len(groups) > 8
        axes.set_xticks(range(len(groups)), list(groups), rotation=90 if is_many else 0)
        axes.set_xlim(-0.6, len(groups) - 0.4)
        axes.set_xlabel(what)
        axes.set_ylabel("change, nats")

    return draw


def similarity(grid: Grid, width: float) -> Figure:
    """Figure 2, right: centred cosine with the text tokens before, by distance; thin: each seed's own."""
    looks = {"meta": ("meta-token", STYLES["meta"]), "text": ("text token (control)", STYLES["gpt2"])}

    def panel(model: str, position: str) -> Panel:
        def draw(axes: Axes) -> None:
            about: dict[str, Any] = {"model": model, "position_embedding": position, "marker": "context"}
            distances: set[int] = set()
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
                axes.plot(xs, middle, label=label, **line(style) | {"markersize": style.size - 2})
                axes.fill_between(xs, low, high, color=style.colour, alpha=0.13, linewidth=0)
                seeds = sorted({one.seed for one in ones})
                for seed in seeds if len(seeds) > 1 else ():
                    own = [mean(one for one in by_distance[x] if one.seed == seed) for x in xs]
                    values = [or_nan(one.value) if one else math.nan for one in own]
                    axes.plot(xs, values, color=style.colour, linewidth=0.6, alpha=0.6)
                distances.update(xs)
            _mark_bins(axes, sorted(distances))
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_ylim(-1.05, 1.05)
            axes.set_xlabel("tokens before it")
            axes.set_ylabel("cosine, centred")

        return draw

    models = sorted({(one.model, one.position_embedding) for one in grid.measured("residual", "similarity_centred")})
    models.sort(key=lambda model: (model[0] != "meta", model[1] != "rope"))
    return small_multiples({f"{m}, {p}": panel(m, p) for m, p in models}, STYLES, width, across=2)


def _mark_bins(axes: Axes, distances: Sequence[int]) -> None:
    """Marks where single distances end: D then stands for all those above the one before it, up to D."""
    single = next((here for here, after in pairwise(distances) if after > here + 1), None)
    if single is not None:
        mark(axes, single + 0.5, "each distance", "up to")


def mark(axes: Axes, x: float, left: str, right: str) -> None:
    """A line across the axis of x, and what holds on either side of it."""
    axes.axvline(x, color=PAPER.colour, linewidth=0.8, linestyle=(0, (2, 2)))
    for text, side, shift in ((left, "right", -3), (right, "left", 3)):
        axes.annotate(
            text, (x, 1), (shift, -1), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
            ha=side, va="top", fontsize=8, color="#66635e",
        )  # fmt: skip


def heat_map(grid: Grid, width: float) -> Figure:
    """Figure 3, left: of one prompt, how like the final meta-token's each state is, by layer, position and seed."""

    def panel(position: str, seed: int) -> Panel:
        def draw(axes: Axes) -> None:
            about: dict[str, Any] = {"model": "meta", "position_embedding": position, "seed": seed}
            ones = grid.measured("residual", "similarity_to_final_centred", **about)
            layers, places = (1 + max(getattr(one, end) or 0 for one in ones) for end in ("layer", "position"))
            values = np.full((layers, places), math.nan)
            for one in ones:
                values[one.layer or 0, one.position or 0] = or_nan(one.value)
            look: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1, "interpolation": "nearest"}
            image = axes.imshow(values, aspect="auto", origin="lower", **look)
            bar = axes.figure.colorbar(image, ax=axes, ticks=[-1, -0.5, 0, 0.5, 1], pad=0.02)
            bar.ax.tick_params(length=0, labelsize=9)
            bar.set_label("cosine", fontsize=9)
            bar.outline.set_visible(False)
            metas = sorted({one.position for one in ones if one.subject == "meta" and one.position is not None})
            axes.plot(
                metas, [layers - 0.3] * len(metas), linestyle="none", marker="v", markersize=5.5, clip_on=False,
                color=STYLES["meta"].colour, label="meta-token",
            )  # fmt: skip
            axes.set_ylim(-0.5, layers - 0.1)
            axes.set_yticks(range(layers))
            axes.grid(visible=False)
            axes.set_xlabel("position in the prompt")
            axes.set_ylabel("blocks passed")

        return draw

    found = grid.measured("residual", "similarity_to_final_centred", model="meta")
    models = sorted({(one.position_embedding, one.seed) for one in found}, key=lambda one: (one[0] != "rope", one))
    return small_multiples(
        {f"Similarity to the final meta-token, centred: {its}, seed {seed}": panel(its, seed) for its, seed in models},
        STYLES,
        width,
        across=1,
    )


def rate_distortion(grid: Grid, width: float) -> Figure:
    """Figure 3, right: distortion by rate (symlog, linear to 20 nats); thin: each seed's own, the mean of its fits."""
    # gpt2, twin and meta coincide: the thicker line and the larger marker lie below.
    places = {
        "meta": ("meta", "meta", None, replace(STYLES["meta"], size=8.0), 3.2),
        "meta, no pos": ("meta", "meta", "no_pos", Style("#a3478a", (7, 2), "v", 5.0), 1.6),
        "meta, text": ("meta", "text", None, Style("#d55e00", (1, 1.2), "o", 5.0, "none"), 1.6),
        "gpt2, text": ("gpt2", "text", None, Style("#4d4d4d", (1, 1.2), "s", 4.5, "none"), 1.2),
        "twin, text": ("twin", "text", None, Style("#0072b2", (4, 1.8), "D", 4.2, "none"), 1.2),
        "twin": ("twin", "meta", None, replace(STYLES["twin"], dashes=(2, 2.5), size=5.4), 2.2),
        "gpt2": ("gpt2", "meta", None, replace(STYLES["gpt2"], size=2.8), 1.2),
    }

    def panel(split: str) -> Panel:
        def draw(axes: Axes) -> None:
            last = 0.0
            for label, (model, subject, intervention, style, thick) in places.items():
                seeds = _points(grid, split, model, subject, intervention)
                if seeds:
                    look = line(style) | {"linewidth": thick}
                    # At equal rates, as in the table: the points of one beta lie at other rates in each seed.
                    shown = np.mean([rates for rates, _ in seeds.values()], axis=0)
                    found = curves(grid, model, subject, intervention, split).items()
                    means = [fmean(distortion_at(own, rate) for _, own in found) for rate in shown]
                    axes.plot(shown, means, label=label, **look)
                    for rates, distortions in seeds.values() if len(seeds) > 1 else ():
                        axes.plot(rates, distortions, color=style.colour, linewidth=0.6, alpha=0.6)
                    last = max(last, *(rates[-1] for rates, _ in seeds.values()))
            axes.set_xscale("symlog", linthresh=_LINEAR)
            axes.set_xticks([rate for rate in _RATES if rate <= max(last, _LINEAR)])
            axes.set_xticks([], minor=True)
            axes.set_ylim(bottom=-0.25)  # so that what is nearly 0 is seen whole
            axes.xaxis.set_major_formatter("{x:g}")
            mark(axes, _LINEAR, "linear", "log")
            axes.set_xlabel("rate, nats")
            axes.set_ylabel("distortion, nats")

        return draw

    titles = {"held_out": "Held-out prompts", "fit": "As in the paper: the 50 fitted"}
    return small_multiples({title: panel(split) for split, title in titles.items()}, STYLES, width, across=2)


def _points(grid: Grid, split: str, model: str, subject: str, intervention: str | None) -> dict[int, np.ndarray]:
    """Of each seed the rates and the distortions, (2, betas), each the mean of its fits; of the betas that all have."""
    where: dict[str, Any] = {"model": model, "position_embedding": "rope", "subject": subject, "split": split}
    where["intervention"] = intervention
    values: Mapping[tuple[int, float | None], Mapping[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for metric in ("rate", "distortion"):
        for one in grid.measured("rate_distortion", metric, **where):
            if one.value is not None:
                values[one.seed, one.beta][metric].append(one.value)
    seeds = sorted({seed for seed, _ in values})
    betas = {beta for _, beta in values if all(len(values.get((seed, beta), {})) == 2 for seed in seeds)}
    ordered = sorted(betas, key=lambda beta: -(beta or 0.0))  # the dearer a nat of rate, the fewer are spent
    found = {
        seed: np.array([[fmean(values[seed, beta][metric]) for beta in ordered] for metric in ("rate", "distortion")])
        for seed in seeds
    }
    return found if ordered else {}
