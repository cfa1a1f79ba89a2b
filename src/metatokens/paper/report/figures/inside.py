"""Figures of what is inside the models of a grid: sharpness, caching, rate and distortion."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from metatokens.looking.style import GREY, INK, PAGE, Panel, Style, band, line, small_multiples
from metatokens.paper.report.derive import distortion_at, distortion_curves, select
from metatokens.paper.report.figures.lines import PAPER, STYLES
from metatokens.paper.report.frame import Inputs

# What a bar covers: its ends among a record's quantiles, and its width in points.
_BARS = {"98 % of values": (0, -1, 0.8), "90 %": (1, -2, 1.6), "50 %": (2, -3, 2.8)}
_THIN: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.6}
_LINEAR = 20  # nats, up to which the axis of rates is linear
_RATES = (0, 5, 10, 15, 20, 30, 50, 100, 200, 500, 1000)


def sharpness(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 2, left and middle: how changes of logits and of entropy are spread, meta's seeds side by side."""
    changes = {"logits": "attention_logit_change", "entropy": "attention_entropy_change"}
    modules = {"Attention": "attention", "Second attention": "second_attention"}
    panels: dict[str, Panel] = {}
    for position in reversed(inputs.values("position_embedding", metric=changes["logits"], model="meta")):
        about = {"model": "meta", "position_embedding": position}
        for what, metric in changes.items():
            for title, module in modules.items():
                heads = inputs.select(metric=metric, **about, module=module).dropna(subset="layer")
                named = {f"{layer:g}.{head:g}": own for (layer, head), own in heads.groupby(["layer", "head"])}
                panels[f"{title} {what}, {position}"] = partial(_draw_spreads, named, "layer.head")
        top, entropy = (
            {end: inputs.select(metric=metric, **about, marker=end) for end in ("context", "final")}
            for metric in ("output_top_logit_change", "output_entropy_change")
        )
        answers = inputs.select(metric="output_answer_logit_change", **about)
        logits = {"top, within": top["context"], "top, at the end": top["final"], "answer's": answers}
        panels[f"Output logits, {position}"] = partial(_draw_spreads, logits, "")
        entropies = {"within": entropy["context"], "at the end": entropy["final"]}
        panels[f"Output entropy, {position}"] = partial(_draw_spreads, entropies, "")
    return small_multiples(panels, STYLES, width)


