"""The rule of the verdicts, a case for each of its branches; what is expected is written out by hand."""

from typing import Any

import pytest

from metatokens.evaluation.intervals import wilson_interval
from metatokens.report.estimates import Difference, Estimate
from metatokens.report.grid import Cell
from metatokens.report.verdicts import Claim, Comparison, above, between, mean_gap


def gap(low: float, high: float, *by_seed: float, is_informative: bool = True) -> Comparison:
    return Comparison("c", Difference((low + high) / 2, low, high), by_seed, is_informative)


UP, DOWN, OPEN, SMALL, NOT_RUN = gap(0.1, 0.3), gap(-0.3, -0.1), gap(-0.1, 0.2), gap(-0.02, 0.03), Comparison("c")
NO_ROOM = gap(0.1, 0.3, is_informative=False)
SPLIT = gap(-0.02, 0.03, 0.16, -0.15)  # a small difference together, of seeds that differ widely


def claim(*comparisons: Comparison, **fields: Any) -> Claim:
    return Claim("it is so", "somewhere", "section", comparisons, **fields)


@pytest.mark.parametrize(
    ("comparisons", "verdict"),
    [
        ((UP, UP, UP), "holds"),
        ((UP, UP, OPEN, OPEN), "holds"),
        ((UP, OPEN, OPEN), "cannot be told at this scale"),
        ((*[UP] * 19, DOWN), "holds"),
        ((*[UP] * 18, DOWN), "cannot be told at this scale"),
        ((*[UP] * 38, DOWN, DOWN), "holds"),
        ((UP, DOWN, DOWN), "does not hold"),
        ((UP, DOWN, OPEN), "cannot be told at this scale"),
        ((OPEN, OPEN, DOWN), "does not hold"),
        ((SMALL, SMALL, OPEN), "does not hold"),
        ((SMALL, SMALL, OPEN, OPEN), "cannot be told at this scale"),
        ((UP, SMALL, SMALL), "does not hold"),
        ((SPLIT, SPLIT, SPLIT), "cannot be told at this scale"),
        ((SMALL, SMALL, SPLIT), "does not hold"),
        ((UP, UP), "holds"),
        ((UP,), "holds"),
        ((UP, UP, NOT_RUN), "cannot be told at this scale"),
        ((UP, UP, NO_ROOM), "cannot be told at this scale"),
        ((UP, UP, UP, NOT_RUN, NO_ROOM), "holds"),
        ((NO_ROOM, NO_ROOM, NO_ROOM), "cannot be told at this scale"),
        ((NOT_RUN,), "cannot be told at this scale"),
        ((), "cannot be told at this scale"),
    ],
)
def test_a_claim(comparisons: tuple[Comparison, ...], verdict: str) -> None:
    assert claim(*comparisons).verdict == verdict


@pytest.mark.parametrize(
    ("comparisons", "verdict"),
    [
        ((UP, UP, UP), "holds"),
        ((UP, UP, UP, NO_ROOM), "holds"),
        ((UP, UP, UP, OPEN), "cannot be told at this scale"),
        ((UP, UP, UP, NOT_RUN), "cannot be told at this scale"),
        ((*[UP] * 99, DOWN), "does not hold"),
        ((*[UP] * 99, SMALL), "does not hold"),
        ((UP, DOWN), "does not hold"),
        ((NOT_RUN, NOT_RUN), "cannot be told at this scale"),
        ((DOWN, NOT_RUN, NOT_RUN, NOT_RUN), "does not hold"),
        ((SMALL, NO_ROOM, NO_ROOM), "does not hold"),
    ],
)
def test_a_claim_on_all_cases(comparisons: tuple[Comparison, ...], verdict: str) -> None:
    assert claim(*comparisons, is_universal=True).verdict == verdict


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (gap(-0.04, 0.02), "holds"),
        (gap(-0.09, 0.02), "cannot be told at this scale"),
        (gap(-0.20, -0.06), "does not hold"),
        (gap(-0.04, -0.01), "holds"),
    ],
)
def test_a_claim_that_nothing_is_lost(one: Comparison, verdict: str) -> None:
    assert claim(one, margin=-0.05, negligible=-0.05).verdict == verdict


def test_every_seed_has_to_agree() -> None:
    assert gap(0.1, 0.3, 0.2, 0.1, 0.3).side(0.0) == 1
    assert gap(0.1, 0.3, 0.4, 0.4, -0.1).side(0.0) == 0
    assert gap(-0.3, -0.1, -0.2, -0.1, -0.4).side(0.0) == -1
    assert gap(-0.3, -0.1, -0.2, 0.1, -0.4).side(0.0) == 0
    assert gap(-0.04, 0.1, 0.1, -0.06).side(-0.05) == 0


