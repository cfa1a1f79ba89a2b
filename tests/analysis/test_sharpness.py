"""The corrected theorem on boosted logits, and sharpness against loops over an oracle's scores."""

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from metatokens.analysis.sharpness import entropy, log_odds, premise_holds, sharpness
from metatokens.errors import UserError
from metatokens.records import About
from tests.analysis.recording_oracle import KINDS, bare_example, record
from tests.model.tiny_models import META, tiny_model
from tests.numbers import ROUNDED

rows_of_logits = st.lists(st.floats(-6, 6), min_size=2, max_size=7)


def plain_softmax(logits):
    exponentials = [math.exp(logit - max(logits)) for logit in logits]
    return [exponential / sum(exponentials) for exponential in exponentials]


def plain_entropy(logits):
    return -sum(weight * math.log(weight) for weight in plain_softmax(logits) if weight > 0)


def plain_log_odds(logits, index):
    weights = plain_softmax(logits)
    others = sum(weights[:index]) + sum(weights[index + 1 :])
    return math.log(weights[index] / others)


def boosted(logits, index, boost):
    return [*logits[:index], logits[index] + boost, *logits[index + 1 :]]


def row(logits):
    return torch.tensor(logits, dtype=torch.float64)


def holds_at(logits, index):
    return bool(premise_holds(row(logits), torch.tensor(index)))


# --- the theorem


def test_the_printed_theorem_has_a_counterexample():
    """Theorem 4.1 claims that boosting any key lowers the entropy."""
    before, after = entropy(row([5, 0])).item(), entropy(row([5, 1])).item()

    assert before == pytest.approx(0.040, abs=5e-4)
    assert after == pytest.approx(0.090, abs=5e-4)
    assert not holds_at([5, 0], 1)
    assert holds_at([5, 0], 0)
    assert entropy(row([6, 0])).item() < before


@given(rows_of_logits)
def test_entropy(logits):
    with_a_later_key = [*logits, -math.inf]

    assert entropy(row(logits)).item() == pytest.approx(plain_entropy(logits), abs=1e-12)
    assert entropy(row(with_a_later_key)).item() == pytest.approx(plain_entropy(logits), abs=1e-12)


@given(rows_of_logits, st.floats(0.01, 15), st.data())
def test_where_the_premise_holds_every_boost_lowers_the_entropy(logits, boost, data):
    keys = [key for key in range(len(logits)) if holds_at(logits, key)]
    assume(keys)  # not where all logits are equal
    index = data.draw(st.sampled_from(keys))

    assert plain_softmax(logits)[index] > math.exp(-plain_entropy(logits))
    assert plain_entropy(boosted(logits, index, boost)) < plain_entropy(logits)
    assert holds_at(boosted(logits, index, boost), index)  # so the same holds for a further boost


@given(rows_of_logits, st.floats(-5, 5), st.floats(-5, 5), st.data())
def test_log_odds_measure_the_boost_alone(logits, boost, shift, data):
    index = data.draw(st.integers(0, len(logits) - 1))
    key = torch.tensor(index)

    before = log_odds(row(logits), key).item()
    after = log_odds(row(boosted(logits, index, boost)) + shift, key).item()

    assert before == pytest.approx(plain_log_odds(logits, index))
    assert after - before == pytest.approx(boost, abs=1e-9)


# --- what is measured

PROMPTS = [
    [3, 4, META, 5, 6, 7, 8, META, 9, 10, META],
    [11, 12, 13, META, META, 14, META],
    [META, 15, 16, 17, META],
    [18, 19, 20, META],
]
ANSWER = 21


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def model(request):
    return tiny_model(**request.param)


@pytest.fixture(scope="module")
def measurements(model):
    examples = [bare_example(ids, ANSWER) for ids in PROMPTS]
    return sharpness(model, examples, About(model="x", seed=4, task="parity", length=16))


