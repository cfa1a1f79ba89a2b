"""What the paper claims of cost: data until a task is learned, perplexity, time at inference."""

import math
from collections.abc import Sequence
from operator import attrgetter
from statistics import fmean, variance
from typing import Any

from scipy.stats import t as student

from metatokens.records import Timing as SpeedLine
from metatokens.report.estimates import Difference
from metatokens.report.grid import Grid
from metatokens.report.inputs import RecallPoint
from metatokens.report.paper import paper_table
from metatokens.report.verdicts import FEWEST, Claim, Comparison
from metatokens.report.wording import compact

LEARNED = 0.9  # of the test prompts
TEXTS = {"held_out": "held-out text", "book": "a book"}
PER_CENT = math.log(1.01)
THEIR_DEVICE = "A100"  # of Table 3


def claims(grid: Grid) -> list[Claim]:
    """The paper's claims on cost."""
    return [_data_efficiency(grid, "gpt2", "section 4.3"), *_speed(grid)]


def controls(grid: Grid) -> list[Claim]:
    """What the paper has no control for."""
    texts = tuple(_perplexities(grid, text, "") for text in TEXTS)
    compute = tuple(_perplexities(grid, text, "equal-compute") for text in TEXTS)
    no_worse: dict[str, Any] = {"margin": -PER_CENT, "negligible": -PER_CENT, "unit": "percent"}
    return [
        *_slowdowns(grid, "meta, inserting", "meta", "gathered as ours", "beyond the paper"),
        _data_efficiency(grid, "twin", "control"),
        Claim("Perplexity no worse than gpt2's (1 %) per text token", "control", "perplexity", texts, **no_worse),
        Claim("Perplexity no worse than gpt2's (1 %) per compute", "control", "perplexity", compute, **no_worse),
    ]


def tokens_to_learn(points: Sequence[RecallPoint]) -> int | None:
    """Text tokens seen until the first point from which accuracy stays at 90 % or more; None where there is none."""
    reached = None
    for point in points:
        if point.exact_match < LEARNED:
            reached = None
        elif reached is None:
            reached = point.text_tokens
    return reached


def _data_efficiency(grid: Grid, other: str, source: str) -> Claim:
    """Whether every seed of meta learns before every seed of the other model: one chance in 20 with three of each."""
    curves = grid.recall()
    ours, theirs = (
        [tokens_to_learn(points) for points in curves.get((model, "rope"), {}).values()] for model in ("meta", other)
    )
    comparison = Comparison("text tokens to 90 %")
    if ours and theirs:
        a, b = ([math.inf if reached is None else reached for reached in side] for side in (ours, theirs))
        before = float((max(a) < min(b)) - (max(b) < min(a)))
        is_told = len(a) >= FEWEST and len(b) >= FEWEST
        comparison = Comparison(comparison.label, Difference(before, before, before), (), is_told)
    return Claim(
        f"Data-efficient: fewer tokens of fine-tuning than {other} to 90 % recall",
        source,
        "learning",
        (comparison,),
        negligible=0.0,
        unit="plain",
        decisive=f"text tokens, by seed: {_by_seed(ours)} v {_by_seed(theirs)}" if ours and theirs else "",
    )


def _by_seed(reached: Sequence[int | None]) -> str:
    return " / ".join("not reached" if one is None else compact(one) for one in reached)


