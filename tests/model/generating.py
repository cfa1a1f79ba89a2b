"""Calls of `generate()`, and slow loops over the whole sequence that find what it should give."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.model.dense_oracle import DenseOracle
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
    out = model.generate(ids, attention_mask=mask, **({"do_sample": False, "pad_token_id": 0} | options))
    assert torch.equal(out[:, : ids.shape[1]], ids.repeat_interleave(len(out) // len(ids), dim=0))
    return out[:, ids.shape[1] :]


def insert(prompt: Sequence[int], text: Sequence[int], meta_every: int | None) -> list[int]:
    """The ids that the model has read: the prompt, and `text` with a meta-token after every `meta_every` tokens."""
    sequence = list(prompt)
    for count, token in enumerate(text, start=1):
        sequence.append(token)
        if meta_every and count % meta_every == 0:
            sequence.append(META)
    return sequence


def by_hand(ids: Tensor, mask: Tensor, cache: DynamicCache, meta: int) -> tuple[Tensor, Tensor]:
    """The sequences and their mask, with the meta-tokens that `generate()` inserted when it filled the cache."""
    inserted = getattr(cache, "inserted", ())
    is_text = torch.ones(ids.shape[1] + len(inserted), dtype=torch.bool)
    is_text[[text + number for number, text in enumerate(inserted)]] = False
    whole, whole_mask = ids.new_full((len(ids), len(is_text)), meta), mask.new_ones((len(ids), len(is_text)))
    whole[:, is_text], whole_mask[:, is_text] = ids, mask
    return whole, whole_mask


def assert_a_chat_goes_on(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: DynamicCache, **options: Any
) -> None:
    """With the cache of its first turn, `ids`, a chat's second turn is that of the whole text without a cache."""
    said = torch.tensor(random_rows([9] * len(ids), seed=6))
    ids = torch.cat([ids, said], dim=1)
    mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
    whole, whole_mask = by_hand(ids, mask, cache, model.config.meta_token_id)
    fresh = options | {"use_cache": False, "prefill_chunk_size": None}
    torch.manual_seed(5)
    wanted = model.generate(whole, attention_mask=whole_mask, **fresh)[:, whole.shape[1] :]
    unread, chunk = whole.shape[1] - int(cache.get_seq_length()), options.get("prefill_chunk_size")
    read, hook = count_tokens_read(model)
    torch.manual_seed(5)
    cache.batch_repeat_interleave(options.get("num_beams", 1))  # transformers leaves that to the caller
    found = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)[:, ids.shape[1] :]
    hook.remove()
    assert torch.equal(found, wanted)
    first = [chunk] * (unread // chunk) if chunk else [unread]
    assert read[: len(first)] == first  # the cached tokens are not read again


Score = Callable[[Sequence[int]], Tensor]  # log probabilities of the next token, by a dense pass over everything read


def score_of(oracle: DenseOracle, seen: Callable[[Sequence[int]], Tensor | None] = lambda read: None) -> Score:
    """The scores of a `MetaGPT2ForCausalLM`, whose queries see the keys that `seen` returns for what was read."""

    def score(read: Sequence[int]) -> Tensor:
        with torch.no_grad():
            scores = oracle.logits(read, seen(read))[-1].log_softmax(dim=-1)
        scores[META] = -torch.inf
        return scores

    return score


def beams_of(score: Score, prompt: list[int], length: int, meta_every: int | None, beams: int) -> list[int]:
    """The text that beam search finds; with one beam, greedy search."""
    kept: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(length):
        extended = [
            (total + gain, [*text, token])
            for total, text in kept
            for token, gain in enumerate(score(insert(prompt, text, meta_every)).tolist())
        ]
        kept = sorted(extended, reverse=True)[:beams]
    return kept[0][1]


def samples_of(score: Score, prompts: Sequence[list[int]], length: int, meta_every: int | None) -> list[list[int]]:
    """Texts that are drawn with the seed 8, as transformers draws them."""
    torch.manual_seed(8)
    texts: list[list[int]] = [[] for _ in prompts]
    for _ in range(length):
        reads = (insert(prompt, text, meta_every) for prompt, text in zip(prompts, texts, strict=True))
        scores = torch.stack([score(read) for read in reads])
        for text, token in zip(texts, torch.multinomial(scores.float().softmax(-1), 1).flatten().tolist(), strict=True):
            text.append(token)
    return texts
