"""Sequences packed into one row, for both callers, against each of them alone: logits and gradients."""

from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache

from metatokens import set_text_window
from metatokens.errors import UserError
from metatokens.model.rows import positions_of
from tests.gradients import gradients_far
from tests.model.agreement import assert_close
from tests.numbers import ROUNDED, decoder_roundings, rounding_bound
from tests.retrofit.architectures import META
from tests.retrofit.callers import SETTINGS, model_of, rounded
from tests.retrofit.packed import SEQUENCES, alone, block_mask, packed

BOTH_CALLERS = pytest.mark.parametrize("caller", ["rope-meta", "llama"])


@pytest.mark.quick(caller=["learned-meta", "rope-causal", "log_length-none-meta"])
@pytest.mark.parametrize("caller", SETTINGS)
def test_packed_is_alone(caller: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(caller, dtype=dtype)
        together, apart = model(**packed()).logits[..., :META], alone(model)
        roundings = decoder_roundings(dtype, blocks=4, width=64, length=12)
        assert_close(together, apart, rounding_bound(dtype, roundings))
        assert gradients_far(model, together, apart) < rounding_bound(dtype, 2 * roundings)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # torch's own, of flex attention
@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
@BOTH_CALLERS
def test_other_attention_functions(caller: str, attention: str) -> None:
    wider = {"hidden_size": 64} if caller in SETTINGS else {}
    model = model_of(caller, dtype=torch.float32, **wider)
    expected = alone(model)
    model.set_attn_implementation(attention)
    with torch.compiler.set_stance("force_eager"):  # compiling flex attention would take minutes
        assert_close(model(**packed()).logits[..., :META], expected, rounded(model))


@torch.no_grad()
@pytest.mark.parametrize("is_added", [False, True], ids=["bool", "added"])
@pytest.mark.parametrize(
    "caller", ["log_length-none-meta", "log_length-none-causal", "llama", "gpt_neox", "phi"]
)
def test_a_mask_of_four_dimensions_does_the_same(caller: str, is_added: bool) -> None:
    """Log-length attention counts the keys that the mask shows, meta-tokens too."""
    model, mask = model_of(caller), block_mask()
    if is_added:
        mask = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(
            ~mask, torch.finfo(model.dtype).min
        )
    batch = {name: packed()[name] for name in ("input_ids", "position_ids")}
    logits = model(**batch, attention_mask=mask, use_cache=False).logits[..., :META]

    assert_close(logits, alone(model), rounded(model))


@torch.no_grad()
@pytest.mark.parametrize("has_lengths", [True, False])
@BOTH_CALLERS
def test_the_loss_for_the_collator_of_transformers(caller: str, has_lengths: bool) -> None:
    model = model_of(caller)
    collate = DataCollatorWithFlattening(
        return_flash_attn_kwargs=has_lengths, return_seq_idx=has_lengths
    )
    out = model(**collate([{"input_ids": sequence} for sequence in SEQUENCES]))
    assert out.past_key_values is None

    total, labels = 0.0, 0
    for sequence in SEQUENCES:
        count = sum(token != META for token in sequence[1:])
        if count:
            ids = torch.tensor([sequence])
            total += float(model(ids, labels=ids).loss) * count
            labels += count
    assert float(out.loss) == pytest.approx(total / labels, rel=ROUNDED)  # the loss is in float32


@torch.no_grad()
@pytest.mark.parametrize("caller", ["rope-meta", "rope-causal", "rope-none", "llama", "gpt_neox"])
def test_a_sequence_begins_where_positions_jump_back(caller: str) -> None:
    model = model_of(caller)
    ids = torch.tensor([[5, META, 6, 7, META, 8, 9, META, 10] * 2])
    positions = torch.tensor([[*range(20, 29), *range(9)]])
    logits = model(ids, position_ids=positions, use_cache=False).logits
    for part in (slice(0, 9), slice(9, 18)):
        apart = model(ids[:, part], position_ids=positions[:, part], use_cache=False).logits
        assert_close(logits[:, part], apart, rounded(model))


@BOTH_CALLERS
@torch.no_grad()
def test_a_compiled_graph(caller: str) -> None:
    torch._dynamo.reset()
    model = model_of(caller)
    compiled = torch.compile(model, backend="eager", fullgraph=caller in SETTINGS)
    expected, batch = alone(model), packed()
    further: list[dict[str, Any]] = [{}]
    if caller in SETTINGS:
        further.append({"meta_positions": positions_of(batch["input_ids"] == META)})
    for inputs in further:  # in the dense form, and in the gathered one
        logits = compiled(**batch, **inputs, use_cache=False).logits[..., :META]
        assert_close(logits, expected, rounded(model))


@BOTH_CALLERS
def test_what_would_be_wrong_is_refused(caller: str) -> None:
    model, batch = model_of(caller), packed()
    for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=64)):
        with pytest.raises(UserError, match="sequences packed into one row cannot have a cache"):
            model(**batch, past_key_values=cache)
    for run in (model, torch.compile(model, backend="eager")):
        with pytest.raises(
            UserError, match="need position_ids that start again with each, not cu_seq_lens_q alone"
        ):
            run(batch["input_ids"], cu_seq_lens_q=batch["cu_seq_lens_q"], use_cache=False)
    set_text_window(model, 3)
    with pytest.raises(
        UserError, match="packed into one row do not go together with a text_window"
    ):
        model(**batch)


def test_an_attention_function_without_masks_is_refused() -> None:
    model = model_of("rope-meta")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="packed sequences need attention that takes masks"):
        model(**packed())
