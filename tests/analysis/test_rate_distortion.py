"""The bottleneck: closed forms, limits, and the states that it reads."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from metatokens.analysis import rate_distortion as module
from metatokens.analysis.rate_distortion import (
    BETAS,
    PAPER_EXAMPLES,
    Bottleneck,
    Schedule,
    code_rate,
    draw_code,
    final_states,
    fit,
    rate_distortion,
    score,
)
from metatokens.errors import UserError
from metatokens.model.interventions import NoPosition, intervene
from metatokens.records import About, Measurement
from metatokens.tasks.example import Example
from tests.analysis.recording_oracle import bare_example
from tests.model.tiny_models import META, random_rows, tiny_model

QUICKLY = Schedule(batch=64, epochs=120, learning_rate=2e-2)
ABOUT = About(model="x", seed=4, task="list_recall", length=16)


def codes(seed: int, examples: int = 6, size: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mu = torch.randn(examples, size, generator=generator, dtype=torch.float64)
    return mu, torch.rand(examples, size, generator=generator, dtype=torch.float64) + 0.05


def answer_entropy(answers: torch.Tensor) -> float:
    counts = Counter(answers.tolist()).values()
    return -sum(c / len(answers) * math.log(c / len(answers)) for c in counts)


# --- the rate


@given(st.integers(0, 999))
def test_the_rate_is_the_divergence_from_the_prior(seed: int) -> None:
    mu, sigma = codes(seed)
    expected = kl_divergence(Normal(mu, sigma), Normal(0.0, 1.0)).sum(-1)
    torch.testing.assert_close(code_rate(mu, sigma), expected)


def test_the_rate_is_the_mean_log_ratio_of_drawn_codes() -> None:
    mu, sigma = codes(0, examples=1)
    z = draw_code(mu.expand(200_000, -1), sigma.expand(200_000, -1), torch.Generator().manual_seed(0))
    ratio = (Normal(mu, sigma).log_prob(z) - Normal(0.0, 1.0).log_prob(z)).sum(-1)
    assert code_rate(mu, sigma).item() == pytest.approx(ratio.mean().item(), abs=0.02)
    assert z.std(0).tolist() == pytest.approx(sigma[0].tolist(), rel=0.01)


# --- training


def separable(examples: int = 240, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """States around one centre for each answer; the answers differ in frequency."""
    generator = torch.Generator().manual_seed(seed)
    answers = torch.multinomial(torch.arange(1.0, classes + 1), examples, replacement=True, generator=generator)
    return 4 * torch.eye(8)[answers] + 0.1 * torch.randn(examples, 8, generator=generator), answers


def means(states: torch.Tensor, answers: torch.Tensor, beta: float, **settings: Any) -> dict[str, float]:
    bottleneck = fit(states, answers, classes=4, beta=beta, schedule=QUICKLY, seed=0, **settings)
    return {name: values.mean().item() for name, values in score(bottleneck, states, answers, seed=0).items()}


def test_when_the_rate_costs_much_the_answers_are_guessed_by_their_frequency() -> None:
    states, answers = separable()
    found = means(states, answers, beta=100.0)
    assert found["rate"] < 0.01
    assert found["distortion"] == pytest.approx(answer_entropy(answers), abs=0.02)


def test_when_the_rate_costs_nothing_separable_answers_are_known() -> None:
    states, answers = separable()
    found = means(states, answers, beta=1e-6)
    assert found["distortion"] < 0.01
    assert found["rate"] > answer_entropy(answers)


def test_on_states_that_say_nothing_the_held_out_distortion_is_no_better_than_guessing() -> None:
    states, answers = separable()
    states = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    bottleneck = fit(states[:120], answers[:120], classes=4, beta=0.01, schedule=QUICKLY, seed=0)
    distortion = score(bottleneck, states[120:], answers[120:], seed=0)["distortion"].mean().item()
    assert distortion > answer_entropy(answers[120:])


def test_a_curve_trades_rate_for_distortion_above_its_bound() -> None:
    states, answers = separable()
    curve = [means(states, answers, beta=beta) for beta in BETAS]
    rates, distortions = [p["rate"] for p in curve], [p["distortion"] for p in curve]
    assert rates == sorted(rates, reverse=True)
    assert distortions == sorted(distortions)
    for point in curve:
        assert point["distortion"] >= answer_entropy(answers) - point["rate"] - 0.02


def test_the_seed_decides_everything_and_nothing_outside_changes() -> None:
    states, answers = separable(60)
    schedule = Schedule(batch=16, epochs=3, learning_rate=1e-2)

    def weights(seed: int, global_seed: int) -> torch.Tensor:
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        bottleneck = fit(states, answers, classes=4, beta=0.1, schedule=schedule, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        return bottleneck.encoder.weight.detach()

    assert torch.equal(weights(0, 1), weights(0, 2))
    assert not torch.equal(weights(0, 1), weights(1, 1))


def test_a_pass_takes_every_example_once_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    states, answers = torch.arange(10.0)[:, None], torch.zeros(10, dtype=torch.long)
    seen: list[list[float]] = []
    encode = Bottleneck.encode

    def note(self: Bottleneck, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(given[:, 0].tolist())
        return encode(self, given)

    monkeypatch.setattr(Bottleneck, "encode", note)
    fit(states, answers, classes=2, beta=0.1, schedule=Schedule(batch=4, epochs=2, learning_rate=1e-2), seed=0)
    assert [len(part) for part in seen] == [4, 4, 2, 4, 4, 2]
    first, second = ([value for part in seen[i : i + 3] for value in part] for i in (0, 3))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


# --- states of a model


def examples_of(lengths: list[int], *, seed: int = 0) -> list[Example]:
    rows = random_rows(lengths, seed=seed)
    return [bare_example([*row, 7, META], answer=row[0] % 5) for row in rows]


@pytest.mark.parametrize("position_embedding", ["rope", "learned"])
@pytest.mark.parametrize("tokens", [1, 60, 10_000])
def test_states_are_those_of_each_prompt_alone(
    position_embedding: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOKENS_A_BATCH", tokens)
    model = tiny_model(position_embedding=position_embedding)
    examples = examples_of([9, 3, 17, 9, 1, 12])
    states = final_states(model, examples)
    for i, example in enumerate(examples):
        prompt = torch.tensor([example.input_ids[: example.answer_start]])
        logits = model(prompt).logits[0]
        for subject, place in (("meta", -1), ("text", -2)):
            alone = states[subject][i].double() @ model.lm_head.weight.T
            torch.testing.assert_close(alone, logits[place], atol=1e-3, rtol=1e-4)


def test_the_text_token_is_the_nearest_before_the_last_meta_token() -> None:
    model = tiny_model()
    ids = [5, 6, META, META, 8]
    states = final_states(model, [bare_example(ids)])
    logits = model(torch.tensor([ids])).logits[0]
    assert (states["meta"][0].double() @ model.lm_head.weight.T).allclose(logits[3], atol=1e-3)
    assert (states["text"][0].double() @ model.lm_head.weight.T).allclose(logits[1], atol=1e-3)


# --- the whole


@pytest.fixture
def short_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCHEDULE", Schedule(batch=32, epochs=2, learning_rate=1e-2))
    monkeypatch.setattr(module, "PAPER_SCHEDULE", Schedule(batch=25, epochs=1, learning_rate=1e-3))


def varied(count: int) -> list[Example]:
    return examples_of([5 + i % 7 for i in range(count)])


def stripped(measurements: list[Measurement]) -> list[dict[str, Any]]:
    return [m.model_dump(exclude={"created"}) for m in measurements]


@pytest.mark.usefixtures("short_training")
def test_the_records() -> None:
    model = tiny_model()
    examples = varied(90)
    found = rate_distortion(model, examples, ABOUT, held_out=30, fits=2)
    counts = {"fit": PAPER_EXAMPLES, "train": 60, "held_out": 30}
    points = {(m.metric, m.subject, m.split, m.beta, m.fit_seed): m.n for m in found if m.metric != "answer_entropy"}
    assert points == {
        (metric, subject, split, beta, seed): n
        for metric in ("rate", "distortion")
        for subject in ("meta", "text")
        for split, n in counts.items()
        for beta in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
        for seed in (0, 1)
    }
    answers = torch.tensor([example.input_ids[example.answer_start] for example in examples])
    entropies = {m.split: (m.value, m.n) for m in found if m.metric == "answer_entropy"}
    assert entropies == {
        "fit": (pytest.approx(answer_entropy(answers[:50])), 50),
        "train": (pytest.approx(answer_entropy(answers[:60])), 60),
        "held_out": (pytest.approx(answer_entropy(answers[60:])), 30),
    }
    for m in found:
        assert (m.analysis, m.model, m.seed, m.position_embedding) == ("rate_distortion", "x", 4, "rope")
        assert (m.marker, m.intervention) == ("final", None)
    assert stripped(rate_distortion(model, examples, ABOUT, held_out=30, fits=2)) == stripped(found)


@pytest.mark.usefixtures("short_training")
def test_held_out_examples_are_not_trained_on() -> None:
    model = tiny_model()
    examples = varied(90)
    others = [*examples[:60], *examples_of([6] * 30, seed=9)]
    before, after = (
        [m for m in stripped(rate_distortion(model, part, ABOUT, held_out=30, fits=1)) if m["split"] != "held_out"]
        for part in (examples, others)
    )
    assert before == after


@pytest.mark.usefixtures("short_training")
def test_an_intervention_is_in_force_and_filed() -> None:
    model = tiny_model()
    examples = varied(60)
    no_pos = NoPosition()
    found = rate_distortion(model, examples, ABOUT, held_out=10, fits=1, intervention=no_pos)
    assert {m.intervention for m in found} == {"no_pos"}
    with intervene(model, no_pos):
        within = rate_distortion(model, examples, ABOUT, held_out=10, fits=1)
    assert [m.value for m in found] == [m.value for m in within]
    without = rate_distortion(model, examples, ABOUT, held_out=10, fits=1)
    assert [m.value for m in found] != [m.value for m in without]


@pytest.mark.parametrize(("examples", "held_out"), [(59, 10), (60, 0)])
def test_too_few_examples_are_refused(examples: int, held_out: int) -> None:
    with pytest.raises(UserError, match=f"{examples} examples with {held_out} held out are too few: training needs 50"):
        rate_distortion(tiny_model(), examples_of([4] * examples), ABOUT, held_out=held_out)
