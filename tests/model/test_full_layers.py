"""Text that some layers forget and others keep, against the oracle with a mask for each layer."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from metatokens import MetaTokenCache, set_text_window
from metatokens.errors import UserError
from tests.model.dense_oracle import DenseOracle
from tests.model.generating import beams_of, by_hand, generate, samples_of, score_of
from tests.model.test_attention_oracle import TOLERANCE, assert_close
from tests.model.text_window import PROMPTS, ROWS, SMALL, held, in_steps, seen_by_layers
from tests.model.tiny_models import META, SECOND, VARIANTS, Fields, pad, random_rows, shared_model, tiny_model

LAYERS, FULL = 3, [1]
OWN = SMALL | {"num_hidden_layers": LAYERS, "text_full_layers": FULL}


def masks(row: Any) -> Tensor:
    """Which keys each query sees in each layer."""
    return seen_by_layers(row, LAYERS, FULL)


@pytest.mark.parametrize("side", ["left", "right"])
@VARIANTS
def test_steps_give_the_masked_formula(fields: Fields, side: str) -> None:
    model = shared_model(**fields | OWN)
    oracle, (ids, mask) = DenseOracle(model), pad(ROWS, side)
    wanted = torch.cat([oracle.logits(row, masks(row)) for row in ROWS]).detach()
    for cuts in ((20, 40), range(1, 44), (3, 30, *range(36, 44))):
        with torch.no_grad():
            logits, cache = in_steps(model, ids, mask, [*cuts])
        assert_close(logits[mask.bool()], wanted, TOLERANCE[model.config.position_embedding])
        assert cache.get_seq_length() == 44
        sizes = held(cache)
        blocks = [
            sizes[place : place + LAYERS] for place in range(0, len(sizes) - 2, LAYERS)
        ]  # a second attention's too
        assert [(block[1], block[0] == block[2] < 44) for block in blocks] == [(44, True)] * len(blocks)


@pytest.mark.parametrize("meta_every", [None, 3])
@VARIANTS
def test_generation_is_the_dense_recomputation(fields: Fields, meta_every: int | None) -> None:
    model = shared_model(**fields | OWN)
    score = score_of(DenseOracle(model), masks)
    options = {"meta_every": meta_every, "prefill_chunk_size": 7}
    cache = MetaTokenCache(model.config)
    found = generate(model, PROMPTS, past_key_values=cache, max_new_tokens=12, **options)
    assert found.tolist() == [beams_of(score, row, 12, meta_every, 1) for row in PROMPTS]
    assert cache.has_dropped
    found = generate(model, PROMPTS, do_sample=True, top_k=0, max_new_tokens=12, **options)
    assert found.tolist() == samples_of(score, PROMPTS, 12, meta_every)
    found = generate(model, PROMPTS, num_beams=3, max_new_tokens=5, **options)
    assert found.tolist() == [beams_of(score, row, 5, meta_every, 3) for row in PROMPTS]


@SECOND
def test_a_chat_goes_on_and_guesses_are_cropped(second_attention: str) -> None:
    model = shared_model(second_attention=second_attention, **OWN)
    ids, mask = pad(PROMPTS)
    cache, options = MetaTokenCache(model.config), {"do_sample": False, "pad_token_id": 0}
    ids = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, **options)
    ids = torch.cat([ids, torch.tensor(random_rows([9] * 3, seed=6))], dim=1)
    mask = torch.cat([mask, torch.ones(3, 15, dtype=torch.long)], dim=1)
    whole, whole_mask = by_hand(ids, mask, cache)
    options["max_new_tokens"] = 7
    wanted = model.generate(whole, attention_mask=whole_mask, use_cache=False, **options)[:, whole.shape[1] :]
    found = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)[:, ids.shape[1] :]
    assert torch.equal(found, wanted)
    rows = [[5, META, 9] * 12]
    wanted = generate(model, rows, max_new_tokens=20, use_cache=False)
    assert torch.equal(generate(model, rows, max_new_tokens=20, prompt_lookup_num_tokens=3), wanted)


@SECOND
def test_the_eager_attention_function_and_its_weights(second_attention: str) -> None:
    model = tiny_model(second_attention=second_attention, dtype=torch.float32, **OWN)
    model.set_attn_implementation("eager")
    oracle, (ids, mask) = DenseOracle(model), pad(ROWS)
    wanted = torch.cat([oracle.logits(row, masks(row)) for row in ROWS]).detach()
    assert_close(model(ids, attention_mask=mask).logits[mask.bool()], wanted, 2e-5)
    weights = model(torch.tensor(ROWS[:1]), output_attentions=True, use_cache=False).attentions
    oracle.logits(ROWS[0], masks(ROWS[0]))
    for layer in range(LAYERS):
        assert (weights[layer][0] - oracle.seen[f"model.layers.{layer}.attention"]).abs().max() < 1e-5


def test_full_layers_are_set_and_unset() -> None:
    model, ids = tiny_model(num_hidden_layers=LAYERS, position_embedding="none"), torch.tensor(ROWS[:1])
    plain = model(ids).logits
    set_text_window(model, 5, 2, FULL)
    assert (model.config.text_window, model.config.text_full_layers) == (5, FULL)
    assert_close(model(ids).logits[0], DenseOracle(model).logits(ROWS[0], masks(ROWS[0])).detach(), 1e-11)
    set_text_window(model, 5, 2, range(LAYERS))
    assert_close(model(ids).logits, plain, 1e-11)
    set_text_window(model, None)
    assert model.config.text_full_layers is None
    assert torch.equal(model(ids).logits, plain)


@SECOND
def test_what_would_be_wrong_is_refused(second_attention: str) -> None:
    model = tiny_model(second_attention=second_attention, **OWN)
    for layers in ([3], [1, 0], [-1]):
        with pytest.raises(UserError, match="text_full_layers is"):
            set_text_window(model, 5, 2, layers)
    with pytest.raises(UserError, match=r"the model cannot have this text window: .*'text_window' expected"):
        set_text_window(model, "3")  # type: ignore[arg-type]
    assert model.config.text_full_layers == FULL
    cache = model(torch.tensor(ROWS[:1]), use_cache=True).past_key_values
    set_text_window(model, 5, 2, [0])
    with pytest.raises(
        UserError, match="this cache was filled with another text_window, text_sinks or text_full_layers"
    ):
        model(torch.tensor(ROWS[:1]), past_key_values=cache)
    with pytest.raises(UserError, match="text_full_layers need a cache that grows"):
        model(torch.tensor(ROWS[:1]), past_key_values=StaticCache(model.config, max_cache_len=60))
