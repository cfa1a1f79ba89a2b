"""The page of a run of `metatokens shrink`: one self-contained HTML file."""

import base64
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from metatokens.evaluation.intervals import clustered_interval, student_interval
from metatokens.files import write_whole
from metatokens.looking.style import FURTHER, STYLES, line, page_templates, png, small_multiples
from metatokens.model.configuration import TEXT_SINKS
from metatokens.records import Result, unpack_hits
from metatokens.shrink.choosing import Head, HeadLoss
from metatokens.shrink.cost import Cost
from metatokens.shrink.lookups import CHAT, PASSAGE, TRAINED, USERS
from metatokens.shrink.measuring import BASE, EXCERPT, FACTS, REPLY, SHRUNK, TRAINED_FULL

LABELS = {
    PASSAGE: "a passage of the text, repeated",
    TRAINED: "trained forms, other names and words",
    "statement": "other statements, asked for in their words",
    "question": "other statements, asked for in other words",
    "keys": "keys and values in another form",
    "several": "two facts together",
    CHAT: "questions in a chat",
    USERS: "your questions",
}
_NOT_NEW = {TRAINED, PASSAGE, USERS}
_ONE_A_TEXT = {PASSAGE, USERS}


@dataclass(frozen=True)
class Answered:
    """How a model answers some look-ups: for each text, whether each question is answered."""

    texts: Sequence[Sequence[bool]]

    @property
    def n(self) -> int:
        """The number of look-ups."""
        return sum(map(len, self.texts))

    @property
    def percent(self) -> float:
        """The share that is answered, in %."""
        return 100 * sum(map(sum, self.texts)) / self.n

    def __str__(self) -> str:
        if not self.texts:
            return "-"
        low, high = clustered_interval(self.texts)
        return f"{self.percent:.0f} ({100 * low:.0f} to {100 * high:.0f})"


