"""The picture of runs' curves, finished, in phases, or still going."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from metatokens.errors import UserError
from metatokens.looking.curves import draw_curves, read_curves
from tests.cli.command_lines import Run

POINTS = [{"step": step, "loss": 4.0 / step, "learning_rate": 0.1} for step in (1, 2, 4)]
HELD_OUT = [{"step": 2, "eval_loss": 2.5}, {"step": 4, "eval_loss": 1.5, "eval_exact_match": 0.25}]


def write(file: Path, points: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True)
    if file.suffix == ".json":
        file.write_text(json.dumps({"log_history": points, "global_step": 4}))
    else:
        file.write_text("".join(json.dumps(point) + "\n" for point in points))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretrained model that is fine-tuned in two phases; the second is still going."""
    monkeypatch.chdir(tmp_path)
    write(Path("base/curve.jsonl"), POINTS)
    write(Path("tuned/64/curve.jsonl"), POINTS + HELD_OUT)
    write(Path("tuned/128/checkpoints/checkpoint-2/trainer_state.json"), POINTS[:2])
    write(Path("tuned/128/checkpoints/checkpoint-10/trainer_state.json"), POINTS[1:])
    write(Path("tuned/examples/other.jsonl"), [])


def lines(axes: Axes) -> dict[str, list[list[float]]]:
    return {str(line.get_label()): line.get_xydata().tolist() for line in axes.lines}


@pytest.mark.usefixtures("runs")
def test_each_run_and_phase_has_its_losses_and_what_was_measured() -> None:
    figure = draw_curves(read_curves([Path("base"), Path("tuned")]))

    losses, exact = figure.axes
    drawn = lines(losses)
    (legend,) = figure.legends
    (measured,) = exact.lines
    colours = {line.get_label(): line.get_color() for line in losses.lines}
    assert drawn == {
        "base": [[1, 4], [2, 2], [4, 1]],
        "tuned/64": [[1, 4], [2, 2], [4, 1]],
        "tuned/64, held out": [[2, 2.5], [4, 1.5]],
        "tuned/128": [[2, 2], [4, 1]],  # the newest checkpoint
    }
    assert measured.get_xydata().tolist() == [[4, 25]]
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == list(drawn)
    assert colours["tuned/64"] == colours["tuned/64, held out"]
    assert len(set(colours.values())) == 3


@pytest.mark.usefixtures("runs")
def test_the_verb_writes_one_picture_and_keeps_other_files(metatokens: Run) -> None:
    assert metatokens("plot base") == (0, "", "picture: curves.png\n")
    assert metatokens("plot base tuned") == (0, "", "picture: curves.png\n")  # it is drawn again
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")
    Path("thesis.txt").write_text("years of work")
    message = "metatokens: thesis.txt is another kind of file, and is kept; give another name.\n"
    assert metatokens("plot base --out thesis.txt") == (2, "", message)
    assert Path("thesis.txt").read_text() == "years of work"


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("name", ["empty", "missing", "base/curve.jsonl"])
def test_what_is_no_run_is_said_in_one_sentence(name: str, metatokens: Run) -> None:
    Path("empty").mkdir()
    status, _, error = metatokens(f"plot base {name}")
    assert (status, error.count("\n")) == (2, 1)
    assert f"there is no curve in {name}; give the folder of a run" in error
    assert not Path("curves.png").exists()


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("content", ["{", "[]\n", '{"step": "x"}\n', '{"loss": 1}\n', "\udcff"])
def test_a_damaged_curve_is_refused(content: str) -> None:
    Path("base/curve.jsonl").write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match=r"base/curve\.jsonl is not the curve of a run\.$"):
        read_curves([Path("base")])
