"""States that are computed only where they are asked for, against those of all positions, indexed afterwards."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from metatokens import MetaGPT2ForCausalLM, MetaTokenCache
from metatokens.model.interventions import Intervention, intervene
from metatokens.model.rows import Index
from tests.checkpointing import checkpoint_activations
from tests.model.tiny_models import FAMILY, META, QUICK, pad, random_rows, shared_model, tiny_model

TOLERANCE = 1e-10
LENGTHS = (26, 19, 23, 21)
ROWS = [*random_rows(LENGTHS[:3], meta_rate=0.15), random_rows(LENGTHS[3:], seed=3, meta_rate=0.0)[0]]
KEPT: dict[str, list[set[int]]] = {  # of each row's tokens
    "ragged": [{2, 3, 20, 25}, set(), {22}, {0, 4, 5, 6, 20}],
    "one": [set(), set(), {7}, set()],
    "all": [set(range(length)) for length in LENGTHS],
}
FAMILIES = pytest.mark.parametrize(("position_embedding", "second_attention"), FAMILY)
SIDES = pytest.mark.parametrize("side", ["left", "right"])


def mark(positions: list[set[int]], side: str) -> Tensor:
    """A mask (rows, longest) of the given tokens of rows that `pad` has padded."""
    longest = max(LENGTHS)
    kept = torch.zeros(len(LENGTHS), longest, dtype=torch.bool)
    for row, (length, tokens) in enumerate(zip(LENGTHS, positions, strict=True)):
        for token in tokens:
            kept[row, token + (longest - length if side == "left" else 0)] = True
    return kept


def rows_answered(model: MetaGPT2ForCausalLM, run: Callable[[], object]) -> list[int]:
    """How many rows of a sequence each attention of the last block projects its output of."""
    counts: list[int] = []
    block = model.model.layers[-1]
    modules = [module for module in (block.attention, block.second_attention) if module is not None]
    hooks = [m.out_proj.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[1])) for m in modules]
    run()
    for hook in hooks:
        hook.remove()
    return counts


def states(model: MetaGPT2ForCausalLM, ids: Tensor, keep: Index | None, **options: Any) -> Tensor:
    return model.model(ids, keep=keep, **options).last_hidden_state


def states_and_gradients(model: MetaGPT2ForCausalLM, found: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The states, and the gradients of their sum under fixed random weights."""
    model.zero_grad()
    weigh = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    (found * weigh).sum().backward()
    return found, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def assert_same(model: MetaGPT2ForCausalLM, actual: Tensor, expected: Tensor) -> None:
    found, gradients = states_and_gradients(model, actual)
    wanted, wanted_gradients = states_and_gradients(model, expected)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < TOLERANCE
    for name, gradient in gradients.items():
        assert (gradient - wanted_gradients[name]).abs().max() < TOLERANCE, name


@pytest.mark.parametrize("kept", KEPT)
@SIDES
@FAMILIES
def test_kept_states_and_gradients_are_those_of_all(
    position_embedding: str, second_attention: str, side: str, kept: str
) -> None:
    model = tiny_model(position_embedding=position_embedding, second_attention=second_attention)
    ids, mask = pad(ROWS, side)
    keep = mark(KEPT[kept], side)
    whole = states(model, ids, None, attention_mask=mask)
    assert_same(model, states(model, ids, keep, attention_mask=mask), whole[keep])


@FAMILIES
def test_kept_states_without_a_mask(position_embedding: str, second_attention: str) -> None:
    model = tiny_model(position_embedding=position_embedding, second_attention=second_attention)
    ids, _ = pad(ROWS, "right")
    for kept in KEPT.values():
        keep = mark(kept, "right")
        assert_same(model, states(model, ids, keep), states(model, ids, None)[keep])


@QUICK
@given(seed=st.integers(0, 99), rate=st.floats(0, 1), meta_rate=st.floats(0, 1))
@example(seed=0, rate=0.0, meta_rate=0.0)  # nothing kept, nothing to see
@example(seed=0, rate=0.0, meta_rate=0.2)
@example(seed=0, rate=0.2, meta_rate=0.0)
def test_any_positions_and_meta_tokens(seed: int, rate: float, meta_rate: float) -> None:
    ids = torch.tensor(random_rows((17, 17, 17), seed=seed, meta_rate=meta_rate))
    keep = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < rate
    for second_attention in ("meta", "causal", "none"):
        model = shared_model(second_attention=second_attention)
        found, wanted = states(model, ids, keep), states(model, ids, None)[keep]
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, rtol=0, atol=TOLERANCE)


@FAMILIES
def test_logits_to_keep(position_embedding: str, second_attention: str) -> None:
    model = shared_model(position_embedding=position_embedding, second_attention=second_attention)
    ids, mask = pad(ROWS)
    logits = model(ids, attention_mask=mask).logits
    wanted: list[tuple[int | Tensor, Tensor]] = [(n, logits[:, -n:]) for n in (1, 4, 25, 26)]
    wanted += [(index, logits[:, index]) for index in (torch.tensor([20, 3, -1, 3]), torch.arange(26))]
    for logits_to_keep, expected in wanted:
        found = model(ids, attention_mask=mask, logits_to_keep=logits_to_keep).logits
        assert found.shape == expected.shape
        is_real = expected.isfinite()
        assert (found - expected)[is_real].abs().max() < TOLERANCE


@pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
def test_the_last_attention_answers_for_no_more_than_it_must(second_attention: str) -> None:
    model = shared_model(second_attention=second_attention)
    ids, _ = pad(ROWS, "right")
    metas = int((ids == META).sum(dim=1).max())
    keep = mark(KEPT["ragged"], "right")
    seen = int((keep | (ids == META)).sum(dim=1).max())
    answered = {"none": [5], "causal": [26, 5], "meta": [seen, metas]}[second_attention]
    assert max(answered[-1], seen) < 13  # or it would prove nothing
    assert rows_answered(model, lambda: states(model, ids, keep)) == answered
    assert rows_answered(model, lambda: states(model, ids, mark(KEPT["all"], "right")))[0] == 26
    assert rows_answered(model, lambda: states(model, ids, None))[0] == 26
    everything = {"none": [26], "causal": [26, 26], "meta": [26, metas]}[second_attention]
    assert rows_answered(model, lambda: model(ids, logits_to_keep=1, output_hidden_states=True)) == everything


@pytest.mark.parametrize("cuts", [[], [12], [5, 6]])
@FAMILIES
def test_a_prefill_that_asks_for_one_state_fills_the_cache(
    position_embedding: str, second_attention: str, cuts: list[int]
) -> None:
    model = shared_model(position_embedding=position_embedding, second_attention=second_attention)
    ids, mask = pad(ROWS)
    caches = {0: MetaTokenCache(model.config), 1: MetaTokenCache(model.config)}
    for start, end in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        last = {}
        for logits_to_keep, cache in caches.items():
            step = {"attention_mask": mask[:, :end], "past_key_values": cache, "logits_to_keep": logits_to_keep}
            last[logits_to_keep] = model(ids[:, start:end], **step).logits[:, -1]
        is_real = mask[:, end - 1].bool()
        assert (last[0] - last[1])[is_real].abs().max() < TOLERANCE
    for whole, part in zip(caches[0].layers, caches[1].layers, strict=True):
        for name in ("keys", "values"):
            assert torch.allclose(getattr(part, name), getattr(whole, name), rtol=0, atol=TOLERANCE), name
        if second_attention != "none":
            assert torch.equal(part.second_slots, whole.second_slots)
            is_entry = (whole.second_slots >= 0)[:, None, :, None]  # what stands in the others means nothing
            for name in ("second_keys", "second_values"):
                difference = getattr(part, name) - getattr(whole, name)
                assert difference.masked_fill(~is_entry, 0.0).abs().max() < TOLERANCE, name


@pytest.mark.parametrize("name", ["no_pos", "no_embed", "neither", "noise:0.5", "noise:0.5:meta:raw"])
@pytest.mark.parametrize("position_embedding", ["learned", "rope"])
def test_interventions_reach_the_kept_states(position_embedding: str, name: str) -> None:
    model = tiny_model(position_embedding=position_embedding)
    ids, mask = pad(ROWS)
    keep = mark(KEPT["ragged"], "left")
    found = []
    for context in (nullcontext(), intervene(model, Intervention.parse(name))):
        with context:
            whole = states(model, ids, None, attention_mask=mask)[keep]
            found.append(states(model, ids, keep, attention_mask=mask))
        assert (found[-1] - whole).abs().max() < TOLERANCE
    assert (found[0] - found[1]).abs().max() > 1e-3


@pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
def test_yarn_scales_the_kept_queries_too(second_attention: str) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 12}
    model = tiny_model(second_attention=second_attention, rope_parameters=yarn)
    assert model.model.rotary_emb.attention_scaling > 1.1
    ids, mask = pad(ROWS)
    keep = mark(KEPT["ragged"], "left")
    whole = states(model, ids, None, attention_mask=mask)
    assert_same(model, states(model, ids, keep, attention_mask=mask), whole[keep])


@pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
def test_checkpointing_few_labels_gives_the_same_gradients(second_attention: str) -> None:
    ids, _ = pad(ROWS, "right")
    labels = ids.masked_fill(~mark([{length - 2, length - 1} for length in LENGTHS], "right"), -100)
    labels[ids == META] = -100
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(second_attention=second_attention).train()
        if checkpointing:
            checkpoint_activations(model)
        model(ids, labels=labels).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_eager_attention_gives_the_weights_of_all_positions() -> None:
    model = tiny_model(second_attention="none")
    ids, _ = pad(ROWS, "right")
    expected = model(ids, logits_to_keep=1).logits
    model.set_attn_implementation("eager")
    outputs = model(ids, logits_to_keep=1, output_attentions=True)
    assert [tuple(weights.shape) for weights in outputs.attentions] == [(4, 4, 26, 26)] * 2
    assert (outputs.logits - expected).abs().max() < 1e-5  # the eager softmax is float32 in transformers


def test_autocast_of_few_labels() -> None:
    model = tiny_model(dtype=torch.float32).train()
    ids, _ = pad(ROWS, "right")
    labels = ids.masked_fill(~mark(KEPT["ragged"], "right") | (ids == META), -100)
    exact = model(ids, labels=labels).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=labels).loss
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
