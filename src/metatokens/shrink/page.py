"""The page of a run of `metatokens shrink`: one self-contained HTML file."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes

from metatokens.evaluation.intervals import normal_interval, wilson_interval
from metatokens.files import write_whole
from metatokens.looking.style import FURTHER, STYLES, Style, line, png, small_multiples
from metatokens.records import Result
from metatokens.shrink.choosing import BlockLoss
from metatokens.shrink.cost import Cost
from metatokens.shrink.measuring import EXCERPT, REPLY

NAMES = {
    "passage": "a passage of the text, repeated",
    "trained form": "trained forms, other names and words",
    "statement": "other statements, asked for in their words",
    "question": "other statements, asked for in other words",
    "keys": "keys and values in another form",
    "several": "two facts together",
    "chat": "questions in a chat",
    "own": "your questions",
}
_NOT_NEW = {"trained form", "passage", "own"}


@dataclass(frozen=True)
class Findings:
    """What the page shows.

    Attributes:
        results: of all models.
        losses: what answers cost if one block forgets; empty if the blocks were given.
        costs: of the caches.
        cache: the window and the full layers of the shrunk model.
        out: the run's folder.
        base: the model that was shrunk.
        length: tokens; of a text of this length the cache keeps the share that was asked for.
    """

    results: Sequence[Result]
    losses: Sequence[BlockLoss]
    costs: Sequence[Cost]
    cache: dict[str, Any]
    out: Path
    base: str
    length: int

    @property
    def usual_length(self) -> int:
        """The longest measured length up to that; the shortest of all if there is none."""
        return max([length for length in self.lengths if length <= self.length] or self.lengths[:1])

    @property
    def models(self) -> list[str]:
        """The names of the models, in order."""
        return list(dict.fromkeys(result.model for result in self.results))

    @property
    def lengths(self) -> list[int]:
        """The lengths of the texts with look-ups."""
        return sorted({result.length for result in self._lookups() if result.length})

    @property
    def kinds(self) -> list[str]:
        """The kinds of look-ups, in the order of NAMES."""
        measured = {result.task for result in self._lookups()}
        return [kind for kind in NAMES if kind in measured]

    def answered(self, model: str, kinds: Sequence[str], length: int | None) -> tuple[int, int]:
        """How many look-ups of some kinds a model answers, and of how many."""
        chosen = [
            result
            for result in self._lookups()
            if result.model == model and result.task in kinds and result.length == length
        ]
        return sum(round(_value(result) * result.n) for result in chosen), sum(
            result.n for result in chosen
        )

    def new(self, model: str, length: int) -> tuple[int, int]:
        """The same, of all kinds whose forms are not trained."""
        return self.answered(model, [kind for kind in self.kinds if kind not in _NOT_NEW], length)

    def share_kept(self, model: str, length: int) -> float:
        """The share of keys and values of such a text that a model's cache keeps."""
        shares = [
            1.0 if result.kv_kept is None else result.kv_kept
            for result in self._lookups()
            if result.model == model and result.length == length
        ]
        return float(np.mean(shares))

    def loss_difference(
        self, kind: str, model: str, reference: str
    ) -> tuple[float, float, float] | None:
        """Nats a token by which a model predicts excerpts or replies worse than another, with a 95 % interval."""
        losses, references = self._losses(kind, model), self._losses(kind, reference)
        if not losses or len(losses) != len(references):
            return None
        differences = np.array(losses) - np.array(references)
        mean = float(differences.mean())
        error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
        return mean, *normal_interval(mean, error)

    def mean_loss(self, kind: str, model: str) -> float:
        """Nats a token of excerpts or replies."""
        return float(np.mean(self._losses(kind, model)))

    @property
    def predicted(self) -> list[str]:
        """What perplexities are of: excerpts, and replies if there are any."""
        return [kind for kind in (EXCERPT, REPLY) if self._losses(kind, self.models[0])]

    def _losses(self, kind: str, model: str) -> list[float]:
        return [
            math.log(_value(result))
            for result in self.results
            if result.model == model
            and result.metric == "perplexity"
            and str(result.text).startswith(kind)
        ]

    def _lookups(self) -> list[Result]:
        return [result for result in self.results if result.metric == "exact_match"]


def _value(result: Result) -> float:
    assert result.value is not None
    return result.value


def write_page(findings: Findings, file: Path) -> None:
    """Write the page of findings."""
    environment = Environment(
        loader=PackageLoader("metatokens.shrink", "."),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    picture = base64.b64encode(_picture(findings)).decode()
    text = environment.get_template("page.html.j2").render(
        findings=findings, names=NAMES, picture=picture, share=_share, interval=_interval
    )
    write_whole(file, text.encode())


def _interval(answered: tuple[int, int]) -> str:
    """A share in % with Wilson's interval."""
    hits, n = answered
    if not n:
        return "-"
    low, high = wilson_interval(hits, n)
    return f"{100 * hits / n:.0f} ({100 * low:.0f} to {100 * high:.0f})"


def _picture(findings: Findings) -> bytes:
    """What is found against what is kept, and against the length of the text."""
    styles = dict(zip(findings.models, [*STYLES.values(), *FURTHER], strict=False))

    def by_length(axes: Axes) -> None:
        for model in findings.models:
            shares = [_share(findings.new(model, length)) for length in findings.lengths]
            axes.plot(findings.lengths, shares, label=model, **line(styles[model]))
        axes.set_xscale("log", base=2)
        axes.set_xticks(findings.lengths, [f"{length:,}" for length in findings.lengths])
        axes.set_xlabel("tokens of the text")
        axes.set_ylabel("found, %")
        axes.set_ylim(-3, 103)

    def by_share(axes: Axes) -> None:
        for model in findings.models:
            _draw_found_against_kept(axes, findings, model, styles[model])
        axes.set_xlabel("keys and values kept, %")
        axes.set_ylabel("found, %")
        axes.set_ylim(-3, 103)

    panels = {"Found, by the length of the text": by_length, "Found, by what is kept": by_share}
    return png(small_multiples(panels, findings.models))


def _draw_found_against_kept(axes: Axes, findings: Findings, model: str, style: Style) -> None:
    """A point for each length of the texts."""
    shares_kept = [100 * findings.share_kept(model, length) for length in findings.lengths]
    shares = [_share(findings.new(model, length)) for length in findings.lengths]
    axes.plot(shares_kept, shares, label=model, **line(style, linestyle="none"))


def _share(answered: tuple[int, int]) -> float:
    """In %."""
    hits, n = answered
    return 100 * hits / n if n else math.nan
