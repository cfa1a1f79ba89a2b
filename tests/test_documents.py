"""What the README and the pages of docs/ show is run as it stands, and their figures are those of the result lines."""

import gzip
import json
import re
import runpy
import shutil
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
from markdown_it import MarkdownIt
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM
from typer.main import get_command

import metatokens
from metatokens.cli import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    README,
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/how_to").glob("*.md")),
]
MARKDOWN = MarkdownIt().enable("table")

# In place of the sizes that are shown, in the commands that have them.
TINY_RUN = "--set training.max_steps=2 --set training.save_steps=2"
TINY_MODEL = (
    "--set model.hidden_size=16 --set model.num_hidden_layers=1 --set model.num_attention_heads=2 "
    "--set data.block_size=32 --set training.per_device_train_batch_size=2"
)
TINY_SHRINK = (
    "--set 'tests.texts={480: 1}' --set tests.excerpts=2 --set tests.choosing=1 --set 'tests.cost_lengths=[64]' "
    "--set mixture.longest=128 --set mixture.tokens=128 --set cache.number_of_full_heads=0 --set cache.length=512"
)
SMALLER = {
    "train:4096": "train:768",
    "tokenize ": "tokenize --workers 1 ",
    "pretrain --recipe demo": f"pretrain --recipe demo {TINY_MODEL} {TINY_RUN}",
    "--original-length 256": f"--original-length 16 {TINY_RUN} --set training.per_device_train_batch_size=1",
    "finetune ": f"finetune {TINY_RUN} ",
    "'task.train_steps=[1500]'": "task.train_steps=[2] --set task.stages=[]",
    "--lengths 256,512": "--lengths 256,512 -n 2",
    "--text 'my/*.txt'": "--text builtin",
    "shrink ": f"shrink {TINY_RUN} {TINY_SHRINK} ",
    "-n 100": "-n 8",
    "-n 20": "-n 2",
}


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page):
    """The fenced blocks of a page: language and text."""
    return [
        (token.info, token.content)
        for token in MARKDOWN.parse(text_of(page))
        if token.type == "fence"
    ]


def blocks_in(page, language):
    return [text for marked_as, text in blocks(page) if marked_as == language]


def commands(block):
    """The commands of a shell block, without the word `metatokens`; one may go over several lines within its quotes."""
    return re.findall(
        r"^metatokens ((?:\"[^\"]*\"|[^\"\n#])*)",
        block.replace("\\\n", ""),
        re.MULTILINE,
    )


def smaller(command):
    """The command at the size of a test. A run that an earlier command finished stays finished."""
    for size, tiny in SMALLER.items():
        command = command.replace(size, tiny, 1)
    return command


