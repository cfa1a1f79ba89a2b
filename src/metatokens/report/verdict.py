"""When a claim holds: the rule that docs/paper_map.md wrote down before the run, under "Verdicts", and nothing else."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from metatokens.report.claims import Claim
from metatokens.report.compare import FEWEST, Comparison, compare
from metatokens.report.frame import Inputs

Verdict = Literal["holds", "does not hold", "cannot be told at this scale"]

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
        """Those of them that leave room for a difference."""
        return [one for one in self.run if one.is_informative]

    def count(self, side: str) -> int:
        """How many informative comparisons say this: see `says`."""
        return sum(self.says(one) == side for one in self.informative)

    def says(self, one: Comparison) -> Literal["for", "against", "short", "open"]:
        """What an informative comparison says: short is one that is shown to be no gain to speak of."""
        side = one.side(self.claim.margin)
        is_short = side == 0 and one.side(max(self.claim.margin, self.claim.negligible)) < 0
        return "for" if side > 0 else "against" if side < 0 else "short" if is_short else "open"

    @cached_property
    def verdict(self) -> Verdict:
        """What the comparisons say of the claim."""
        informative, for_it, against = len(self.informative), self.count("for"), self.count("against")
        short = against + self.count("short")
        if self.claim.universal and short:
            return "does not hold"
        if informative < min(FEWEST, len(self.comparisons)) or informative == 0:
            return CANNOT_BE_TOLD
        if self.claim.universal:
            is_complete = for_it == informative and len(self.run) == len(self.comparisons)
            return "holds" if is_complete else CANNOT_BE_TOLD
        if 2 * for_it >= informative and against <= BY_LUCK * informative:
            return "holds"
        if against > for_it or 2 * short > informative:
            return "does not hold"
        return CANNOT_BE_TOLD

    @property
    def why(self) -> str:
        """Why it cannot be told, where it cannot."""
        if self.verdict != CANNOT_BE_TOLD:
            return ""
        few = len(self.informative) < min(FEWEST, len(self.comparisons)) or not self.informative
        return "too few comparisons leave room for a difference" if few else "the comparisons are divided, or open"


def judge(inputs: Inputs, claim: Claim) -> Judged:
    """The claim with its comparisons."""
    return Judged(claim, tuple(one for versus in claim.versus for one in compare(inputs, versus)))
