"""Perplexity against a loop over single blocks in float64, and on identical text with and without meta-tokens."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from metatokens.checkpoint import load_model
from metatokens.data.insertion import insert_meta_tokens
from metatokens.data.landmarks import Landmarks
from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.evaluation.perplexity import held_out_text, perplexity
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.records import About, Result
from tests.numbers import ROUNDED_PERPLEXITY

Models = Callable[..., Path]
BLOCK = {"block_size": 32, "fraction": 0.1}  # 29 text tokens and 3 meta-tokens


@pytest.fixture
def model(small_model: Models) -> MetaGPT2ForCausalLM:
    return load_model(small_model())


@pytest.fixture(scope="module")
def text(small_store: TokenStore) -> np.ndarray:
    """Twenty blocks of 29 tokens, and 11 tokens more."""
    return small_store.tokens("held_out")[: 29 * 20 + 11]


def measured(model: Any, text: np.ndarray, placement: str, **changes: Any) -> Result:
    settings = {"placement": placement, **BLOCK, **changes}
    subject = About(model="x", text="held_out", seed=3, recipe="demo")
    return perplexity(model, text, subject, **settings)


def losses_by_hand(model: Any, blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Negative log-likelihoods of text tokens but the first, (blocks, tokens), of one block and token at a time."""
    model = deepcopy(model).double()
    losses = []
    for ids in blocks:
        with torch.no_grad():
            log_probabilities = model(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
        _, *scored = [
            position for position, token in enumerate(ids) if token != model.config.meta_token_id
        ]
        losses.append(
            [-log_probabilities[position - 1, ids[position]].item() for position in scored]
        )
    return np.array(losses)


def text_blocks(text: np.ndarray) -> list[np.ndarray]:
    return np.split(text[: 29 * 20], 20)


def placed_blocks(text: np.ndarray, placement: str, meta: int) -> list[np.ndarray]:
    """The blocks with meta-tokens, each drawn with its number as the seed."""
    blocks = []
    for row, block in enumerate(text_blocks(text)):
        generator = np.random.default_rng(row)
        ids, _ = insert_meta_tokens(
            block, meta_token_id=meta, placement=placement, generator=generator, **BLOCK
        )
        blocks.append(ids)
    return blocks


def test_a_model_without_a_meta_token_reads_any_text(small_model: Models, text: np.ndarray) -> None:
    model = load_model(small_model(second_attention="none", meta_token_id=None))
    with_every_id = text.copy()
    with_every_id[5] = 0  # the end of text in a tokenizer of ours, "!" in GPT-2's
    losses = losses_by_hand(model, text_blocks(with_every_id))
    result = measured(model, with_every_id, "none")
    assert result.value == pytest.approx(math.exp(losses.mean()), rel=ROUNDED_PERPLEXITY)


@pytest.mark.parametrize("placement", ["none", "uniform", "periodic"])
def test_perplexity_and_its_interval(
    placement: str, model: MetaGPT2ForCausalLM, text: np.ndarray
) -> None:
    is_plain = placement == "none"
    blocks = (
        text_blocks(text)
        if is_plain
        else placed_blocks(text, placement, model.config.meta_token_id)
    )
    losses = losses_by_hand(model, blocks)
    mean, error = losses.mean(), losses.mean(axis=1).std(ddof=1) / math.sqrt(20)

    result = measured(model, text, placement)

    assert result.value == pytest.approx(math.exp(mean), rel=ROUNDED_PERPLEXITY)
    assert result.low == pytest.approx(math.exp(mean - 1.96 * error), rel=ROUNDED_PERPLEXITY)
    assert result.high == pytest.approx(math.exp(mean + 1.96 * error), rel=ROUNDED_PERPLEXITY)
    assert result.n == losses.size == 20 * 28
    assert (result.condition, result.length, result.metric) == (placement, 32, "perplexity")
    assert (result.model, result.text, result.seed, result.recipe) == ("x", "held_out", 3, "demo")
    assert result.position_embedding == "rope"


def test_a_share_of_meta_tokens_that_is_not_the_papers_is_recorded(
    model: MetaGPT2ForCausalLM, text: np.ndarray
) -> None:
    assert measured(model, text, "uniform").fraction is None
    assert measured(model, text, "uniform", fraction=0.2).fraction == 0.2
    assert measured(model, text, "none", fraction=0).fraction == 0


def test_chance_is_the_perplexity_of_the_tokens_frequencies(
    model: MetaGPT2ForCausalLM, text: np.ndarray
) -> None:
    shares = np.array(list(Counter(text[: 29 * 20].tolist()).values())) / (29 * 20)
    entropy = -(shares * np.log(shares)).sum()
    assert measured(model, text, "none").chance == pytest.approx(math.exp(entropy))


@pytest.mark.parametrize("rule", ["sentence", "every:5"])
def test_landmarks_are_put_into_the_same_text(
    rule: str, small_store: TokenStore, model: MetaGPT2ForCausalLM, text: np.ndarray
) -> None:
    landmarks = Landmarks(small_store.tokenizer, rule)
    is_landmark = np.split(landmarks(text[: 29 * 20]), 20)
    blocks = [
        np.insert(block, np.flatnonzero(after) + 1, model.config.meta_token_id)
        for block, after in zip(text_blocks(text), is_landmark, strict=True)
    ]
    expected = math.exp(losses_by_hand(model, blocks).mean())

    result = measured(model, text, "none", landmarks=landmarks)

    assert len(set(map(len, blocks))) > 1
    assert result.value == pytest.approx(expected, rel=ROUNDED_PERPLEXITY)
    assert (result.condition, result.n) == (rule, 20 * 28)


def test_the_held_out_text_of_a_store(small_store: TokenStore) -> None:
    whole = small_store.tokens("held_out")[:]
    source, tokenizer = str(small_store.path), small_store.tokenizer
    assert held_out_text(source, tokenizer).tolist() == whole.tolist()
    assert held_out_text(source, tokenizer, 7).tolist() == whole[:7].tolist()


def test_a_corpus_is_read_whole_or_up_to_a_limit(small_store: TokenStore, tmp_path: Path) -> None:
    tokenizer, corpus = small_store.tokenizer, tmp_path / "two.jsonl"
    corpus.write_text('{"text": "the cat"}\n{"text": "<|endoftext|> dogs"}\n')

    ids = held_out_text(str(corpus), tokenizer).tolist()

    first_end = ids.index(tokenizer.eos_token_id)
    assert tokenizer.decode(ids[:first_end]) == "the cat"
    assert tokenizer.decode(ids[first_end + 1 : -1]) == "<|endoftext|> dogs"
    assert ids[-1] == tokenizer.eos_token_id
    for limit in (1, len(ids) - 1, len(ids), len(ids) + 9):
        assert held_out_text(str(corpus), tokenizer, limit).tolist() == ids[:limit]


def test_a_placement_that_inserts_nothing_is_refused(
    model: MetaGPT2ForCausalLM, small_store: TokenStore, text: np.ndarray
) -> None:
    never = Landmarks(small_store.tokenizer, "every:9999")
    with pytest.raises(UserError, match="uniform inserts no meta-token into blocks of 9"):
        measured(model, text, "uniform", block_size=9)
    with pytest.raises(UserError, match="every:9999 inserts no meta-token into blocks of"):
        measured(model, text, "none", landmarks=never, fraction=0)
    without = measured(model, text, "none", block_size=9)
    assert measured(model, text, "uniform", block_size=9, fraction=0).value == without.value


def test_logits_are_never_all_there_at_once(
    model: MetaGPT2ForCausalLM, text: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **kwargs or {})
            if isinstance(made, torch.Tensor) and made.shape[-1:] == (model.config.vocab_size,):
                sizes.append(made.numel())
            return made

    whole = measured(model, text, "uniform")
    monkeypatch.setattr("metatokens.decoder.PIECE", 7 * model.config.vocab_size)
    with Sizes():
        in_pieces = measured(model, text, "uniform")
    assert in_pieces.value == pytest.approx(whole.value, rel=ROUNDED_PERPLEXITY)
    assert max(sizes) == 7 * model.config.vocab_size
