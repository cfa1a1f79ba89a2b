"""Pretraining on a corpus that is tokenized meanwhile."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.recipe import PretrainRecipe
from metatokens.training.pretrain import pretrain

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # Python's own, about forking with threads
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
]
Recipes = Callable[..., PretrainRecipe]


@pytest.fixture
def streaming(pretraining: Callable[..., PretrainRecipe], small_store: TokenStore, small_corpus: Path) -> Recipes:
    """The recipe of `pretraining`, on a stream."""
    stream = ("data.tokens=null", f"data.corpus={small_corpus}", f"data.tokenizer={small_store.path / 'tokenizer'}")
    return lambda *overrides: pretraining(*stream, *overrides)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_was_cut_off_ends_like_one_that_was_not(
    workers: int, streaming: Recipes, steps: type, tmp_path: Path
) -> None:
    recipe = streaming(f"training.dataloader_num_workers={workers}")
    pretrain(recipe, tmp_path / "undisturbed")
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe, tmp_path / "run", progress=steps(stop_at=5))
    pretrain(recipe, tmp_path / "run")
    for name in ("model.safetensors", "curve.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


def test_a_run_goes_on_with_as_many_readers_alone(streaming: Recipes, steps: type, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pretrain(streaming(), tmp_path / "run", progress=steps(stop_at=3))
    with pytest.raises(UserError, match="readers"):
        pretrain(streaming("training.dataloader_num_workers=2"), tmp_path / "run")


def test_a_model_learns_from_a_stream(streaming: Recipes, tmp_path: Path) -> None:
    settings = ("training.max_steps=60", "training.save_steps=60", "training.learning_rate=0.02")
    pretrain(streaming(*settings), tmp_path / "run")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "curve.jsonl").read_text().splitlines()]
    assert losses[0] == pytest.approx(math.log(832), abs=0.5)  # 769 entries padded to 832, none of them preferred
    assert np.mean(losses[-10:]) < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.tokens=tokens"], "must name data.tokens, .* or both data.corpus and data.tokenizer"),
        (["data.tokenizer=null"], "must name data.tokens, .* or both data.corpus and data.tokenizer"),
        (["data.tokenizer=train:500"], "would be trained on all of the corpus before the stream begins"),
        (
            ["data.placement=sentence"],
            r"landmarks by sentence need a token store \(data.tokens\), and this is a stream",
        ),
        (["data.corpus=nowhere/*.txt"], "no file matches the corpus nowhere"),
    ],
)
def test_what_cannot_be_streamed_is_a_sentence(
    overrides: list[str], sentence: str, streaming: Recipes, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=sentence):
        pretrain(streaming(*overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_line_that_is_no_text_stops_a_run_in_one_sentence(streaming: Recipes, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"A document with the number {number}."}) for number in range(40)]
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines, '{"txt": "no text"}']))
    recipe = streaming(f"data.corpus={tmp_path / 'bad.jsonl'}", "training.dataloader_num_workers=1")
    with pytest.raises(UserError) as caught:
        pretrain(recipe, tmp_path / "run")
    assert str(caught.value) == f'{tmp_path / "bad.jsonl"}, line 41 has no text in its field "text".'
