"""Exact match and token accuracy on a task's fixed test set, by length (paper, Tables 7-10)."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from metatokens.checkpoint import LanguageModel
from metatokens.evaluation.intervals import wilson_interval
from metatokens.model.positions import reaches
from metatokens.records import Metric, Result
from metatokens.tasks.curriculum import TaskData, chance
from metatokens.tasks.example import Encoded, Example
from metatokens.tasks.scoring import score
from metatokens.tasks.shortcuts import answers

METRICS: tuple[Metric, ...] = ("exact_match", "token_accuracy")
SHORTCUT_PROMPTS = 2_000  # train prompts that a short cut's table is made from
TEST_SEED = 2026  # of the test examples: one fixed set for all models


def test_examples(
    task: str,
    length: int,
    n: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    condition: str,
    documents: Sequence[str],
) -> list[Example]:
    """The first n examples of the fixed test set with prompts of (length / 2, length] tokens."""
    source = TaskData(task, tokenizer=tokenizer, condition=condition, seed=TEST_SEED, documents=documents)
    return [source.test(index, length) for index in range(n)]


def evaluate(
    model: LanguageModel,
    tests: Mapping[int, Sequence[Encoded]] | Mapping[None, Sequence[Encoded]],
    *,
    task: str | None,
    name: str,
    condition: str | None = "paper",
    intervention: str | None = None,
    noise_seed: int | None = None,
    seed: int = 0,
    train_length: int | None = None,
    train_condition: str | None = None,
    recipe: str | None = None,
    batch: int | None = None,
) -> list[Result]:
    """Two results a length: `exact_match`, n counting examples, and `token_accuracy`, n counting answer tokens.

    Args:
        model: the model.
        tests: for each bin of prompt length (in tokens), its examples: see `test_examples`. The length None stands for
            records of any.
        task: one of the four tasks; None for a user's own records.
        name: `gpt2`, `pause`, `twin`, `meta`, or whatever the figures are to be filed under.
        condition: the marker condition of the test prompts.
        intervention: what is in force at the model (see `intervene`), for the record.
        noise_seed: of the intervention's noise, if it draws any, for the record.
        seed: of the model's training, for the record, like what follows.
        train_length: tokens of the longest prompts that it was fine-tuned on.
        train_condition: their marker condition.
        recipe: what its training is filed under.
        batch: examples at a time; by default as many as `score` takes.

    Returns:
        The results; those of a length beyond the model's learned positions have no value, and n = 0.
    """
    about: dict[str, Any] = {
        "model": name,
        "position_embedding": model.config.position_embedding,
        "task": task,
        "condition": condition,
        "intervention": intervention,
        "noise_seed": noise_seed,
        "train_condition": train_condition,
        "train_length": train_length,
        "seed": seed,
        "recipe": recipe,
    }
    results = []
    for length, examples in tests.items():
        # The answer needs positions too, but for its last token.
        longest = max(len(example.input_ids) - 1 for example in examples)
        if not reaches(model.config, max(length or 0, longest)):
            results += [Result(**about, length=length, metric=metric, value=None, n=0) for metric in METRICS]
            continue
        exact, tokens = score(model, examples, batch=batch)
        answer_tokens = sum(len(example.input_ids) - example.answer_start for example in examples)
        guessed = None if task is None else chance(task)
        measured = ((sum(exact), len(exact), guessed), (sum(tokens), answer_tokens, None))
        for metric, (successes, n, guessing) in zip(METRICS, measured, strict=True):
            low, high = wilson_interval(successes, n)
            figure: dict[str, Any] = {"value": successes / n, "n": n, "low": low, "high": high, "chance": guessing}
            results.append(Result(**about, **figure, length=length, metric=metric))
    return results


def shortcut_rates(
    task: str,
    condition: str,
    tests: Mapping[int, Sequence[Example]],
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    recipe: str | None = None,
) -> list[Result]:
    """What each short cut scores on the test set of each length; see `metatokens.tasks.shortcuts`.

    Args:
        task, condition: which prompts.
        tests: the examples of each length, as `test_examples` draws them.
        tokenizer, documents: as for `test_examples`.
        recipe: what the results are filed under.
    """
    source = TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
    train = [source.train(index, min(tests)) for index in range(SHORTCUT_PROMPTS)]
    results = []
    for length, asked in tests.items():
        for name, right in answers(task, condition, train, asked).items():
            low, high = wilson_interval(sum(right), len(asked))
            results.append(
                Result(
                    model=name,
                    task=task,
                    condition=condition,
                    length=length,
                    metric="shortcut",
                    value=sum(right) / len(asked),
                    n=len(asked),
                    low=low,
                    high=high,
                    seed=TEST_SEED,
                    recipe=recipe,
                )
            )
    return results
