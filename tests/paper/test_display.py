"""The display of a plan: percentages and the time left."""

from types import SimpleNamespace

import pytest

from metatokens.paper import display as display_module
from metatokens.paper.display import LINE_EVERY, Display


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(display_module, "time", clock)
    return clock


def lines(capsys):
    output = capsys.readouterr()
    assert output.out == ""
    return [line.strip() for line in output.err.splitlines()]


def test_a_line_for_each_finished_stage_with_the_time_left(clock, capsys):
    display = Display({"a": 10, "b": 30, "c": 60})
    clock.now += 20
    display.finish("a")  # 10 of 100 in 20 s: 90 take 180 s more
    clock.now += 100
    display.update("c", 0.25)
    display.finish("b")  # 55 of 100 in 120 s: 45 take 98 s more

    assert lines(capsys) == [
        "10% in 0:00:20, 0:03:00 left: a 100%",
        "55% in 0:02:00, 0:01:38 left: b 100%",
    ]


def test_a_line_now_and_then_while_stages_run(clock, capsys):
    display = Display({"a": 1, "b": 3})
    for second in range(1, 50):
        clock.now += 1
        display.update("b", second / 100)
        display.refresh(["b"])

    printed = lines(capsys)
    assert len(printed) == int(50 // (LINE_EVERY + 1))
    assert printed[0] == "16% in 0:00:21, 0:01:52 left: b 21%"


def test_a_late_report_does_not_undo_the_end(clock, capsys):
    display = Display({"a": 1, "b": 1})
    clock.now += 10
    display.finish("a")
    display.update("a", 0.9)
    display.finish("b")

    assert lines(capsys)[-1] == "100% in 0:00:10, 0:00:00 left: b 100%"
