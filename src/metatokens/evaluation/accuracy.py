"""Exact match and token accuracy on a task's fixed test set, by length (paper, Tables 7-10)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metatokens.decoder import measure_cache_share
from metatokens.evaluation.intervals import clustered_interval, share_fields
from metatokens.model.positions import reaches
from metatokens.model.wrappers import takes_wrapped
from metatokens.records import ALONE, About, Metric, Result, pack_hits
from metatokens.tasks import module_of
from metatokens.tasks.curriculum import TaskData
from metatokens.tasks.example import Encoded, Example
from metatokens.tasks.landmarks_alone import LandmarksAlone
from metatokens.tasks.scoring import score
from metatokens.tasks.shortcuts import answers

METRICS: tuple[Metric, ...] = ("exact_match", "token_accuracy")
SHORTCUT_PROMPTS = 2_000  # train prompts from which a shortcut makes its table
TEST_SEED = 2026  # of the test examples, the same for all models


def draw_test_examples(
    task: str,
    length: int,
    n: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    condition: str,
    documents: Sequence[str],
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
    source = TaskData(
        task, tokenizer=tokenizer, condition=condition, seed=TEST_SEED, documents=documents
    )
    return [source.test(index, length) for index in range(n)]


def longest_input(length: int | None, examples: Sequence[Encoded]) -> int:
    """The tokens that a model reads in the longest example of a bin; the answer's last token is never read."""
    return max(length or 0, *(len(example.input_ids) - 1 for example in examples))


@takes_wrapped
def evaluate(
    model: PreTrainedModel,
    tests: Mapping[int, Sequence[Encoded]] | Mapping[None, Sequence[Encoded]],
    subject: About,
    *,
    alone: LandmarksAlone | None = None,
) -> list[Result]:
    """Two results a length: `exact_match`, where n counts examples, and `token_accuracy`, where n counts answer tokens.

    Args:
        model: the model.
        tests: the examples of each bin of prompt length (tokens), as `draw_test_examples` draws them; under None,
            records of any length.
        subject: the fields that all results share. Without a task, results have no chance level.
        alone: makes the masks, if the questions see the meta-tokens of their documents alone. The results then have the
            intervention `landmarks_alone`.

    Returns:
        The results; a length beyond the model's learned positions has no value, and n = 0.
    """
    shared = subject.present_fields(position_embedding=model.config.position_embedding)
    if alone is not None:
        shared["intervention"] = ALONE
    results = []
    for length, examples in tests.items():
        if not reaches(model.config, longest_input(length, examples)):
            results += [Result(**shared, length=length, metric=metric, n=0) for metric in METRICS]
            continue
        exact, right_tokens = score(model, examples, alone=alone)
        sizes = [len(example.input_ids) - example.answer_start for example in examples]
        # The tokens of an answer depend on each other; their order does not matter.
        low, high = clustered_interval(
            [np.arange(size) < right for size, right in zip(sizes, right_tokens, strict=True)]
        )
        of_length = {**shared, "length": length, **_cache_share(model, examples, alone)}
        results.append(
            Result(
                **of_length,
                **share_fields(sum(exact), len(exact)),
                metric="exact_match",
                chance=None if subject.task is None else module_of(subject.task).CHANCE,
                hits=pack_hits(exact),
            )
        )
        results.append(
            Result(
                **of_length,
                metric="token_accuracy",
                value=sum(right_tokens) / sum(sizes),
                n=sum(sizes),
                low=low,
                high=high,
            )
        )
    return results


def _cache_share(
    model: PreTrainedModel, examples: Sequence[Encoded], alone: LandmarksAlone | None
) -> dict[str, Any]:
    """How much a cache keeps of the prompts or, with `alone`, of their documents."""
    if alone is None:
        prompts = [example.input_ids[: example.answer_start] for example in examples]
        return measure_cache_share(model, prompts)
    documents = [example.input_ids[: alone.start(example)] for example in examples]
    return measure_cache_share(model, documents, metas_alone=True)


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
    results = []
    for length, examples in tests.items():
        for name, is_right in answers(task, condition, train, examples).items():
            result = Result(
                model=name,
                task=task,
                condition=condition,
                length=length,
                seed=TEST_SEED,
                recipe=recipe,
                metric="shortcut",
                **share_fields(sum(is_right), len(examples)),
            )
            results.append(result)
    return results
