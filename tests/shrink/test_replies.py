"""Replies: requests are messages in a chat, and what follows them is what the model writes."""

import copy
from dataclasses import replace

import pytest
import torch

from metatokens.shrink import replies
from tests.numbers import decoder_roundings, rounding_bound
from tests.shrink.small import BLOCKS

COUNT, LENGTHS = 18, (60, 100)  # in two batches
OPENING, ANSWERING = "<|endoftext|>user\n", "\n<|endoftext|>assistant\n"
ROUNDED = rounding_bound(
    torch.float32, decoder_roundings(torch.float32, BLOCKS, 32, 2 * LENGTHS[1])
)


@pytest.fixture
def draw(model, lookups, monkeypatch):
    """Draws replies that are almost surely the likeliest ones, with another end than usual if one is given."""
    monkeypatch.setattr(replies, "TEMPERATURE", 1e-4)

    def of_seed(seed, end=None, **changes):
        drawn = copy.copy(lookups["test"])
        if end is not None:
            drawn.turns = replace(drawn.turns, ending=[end])
        options = {"lengths": LENGTHS, "about_texts": 0.5, "seed": seed} | changes
        return list(replies.draw_replies(model, drawn, COUNT, **options))

    return of_seed


def test_requests_are_messages(draw, lookups, plain):
    prose = plain.decode(lookups["test"].prose.ids.tolist())
    requests, about_texts = set(), 0
    for reply in draw(0):
        prompt = plain.decode(reply.input_ids[: reply.answer_start])
        message = prompt.removeprefix(OPENING).removesuffix(ANSWERING)
        assert prompt == f"{OPENING}{message}{ANSWERING}"
        excerpt, _, request = message.rpartition("\n\n")
        assert (request in replies.ABOUT_A_TEXT) == bool(excerpt)
        assert excerpt in prose
        if excerpt:
            about_texts += 1
            # Tokens at the edges of an excerpt may be parts of characters.
            assert (
                LENGTHS[0] - 2
                <= len(plain(excerpt, add_special_tokens=False).input_ids)
                <= LENGTHS[1] + 2
            )
        assert "{" not in request
        requests.add(message)
    assert len(requests) == COUNT
    assert 0 < about_texts < COUNT


def test_all_requests_may_be_about_texts(draw, plain):
    for reply in draw(0, about_texts=1):
        prompt = plain.decode(reply.input_ids[: reply.answer_start]).removesuffix(ANSWERING)
        assert prompt.endswith(replies.ABOUT_A_TEXT)


@torch.no_grad()
def test_replies_are_what_the_model_writes(draw, model):
    for reply in draw(0):
        logits = model(torch.tensor([reply.input_ids]), use_cache=False).logits[0]
        written = torch.tensor(reply.input_ids[reply.answer_start :])
        of_replies = logits[reply.answer_start - 1 : -1]
        largest = of_replies[of_replies.isfinite()].abs().max()
        chosen = of_replies.gather(1, written[:, None])[:, 0]
        assert (of_replies.amax(dim=1) - chosen).max() <= ROUNDED * largest
        assert len(written) == replies.LONGEST_REPLY


def test_a_reply_ends_with_its_turn(draw):
    whole = draw(0)
    end = whole[0].input_ids[whole[0].answer_start + 40]
    lengths = set()
    for reply, longer in zip(draw(0, end), whole, strict=True):
        written = longer.input_ids[longer.answer_start :]
        length = written.index(end) + 1 if end in written else len(written)
        assert reply.answer_start == longer.answer_start
        assert reply.input_ids == longer.input_ids[: longer.answer_start + length]
        lengths.add(length)
    assert min(lengths) < replies.LONGEST_REPLY


def test_a_seed_gives_its_replies(draw):
    assert draw(0) == draw(0) != draw(1)
