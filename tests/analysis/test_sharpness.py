"""The corrected theorem on boosted logits, and sharpness against loops over an oracle's scores."""

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from metatokens.analysis.sharpness import entropy, log_odds, premise_holds, sharpness
from metatokens.errors import UserError
from metatokens.records import About, Measurement
from tests.analysis.recording_oracle import KINDS, RecordingOracle, bare_example
from tests.model.tiny_models import META, tiny_model
from tests.numbers import ROUNDED

rows_of_logits = st.lists(st.floats(-6, 6), min_size=2, max_size=7)


def plain_softmax(logits: list[float]) -> list[float]:
    exponentials = [math.exp(logit - max(logits)) for logit in logits]
    return [e / sum(exponentials) for e in exponentials]


def plain_entropy(logits: list[float]) -> float:
    return -sum(p * math.log(p) for p in plain_softmax(logits) if p > 0)


def boosted(logits: list[float], index: int, boost: float) -> list[float]:
    return [logit + boost * (j == index) for j, logit in enumerate(logits)]


def at(index: int) -> torch.Tensor:
    return torch.tensor(index)


def row(logits: list[float]) -> torch.Tensor:
    return torch.tensor(logits, dtype=torch.float64)


# --- the theorem


def test_the_printed_theorem_has_a_counterexample() -> None:
    """Theorem 4.1 claims that boosting any key lowers the entropy."""
    before, after = entropy(row([5, 0])).item(), entropy(row([5, 1])).item()
    assert (round(before, 3), round(after, 3)) == (0.040, 0.090)
    assert not premise_holds(row([5, 0]), at(1))
    assert premise_holds(row([5, 0]), at(0))
    assert entropy(row([6, 0])).item() < before


@given(rows_of_logits)
def test_entropy(logits: list[float]) -> None:
    assert entropy(row(logits)).item() == pytest.approx(plain_entropy(logits), abs=1e-12)
    masked = entropy(row([*logits, -math.inf])).item()  # a key that comes later
    assert masked == pytest.approx(plain_entropy(logits), abs=1e-12)


@given(rows_of_logits, st.floats(0.01, 15), st.data())
def test_where_the_premise_holds_every_boost_lowers_the_entropy(
    logits: list[float], boost: float, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(logits) - 1))
    assume(premise_holds(row(logits), at(index)))
    assert plain_softmax(logits)[index] > math.exp(-plain_entropy(logits))
    assert plain_entropy(boosted(logits, index, boost)) < plain_entropy(logits)
    assert premise_holds(row(boosted(logits, index, boost)), at(index))  # so the same holds for a further boost


@given(rows_of_logits, st.data())
def test_elsewhere_a_small_boost_raises_the_entropy(logits: list[float], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(logits) - 1))
    excess = math.log(plain_softmax(logits)[index]) + plain_entropy(logits)
    assume(excess < -0.05)
    assert not premise_holds(row(logits), at(index))
    assert plain_entropy(boosted(logits, index, 0.01)) > plain_entropy(logits)


@given(rows_of_logits, st.floats(-5, 5), st.floats(-5, 5), st.data())
def test_log_odds_measure_the_boost_alone(logits: list[float], boost: float, shift: float, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(logits) - 1))
    alpha = plain_softmax(logits)[index]
    before = log_odds(row(logits), at(index)).item()
    assert before == pytest.approx(
        math.log(alpha / sum(plain_softmax(logits)[:index] + plain_softmax(logits)[index + 1 :]))
    )
    after = log_odds(row(boosted(logits, index, boost)) + shift, at(index)).item()
    assert after - before == pytest.approx(boost, abs=1e-9)


# --- what is measured

PROMPTS = [
    [3, 4, META, 5, 6, 7, 8, META, 9, 10, META],
    [11, 12, 13, META, META, 14, META],
    [META, 15, 16, 17, META],
    [18, 19, 20, META],
]
ANSWER = 21
GATED = [
    (module, layer, head)
    for module in ("attention", "second_attention")
    for layer, head in [(None, None), *((layer, head) for layer in range(2) for head in range(4))]
]


def expected_attention(kept: RecordingOracle, zeroed: RecordingOracle, ids: list[int], found: dict) -> None:
    """Add every value of one prompt to `found`, from the scores, one row at a time."""
    for (module, layer), scores in kept.scores.items():
        is_gathered = module == "second_attention" and kept.config.second_attention == "meta"
        metas = [i for i, token in enumerate(ids) if token == META]
        shown = metas if is_gathered else list(range(len(ids)))
        for head in range(4):
            for query in shown[1:]:
                keys = [key for key in shown if key <= query]
                seen = [key for key in metas if key <= query]
                if not seen:
                    continue
                after = {key: scores[head, query, key].item() for key in keys}
                before = {key: zeroed.scores[module, layer][head, query, key].item() for key in keys}
                weights = [dict(zip(keys, plain_softmax(list(part.values())), strict=True)) for part in (before, after)]
                odds = [{key: math.log(w[key] / sum(w[k] for k in keys if k != key)) for key in seen} for w in weights]
                entropies = [plain_entropy(list(part.values())) for part in (before, after)]
                best = max(seen, key=lambda key: weights[0][key])
                premise = weights[0][best] > math.exp(-entropies[0])
                rose = odds[1][best] > odds[0][best]
                values = {
                    "attention_logit_change": [after[key] - before[key] for key in seen],
                    "attention_log_odds_change": [odds[1][key] - odds[0][key] for key in seen],
                    "attention_entropy_change": [entropies[1] - entropies[0]],
                    "premise_holds": [premise],
                    ("entropy_fell", premise, rose): [entropies[1] < entropies[0]],
                }
                for metric, numbers in values.items():
                    found[metric, module, layer, head] += numbers
                    found[metric, module, None, None] += numbers


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def measured(request: pytest.FixtureRequest) -> tuple[Any, list[Measurement]]:
    model = tiny_model(**request.param)
    about = About(model="x", seed=4, task="parity", length=16)
    return model, sharpness(model, [bare_example(ids, ANSWER) for ids in PROMPTS], about)


