"""Similarities and attention of the final meta-token against loops over an oracle's states and scores."""

from collections import defaultdict

import pytest

from metatokens.analysis.residual import residual
from metatokens.records import About
from tests.analysis.recording_oracle import KINDS, bare_example, record
from tests.model.tiny_models import META, tiny_model
from tests.numbers import ROUNDED

LONG = [number % 50 for number in range(37)]
PROMPTS = [
    [3, 4, META, 5, 6, 7, 8, META, 9, 10, META],
    [META, 11, 12, 13, META, META, 14, META],
    [*LONG, META, 1, 2, META],
    [18, 19, 20, META],
]
# The class of each position as a key of the final meta-token. What is further back than 8 text tokens is `other`.
CLASSES = [
    ["first", "before_meta", "earlier_meta", "after_meta", "near", "near", "before_meta", "earlier_meta", "after_meta",
     "near", "itself"],
    ["earlier_meta", "after_meta", "near", "before_meta", "earlier_meta", "earlier_meta", "after_meta", "itself"],
    ["first", *["other"] * 30, *["near"] * 5, "before_meta", "earlier_meta", "after_meta", "near", "itself"],
    ["first", "near", "near", "itself"],
]  # fmt: skip
BINS = (*range(1, 17), 32, 64, 128)


def cosine(a, b):
    return (a @ b / (a @ a).sqrt() / (b @ b).sqrt()).item()


def centred(ids, states):
    text = [state for state, token in zip(states, ids, strict=True) if token != META]
    return states - sum(text) / len(text)


def bin_of(distance):
    return min(edge for edge in BINS if distance <= edge)


def mean(values):
    return sum(values) / len(values)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def model(request):
    return tiny_model(**request.param)


@pytest.fixture(scope="module")
def oracles(model):
    return [record(model, ids) for ids in PROMPTS]


@pytest.fixture(scope="module")
def measurements(model):
    """The measurements of each metric."""
    lines = residual(
        model,
        [bare_example(ids) for ids in PROMPTS],
        About(model="x", task="parity", length=64),
    )
    by_metric = defaultdict(list)
    for line in lines:
        by_metric[line.metric].append(line)
    return by_metric


def test_similarities_of_meta_tokens_and_their_controls(oracles, measurements):
    expected = defaultdict(list)
    for ids, oracle in zip(PROMPTS, oracles, strict=True):
        metas = [position for position, token in enumerate(ids) if token == META and position > 0]
        text = [position for position, token in enumerate(ids) if token != META]
        for meta in metas[:-1]:
            control = max(position for position in text if position < meta)
            for layer, states in enumerate(oracle.states):
                middle = centred(ids, states)
                for subject, position in (("meta", meta), ("text", control)):
                    for before in text:
                        if before < position:
                            key = (subject, layer, bin_of(position - before))
                            expected[key].append(cosine(middle[position], middle[before]))

    measured = {}
    for line in measurements["similarity_centred"]:
        assert line.marker == "context"
        measured[line.subject, line.layer, line.distance] = line
    assert measured.keys() == expected.keys()
    for key, similarities in expected.items():
        assert measured[key].n == len(similarities)
        assert measured[key].value == pytest.approx(mean(similarities), abs=ROUNDED)


def test_similarities_to_the_final_meta_token_in_the_first_prompt(oracles, measurements):
    ids, oracle = PROMPTS[0], oracles[0]
    expected = {}
    for layer, states in enumerate(oracle.states):
        middle = centred(ids, states)
        for position, token in enumerate(ids):
            subject = "meta" if token == META else "text"
            expected[layer, position, subject] = cosine(middle[position], middle[-1])

    measured = {}
    for line in measurements["similarity_to_final_centred"]:
        assert line.n == 1
        measured[line.layer, line.position, line.subject] = line.value
    assert measured == pytest.approx(expected, abs=ROUNDED)


def test_what_the_final_meta_token_attends_to(oracles, measurements):
    expected = defaultdict(float)
    for classes, oracle in zip(CLASSES, oracles, strict=True):
        for (module, layer), scores in oracle.scores.items():
            for head, weights in enumerate(scores[:, -1].softmax(-1).tolist()):
                for keys, weight in zip(classes, weights, strict=True):
                    expected[module, layer, head, keys] += weight / len(PROMPTS)

    measured = {}
    for line in measurements["attention_weight"]:
        assert line.n == len(PROMPTS)
        measured[line.module, line.layer, line.head, line.keys] = line.value
    # Text is no key of meta-attention.
    seen = {key: weight for key, weight in expected.items() if weight}
    assert measured.keys() >= seen.keys()
    for key, weight in measured.items():
        assert weight == pytest.approx(expected[key], abs=1e-6)


def test_evenly_spread_attention_for_comparison(model, measurements):
    shares = defaultdict(dict)
    for line in measurements["attention_weight_if_uniform"]:
        shares[line.module][line.keys] = line.value

    for module, share in shares.items():
        is_gathered = (module, model.config.second_attention) == (
            "second_attention",
            "meta",
        )
        metas = [ids.count(META) for ids in PROMPTS]
        lengths = metas if is_gathered else [len(ids) for ids in PROMPTS]
        earlier = [(count - 1) / length for count, length in zip(metas, lengths, strict=True)]
        evenly_spread = [1 / length for length in lengths]
        assert share["itself"] == pytest.approx(mean(evenly_spread))
        assert share["earlier_meta"] == pytest.approx(mean(earlier))
        assert sum(share.values()) == pytest.approx(1)
