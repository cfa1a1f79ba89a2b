"""The frames of everything that was read, on lines made up by hand."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from metatokens.errors import UserError
from metatokens.paper.frame import Inputs, learned_from, learning_curves, load

Line = dict[str, Any]


def _line(**fields: Any) -> Line:
    about = {"model": "meta", "position_embedding": "rope", "task": "parity", "condition": "paper", "length": 128}
    about |= {"train_condition": "paper", "train_length": 128, "metric": "exact_match", "value": 0.5, "n": 10}
    return about | {"seed": 10, "recipe": "small"} | fields


def _load(folder: Path, results: Iterable[Line], **files: Iterable[Line]) -> Inputs:
    for name, lines in {"results": results, **files}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load([folder])


def test_a_later_line_of_the_same_figure_counts(tmp_path: Path) -> None:
    lines = [_line(value=0.1, hits="gAA="), _line(value=0.2), _line(recipe="small/jumps")]
    inputs = _load(tmp_path, lines)
    assert inputs.preset == "small"
    assert inputs.remeasured == 1
    assert inputs.select()["value"].tolist() == [0.2]
    assert inputs.select(variant=["", "jumps"])["value"].tolist() == [0.2, 0.5]
    assert len(inputs.figures) == 2


@pytest.mark.parametrize("recipe", ["gpu", "mine", None])
def test_lines_of_a_grid_and_of_other_runs_are_not_mixed(recipe: str | None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lines of the preset small and of other runs"):
        _load(tmp_path, [_line(), _line(recipe=recipe)])
    with pytest.raises(UserError, match="lines of the preset small and of other runs"):
        _load(tmp_path, [_line()], curves=_curve([0.5], recipe=recipe))
    assert _load(tmp_path, [_line(recipe="demo"), _line(recipe=None, seed=1)], curves=[]).preset is None


def test_text_windows_and_recipes_of_no_preset_are_models_of_their_own(tmp_path: Path) -> None:
    lines = [_line(recipe=recipe) for recipe in ("demo", "mine/a", "mine/b")]
    lines += [_line(recipe="demo", text_window=window) for window in (16, 256)]
    lines += [_line(recipe="mine/a", metric="shortcut", model="the commonest answer", value=0.3)]
    inputs = _load(tmp_path, lines, curves=_curve([0.95], recipe="mine/a"))
    names = ["meta", "meta, mine/a", "meta, mine/b", "meta, window 16", "meta, window 256"]
    assert inputs.select()["model"].tolist() == names
    assert inputs.select()["chance"].tolist() == [0.3] * 5
    assert inputs.select(metric="log_steps_to_learn")["model"].tolist() == ["meta, mine/a"]


def test_a_misspelt_column_or_metric_is_an_error(tmp_path: Path) -> None:
    inputs = _load(tmp_path, [_line()])
    with pytest.raises(KeyError):
        inputs.select(lenght=128)
    with pytest.raises(KeyError, match="no metric"):
        inputs.select(metric="exactness")


def test_an_accuracy_has_what_a_constant_answer_and_the_best_shortcut_score(tmp_path: Path) -> None:
    counting = {"task": "segment_counting"}
    shortcuts = [
        _line(**counting, metric="shortcut", model=model, value=value, length=length, train_length=None, seed=2026)
        for model, value, length in (("the commonest answer", 0.2, 128), ("a table", 0.4, 128), ("a table", 0.3, 256))
    ]
    lines = [_line(chance=0.5), _line(**counting), _line(**counting, length=256), _line(**counting, condition="decoy")]
    found = _load(tmp_path, [*lines, *shortcuts]).figures.query("metric == 'exact_match'")
    assert found["chance"].fillna(-1).tolist() == [0.5, 0.2, -1, -1]
    assert found["shortcut"].fillna(-1).tolist() == [-1, 0.4, 0.3, -1]


def _curve(accuracies: Iterable[float], **fields: Any) -> list[Line]:
    about = {"model": "meta", "position_embedding": "rope", "task": "parity", "train_length": 128, "recipe": "small"}
    return [
        about | {"seed": 10, "step": 100 * place, "text_tokens": place, "exact_match": accuracy, "n": 200} | fields
        for place, accuracy in enumerate(accuracies, start=1)
    ]


def test_steps_to_learn_are_counted_to_the_budget_of_every_run(tmp_path: Path) -> None:
    curves = [
        *_curve([0.5, 0.95, 0.6, 0.9, 0.92]),  # stays at 90 % from step 400 on
        *_curve([0.1], train_length=512),
        *_curve([0.5] * 6, seed=11),  # never
        *_curve([0.95, 0.95, 0.95, 0.95], model="gpt2"),  # at once; trained 400 steps
        *_curve([0.2, 0.95], task="copying"),
        *_curve([0.99], recipe="small/landmark"),
    ]
    inputs = _load(tmp_path, [_line()], curves=curves)
    found = inputs.select(metric="log_steps_to_learn").set_index(["task", "model", "seed"])
    assert {key: round(math.exp(value)) for key, value in found["value"].items()} == {
        ("copying", "meta", 10): 200,
        ("parity", "gpt2", 10): 100,
        ("parity", "meta", 10): 400,
        ("parity", "meta", 11): 400,
    }
    assert found["chance"].map(math.exp).round().tolist() == [200, 400, 400, 400]
    drawn = learning_curves(inputs.curves)
    assert learned_from(drawn["parity", "meta", "rope", 10]) == 400
    assert learned_from(drawn["parity", "meta", "rope", 11]) == math.inf


def test_a_distortion_at_a_rate_is_the_mean_of_a_runs_fits(tmp_path: Path) -> None:
    """Curves start at rate 0 with the answers' entropy, 2 nats: at rate 1 the two fits have 1.5 and 1."""
    about = {"analysis": "rate_distortion", "model": "meta", "position_embedding": "rope", "seed": 10, "n": 50}
    about |= {"recipe": "small", "split": "held_out"}
    points = [
        about | {"metric": metric, "value": value, "beta": 0.1, "fit_seed": fit, "subject": "meta"}
        for fit, distortion in ((0, 1.0), (1, 0.0))
        for metric, value in (("rate", 2.0), ("distortion", distortion))
    ]
    lines = [*points, about | {"metric": "answer_entropy", "value": 2.0}]
    found = _load(tmp_path, [_line()], analysis=lines).select(metric="distortion_at_rate", subject="meta", rate=1.0)
    assert found["value"].tolist() == [pytest.approx(1.25)]


