"""Perplexity against a loop over single blocks in float64, and on identical text with and without meta-tokens."""

import math
from collections import Counter
from collections.abc import Callable
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
    return perplexity(model, text, About(model="x"), **{"placement": placement, **BLOCK, **changes})


def losses_by_hand(folder: Path, text: np.ndarray, placement: str) -> np.ndarray:
    """Negative log-likelihoods, (blocks, 28), from one block and one token at a time in float64."""
    model = load_model(folder).eval().double()
    meta = model.config.meta_token_id
    losses = []
    for row, block in enumerate(np.split(text[: 29 * 20], 20)):
        ids = block
        if placement != "none":
            generator = np.random.default_rng(row)
            ids, _ = insert_meta_tokens(block, meta_token_id=meta, placement=placement, generator=generator, **BLOCK)
        with torch.no_grad():
            log_probabilities = model(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
        places = [place for place, token in enumerate(ids) if token != meta]
        assert [ids[place] for place in places] == block.tolist()
        losses.append([-log_probabilities[place - 1, ids[place]].item() for place in places[1:]])
    return np.array(losses)


def test_a_model_without_a_meta_token_reads_any_text(small_model: Models, text: np.ndarray) -> None:
    folder = small_model(second_attention="none", meta_token_id=None)
    with_every_id = text.copy()
    with_every_id[5] = 0  # the end of text in a tokenizer of ours, "!" in GPT-2's
    result = measured(load_model(folder), with_every_id, "none")
    assert result.value == pytest.approx(
        math.exp(losses_by_hand(folder, with_every_id, "none").mean()), rel=ROUNDED_PERPLEXITY
    )


@pytest.mark.parametrize("placement", ["none", "uniform", "periodic"])
@pytest.mark.parametrize("second_attention", ["meta", "causal"])
def test_perplexity_and_its_interval(
    second_attention: str, placement: str, small_model: Models, text: np.ndarray
) -> None:
    folder = small_model(second_attention=second_attention)
    result = perplexity(
        load_model(folder), text, placement=placement, about=About(model="meta", seed=3, recipe="demo"), **BLOCK
    )
    losses = losses_by_hand(folder, text, placement)
    assert result.value == pytest.approx(math.exp(losses.mean()), rel=ROUNDED_PERPLEXITY)
    assert result.n == losses.size == 20 * 28
    blocks = losses.mean(axis=1)
    error = math.sqrt(sum((block - losses.mean()) ** 2 for block in blocks) / 19 / 20)
    assert result.low == pytest.approx(math.exp(losses.mean() - 1.96 * error), rel=ROUNDED_PERPLEXITY)
    assert result.high == pytest.approx(math.exp(losses.mean() + 1.96 * error), rel=ROUNDED_PERPLEXITY)
    counts = Counter(text[: 29 * 20].tolist())
    entropy = -sum(count / 580 * math.log(count / 580) for count in counts.values())
    assert result.chance == pytest.approx(math.exp(entropy))
    assert (result.condition, result.length, result.metric) == (placement, 32, "perplexity")
    assert (result.model, result.seed, result.recipe, result.position_embedding) == ("meta", 3, "demo", "rope")


@pytest.mark.parametrize("rule", ["sentence", "every:5"])
def test_landmarks_are_put_into_the_same_text(
    rule: str, small_store: TokenStore, small_model: Models, text: np.ndarray
) -> None:
    landmarks, folder = Landmarks(small_store.tokenizer, rule), small_model()
    result = measured(load_model(folder), text, "none", landmarks=landmarks)
    model = load_model(folder).double()
    meta, losses, sizes = model.config.meta_token_id, [], set()
    behind = landmarks(text[: 29 * 20])
    for row in range(20):
        ids, places = [], []
        for token, ends in zip(text[29 * row :][:29].tolist(), behind[29 * row :].tolist(), strict=False):
            places.append(len(ids))
            ids += [token, meta] if ends else [token]
        with torch.no_grad():
            log_probabilities = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses += [-log_probabilities[place - 1, ids[place]].item() for place in places[1:]]
        sizes.add(len(ids))
    assert len(sizes) > 1
    assert result.value == pytest.approx(math.exp(np.mean(losses)), rel=ROUNDED_PERPLEXITY)
    assert (result.condition, result.n) == (rule, 20 * 28)


@pytest.mark.parametrize("placement", ["none", "uniform"])
def test_a_model_without_preferences_has_the_vocabulary_as_its_perplexity(
    placement: str, model: MetaGPT2ForCausalLM, text: np.ndarray
) -> None:
    with torch.no_grad():
        model.lm_head.weight.zero_()
    result = measured(model, text, placement)
    assert result.value == pytest.approx(model.config.vocab_size)
    assert result.low == pytest.approx(result.high)


# --- the text


def test_held_out_text_of_a_store_and_a_whole_corpus(small_store: TokenStore, tmp_path: Path) -> None:
    assert (held_out_text(str(small_store.path), small_store.tokenizer) == small_store.tokens("held_out")[:]).all()
    (tmp_path / "two.jsonl").write_text('{"text": "the cat"}\n{"text": "<|endoftext|> dogs"}\n')
    ids = held_out_text(str(tmp_path / "two.jsonl"), small_store.tokenizer)
    end = small_store.tokenizer.eos_token_id
    documents = [part for part in "".join(chr(i) for i in ids).split(chr(end)) if part]
    texts = [small_store.tokenizer.decode([ord(i) for i in part]) for part in documents]
    assert texts == ["the cat", "<|endoftext|> dogs"]
    assert (ids[-1], (ids == end).sum()) == (end, 2)
    for source, whole in ((small_store.path, small_store.tokens("held_out")[:]), (tmp_path / "two.jsonl", ids)):
        for most in (1, len(whole) - 1, len(whole), len(whole) + 9):
            assert held_out_text(str(source), small_store.tokenizer, most).tolist() == whole[:most].tolist()


# --- what cannot be measured


def test_a_placement_that_inserts_nothing_is_refused(
    model: MetaGPT2ForCausalLM, small_store: TokenStore, text: np.ndarray
) -> None:
    never = Landmarks(small_store.tokenizer, "every:9999")
    short = {"block_size": 9, "placement": "uniform"}
    for settings in (short, {"landmarks": never}, {"landmarks": never, "fraction": 0}):
        with pytest.raises(UserError, match=r"(uniform|every:9999) inserts no meta-token into blocks of"):
            measured(model, text, **{"placement": "none", **settings})
    without = measured(model, text, "none", block_size=9)
    assert measured(model, text, **short | {"fraction": 0}).value == without.value


def test_logits_are_never_all_there_at_once(
    model: MetaGPT2ForCausalLM, text: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **kwargs or {})
            if isinstance(made, torch.Tensor) and made.shape[-1:] == (model.config.vocab_size,):
                self.size = max(self.size, made.numel())
            return made

    whole = measured(model, text, "uniform")
    monkeypatch.setattr("metatokens.decoder.PIECE", 7 * model.config.vocab_size)
    with Largest() as largest:
        assert measured(model, text, "uniform").value == pytest.approx(whole.value, rel=ROUNDED_PERPLEXITY)
    assert largest.size == 7 * model.config.vocab_size
