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
# The fraction in thousandths, so that the oracle counts in integers.
per_mille = st.integers(0, 500)
placements = st.sampled_from(sorted(PLACEMENTS))
seeds = st.integers(0, 2**32 - 1)


def make_block(size, thousandths, placement, seed):
    """Drawn text, and the ids and labels of its block."""
    count = 0 if placement == "none" else thousandths * size // 1000
    text = np.random.default_rng(seed + 1).integers(0, META, size=size - count)
    ids, labels = insert_meta_tokens(
        text,
        meta_token_id=META,
        block_size=size,
        fraction=thousandths / 1000,
        placement=placement,
        generator=np.random.default_rng(seed),
    )
    return text, ids, labels


@given(block_sizes, per_mille)
def test_count_is_the_integer_quotient(size, thousandths):
    assert meta_token_count(size, thousandths / 1000) == thousandths * size // 1000


@pytest.mark.parametrize("fraction", [-0.01, 0.51, math.nan])
def test_fraction_outside_its_range_names_value_and_range(fraction):
    with pytest.raises(UserError, match=rf"{fraction}.*\[0, 0\.5\]"):
        meta_token_count(100, fraction)


@given(block_sizes, per_mille, placements, seeds)
def test_removing_the_meta_tokens_gives_the_text_back(size, thousandths, placement, seed):
    text, ids, labels = make_block(size, thousandths, placement, seed)

    assert ids.shape == labels.shape == (size,)
    assert ids.dtype == labels.dtype == np.int64
    assert ids[ids != META].tolist() == text.tolist()


@given(block_sizes, per_mille, placements, seeds)
def test_each_text_token_but_the_first_is_a_target_once_and_no_meta_token_is(
    size, thousandths, placement, seed
):
    text, ids, labels = make_block(size, thousandths, placement, seed)

    # What a causal model is asked: at position i, for the label at i + 1.
    asked = {i: labels[i + 1] for i in range(size - 1) if labels[i + 1] != -100}

    expected = {}
    text_read = 0
    for i in range(size - 1):
        text_read += ids[i] != META
        if ids[i + 1] != META and text_read > 0:
            expected[i] = text[text_read]
    assert asked == expected
    assert list(asked.values()) == text[1:].tolist()
    assert labels[0] == -100 or ids[0] != META


def test_the_block_that_the_module_draws():
    ids_of_words = {"M": META, "-100": -100}
    drawn = {}
    for line in insertion.__doc__.splitlines():
        if line.startswith("    "):
            name, *words = line.split()
            drawn[name] = [ids_of_words.get(word, ord(word[0])) for word in words]
    metas = np.flatnonzero(np.array(drawn["input_ids"]) == META)

    ids, labels = insert_meta_tokens(
        drawn["text"],
        meta_token_id=META,
        block_size=8,
        fraction=0.25,
        generator=SimpleNamespace(choice=lambda *_, **__: metas),
    )

    assert ids.tolist() == drawn["input_ids"]
    assert labels.tolist() == drawn["labels"]


def drawn_positions(size, fraction, draws):
    text = np.arange(size - meta_token_count(size, fraction))
    for seed in range(draws):
        generator = np.random.default_rng([7, seed])
        ids, _ = insert_meta_tokens(
            text,
            meta_token_id=META,
            block_size=size,
            fraction=fraction,
            generator=generator,
        )
        yield tuple(np.flatnonzero(ids == META).tolist())


def test_sets_of_positions_are_equally_likely():
    sets, draws = list(itertools.combinations(range(6), 2)), 3000

    counts = Counter(drawn_positions(6, 0.4, draws))

    assert counts.keys() == set(sets)
    expected = draws / len(sets)
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    assert 0.001 < chi2.sf(statistic, len(sets) - 1) < 0.999


@given(st.integers(2, 200), per_mille)
def test_periodic_stretches_differ_by_one_at_most(size, thousandths):
    _, ids, _ = make_block(size, thousandths, "periodic", seed=0)

    ends = np.flatnonzero(ids == META)

    if len(ends):
        stretches = np.diff(ends, prepend=-1)
        assert ends[-1] == size - 1
        assert stretches.max() - stretches.min() <= 1


@pytest.mark.parametrize(
    ("text", "placement", "sentence"),
    [
        ([0] * 89, "uniform", "take 90 text ids"),
        ([0] * 91, "uniform", "take 90 text ids"),
        ([META] * 90, "uniform", "999"),
        ([0] * 90, "random", r"'random'.*uniform, periodic, none"),
    ],
    ids=["short", "long", "with a meta-token", "random"],
)
def test_what_cannot_be_inserted_is_refused(text, placement, sentence):
    error = UserError if placement == "random" else ValueError
    generator = np.random.default_rng(0)

    with pytest.raises(error, match=sentence):
        insert_meta_tokens(
            text,
            meta_token_id=META,
            block_size=100,
            placement=placement,
            generator=generator,
        )