@pytest.fixture
def demo(
    small_corpus,
    small_store,
    small_model,
    tmp_path,
    monkeypatch,
):
    """The folder that a reader is in: what `make demo` wrote, small, and files of the reader's."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_store.path, "runs/demo/tokens")
    for model in ("pretrained", "list_recall/128"):
        shutil.copytree(small_model(), Path("runs/demo/models/meta", model))
    tokenizer = small_store.tokenizer
    before_meta = small_store.tokenizer.meta_token_id  # the entries that a base's own tokenizer has
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=before_meta, **sizes))
    llama.save_pretrained("my/llama")
    tokenizer.save_pretrained("my/llama")
    shutil.copy(small_corpus, "my/text.txt")
    [record] = blocks_in(README, "json")
    Path("my/train.jsonl").write_text(record * 3, encoding="utf-8")
    Path("my/test.jsonl").write_text(record, encoding="utf-8")
    return tmp_path


@pytest.mark.quick(page=[README, ROOT / "docs/how_to/any_decoder.md"])
# The Trainer's default, where there is no GPU.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_runs(page, demo, metatokens, small_model):
    if "--out runs/my/base" not in text_of(page):  # it begins where another page ends
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


def test_commands_that_are_not_run_have_their_options():
    known = {}
    for name, command in get_command(app).commands.items():
        known[name] = {
            option
            for parameter in command.params
            for option in parameter.opts + parameter.secondary_opts
        }
    shown = "\n".join(text for page in PAGES for text in blocks_in(page, "console"))
    written = re.findall(r"metatokens (\w+) ((?:[^\n]|\\\n)*)", shown.replace("\\\n", " "))

    verbs = {verb for verb, _ in written}
    assert {"pretrain", "tokenize", "reproduce"} <= verbs
    for verb, rest in written:
        options = {word for word in rest.split() if word.startswith("--")}
        assert options <= known[verb]


def test_the_reference_has_the_public_names():
    reference = text_of(ROOT / "docs/api/index.md")

    documented = re.findall(r"^::: metatokens\.(\w+)$", reference, re.MULTILINE)
    assert sorted(documented) == sorted(metatokens.__all__)


def test_only_meta_tokens_have_meta_attention(capsys):
    [text] = (text for text in blocks_in(README, "python") if "meta_attentions" in text)

    exec(compile(text, "README.md", "exec"), {})

    weights = json.loads(re.sub(r"tensor\(|, grad_fn.*", "", capsys.readouterr().out))
    metas = (1, 4)
    for query in range(5):
        for key in range(5):
            is_seen = query in metas and key in metas and key <= query
            assert (weights[query][key] != 0) == is_seen


def test_links_lead_somewhere():
    """In the repository; those of the site are checked as it is built."""
    checked = 0
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text_of(page)):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
            checked += 1
    assert checked > 20


def test_files_that_are_named_exist():
    checked = 0
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        for path in re.findall(r"`((?:\w+/)+[\w.]*)`", text_of(page)):
            if path.startswith(("my/", "runs/", "build/")) or "NAME" in path:
                continue
            exists = (ROOT / path).exists() or (ROOT / "src/metatokens" / path).exists()
            assert exists, f"{page.name}: {path}"
            checked += 1
    assert checked > 40


def test_the_record_is_read_as_shown(demo, small_store):
    from metatokens.data.tokenizer import meta_token_id
    from metatokens.tasks.example import read_examples

    [example] = read_examples(Path("my/test.jsonl"), small_store.tokenizer)

    assert example.input_ids.count(meta_token_id(small_store.tokenizer)) == 2


@pytest.fixture(scope="module")
def figures():
    """The names of the script that writes the figures."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs/figures.py")))


@pytest.mark.slow
def test_figures_are_those_of_the_result_lines(figures):
    shown = {document: text_of(document) for document in figures.DOCUMENTS}

    for document, text in shown.items():
        assert figures.filled(text) == text, document.name
    names = {name for text in shown.values() for _, name, _ in figures.BLOCK.findall(text)}
    assert names == set(figures.FIGURES)


@pytest.mark.quick(picture=["forgetting"])  # the other reads every line of the grid
@pytest.mark.parametrize(
    ("picture", "drawing"), [("accuracy", "draw"), ("forgetting", "draw_forgetting")]
)
def test_the_picture_is_of_the_result_lines(figures, tmp_path, picture, drawing):
    getattr(figures, drawing)(tmp_path / f"{picture}.svg")

    assert (tmp_path / f"{picture}.svg").read_bytes() == (
        ROOT / f"docs/images/{picture}.svg"
    ).read_bytes()


def table_of(page, name):
    """The table of figures of this name, by row and column."""
    after_mark = text_of(page).split(f"<!-- figures: {name} -->")[1]
    rows = []
    for line in after_mark.split("\n\n")[0].splitlines():
        if "|" in line:
            rows.append([cell.strip() for cell in line.split("|")[1:-1]])
    header, _, *body = rows
    return {row[0]: dict(zip(header, row, strict=True)) for row in body}


def test_a_figure_by_hand():
    """What `meta` answers on parity, from the lines themselves."""
    wanted = {
        "model": "meta",
        "task": "parity",
        "length": 128,
        "train_length": 128,
        "metric": "exact_match",
        "recipe": "small",
        "position_embedding": "rope",
        "condition": "paper",
    }
    by_seed = {}
    for text in gzip.decompress(
        (ROOT / "results/small/results.jsonl.gz").read_bytes()
    ).splitlines():
        line = json.loads(text)
        if wanted.items() <= line.items() and "intervention" not in line:
            by_seed[line["seed"]] = 100 * line["value"]
    values = [by_seed[seed] for seed in sorted(by_seed)]
    reach = stats.t.ppf(0.975, len(values) - 1) * stdev(values) / sqrt(len(values))

    table = table_of(ROOT / "docs/results.md", "tasks")

    [row] = (cells for label, cells in table.items() if label.startswith("`meta`"))
    assert row["parity"] == f"{fmean(values):.1f} \u00b1 {reach:.1f}"
