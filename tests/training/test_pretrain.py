"""Pretraining: it learns, it resumes where it was interrupted, and it starts from other models."""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.data.writing import write_token_store
from metatokens.errors import UserError
from metatokens.training.pretrain import pretrain
from metatokens.training.run_folder import training_of
from tests.numbers import ROUNDED
from tests.training.conftest import (
    ONE_STEP,
    Pretraining,
    curve,
    figures_of,
    first_loss,
    interrupt,
    result,
    text_loss,
)

RUN_FILES = {
    ".lock",
    "checkpoints",
    "config.json",
    "curve.jsonl",
    "generation_config.json",
    "manifest.json",
    "metatokens_classes.py",
    "model.safetensors",
    "settings.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def undisturbed(pretraining: Pretraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    pretrain(pretraining(), out)
    return out


def test_the_folder_holds_a_model_in_safetensors_and_the_curve(undisturbed: Path) -> None:
    files = {path.name for path in undisturbed.iterdir()}
    checkpoints = {path.name for path in (undisturbed / "checkpoints").iterdir()}
    pickles = {path.name for path in undisturbed.rglob("*.bin")}
    fields = {name for point in curve(undisturbed) for name in point}
    assert files == RUN_FILES
    assert checkpoints == {"checkpoint-6", "checkpoint-8"}
    assert pickles == {"training_args.bin"}  # which is never read
    assert fields == {"step", "loss", "learning_rate", "grad_norm"}
    assert training_of(undisturbed) == {"seed": 0}


def test_a_model_learns(pretraining: Pretraining, tmp_path: Path) -> None:
    recipe = pretraining(
        "training.max_steps=60", "training.save_steps=60", "training.learning_rate=0.02"
    )
    pretrain(recipe, tmp_path / "run")
    losses = figures_of(tmp_path / "run", "loss")
    # 769 entries padded to 832, none of them preferred.
    assert losses[0] == pytest.approx(math.log(832), abs=0.5)
    assert np.mean(losses[-10:]) < 0.6 * losses[0]


# --- measurements during training


def test_the_held_out_loss_is_measured_and_nothing_else_changes(
    pretraining: Pretraining, undisturbed: Path, steps: type, tmp_path: Path
) -> None:
    run = partial(pretrain, pretraining("training.eval_steps=3"), tmp_path / "run")
    interrupt(run, steps, 5)
    seen = steps()
    run(progress=seen)
    ours, theirs = result(tmp_path / "run"), result(undisturbed)
    changed = {name for name in ours if ours[name] != theirs[name]}
    points = curve(tmp_path / "run")
    with_loss = [point for point in points if "loss" in point]
    measured = {point["step"]: point["eval_loss"] for point in points if "eval_loss" in point}
    shown = [figures["eval_loss"] for figures in seen.figures[-3:]]  # at the steps 6 to 8
    assert changed == {"curve.jsonl", "manifest.json"}
    assert with_loss == curve(undisturbed)
    assert list(measured) == [3, 6, 8]
    assert shown == [measured[6], measured[6], measured[8]]


def test_the_held_out_loss_is_the_mean_over_the_text_of_held_out_blocks(
    pretraining: Pretraining,
    small_store: TokenStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A whole batch, and a half.
    monkeypatch.setattr("metatokens.training.pretrain.HELD_OUT_BLOCKS", 6)
    pretrain(pretraining(*ONE_STEP, "training.eval_steps=1", "training.seed=3"), tmp_path / "run")
    expected = text_loss(tmp_path / "run", small_store, "held_out", 6, seed=3)
    assert figures_of(tmp_path / "run", "eval_loss") == [pytest.approx(expected, rel=ROUNDED)]


@pytest.mark.parametrize(("batch", "every"), [(64, 2), (60, 3), (4, 23)])
def test_the_held_out_loss_is_measured_ten_times_or_less_often_in_a_short_run(
    batch: int, every: int, pretraining: Pretraining
) -> None:
    settings = pretraining(
        "training.max_steps=23",
        "training.eval_steps=null",
        f"training.per_device_train_batch_size={batch}",
    )
    # Training reads twice as many blocks in between, or more.
    assert settings.training.measured_every(64) == every


def test_a_held_out_split_shorter_than_a_block_is_not_measured_unless_it_is_asked_for(
    pretraining: Pretraining, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = ("data.block_size=6000", "model.max_position_embeddings=6000", "training.max_steps=1")
    with pytest.raises(UserError, match=r"the held_out split .* too few for one block of 6000"):
        pretrain(pretraining(*long, "training.eval_steps=1"), tmp_path / "asked")
    pretrain(pretraining(*long, "training.eval_steps=null"), tmp_path / "long")
    assert "No held-out loss is measured: the held_out split of " in capsys.readouterr().err
    assert figures_of(tmp_path / "long", "eval_loss") == []


def test_a_held_out_split_without_landmarks_is_not_measured(
    pretraining: Pretraining, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"Line {number} ends." for number in range(1000)))
    write_token_store(tmp_path / "store", str(text), "train:300")
    recipe = pretraining(
        "training.max_steps=1",
        "training.eval_steps=null",
        f"data.tokens={tmp_path / 'store'}",
        "data.placement=sentence",
    )
    pretrain(recipe, tmp_path / "run")
    assert "No held-out loss is measured: the rule sentence " in capsys.readouterr().err


def test_a_held_out_split_that_was_altered_ends_the_run(
    pretraining: Pretraining, small_store: TokenStore, tmp_path: Path
) -> None:
    store = shutil.copytree(small_store.path, tmp_path / "store")
    shard = next((store / "held_out").glob("*.bin"))
    content = bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.write_bytes(content)
    for placement in ("uniform", "every:9"):
        recipe = pretraining(
            *ONE_STEP,
            f"data.tokens={store}",
            f"data.placement={placement}",
            "training.eval_steps=null",
        )
        with pytest.raises(UserError, match="altered"):
            pretrain(recipe, tmp_path / placement.replace(":", "-"))


def test_progress_has_the_latest_figures(
    pretraining: Pretraining, steps: type, tmp_path: Path
) -> None:
    seen = steps()
    settings = ("training.logging_steps=4", "training.eval_steps=3", "training.save_steps=100")
    pretrain(pretraining(*settings), tmp_path / "run", progress=seen)
    first, second, last = figures_of(tmp_path / "run", "loss")  # at steps 1, 4 and 8
    before, after, at_end = figures_of(tmp_path / "run", "eval_loss")  # at steps 3, 6 and 8
    shown_losses = [figures["loss"] for figures in seen.figures]
    shown_held_out = [figures.get("eval_loss") for figures in seen.figures]
    assert shown_losses == [first] * 3 + [second] * 4 + [last]
    assert shown_held_out == [None] * 2 + [before] * 3 + [after] * 2 + [at_end]
    # 4 blocks; a look at the clock takes 2 seconds.
    assert seen.figures[0]["tokens_per_second"] == 4 * 32 / 2


# --- interrupted and resumed


@pytest.mark.quick(cuts=[(3, 7)])
@pytest.mark.parametrize("cuts", [(1,), (8,), (3, 7)])
def test_an_interrupted_run_ends_like_an_undisturbed_one(
    cuts: tuple[int, ...], pretraining: Pretraining, undisturbed: Path, steps: type, tmp_path: Path
) -> None:
    run = partial(pretrain, pretraining(), tmp_path / "run")
    interrupt(run, steps, *cuts)
    rest = steps()
    run(progress=rest)
    first = (cuts[-1] - 1) // 2 * 2 + 1  # the step after the last checkpoint
    assert rest == list(range(first, 9))
    assert result(tmp_path / "run") == result(undisturbed)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty_random_numbers(checkpoint: Path) -> None:
    for path in checkpoint.parent.glob("*/rng_state.pth"):
        path.write_bytes(b"")


DAMAGES: dict[
    str, tuple[Callable[[Path], object], int]
] = {  # and the step at which the run goes on
    "weights with a flipped byte": (
        lambda checkpoint: flip_a_byte(checkpoint / "model.safetensors"),
        5,
    ),
    "killed before the manifest": (lambda checkpoint: (checkpoint / "manifest.json").unlink(), 5),
    "random numbers of both": (empty_random_numbers, 1),
}


@pytest.mark.quick(name=["weights with a flipped byte"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_dropped_for_the_one_before(
    name: str,
    pretraining: Pretraining,
    undisturbed: Path,
    steps: type,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage, first = DAMAGES[name]
    run = partial(pretrain, pretraining(), tmp_path / "run")
    interrupt(run, steps, 7)
    damage(tmp_path / "run" / "checkpoints" / "checkpoint-6")
    rest = steps()
    run(progress=rest)
    assert rest == list(range(first, 9))
    assert result(tmp_path / "run") == result(undisturbed)
    assert "checkpoint-6" in capsys.readouterr().err


# Python's own, about forking with threads.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_shard_is_named_before_any_training_on_it(
    workers: int, pretraining: Pretraining, small_store: TokenStore, steps: type, tmp_path: Path
) -> None:
    shutil.copytree(small_store.path, tmp_path / "tokens")
    (shard,) = (tmp_path / "tokens" / "train").iterdir()
    flip_a_byte(shard)
    seen = steps()
    recipe = pretraining(
        f"data.tokens={tmp_path / 'tokens'}", f"training.dataloader_num_workers={workers}"
    )
    with pytest.raises(UserError) as caught:
        pretrain(recipe, tmp_path / "run", progress=seen)
    assert (
        str(caught.value)
        == f"{shard} is missing, cut short or altered: write the store again, with --overwrite."
    )
    assert seen == []


def test_other_settings_are_refused_and_overwriting_replaces(
    pretraining: Pretraining,
    undisturbed: Path,
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
) -> None:
    pretrain(pretraining("training.seed=1"), tmp_path / "run")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"recipe\.training\.seed was 1 and is now 0"):
        pretrain(pretraining(), tmp_path / "run")
    assert contents(tmp_path) == before
    pretrain(pretraining(), tmp_path / "run", overwrite=True)
    assert result(tmp_path / "run") == result(undisturbed)


def test_a_finished_run_is_not_repeated_whatever_does_not_change_its_result(
    pretraining: Pretraining,
    small_store: TokenStore,
    undisturbed: Path,
    steps: type,
    tmp_path: Path,
) -> None:
    (tmp_path / "moved").symlink_to(small_store.path)
    before = result(undisturbed)
    seen = steps()
    settings = ("training.report_to=all", "training.dataloader_num_workers=1")
    pretrain(
        pretraining(f"data.tokens={tmp_path / 'moved'}", *settings), undisturbed, progress=seen
    )
    assert seen == []
    assert result(undisturbed) == before


# --- the loss, and what does not change it


def test_the_curve_has_the_first_step_and_every_logged_one(
    pretraining: Pretraining, undisturbed: Path, tmp_path: Path
) -> None:
    pretrain(pretraining("training.logging_steps=4", "training.save_steps=4"), tmp_path / "run")
    losses = figures_of(undisturbed, "loss")
    logged = {point["step"]: point["loss"] for point in curve(tmp_path / "run")}
    means_since_the_one_before = {
        1: losses[0],
        4: np.mean(losses[1:4]),
        8: np.mean(losses[4:]),
    }
    assert logged == pytest.approx(means_since_the_one_before)


def test_the_first_loss_is_the_mean_over_the_batchs_text_tokens(
    pretraining: Pretraining, small_store: TokenStore, undisturbed: Path, tmp_path: Path
) -> None:
    pretrain(pretraining(*ONE_STEP), tmp_path / "run")
    expected = text_loss(tmp_path / "run", small_store, "train", 4)
    assert first_loss(undisturbed) == pytest.approx(expected, rel=ROUNDED)


# --- starting from a model


@pytest.fixture(scope="module")
def gpt2(small_store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 as transformers saves it, with the store's tokenizer and random weights."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=16, n_layer=1, n_head=2, n_positions=40, vocab_size=small_store.manifest.vocab_size
    )
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(config).save_pretrained(folder)
    small_store.tokenizer.save_pretrained(folder)
    return folder


def test_a_run_starts_from_an_own_checkpoint(
    pretraining: Pretraining, undisturbed: Path, tmp_path: Path
) -> None:
    pretrain(pretraining(*ONE_STEP), tmp_path / "run", init=undisturbed)
    start, end = (
        load_file(undisturbed / "model.safetensors"),
        load_file(tmp_path / "run" / "model.safetensors"),
    )
    torch.testing.assert_close(end, start, rtol=0, atol=0)


def test_a_run_that_starts_from_a_checkpoint_resumes(
    pretraining: Pretraining, undisturbed: Path, steps: type, tmp_path: Path
) -> None:
    pretrain(pretraining(), tmp_path / "undisturbed", init=undisturbed)
    run = partial(pretrain, pretraining(), tmp_path / "run", init=undisturbed)
    interrupt(run, steps, 5)
    run()
    assert result(tmp_path / "run") == result(tmp_path / "undisturbed")


def test_the_settings_state_the_model_that_is_trained(
    pretraining: Pretraining, undisturbed: Path, tmp_path: Path
) -> None:
    recipe = pretraining(*ONE_STEP, "model.hidden_size=64", "model.second_attention=causal")
    pretrain(recipe, tmp_path / "run", init=undisturbed)
    stated = json.loads((tmp_path / "run" / "settings.json").read_text())["recipe"]["model"]
    trained = load_model(undisturbed).config
    assert stated["hidden_size"] == trained.hidden_size != 64
    assert stated["second_attention"] == trained.second_attention == "meta"
    with pytest.raises(UserError, match="init_sha256 was"):
        pretrain(recipe, tmp_path / "run", init=None)


def test_a_model_whose_vocabulary_does_not_fit_the_text_is_refused(
    pretraining: Pretraining, gpt2: Path, tmp_path: Path
) -> None:
    recipe = pretraining("model.second_attention=none")
    with pytest.raises(
        UserError, match=r"model's meta_token_id is None and that of the text's tokenizer 768"
    ):
        pretrain(recipe, tmp_path / "run", init=gpt2)
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=300)).save_pretrained(
        tmp_path / "small"
    )
    with pytest.raises(UserError, match="300 vocabulary entries and the text's tokenizer 768"):
        pretrain(recipe, tmp_path / "run", init=tmp_path / "small")
    shutil.copytree(gpt2, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"tokenized with another tokenizer than that of .*other"):
        pretrain(pretraining("data.placement=none"), tmp_path / "run", init=tmp_path / "other")
    assert not (tmp_path / "run").exists()
