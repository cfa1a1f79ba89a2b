"""The rule's promises, by simulation: its intervals hold the truth in 93 to 97 %, and at most 5 % of calls are false.

Runs and prompts are drawn anew each time. The rule sees which prompts were answered, and nothing else.
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from metatokens.paper.rule import Effect, Kind, Stratum, effect, prompt_variance, verdict

TASKS = {"parity": 0.05, "copying": 0.03, "segment_counting": 0.08, "list_recall": 0.15}  # SD between runs, as observed
SIZES = {3: (500, 2000), 5: (500, 2000), 12: (500, 1500)}  # runs a side: prompts, repetitions
LUCKS = [None, 0.6]


def _answers(rng: np.random.Generator, runs: int, prompts: int, spread: float, luck: float | None) -> list[np.ndarray]:
    """Right and wrong of two models that are equally good, each an array (runs, prompts), the second's negative.

    A run's probability of being right is 1/2, plus its own luck, plus the prompt's difficulty, plus how much harder
    the prompt is for this model. It is never cut off at 0 or 1, so the models differ by 0 exactly.

    Args:
        luck: the probability that a run learns the task (95 %) rather than not (20 %); None for normal luck.
    """
    furthest = min(3 * spread, 0.36)
    room = 0.02 if luck else (0.5 - furthest) / 2
    shared, sides = rng.uniform(-room, room, prompts), []
    for sign in (1.0, -1.0):
        own = rng.normal(0, spread, runs).clip(-furthest, furthest)
        own = np.where(rng.random(runs) < luck, 0.45, -0.3) if luck else own
        chance = 0.5 + own[:, None] + (shared + rng.uniform(-room, room, prompts))
        sides.append(sign * (rng.random((runs, prompts), dtype=np.float32) < chance))
    return sides


@cache
def _effects(runs: int, luck: float | None) -> list[Effect]:
    """What the rule finds of four tasks, again and again; the truth is 0."""
    prompts, repetitions = SIZES[runs]
    rng, found = np.random.default_rng(runs), []
    for _ in range(repetitions):
        strata = []
        for task, spread in TASKS.items():
            sides = _answers(rng, runs, prompts, spread, luck)
            means = tuple(side.mean(axis=1) for side in sides)
            strata.append(Stratum(task, means, prompts=max(prompt_variance(sides), 0.0)))
        found.append(effect(strata))
    return found


def _rates(runs: int, luck: float | None, truth: float, kind: Kind) -> Counter[str]:
    """How often each verdict is told, in percent, where the true effect is as given."""
    found = _effects(runs, luck)
    moved = [replace(one, value=one.value + truth, low=one.low + truth, high=one.high + truth) for one in found]
    counts = Counter(verdict(one, kind, 0.05) for one in moved)
    return Counter({word: 100 * count / len(found) for word, count in counts.items()})


@pytest.mark.parametrize("luck", LUCKS)
@pytest.mark.parametrize("runs", SIZES)
def test_the_interval_holds_the_truth_as_often_as_it_promises(runs: int, luck: float | None) -> None:
    assert 0.93 <= np.mean([one.low <= 0 <= one.high for one in _effects(runs, luck)]) <= 0.97


@pytest.mark.parametrize("luck", LUCKS)
@pytest.mark.parametrize("runs", SIZES)
def test_false_calls_are_at_most_one_in_twenty(runs: int, luck: float | None) -> None:
    """At the worst truths: no gain at all, a gain or a loss just worth mentioning, and a bound just met."""
    assert _rates(runs, luck, 0.0, "gain")["supported"] <= 5
    worth_mentioning = _rates(runs, luck, 0.05, "gain")
    assert worth_mentioning["contradicted"] + worth_mentioning["equivalent"] <= 5
    loss = _rates(runs, luck, -0.05, "gain")
    assert loss["supported"] + loss["equivalent"] <= 5
    boundaries: tuple[tuple[Kind, float], ...] = (("match", -0.05), ("above", 0.0))
    for kind, boundary in boundaries:  # there, either word is false
        found = _rates(runs, luck, boundary, kind)
        assert max(found["supported"], found["contradicted"]) <= 5


def test_twelve_runs_find_what_is_there() -> None:
    assert _rates(12, None, 0.1, "gain")["supported"] > 95
    assert _rates(12, None, 0.0, "gain")["equivalent"] + _rates(12, None, 0.0, "gain")["contradicted"] > 60
    assert _rates(12, None, -0.1, "gain")["contradicted"] > 95


def test_prompts_that_are_left_out_of_the_interval_would_be_missed() -> None:
    """With little luck of training and few prompts, the runs alone hold the truth too rarely."""
    rng, alone, whole = np.random.default_rng(1), 0, 0
    for _ in range(1000):
        sides = _answers(rng, 12, 60, 0.005, None)
        runs = Stratum("parity", tuple(side.mean(axis=1) for side in sides))
        without, with_prompts = effect([runs]), effect([replace(runs, prompts=max(prompt_variance(sides), 0.0))])
        alone += without.low <= 0 <= without.high
        whole += with_prompts.low <= 0 <= with_prompts.high
    assert alone < 880
    assert 930 <= whole <= 970
