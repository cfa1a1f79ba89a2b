"""The notebook of the first ten minutes runs as it is, cell by cell."""

import ast
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_ten_minutes.ipynb"


def run_cell(source, names):
    """What the last line of a code cell shows; None where it is no expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NOTEBOOK.name, "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)


def test_every_cell_runs_and_shows_what_the_text_promises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}

    shown = [
        run_cell("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"
    ]

    page, attention, answer, text_is_left, _, same = shown
    assert "flea" in page._repr_html_()
    assert attention[-2:] == (2, 2)
    assert answer.split()[0] == "flea"
    assert text_is_left
    assert names["losses"][-1] < names["losses"][0] - 0.05
    assert same
    assert Path("added").is_dir()
