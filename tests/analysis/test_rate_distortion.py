"""The bottleneck: closed forms, limits, and the states that it reads."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from metatokens.analysis import rate_distortion as module
from metatokens.analysis.rate_distortion import (
    BETAS,
    FITS,
    PAPER_EXAMPLES,
    Schedule,
    code_rate,
    final_states,
    fit,
    rate_distortion,
    score,
)
from metatokens.errors import UserError
from metatokens.model.interventions import Intervention, intervene
from metatokens.records import About
from tests.analysis.recording_oracle import bare_example
from tests.model.tiny_models import META, random_rows, tiny_model
from tests.numbers import rounding_bound

QUICKLY = Schedule(batch=64, epochs=120, learning_rate=2e-2)
ABOUT = About(model="x", seed=4, task="list_recall", length=16)


def codes(seed, examples=6):
    generator = torch.Generator().manual_seed(seed)
    mu = torch.randn(examples, 3, generator=generator, dtype=torch.float64)
    sigma = torch.rand(examples, 3, generator=generator, dtype=torch.float64) + 0.05
    return mu, sigma


def answer_entropy(answers):
    shares = [count / len(answers) for count in Counter(answers.tolist()).values()]
    return -sum(share * math.log(share) for share in shares)


# --- the rate


@given(st.integers(0, 999))
def test_the_rate_is_the_divergence_from_the_prior(seed):
    mu, sigma = codes(seed)

    expected = kl_divergence(Normal(mu, sigma), Normal(0.0, 1.0)).sum(-1)

    torch.testing.assert_close(code_rate(mu, sigma), expected)


# --- training


@pytest.fixture(scope="module")
def separable():
    """States around one centre for each answer; the answers differ in frequency."""
    generator = torch.Generator().manual_seed(0)
    frequencies = torch.tensor([1.0, 2.0, 3.0, 4.0])
    answers = torch.multinomial(frequencies, 240, replacement=True, generator=generator)
    noise = torch.randn(240, 8, generator=generator)
    return 4 * torch.eye(8)[answers] + 0.1 * noise, answers


def rate_and_distortion(states, answers, beta):
    bottleneck = fit(states, answers, classes=4, beta=beta, schedule=QUICKLY, seed=0)
    scores = score(bottleneck, states, answers, seed=0)
    return scores["rate"].mean().item(), scores["distortion"].mean().item()


def test_when_the_rate_costs_much_the_answers_are_guessed_by_their_frequency(separable):
    states, answers = separable

    rate, distortion = rate_and_distortion(states, answers, beta=100.0)

    assert rate < 0.01
    assert distortion == pytest.approx(answer_entropy(answers), abs=0.02)


def test_when_the_rate_costs_nothing_separable_answers_are_known(separable):
    states, answers = separable

    rate, distortion = rate_and_distortion(states, answers, beta=1e-6)

    assert distortion < 0.01
    assert rate > answer_entropy(answers)


def test_a_curve_trades_rate_for_distortion_above_its_bound(separable):
    states, answers = separable

    curve = [rate_and_distortion(states, answers, beta) for beta in BETAS]

    rates, distortions = zip(*curve, strict=True)
    assert list(rates) == sorted(rates, reverse=True)
    assert list(distortions) == sorted(distortions)
    for rate, distortion in curve:
        assert distortion >= answer_entropy(answers) - rate - 0.02


# --- states of a model


def examples_of(lengths, seed=0):
    examples = []
    for row in random_rows(lengths, seed=seed):
        examples.append(bare_example([*row, 7, META], answer=row[0] % 5))
    return examples


@pytest.mark.parametrize("position_embedding", ["rope", "learned"])
@pytest.mark.parametrize("tokens", [60, 10_000])
def test_states_are_those_of_each_prompt_alone(position_embedding, tokens, monkeypatch):
    monkeypatch.setattr(module, "TOKENS_A_BATCH", tokens)
    model = tiny_model(position_embedding=position_embedding)
    examples = examples_of([9, 3, 17, 9, 1, 12])

    states = final_states(model, examples)

    for number, example in enumerate(examples):
        prompt = torch.tensor([example.input_ids[: example.answer_start]])
        logits = model(prompt).logits[0]
        for subject, position in (("meta", -1), ("text", -2)):
            alone = states[subject][number].double() @ model.lm_head.weight.T
            torch.testing.assert_close(alone, logits[position], atol=1e-3, rtol=1e-4)


# --- the whole


@pytest.fixture
def short_training(monkeypatch):
    monkeypatch.setattr(module, "SCHEDULE", Schedule(batch=32, epochs=2, learning_rate=1e-2))
    monkeypatch.setattr(module, "PAPER_SCHEDULE", Schedule(batch=25, epochs=1, learning_rate=1e-3))


@pytest.fixture(scope="module")
def examples():
    return examples_of([5 + number % 7 for number in range(90)])


def without_time(measurements):
    return [line.model_dump(exclude={"created"}) for line in measurements]


@pytest.mark.usefixtures("short_training")
def test_the_records(examples):
    model = tiny_model()
    answers = torch.tensor([example.input_ids[example.answer_start] for example in examples])
    of_split = {"fit": answers[:PAPER_EXAMPLES], "held_out": answers[72:]}

    measurements = rate_distortion(model, examples, ABOUT)

    points = Counter()
    for line in measurements:
        assert (line.analysis, line.model, line.seed) == ("rate_distortion", "x", 4)
        assert (line.marker, line.intervention) == ("final", None)
        assert line.n == len(of_split[line.split])
        if line.metric == "answer_entropy":
            assert line.value == pytest.approx(answer_entropy(of_split[line.split]))
        else:
            points[line.metric, line.subject, line.split] += 1
    assert set(points.values()) == {FITS * len(BETAS)}
    assert len(points) == 2 * 2 * 2
    again = rate_distortion(model, examples, ABOUT)
    assert without_time(again) == without_time(measurements)


@pytest.mark.usefixtures("short_training")
def test_held_out_examples_are_neither_trained_on_nor_used_for_the_scale(examples, monkeypatch):
    trainings = []

    def note(states, answers, **options):
        trainings.append((states, answers))
        return fit(states, answers, **options)

    monkeypatch.setattr(module, "fit", note)

    rate_distortion(tiny_model(), examples, ABOUT)

    first_ids = [example.input_ids[example.answer_start] for example in examples]
    ids_that_occur = sorted(set(first_ids))
    expected_answers = [ids_that_occur.index(first_id) for first_id in first_ids]
    sizes = Counter()
    for states, answers in trainings:
        size = len(states)
        sizes[size] += 1
        assert answers.tolist() == expected_answers[:size]
        spread, mean = torch.std_mean(states.double(), dim=0)
        # Each is a sum over the examples, with a rounding for each term.
        bound = rounding_bound(torch.float32, size, float(states.abs().max()))
        assert mean.abs().max() < bound
        assert (spread - 1).abs().max() < bound
    assert sizes == {
        PAPER_EXAMPLES: 2 * FITS * len(BETAS),
        72: 2 * FITS * len(BETAS),
    }


@pytest.mark.usefixtures("short_training")
def test_an_intervention_is_in_force(examples):
    model = tiny_model()

    with intervene(model, Intervention("no_pos")):
        within = rate_distortion(model, examples, ABOUT)
    without = rate_distortion(model, examples, ABOUT)

    values_within = [line.value for line in within]
    values_without = [line.value for line in without]
    assert values_within != values_without


def test_too_few_examples_are_refused():
    with pytest.raises(UserError, match="61 examples are too few: training on four fifths"):
        rate_distortion(tiny_model(), examples_of([4] * 61), ABOUT)
