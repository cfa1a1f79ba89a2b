"""Calls of `generate()`, and slow loops over the whole sequence that find what it should give."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.model.tiny_models import META, pad, random_rows


def count_tokens_read(model: torch.nn.Module) -> tuple[list[int], Any]:
    """A list that gets the number of input tokens of each forward pass, and the hook that fills it."""
    counts: list[int] = []

    def count(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        counts.append(kwargs["input_ids"].shape[1])

    return counts, model.register_forward_pre_hook(count, with_kwargs=True)


def generate(model: torch.nn.Module, rows: Sequence[Sequence[int]], **options: Any) -> Tensor:
    """The new ids for left-padded rows."""
    ids, mask = pad(rows)
    torch.manual_seed(8)
    out = model.generate(
        ids, attention_mask=mask, **({"do_sample": False, "pad_token_id": 0} | options)
    )
    prompts, new = out.split([ids.shape[1], out.shape[1] - ids.shape[1]], dim=1)
    assert torch.equal(prompts, ids)
    return new


def insert(
    prompt: Sequence[int], text: Sequence[int], meta_every: int | None, meta: int = META
) -> list[int]:
    """The ids that the model has read: the prompt, and `text` with a meta-token after every `meta_every` tokens."""
    sequence = list(prompt)
    for count, token in enumerate(text, start=1):
        sequence.append(token)
        if meta_every and count % meta_every == 0:
            sequence.append(meta)
    return sequence


def assert_a_chat_goes_on(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: DynamicCache, **options: Any
) -> None:
    """With the cache of its first turn, `ids`, a chat's second turn is that of the whole text without a cache."""
    said = torch.tensor(random_rows([9] * len(ids), seed=6))
    ids = torch.cat([ids, said], dim=1)
    mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
    torch.manual_seed(5)
    without_cache = options | {"use_cache": False}
    expected = model.generate(ids, attention_mask=mask, **without_cache)[:, ids.shape[1] :]

    unread = ids.shape[1] - int(cache.get_seq_length())
    counts, hook = count_tokens_read(model)
    torch.manual_seed(5)
    # transformers leaves that to the caller.
    cache.batch_repeat_interleave(options.get("num_beams", 1))
    new = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)[
        :, ids.shape[1] :
    ]
    hook.remove()

    assert torch.equal(new, expected)
    assert counts[0] == unread  # the cached tokens are not read again


# Log probabilities of the next token, by a dense pass over everything read.
Score = Callable[[list[int]], Tensor]


def greedy_text(
    score: Score, prompt: Sequence[int], length: int, meta_every: int | None, meta: int = META
) -> list[int]:
    """The text of the likeliest tokens, one after the other."""
    text: list[int] = []
    while len(text) < length:
        text.append(int(score(insert(prompt, text, meta_every, meta)).argmax()))
    return text


def beam_text(
    score: Score, prompt: Sequence[int], length: int, meta_every: int | None, beams: int
) -> list[int]:
    """The text that beam search finds."""
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(length):
        extended = []
        for total, text in best:
            scores = score(insert(prompt, text, meta_every)).tolist()
            extended += [(total + gain, [*text, token]) for token, gain in enumerate(scores)]
        best = sorted(extended, reverse=True)[:beams]
    return best[0][1]


def sampled_texts(
    score: Score, prompts: Sequence[list[int]], length: int, meta_every: int | None
) -> list[list[int]]:
    """Texts that are drawn with the seed 8, as transformers draws them."""
    torch.manual_seed(8)
    texts: list[list[int]] = [[] for _ in prompts]
    for _ in range(length):
        reads = [
            insert(prompt, text, meta_every) for prompt, text in zip(prompts, texts, strict=True)
        ]
        shares = torch.stack([score(read) for read in reads]).float().softmax(dim=-1)
        drawn = torch.multinomial(shares, 1).flatten().tolist()
        for text, token in zip(texts, drawn, strict=True):
            text.append(token)
    return texts
