"""The rule by which a claim holds, does not hold, holds in part or cannot be told: docs/paper_map.md, "Verdicts"."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from metatokens.paper.report.claims import Claim
from metatokens.paper.report.compare import FEWEST, Comparison, compare
from metatokens.paper.report.frame import Inputs

Verdict = Literal["holds", "does not hold", "holds in part", "cannot be told at this scale"]

CANNOT_BE_TOLD: Verdict = "cannot be told at this scale"
BY_LUCK = 1 / 20  # of the informative comparisons, those against a claim that holds nevertheless


@dataclass(frozen=True)
class Judged:
    """A claim, and the comparisons that it rests on."""

    claim: Claim
    comparisons: tuple[Comparison, ...]

    @cached_property
    def run(self) -> list[Comparison]:
        """The comparisons that were run."""
        return [one for one in self.comparisons if one.gap is not None]

    @cached_property
    def informative(self) -> list[Comparison]:
        """Those of them that leave room for a difference, and losses below the floor."""
        return [one for one in self.run if self.is_informative(one)]

    def is_informative(self, one: Comparison) -> bool:
        """Whether a comparison tells something."""
        return one.is_informative and (not one.is_low or one.side(self.claim.margin) < 0)

    def count(self, side: str) -> int:
        """How many informative comparisons say this: see `says`."""
        return sum(self.says(one) == side for one in self.informative)

    def says(self, one: Comparison) -> Literal["for", "against", "short", "open"]:
        """What an informative comparison says: short is one that is shown to be no gain to speak of."""
        side = one.side(self.claim.margin)
        is_short = side == 0 and one.side(max(self.claim.margin, self.claim.negligible)) < 0
        return "for" if side > 0 else "against" if side < 0 else "short" if is_short else "open"

    @cached_property
    def by_task(self) -> dict[str, Verdict]:
        """What the comparisons of each task say by themselves; of a claim on all cases, and on one task, nothing."""
        tasks = dict.fromkeys(one.task for one in self.comparisons)
        if self.claim.universal or len(tasks) < 2:
            return {}
        return {task: self._of([one for one in self.comparisons if one.task == task]) for task in tasks}

    @cached_property
    def verdict(self) -> Verdict:
        """What the comparisons say of the claim."""
        if self.claim.universal:
            return self._of_all_cases()
        if not self.by_task:
            return self._of(self.comparisons)
        told = [*self.by_task.values()]
        if "holds in part" in told or {"holds", "does not hold"} <= {*told}:
            return "holds in part"
        most: Verdict = max(("holds", "does not hold"), key=told.count)
        return most if told.count(most) >= max(2, len(told) / 2) else CANNOT_BE_TOLD

    def _of(self, comparisons: Sequence[Comparison]) -> Verdict:
        """What they say of the claim, as if there were no others."""
        said = [self.says(one) for one in comparisons if one.gap is not None and self.is_informative(one)]
        for_it, against = said.count("for"), said.count("against")
        if not _are_enough(said, comparisons):
            return CANNOT_BE_TOLD
        if 2 * for_it >= len(said) and against <= BY_LUCK * len(said):
            return "holds"
        if min(for_it, against) >= FEWEST:
            return "holds in part"
        if against > for_it or 2 * (against + said.count("short")) > len(said):
            return "does not hold"
        return CANNOT_BE_TOLD

    def _of_all_cases(self) -> Verdict:
        if self.count("short") + self.count("against"):
            return "does not hold"
        is_complete = self.count("for") == len(self.informative) and len(self.run) == len(self.comparisons)
        return "holds" if is_complete and _are_enough(self.informative, self.comparisons) else CANNOT_BE_TOLD

    @property
    def why(self) -> str:
        """Why it cannot be told, where it cannot."""
        if self.verdict != CANNOT_BE_TOLD:
            return ""
        is_enough = _are_enough(self.informative, self.comparisons)
        few = "too few comparisons leave room for a difference"
        return "the comparisons are divided, or open" if is_enough else few

    @cached_property
    def few_seeds(self) -> dict[int, int]:
        """Of how many informative comparisons rest on one training of each side, and on two."""
        counts = [one.seeds for one in self.informative]
        return {seeds: counts.count(seeds) for seeds in range(1, FEWEST) if seeds in counts}


def _are_enough(informative: Sequence[object], comparisons: Sequence[Comparison]) -> bool:
    return len(informative) >= max(1, min(FEWEST, len(comparisons)))


def judge(inputs: Inputs, claim: Claim) -> Judged:
    """The claim with its comparisons."""
    return Judged(claim, tuple(one for versus in claim.versus for one in compare(inputs, versus)))
