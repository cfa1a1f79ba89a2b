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
from tests.model.generating import insert
from tests.model.tiny_models import META, SECOND, SECOND_ATTENTIONS, random_rows, tiny_model
from tests.numbers import decoder_roundings, rounding_bound

DEVICE = os.environ.get("METATOKENS_DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
ROWS = random_rows((26, 26, 26), meta_rate=0.2)
META_EVERY, NEW = 3, 8  # of generated text
# By which Python waits for a device.
READS = (
    "item",
    "tolist",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Tests of tests/model compare all three with the formula on the processor.
QUICK = pytest.mark.quick(second_attention=["meta"] if DEVICE == "cpu" else SECOND_ATTENTIONS)


def on_device(**overrides):
    return tiny_model(dtype=torch.float32, **overrides).to(DEVICE)


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


def bound_of(dtype, logits):
    """How far a logit may be from the formula's by rounding."""
    roundings = decoder_roundings(dtype, blocks=2, width=32, length=len(ROWS[0]))
    return rounding_bound(dtype, roundings, float(logits.std()))


@QUICK
@SECOND
@TYPES
@torch.no_grad()
def test_logits_are_those_of_the_formula(dtype, second_attention):
    model = tiny_model(dtype=dtype, second_attention=second_attention)
    oracle = DenseOracle(model)  # of the parameters in the type that the device computes with
    expected = torch.stack([oracle.logits(row) for row in ROWS])

    logits = model.to(DEVICE)(torch.tensor(ROWS, device=DEVICE)).logits

    # The mean of each token's logits, since a sharp softmax amplifies the error of a few numbers.
    errors = (logits.double().cpu() - expected).abs().mean(dim=-1)
    assert errors.max() < bound_of(dtype, expected)


def gradients_on(device, second_attention):
    model = tiny_model(dtype=torch.float32, second_attention=second_attention).to(device).train()
    model(**batch(device)).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no device besides the processor")
@SECOND
def test_gradients_are_those_of_the_processor(second_attention):
    expected = gradients_on("cpu", second_attention)

    for name, gradient in gradients_on(DEVICE, second_attention).items():
        assert difference(gradient, expected[name]) < 1e-2, name


@QUICK
@SECOND
@TYPES
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_generated_tokens_differ_from_those_of_the_formula_by_rounding_alone(
    dtype, second_attention, kind
):
    model = tiny_model(dtype=dtype, second_attention=second_attention)
    oracle = DenseOracle(model)
    prompts = [row[:9] for row in ROWS]

    texts = model.to(DEVICE).generate(
        torch.tensor(prompts, device=DEVICE),
        cache_implementation=kind,
        max_new_tokens=NEW,
        do_sample=False,
        meta_every=META_EVERY,
        disable_compile=True,
    )

    for prompt, text in zip(prompts, texts.tolist(), strict=True):
        new = text[len(prompt) :]
        logits = oracle.logits(insert(prompt, new, META_EVERY))
        bound = bound_of(dtype, logits)
        # What each new token was predicted from: all before it, the inserted meta-tokens included.
        read = [len(insert(prompt, new[:count], META_EVERY)) for count in range(NEW)]
        scores = logits[torch.tensor(read) - 1]
        scores[:, META] = -torch.inf
        of_new = scores[torch.arange(NEW), new]
        assert (scores.amax(dim=1) - of_new).max() < bound


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
