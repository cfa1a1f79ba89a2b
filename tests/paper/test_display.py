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
    with Display({"a": 10, "b": 30, "c": 60}) as display:
        clock.now += 20
        display.finish("a")  # 10 of 100 in 20 s: 90 take 180 s more
        clock.now += 100
        display.update("c", 0.25)
        display.finish("b")  # 55 of 100 in 120 s: 45 take 98 s more

    assert lines(capsys) == [
        "10% in 0:20, 3:00 left: a 100%",
        "55% in 2:00, 1:38 left: b 100%",
    ]


def test_stages_that_were_done_before_are_no_part_of_the_speed(clock, capsys):
    with Display({"a": 50, "b": 10, "c": 40}) as display:
        display.skip("a")
        clock.now += 30
        display.finish("b")  # 10 in 30 s: 40 take 120 s more

    assert lines(capsys) == ["60% in 0:30, 2:00 left: b 100%"]


def test_a_line_now_and_then_while_stages_run(clock, capsys):
    with Display({"a": 1, "b": 3}) as display:
        for second in range(1, 50):
            clock.now += 1
            display.update("b", second / 100)
            display.refresh(["b"])

    printed = lines(capsys)
    assert len(printed) == int(50 // (LINE_EVERY + 1))
    assert printed[0] == "16% in 0:21, 1:52 left: b 21%"


def test_a_late_report_does_not_undo_the_end(clock, capsys):
    with Display({"a": 1, "b": 1}) as display:
        clock.now += 10
        display.finish("a")
        display.update("a", 0.9)
        display.finish("b")

    assert lines(capsys)[-1] == "100% in 0:10, 0:00 left: b 100%"


def test_a_terminal_gets_a_bar_that_is_taken_away(clock, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich write as to a terminal
    monkeypatch.setenv("TERM", "xterm")
    with Display({"a": 1, "b": 1}) as display:
        clock.now += 10
        display.finish("a")
        display.refresh(["b"])

    error = capsys.readouterr().err
    assert "50% in 0:10, 0:10 left: b 0%" in error
    assert "a 100%" not in error  # no lines in addition to the bar
    assert error.endswith("\x1b[2K")  # the line of the bar is erased
