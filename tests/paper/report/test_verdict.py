"""The rule of the verdicts, as docs/paper_map.md writes it down under "Verdicts": a case for each of its branches."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metatokens.evaluation.intervals import Difference
from metatokens.paper.report.claims import Claim
from metatokens.paper.report.compare import Comparison
from metatokens.paper.report.tables.claims import so_far
from metatokens.paper.report.verdict import Judged


def gap(low: float, high: float, *by_seed: float, is_informative: bool = True, **fields: Any) -> Comparison:
    return Comparison("c", Difference((low + high) / 2, low, high), by_seed, is_informative, **fields)


UP, DOWN, OPEN, SMALL, NOT_RUN = gap(0.1, 0.3), gap(-0.3, -0.1), gap(-0.1, 0.2), gap(-0.02, 0.03), Comparison("c")
NO_ROOM = gap(0.1, 0.3, is_informative=False)
SPLIT = gap(-0.02, 0.03, 0.16, -0.15)  # a small difference together, of seeds that differ widely
HOLDS, FAILS, PARTLY, UNTOLD = "holds", "does not hold", "holds in part", "cannot be told at this scale"


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
        ((*[UP] * 3, *[DOWN] * 3), PARTLY),
        ((*[UP] * 3, *[DOWN] * 9), PARTLY),
        ((*[UP] * 2, *[DOWN] * 9), FAILS),
        ((*[UP] * 38, DOWN, DOWN, DOWN), PARTLY),
        ((gap(-0.3, -0.1, is_low=True), gap(-0.3, -0.1, is_low=True), gap(-0.3, -0.1, is_low=True)), FAILS),
        ((gap(0.1, 0.3, is_low=True), gap(0.1, 0.3, is_low=True), gap(0.1, 0.3, is_low=True)), UNTOLD),
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


def of_tasks(**comparisons: tuple[Comparison, ...]) -> list[Comparison]:
    return [replace(one, task=task) for task, own in comparisons.items() for one in own]


THREE_UP, THREE_DOWN, THREE_OPEN = (UP,) * 3, (DOWN,) * 3, (OPEN,) * 3


@pytest.mark.parametrize(
    ("tasks", "verdict"),
    [
        ({"parity": THREE_UP, "copying": THREE_UP}, HOLDS),
        ({"parity": THREE_UP, "copying": THREE_UP, "counting": THREE_OPEN, "recall": THREE_OPEN}, HOLDS),
        ({"parity": THREE_UP * 9, "copying": THREE_OPEN}, UNTOLD),  # none carries it alone
        ({"parity": THREE_UP * 9, "copying": THREE_OPEN, "counting": THREE_OPEN, "recall": (UP,)}, HOLDS),
        ({"parity": THREE_UP * 9, "copying": THREE_OPEN, "counting": THREE_OPEN, "recall": (NOT_RUN,)}, UNTOLD),
        ({"parity": THREE_UP, "copying": THREE_UP, **dict.fromkeys("abc", THREE_OPEN)}, UNTOLD),
        ({"parity": THREE_UP, "copying": THREE_DOWN}, PARTLY),
        ({"parity": THREE_UP * 9, "copying": THREE_UP * 9, "recall": THREE_DOWN}, PARTLY),
        ({"parity": (*THREE_UP, *THREE_DOWN), "copying": THREE_OPEN}, PARTLY),
        ({"parity": THREE_DOWN, "copying": THREE_DOWN, "recall": THREE_OPEN}, FAILS),
        ({"parity": THREE_DOWN, "copying": THREE_OPEN}, UNTOLD),
    ],
)
def test_a_claim_on_several_tasks(tasks: dict[str, tuple[Comparison, ...]], verdict: str) -> None:
    assert judged(*of_tasks(**tasks)).verdict == verdict
    assert [*judged(*of_tasks(**tasks)).by_task] == [*tasks]


def test_a_claim_on_all_cases_is_not_judged_by_task() -> None:
    one = judged(*of_tasks(parity=THREE_UP, copying=THREE_DOWN), universal=True)
    assert (one.verdict, one.by_task) == (FAILS, {})


def test_a_verdict_says_on_how_few_trainings_it_rests() -> None:
    def trained(*counts: int | None) -> Judged:
        return judged(*(gap(0.1, 0.3, seeds=count) for count in counts))

    assert trained(3, 3, None).few_seeds == {}
    assert trained(1, 1, 2, 3).few_seeds == {1: 2, 2: 1}
    said = [so_far(trained(*counts)) for counts in ((3, 5), (1, 1), (2, 2), (1, 2, 2, 3), (None,))]
    assert said == ["", " (one seed)", " (two seeds)", " (1 of 4 on one seed, 2 of 4 on two seeds)", ""]
    assert so_far(judged(gap(0.1, 0.3, seeds=1), NOT_RUN, NOT_RUN)) == " (one seed, so far)"


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
        (gap(0.1, 0.3, 0.4, 0.02, agreement=0.02), {}, "open"),
        (gap(0.1, 0.3, 0.4, 0.021, agreement=0.02), {}, "for"),
        (gap(-0.3, -0.1, -0.4, -0.01, agreement=0.02), {}, "short"),
        (gap(-0.3, -0.1, -0.4, -0.021, agreement=0.02), {}, "against"),
        (gap(-0.3, -0.1, -0.4, 0.031, agreement=0.02), {}, "open"),
        (gap(0.0, 0.0, 0.0, 0.03, agreement=0.02), {}, "open"),  # 0.05 - 0.02 is more than 0.03 to a computer
    ],
)
def test_what_a_comparison_says(one: Comparison, fields: dict[str, Any], says: str) -> None:
    assert judged(**fields).says(one) == says


def test_why_it_cannot_be_told() -> None:
    few, divided = "too few comparisons leave room for a difference", "the comparisons are divided, or open"
    cases = [(UP, UP, NO_ROOM), (), (OPEN,), (UP, UP, UP), (DOWN, DOWN, DOWN)]
    assert [judged(*case).why for case in cases] == [few, few, divided, "", ""]


def as_written(comparisons: tuple[Comparison, ...], says: str, universal: bool) -> str:
    """Rules 3 to 7 of docs/paper_map.md, word by word, on claims of accuracy."""
    margin = Fraction(-5, 100) if says == "match" else Fraction(0)
    grey = {"gain": Fraction(5, 100)}.get(says)  # "no such grey zone" for the others
    two = Fraction(2, 100)

    def word(one: Comparison) -> str:
        assert one.gap is not None
        ends, seeds = ([Fraction(str(figure)) for figure in figures] for figures in (one.gap[1:], one.by_seed))
        if min(ends) > margin and all(seed - margin > two for seed in seeds):
            return "for"
        if max(ends) < margin and all(margin - seed > two for seed in seeds):
            return "against"
        if grey is not None and max(ends) < grey and all(grey - seed > two for seed in seeds):
            return "short"
        return "open"

    def words_of(comparisons: Sequence[Comparison]) -> list[str]:
        run = [one for one in comparisons if one.gap is not None and one.is_informative]
        return [word(one) for one in run if not one.is_low or word(one) == "against"]

    def enough(comparisons: Sequence[Comparison]) -> bool:
        number = len(words_of(comparisons))
        return number >= 3 or (len(comparisons) < 3 and 0 < number == len(comparisons))

    def by_rule_5(comparisons: Sequence[Comparison]) -> str:
        words = words_of(comparisons)
        for_it, against, short = (words.count(one) for one in ("for", "against", "short"))
        if not enough(comparisons):
            return UNTOLD
        if for_it >= Fraction(len(words), 2) and against <= Fraction(len(words), 20):
            return HOLDS
        if for_it >= 3 and against >= 3:
            return PARTLY
        return FAILS if against > for_it or against + short > Fraction(len(words), 2) else UNTOLD

    if universal:
        words = words_of(comparisons)
        if "short" in words or "against" in words:
            return FAILS
        all_run = all(one.gap is not None for one in comparisons)
        return HOLDS if enough(comparisons) and all_run and set(words) == {"for"} else UNTOLD
    tasks = {one.task for one in comparisons}
    if len(tasks) < 2:
        return by_rule_5(comparisons)
    told = [by_rule_5([one for one in comparisons if one.task == task]) for task in tasks]
    if PARTLY in told or (HOLDS in told and FAILS in told):
        return PARTLY
    for verdict in (HOLDS, FAILS):
        if told.count(verdict) >= 2 and told.count(verdict) >= Fraction(len(tasks), 2):
            return verdict
    return UNTOLD


ENDS = st.integers(-12, 12).map(lambda hundredths: hundredths / 100)
GAPS = st.builds(
    lambda ends, seeds, **fields: gap(*sorted(ends), *seeds, agreement=0.02, **fields),
    st.tuples(ENDS, ENDS),
    st.just([]) | st.lists(ENDS, min_size=2, max_size=3),
    is_informative=st.sampled_from([True, True, True, False]),
    is_low=st.sampled_from([True, False, False]),
)
CASES = st.sampled_from([UP, UP, UP, DOWN, OPEN, SMALL]) | GAPS | st.just(NOT_RUN)
TASKED = st.builds(lambda one, task: replace(one, task=task), CASES, st.sampled_from(["parity", "copying", "recall"]))


@given(
    st.lists(CASES, max_size=8)
    | st.lists(st.sampled_from([UP, UP, UP, DOWN]), min_size=15, max_size=45)
    | st.lists(TASKED, min_size=4, max_size=16),
    st.sampled_from(["gain", "above", "match"]),
    st.booleans(),
)
def test_the_rule_is_the_documents(comparisons: list[Comparison], says: str, universal: bool) -> None:
    found = judged(*comparisons, says=says, universal=universal)
    assert found.verdict == as_written(tuple(comparisons), says, universal)