@dataclass(frozen=True)
class Findings:
    """What the page shows.

    Attributes:
        results: of all models.
        losses: what answers cost if one head forgets; empty if the heads were given.
        costs: of the caches.
        window: the last positions that a head of the shrunk model keeps.
        full_heads: of the shrunk model, which keep everything.
        landmarks: its rule for landmarks.
        out: the run's folder.
        base: the model that was shrunk.
        length: tokens; of a text of this length the cache keeps the share that was asked for.
        steps: of the training.
    """

    results: Sequence[Result]
    losses: Sequence[HeadLoss]
    costs: Sequence[Cost]
    window: int
    full_heads: Sequence[Head]
    landmarks: str | None
    out: Path
    base: str
    length: int
    steps: int

    @property
    def summary(self) -> str:
        """What an engineer asks first."""
        length = self.usual_length
        share_kept = self.share_kept(SHRUNK, length)
        answered = self.new(SHRUNK, length).percent
        sentences = [
            f"In texts of {length:,} tokens the cache keeps {100 * share_kept:.1f} % of the keys and values.",
            f"The model answers {answered:.0f} % of the look-ups whose form it was not trained on.",
        ]
        # The base does not know the form of the answers: a difference from it would be that of the training.
        if TRAINED_FULL in self.models:
            reference = self.new(TRAINED_FULL, length).percent
            sentences.append(f"The {TRAINED_FULL}: {reference:.0f} %.")
            if EXCERPT in self.predicted:
                cost, low, high = self.loss_difference(EXCERPT, SHRUNK, TRAINED_FULL)
                sentences.append(
                    f"Prose costs {cost:+.3f} nats a token more ({low:+.3f} to {high:+.3f})."
                )
        return " ".join(sentences)

    @property
    def chosen(self) -> str:
        """A line with the heads that keep all text, and what answers cost without each if that was measured."""
        losses = {loss.head: loss.loss for loss in self.losses}
        if not losses:
            return f"full heads: {_names(self.full_heads) or 'none'}"
        costs = ", ".join(f"{name_of_head(head)} ({losses[head]:.2f})" for head in self.full_heads)
        return (
            f"full heads, with the nats that an answer costs if one alone forgets: {costs}; {losses[None]:.2f} if none "
            "does"
        )

    @property
    def reference(self) -> str | None:
        """The model to compare with: the full cache, trained alike, or else as it was; None if neither is measured."""
        return next((name for name in (TRAINED_FULL, BASE) if name in self.models), None)

    @property
    def usual_length(self) -> int:
        """The longest measured length up to `length`; the shortest of all if there is none."""
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
        """The kinds of look-ups, in the order of LABELS."""
        measured = {result.task for result in self._lookups()}
        return [kind for kind in LABELS if kind in measured]

    def answered(self, model: str, kinds: Sequence[str], length: int | None) -> Answered:
        """How a model answers look-ups of some kinds."""
        texts: list[Sequence[bool]] = []
        for result in self._lookups():
            if result.model == model and result.task in kinds and result.length == length:
                assert result.hits is not None
                hits = unpack_hits(result.hits, result.n).tolist()
                of_a_text = 1 if result.task in _ONE_A_TEXT else FACTS
                texts += [hits[i : i + of_a_text] for i in range(0, result.n, of_a_text)]
        return Answered(texts)

    def new(self, model: str, length: int) -> Answered:
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

    def loss_difference(self, kind: str, model: str, reference: str) -> tuple[float, float, float]:
        """Nats a token by which a model predicts excerpts or replies worse than another, with a 95 % interval."""
        return student_interval(self._losses(kind, model) - self._losses(kind, reference))

    def mean_loss(self, kind: str, model: str) -> float:
        """Nats a token of excerpts or replies."""
        return float(self._losses(kind, model).mean())

    @property
    def predicted(self) -> list[str]:
        """What perplexities are of: excerpts, and replies if there are several."""
        return [kind for kind in (EXCERPT, REPLY) if len(self._losses(kind, SHRUNK)) > 1]

    def _losses(self, kind: str, model: str) -> np.ndarray:
        perplexities = [
            result.value
            for result in self.results
            if result.model == model
            and result.metric == "perplexity"
            and str(result.text).split()[0] == kind
        ]
        return np.log(np.array(perplexities, float))

    def _lookups(self) -> list[Result]:
        return [result for result in self.results if result.metric == "exact_match"]


def name_of_head(head: Head) -> str:
    """The name of a head, as `--full-heads` takes it."""
    return ".".join(map(str, head))


def _names(heads: Sequence[Head]) -> str:
    return ", ".join(map(name_of_head, heads))


def write_page(findings: Findings, file: Path) -> None:
    """Write the page of findings."""
    picture = base64.b64encode(_picture(findings)).decode()
    template = page_templates("metatokens.shrink").get_template("page.html.j2")
    text = template.render(
        findings=findings,
        full_heads=_names(findings.full_heads),
        name_of_head=name_of_head,
        quoted_folder=shlex.quote(str(findings.out / "model")),
        labels=LABELS,
        picture=picture,
        shrunk=SHRUNK,
        sinks=TEXT_SINKS,
    )
    write_whole(file, text.encode())


def _picture(findings: Findings) -> bytes:
    """What is found against what is kept, and against the length of the text."""
    lengths, models = findings.lengths, findings.models
    styles = dict(zip(models, [*STYLES.values(), *FURTHER], strict=False))
    answered = {
        model: [findings.new(model, length).percent for length in lengths] for model in models
    }

    def by_length(axes: Axes) -> None:
        for model in models:
            axes.plot(lengths, answered[model], label=model, **line(styles[model]))
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set(xlabel="tokens of the text", ylabel="found, %", ylim=(-3, 103))

    def by_share(axes: Axes) -> None:
        for model in models:
            shares_kept = [100 * findings.share_kept(model, length) for length in lengths]
            points = line(styles[model], linestyle="none")
            axes.plot(shares_kept, answered[model], label=model, **points)
        axes.set(xlabel="keys and values kept, %", ylabel="found, %", ylim=(-3, 103))

    panels = {"Found, by the length of the text": by_length, "Found, by what is kept": by_share}
    return png(small_multiples(panels, models))
