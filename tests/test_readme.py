"""What the README shows is run as it stands, on a small model and store in place of the demo's."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from metatokens.data.store import TokenStore

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # the Trainer's default, where there is no GPU
def test_the_python_example_runs(
    small_store: TokenStore,
    small_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_store.path, tmp_path / "runs/demo/tokens")
    shutil.copytree(small_model(), tmp_path / "runs/demo/models/meta/pretrained")
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    exec(compile(code[1], "README.md", "exec"), {})
    assert "Return a list of" in capsys.readouterr().out


def test_the_record_is_read_as_shown(small_store: TokenStore, tmp_path: Path) -> None:
    from metatokens.data.tokenizer import meta_token_id
    from metatokens.tasks.example import read_examples

    record = re.search(r"```json\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert record is not None
    (tmp_path / "records.jsonl").write_text(record[1], encoding="utf-8")
    (example,) = read_examples(tmp_path / "records.jsonl", small_store.tokenizer)
    assert example.input_ids.count(meta_token_id(small_store.tokenizer)) == 2
