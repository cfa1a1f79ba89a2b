"""Exact match and token accuracy on a task's fixed test set, by length (paper, Tables 7-10)."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metatokens.decoder import measure_cache_share
from metatokens.evaluation.intervals import wilson_interval
from metatokens.model.positions import reaches
from metatokens.model.wrappers import takes_wrapped
from metatokens.records import About, Metric, Result, pack_hits
from metatokens.tasks.curriculum import TaskData, chance
from metatokens.tasks.example import Encoded, Example
from metatokens.tasks.landmarks_alone import ALONE, LandmarksAlone
from metatokens.tasks.scoring import score
from metatokens.tasks.shortcuts import answers

METRICS: tuple[Metric, ...] = ("exact_match", "token_accuracy")
SHORTCUT_PROMPTS = 2_000  # train prompts from which a shortcut makes its table
TEST_SEED = 2026  # of the test examples, the same for all models


def draw_test_examples(
    task: str, length: int, n: int, tokenizer: PreTrainedTokenizerBase, *, condition: str, documents: Sequence[str]
) -> list[Example]:
    """The first n examples of the fixed test set with prompts of (length / 2, length] tokens (paper, section 4.2).

    Args:
        task: one of TASKS.
        length: tokens of the longest prompts.
        n: examples.
        tokenizer: of the model.
        condition: which meta-tokens a prompt has, such as `paper`.
        documents: for copying, the texts that excerpts are taken from; other tasks do not read them.

    Raises:
        UserError: if there is no such task or condition, or no prompt of such a length was found.
    """
    source = TaskData(task, tokenizer=tokenizer, condition=condition, seed=TEST_SEED, documents=documents)
    return [source.test(index, length) for index in range(n)]


@takes_wrapped
def evaluate(
    model: PreTrainedModel,
    tests: Mapping[int, Sequence[Encoded]] | Mapping[None, Sequence[Encoded]],
    about: About,
    *,
    batch: int | None = None,
    alone: LandmarksAlone | None = None,
) -> list[Result]:
    """Two results a length: `exact_match`, where n counts examples, and `token_accuracy`, where n counts answer tokens.

    Args:
        model: the model.
        tests: the examples of each bin of prompt length (tokens), as `draw_test_examples` draws them; under None,
            records of any length.
        about: the fields that all results share. Without a task, results have no chance level.
        batch: examples per forward pass; by default as many as `score` takes.
        alone: makes the masks, if the questions see the meta-tokens of their documents alone. The results then have the
            intervention `landmarks_alone`.

    Returns:
        The results; a length beyond the model's learned positions has no value, and n = 0.
    """
    changed = {} if alone is None else {"intervention": ALONE}
    shared = about.present_fields(position_embedding=model.config.position_embedding, **changed)
    guessed = None if about.task is None else chance(about.task)
    results = []
    for length, examples in tests.items():
        longest = max(len(example.input_ids) - 1 for example in examples)  # the answer's last token is never read
        if not reaches(model.config, max(length or 0, longest)):
            results += [Result(**shared, length=length, metric=metric, n=0) for metric in METRICS]
            continue
        exact, tokens = score(model, examples, batch=batch, alone=alone)
        ends = [example.answer_start if alone is None else alone.start(example) for example in examples]
        texts = (example.input_ids[:end] for example, end in zip(examples, ends, strict=True))
        kept = measure_cache_share(model, texts, metas_alone=alone is not None)
        answer_tokens = sum(len(example.input_ids) - example.answer_start for example in examples)
        measured = ((sum(exact), len(exact), guessed), (sum(tokens), answer_tokens, None))
        for metric, (successes, n, guessing) in zip(METRICS, measured, strict=True):
            hits = pack_hits(exact) if metric == "exact_match" else None
            results.append(
                Result(
                    **shared, **_share(successes, n), **kept, length=length, metric=metric, chance=guessing, hits=hits
                )
            )
    return results


def _share(successes: int, n: int) -> dict[str, Any]:
    low, high = wilson_interval(successes, n)
    return {"value": successes / n, "n": n, "low": low, "high": high}


def shortcut_rates(
    task: str,
    condition: str,
    tests: Mapping[int, Sequence[Example]],
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    recipe: str | None = None,
) -> list[Result]:
    """The scores of each shortcut (see `metatokens.tasks.shortcuts`) on the test set of each length.

    Args:
        task, condition: of the prompts.
        tests: the examples of each length, as `draw_test_examples` draws them.
        tokenizer, documents: as for `draw_test_examples`.
        recipe: the preset, for the results.
    """
    source = TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
    train = [source.train(index, min(tests)) for index in range(SHORTCUT_PROMPTS)]
    shared: dict[str, Any] = {
        "task": task,
        "condition": condition,
        "seed": TEST_SEED,
        "recipe": recipe,
        "metric": "shortcut",
    }
    return [
        Result(**shared, **_share(sum(right), len(asked)), model=name, length=length)
        for length, asked in tests.items()
        for name, right in answers(task, condition, train, asked).items()
    ]
