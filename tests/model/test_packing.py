"""Sequences packed into one row, against each of them alone: logits and gradients."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache

from metatokens import MetaGPT2ForCausalLM, MetaTokenCache
from metatokens.errors import UserError
from metatokens.model.rows import positions_of
from tests.checkpointing import checkpoint_activations
from tests.gradients import far, gradients_far
from tests.model.tiny_models import FAMILY, META, Fields, parametrize, tiny_model
from tests.numbers import ROUNDED, ROUNDED_DOUBLE, decoder_roundings, rounding_bound

WINDOW = {"text_window": 3, "text_sinks": 1}
FULL = WINDOW | {"text_full_layers": [1]}
CASES: list[Fields] = [
    {**family, **scale, **window}
    for family, scale, window in product(FAMILY, ({}, {"attention_scale": "log_length"}), ({}, WINDOW, FULL))
]
# Without a meta-token; beginning with one; of one token; of meta-tokens alone.
SEQUENCES = [
    [4, 5, 6, 7, 8, 9],
    [META, 10, 11, META, 12, 13, 14, 15, META, 16],
    [META],
    [17],
    [18, 19, META, 20, 21, 22, 23, META, 24],
    [META, META, META],
    [25, 26, 27, 28, 29],
]
ROWS = [SEQUENCES, SEQUENCES[::-1]]


def packed(rows: Sequence[Sequence[Sequence[int]]]) -> dict[str, Tensor]:
    """A batch of rows of as many tokens, each of several sequences."""
    ids = [[token for sequence in row for token in sequence] for row in rows]
    positions = [[place for sequence in row for place in range(len(sequence))] for row in rows]
    return {"input_ids": torch.tensor(ids), "position_ids": torch.tensor(positions)}


def alone(model: MetaGPT2ForCausalLM, rows: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """The logits of the same rows, (rows, tokens, vocabulary), from one pass for each sequence."""
    apart = [[model(torch.tensor([one]), use_cache=False).logits[0] for one in row] for row in rows]
    return torch.stack([torch.cat(row) for row in apart])


@pytest.mark.quick(fields=CASES[::4])
@parametrize(CASES)
def test_packed_is_apart(fields: Fields) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(**fields, dtype=dtype)
        together, apart = model(**packed(ROWS)).logits, alone(model, ROWS)
        roundings = decoder_roundings(dtype, blocks=2, width=32, length=10)
        assert far(together, apart) < rounding_bound(dtype, roundings)
        assert gradients_far(model, together, apart) < rounding_bound(dtype, 2 * roundings)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # torch's own, of flex attention
@pytest.mark.parametrize("window", [{}, WINDOW, FULL], ids=["", "text_window", "text_full_layers"])
@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_other_attention_functions(attention: str, window: Fields) -> None:
    model = tiny_model(**window, attention_scale="log_length", dtype=torch.float32, hidden_size=64)
    expected = alone(model, ROWS)
    model.set_attn_implementation(attention)
    with torch.compiler.set_stance("force_eager"):  # compiling flex attention would take minutes
        assert far(model(**packed(ROWS)).logits, expected) < ROUNDED


@torch.no_grad()
@pytest.mark.parametrize("second_attention", ["meta", "causal"])
@pytest.mark.parametrize("window", [{}, WINDOW, FULL], ids=["", "text_window", "text_full_layers"])
def test_weights_are_zero_between_sequences(window: Fields, second_attention: str) -> None:
    model = tiny_model(**window, second_attention=second_attention)
    out = model(**packed(ROWS), output_attentions=True)
    for number, row in enumerate(ROWS):
        start = 0
        for sequence in row:
            own = slice(start, start + len(sequence))
            one = model(torch.tensor([sequence]), output_attentions=True, use_cache=False)
            for name in ("attentions", "meta_attentions"):
                for weights, expected in zip(out[name], one[name], strict=True):
                    assert far(weights[number, :, own, own], expected[0]) < ROUNDED  # softmax in float32
                    weights[number, :, own, own] = 0.0
                    assert not weights[number, :, own].any()
            start += len(sequence)


@torch.no_grad()
def test_a_mask_of_four_dimensions_does_the_same_and_counts_keys() -> None:
    """Log-length attention counts the keys that the mask shows, meta-tokens too."""
    for second_attention in ("meta", "causal"):
        model = tiny_model(attention_scale="log_length", second_attention=second_attention)
        lengths = [len(one) for one in SEQUENCES]
        mask = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths)).bool()[None, None]
        expected = alone(model, ROWS[:1])
        assert far(model(**packed(ROWS[:1]), attention_mask=mask).logits, expected) < ROUNDED_DOUBLE
        torch._dynamo.reset()
        whole = torch.compile(model, backend="eager", fullgraph=second_attention == "meta")
        assert far(whole(**packed(ROWS[:1]), attention_mask=mask, use_cache=False).logits, expected) < ROUNDED_DOUBLE


@torch.no_grad()
@pytest.mark.parametrize("is_static", [False, True])
def test_a_mask_of_four_dimensions_counts_cached_keys(is_static: bool) -> None:
    model = tiny_model(attention_scale="log_length")
    first, second = SEQUENCES[1], SEQUENCES[4]
    size = len(first) + len(second) + (5 if is_static else 0)
    cache = StaticCache(model.config, max_cache_len=size) if is_static else MetaTokenCache(model.config)
    model(torch.tensor([first]), past_key_values=cache)
    mask = torch.cat([torch.zeros(len(second), len(first)), torch.ones(len(second), size - len(first)).tril()], dim=1)
    positions = torch.arange(len(first), len(first) + len(second))[None]
    given = {"attention_mask": mask.bool()[None, None], "position_ids": positions}
    found = model(torch.tensor([second]), past_key_values=cache, **given).logits
    assert far(found, model(torch.tensor([second]), position_ids=positions, use_cache=False).logits) < ROUNDED_DOUBLE


def test_the_batch_may_bring_the_places_of_meta_tokens_and_checkpoint_activations() -> None:
    model, batch = tiny_model(attention_scale="log_length").train(), packed(ROWS)
    apart = alone(model, ROWS)
    checkpoint_activations(model, use_reentrant=False)
    places = positions_of(batch["input_ids"] == META, multiple=16)
    assert gradients_far(model, model(**batch, meta_positions=places).logits, apart) < ROUNDED_DOUBLE


@torch.no_grad()
@pytest.mark.parametrize("has_lengths", [True, False])
def test_the_collator_of_transformers(has_lengths: bool) -> None:
    model = tiny_model()
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=has_lengths, return_seq_idx=has_lengths)
    out = model(**collate([{"input_ids": one} for one in SEQUENCES]))
    assert out.past_key_values is None
    assert far(out.logits, alone(model, ROWS[:1])) < ROUNDED_DOUBLE
    total, labels = 0.0, 0
    for one in SEQUENCES:
        if count := sum(id_ != META for id_ in one[1:]):
            ids = torch.tensor([one])
            total, labels = total + float(model(ids, labels=ids).loss) * count, labels + count
    assert float(out.loss) == pytest.approx(total / labels, rel=ROUNDED)  # the loss is in float32
    assert model(**collate([{"input_ids": SEQUENCES[1]}])).logits.shape[1] == len(SEQUENCES[1])


@torch.no_grad()
@pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
def test_positions_may_jump_within_a_sequence(second_attention: str) -> None:
    model = tiny_model(second_attention=second_attention)
    ids, positions = torch.tensor([[3, META, 5, META, 6, META]]), torch.tensor([[0, 4, 5, 1, 2, 7]])
    apart = [model(ids[:, part], position_ids=positions[:, part]).logits for part in (slice(3), slice(3, 6))]
    assert far(model(ids, position_ids=positions).logits, torch.cat(apart, dim=1)) < ROUNDED_DOUBLE
    joined = model(ids, position_ids=torch.tensor([[0, 4, 5, 6, 8, 9]])).logits
    assert not torch.allclose(joined[:, 3:], apart[1])


@pytest.mark.quick(fields=[WINDOW])
@pytest.mark.parametrize("fields", [{}, {"attention_scale": "log_length"}, WINDOW], ids=str)
def test_a_compiled_graph(fields: Fields) -> None:
    torch._dynamo.reset()
    model, batch = tiny_model(**fields).train(), packed(ROWS)
    expected = alone(model, ROWS)
    step = torch.compile(model, backend="eager", fullgraph=True)
    places = positions_of(batch["input_ids"] == META)
    assert far(step(**batch, meta_positions=places).logits, expected) < ROUNDED_DOUBLE
    assert far(step(**batch).logits, expected) < ROUNDED_DOUBLE  # in the dense form


@pytest.mark.parametrize("second_attention", ["meta", "none"])
def test_what_would_be_wrong_is_refused(second_attention: str) -> None:
    model, batch = tiny_model(second_attention=second_attention), packed(ROWS[:1])
    with pytest.raises(UserError, match="sequences packed into one row cannot have a cache"):
        model(**batch, past_key_values=DynamicCache())
    with pytest.raises(UserError, match="need position_ids that start again with each, not cu_seq_lens_q alone"):
        model(batch["input_ids"], cu_seq_lens_q=torch.tensor([0, 6, batch["input_ids"].shape[1]]))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="packed sequences need attention that takes masks"):
        model(**batch)