def test_attention_against_the_oracle(measured: tuple[Any, list[Measurement]]) -> None:
    model, measurements = measured
    found: dict[Any, list[float]] = defaultdict(list)
    for ids in PROMPTS:
        kept, zeroed = RecordingOracle(model), RecordingOracle(model, zeroed=True)
        with torch.no_grad():
            kept.logits(ids), zeroed.logits(ids)
        expected_attention(kept, zeroed, ids, found)
    tolerance = ROUNDED if model.config.position_embedding == "rope" else 1e-9  # rotary tables are float32
    counted = 0
    for m in measurements:
        if m.module is None:
            continue
        metric = m.metric if m.premise is None else (m.metric, m.premise, m.boosted)
        numbers = found.pop((metric, m.module, m.layer, m.head), [])
        assert m.n == len(numbers)
        if numbers:
            assert m.value == pytest.approx(sum(numbers) / len(numbers), abs=tolerance), metric
            counted += 1
    assert not found
    assert counted > 60


def test_the_groups_of_rows_are_all_rows(measured: tuple[Any, list[Measurement]]) -> None:
    _, measurements = measured
    for module, layer, head in GATED:
        here = [m for m in measurements if (m.module, m.layer, m.head) == (module, layer, head)]
        groups = [m for m in here if m.metric == "entropy_fell"]
        if here:
            assert len(groups) == 4
            (change,) = [m for m in here if m.metric == "attention_entropy_change"]
            (premise,) = [m for m in here if m.metric == "premise_holds"]
            assert sum(m.n for m in groups) == change.n == premise.n
            assert sum(m.n for m in groups if m.premise) == round(premise.value * premise.n)


def test_outputs_against_the_oracle(measured: tuple[Any, list[Measurement]]) -> None:
    model, measurements = measured
    found: dict[Any, list[float]] = defaultdict(list)
    for ids in PROMPTS:
        with torch.no_grad():
            both = [RecordingOracle(model, zeroed=zeroed).logits(ids)[:, :META] for zeroed in (True, False)]
        metas = [i for i, token in enumerate(ids) if token == META]
        for meta in metas:
            before, after = (part[meta].tolist() for part in both)
            marker = "final" if meta == metas[-1] else "context"
            found["output_top_logit_change", marker].append(max(after) - max(before))
            found["output_entropy_change", marker].append(plain_entropy(after) - plain_entropy(before))
            if marker == "final":
                found["output_answer_logit_change", marker].append(after[ANSWER] - before[ANSWER])
    outputs = {(m.metric, m.marker): m for m in measurements if m.module is None}
    assert outputs.keys() == found.keys()
    for key, numbers in found.items():
        assert outputs[key].n == len(numbers)
        assert outputs[key].value == pytest.approx(sum(numbers) / len(numbers), abs=ROUNDED), key


def test_records_say_what_was_measured(measured: tuple[Any, list[Measurement]]) -> None:
    model, measurements = measured
    modules = {"attention", None} | ({"second_attention"} if model.config.second_attention != "none" else set())
    assert {m.module for m in measurements} == modules
    for m in measurements:
        assert (m.analysis, m.model, m.seed, m.task, m.length) == ("sharpness", "x", 4, "parity", 16)
        assert m.position_embedding == model.config.position_embedding
        is_share = m.metric in ("premise_holds", "entropy_fell")
        assert (m.quantiles is None) == (is_share or m.n == 0)


@pytest.mark.parametrize("ids", [[1, 2, 3], [META], [META, META]])
def test_a_prompt_without_a_meta_token_after_text_is_refused(ids: list[int]) -> None:
    with pytest.raises(UserError, match="no meta-token of the model's after some text"):
        sharpness(tiny_model(), [bare_example(ids)], About(model="x"))


@given(st.lists(st.sampled_from([1, 2, META]), min_size=1, max_size=12))
def test_any_prompt_that_ends_with_a_meta_token_can_be_measured(ids: list[int]) -> None:
    model = tiny_model(num_hidden_layers=1)
    measurements = sharpness(model, [bare_example([1, *ids, META])], About(model="x"))
    assert all(m.n == 0 or math.isfinite(m.value) for m in measurements)