def cell(*hits: int, n: int = 100) -> Cell:
    return Cell({seed: Estimate(one / n, *wilson_interval(one, n), n, None) for seed, one in enumerate(hits)})


def test_seeds_that_one_side_lacks_are_left_out() -> None:
    only = Cell({1: Estimate(0.5, *wilson_interval(50, 100), 100, None)})
    compared = between("c", cell(90, 80, 10), only)
    assert compared.gap is not None
    assert compared.gap.value == pytest.approx(0.3)
    assert compared.by_seed == ()
    assert compared.figures == "80.0 v 50.0"
    assert between("c", cell(90), only).gap is None


def test_seeds_of_the_same_prompts_are_averaged_and_kept_apart() -> None:
    compared = between("c", cell(90, 80, 70), cell(10, 20, 75))
    low, high = (sum(ends) / 3 for ends in zip(*(wilson_interval(hits, 100) for hits in (90, 80, 70)), strict=True))
    base_low, base_high = (
        sum(ends) / 3 for ends in zip(*(wilson_interval(hits, 100) for hits in (10, 20, 75)), strict=True)
    )
    assert compared.gap is not None
    assert compared.gap.value == pytest.approx(0.45)
    assert compared.gap.low == pytest.approx(0.45 - ((0.8 - low) ** 2 + (base_high - 0.35) ** 2) ** 0.5)
    assert compared.gap.high == pytest.approx(0.45 + ((high - 0.8) ** 2 + (0.35 - base_low) ** 2) ** 0.5)
    assert compared.by_seed == pytest.approx((0.8, 0.6, -0.05))
    assert compared.side(0.0) == 0


@pytest.mark.parametrize(
    ("a", "b", "floor", "is_match", "is_informative"),
    [
        (12, 10, 0.1, False, False),
        (12, 10, 0.1, True, False),
        (60, 10, 0.1, False, True),
        (10, 60, 0.1, False, True),
        (100, 99, 0.1, False, False),
        (100, 99, 0.1, True, True),
        (100, 90, 0.1, False, True),
        (1, 0, 0.0, False, False),
        (60, 55, 0.52, False, False),
        (80, 75, 0.52, False, True),
    ],
)
def test_two_figures_at_guessing_or_at_the_top_tell_nothing(
    a: int, b: int, floor: float, is_match: bool, is_informative: bool
) -> None:
    assert between("c", cell(a), cell(b), floor=floor, is_match=is_match).is_informative == is_informative


def test_a_figure_is_compared_with_a_bound() -> None:
    low, high = wilson_interval(190, 200)
    compared = above("c", cell(190, n=200), 0.8)
    assert compared.gap == Difference(pytest.approx(0.15), pytest.approx(low - 0.8), pytest.approx(high - 0.8))
    assert above("c", None, 0.8).gap is None
    assert above("c", Cell({}), 0.8).gap is None


def test_a_mean_of_differences_has_students_interval() -> None:
    found = mean_gap([1.0, 2.0, 3.0])  # s = 1, t(2) = 4.303
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx(
        (2.0, 2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4
    )
    assert mean_gap([1.0]) is None


def test_the_figures_say_for_against_and_what_is_missing() -> None:
    assert claim(UP, UP, DOWN, NOT_RUN, NO_ROOM).counts() == "2 : 1 of 3, 1 not run, one seed"
    assert claim(gap(0.1, 0.3, 0.1, 0.3), SMALL, DOWN).counts() == "1 : 1 of 3, 1 short, 2 of one seed"
    assert claim(UP, UP, DOWN).tally() == "2 for, 1 against of 3, one seed; median +20.0 points"
    assert list(map(claim().says, (UP, DOWN, OPEN, SMALL, NO_ROOM, NOT_RUN))) == [
        "for", "against", "open", "short", "uninformative", "\u2026"
    ]  # fmt: skip
    assert claim(NOT_RUN).tally() == "\u2026"
    assert claim(UP).middle() == "+20.0 (+10.0 to +30.0) points"
    assert claim(gap(-0.1, 0.3), unit="percent").middle() == "+10.5 (\u22129.5 to +35.0)\u00a0%"
    assert claim(gap(-1.0, 3.0), unit="nats").middle() == "+1 (\u22121 to +3) nats"
