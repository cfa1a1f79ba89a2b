"""What the README shows is run as it stands, on a small model and store in place of the demo's."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metatokens.data.store import TokenStore

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # the Trainer's default, where there is no GPU
def test_the_python_examples_run(
    small_store: TokenStore,
    small_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_store.path, tmp_path / "runs/demo/tokens")
    shutil.copytree(small_model(), tmp_path / "runs/demo/models/meta/pretrained")
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 3
    namespace: dict[str, Any] = {}
    for code in examples:
        exec(compile(code, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "Return<|meta|> a list<|meta|> of all names<|meta|>" in printed
    assert "'generated_text': 'Return a list of" in printed
    assert {path.name for path in tmp_path.glob("*.png")} == {"attentions.png", "meta_attentions.png"}


# In place of the demo's sizes, in the commands that have them.
SMALLER = {
    "train:4096": "train:768",
    "--recipe demo": "--recipe demo --set model.hidden_size=16 --set model.num_hidden_layers=1 "
    "--set model.num_attention_heads=2 --set data.block_size=32 --set training.max_steps=2 --set training.save_steps=2",
    "finetune": "finetune --set training.max_steps=2 --set training.save_steps=2",
}


def test_the_commands_on_ones_own_files_run(
    small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metatokens: Callable[[str], Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    shutil.copy(small_corpus, "my/text.txt")
    text = README.read_text(encoding="utf-8")
    (record,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my/train.jsonl").write_text(record * 3)
    (tmp_path / "my/test.jsonl").write_text(record)
    (block,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    commands = [line.removeprefix("metatokens ") for line in block.splitlines() if line.startswith("metatokens ")]
    assert [line.split()[0] for line in commands] == [
        "tokenize", "pretrain", "finetune", "plot", "evaluate", "generate"
    ]  # fmt: skip
    for line in commands:
        command, _, _ = line.partition("  #")
        for size, smaller in SMALLER.items():
            command = command.replace(size, smaller, 1)
        status, output, error = metatokens(command)
        assert status == 0, error
    assert output.startswith("Bits: 0 _PAUSE_ 1 0 0. Before this pause: _PAUSE_")
    (answer,) = (tmp_path / "runs/my/answers.jsonl").read_text().splitlines()
    assert json.loads(answer)["completion"] == " 0"
    assert (tmp_path / "runs/my/curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_record_is_read_as_shown(small_store: TokenStore, tmp_path: Path) -> None:
    from metatokens.data.tokenizer import meta_token_id
    from metatokens.tasks.example import read_examples

    record = re.search(r"```json\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert record is not None
    (tmp_path / "records.jsonl").write_text(record[1], encoding="utf-8")
    (example,) = read_examples(tmp_path / "records.jsonl", small_store.tokenizer)
    assert example.input_ids.count(meta_token_id(small_store.tokenizer)) == 2
