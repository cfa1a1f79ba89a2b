"""Stages of fine-tuning: their prompts, their batches and their learning rates."""

from functools import partial
from pathlib import Path

import pytest

from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import meta_token_id
from metatokens.errors import UserError
from metatokens.tasks.curriculum import Sizes, TaskData
from metatokens.tasks.drills import draw_drill
from metatokens.training import trainer
from metatokens.training.examples import train_examples, train_source
from metatokens.training.finetune import finetune
from tests.training.conftest import Finetuning, figures_of, interrupt, weights

TEXTS = ["a b c d e f g h i j x", "a b c d e f g h i j y", "a b c d e f g h i j z"]


def stages(*fields: str) -> str:
    in_braces = ["{" + stage + "}" for stage in fields]
    return f"task.stages=[{', '.join(in_braces)}]"


SHORT = "lists: [2, 3], items: [3, 4], max_steps: 4"
TWO_STAGES = stages(
    f"{SHORT}, learning_rate: 0.01, per_device_train_batch_size: 2",
    "lists: [1, 1], items: [5, 5], max_steps: 2",
)


@pytest.mark.parametrize(
    ("number", "lists", "items", "count"), [(0, {2, 3}, {3, 4}, 8), (1, {1}, {5}, 8)]
)
def test_a_stage_has_its_prompts_and_its_batch(
    number: int,
    lists: set[int],
    items: set[int],
    count: int,
    finetuning: Finetuning,
    small_store: TokenStore,
) -> None:
    recipe = finetuning(TWO_STAGES)
    source = train_source(recipe, "list_recall", small_store.tokenizer, ())

    examples = train_examples(recipe, source, recipe.phases()[number])

    seen_lists, seen_items = set(), set()
    for example in examples:
        prompt = small_store.tokenizer.decode(example.input_ids[: example.answer_start])
        *lines, _, _ = prompt.split("\n")
        seen_lists.add(len(lines))
        seen_items.add(len(lines[0].split()) - 1)
    assert seen_lists == lists
    assert seen_items == items
    assert len(examples) == count


def test_a_stage_of_drills_has_drills_and_no_prompts_of_its_task(
    finetuning: Finetuning, small_store: TokenStore
) -> None:
    recipe = finetuning(stages(f"{SHORT}, drill: true", SHORT))
    source = train_source(recipe, "parity", small_store.tokenizer, ())
    questions = []
    for phase in recipe.phases()[:2]:
        of_phase = set()
        for example in train_examples(recipe, source, phase):
            prompt = small_store.tokenizer.decode(example.input_ids[: example.answer_start])
            of_phase.add(prompt.rpartition("\n")[2])
        questions.append(of_phase)

    assert questions == [
        {"Q: Copy the bracketed text.<|meta|>"},
        {"Q: What is the XOR of all bits before this pause?<|meta|>"},
    ]


def test_a_run_whose_stage_would_have_another_batch_is_not_resumed(
    model: Path, finetuning: Finetuning, steps: type, tmp_path: Path
) -> None:
    run = partial(finetune, model_folder=model, out=tmp_path / "run", task="list_recall")
    interrupt(partial(run, finetuning(TWO_STAGES)), steps, 1)
    split = finetuning(
        TWO_STAGES,
        "training.per_device_train_batch_size=2",
        "training.gradient_accumulation_steps=2",
    )
    with pytest.raises(UserError, match=r"batches was \[2, 4, 4\] and is now \[4, 4, 4\]"):
        run(split)


def test_the_rate_of_a_stage_does_not_decay(finetuned: Path) -> None:
    assert figures_of(finetuned / "stage-1", "learning_rate")[1:] == pytest.approx([0.01] * 3)
    assert figures_of(finetuned / "64", "learning_rate")[-1] < 0.002


@pytest.fixture(scope="module")
def finetuned(
    model: Path, finetuning: Finetuning, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run with two stages, the first with settings of its own."""
    out = tmp_path_factory.mktemp("stages")
    finetune(finetuning(TWO_STAGES), model, out, task="list_recall")
    return out


def test_a_stage_that_was_interrupted_after_its_last_checkpoint_is_over(
    model: Path,
    finetuning: Finetuning,
    steps: type,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    question = tokenizer.encode("\nQ: Copy the bracketed text.", add_special_tokens=False)
    sizes = set()
    for index in range(100):
        drill = draw_drill(source, index, 64, Sizes((2, 3), ((3, 10),)))
        ids = drill.input_ids.tolist()
        first, second, last = (drill.input_ids == meta).nonzero()[0].tolist()
        bracketed = ids[first + 1 : second]
        rest = ids[second + 1 : last - len(question)]
        context = [*ids[:first], *bracketed, *rest]
        sizes.add(len(bracketed))
        assert last == drill.answer_start - 1 < 64
        assert ids[last - len(question) : last] == question
        assert ids[last + 1 :] == [*bracketed, tokenizer.eos_token_id]
        assert tokenizer.eos_token_id not in context
        assert len(context) // len(bracketed) in (2, 3)
    assert sizes == set(range(3, 11))
