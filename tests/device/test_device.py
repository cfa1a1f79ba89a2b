"""The model on the device that is at hand: METATOKENS_DEVICE, or a GPU where there is one, or the processor.

`make gpu` runs these on a GPU; everywhere else they hold that they run to the end.
"""

import os

import pytest
import torch
from torch import Tensor

import metatokens
from metatokens.checkpoint import load_model
from metatokens.data.tokenizer import load_tokenizer
from metatokens.training.batches import with_positions
from tests.model.dense_oracle import DenseOracle
from tests.model.tiny_models import META, random_rows, tiny_model

DEVICE = os.environ.get("METATOKENS_DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2}  # of what is about 1
ROWS = random_rows((26, 26, 26), meta_rate=0.2)
# By which Python waits for a device.
READS = (
    "item",
    "tolist",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
)
SECOND = pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
TYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def on_device(dtype=torch.float32, **overrides):
    return tiny_model(dtype=dtype, **overrides).to(DEVICE)


def batch(device=DEVICE):
    """With its positions, on the device."""
    ids = torch.tensor(ROWS)
    labels = ids.masked_fill(ids == META, -100)
    tensors = with_positions({"input_ids": ids, "labels": labels}, META)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def difference(computed, expected):
    """The largest, as a share of what is expected on average."""
    computed, expected = (
        computed.detach().double().cpu(),
        expected.detach().double().cpu(),
    )
    return float((computed - expected).abs().max() / expected.abs().mean())


@SECOND
@TYPES
def test_logits_are_those_of_the_formula(dtype, second_attention):
    model = tiny_model(dtype=dtype, second_attention=second_attention)
    oracle = DenseOracle(model)  # of the parameters in the type that the device computes with
    expected = torch.stack([oracle.logits(row) for row in ROWS])

    model.to(DEVICE)
    with torch.no_grad():
        logits = model(torch.tensor(ROWS, device=DEVICE)).logits

    slack = 1 if dtype == torch.float32 else 30
    assert difference(logits, expected) < slack * TOLERANCES[dtype]


def gradients_on(device, second_attention):
    model = tiny_model(dtype=torch.float32, second_attention=second_attention).to(device).train()
    model(**batch(device)).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@SECOND
def test_gradients_are_those_of_the_processor(second_attention):
    expected = gradients_on("cpu", second_attention)

    for name, gradient in gradients_on(DEVICE, second_attention).items():
        assert difference(gradient, expected[name]) < 1e-2, name


@SECOND
@TYPES
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generated_text_is_that_without_a_cache(dtype, second_attention, kind):
    model, prompt = (
        on_device(dtype, second_attention=second_attention),
        torch.tensor(ROWS, device=DEVICE)[:, :9],
    )
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "meta_every": 3,
        "disable_compile": True,
    }

    without_cache = model.generate(prompt, use_cache=False, **options)
    with_cache = model.generate(prompt, cache_implementation=kind, **options)

    same = (without_cache == with_cache)[:, prompt.shape[1] :].float().mean()
    # Rounding may change a choice, and with it all behind.
    assert same > (0.7 if dtype == torch.float32 else 0.4)


@SECOND
# A GPU has them, and the test wants float32.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_a_compiled_step_is_the_eager_one(second_attention):
    torch._dynamo.reset()
    model, tensors = on_device(second_attention=second_attention).train(), batch()
    expected = model(**tensors).loss

    compiled = torch.compile(
        model, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager"
    )
    loss = compiled(**tensors).loss
    loss.backward()

    assert difference(loss, expected) < 1e-4


@pytest.fixture
def refuses_to_wait(monkeypatch):
    """Call it to make each wait for the device an error; elsewhere than on a GPU, each read by Python."""

    def refuse(*_, **__):
        raise AssertionError("this reads from the device")

    def start():
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        else:
            for name in READS:
                monkeypatch.setattr(Tensor, name, refuse)

    yield start
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("default")


@SECOND
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # PyTorch calls it a prototype
def test_nothing_in_a_training_step_waits_for_the_device(second_attention, refuses_to_wait):
    model, tensors = on_device(second_attention=second_attention).train(), batch()
    model(**tensors).loss.backward()  # what is made once

    refuses_to_wait()
    model(**tensors).loss.backward()


def test_the_page_of_a_look_is_drawn(small_model):
    folder = small_model(second_attention="meta")
    model = load_model(folder).to(DEVICE)

    look = metatokens.look(model, load_tokenizer(str(folder)), "a bird _PAUSE_", "_PAUSE_")

    assert look.to_html().startswith("<!doctype html>")
