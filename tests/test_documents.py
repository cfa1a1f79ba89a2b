"""What the README and the pages of docs/ show is run as it stands, and their figures are those of the result lines."""

import gzip
import json
import re
import runpy
import shutil
from collections.abc import Callable
from itertools import chain
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
from markdown_it import MarkdownIt
from scipy import stats
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from typer.main import get_command

import metatokens
from metatokens.cli import app
from metatokens.data.store import TokenStore
from tests.test_imports import ORDER

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/how_to").glob("*.md"))]
MARKDOWN = MarkdownIt().enable("table")

# In place of the sizes that are shown, in the commands that have them.
TINY_RUN = "--set training.max_steps=2 --set training.save_steps=2"
TINY_MODEL = (
    "--set model.hidden_size=16 --set model.num_hidden_layers=1 --set model.num_attention_heads=2 "
    "--set data.block_size=32 --set training.per_device_train_batch_size=2"
)
SMALLER = {
    "train:4096": "train:768",
    "tokenize ": "tokenize --workers 1 ",
    "pretrain --recipe demo": f"pretrain --recipe demo {TINY_MODEL} {TINY_RUN}",
    "--original-length 256": f"--original-length 16 {TINY_RUN} --set training.per_device_train_batch_size=1",
    "finetune ": f"finetune {TINY_RUN} ",
    "'task.train_steps=[1500]'": "task.train_steps=[2] --set task.stages=[]",
    "--lengths 256,512": "--lengths 256,512 -n 2",
    "text_full_layers=[18,23]": "text_full_layers=[0]",
    "-n 100": "-n 8",
    "-n 20": "-n 2",
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: language and text."""
    tokens = MARKDOWN.parse(page.read_text(encoding="utf-8"))
    return [(token.info, token.content) for token in tokens if token.type == "fence"]


@pytest.fixture
def demo(
    small_corpus: Path,
    small_store: TokenStore,
    small_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The folder that a reader is in: what `make demo` wrote, small, and files of the reader's."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_store.path, "runs/demo/tokens")
    for model in ("pretrained", "list_recall/128"):
        shutil.copytree(small_model(), Path("runs/demo/models/meta", model))
    tokenizer = small_store.tokenizer
    before_meta = small_store.manifest.meta_token_id  # the entries that a GPT-2's own tokenizer has
    GPT2LMHeadModel(GPT2Config(vocab_size=before_meta, n_embd=16, n_layer=1, n_head=2)).save_pretrained("my/gpt2")
    tokenizer.save_pretrained("my/gpt2")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=before_meta, **sizes)).save_pretrained("my/llama")
    tokenizer.save_pretrained("my/llama")
    shutil.copy(small_corpus, "my/text.txt")
    (record,) = (text for language, text in blocks(ROOT / "README.md") if language == "json")
    Path("my/train.jsonl").write_text(record * 3, encoding="utf-8")
    Path("my/test.jsonl").write_text(record, encoding="utf-8")
    return tmp_path


@pytest.mark.quick(page=[ROOT / "README.md", ROOT / "docs/how_to/any_decoder.md"])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # the Trainer's default, where there is no GPU
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_runs(
    page: Path, demo: Path, metatokens: Callable[[str], Any], small_model: Callable[..., Path]
) -> None:
    if "--out runs/my/base" not in page.read_text(encoding="utf-8"):  # it begins where another page ends
        shutil.copytree(small_model(), "runs/my/base")
        shutil.copytree("runs/demo/tokens", "runs/my/tokens")
    names: dict[str, Any] = {}
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, page.name, "exec"), names)
        elif language == "sh":
            for command in commands(text):
                status, _, error = metatokens(smaller(command))
                assert status == 0, f"{command}\n{error}"


def commands(block: str) -> list[str]:
    """The commands of a shell block, without the word `metatokens`; one may go over several lines within its quotes."""
    return re.findall(r"^metatokens ((?:\"[^\"]*\"|[^\"\n#])*)", block.replace("\\\n", ""), re.MULTILINE)


def smaller(command: str) -> str:
    """The command at the size of a test. A run that an earlier command finished stays finished."""
    for size, tiny in SMALLER.items():
        command = command.replace(size, tiny, 1)
    return command


def test_the_first_screens_say_what_it_is_how_to_use_it_and_whether_it_helps() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130
    assert lines.index("```python") <= 12
    first = "\n".join(lines[:55])
    shown = ("meta_tokens.svg", "add_meta_attention(", "pip install", "make demo", "make test", "look --model")
    assert [part for part in (*shown, "## Does it help?", "accuracy.svg") if part not in first] == []


def test_blocks_that_are_run_are_found() -> None:
    found = {page.stem: [language for language, _ in blocks(page)] for page in PAGES}
    assert found["README"].count("python") == 2
    assert found["README"].count("sh") == 1
    has = {one: {page for page, languages in found.items() if one in languages} for one in ("sh", "python")}
    both = {"README", "getting_started", "any_decoder", "look_inside", "continue_gpt2", "landmarks", "forget_the_text"}
    assert has == {
        "sh": both | {"pretrain", "finetune", "longer_contexts", "reproduce"},
        "python": both | {"other_libraries"},
    }
    assert set(chain.from_iterable(found.values())) <= {"python", "sh", "console", "text", "json", "yaml"}
    readme = "\n".join(text for language, text in blocks(ROOT / "README.md") if language == "sh")
    assert [command.split()[0] for command in commands(readme)] == [
        "tokenize", "pretrain", "finetune", "plot", "evaluate", "generate"
    ]  # fmt: skip


def test_commands_that_are_not_run_have_their_options() -> None:
    known = {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in get_command(app).commands.items()
    }
    shown = "\n".join(text for page in PAGES for language, text in blocks(page) if language == "console")
    found = re.findall(r"metatokens (\w+) ((?:[^\n]|\\\n)*)", shown.replace("\\\n", " "))
    assert {"pretrain", "tokenize", "reproduce"} <= {verb for verb, _ in found}
    for verb, rest in found:
        assert {word for word in rest.split() if word.startswith("--")} <= known[verb]


def test_the_reference_has_the_public_names() -> None:
    page = (ROOT / "docs/api/index.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: metatokens\.(\w+)$", page, re.MULTILINE)) == sorted(metatokens.__all__)


def test_only_meta_tokens_have_meta_attention(capsys: pytest.CaptureFixture[str]) -> None:
    text = next(text for _, text in blocks(ROOT / "README.md") if "meta_attentions" in text)
    exec(compile(text, "README.md", "exec"), {})
    weights = json.loads(re.sub(r"tensor\(|, grad_fn.*", "", capsys.readouterr().out))
    is_zero = [[weight == 0 for weight in row] for row in weights]
    assert is_zero == [
        [not (query in (1, 4) and key in (1, 4) and key <= query) for key in range(5)] for query in range(5)
    ]


def test_no_table_is_joined_to_text() -> None:
    """A table whose lines are wrapped is rendered as text."""
    pages = [*PAGES, *ROOT.glob("*/*/README.md")]
    text = [
        token.content for page in pages for token in MARKDOWN.parse(page.read_text("utf-8")) if token.type == "inline"
    ]
    assert len(text) > 1000
    assert [one for one in text if re.search(r"\|\s*:?---", one)] == []


def test_links_lead_somewhere() -> None:
    """In the repository; those of the site are checked as it is built."""
    targets = {
        (page, target)
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    }
    assert len(targets) > 20
    assert [(page.name, target) for page, target in targets if not (page.parent / target).exists()] == []


def test_files_that_are_named_exist() -> None:
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    named = {
        (page.name, path)
        for page in pages
        for path in re.findall(r"`((?:\w+/)+[\w.]*)`", page.read_text(encoding="utf-8"))
        if not path.startswith(("my/", "runs/", "build/")) and "NAME" not in path
    }
    assert len(named) > 60
    places = (ROOT, ROOT / "src/metatokens")
    assert [(page, path) for page, path in named if not any((place / path).exists() for place in places)] == []


def test_the_readme_names_the_folders_in_the_order_of_their_imports() -> None:
    tree = next(text for _, text in blocks(ROOT / "README.md") if text.startswith("src/metatokens/"))
    shown = re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / "src/metatokens").glob("[a-z]*/*.*")}
    assert sorted(shown) == sorted(folders)
    assert [name for name in ORDER if name in folders] == [name for name in shown if name in ORDER]
    assert all((ROOT / folder).is_dir() for folder in re.findall(r"(\w+)/", tree.splitlines()[-1]))


def test_the_numbers_of_hostile_inputs_are_those_of_the_tests() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/hostile").glob("test_*.py"))
    count = sum(map(int, re.findall(r"(?:@cases|Reader)\((\d+)", tests)))
    text = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    assert f"{count:,}" in text
    assert f"{80 * count:,}" in text


def test_the_record_is_read_as_shown(demo: Path, small_store: TokenStore) -> None:
    from metatokens.data.tokenizer import meta_token_id
    from metatokens.tasks.example import read_examples

    (example,) = read_examples(Path("my/test.jsonl"), small_store.tokenizer)
    assert example.input_ids.count(meta_token_id(small_store.tokenizer)) == 2


@pytest.fixture(scope="module")
def figures() -> SimpleNamespace:
    """The names of the script that writes the figures."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs/figures.py")))


