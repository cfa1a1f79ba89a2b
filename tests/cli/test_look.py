"""`look`: the page and the picture that it writes, and the files that it keeps."""

import re
import shutil
from pathlib import Path

from PIL import Image

from metatokens.checkpoint import EXAMPLE, load_model
from metatokens.data.tokenizer import load_tokenizer
from metatokens.evaluation.accuracy import draw_test_examples
from metatokens.tasks.landmarks_alone import LandmarksAlone
from metatokens.tasks.scoring import score
from tests.cli.command_lines import Models, Run

PROMPT = '"the cat _PAUSE_ sat _PAUSE_"'
README_PROMPT = '"Bits: 0 1 1 1 _PAUSE_ 1\nQ: What is the XOR of all bits before this pause? _PAUSE_"'


def test_a_page_and_a_picture_of_two_models(workplace: Path, small_model: Models, metatokens: Run) -> None:
    folders = [small_model(second_attention=second) for second in ("meta", "none")]
    look = f"look --model {folders[0]} --compare {folders[1]} {PROMPT} --out page.html --png page.png"
    assert metatokens(look) == (0, "", "page: page.html\npicture: page.png\n")
    page = (workplace / "page.html").read_text(encoding="utf-8")
    assert all(f"Answers of {folder}" in page for folder in folders)
    assert page.count("among decoys</th>") == 2
    with Image.open(workplace / "page.png") as picture:
        assert min(picture.size) > 300
    assert metatokens(look)[0] == 0  # its own files are replaced
    assert (workplace / "page.html").read_text(encoding="utf-8") == page


def test_another_marker(workplace: Path, small_model: Models, metatokens: Run) -> None:
    model = small_model(second_attention="meta")
    assert metatokens(f'look --model {model} --marker "**" "the _PAUSE_ cat ** sat"')[0] == 0
    page = (workplace / "look.html").read_text(encoding="utf-8")
    assert "among decoys</th>" in page
    assert metatokens(f'look --model {model} --marker "**" "the _PAUSE_ cat sat"')[0] == 0
    assert "among decoys</th>" not in (workplace / "look.html").read_text(encoding="utf-8")


def test_files_of_others_are_kept(workplace: Path, small_model: Models, metatokens: Run) -> None:
    model = small_model()
    for name, option in (("thesis.html", "--out"), ("thesis.png", "--png")):
        (workplace / name).write_text("years of work")
        status, output, error = metatokens(f"look --model {model} {PROMPT} {option} {name}")
        assert (status, output) == (2, "")
        assert error.endswith(f"metatokens: {name} is another kind of file, and is kept; give another name.\n")
        assert (workplace / name).read_text() == "years of work"
    status, _, error = metatokens(f"look --model {model} {PROMPT} --out missing/page.html")
    assert (status, error) == (2, "metatokens: cannot write to missing/page.html: No such file or directory.\n")


def test_the_model_that_comes_along_is_small_and_answers(workplace: Path, metatokens: Run) -> None:
    assert sum(file.stat().st_size for file in EXAMPLE.iterdir()) < 2_000_000
    command = (
        'generate --model example --marker _PAUSE_ --max-new-tokens 1 "Birds: owl robin crow\n'
        'Metals: iron zinc copper\nBirds: owl robin _PAUSE_ crow\nQ: What is item 2 of Birds? _PAUSE_"'
    )
    assert metatokens(command)[1].endswith("_PAUSE_ robin\n")
    assert metatokens(f"look --model example {README_PROMPT}")[0] == 0
    page = (workplace / "look.html").read_text(encoding="utf-8")
    answers = re.findall(r"<td><code>(.*?)</code>", page.partition("<tbody>")[2])[:4]
    assert (answers[0], answers[3]) == (" 1", " 1")  # with its meta-tokens, and with the text covered
    shutil.copytree(EXAMPLE, "example")
    Path("example/config.json").write_text("{}")  # a folder of that name goes before
    assert metatokens(command)[0] == 2


def test_the_model_that_comes_along_answers_with_the_text_covered() -> None:
    model, tokenizer = load_model(EXAMPLE), load_tokenizer(str(EXAMPLE))
    for task, least in (("list_recall", 40), ("parity", 32)):
        tests = draw_test_examples(task, 128, 40, tokenizer, condition="paper", documents=[])
        exact, _ = score(model, tests, alone=LandmarksAlone(model, tokenizer))
        assert sum(exact) >= least  # guessing gives 4 and 20
