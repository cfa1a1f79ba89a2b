"""The rule of the verdicts, as docs/paper_map.md writes it down under "Verdicts": a case for each of its branches."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metatokens.report.claims import Claim
from metatokens.report.compare import Comparison
from metatokens.report.intervals import Difference
from metatokens.report.verdict import Judged


def gap(low: float, high: float, *by_seed: float, is_informative: bool = True) -> Comparison:
    return Comparison("c", Difference((low + high) / 2, low, high), by_seed, is_informative)


UP, DOWN, OPEN, SMALL, NOT_RUN = gap(0.1, 0.3), gap(-0.3, -0.1), gap(-0.1, 0.2), gap(-0.02, 0.03), Comparison("c")
NO_ROOM = gap(0.1, 0.3, is_informative=False)
SPLIT = gap(-0.02, 0.03, 0.16, -0.15)  # a small difference together, of seeds that differ widely
HOLDS, FAILS, UNTOLD = "holds", "does not hold", "cannot be told at this scale"


def judged(*comparisons: Comparison, **fields: Any) -> Judged:
    claim = Claim(text="it is so", source="somewhere", section="claims", versus=(), **fields)
    return Judged(claim, comparisons)


@pytest.mark.parametrize(
    ("comparisons", "verdict"),
    [
        ((UP, UP, UP), HOLDS),
        ((UP, UP, OPEN, OPEN), HOLDS),
        ((UP, OPEN, OPEN), UNTOLD),
        ((*[UP] * 19, DOWN), HOLDS),
        ((*[UP] * 18, DOWN), UNTOLD),
        ((*[UP] * 38, DOWN, DOWN), HOLDS),
        ((UP, DOWN, DOWN), FAILS),
        ((UP, DOWN, OPEN), UNTOLD),
        ((OPEN, OPEN, DOWN), FAILS),
        ((SMALL, SMALL, OPEN), FAILS),
        ((SMALL, SMALL, OPEN, OPEN), UNTOLD),
        ((UP, SMALL, SMALL), FAILS),
        ((UP, UP, SMALL, SMALL), HOLDS),
        ((SPLIT, SPLIT, SPLIT), UNTOLD),
        ((SMALL, SMALL, SPLIT), FAILS),
        ((UP, UP), HOLDS),
        ((UP,), HOLDS),
        ((UP, UP, NOT_RUN), UNTOLD),
        ((UP, UP, NO_ROOM), UNTOLD),
        ((DOWN, DOWN, NOT_RUN), UNTOLD),
        ((UP, UP, UP, NOT_RUN, NO_ROOM), HOLDS),
        ((NO_ROOM, NO_ROOM, NO_ROOM), UNTOLD),
        ((NOT_RUN,), UNTOLD),
        ((), UNTOLD),
    ],
)
def test_a_claim(comparisons: tuple[Comparison, ...], verdict: str) -> None:
    assert judged(*comparisons).verdict == verdict


@pytest.mark.parametrize(
    ("comparisons", "verdict"),
    [
        ((UP, UP, UP), HOLDS),
        ((UP, UP, UP, NO_ROOM), HOLDS),
        ((UP, UP, UP, OPEN), UNTOLD),
        ((UP, UP, UP, NOT_RUN), UNTOLD),
        ((UP, UP, NO_ROOM), UNTOLD),
        ((*[UP] * 99, DOWN), FAILS),
        ((*[UP] * 99, SMALL), FAILS),
        ((NOT_RUN, NOT_RUN), UNTOLD),
        ((DOWN, NOT_RUN, NOT_RUN, NOT_RUN), FAILS),
        ((SMALL, NO_ROOM, NO_ROOM), FAILS),
    ],
)
def test_a_claim_on_all_cases(comparisons: tuple[Comparison, ...], verdict: str) -> None:
    assert judged(*comparisons, universal=True).verdict == verdict


@pytest.mark.parametrize(
    ("one", "fields", "says"),
    [
        (gap(-0.04, 0.02), {"says": "match"}, "for"),
        (gap(-0.04, -0.01), {"says": "match"}, "for"),
        (gap(-0.09, 0.02), {"says": "match"}, "open"),
        (gap(-0.20, -0.06), {"says": "match"}, "against"),
        (gap(-0.0099, 0.0), {"says": "match", "within": 0.01, "unit": "percent"}, "for"),  # log(1.01) is 0.00995
        (gap(-0.0100, 0.0), {"says": "match", "within": 0.01, "unit": "percent"}, "open"),
        (SMALL, {"says": "above"}, "open"),
        (gap(-0.04, -0.01), {"says": "above"}, "against"),
        (gap(0.01, 0.03), {"says": "above"}, "for"),
        (gap(0.01, 0.03), {}, "for"),
        (gap(-0.04, -0.01), {}, "against"),
        (gap(-0.02, 0.05), {}, "open"),
        (gap(0.1, 0.3, 0.4, 0.2), {}, "for"),
        (gap(0.1, 0.3, 0.4, -0.1), {}, "open"),
        (gap(-0.3, -0.1, -0.4, -0.2), {}, "against"),
        (gap(-0.3, -0.1, -0.5, 0.04), {}, "short"),
        (gap(-0.3, -0.1, -0.5, 0.06), {}, "open"),
    ],
)
def test_what_a_comparison_says(one: Comparison, fields: dict[str, Any], says: str) -> None:
    assert judged(**fields).says(one) == says


def test_why_it_cannot_be_told() -> None:
    few, divided = "too few comparisons leave room for a difference", "the comparisons are divided, or open"
    cases = [(UP, UP, NO_ROOM), (), (OPEN,), (UP, UP, UP), (DOWN, DOWN, DOWN)]
    assert [judged(*case).why for case in cases] == [few, few, divided, "", ""]


def as_written(comparisons: tuple[Comparison, ...], says: str, universal: bool) -> str:
    """Rules 3 to 6 of docs/paper_map.md, word by word, on claims of accuracy."""
    margin = Fraction(-5, 100) if says == "match" else Fraction(0)
    grey = {"gain": Fraction(5, 100)}.get(says)  # "no such grey zone" for the others
    words = []
    informative = [one for one in comparisons if one.gap is not None and one.is_informative]
    for one in informative:
        assert one.gap is not None
        figures = [one.gap.low, one.gap.high, *one.by_seed]
        if all(Fraction(str(figure)) > margin for figure in figures):
            words.append("for")
        elif all(Fraction(str(figure)) < margin for figure in figures):
            words.append("against")
        elif grey is not None and all(Fraction(str(figure)) < grey for figure in figures):
            words.append("short")
        else:
            words.append("open")
    refuting = [word for word in words if word in ("short", "against")]
    enough = len(words) >= 3 or (len(comparisons) < 3 and 0 < len(words) == len(comparisons))
    if universal:
        if refuting:
            return FAILS
        all_run = all(one.gap is not None for one in comparisons)
        return HOLDS if enough and all_run and set(words) == {"for"} else UNTOLD
    if not enough:
        return UNTOLD
    if words.count("for") >= Fraction(len(words), 2) and words.count("against") <= Fraction(len(words), 20):
        return HOLDS
    if words.count("against") > words.count("for") or len(refuting) > Fraction(len(words), 2):
        return FAILS
    return UNTOLD


ENDS = st.integers(-12, 12).map(lambda hundredths: hundredths / 100)
GAPS = st.builds(
    lambda ends, seeds, is_informative: gap(*sorted(ends), *seeds, is_informative=is_informative),
    st.tuples(ENDS, ENDS),
    st.just([]) | st.lists(ENDS, min_size=2, max_size=3),
    st.sampled_from([True, True, True, False]),
)
CASES = st.sampled_from([UP, UP, UP, DOWN, OPEN, SMALL]) | GAPS | st.just(NOT_RUN)


@given(
    st.lists(CASES, max_size=8) | st.lists(st.sampled_from([UP, UP, UP, DOWN]), min_size=15, max_size=45),
    st.sampled_from(["gain", "above", "match"]),
    st.booleans(),
)
def test_the_rule_is_the_documents(comparisons: list[Comparison], says: str, universal: bool) -> None:
    found = judged(*comparisons, says=says, universal=universal)
    assert found.verdict == as_written(tuple(comparisons), says, universal)