@pytest.mark.slow
def test_figures_are_those_of_the_result_lines(figures: SimpleNamespace) -> None:
    shown = {document: document.read_text(encoding="utf-8") for document in figures.DOCUMENTS}
    assert [document.name for document, text in shown.items() if figures.filled(text) != text] == []
    assert {name for text in shown.values() for _, name, _ in figures.BLOCK.findall(text)} == set(figures.FIGURES)


@pytest.mark.parametrize(("picture", "drawing"), [("accuracy", "draw"), ("forgetting", "draw_forgetting")])
def test_the_picture_is_of_the_result_lines(
    figures: SimpleNamespace, tmp_path: Path, picture: str, drawing: str
) -> None:
    getattr(figures, drawing)(tmp_path / f"{picture}.svg")
    assert (tmp_path / f"{picture}.svg").read_bytes() == (ROOT / f"docs/images/{picture}.svg").read_bytes()


def test_a_figure_by_hand() -> None:
    """What `meta` answers on parity, from the lines themselves."""
    lines = gzip.decompress((ROOT / "results/small/results.jsonl.gz").read_bytes()).splitlines()
    wanted = {
        "model": "meta", "task": "parity", "length": 128, "train_length": 128, "metric": "exact_match",
        "recipe": "small", "position_embedding": "rope", "condition": "paper",
    }  # fmt: skip
    found = {
        line["seed"]: 100 * line["value"]
        for line in map(json.loads, lines)
        if wanted.items() <= line.items() and "intervention" not in line
    }
    values = [value for _, value in sorted(found.items())]
    reach = stats.t.ppf(0.975, len(values) - 1) * stdev(values) / sqrt(len(values))
    block = (ROOT / "docs/results.md").read_text(encoding="utf-8").split("<!-- figures: tasks -->")[1]
    lines_of = [line.split("|")[1:-1] for line in block.split("\n\n")[0].split("\n") if "|" in line]
    header, _, *rows = ([cell.strip() for cell in line] for line in lines_of)
    (row,) = (dict(zip(header, cells, strict=True)) for cells in rows if cells[0].startswith("`meta`"))
    assert row["parity"] == f"{fmean(values):.1f} \u00b1 {reach:.1f}"
