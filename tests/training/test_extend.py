"""Context extension: a run from a checkpoint to a model of a longer context."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.training.extend import extend
from tests.numbers import ROUNDED
from tests.training.conftest import (
    ONE_STEP,
    Models,
    Pretraining,
    first_loss,
    text_loss,
)

LENGTH, FACTOR = 32, 4.0  # tokens that the start was made for, and by how much they grow


@pytest.fixture(scope="module")
def start(small_model: Models) -> Path:
    """A checkpoint to extend."""
    return small_model(max_position_embeddings=LENGTH)


@pytest.fixture(scope="module")
def undisturbed(
    pretraining: Pretraining, start: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An extension that nothing interrupted."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    extend(start, out, factor=FACTOR, recipe=pretraining())
    return out


def test_it_trains_the_start_with_longer_rotary_tables_on_longer_blocks(
    pretraining: Pretraining,
    small_store: TokenStore,
    start: Path,
    undisturbed: Path,
    tmp_path: Path,
) -> None:
    extend(start, tmp_path / "run", factor=FACTOR, recipe=pretraining(*ONE_STEP))
    before, after = (
        load_file(start / "model.safetensors"),
        load_file(tmp_path / "run" / "model.safetensors"),
    )
    expected = text_loss(tmp_path / "run", small_store, "train", 4, size=128)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert first_loss(undisturbed) == pytest.approx(expected, rel=ROUNDED)


def test_the_result_is_a_model_of_the_longer_context(undisturbed: Path) -> None:
    model = load_model(undisturbed)
    assert model.config.max_position_embeddings == 128
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.config.rope_parameters["original_max_position_embeddings"] == LENGTH


def test_settings_are_recorded_and_others_refused(
    pretraining: Pretraining, start: Path, undisturbed: Path, small_model: Models
) -> None:
    settings = json.loads((undisturbed / "settings.json").read_text())
    stated = settings["recipe"]["model"]
    assert (settings["verb"], settings["factor"], settings["original_length"]) == (
        "extend",
        4.0,
        32,
    )
    assert settings["recipe"]["data"]["block_size"] == 128
    assert stated["max_position_embeddings"] == 128
    run = partial(extend, start, undisturbed, factor=FACTOR, recipe=pretraining())
    with pytest.raises(UserError, match=r"factor was 4\.0 and is now 8\.0"):
        run(factor=8.0)
    with pytest.raises(UserError, match="original_length was 32 and is now 16"):
        run(original_length=16)
    other = small_model(max_position_embeddings=LENGTH, initializer_range=0.1)
    with pytest.raises(UserError, match="init_sha256 was"):
        extend(other, undisturbed, factor=FACTOR, recipe=pretraining())


def test_what_cannot_be_extended_leaves_no_folder(
    pretraining: Pretraining, small_model: Models, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(UserError, match="'learned'"):
        extend(small_model(position_embedding="learned"), out, factor=FACTOR, recipe=pretraining())
    with pytest.raises(UserError, match="scaled already"):
        extend(undisturbed, out, factor=FACTOR, recipe=pretraining())
    with pytest.raises(UserError, match=r"must name data\.tokens"):
        extend(undisturbed, out, factor=FACTOR, recipe=pretraining("data.tokens=null"))
    assert not out.exists()