def _perplexities(grid: Grid, text: str, note: str) -> Comparison:
    """ln of gpt2's perplexity over meta's, of the text alone; the interval is of the luck of training.

    The spread between seeds is taken to be alike in all models that have several, so that one of a single seed can be
    compared too.
    """
    label = TEXTS[text] + (f", {note}" if note else "")

    def logs(model: str, note: str = "") -> list[float]:
        cell = grid.perplexity(note, model=model, position_embedding="rope", condition="none", text=text)
        return [math.log(one.value) for one in cell.seeds.values() if one.value] if cell else []

    ours, theirs = logs("meta"), logs("gpt2", note)
    if not ours or not theirs:
        return Comparison(label)
    gap = fmean(theirs) - fmean(ours)
    groups = [group for group in map(logs, ("gpt2", "twin", "meta")) if len(group) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return Comparison(label, Difference(gap, gap, gap), is_informative=False)
    spread = sum(variance(group) * (len(group) - 1) for group in groups) / freedom
    reach = float(student.ppf(0.975, freedom)) * math.sqrt(spread * (1 / len(ours) + 1 / len(theirs)))
    return Comparison(label, Difference(gap, gap - reach, gap + reach))


def _speed(grid: Grid) -> list[Claim]:
    gathered = ratios(grid, "decode", "dense, inserting", "meta, inserting")
    return [
        *_slowdowns(grid, "dense, inserting", "dense", "dense as the paper's", "Table 3"),
        Claim(
            "A sparse implementation reduces the overhead",
            "section 4.5",
            "speed",
            tuple(
                Comparison(f"batch {line.batch}", Difference(line.ratio - 1, line.ratio_low - 1, line.ratio_high - 1))
                for line in gathered
            )
            or (Comparison("dense over gathered"),),
            negligible=0.0,
            unit="times",
            decisive=f"dense over gathered: {_ratios(gathered)}" if gathered else "",
        ),
    ]


def _slowdowns(grid: Grid, decoding: str, reading: str, code: str, source: str) -> list[Claim]:
    """Whether a contestant is slower than gpt2 by no more than the paper's model; one exception refutes it.

    How much slower depends on the machine: what another than the paper's measured is shown, and settles nothing.
    """
    times, claims = paper_table(3), []
    slowdown = times.value(metric="slowdown", model="meta") or 0.0
    first = [times.value(metric="first_token_ms", model=model) or 1.0 for model in ("meta", "gpt2")]
    for text, benchmark, contestant, bound in (
        ("decoding", "decode", decoding, slowdown),
        ("the first token", "prefill", reading, first[0] / first[1]),
    ):
        lines = ratios(grid, benchmark, contestant, "gpt2")
        claims.append(
            Claim(
                f"Meta-tokens slow {text} by {bound:.2f} at most, {code}",
                source,
                "speed",
                tuple(
                    Comparison(
                        f"{text}, batch {line.batch}",
                        Difference(bound - line.ratio, bound - line.ratio_high, bound - line.ratio_low),
                        is_informative=THEIR_DEVICE in line.device,
                        figures=f"{line.ratio:.3f} v {bound:.3f}",
                    )
                    for line in lines
                )
                or (Comparison(text),),
                negligible=0.0,
                is_universal=True,
                unit="times",
                decisive=f"{_ratios(lines)}, on {lines[0].device}; the bound is an {THEIR_DEVICE}'s" if lines else "",
            )
        )
    return claims


def compared(speeds: Sequence[SpeedLine]) -> list[SpeedLine]:
    """The lines on decoding and reading, ratios and limits as the paper's are taken to be.

    Decoding is per text token: with meta-tokens as many positions hold the fewer. The first token is after as many
    positions; per text token no model with k = 0.1 could keep to the paper's bound of 1.02.
    """
    about = attrgetter("benchmark", "shape", "length", "batch")
    texts = {(about(line), line.model): line.text_tokens for line in speeds}
    found = [line for line in speeds if line.benchmark == "prefill"]
    for line in speeds:
        if line.benchmark == "decode" and (theirs := texts.get((about(line), line.against))):
            more = theirs / line.text_tokens
            scaled = {name: more * getattr(line, name) for name in ("ratio", "ratio_low", "ratio_high", "limit")}
            found.append(line.model_copy(update=scaled))
    return found


def ratios(grid: Grid, benchmark: str, model: str, against: str) -> list[SpeedLine]:
    """The benchmark's lines on two contestants of the paper's size."""
    return [
        line
        for line in compared(grid.inputs.speeds)
        if (line.benchmark, line.model, line.against, line.shape) == (benchmark, model, against, "paper")
    ]


def _ratios(lines: Sequence[SpeedLine]) -> str:
    return ", ".join(f"{line.ratio:.2f} (batch {line.batch})" for line in lines)
