"""The notebook of the first ten minutes runs as it is, cell by cell."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_ten_minutes.ipynb"


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], dict[str, Any]]:
    """What the last line of each code cell shows (None where it is no expression), and the names after all cells."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    results = []
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, NOTEBOOK.name, "exec"), names)
            results.append(
                None if last is None else eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
            )
    return results, names


def test_every_cell_runs_and_shows_what_the_text_promises(shown: tuple[list[Any], dict[str, Any]]) -> None:
    (page, attention, answer, text_is_kept, _, same), names = shown
    assert "flea" in page._repr_html_()
    assert attention[-2:] == (2, 2)
    assert answer.split()[0] == "flea"
    assert text_is_kept
    assert names["losses"][-1] < names["losses"][0] - 0.05
    assert same
    assert Path("added").is_dir()
