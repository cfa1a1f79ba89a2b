"""Decoders of many architectures with meta-attention, and a table of the largest differences."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.retrofit.architectures import ARCHITECTURES, CHECKS


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture(name: str, record_property: Callable[[str, float], None]) -> None:
    measured = {}
    for check, (measure, _) in CHECKS.items():
        measured[check] = measure(name)
        record_property(check, measured[check])
    assert {check: value for check, value in measured.items() if value > CHECKS[check][1]} == {}
