"""Decoders of many architectures with meta-attention, for the table of the largest differences."""

from collections.abc import Callable

import pytest

from tests.retrofit.architectures import ARCHITECTURES, CHECKS


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture(name: str, record_property: Callable[[str, float], None]) -> None:
    measured = {}
    for check, (measure, _) in CHECKS.items():
        measured[check] = measure(name)
        record_property(check, measured[check])
    assert {check: value for check, value in measured.items() if value > CHECKS[check][1]} == {}
