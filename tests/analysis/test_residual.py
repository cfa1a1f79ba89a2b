"""Similarities and attention of the final meta-token against loops over an oracle's states and scores."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from metatokens.analysis.observation import PromptIds
from metatokens.analysis.residual import DISTANCES, key_classes, residual
from metatokens.records import About, Measurement
from tests.analysis.recording_oracle import KINDS, RecordingOracle, bare_example
from tests.model.tiny_models import META, tiny_model
from tests.numbers import ROUNDED

Measured = tuple[list[RecordingOracle], list[Measurement]]
LONG = [i % 50 for i in range(37)]
PROMPTS = [
    [3, 4, META, 5, 6, 7, 8, META, 9, 10, META],
    [META, 11, 12, 13, META, META, 14, META],
    [*LONG, META, 1, 2, META],
    [18, 19, 20, META],
]


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a @ b / (a @ a).sqrt() / (b @ b).sqrt()).item()


def centred(ids: list[int], states: torch.Tensor) -> torch.Tensor:
    text = [state for state, token in zip(states, ids, strict=True) if token != META]
    return states - sum(text) / len(text)


def bin_of(distance: int) -> int:
    return next(edge for edge in (*range(1, 17), 32, 64, 128) if distance <= edge)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def measured(request: pytest.FixtureRequest) -> Measured:
    model = tiny_model(**request.param)
    oracles = []
    for ids in PROMPTS:
        oracles.append(RecordingOracle(model))
        with torch.no_grad():
            oracles[-1].logits(ids)
    about = About(model="x", seed=4, task="parity", length=64)
    return oracles, residual(model, [bare_example(ids) for ids in PROMPTS], about)


def select(measurements: list[Measurement], metric: str) -> Iterator[Measurement]:
    return (m for m in measurements if m.metric == metric)


def test_similarities_of_meta_tokens_and_their_controls(measured: Measured) -> None:
    oracles, measurements = measured
    found: dict[Any, list[float]] = defaultdict(list)
    for ids, oracle in zip(PROMPTS, oracles, strict=True):
        metas = [i for i, token in enumerate(ids) if token == META]
        for meta in metas:
            if meta == 0:
                continue
            control = meta - 1
            while ids[control] == META:
                control -= 1
            for subject, place in (("meta", meta), ("text", control)):
                for before in range(place):
                    for layer, states in enumerate(oracle.states):
                        if ids[before] != META:
                            key = ("final" if meta == metas[-1] else "context", subject, layer, bin_of(place - before))
                            middle = centred(ids, states)
                            found[key].append(cosine(middle[place], middle[before]))
    for m in select(measurements, "similarity_centred"):
        numbers = found.pop((m.marker, m.subject, m.layer, m.distance))
        assert m.n == len(numbers)
        assert m.value == pytest.approx(sum(numbers) / len(numbers), abs=ROUNDED)
    assert not found


def test_what_the_final_meta_token_attends_to(measured: Measured) -> None:
    oracles, measurements = measured
    found: dict[Any, list[float]] = defaultdict(list)
    for ids, oracle in zip(PROMPTS, oracles, strict=True):
        classes = key_classes(PromptIds.of(bare_example(ids), META))
        for (module, layer), scores in oracle.scores.items():
            for head in range(4):
                weights = scores[head, -1].softmax(-1).tolist()
                for keys in ("itself", "earlier_meta", "before_meta", "after_meta", "first", "near", "other"):
                    inside = [w for w, c in zip(weights, classes, strict=True) if c == keys]
                    found[module, layer, head, keys].append(sum(inside))
    seen = defaultdict(float)
    for m in select(measurements, "attention_weight"):
        numbers = found.pop((m.module, m.layer, m.head, m.keys))
        assert m.n == len(PROMPTS)
        assert m.value == pytest.approx(sum(numbers) / len(numbers), abs=1e-6)
        seen[m.module, m.layer, m.head] += m.value
    assert set(seen) == {(*place, head) for place in oracles[0].scores for head in range(4)}
    assert all(total == pytest.approx(1) for total in seen.values())
    assert not any(any(numbers) for numbers in found.values())  # text is no key of meta-attention


def test_evenly_spread_attention_for_comparison(measured: Measured) -> None:
    _, measurements = measured
    for module in {m.module for m in select(measurements, "attention_weight")}:
        shares = {m.keys: m.value for m in select(measurements, "attention_weight_if_uniform") if m.module == module}
        gathered = len(shares) == 2
        lengths = [ids.count(META) if gathered else len(ids) for ids in PROMPTS]
        assert shares["itself"] == pytest.approx(sum(1 / length for length in lengths) / len(lengths))
        earlier = [(ids.count(META) - 1) / length for ids, length in zip(PROMPTS, lengths, strict=True)]
        assert shares["earlier_meta"] == pytest.approx(sum(earlier) / len(earlier))
        assert sum(shares.values()) == pytest.approx(1)


def test_similarities_to_the_final_meta_token_are_of_the_first_example(measured: Measured) -> None:
    oracles, measurements = measured
    ids, oracle = PROMPTS[0], oracles[0]
    similarity = {(m.layer, m.position): m for m in select(measurements, "similarity_to_final_centred")}
    assert similarity.keys() == {(layer, i) for layer in range(3) for i in range(len(ids))}
    for (layer, i), m in similarity.items():
        states = centred(ids, oracle.states[layer])
        assert m.value == pytest.approx(cosine(states[i], states[-1]), abs=ROUNDED)
        assert m.subject == ("meta" if ids[i] == META else "text")


def test_classes_of_keys() -> None:
    ids = [1, 2, META, 3, 4, 5, META, *range(10), META]
    other, near = ["other"], ["near"]
    assert key_classes(PromptIds.of(bare_example(ids), META)) == [
        "first", "before_meta", "earlier_meta", "after_meta", "other", "before_meta", "earlier_meta", "after_meta",
        *other, *near * 8, "itself",
    ]  # fmt: skip
    alone = key_classes(PromptIds.of(bare_example([1, 2, META]), META))
    assert alone == ["first", "near", "itself"]


def test_distances_reach_the_longest_prompts() -> None:
    assert list(DISTANCES) == sorted(set(DISTANCES))
    assert DISTANCES[-1] >= 16_384
