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
from metatokens.data.blocks import BlockDataset
from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.training.pretrain import pretrain
from metatokens.training.run_folder import training_of
from tests.numbers import ROUNDED
from tests.training.conftest import ONE_STEP, Pretraining, curve, interrupt, result, text_loss, weights

MODEL_FILES = {"config.json", "curve.jsonl", "generation_config.json", "manifest.json", "model.safetensors"}
MODEL_FILES |= {"metatokens_classes.py", "settings.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def undisturbed(pretraining: Pretraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    pretrain(pretraining(), out)
    return out


def test_the_folder_holds_a_model_in_safetensors_and_the_curve(undisturbed: Path) -> None:
    assert {path.name for path in undisturbed.iterdir()} == MODEL_FILES | {"checkpoints", ".lock"}
    found = [path for path in undisturbed.rglob("*") if path.suffix in (".bin", ".safetensors")]
    assert {path.name for path in found} == {"model.safetensors", "training_args.bin"}  # the latter is never read
    assert sorted(path.name for path in (undisturbed / "checkpoints").iterdir()) == ["checkpoint-6", "checkpoint-8"]
    assert all(point.keys() == {"step", "loss", "learning_rate", "grad_norm"} for point in curve(undisturbed))
    assert training_of(undisturbed) == {"seed": 0}


@pytest.mark.quick(second_attention=["meta"])
@pytest.mark.parametrize("second_attention", ["meta", "none"])
def test_a_model_learns(second_attention: str, pretraining: Pretraining, tmp_path: Path) -> None:
    settings = ("training.max_steps=60", "training.save_steps=60", "training.learning_rate=0.02")
    pretrain(pretraining(*settings, f"model.second_attention={second_attention}"), tmp_path / "run")
    losses = [point["loss"] for point in curve(tmp_path / "run")]
    assert losses[0] == pytest.approx(math.log(832), abs=0.5)  # 769 entries padded to 832, none of them preferred
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
    assert {name for name in ours if ours[name] != theirs[name]} == {"curve.jsonl", "manifest.json"}
    points = curve(tmp_path / "run")
    assert [point for point in points if "loss" in point] == curve(undisturbed)
    measured = {point["step"]: point for point in points if "loss" not in point}
    assert [point.keys() for point in measured.values()] == [{"step", "eval_loss"}] * 2
    assert list(measured) == [3, 6]
    figures = [measured[step]["eval_loss"] for step in (3, 6, 6, 6)]  # at the steps 5 to 8
    assert [figure["eval_loss"] for figure in seen.figures] == figures


def test_the_held_out_loss_is_the_mean_over_the_text_of_held_out_blocks(
    pretraining: Pretraining, small_store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metatokens.training.pretrain.HELD_OUT_BLOCKS", 6)  # a whole batch, and a half
    pretrain(pretraining(*ONE_STEP, "training.eval_steps=1", "training.seed=3"), tmp_path / "run")
    [measured] = (point["eval_loss"] for point in curve(tmp_path / "run") if "eval_loss" in point)
    assert measured == pytest.approx(text_loss(tmp_path / "run", small_store, "held_out", 6, seed=3), rel=ROUNDED)


def test_the_held_out_loss_is_measured_ten_times_or_less_often_in_a_short_run(
    pretraining: Pretraining, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("training.max_steps=23", "training.save_steps=23", "training.eval_steps=null")
    for batch, every in ((64, 2), (16, 8), (4, 23)):  # of 64 blocks; training reads twice as many in between
        pretrain(pretraining(*settings, f"training.per_device_train_batch_size={batch}"), tmp_path / f"{batch}")
        steps = [point["step"] for point in curve(tmp_path / f"{batch}") if "eval_loss" in point]
        assert steps == list(range(every, 24, every))
    long = ("data.block_size=6000", "model.max_position_embeddings=6000", "training.max_steps=1")
    with pytest.raises(UserError, match=r"the held_out split .* too few for one block of 6000"):
        pretrain(pretraining(*long, "training.eval_steps=1"), tmp_path / "asked")
    assert "held-out" not in capsys.readouterr().err
    pretrain(pretraining(*long, "training.eval_steps=null"), tmp_path / "long")
    assert "No held-out loss is measured: the held_out split of " in capsys.readouterr().err
    assert not any("eval_loss" in point for point in curve(tmp_path / "long"))


def test_progress_has_the_latest_figures_with_their_steps_and_the_speed_without_measuring(
    pretraining: Pretraining, steps: type, tmp_path: Path
) -> None:
    speeds = []
    for every in (0, 3):
        seen, out = steps(), tmp_path / f"{every}"
        settings = ("training.logging_steps=4", f"training.eval_steps={every}", "training.save_steps=100")
        pretrain(pretraining(*settings), out, progress=seen)
        speeds.append([figures["tokens_per_second"] for figures in seen.figures])
    logged = [1, 1, 1, 4, 4, 4, 4, 8]  # at each step, the last one that was logged
    assert [at["loss"] for at in seen.measured_at] == logged
    assert [at.get("eval_loss") for at in seen.measured_at] == [None, None, 3, 3, 3, 6, 6, 6]
    points = {point["step"]: point for point in curve(out) if "loss" in point}
    for name in ("loss", "learning_rate"):
        assert [figures[name] for figures in seen.figures] == [points[step][name] for step in logged]
    # A step reads 4 blocks of 32 tokens, and the clock moves 2 seconds each time it is read.
    assert speeds[0][0] == 4 * 32 / 2
    assert speeds[0] == pytest.approx(speeds[1], rel=0.3)  # the clock is read once more, and that is all


# --- interrupted and resumed


@pytest.mark.quick(cuts=[(3, 7)])
@pytest.mark.parametrize("cuts", [(1,), (5,), (8,), (3, 7), (5, 5)])
def test_an_interrupted_run_ends_like_an_undisturbed_one(
    cuts: tuple[int, ...], pretraining: Pretraining, undisturbed: Path, steps: type, tmp_path: Path
) -> None:
    run = partial(pretrain, pretraining(), tmp_path / "run")
    first = 1
    for cut in cuts:
        seen = steps(stop_at=cut)
        with pytest.raises(KeyboardInterrupt):
            run(progress=seen)
        assert seen == list(range(first, cut + 1))
        first = (cut - 1) // 2 * 2 + 1  # the step after the last checkpoint
    rest = steps()
    run(progress=rest)
    assert rest == list(range(first, 9))
    assert result(tmp_path / "run") == result(undisturbed)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "weights with a flipped byte": lambda folder: flip_a_byte(folder / "model.safetensors"),
    "optimizer cut short": lambda folder: (folder / "optimizer.pt").write_bytes(b"PK"),
    "state missing": lambda folder: (folder / "trainer_state.json").unlink(),
    "killed before the manifest": lambda folder: (folder / "manifest.json").unlink(),
    "random numbers of both": lambda folder: [path.write_bytes(b"") for path in folder.parent.glob("*/rng_state.pth")],
}


@pytest.mark.quick(name=["weights with a flipped byte", "random numbers of both"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_dropped_for_the_one_before(
    name: str,
    pretraining: Pretraining,
    undisturbed: Path,
    steps: type,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = partial(pretrain, pretraining(), tmp_path / "run")
    interrupt(run, steps, 7)
    DAMAGES[name](tmp_path / "run" / "checkpoints" / "checkpoint-6")
    rest = steps()
    run(progress=rest)
    assert rest == list(range(1 if "both" in name else 5, 9))
    assert result(tmp_path / "run") == result(undisturbed)
    output = capsys.readouterr()
    assert output.out == ""
    assert "checkpoint-6" in output.err
    assert "dropped" in output.err


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python's own, about forking with threads
@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_shard_is_named_before_any_training_on_it(
    workers: int, pretraining: Pretraining, small_store: TokenStore, steps: type, tmp_path: Path
) -> None:
    shutil.copytree(small_store.path, tmp_path / "tokens")
    (shard,) = (tmp_path / "tokens" / "train").iterdir()
    flip_a_byte(shard)
    seen = steps()
    settings = (f"data.tokens={tmp_path / 'tokens'}", f"training.dataloader_num_workers={workers}")
    with pytest.raises(UserError) as caught:
        pretrain(pretraining(*settings), tmp_path / "run", progress=seen)
    assert str(caught.value) == f"{shard} is missing, cut short or altered: write the store again, with --overwrite."
    assert seen == []


def test_other_settings_are_refused_and_overwriting_replaces(
    pretraining: Pretraining, undisturbed: Path, contents: Callable[[Path], dict[str, bytes]], tmp_path: Path
) -> None:
    pretrain(pretraining("training.seed=1"), tmp_path / "run")
    assert curve(tmp_path / "run")[0]["loss"] != curve(undisturbed)[0]["loss"]
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"recipe\.training\.seed was 1 and is now 0"):
        pretrain(pretraining(), tmp_path / "run")
    assert contents(tmp_path) == before
    pretrain(pretraining(), tmp_path / "run", overwrite=True)
    assert result(tmp_path / "run") == result(undisturbed)


def test_a_finished_run_is_not_repeated_whatever_does_not_change_its_result(
    pretraining: Pretraining, small_store: TokenStore, undisturbed: Path, steps: type, tmp_path: Path
) -> None:
    (tmp_path / "moved").symlink_to(small_store.path)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in undisturbed.rglob("*.*") if path.is_file()}
    for changes in ((), (f"data.tokens={tmp_path / 'moved'}",), ("training.report_to=all", "training.fsdp=true")):
        seen = steps()
        pretrain(pretraining(*changes, "training.dataloader_num_workers=1"), undisturbed, progress=seen)
        assert seen == []
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before


# --- the loss, and what does not change it


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine of one core
def test_the_number_of_loading_workers_changes_nothing(
    pretraining: Pretraining, undisturbed: Path, tmp_path: Path
) -> None:
    pretrain(pretraining("training.dataloader_num_workers=2"), tmp_path / "run")
    assert weights(tmp_path / "run") == weights(undisturbed)
    assert curve(tmp_path / "run") == curve(undisturbed)


def test_accumulated_batches_are_one_large_batch(pretraining: Pretraining, undisturbed: Path, tmp_path: Path) -> None:
    pieces = ("training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=4")
    pretrain(pretraining(*pieces), tmp_path / "run")
    for ours, theirs in zip(curve(tmp_path / "run"), curve(undisturbed), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_curve_has_the_first_step_and_every_logged_one(
    pretraining: Pretraining, undisturbed: Path, tmp_path: Path
) -> None:
    pretrain(pretraining("training.logging_steps=4", "training.save_steps=4"), tmp_path / "run")
    losses = [point["loss"] for point in curve(undisturbed)]
    logged = {point["step"]: point["loss"] for point in curve(tmp_path / "run")}
    # Each is the mean since the one before.
    assert logged == pytest.approx({1: losses[0], 4: np.mean(losses[1:4]), 8: np.mean(losses[4:])})


def test_the_first_loss_is_the_mean_over_the_batchs_text_tokens(
    pretraining: Pretraining, small_store: TokenStore, undisturbed: Path, tmp_path: Path
) -> None:
    pretrain(pretraining(*ONE_STEP), tmp_path / "run")
    expected = text_loss(tmp_path / "run", small_store, "train", 4)
    assert curve(undisturbed)[0]["loss"] == pytest.approx(expected, rel=ROUNDED)


# --- starting from a model


@pytest.fixture(scope="module")
def gpt2(small_store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 as transformers saves it, with the store's tokenizer and random weights."""
    torch.manual_seed(0)
    sizes = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=40, vocab_size=small_store.manifest.vocab_size)
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(sizes).save_pretrained(folder)
    small_store.tokenizer.save_pretrained(folder)
    return folder


def test_a_run_starts_from_an_own_checkpoint(pretraining: Pretraining, undisturbed: Path, tmp_path: Path) -> None:
    pretrain(pretraining(*ONE_STEP), tmp_path / "run", init=undisturbed)
    start, end = (load_file(folder / "model.safetensors") for folder in (undisturbed, tmp_path / "run"))
    assert start.keys() == end.keys()
    assert all(torch.equal(start[name], end[name]) for name in start)
    pretrain(pretraining("training.seed=1"), tmp_path / "further", init=undisturbed)
    assert curve(tmp_path / "further")[-1]["loss"] < curve(undisturbed)[0]["loss"]


def test_a_run_starts_from_a_gpt2_of_transformers(
    pretraining: Pretraining, small_store: TokenStore, gpt2: Path, tmp_path: Path
) -> None:
    pretrain(pretraining("data.placement=none", "model.second_attention=none"), tmp_path / "run", init=gpt2)
    dataset = BlockDataset(small_store, "train", block_size=32, fraction=0.1, placement="none", seed=0)
    theirs = GPT2LMHeadModel.from_pretrained(gpt2).eval()
    ids = torch.stack([torch.from_numpy(dataset[index]["input_ids"]) for index in range(4)])
    with torch.no_grad():
        loss = theirs(ids, labels=ids).loss.item()
    assert curve(tmp_path / "run")[0]["loss"] == pytest.approx(loss, rel=ROUNDED)


def test_a_gpt2_is_given_a_second_attention_and_a_meta_token_and_resumes(
    pretraining: Pretraining, small_store: TokenStore, gpt2: Path, steps: type, tmp_path: Path
) -> None:
    recipe = pretraining("model.second_attention=causal")
    pretrain(recipe, tmp_path / "undisturbed", init=gpt2)
    config = load_model(tmp_path / "undisturbed").config
    assert (config.second_attention, config.meta_token_id) == ("causal", small_store.tokenizer.meta_token_id)
    run = partial(pretrain, recipe, tmp_path / "run", init=gpt2)
    interrupt(run, steps, 5)
    run()
    assert result(tmp_path / "run") == result(tmp_path / "undisturbed")


def test_the_settings_state_the_model_that_is_trained(
    pretraining: Pretraining, gpt2: Path, undisturbed: Path, tmp_path: Path
) -> None:
    recipe = pretraining("model.hidden_size=64", "model.num_attention_heads=8", "model.second_attention=causal")
    of_recipe = {name: getattr(recipe.model, name) for name in ("hidden_size", "second_attention", "bias")}
    assert of_recipe == {"hidden_size": 64, "second_attention": "causal", "bias": True}
    stated = {}
    for name, init in {"own": undisturbed, "gpt2": gpt2}.items():
        pretrain(recipe, tmp_path / name, init=init)
        stated[name] = json.loads((tmp_path / name / "settings.json").read_text())["recipe"]["model"]
        config = load_model(tmp_path / name).config
        own = {key: getattr(config, key) for key in stated[name].keys() - {"architecture"}}
        assert stated[name] == {"architecture": None} | own
    assert (stated["own"]["hidden_size"], stated["own"]["second_attention"]) == (16, "meta")
    assert (stated["gpt2"]["position_embedding"], stated["gpt2"]["max_position_embeddings"]) == ("learned", 40)
    pretrain(recipe, tmp_path / "gpt2", init=gpt2)  # the same run still
    with pytest.raises(UserError, match=r"recipe\.model\.second_attention was 'causal' and is now 'meta'"):
        pretrain(pretraining(), tmp_path / "gpt2", init=gpt2)
    for init in (undisturbed, None):
        with pytest.raises(UserError, match="init_sha256 was"):
            pretrain(recipe, tmp_path / "gpt2", init=init)


def test_a_model_whose_vocabulary_does_not_fit_the_text_is_refused(
    pretraining: Pretraining, gpt2: Path, tmp_path: Path
) -> None:
    recipe = pretraining("model.second_attention=none")
    with pytest.raises(UserError, match=r"model's meta_token_id is None and that of the text's tokenizer 768"):
        pretrain(recipe, tmp_path / "run", init=gpt2)
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=300)).save_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match="300 vocabulary entries and the text's tokenizer 768"):
        pretrain(recipe, tmp_path / "run", init=tmp_path / "small")
    assert not (tmp_path / "run").exists()


def test_an_adapter_needs_a_base_that_can_be_loaded(pretraining: Pretraining, gpt2: Path, tmp_path: Path) -> None:
    keeps = ("training.lora_rank=2", "training.keep_adapter=true", "data.placement=none")
    neo = ("model.architecture=gpt_neo", "model.position_embedding=learned", "model.second_attention=none")
    for init, settings in ((None, ()), (None, neo), (gpt2, ())):
        recipe = pretraining(*keeps, *settings)
        with pytest.raises(UserError, match=r"training\.keep_adapter needs a base that is on the disk as it is now"):
            pretrain(recipe, tmp_path / "run", init=init, overwrite=True)
    assert not list((tmp_path / "run").rglob("*.safetensors"))