def _draw_spreads(groups: Mapping[str, pd.DataFrame], what: str, axes: Axes) -> None:
    """Bars: quantiles of each group's values, its seeds side by side."""
    for place, rows in enumerate(groups.values()):
        for number, quantiles in enumerate(rows.sort_values("seed")["quantiles"]):
            x = place + 0.26 * (number - (len(rows) - 1) / 2)
            for label, (low, high, thick) in _BARS.items():
                ends = quantiles[low], quantiles[high]
                axes.vlines(x, *ends, color=STYLES["meta"].colour, linewidth=thick, alpha=0.55, label=label)
            axes.plot(x, quantiles[len(quantiles) // 2], "o", color=INK, markersize=2.6, label="median")
    axes.axhline(0, color=PAPER.colour, linewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups), rotation=90 if len(groups) > 8 else 0)
    axes.set(xlim=(-0.6, len(groups) - 0.4), xlabel=what, ylabel="change, nats")


def similarity(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 2, right: centred cosine with the text tokens before, by distance; thin: each seed's own."""
    looks = {"meta": ("meta-token", STYLES["meta"]), "text": ("text token (control)", STYLES["gpt2"])}
    found = inputs.select(metric="similarity_centred", marker="context")

    def draw(own: pd.DataFrame, axes: Axes) -> None:
        for subject, (label, style) in looks.items():
            rows = own[(own["subject"] == subject) & (own["layer"] == own["layer"].max())]
            by_seed = rows.groupby(["distance", "seed"])[["value", "low", "high"]].mean()
            ends = by_seed.groupby("distance").mean()
            axes.plot(ends.index, ends["value"], label=label, **line(style, markersize=style.size - 2))
            band(axes, ends.index, ends["low"], ends["high"], style)
            seeds = by_seed["value"].unstack()
            for seed in seeds if seeds.shape[1] > 1 else ():
                axes.plot(seeds.index, seeds[seed], color=style.colour, **_THIN)
        # Beyond the single distances each stands for all those above the one before it, up to itself.
        distances = sorted(own["distance"].dropna().unique())
        if singles := [here for here, after in pairwise(distances) if after > here + 1]:
            _mark(axes, singles[0] + 0.5, "each distance", "up to")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(ylim=(-1.05, 1.05), xlabel="tokens before it", ylabel="cosine, centred")

    models = sorted(
        found.groupby(["model", "position_embedding"]),
        key=lambda one: (one[0][0] != "meta", one[0][1] != "rope", one[0]),
    )
    return small_multiples({", ".join(model): partial(draw, own) for model, own in models}, STYLES, width)


def _mark(axes: Axes, x: float, left: str, right: str) -> None:
    """A line across the axis of x, and what holds on either side of it."""
    axes.axvline(x, color=PAPER.colour, linewidth=0.8, linestyle=(0, (2, 2)))
    for text, side, shift in ((left, "right", -3), (right, "left", 3)):
        axes.annotate(
            text, (x, 1), (shift, -1), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
            ha=side, va="top", fontsize=8, color=GREY,
        )  # fmt: skip


def heat_map(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 3, left: of one prompt, how like the final meta-token's each state is, by layer, position and seed."""

    def draw(rows: pd.DataFrame, axes: Axes) -> None:
        values = rows.pivot_table(index="layer", columns="position", values="value", dropna=False)
        layers = len(values)
        look: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1, "interpolation": "nearest"}
        image = axes.imshow(values.to_numpy(), aspect="auto", origin="lower", **look)
        bar = axes.figure.colorbar(image, ax=axes, ticks=[-1, -0.5, 0, 0.5, 1], pad=0.02)
        bar.ax.tick_params(length=0, labelsize=9)
        bar.set_label("cosine", fontsize=9)
        bar.outline.set_visible(False)
        metas = sorted(rows.loc[rows["subject"] == "meta", "position"].unique())
        axes.plot(
            metas, [layers - 0.3] * len(metas), linestyle="none", marker="v", markersize=5.5, clip_on=False,
            color=STYLES["meta"].colour, label="meta-token",
        )  # fmt: skip
        axes.grid(visible=False)
        axes.set(ylim=(-0.5, layers - 0.1), yticks=range(layers))
        axes.set(xlabel="position in the prompt", ylabel="blocks passed")

    found = inputs.select(metric="similarity_to_final_centred", model="meta")
    models = sorted(found.groupby(["position_embedding", "seed"]), key=lambda one: (one[0][0] != "rope", one[0]))
    title = "Similarity to the final meta-token, centred: {}, seed {:g}"
    panels = {title.format(*model): partial(draw, rows) for model, rows in models}
    return small_multiples(panels, STYLES, width, across=1)


def rate_distortion(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 3, right: distortion by rate (symlog, linear to 20 nats); thin: each seed's own, the mean of its fits."""
    # gpt2, twin and meta coincide: the thicker line and the larger marker lie below.
    places = {
        "meta": ("meta", "meta", "", replace(STYLES["meta"], size=8.0), 3.2),
        "meta, no pos": ("meta", "meta", "no_pos", Style("#a3478a", (7, 2), "v", 5.0), 1.6),
        "meta, text": ("meta", "text", "", Style("#d55e00", (1, 1.2), "o", 5.0, "none"), 1.6),
        "gpt2, text": ("gpt2", "text", "", Style("#4d4d4d", (1, 1.2), "s", 4.5, "none"), 1.2),
        "twin, text": ("twin", "text", "", Style("#0072b2", (4, 1.8), "D", 4.2, "none"), 1.2),
        "twin": ("twin", "meta", "", replace(STYLES["twin"], dashes=(2, 2.5), size=5.4), 2.2),
        "gpt2": ("gpt2", "meta", "", replace(STYLES["gpt2"], size=2.8), 1.2),
    }
    measured = inputs.select(analysis="rate_distortion", position_embedding="rope")

    def draw(split: str, axes: Axes) -> None:
        last = 0.0
        for label, (model, subject, intervention, style, thick) in places.items():
            about = {"model": model, "intervention": intervention, "split": split}
            rows = select(measured, **about, subject=["", subject])
            seeds = dict(_points_by_seed(rows))
            if not seeds:
                continue
            # At equal rates, as in the table: the points of one beta lie at other rates in each seed.
            shown = np.mean([rates for rates, _ in seeds.values()], axis=0)
            fits = distortion_curves(rows).values()
            means = [fmean(distortion_at(own, rate) for own in fits) for rate in shown]
            axes.plot(shown, means, label=label, **line(style, linewidth=thick))
            for rates, distortions in seeds.values() if len(seeds) > 1 else ():
                axes.plot(rates, distortions, color=style.colour, **_THIN)
            last = max(last, *(rates[-1] for rates, _ in seeds.values()))
        axes.set_xscale("symlog", linthresh=_LINEAR)
        axes.set_xticks([rate for rate in _RATES if rate <= max(last, _LINEAR)])
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=-0.25)  # so that what is nearly 0 is seen whole
        axes.xaxis.set_major_formatter("{x:g}")
        _mark(axes, _LINEAR, "linear", "log")
        axes.set(xlabel="rate, nats", ylabel="distortion, nats")

    titles = {"held_out": "Held-out prompts", "fit": "As in the paper: the 50 fitted"}
    return small_multiples({title: partial(draw, split) for split, title in titles.items()}, STYLES, width)


def _points_by_seed(rows: pd.DataFrame) -> Iterator[tuple[float, np.ndarray]]:
    """Of each seed the rates and the distortions, (2, betas), each the mean of its fits; of the betas that all have."""
    means = rows[rows["metric"] != "answer_entropy"].groupby(["beta", "seed", "metric"])["value"].mean()
    table = means.unstack(["seed", "metric"]).dropna().sort_index(ascending=False)
    for seed in sorted(set(rows["seed"])) if len(table) else ():
        yield seed, table[seed][["rate", "distortion"]].to_numpy().T
