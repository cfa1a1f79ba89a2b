"""The rule's promises, by simulation: its intervals hold the truth in 93 to 97 %, and at most 5 % of calls are false.

Runs and prompts are drawn anew each time. The rule sees which prompts were answered, and nothing else.
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from metatokens.paper.rule import (
    Stratum,
    effect,
    prompt_variance,
    verdict,
)

# SD between runs, as observed.
TASKS = {
    "parity": 0.05,
    "copying": 0.03,
    "segment_counting": 0.08,
    "list_recall": 0.15,
}
# Runs a side: prompts, repetitions.
SIZES = {
    3: (500, 2000),
    5: (500, 2000),
    12: (500, 1500),
}

of_luck = pytest.mark.parametrize("luck", [None, 0.6])
of_runs = pytest.mark.parametrize("runs", SIZES)


def draw_answers(
    generator,
    runs,
    prompts,
    spread,
    luck,
):
    """Right and wrong of two models that are equally good, each an array (runs, prompts), the second's negative.

    A run's probability of being right is 1/2, plus its own luck, plus the prompt's difficulty, plus how much harder
    the prompt is for this model. It is never cut off at 0 or 1, so the models differ by 0 exactly.

    Args:
        luck: the probability that a run learns the task (95 %) rather than not (20 %); None for normal luck.
    """
    furthest = min(3 * spread, 0.36)
    room = 0.02 if luck else (0.5 - furthest) / 2
    difficulty = generator.uniform(-room, room, prompts)
    sides = []
    for sign in (1.0, -1.0):
        luck_of_runs = generator.normal(0, spread, runs).clip(-furthest, furthest)
        if luck:
            luck_of_runs = np.where(generator.random(runs) < luck, 0.45, -0.3)
        difficulty_for_model = difficulty + generator.uniform(-room, room, prompts)
        chance = 0.5 + luck_of_runs[:, None] + difficulty_for_model
        sides.append(sign * (generator.random((runs, prompts), dtype=np.float32) < chance))
    return sides


def stratum_of(task, sides):
    means = tuple(dict(enumerate(side.mean(axis=1))) for side in sides)
    return Stratum(task, means, prompts=max(prompt_variance(sides), 0.0))


@cache
def effects(runs, luck):
    """What the rule says of four tasks, again and again; the truth is 0."""
    prompts, repetitions = SIZES[runs]
    generator = np.random.default_rng(runs)
    results = []
    for _ in range(repetitions):
        strata = []
        for task, spread in TASKS.items():
            strata.append(stratum_of(task, draw_answers(generator, runs, prompts, spread, luck)))
        results.append(effect(strata))
    return results


def rates(runs, luck, truth, kind):
    """How often each verdict is told, in percent, where the true effect is as given."""
    verdicts: Counter[str] = Counter()
    for result in effects(runs, luck):
        moved = replace(
            result,
            value=result.value + truth,
            low=result.low + truth,
            high=result.high + truth,
        )
        verdicts[verdict(moved, kind, 0.05)] += 100 / len(effects(runs, luck))
    return verdicts


@of_luck
@of_runs
def test_the_interval_holds_the_truth_as_often_as_it_promises(runs, luck):
    covered = [result.low <= 0 <= result.high for result in effects(runs, luck)]

    assert 0.93 <= np.mean(covered) <= 0.97


@of_luck
@of_runs
@pytest.mark.parametrize(
    ("kind", "truth", "false"),
    [
        ("gain", 0.0, ["supported"]),
        ("gain", 0.05, ["no lead", "within"]),
        ("gain", 0.0, ["reversed"]),
        ("gain", -0.05, ["supported", "within"]),
        ("match", -0.05, ["supported"]),
        ("match", -0.05, ["contradicted"]),
        ("above", 0.0, ["supported"]),
        ("above", 0.0, ["contradicted"]),
    ],
)
def test_false_calls_are_at_most_one_in_twenty(kind, truth, false, runs, luck):
    """At the worst truths: no gain at all, a gain or a loss just worth mentioning, and a bound just met."""
    told = rates(runs, luck, truth, kind)

    percent = sum(told[verdict] for verdict in false)
    assert percent <= 5


def test_twelve_runs_find_what_is_there():
    none = rates(12, None, 0.0, "gain")

    assert rates(12, None, 0.1, "gain")["supported"] > 95
    assert none["within"] + none["no lead"] > 60
    assert rates(12, None, -0.1, "gain")["reversed"] > 95


def test_prompts_that_are_left_out_of_the_interval_would_be_missed():
    """With little luck of training and few prompts, the runs alone hold the truth too rarely."""
    generator = np.random.default_rng(1)
    covered_without, covered_with = 0, 0
    for _ in range(1000):
        stratum = stratum_of("parity", draw_answers(generator, 12, 60, 0.005, None))
        without_prompts, with_prompts = (
            effect([replace(stratum, prompts=0.0)]),
            effect([stratum]),
        )
        covered_without += without_prompts.low <= 0 <= without_prompts.high
        covered_with += with_prompts.low <= 0 <= with_prompts.high

    assert covered_without < 880
    assert 930 <= covered_with <= 970
