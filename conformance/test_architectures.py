"""Decoders of many architectures with meta-attention, for the tables of `docs/architectures.md`."""

from collections.abc import Callable

import pytest

from tests.retrofit.architectures import ARCHITECTURES, CHECKS, outcome, text_window_taken
from tests.retrofit.small import every_name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture(name: str, record_property: Callable[[str, float | str], None]) -> None:
    measured = {}
    for check, (measure, _) in CHECKS.items():
        measured[check] = measure(name)
        record_property(check, measured[check])
    record_property("text window", text_window_taken(name))
    assert {check: value for check, value in measured.items() if value > CHECKS[check][1]} == {}


@pytest.mark.parametrize("name", every_name())
def test_every_type(name: str, record_property: Callable[[str, str], None]) -> None:
    kind, sentence = outcome(name)
    record_property("kind", kind)
    record_property("sentence", sentence)
    assert kind != "wrong", sentence
