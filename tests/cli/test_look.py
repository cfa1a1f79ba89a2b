"""`look`: the page that it writes, and the files that it keeps."""

import os
import re
import shutil
from pathlib import Path

import pytest

from metatokens.checkpoint import EXAMPLE, load_model
from metatokens.data.tokenizer import load_tokenizer
from metatokens.evaluation.accuracy import draw_test_examples
from metatokens.tasks.landmarks_alone import LandmarksAlone
from metatokens.tasks.scoring import score
from tests.cli.command_lines import Models, Run, Succeed

PROMPT = '"the cat _PAUSE_ sat _PAUSE_"'


def read(page: str) -> str:
    return Path(page).read_text(encoding="utf-8")


def test_a_page_of_two_models(workplace: Path, small_model: Models, metatokens: Run) -> None:
    meta, none = small_model(second_attention="meta"), small_model(second_attention="none")
    look = f"look --model {meta} --compare {none} {PROMPT} --out page.html"

    assert metatokens(look) == (0, "", "page: page.html\n")

    page = read("page.html")
    assert f"Answers of {meta}" in page
    assert f"Answers of {none}" in page
    assert page.count("among decoys</th>") == 2
    assert metatokens(look)[0] == 0  # its own file is replaced
    assert read("page.html") == page


def test_another_marker(workplace: Path, small_model: Models, run: Succeed) -> None:
    model = small_model(second_attention="meta")
    run(f'look --model {model} --marker "**" "the _PAUSE_ cat ** sat" --out marked.html')
    run(f'look --model {model} --marker "**" "the _PAUSE_ cat sat" --out plain.html')
    assert "among decoys</th>" in read("marked.html")
    assert "among decoys</th>" not in read("plain.html")


def test_landmarks_by_a_rule(workplace: Path, small_model: Models, run: Succeed) -> None:
    look = f'look --model {small_model(second_attention="meta")} "the cat\nsat"'
    run(f"{look} --landmarks line --out landmarks.html")
    run(f"{look} --out plain.html")
    assert "among decoys</th>" in read("landmarks.html")
    assert "among decoys</th>" not in read("plain.html")


def test_files_of_others_are_kept(workplace: Path, small_model: Models, metatokens: Run) -> None:
    look = f"look --model {small_model()} {PROMPT} --out"
    Path("thesis.html").write_text("years of work")

    kind = metatokens(f"{look} thesis.html")
    missing = metatokens(f"{look} missing/page.html")

    assert kind == (
        2,
        "",
        "metatokens: thesis.html is another kind of file, and is kept; give another name.\n",
    )
    assert missing == (
        2,
        "",
        "metatokens: cannot write to missing/page.html: No such file or directory.\n",
    )
    assert Path("thesis.html").read_text() == "years of work"


def test_the_model_that_comes_along_is_small_and_answers(
    workplace: Path, run: Succeed, metatokens: Run
) -> None:
    command = (
        'generate --model example --marker _PAUSE_ --max-new-tokens 1 "Birds: owl robin crow\n'
        'Metals: iron zinc copper\nBirds: owl robin _PAUSE_ crow\nQ: What is item 2 of Birds? _PAUSE_"'
    )
    look = 'look --model example "Bits: 0 1 1 1 _PAUSE_ 1\nQ: What is the XOR of all bits before this pause? _PAUSE_"'

    continued, _ = run(command)
    run(look)

    answers = re.findall(r"<td><code>(.*?)</code>", read("look.html").partition("<tbody>")[2])
    with_its_meta_tokens, _, _, with_the_text_covered = answers[:4]
    assert continued.endswith("_PAUSE_ robin\n")
    assert (with_its_meta_tokens, with_the_text_covered) == (" 1", " 1")
    assert sum(map(os.path.getsize, EXAMPLE.iterdir())) < 2_000_000
    shutil.copytree(EXAMPLE, "example")
    Path("example/config.json").write_text("{}")  # a folder of that name goes before
    assert metatokens(command)[0] == 2


# Guessing gives 4 and 20.
@pytest.mark.parametrize(("task", "expected"), [("list_recall", 40), ("parity", 32)])
def test_the_model_that_comes_along_answers_with_the_text_covered(task: str, expected: int) -> None:
    model, tokenizer = load_model(EXAMPLE), load_tokenizer(str(EXAMPLE))
    prompts = draw_test_examples(task, 128, 40, tokenizer, condition="paper", documents=[])
    exact, _ = score(model, prompts, alone=LandmarksAlone(model, tokenizer))
    assert sum(exact) >= expected
