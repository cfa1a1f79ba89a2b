"""Recipes: any YAML, any values; what is read comes back from what is written."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import metatokens
from metatokens.errors import UserError
from metatokens.recipe import FinetuneRecipe, PretrainRecipe, load_recipe
from tests.hostile.drawing import JSON, SCALAR, TEXT, cases, damaged

Clean = Callable[[], AbstractContextManager[None]]

GOOD = [path.read_bytes() for path in sorted((Path(metatokens.__file__).parent / "recipes").iterdir())]
KINDS = st.sampled_from([PretrainRecipe, FinetuneRecipe])
SECTIONS = {
    "data": ["tokens", "block_size", "fraction", "placement"],
    "model": ["hidden_size", "num_hidden_layers", "num_attention_heads", "bias", "position_embedding"],
    "task": ["train_lengths", "train_steps", "condition", "examples", "loss_on"],
    "training": [
        "max_steps",
        "learning_rate",
        "seed",
        "report_to",
        "bf16",
        "position_jumps",
        "warmup_steps",
    ],
}
PIECES = [
    "training:", " max_steps: ", "10", "\n", "  ", "- ", "? ", ": ", "[", "]", "{", "}", "&a ", "*a", "%YAML 9.9",
    "<<: *a", "!!timestamp ", "!!python/object/apply:os.system ", "!!binary ", "!!set ", "!!bool x", "!!float ",
    "!!int ", "---", "...", "'", '"', "|", ">", "#", "1:60", "0x", "2001-99-99", "1" * 5_000, ".inf", "~", "\t",
    "\0", "é", "\\",
]  # fmt: skip


def read(kind: type[PretrainRecipe] | type[FinetuneRecipe], path: Path) -> None:
    recipe = load_recipe(kind, str(path))
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    assert load_recipe(kind, str(path)) == recipe


@cases(150)
@given(kind=KINDS, text=st.lists(st.sampled_from(PIECES) | TEXT, max_size=30).map("".join))
def test_any_text(
    kind: type[PretrainRecipe], text: str, tmp_path_factory: pytest.TempPathFactory, clean: Clean
) -> None:
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with clean():
        read(kind, path)


@cases(75)
@given(kind=KINDS, text=st.sampled_from(GOOD).flatmap(damaged))
def test_damaged_recipes(
    kind: type[PretrainRecipe], text: bytes, tmp_path_factory: pytest.TempPathFactory, clean: Clean
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_bytes(text)
    with clean():
        read(kind, path)


@st.composite
def settings_of_any_value(draw: st.DrawFn) -> object:
    sections = {
        name: draw(st.dictionaries(st.sampled_from(fields) | TEXT, SCALAR | JSON, max_size=3) | JSON)
        for name, fields in SECTIONS.items()
        if draw(st.booleans())
    }
    if isinstance(training := sections.get("training", {}), dict):
        sections["training"] = {"max_steps": 5} | training
    return sections


@cases(125)
@given(kind=KINDS, settings=settings_of_any_value() | JSON)
def test_any_values(
    kind: type[PretrainRecipe], settings: object, tmp_path_factory: pytest.TempPathFactory, clean: Clean
) -> None:
    path = tmp_path_factory.getbasetemp() / "values.yaml"
    path.write_text(json.dumps(settings))
    with clean():
        read(kind, path)


KEY = st.lists(st.sampled_from([*SECTIONS, *SECTIONS["training"], "", "__class__", "model_config"]), max_size=3)


@cases(100)
@given(key=KEY.map(".".join), value=st.lists(st.sampled_from(PIECES) | TEXT, max_size=4).map("".join))
def test_any_override(key: str, value: str, clean: Clean) -> None:
    with clean():
        load_recipe(PretrainRecipe, "demo", [f"{key}={value}"])


LAUGHS = "\n".join([f"a0: &a0 [{'x,' * 9}x]", *(f"a{i}: &a{i} [{f'*a{i - 1},' * 9}*a{i - 1}]" for i in range(1, 12))])
MERGES = "\n".join([f"a{i}: &a{i}\n  <<: [{f'*a{i - 1},' * 9}*a{i - 1}]" for i in range(1, 12)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LAUGHS, "aliases are not allowed"),
        (f"a0: &a0 {{x: 1}}\n{MERGES}", "aliases are not allowed"),
        ("training: &a [*a]", "aliases are not allowed"),
        ("[" * 30_000, "maximum recursion depth exceeded"),
        ("# a comment\n" * 10_000, "it has more than 65,536 bytes"),
        ("training: !!python/object/apply:os.abort []", "could not determine a constructor"),
        ("training: {max_steps: " + "9" * 5_000 + "}", "Exceeds the limit"),
        ("training: {max_steps: 1e400}", "training.max_steps"),
        ("training: {max_steps: 3000000000}", "less than 2147483648"),
        ("training: {max_steps: 1, seed: 4294967296}", "less than 2147483648"),
        ("training: {max_steps: 1, position_jumps: 2000000000}", "less than or equal to 1048576"),
        ("training: {max_steps: 1, learning_rate: .nan}", "training.learning_rate"),
    ],
)
def test_bombs_are_put_out(text: str, said: str, tmp_path: Path, clean: Clean) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    with clean(), pytest.raises(UserError, match=said):
        load_recipe(PretrainRecipe, str(path))
