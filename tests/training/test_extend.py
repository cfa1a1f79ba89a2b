"""Context extension: a run from a checkpoint to a model of a longer context, cut off and resumed."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from metatokens.checkpoint import load_model
from metatokens.data.blocks import BlockDataset
from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.evaluation.perplexity import held_out_text, perplexity
from metatokens.recipe import PretrainRecipe
from metatokens.records import About
from metatokens.training.extend import extend

LENGTH, FACTOR = 32, 4.0  # tokens that the start was made for, and by how much they grow


@pytest.fixture(scope="module")
def start(small_model: Callable[..., Path]) -> Path:
    """A checkpoint to extend."""
    return small_model(max_position_embeddings=LENGTH)


@pytest.fixture(scope="module")
def undisturbed(
    pretraining: Callable[..., PretrainRecipe], start: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An extension that nothing interrupted."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    extend(start, out, factor=FACTOR, recipe=pretraining())
    return out


def first_loss(folder: Path) -> float:
    return json.loads((folder / "curve.jsonl").read_text().splitlines()[0])["loss"]


def test_an_extension_that_was_cut_off_ends_like_one_that_was_not(
    pretraining: Callable[..., PretrainRecipe], start: Path, undisturbed: Path, steps: type, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        extend(start, tmp_path / "run", factor=FACTOR, recipe=pretraining(), progress=steps(stop_at=5))
    rest = steps()
    extend(start, tmp_path / "run", factor=FACTOR, recipe=pretraining(), progress=rest)
    assert rest == [5, 6, 7, 8]
    for path in undisturbed.iterdir():
        assert path.is_dir() or (tmp_path / "run" / path.name).read_bytes() == path.read_bytes(), path.name
    again = steps()
    extend(start, tmp_path / "run", factor=FACTOR, recipe=pretraining(), progress=again)
    assert again == []


def test_the_settings_state_the_longer_model(undisturbed: Path) -> None:
    stated = json.loads((undisturbed / "settings.json").read_text())["recipe"]["model"]
    assert (stated["num_hidden_layers"], stated["max_position_embeddings"], stated["initializer_range"]) == (
        2,
        128,
        0.2,
    )


def test_it_trains_the_start_with_longer_rotary_tables_on_longer_blocks(
    pretraining: Callable[..., PretrainRecipe], small_store: TokenStore, start: Path, undisturbed: Path, tmp_path: Path
) -> None:
    # The first step has a learning rate of 0, so after it the weights are the start's.
    extend(start, tmp_path / "run", factor=FACTOR, recipe=pretraining("training.max_steps=1", "training.save_steps=1"))
    before, after = (load_file(folder / "model.safetensors") for folder in (start, tmp_path / "run"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    model = load_model(tmp_path / "run").double()
    blocks = BlockDataset(small_store, "train", block_size=128, fraction=0.1, placement="uniform", seed=0)
    losses = []
    for index in range(4):
        ids, labels = (torch.from_numpy(blocks[index][name]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            log_probabilities = model(ids[None]).logits[0].log_softmax(-1)
        losses += [-log_probabilities[i - 1, ids[i]].item() for i in range(1, 128) if labels[i] != -100]
    assert first_loss(tmp_path / "run") == first_loss(undisturbed) == pytest.approx(np.mean(losses), rel=1e-5)


def test_the_result_is_a_model_of_the_longer_context_and_can_read_beyond_it(
    small_store: TokenStore, undisturbed: Path
) -> None:
    model = load_model(undisturbed)
    assert model.config.max_position_embeddings == 128
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.config.rope_parameters["original_max_position_embeddings"] == LENGTH
    text = held_out_text(str(small_store.path), small_store.tokenizer)
    for length in (128, 256):
        figure = perplexity(
            model, text, block_size=length, fraction=0.1, placement="uniform", about=About(model="extended")
        )
        assert 1 < figure.value < 1000


def test_settings_are_recorded_and_others_refused(
    pretraining: Callable[..., PretrainRecipe], start: Path, undisturbed: Path, small_model: Callable[..., Path]
) -> None:
    settings = json.loads((undisturbed / "settings.json").read_text())
    assert (settings["verb"], settings["factor"], settings["original_length"]) == ("extend", 4.0, 32)
    assert settings["recipe"]["data"]["block_size"] == 128
    with pytest.raises(UserError, match=r"factor was 4\.0 and is now 8\.0"):
        extend(start, undisturbed, factor=8.0, recipe=pretraining())
    with pytest.raises(UserError, match="original_length was 32 and is now 16"):
        extend(start, undisturbed, factor=FACTOR, recipe=pretraining(), original_length=16)
    other = small_model(max_position_embeddings=LENGTH, initializer_range=0.1)
    with pytest.raises(UserError, match="init_sha256 was"):
        extend(other, undisturbed, factor=FACTOR, recipe=pretraining())


def test_a_model_made_for_more_than_it_was_trained_on_is_extended_from_what_it_was(
    pretraining: Callable[..., PretrainRecipe], small_model: Callable[..., Path], undisturbed: Path, tmp_path: Path
) -> None:
    roomy = small_model(max_position_embeddings=1024)
    extend(roomy, tmp_path / "run", factor=FACTOR, recipe=pretraining(), original_length=LENGTH)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "run" / name).read_bytes() == (undisturbed / name).read_bytes()


def test_what_cannot_be_extended_leaves_no_folder(
    pretraining: Callable[..., PretrainRecipe], small_model: Callable[..., Path], undisturbed: Path, tmp_path: Path
) -> None:
    for model, message in ((small_model(position_embedding="learned"), "'learned'"), (undisturbed, "scaled already")):
        with pytest.raises(UserError, match=message):
            extend(model, tmp_path / "run", factor=FACTOR, recipe=pretraining())
    with pytest.raises(UserError, match=r"must name data\.tokens"):
        extend(undisturbed, tmp_path / "run", factor=FACTOR, recipe=pretraining("data.tokens=null"))
    assert not (tmp_path / "run").exists()
