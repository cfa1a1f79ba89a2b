"""Meta-token insertion: counts, placements, labels."""

import itertools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from metatokens import insert_meta_tokens
from metatokens.data import insertion
from metatokens.data.insertion import PLACEMENTS, meta_token_count
from metatokens.errors import UserError

META = 999
block_sizes = st.integers(1, 200)
per_mille = st.integers(0, 500)  # the fraction in thousandths, so that the oracle counts in integers
placements = st.sampled_from([*PLACEMENTS])
seeds = st.integers(0, 2**32 - 1)


def make_block(n, thousandths, placement, seed):
    count = 0 if placement == "none" else thousandths * n // 1000
    text = np.random.default_rng(seed + 1).integers(0, META, size=n - count)
    ids, labels = insert_meta_tokens(
        text,
        meta_token_id=META,
        block_size=n,
        fraction=thousandths / 1000,
        placement=placement,
        generator=np.random.default_rng(seed),
    )
    return text, ids, labels


@pytest.mark.parametrize(
    ("n", "k", "count"),
    [(100, 0.29, 29), (1024, 0.1, 102), (1000, 0.019, 19), (10, 0.5, 5), (9, 0.1, 0), (512, 0, 0), (50, 0.14, 7)],
)
def test_count_is_exact_in_decimal(n, k, count):
    assert meta_token_count(n, k) == count
    assert meta_token_count(n, np.float64(k)) == count


@given(block_sizes, per_mille)
def test_count_is_the_integer_quotient(n, thousandths):
    assert meta_token_count(n, thousandths / 1000) == thousandths * n // 1000


@pytest.mark.parametrize("k", [-0.01, 0.51, 1, math.nan, math.inf])
def test_fraction_outside_its_range_names_value_and_range(k):
    with pytest.raises(UserError, match=rf"{k}.*\[0, 0\.5\]"):
        meta_token_count(100, k)


@given(block_sizes, per_mille, placements, seeds)
def test_removing_the_meta_tokens_gives_the_text_back(n, thousandths, placement, seed):
    text, ids, labels = make_block(n, thousandths, placement, seed)
    assert ids.shape == labels.shape == (n,)
    assert ids.dtype == labels.dtype == np.int64
    assert [i for i in ids.tolist() if i != META] == text.tolist()
    assert Counter(ids.tolist())[META] == (0 if placement == "none" else thousandths * n // 1000)


@given(block_sizes, per_mille, placements, seeds)
def test_each_text_token_but_the_first_is_a_target_once_and_no_meta_token_is(n, thousandths, placement, seed):
    text, ids, labels = make_block(n, thousandths, placement, seed)
    # What a causal model is asked: at position i, for the label at i + 1.
    asked = [(i, labels[i + 1]) for i in range(n - 1) if labels[i + 1] != -100]
    ordinal = -1  # of the last text token up to the position that is asked
    expected = []
    for i in range(n - 1):
        ordinal += ids[i] != META
        if ids[i + 1] != META and ordinal >= 0:
            expected.append((i, text[ordinal + 1]))
    assert asked == expected
    assert [target for _, target in asked] == text[1:].tolist()
    assert labels[0] == -100 or ids[0] != META


def test_the_block_that_the_module_draws():
    rows = dict(line.split(maxsplit=1) for line in insertion.__doc__.splitlines() if line.startswith("    "))
    text, block, labels = ([*map(number_of, rows[name].split())] for name in ("text", "input_ids", "labels"))
    made = insert_meta_tokens(
        text,
        meta_token_id=META,
        block_size=8,
        fraction=0.25,
        generator=SimpleNamespace(choice=lambda *_, **__: np.flatnonzero(np.array(block) == META)),
    )
    assert [part.tolist() for part in made] == [block, labels]


def number_of(drawn):
    return {"M": META, "-100": -100}.get(drawn, ord(drawn[0]))


def positions(n, k, draws):
    text = np.arange(n - meta_token_count(n, k))
    for seed in range(draws):
        generator = np.random.default_rng([7, seed])
        ids, _ = insert_meta_tokens(text, meta_token_id=META, block_size=n, fraction=k, generator=generator)
        yield tuple(np.flatnonzero(ids == META).tolist())


def test_positions_are_uniform():
    n, k, m, draws = 40, 0.25, 10, 3000
    counts = np.zeros(n)
    for chosen in positions(n, k, draws):
        counts[list(chosen)] += 1
    expected = draws * m / n
    # Draws without replacement make the counts of positions less variable: hence the factor (n - 1) / (n - m).
    statistic = ((counts - expected) ** 2 / expected).sum() * (n - 1) / (n - m)
    assert 0.001 < chi2.sf(statistic, n - 1) < 0.999


def test_sets_of_positions_are_equally_likely():
    sets, draws = list(itertools.combinations(range(6), 2)), 3000
    counts = Counter(positions(6, 0.4, draws))
    assert set(counts) == set(sets)
    expected = draws / len(sets)
    statistic = sum((counts[s] - expected) ** 2 / expected for s in sets)
    assert 0.001 < chi2.sf(statistic, len(sets) - 1) < 0.999


@given(st.integers(2, 200), per_mille)
def test_periodic_stretches_differ_by_one_at_most(n, thousandths):
    _, ids, _ = make_block(n, thousandths, "periodic", 0)
    ends = np.flatnonzero(ids == META)
    stretches = np.diff(ends, prepend=-1)
    assert len(ends) == 0 or (ends[-1] == n - 1 and stretches.max() - stretches.min() <= 1)


@pytest.mark.parametrize(
    ("text", "placement", "sentence"),
    [
        *(([0] * length, "uniform", "take 90 text ids") for length in (0, 89, 91, 100)),
        ([META] * 90, "uniform", "999"),
        ([0] * 90, "random", r"'random'.*uniform, periodic, none"),
    ],
)
def test_what_cannot_be_inserted_is_refused(text, placement, sentence):
    error = UserError if placement == "random" else ValueError
    with pytest.raises(error, match=sentence):
        insert_meta_tokens(
            text, meta_token_id=META, block_size=100, placement=placement, generator=np.random.default_rng(0)
        )
