"""The choice of cases that `make test` runs."""

from itertools import product

import pytest

from tests.quick import covering, left_out


@pytest.mark.parametrize("counts", [(1,), (5,), (3, 2), (2, 2, 2, 2), (18, 11)], ids=str)
def test_each_value_occurs_in_as_few_cases_as_the_longest_parameter_has_values(counts):
    cases = [dict(zip("abcd", values, strict=False)) for values in product(*map(range, counts))]

    chosen = [cases[number] for number in covering(cases)]

    assert len(chosen) == max(counts)
    for name, count in zip("abcd", counts, strict=False):
        values = {case[name] for case in chosen}
        assert values == set(range(count))


def test_a_parameter_that_goes_with_one_value_alone_occurs_too():
    assert covering([{"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a": 1, "b": 1}]) == [0, 2]


def test_what_is_left_out(pytester):
    items = pytester.getitems("""
        import pytest

        @pytest.mark.parametrize("a", [1, 2])
        @pytest.mark.parametrize("b", "xyz")
        def test_each(a, b): ...

        @pytest.mark.quick(b="xy")
        @pytest.mark.parametrize("a", [pytest.param(1, marks=pytest.mark.slow), 2])
        @pytest.mark.parametrize("b", "xyz")
        def test_some(a, b): ...

        @pytest.mark.slow
        def test_slow(): ...

        def test_plain(): ...
    """)

    names = [item.name for item in items if item not in left_out(items)]

    assert names == [
        "test_each[x-1]",
        "test_each[y-2]",
        "test_each[z-1]",
        "test_some[x-2]",
        "test_some[y-2]",
        "test_plain",
    ]


def test_a_value_that_no_case_has_is_refused(pytester):
    items = pytester.getitems("""
        import pytest

        @pytest.mark.quick(a=[3])
        @pytest.mark.parametrize("a", [1, 2])
        def test_some(a): ...
    """)
    with pytest.raises(AssertionError, match="its mark `quick` names values that no case has"):
        left_out(items)
