"""The model on the device that is at hand: METATOKENS_DEVICE, or a GPU where there is one, or the processor.

`make gpu` runs these on a GPU; everywhere else they hold that they run to the end.
"""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from metatokens import MetaGPT2ForCausalLM
from metatokens.checkpoint import load_model
from metatokens.training.batches import with_positions
from tests.model.dense_oracle import DenseOracle
from tests.model.tiny_models import META, random_rows, tiny_model

DEVICE = os.environ.get("METATOKENS_DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2}  # of what is about 1
ROWS = random_rows((26, 26, 26), meta_rate=0.2)
SECOND = pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
TYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def on_device(dtype: torch.dtype = torch.float32, **overrides: Any) -> MetaGPT2ForCausalLM:
    return tiny_model(dtype=dtype, **overrides).to(DEVICE)


def batch() -> dict[str, Tensor]:
    """With its positions, on the device."""
    ids = torch.tensor(ROWS)
    given = with_positions({"input_ids": ids, "labels": ids.masked_fill(ids == META, -100)}, META)
    return {name: value.to(DEVICE) for name, value in given.items()}


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest, as a share of what is expected on average."""
    expected = expected.detach().double().cpu()
    return float((found.detach().double().cpu() - expected).abs().max() / expected.abs().mean())


@SECOND
@TYPES
def test_logits_are_those_of_the_formula(dtype: torch.dtype, second_attention: str) -> None:
    model = on_device(dtype, second_attention=second_attention)
    oracle = DenseOracle(model.cpu())  # of the parameters in the type that the device computes with
    model.to(DEVICE)
    with torch.no_grad():
        found = model(torch.tensor(ROWS, device=DEVICE)).logits
        expected = torch.stack([oracle.logits(row) for row in ROWS])
    assert difference(found, expected) < 30 * TOLERANCES[dtype]
    if dtype == torch.float32:
        assert difference(found, expected) < TOLERANCES[dtype]


@SECOND
def test_gradients_are_those_of_the_processor(second_attention: str) -> None:
    gradients = []
    for device in (DEVICE, "cpu"):
        model = tiny_model(dtype=torch.float32, second_attention=second_attention).to(device).train()
        model(**{name: value.to(device) for name, value in batch().items()}).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert difference(gradient, gradients[1][name]) < 1e-2, name


@SECOND
@TYPES
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generated_text_is_that_without_a_cache(dtype: torch.dtype, second_attention: str, kind: str) -> None:
    model, prompt = on_device(dtype, second_attention=second_attention), torch.tensor(ROWS, device=DEVICE)[:, :9]
    options = {"max_new_tokens": 8, "do_sample": False, "meta_every": 3, "disable_compile": True}
    whole = model.generate(prompt, use_cache=False, **options)
    cached = model.generate(prompt, cache_implementation=kind, **options)
    same = (whole == cached)[:, prompt.shape[1] :].float().mean()
    assert same > (0.7 if dtype == torch.float32 else 0.4)  # rounding may change a choice, and with it all behind


@SECOND
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # a GPU has them, and the test wants float32
def test_a_compiled_step_is_the_eager_one(second_attention: str) -> None:
    torch._dynamo.reset()
    model, given = on_device(second_attention=second_attention).train(), batch()
    expected = model(**given).loss
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    loss = compiled(**given).loss
    loss.backward()
    assert difference(loss, expected) < 1e-4


@SECOND
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # PyTorch calls it a prototype
def test_nothing_in_a_training_step_waits_for_the_device(second_attention: str) -> None:
    model, given = on_device(second_attention=second_attention).train(), batch()
    model(**given).loss.backward()  # what is made once
    with nullcontext() if DEVICE == "cuda" else pytest.MonkeyPatch.context() as patch:
        if DEVICE != "cuda":  # where nothing waits, whoever asks is noticed
            for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__"):
                patch.setattr(Tensor, name, refused(name))
        try:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            model(**given).loss.backward()
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def refused(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{name} reads from the device")

    return refuse


def test_a_checkpoint_goes_from_device_to_device(tmp_path: Path) -> None:
    model, ids = on_device(), torch.tensor(ROWS)
    model.save_pretrained(tmp_path / "there")
    here = MetaGPT2ForCausalLM.from_pretrained(tmp_path / "there").eval()
    here.save_pretrained(tmp_path / "here")
    again = load_model(tmp_path / "here").to(DEVICE).eval()
    with torch.no_grad():
        expected = model(ids.to(DEVICE)).logits
        assert difference(here(ids).logits, expected) < 1e-4
        assert torch.equal(again(ids.to(DEVICE)).logits, expected)
