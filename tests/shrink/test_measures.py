"""What is measured of a model, next to whole passes over all tokens, one question after another."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from metatokens.data.landmarks import Landmarks
from metatokens.model.configuration import TEXT_SINKS as SINKS
from metatokens.model.generation import READ_AT_ONCE
from metatokens.records import pack_hits
from metatokens.retrofit.text_window import apply_text_window, text_window_of
from metatokens.shrink import measuring
from metatokens.shrink.answering import answer_logits
from metatokens.shrink.choosing import HeadLoss, loss_without, most_needed
from metatokens.shrink.cost import CONTINUATION, costs
from metatokens.shrink.lookups import CHAT, KINDS, PASSAGE, TRAINED, Form
from metatokens.tasks.example import Encoded
from tests.numbers import decoder_roundings, rounding_bound
from tests.shrink.small import BLOCKS, HEAD_SIZE, KEY_HEADS

WINDOW, FULL = 40, [1]
LENGTH = READ_AT_ONCE + 100  # tokens, read in two chunks
ROUNDED = rounding_bound(torch.float32, decoder_roundings(torch.float32, BLOCKS, 32, LENGTH))


@torch.no_grad()
def whole_pass(model, ids):
    """The logits of all positions without a cache, (tokens, vocabulary)."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@dataclass
class Case:
    """A model with the full cache or a smaller one, which reads texts with landmarks or without.

    Attributes:
        model: in evaluation mode.
        window: what it keeps in all blocks but FULL; None: everything.
        landmarks: where meta-tokens are inserted, if anywhere.
    """

    model: Any
    window: int | None
    landmarks: Landmarks | None

    def read_as(self, text, question=()):
        """The ids of a text and a question about it with the landmarks that the rule puts into both together."""
        ids = [*text, *question]
        return ids if self.landmarks is None else self.landmarks.insert_into(ids)

    def expected_logits(self, text, question):
        """The logits of an answer's tokens by a pass over text, question and answer."""
        before = self.read_as(text, question.ids)
        return whole_pass(self.model, [*before, *question.answer])[len(before) - 1 : -1]

    def expected_share(self, rows):
        """The share of keys and values that are kept, position by position."""
        if self.window is None:
            return None
        entries, seen = 0, 0
        for ids in map(self.read_as, rows):
            for position, token in enumerate(ids):
                is_near = position >= len(ids) - self.window
                is_first = position < SINKS
                is_meta = token == self.model.config.meta_token_id
                seen += BLOCKS if is_near or is_first or is_meta else len(FULL)
                entries += BLOCKS
        return round(seen / entries, 4)


@pytest.fixture(
    params=[(None, None), (None, "every:7"), (None, "line"), (WINDOW, None), (WINDOW, "every:7")],
    ids=str,
)
def case(request, model, tokenizer):
    window, rule = request.param
    apply_text_window(model, window, full_layers=FULL if window else None)
    return Case(model, window, rule and Landmarks(tokenizer, rule))


def drawn(lookups, seed, length):
    """A text with facts that are farther than the window from its end."""
    draw = lookups["test"]
    return draw.draw(
        np.random.default_rng(seed),
        length=length,
        distance=2 * WINDOW,
        forms=draw.forms[:3],
        facts=3,
    )


def test_an_answer_after_a_cache_is_that_of_one_pass(case, lookups):
    asked = drawn(lookups, 0, LENGTH)

    questions = 2 * asked.questions
    of_questions = answer_logits(case.model, asked.text, questions, case.landmarks)
    for question, logits in zip(questions, of_questions, strict=True):
        expected = case.expected_logits(asked.text, question)
        is_finite = expected.isfinite()  # meta-tokens are never predicted
        assert torch.equal(logits.isfinite(), is_finite)
        largest = expected[is_finite].abs().max()
        assert (logits - expected)[is_finite].abs().max() <= ROUNDED * largest


def test_rates_are_what_generation_finds(case, lookups):
    texts = []
    for seed in range(3):
        asked = drawn(lookups, seed, length=200)
        for question in asked.questions:
            ids = case.read_as(asked.text, question.ids)
            written = case.model.generate(
                torch.tensor([ids]), max_new_tokens=3, do_sample=False, eos_token_id=None
            )
            question.answer[:] = written[0, len(ids) :].tolist()
        asked.questions[seed].answer[seed] += 1  # another token of each text's answers is wrong
        texts.append(asked)

    tests = measuring.Tests({200: texts}, excerpts=[])
    of_model = measuring.Measuring(case.model, "name", seed=7, landmarks=case.landmarks)
    results = {result.task: result for result in of_model.results(tests, replies=[])}

    hits = {}
    for seed, asked in enumerate(texts):
        for number, question in enumerate(asked.questions):
            hits.setdefault(question.kind, []).append(number != seed)
    assert results.keys() == hits.keys()
    for kind, of_kind in hits.items():
        result = results[kind]
        assert (result.model, result.seed, result.length) == ("name", 7, 200)
        assert result.value == pytest.approx(np.mean(of_kind))
        assert (result.n, result.hits) == (len(of_kind), pack_hits(of_kind))
        assert result.kv_kept == case.expected_share([asked.text for asked in texts])


