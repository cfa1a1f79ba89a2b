"""What the model itself answers in a chat. Training on it keeps the way in which the model answers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import set_seed

from metatokens.data.tokenizer import encode_text
from metatokens.decoder import end_tokens, left_padded, up_to_end
from metatokens.shrink.lookups import Lookups
from metatokens.tasks.example import Encoded

ABOUT_A_TEXT = (
    "Summarise this text in two sentences.",
    "What happens in this text?",
    "Who is mentioned in this text?",
    "Give this text a title.",
    "Rewrite the last sentence of this text in simple words.",
    "Continue this text.",
)
ABOUT_A_WORD = (
    "Explain the word {word}.",
    "Write a sentence with the word {word}.",
    "Tell me a short story about {name}.",
    "What comes to your mind if you hear the name {name}?",
    "Give me three tips about {word}.",
    "Hello! My name is {name}. What can you do for me?",
)
LONGEST_REPLY = 96  # tokens
AT_ONCE = 16  # replies that are written together
TEMPERATURE = 0.7


@torch.inference_mode()
def draw_replies(
    model: Any,
    lookups: Lookups,
    count: int,
    *,
    lengths: tuple[int, int],
    about_texts: float,
    seed: int,
) -> Iterator[Encoded]:
    """Requests in a chat, about an excerpt or about a word, and what the model answers.

    Args:
        model: in evaluation mode.
        lookups: of a split, for a model whose chat template ends an answer.
        count: of replies.
        lengths: tokens of an excerpt, at least and at most.
        about_texts: the share of the requests that are about an excerpt.
        seed: of all draws.

    Returns:
        Requests with their replies. A reply goes to the end of its turn, or to LONGEST_REPLY tokens. A model that ends
        its turn at once gives none, so there may be fewer.
    """
    set_seed(seed)
    generator = np.random.default_rng(seed)
    requests = [_request(generator, lookups, lengths, about_texts) for _ in range(count)]
    assert lookups.turns is not None
    end = lookups.turns.ending[-1]
    ends = {end, *end_tokens(model.generation_config.eos_token_id)}
    for start in range(0, count, AT_ONCE):
        prompts = requests[start : start + AT_ONCE]
        ids, mask = left_padded(prompts, end)
        written = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=LONGEST_REPLY,
            do_sample=True,
            temperature=TEMPERATURE,
            eos_token_id=sorted(ends),
            pad_token_id=end,
        )
        for prompt, reply in zip(prompts, written[:, ids.shape[1] :].tolist(), strict=True):
            if reply[0] not in ends:
                yield Encoded(input_ids=prompt + up_to_end(reply, ends), answer_start=len(prompt))


def _request(
    generator: np.random.Generator, lookups: Lookups, lengths: tuple[int, int], about_texts: float
) -> list[int]:
    """The ids of a conversation up to the model's answer."""
    excerpt: list[int] = []
    if generator.random() < about_texts:
        shortest, longest = lengths
        excerpt = lookups.prose.excerpt(generator, int(generator.integers(shortest, longest + 1)))
        request = f"\n\n{generator.choice(ABOUT_A_TEXT)}"
    else:
        request = str(generator.choice(ABOUT_A_WORD)).format(
            name=generator.choice(lookups.entities.names),
            word=generator.choice(lookups.entities.words),
        )
    (request_ids,) = encode_text(lookups.tokenizer, [request], continues=True)
    assert lookups.turns is not None
    return [*lookups.turns.opening, *excerpt, *request_ids, *lookups.turns.answering]
