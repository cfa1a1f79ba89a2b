"""Which cases of a test `make test` runs: a few in which each value of each parameter occurs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest


def covering(cases: Sequence[Mapping[str, int]]) -> list[int]:
    """The numbers of some cases, ascending, in which each value of each parameter occurs.

    A case is a number for the value of each parameter. The next case is always the first of those with the most
    values that no chosen case has, so that the choice is short, and the same each time.
    """
    chosen: list[int] = []
    missing = {value for case in cases for value in case.items()}
    while missing:
        news = [len(missing & case.items()) for case in cases]
        chosen.append(news.index(max(news)))
        missing -= cases[chosen[-1]].items()
    return sorted(chosen)


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The tests that `make test` leaves out: those marked `slow`, and cases whose values others have."""
    left_out = {item for item in items if item.get_closest_marker("slow")}
    cases_of: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item not in left_out:
            test = item.nodeid.partition("[")[0]
            cases_of[test].append(item)
    for cases in cases_of.values():
        left_out |= set(cases) - _quick(cases)
    return left_out


def _quick(cases: Sequence[pytest.Function]) -> set[pytest.Function]:
    """Cases of one test in which each value occurs that its mark `quick` asks for."""
    mark = cases[0].get_closest_marker("quick")
    wanted = mark.kwargs if mark else {}
    asked_for = []
    for case in cases:
        if all(case.callspec.params[name] in values for name, values in wanted.items()):
            asked_for.append(case)
    assert asked_for, f"{cases[0].nodeid}: its mark `quick` names values that no case has"
    values_of = []
    for case in asked_for:
        values_of.append({name: id(value) for name, value in case.callspec.params.items()})
    return {asked_for[number] for number in covering(values_of)}