def test_perplexity_is_that_of_the_second_half_or_of_a_reply(case, text):
    excerpts = text.held_out.excerpts(3, 201)
    reply = Encoded(input_ids=excerpts[2], answer_start=160)

    tests = measuring.Tests({}, excerpts[:2])
    of_model = measuring.Measuring(case.model, "name", seed=7, landmarks=case.landmarks)

    scored = (101, 101, 41)
    for excerpt, n, result in zip(excerpts, scored, of_model.results(tests, [reply]), strict=True):
        ids = case.read_as(excerpt)
        predicted = whole_pass(case.model, ids).log_softmax(dim=-1)
        losses = [
            -predicted[position - 1, token].item()
            for position, token in enumerate(ids)
            if token != case.model.config.meta_token_id and position
        ][-n:]
        assert result.n == n
        assert result.value == pytest.approx(math.exp(np.mean(losses)), rel=40 * ROUNDED)
        error = 1.96 * np.std(losses, ddof=1) / math.sqrt(n)
        assert result.high == pytest.approx(math.exp(np.mean(losses) + error), rel=1e-3)
        assert result.kv_kept == case.expected_share([excerpt])


def mean_loss(model, tests):
    """Nats of an answer, by a pass for each question."""
    losses = []
    for asked in tests:
        for question in asked.questions:
            predicted = Case(model, None, None).expected_logits(asked.text, question)
            target = torch.tensor(question.answer)[:, None]
            losses.append(-predicted.log_softmax(dim=-1).gather(1, target).sum().item())
    return sum(losses) / len(losses)


def test_the_loss_of_each_head_is_that_of_a_pass_with_a_window(model, lookups):
    tests = [drawn(lookups, seed, length=260) for seed in range(2)]
    heads = list(product(range(BLOCKS), range(KEY_HEADS)))
    expected = {None: mean_loss(model, tests)}
    for head in heads:
        others = [other for other in heads if other != head]
        apply_text_window(model, WINDOW, full_layers=[], full_heads=others)
        expected[head] = mean_loss(model, tests)
    apply_text_window(model, None)

    losses = [loss_without(head, model, heads, tests, WINDOW) for head in expected]

    assert [(loss.head, loss.n) for loss in losses] == [(head, 6) for head in expected]
    assert [loss.loss for loss in losses] == pytest.approx([*expected.values()], abs=1e-4)
    assert len({*expected.values()}) == 7  # each head matters
    assert mean_loss(model, tests) == expected[None]  # the model has the full cache again


def test_the_heads_that_cost_most_are_needed_most():
    costs_of_heads = {None: 9.0, (0, 1): 2.0, (3, 0): 5.0, (2, 0): 1.0, (0, 2): 4.0}
    losses = [
        HeadLoss(head=head, loss=loss, answered=0, n=1) for head, loss in costs_of_heads.items()
    ]
    assert most_needed(losses, 0) == []
    assert most_needed(losses, 3) == [(0, 1), (0, 2), (3, 0)]


def test_the_bytes_of_a_cache(model, text):
    apply_text_window(model, WINDOW, full_layers=FULL)
    before = text_window_of(model.config)
    per_position = 2 * KEY_HEADS * HEAD_SIZE * 4  # keys and values in float32, of a block
    of_full_block = per_position * (300 + CONTINUATION)

    full, small = costs(model, text.held_out.ids, 300)

    assert text_window_of(model.config) == before
    assert (full.cache, full.length, full.cache_bytes) == ("full", 300, BLOCKS * of_full_block)
    note = (
        16  # bytes: two numbers about an entry, in the blocks that forget and in those that do not
    )
    of_others = small.cache_bytes - of_full_block - note * (300 + CONTINUATION)
    of_window = of_others / ((BLOCKS - 1) * per_position + note)
    assert (small.cache, small.length) == ("shrunk", 300)
    # Besides what the next token sees, a cache holds up to 16 entries that it will drop together.
    assert SINKS + WINDOW - 1 <= of_window <= SINKS + WINDOW + 16
    assert of_window == int(of_window)
    assert min(full.read_per_second, small.read_per_second, small.new_per_second) > 0


def drawn_tests(lookups, forms):
    """Four tests of 448 tokens of each kind, with these forms."""
    return measuring.draw_tests(
        replace(lookups["test"], forms=forms),
        lookups["train"].forms,
        {448: 4},
        distance={448: 60},
        user_questions=[],
        excerpts=2,
        excerpt_length=50,
    )


def test_each_tested_text_is_drawn_by_itself(lookups):
    tests = drawn_tests(lookups, lookups["test"].forms)
    texts = [tuple(asked.text) for asked in tests.asked[448]]
    kinds = {question.kind for asked in tests.asked[448] for question in asked.questions}
    assert kinds == {*KINDS, CHAT, TRAINED, PASSAGE}
    assert len({*texts}) == len(texts) == 4 * len(kinds - {PASSAGE})


def test_each_form_has_as_many_texts_as_any_other(lookups):
    """Here four texts are asked for, and a user has added a fifth form of statements."""
    further = Form(
        kind="statement", state=(" {name} likes {word}.",), ask="\n{name} likes", answer=" {word}"
    )
    tests = drawn_tests(lookups, [further, *lookups["test"].forms])
    of_kind = Counter(asked.questions[0].kind for asked in tests.asked[448])
    assert of_kind["statement"] + of_kind[PASSAGE] == 5
    assert of_kind["question"] == of_kind["keys"] == of_kind["several"] == 4