def test_perplexities_are_compared_by_their_logarithms(tmp_path: Path) -> None:
    line = _line(metric="perplexity", value=math.e, low=2.0, high=3.0, task=None, condition="none", text=None)
    [row] = _load(tmp_path, [line]).select(metric="log_perplexity", text="held_out").to_dict("records")
    assert row["value"] == pytest.approx(1.0)
    assert math.isnan(row["low"])


def test_a_slowdown_is_per_text_token_with_the_interval_of_a_median(tmp_path: Path) -> None:
    repository = Path(__file__).parents[2]
    _load(tmp_path, [_line()])
    rows = load([tmp_path, repository / "benchmarks" / "results" / "decode_8.jsonl"]).select(metric="slowdown")
    [row] = rows[(rows["model"] == "dense, inserting") & (rows["against"] == "meta, inserting")].to_dict("records")
    line = next(
        line
        for line in map(json.loads, (repository / "benchmarks" / "results" / "decode_8.jsonl").read_text().splitlines())
        if (line["model"], line["against"]) == ("dense, inserting", "meta, inserting")
    )
    assert row["value"] == line["ratio"]  # both have as many text tokens
    assert row["batch"] == 8
    spread = (line["ratio_high"] - line["ratio_low"]) / 1.349
    assert row["high"] - row["value"] == pytest.approx(1.96 * 1.253 * spread / math.sqrt(3))
