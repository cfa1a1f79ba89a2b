"""Stages of fine-tuning: their prompts, their batches and their learning rates."""

import re
from functools import partial
from pathlib import Path

import pytest

from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import meta_token_id
from metatokens.errors import UserError
from metatokens.recipe import FinetuneRecipe, load_recipe
from metatokens.tasks.curriculum import Sizes, TaskData
from metatokens.tasks.drills import draw_drill
from metatokens.tasks.example_store import ExampleStore
from metatokens.training import trainer
from metatokens.training.finetune import finetune
from tests.training.conftest import Finetuning, curve, weights

TEXTS = ["a b c d e f g h i j " + one for one in "xyz"]


def stages(*each: str) -> str:
    return f"task.stages=[{', '.join(f'{{{stage}}}' for stage in each)}]"


SHORT = "lists: [2, 3], items: [3, 4], max_steps: 4"


def test_a_stage_has_its_prompts_its_batch_and_a_rate_that_does_not_decay(
    model: Path, finetuning: Finetuning, small_store: TokenStore, tmp_path: Path
) -> None:
    own = "learning_rate: 0.01, per_device_train_batch_size: 2"
    recipe = finetuning(stages(f"{SHORT}, {own}", "lists: [1, 1], items: [5, 5], max_steps: 6"))
    finetune(recipe, model, tmp_path, task="list_recall")
    for name, lists, items, count in (("stage-1", {2, 3}, {3, 4}, 8), ("stage-2", {1}, {5}, 24)):
        sizes, examples = set(), ExampleStore(tmp_path / "examples" / f"{name}.arrow")
        for example in examples:
            prompt = small_store.tokenizer.decode(example.input_ids[: example.answer_start])
            *lines, _, _ = prompt.split("\n")
            sizes.add((len(lines), len(lines[0].split()) - 1))
            assert example.answer_start <= 64
        assert ({m for m, _ in sizes}, {n for _, n in sizes}, len(examples)) == (lists, items, count)
    assert [point["learning_rate"] for point in curve(tmp_path / "stage-1")][1:] == pytest.approx([0.01] * 3)
    assert curve(tmp_path / "64")[-1]["learning_rate"] < 0.002


def test_a_stage_that_was_interrupted_after_its_last_checkpoint_is_over(
    model: Path, finetuning: Finetuning, steps: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = finetuning(stages(SHORT))
    finetune(recipe, model, tmp_path / "undisturbed", task="parity")
    run = partial(finetune, recipe, model, tmp_path / "run", task="parity")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "save_model", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run()
    assert (tmp_path / "run" / "stage-1" / "checkpoints" / "checkpoint-4").is_dir()
    rest = steps()
    run(progress=rest)
    assert len(rest) == 4  # of the train length alone
    for name in ("stage-1", "64"):
        assert weights(tmp_path / "run" / name) == weights(tmp_path / "undisturbed" / name)


@pytest.mark.parametrize("task", ["copying", "parity"])
def test_a_drill_asks_for_the_tokens_in_its_bracket(task: str, small_store: TokenStore) -> None:
    tokenizer, meta = small_store.tokenizer, meta_token_id(small_store.tokenizer)
    source = TaskData(task, tokenizer=tokenizer, documents=TEXTS)
    drilled, sizes = Sizes((2, 3), ((3, 10),)), set()
    distinct = 0
    for index in range(300):
        drill = draw_drill(source, index, 64, drilled)
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
    same, again = (draw_drill(source, 7, 64, drilled).input_ids.tolist() for _ in range(2))
    assert same == again


def test_a_run_may_begin_with_a_drill(
    model: Path, finetuning: Finetuning, small_corpus: Path, small_store: TokenStore, tmp_path: Path
) -> None:
    texts = small_corpus.read_text().split("\n\n")
    finetune(finetuning(stages(f"{SHORT}, drill: true", SHORT)), model, tmp_path, task="copying", documents=texts)
    words = {}
    for name in ("stage-1", "stage-2"):
        prompts = (one.input_ids[: one.answer_start] for one in ExampleStore(tmp_path / "examples" / f"{name}.arrow"))
        ids = [one for prompt in prompts for one in [*prompt, 0] if one != small_store.manifest.meta_token_id]
        words[name] = set(re.findall(r"\w+", small_store.tokenizer.decode(ids)))
    known = set(re.findall(r"\w+", small_corpus.read_text())) | {"Q", "Copy", "the", "bracketed", "text", "endoftext"}
    assert words["stage-2"] <= known
    assert len(words["stage-1"] - known) > 20


# --- what does not fit


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        ("lists: [3, 2], items: [3, 4], max_steps: 4", "3 to 2 is not a range: the smaller number comes first"),
        ("lists: [2, 3], max_steps: 4", r"task.stages.0.items is missing"),
        (f"{SHORT}, wide: 1", r"task.stages.0.wide is not a setting; allowed are lists, items"),
    ],
)
def test_a_stage_that_makes_no_sense_is_refused(stage: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_recipe(FinetuneRecipe, "demo_finetune", [stages(stage)])


@pytest.mark.parametrize(
    ("task", "stage", "sentence"),
    [
        ("copying", f"{SHORT}, inside_loss: 1.0", "inside_loss works with segment_counting alone, not with copying"),
        ("list_recall", "lists: [15, 15], items: [20, 20], max_steps: 4", "no list_recall prompt of 15 lists of 20"),
        ("copying", "lists: [8, 8], items: [9, 9], max_steps: 4, drill: true", "no drill of 8 lists of 9 items has at"),
        (None, SHORT, r"task\.stages are for the tasks"),
    ],
)
def test_a_stage_without_prompts_or_a_task_is_refused_before_any_training(
    task: str | None, stage: str, sentence: str, model: Path, finetuning: Finetuning, tmp_path: Path
) -> None:
    records = None if task else tmp_path / "records.jsonl"
    if records:
        records.write_text('{"prompt": "the cat", "completion": " sat"}\n')
    with pytest.raises(UserError, match=sentence):
        finetune(finetuning(stages(stage)), model, tmp_path / "run", task=task, data=records, documents=TEXTS)
    assert not (tmp_path / "run").exists()