def values_of_row(before, after, metas):
    """What is measured of one row: its scores without and with the meta-token's embedding, by key."""
    keys = list(after)
    logits_before, logits_after = list(before.values()), list(after.values())
    weights_before = dict(zip(keys, plain_softmax(logits_before), strict=True))
    entropy_before, entropy_after = (
        plain_entropy(logits_before),
        plain_entropy(logits_after),
    )
    odds_before = {key: plain_log_odds(logits_before, keys.index(key)) for key in metas}
    odds_after = {key: plain_log_odds(logits_after, keys.index(key)) for key in metas}
    strongest = max(metas, key=weights_before.get)
    premise = weights_before[strongest] > math.exp(-entropy_before)
    rose = odds_after[strongest] > odds_before[strongest]
    return {
        "attention_logit_change": [after[key] - before[key] for key in metas],
        "attention_log_odds_change": [odds_after[key] - odds_before[key] for key in metas],
        "attention_entropy_change": [entropy_after - entropy_before],
        "premise_holds": [premise],
        ("entropy_fell", premise, rose): [entropy_after < entropy_before],
    }


def slow_attention(model):
    """Every value of all prompts by metric and module, one row at a time."""
    values = defaultdict(list)
    for ids in PROMPTS:
        with_embedding, without = record(model, ids), record(model, ids, zeroed=True)
        metas = [position for position, token in enumerate(ids) if token == META]
        for (module, layer), scores in with_embedding.scores.items():
            is_gathered = module == "second_attention" and model.config.second_attention == "meta"
            rows = metas if is_gathered else range(len(ids))
            for query in rows[1:]:
                keys = [key for key in rows if key <= query]
                metas_seen = [key for key in metas if key <= query]
                if not metas_seen:
                    continue
                for head in range(4):
                    before = {
                        key: without.scores[module, layer][head, query, key].item() for key in keys
                    }
                    after = {key: scores[head, query, key].item() for key in keys}
                    for metric, numbers in values_of_row(before, after, metas_seen).items():
                        values[metric, module] += numbers
    return values


def test_attention_against_the_oracle(model, measurements):
    expected = slow_attention(model)
    # Rotary tables are float32.
    tolerance = ROUNDED if model.config.position_embedding == "rope" else 1e-9

    measured = {}
    for line in measurements:
        if line.module is not None:
            metric = (
                line.metric if line.premise is None else (line.metric, line.premise, line.boosted)
            )
            measured[metric, line.module] = line
    assert measured.keys() >= expected.keys()
    for key, line in measured.items():
        numbers = expected[key]
        assert line.n == len(numbers)
        if numbers:
            assert line.value == pytest.approx(sum(numbers) / len(numbers), abs=tolerance), key


def test_outputs_against_the_oracle(model, measurements):
    expected = defaultdict(list)
    for ids in PROMPTS:
        metas = [position for position, token in enumerate(ids) if token == META]
        logits_before = record_logits(model, ids, zeroed=True)
        logits_after = record_logits(model, ids, zeroed=False)
        for meta in metas:
            before, after = logits_before[meta].tolist(), logits_after[meta].tolist()
            marker = "final" if meta == metas[-1] else "context"
            expected["output_top_logit_change", marker].append(max(after) - max(before))
            expected["output_entropy_change", marker].append(
                plain_entropy(after) - plain_entropy(before)
            )
            if marker == "final":
                expected["output_answer_logit_change", marker].append(
                    after[ANSWER] - before[ANSWER]
                )

    measured = {(line.metric, line.marker): line for line in measurements if line.module is None}
    assert measured.keys() == expected.keys()
    for key, numbers in expected.items():
        assert measured[key].n == len(numbers)
        assert measured[key].value == pytest.approx(sum(numbers) / len(numbers), abs=ROUNDED), key


def record_logits(model, ids, *, zeroed):
    """The oracle's logits of the text tokens."""
    with torch.no_grad():
        return record(model, ids, zeroed=zeroed).logits(ids)[:, :META]


@pytest.mark.parametrize("ids", [[1, 2, 3], [META, META]], ids=["none", "none after text"])
def test_a_prompt_without_a_meta_token_after_text_is_refused(ids):
    with pytest.raises(UserError, match="no meta-token of the model's after some text"):
        sharpness(tiny_model(), [bare_example(ids)], About(model="x"))
