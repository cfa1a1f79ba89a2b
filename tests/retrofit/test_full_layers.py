"""Retrofitted models some of whose blocks keep all text, against the same model with a mask for each block."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.llama import modeling_llama

from metatokens import add_meta_attention, load_meta, save_meta, set_text_window
from metatokens.decoder import decoder_of
from metatokens.errors import UserError
from tests.checkpointing import checkpoint_activations
from tests.model.generating import beams_of, samples_of
from tests.model.in_pieces import in_steps
from tests.model.text_window import PROMPTS, ROWS, SINKS, WINDOW, held, seen_by_layers
from tests.model.tiny_models import META, pad, random_rows
from tests.retrofit.architectures import base, error, train_like
from tests.retrofit.test_text_window import EOS, FEW, NAMES, generate

FULL = [1]


def model_of(name: str, full: Sequence[int] | None = FULL, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A retrofitted model whose meta-attention has an effect, and whose blocks `full` keep all text."""
    plain = base(name).to(dtype)
    model = train_like(add_meta_attention(plain, meta_token_id=META, heads=2, head_size=16, freeze=False))
    if full is not None:
        set_text_window(model, WINDOW, SINKS, full)
    return model


shared = functools.cache(model_of)


def masked(model: PreTrainedModel, masks: Sequence[Tensor], **inputs: Any) -> Any:
    """The output of a model that sees everything, whose block i gets `masks[i]`, (batch, 1, T, T) bool."""
    handles, dtype = [], model.dtype
    for block, mask in zip(decoder_of(model)[1], masks, strict=True):
        own = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

        def change(block: Any, args: tuple, kwargs: dict[str, Any], own: Tensor = own) -> Any:
            is_mask = lambda one: isinstance(one, Tensor) and one.shape[-2:] == own.shape[-2:] and one.ndim == 4  # noqa: E731
            changed = {name: own if is_mask(one) else one for name, one in kwargs.items()}
            return tuple(own if is_mask(one) else one for one in args), changed

        handles.append(block.register_forward_pre_hook(change, with_kwargs=True))
    try:
        length = masks[0].shape[-1]
        given = torch.zeros(len(masks[0]), 1, length, length, dtype=dtype)
        given = given.masked_fill(~torch.ones(length, length).tril().bool(), torch.finfo(dtype).min)
        positions = torch.arange(length).expand(len(masks[0]), -1)
        return model(attention_mask=given, position_ids=positions, use_cache=False, **inputs)
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def dense(name: str, row: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The logits (length, vocabulary) under masks by the rule."""
    model = shared(name, None, dtype)
    masks = seen_by_layers(row, len(decoder_of(model)[1]), FULL)
    return masked(model, masks[:, None, None], input_ids=torch.tensor([row])).logits[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_and_steps_are_the_masked_recomputation(name: str, dtype: torch.dtype) -> None:
    model, (ids, mask) = shared(name, dtype=dtype), pad(ROWS)
    wanted = torch.cat([dense(name, row, dtype) for row in ROWS])[:, :META]
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        pieces, cache = in_steps(model, ids, mask, (20, 25, *range(36, 44)))
    assert held(cache)[1] == 44
    assert held(cache)[0] < 40
    for found in (whole, pieces):
        difference = (found[mask.bool()][:, :META] - wanted).abs()
        if dtype == torch.float32:
            assert difference.max() < 2e-5 * wanted.abs().max()
        else:  # in half precision the two ways round differently, and experts may change
            assert difference.float().mean() < 0.02 * wanted.float().abs().mean()


@pytest.mark.parametrize("name", NAMES)
def test_generation_is_the_masked_recomputation(name: str) -> None:
    def score(read: Sequence[int]) -> Tensor:
        scores = dense(name, read)[-1].log_softmax(dim=-1)
        scores[[META, EOS]] = -torch.inf
        return scores

    model, options = shared(name), {"meta_every": 3, "prefill_chunk_size": 7}
    cache = DynamicCache()
    found = generate(model, PROMPTS, max_new_tokens=8, past_key_values=cache, **options)
    assert found == [beams_of(score, row, 8, 3, 1) for row in PROMPTS]
    assert held(cache)[0] < held(cache)[1] == int(cache.get_seq_length())
    found = generate(model, PROMPTS, max_new_tokens=8, do_sample=True, top_k=0, **options)
    assert found == samples_of(score, PROMPTS, 8, 3)
    found = generate(model, PROMPTS, max_new_tokens=4, num_beams=3, **options)
    assert found == [beams_of(score, row, 4, 3, 3) for row in PROMPTS]


@pytest.mark.parametrize("name", FEW)
def test_guesses_that_are_cropped_change_nothing(name: str) -> None:
    rows = [[5, META, 9] * 12]
    wanted = generate(shared(name), rows, max_new_tokens=20, use_cache=False)
    assert generate(shared(name), rows, max_new_tokens=20, prompt_lookup_num_tokens=3) == wanted


@pytest.mark.parametrize("full", [[], FULL])
@pytest.mark.parametrize("name", FEW)
def test_training_hides_the_same_text_with_activation_checkpointing_too(name: str, full: list[int]) -> None:
    ids, gradients = torch.tensor(random_rows((30, 30), meta_rate=0.2)), []
    for way in ("masked", "plain", "checkpointed"):
        model = model_of(name, None if way == "masked" else full).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if way == "checkpointed":
            checkpoint_activations(model)
            model.enable_input_require_grads()
        if way == "masked":
            count = len(decoder_of(model)[1])
            masks = torch.stack([seen_by_layers(row, count, full) for row in ids.tolist()], dim=1)[:, :, None]
            loss = masked(model, masks, input_ids=ids, labels=ids).loss
        else:
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    for found in gradients[1:]:
        assert max(error(a, b) for a, b in zip(found, gradients[0], strict=True)) < 1e-5


@pytest.mark.filterwarnings("ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's
def test_full_layers_are_saved_with_the_model_and_with_what_was_added(tmp_path: Path) -> None:
    model, (ids, mask) = model_of("llama"), pad(ROWS)
    model.save_pretrained(tmp_path / "whole")
    save_meta(model, tmp_path / "delta")
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
        for loaded in (
            AutoModelForCausalLM.from_pretrained(tmp_path / "whole"),
            load_meta(base("llama"), tmp_path / "delta"),
        ):
            assert loaded.config.text_full_layers == FULL
            assert torch.equal(loaded(ids, attention_mask=mask).logits, wanted)
        tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))  # its adapters add nothing yet
        assert torch.equal(tuned(ids, attention_mask=mask).logits, wanted)


def test_other_layers_are_chosen_and_none() -> None:
    model, (ids, mask) = model_of("llama"), pad(ROWS)
    count = len(decoder_of(model)[1])
    with torch.no_grad():
        set_text_window(model, WINDOW, SINKS, [0])
        row = torch.tensor(ROWS[:1])
        masks = seen_by_layers(ROWS[0], count, [0])[:, None, None]
        wanted = masked(shared("llama", None), masks, input_ids=row).logits
        assert error(model(row, use_cache=False).logits, wanted) < 1e-5
        pieces, cache = in_steps(model, row, torch.ones_like(row), (20, *range(30, 44)))
        assert error(pieces, wanted) < 1e-5
        assert held(cache)[0] == 44 > held(cache)[1]
        set_text_window(model, WINDOW)  # with the sinks and full layers that it has
        assert (model.config.text_sinks, model.config.text_full_layers) == (SINKS, [0])
        set_text_window(model, WINDOW, SINKS, [])
        window = model(ids, attention_mask=mask).logits
        set_text_window(model, WINDOW, SINKS, range(count))
        everything = model(ids, attention_mask=mask).logits
        set_text_window(model, None)
        assert model.config.text_full_layers is None
        plain = model(ids, attention_mask=mask).logits
    assert error(everything[mask.bool()], plain[mask.bool()]) < 1e-5
    assert error(window[mask.bool()], plain[mask.bool()]) > 0.01


@pytest.mark.parametrize("use_cache", [False, None])
def test_a_compiled_model_has_the_masks_of_each_pass(use_cache: bool | None) -> None:
    torch._dynamo.reset()
    model = model_of("llama")
    compiled = torch.compile(model, backend="eager")
    for seed, length in enumerate((30, 30, 33)):
        ids = torch.tensor(random_rows((length, length), meta_rate=0.2, seed=seed))
        with torch.no_grad():
            wanted = model(ids, use_cache=use_cache).logits
            assert error(compiled(ids, use_cache=use_cache).logits, wanted) < 1e-5


def test_a_base_that_changes_the_mask_before_its_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, make = model_of("llama", None), modeling_llama.create_causal_mask

    def changed(*args: Any, **kwargs: Any) -> Any:
        mask = make(*args, **kwargs)
        return mask if mask is None else mask.clone()

    monkeypatch.setattr(modeling_llama, "create_causal_mask", changed)
    set_text_window(model, WINDOW, SINKS)
    with pytest.raises(UserError, match="its blocks have masks of their own"):
        set_text_window(model, WINDOW, SINKS, FULL)
    assert (model.config.text_window, model.config.text_full_layers) == (WINDOW, None)


def test_what_would_be_wrong_is_refused() -> None:
    model = model_of("llama")
    for layers in ([9], [1, 0], [-1]):
        with pytest.raises(UserError, match="text_full_layers is "):
            set_text_window(model, WINDOW, SINKS, layers)
    assert model.config.text_full_layers == FULL
