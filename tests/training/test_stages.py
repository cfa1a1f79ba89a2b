"""Stages of fine-tuning: which prompts they are trained on, when they end, and going on in the middle."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import meta_token_id
from metatokens.errors import UserError
from metatokens.recipe import FinetuneRecipe, load_recipe
from metatokens.tasks.curriculum import TaskData
from metatokens.tasks.drills import draw_drill
from metatokens.tasks.example_store import ExampleStore
from metatokens.tasks.phases import Sizes
from metatokens.training import finetune as finetuning_module
from metatokens.training import trainer
from metatokens.training.finetune import finetune
from tests.training.conftest import curve

STAGES = "task.stages=[{lists: [2, 3], items: [3, 4], max_steps: 4}, {lists: [1, 1], items: [5, 5], max_steps: 6}]"


def test_a_stages_prompts_have_its_lists_and_items(
    model: Path, finetuning: Callable[..., FinetuneRecipe], small_store: TokenStore, tmp_path: Path
) -> None:
    finetune(finetuning(STAGES), model, tmp_path / "run", task="list_recall")
    for name, lists, items in (("stage-1", {2, 3}, {3, 4}), ("stage-2", {1}, {5})):
        sizes = set()
        for example in ExampleStore(tmp_path / "run" / "examples" / f"{name}.arrow"):
            prompt = small_store.tokenizer.decode(example.input_ids[: example.answer_start])
            *lines, _, _ = prompt.split("\n")
            sizes.add((len(lines), len(lines[0].split()) - 1))
            assert example.answer_start <= 64
        assert {m for m, _ in sizes} == lists
        assert {n for _, n in sizes} == items


def test_the_rate_of_a_stage_does_not_decay(
    model: Path, finetuning: Callable[..., FinetuneRecipe], tmp_path: Path
) -> None:
    own = "lists: [2, 3], items: [3, 4], max_steps: 4, learning_rate: 0.01, per_device_train_batch_size: 2"
    recipe = finetuning(f"task.stages=[{{{own}}}]", "training.warmup_steps=1")
    finetune(recipe, model, tmp_path / "run", task="list_recall")
    rates = [point["learning_rate"] for point in curve(tmp_path / "run" / "stage-1")]
    assert rates[1:] == pytest.approx([0.01] * (len(rates) - 1))
    assert curve(tmp_path / "run" / "64")[-1]["learning_rate"] < 0.002
    assert len(ExampleStore(tmp_path / "run" / "examples" / "stage-1.arrow")) == 8


@pytest.mark.parametrize("cuts", [(3,), (6,), (3, 7, 12)])
def test_stages_that_were_cut_off_end_like_ones_that_were_not(
    cuts: tuple[int, ...],
    model: Path,
    finetuning: Callable[..., FinetuneRecipe],
    steps: type,
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
) -> None:
    recipe = finetuning(STAGES)
    finetune(recipe, model, tmp_path / "undisturbed", task="list_recall")
    for cut in cuts:
        with pytest.raises(KeyboardInterrupt):
            finetune(recipe, model, tmp_path / "run", task="list_recall", progress=steps(stop_at=cut))
    finetune(recipe, model, tmp_path / "run", task="list_recall")
    ours, theirs = contents(tmp_path / "run"), contents(tmp_path / "undisturbed")
    kept = {path for path in theirs if "checkpoints" not in path}
    assert {path: ours[path] for path in kept} == {path: theirs[path] for path in kept}


def test_a_stage_ends_when_prompts_that_are_neither_trained_on_nor_tested_are_answered(
    model: Path, finetuning: Callable[..., FinetuneRecipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "GOAL_STEPS", 2)
    monkeypatch.setattr(finetuning_module, "VALIDATED", 10)
    asked = []
    rates = iter([0.6, 0.8])

    def exact_match(model: object, examples: list) -> float:
        assert not model.training  # type: ignore[attr-defined]
        asked.append(examples)
        return next(rates)

    monkeypatch.setattr(finetuning_module, "exact_match", exact_match)
    recipe = finetuning("task.stages=[{lists: [2, 3], items: [6, 8], max_steps: 60, until: 0.8}]")
    finetune(recipe, model, tmp_path / "run", task="parity")
    assert curve(tmp_path / "run" / "stage-1")[-1]["step"] == 4
    assert curve(tmp_path / "run" / "64")[-1]["step"] == 4
    assert asked[0] == asked[1]
    assert {example.split for example in asked[0]} == {"validation"}
    assert len(asked[0]) == 10


def test_a_stage_that_was_cut_off_after_its_last_checkpoint_is_over(
    model: Path,
    finetuning: Callable[..., FinetuneRecipe],
    steps: type,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer, "GOAL_STEPS", 2)
    stage = "{lists: [2, 2], items: [5, 6], max_steps: 200, until: 0.2, learning_rate: 0.005}"
    recipe = finetuning(f"task.stages=[{stage}]")
    finetune(recipe, model, tmp_path / "undisturbed", task="parity")
    last = int(curve(tmp_path / "undisturbed" / "stage-1")[-1]["step"])
    assert 2 < last < 200
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "save_model", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            finetune(recipe, model, tmp_path / "run", task="parity")
    assert (tmp_path / "run" / "stage-1" / "checkpoints" / f"checkpoint-{last}").is_dir()
    rest = steps()
    finetune(recipe, model, tmp_path / "run", task="parity", progress=rest)
    assert len(rest) == 4  # of the train length alone
    for name in ("stage-1", "64"):
        ours, theirs = (tmp_path / run / name / "model.safetensors" for run in ("run", "undisturbed"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_stage_without_prompts_is_refused_before_any_training(
    model: Path, finetuning: Callable[..., FinetuneRecipe], tmp_path: Path
) -> None:
    recipe = finetuning("task.stages=[{lists: [15, 15], items: [20, 20], max_steps: 4}]")
    with pytest.raises(UserError, match=r"no list_recall prompt of 15 lists of 20 items"):
        finetune(recipe, model, tmp_path / "run", task="list_recall")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        ("{lists: [3, 2], items: [3, 4], max_steps: 4}", "3 to 2 is not a range: the smaller number comes first"),
        ("{lists: [2, 3], items: [3, 4], max_steps: 4, until: 1.5}", r"task.stages.0.until is 1.5"),
        ("{lists: [2, 3], max_steps: 4}", r"task.stages.0.items is missing"),
    ],
)
def test_a_stage_that_makes_no_sense_is_refused(stage: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_recipe(FinetuneRecipe, "demo_finetune", [f"task.stages=[{stage}]"])


def test_an_unknown_setting_of_a_stage_is_named() -> None:
    with pytest.raises(UserError, match=r"task.stages.0.wide is not a setting; allowed are lists, items"):
        load_recipe(
            FinetuneRecipe, "demo_finetune", ["task.stages=[{lists: [2, 3], items: [3, 4], max_steps: 4, wide: 1}]"]
        )


def test_validation_prompts_are_not_those_of_training(small_store: TokenStore) -> None:
    data = TaskData("parity", tokenizer=small_store.tokenizer)
    splits = {data.train(index, 64, None, "validation").split for index in range(10)}
    assert splits == {"validation"}


@pytest.mark.parametrize(("task", "split"), [("copying", "train"), ("copying", "validation"), ("parity", "train")])
def test_a_drill_asks_for_what_stands_in_its_bracket(task: str, split: str, small_store: TokenStore) -> None:
    tokenizer, meta = small_store.tokenizer, meta_token_id(small_store.tokenizer)
    source = TaskData(task, tokenizer=tokenizer, documents=["a b c d e f g h i j " + one for one in "xyz"])
    distinct, sizes = 0, set()
    for index in range(300):
        drill = draw_drill(source, index, 64, Sizes((2, 3), ((3, 10),)), split)
        ids = drill.input_ids.tolist()
        first, second, last = (place for place, one in enumerate(ids) if one == meta)
        assert last == drill.answer_start - 1 < 64
        bracketed, answer = ids[first + 1 : second], ids[last + 1 :]
        assert answer == [*bracketed, tokenizer.eos_token_id]
        question = tokenizer.encode("\nQ: Copy the bracketed text.", add_special_tokens=False)
        rest = ids[second + 1 : last]
        assert rest[-len(question) :] == question
        context = [*ids[:first], *bracketed, *rest[: -len(question)]]
        assert not {*context} & {meta, tokenizer.eos_token_id}
        assert len(context) // len(bracketed) in (2, 3)
        sizes.add(len(bracketed))
        distinct += len({*context}) == len(context)
    assert sizes == set(range(3, 11))
    assert 60 < distinct < 200
    same = draw_drill(source, 7, 64, Sizes((2, 3), ((3, 10),)), split)
    assert same.input_ids.tolist() == draw_drill(source, 7, 64, Sizes((2, 3), ((3, 10),)), split).input_ids.tolist()


def test_a_run_may_begin_with_a_drill(
    model: Path, finetuning: Callable[..., FinetuneRecipe], small_corpus: Path, small_store: TokenStore, tmp_path: Path
) -> None:
    short = "lists: [2, 3], items: [3, 4], max_steps: 4"
    recipe = finetuning(f"task.stages=[{{{short}, until: 0.9, drill: true}}, {{{short}}}]")
    finetune(recipe, model, tmp_path, task="copying", documents=small_corpus.read_text().split("\n\n"))
    examples = {name: ExampleStore(tmp_path / "examples" / f"{name}.arrow") for name in ("stage-1", "stage-2")}
    meta = small_store.manifest.meta_token_id
    prompts = {
        name: [one for example in each for one in [*example.input_ids[: example.answer_start], 0] if one != meta]
        for name, each in examples.items()
    }
    words = {name: set(re.findall(r"\w+", small_store.tokenizer.decode(ids))) for name, ids in prompts.items()}
    known = set(re.findall(r"\w+", small_corpus.read_text())) | {"Q", "Copy", "the", "bracketed", "text", "endoftext"}
    assert words["stage-2"] <= known
    assert len(words["stage-1"] - known) > 20
    with pytest.raises(UserError, match=r"no drill of 8 lists of 9 items has at most 64 tokens"):
        draw_drill(TaskData("parity", tokenizer=small_store.tokenizer), 0, 64, Sizes((8, 8), ((9, 9),)))


@pytest.mark.parametrize(
    ("stage", "task", "sentence"),
    [
        ("inside_loss: 1.0", "copying", "inside_loss is for segment_counting, .* not for copying"),
        ("until: 0.9", "parity", "no parity prompt of 1 lists of 1 to 2 items"),  # all are trained on
    ],
)
def test_a_stage_that_the_task_does_not_know(
    stage: str, task: str, sentence: str, model: Path, finetuning: Callable[..., FinetuneRecipe], tmp_path: Path
) -> None:
    recipe = finetuning(f"task.stages=[{{lists: [1, 1], items: [1, 2], max_steps: 4, {stage}}}]")
    with pytest.raises(UserError, match=sentence):
        finetune(recipe, model, tmp_path / "run", task=task, documents=["a b c d e f g h i " + one for one in "xyz"])
    assert not (tmp_path / "run").exists()


def test_own_records_have_no_stages(model: Path, finetuning: Callable[..., FinetuneRecipe], tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text('{"prompt": "the cat", "completion": " sat"}\n')
    with pytest.raises(UserError, match=r"task\.stages are for the tasks"):
        finetune(finetuning(STAGES), model, tmp_path / "run", data=tmp_path / "records.jsonl")
    assert not (tmp_path / "run").exists()
