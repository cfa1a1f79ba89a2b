"""Properties of the model for any weights: sizes, positions, ways to run it."""

import shutil
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import DynamicCache, EncoderDecoderCache

from metatokens import MetaGPT2Config, MetaGPT2ForCausalLM
from metatokens.errors import UserError
from metatokens.model.configuration import never_generated
from tests.checkpointing import checkpoint_activations
from tests.gradients import gradients_by
from tests.model.agreement import assert_close, assert_gradients_close
from tests.model.text_window import MIXED
from tests.model.tiny_models import (
    META,
    SECOND,
    Fields,
    pad,
    random_rows,
    shared_model,
    tiny_config,
    tiny_model,
)
from tests.numbers import ROUNDED, ROUNDED_DOUBLE
from tests.retrofit.architectures import LENGTH, with_meta_tokens
from tests.retrofit.callers import SETTINGS, shared_model_of

# --- sizes and initial weights


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ({"second_attention": "none"}, 123_587_328),
        ({"second_attention": "meta"}, 151_908_096),
        # As many as the model that it is a control for.
        (
            {"second_attention": "causal"},
            151_908_096,
        ),
        ({"second_attention": "none", "position_embedding": "none"}, 123_587_328),
        ({"second_attention": "meta", "position_embedding": "learned"}, 151_908_096 + 786_432),
    ],
)
def test_parameter_counts_of_the_paper(overrides: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        model = MetaGPT2ForCausalLM(MetaGPT2Config.paper(**overrides))
    assert model.num_parameters() == count


def test_initial_weights_are_those_of_gpt2() -> None:
    torch.manual_seed(0)
    model = MetaGPT2ForCausalLM(
        tiny_config(hidden_size=128, num_hidden_layers=3, initializer_range=0.05)
    )
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith(".bias"):
            assert (parameter == 0).all()
        else:  # layers that write to the residual stream are scaled down with depth
            expected = 0.05 / 6**0.5 if "out_proj" in name else 0.05
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


def test_the_meta_token_keeps_its_row() -> None:
    model = tiny_model()
    for rows, multiple in ((META, None), (10, 16)):
        message = f"{rows} rows leave out the meta-token, of the id 63: ask for more"
        with pytest.raises(UserError, match=message):
            model.resize_token_embeddings(rows, pad_to_multiple_of=multiple)

    assert model.resize_token_embeddings(META, pad_to_multiple_of=8).num_embeddings == 64
    assert model.resize_token_embeddings(70).num_embeddings == model.config.vocab_size == 70
    without = tiny_model(second_attention="none", meta_token_id=None)
    assert without.resize_token_embeddings(10).num_embeddings == 10


def test_rows_that_pad_the_vocabulary() -> None:
    paper = MetaGPT2Config.paper()
    assert (paper.vocab_size, paper.unpadded_vocab_size) == (50304, 50258)
    assert never_generated(paper) == list(range(50257, 50304))
    model = tiny_model(vocab_size=128, meta_token_id=90)
    assert model.config.unpadded_vocab_size == 128
    model.resize_token_embeddings(94, pad_to_multiple_of=64)  # after three tokens were added
    assert (model.config.vocab_size, model.config.unpadded_vocab_size) == (128, 94)
    assert never_generated(model.config) == [90, *range(94, 128)]


# --- positions


def test_positions_of_the_caller_replace_the_counted_ones() -> None:
    model, ids = tiny_model(position_embedding="learned"), torch.tensor(random_rows((6,)))
    moved = model(ids, position_ids=torch.arange(6)[None] + 3).logits
    table = model.model.learned_positions.weight
    table.data = table.data.roll(-3, dims=0)

    assert torch.equal(model(ids).logits, moved)


def test_a_sequence_longer_than_the_learned_table_is_refused() -> None:
    ids = torch.ones(1, 9, dtype=torch.long)
    model = tiny_model(position_embedding="learned", max_position_embeddings=8)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    for inputs in ({"input_ids": ids}, {"input_ids": ids[:, :1], "past_key_values": cache}):
        with pytest.raises(UserError, match="9 tokens is longer than the 8 learned positions"):
            model(**inputs)
    tiny_model(position_embedding="rope", max_position_embeddings=8)(ids)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted_against_the_learned_table(side: str) -> None:
    model, rows = (
        tiny_model(position_embedding="learned", max_position_embeddings=8),
        random_rows((8, 3)),
    )
    ids, mask = (tensor[:2] for tensor in pad([*rows, [0] * 20], side))
    padded = model(ids, attention_mask=mask).logits
    for number, row in enumerate(rows):
        alone = model(torch.tensor([row])).logits[0]
        assert_close(padded[number, mask[number].bool()], alone, ROUNDED_DOUBLE)


# --- inputs and outputs


@pytest.mark.parametrize("second_attention", ["meta", "causal"])
def test_a_cache_without_a_second_store_is_refused(second_attention: str) -> None:
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(UserError, match="give a DynamicCache or a StaticCache as past_key_values"):
        shared_model(second_attention=second_attention)(
            torch.tensor([[1, META]]), past_key_values=cache
        )


@pytest.mark.quick(caller=["learned-meta", "rope-causal", "llama", "bloom"])
@pytest.mark.parametrize("caller", [*SETTINGS, "llama", "bloom", "gemma3_text"])
@torch.no_grad()
def test_embeddings_in_place_of_ids(caller: str) -> None:
    model, ids = shared_model_of(caller), with_meta_tokens()
    embeddings = model.get_input_embeddings()(ids)
    expected = model(ids).logits
    assert torch.equal(model(inputs_embeds=embeddings).logits, expected)
    if caller != "bloom":  # which drops it
        mask = ids == model.config.meta_token_id
        assert torch.equal(model(inputs_embeds=embeddings, meta_token_mask=mask).logits, expected)

    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
    }
    text = model.generate(ids, **options)[:, LENGTH:]
    assert torch.equal(model.generate(inputs_embeds=embeddings, **options), text)


def test_a_mask_of_meta_tokens_decides_where_no_embedding_equals_theirs() -> None:
    """Such as interpolated embeddings."""
    model, ids = shared_model(), torch.tensor(random_rows((11,)))
    embeddings = model.get_input_embeddings()(ids) + 1e-9
    expected = model(ids).logits
    with_mask = model(inputs_embeds=embeddings, meta_token_mask=ids == META).logits

    assert_close(with_mask, expected, 1e-6)
    assert (model(inputs_embeds=embeddings).logits - expected).abs().max() > 1e-3


@SECOND
def test_hidden_states_and_attentions_of_each_layer(second_attention: str) -> None:
    model = shared_model(second_attention=second_attention, num_hidden_layers=3)
    ids = torch.tensor(random_rows((7, 7)))
    outputs = model(ids, output_hidden_states=True, output_attentions=True)

    assert [tuple(states.shape) for states in outputs.hidden_states] == [(2, 7, 32)] * 4
    assert len(outputs.attentions) == 3
    assert (outputs.meta_attentions is None) == (second_attention == "none")
    # The eager softmax is float32 in transformers.
    assert_close(outputs.logits, model(ids).logits, ROUNDED)


# --- ways to train and to run it


@pytest.mark.parametrize("window", [{}, MIXED], ids=["all text", "text_full_layers"])
@pytest.mark.parametrize("second_attention", ["meta", "causal"])
def test_gradient_checkpointing_gives_the_same_gradients(
    second_attention: str, window: Fields
) -> None:
    model = tiny_model(second_attention=second_attention, **window).train()
    ids = torch.tensor(random_rows((12, 12)))
    expected = gradients_by(model, model(ids, labels=ids).loss)
    checkpoint_activations(model)
    runs: list[str] = []
    model.model.layers[0].attention.register_forward_hook(lambda *_: runs.append("attention"))

    assert_gradients_close(gradients_by(model, model(ids, labels=ids).loss), expected, 0.0)
    assert len(runs) == 2  # it was on: the forward pass ran again


HAS_COMPILER = any(map(shutil.which, ("g++", "c++", "clang++")))
NEEDS_COMPILER = pytest.mark.skipif(
    not HAS_COMPILER, reason="torch.compile on a CPU needs a C++ compiler"
)


# aot_eager takes all steps except the last, which generates machine code.
@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.thorough, NEEDS_COMPILER])]
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, like the next,
# While it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_model_equals_eager(backend: str) -> None:
    model, ids = (
        tiny_model(num_hidden_layers=1, dtype=torch.float32).train(),
        torch.tensor(random_rows((9, 9))),
    )
    expected = model(ids, labels=ids).loss
    gradients = gradients_by(model, expected)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        loss = compiled(ids, labels=ids).loss
        assert_close(loss, expected, ROUNDED)
        assert_gradients_close(gradients_by(model, loss), gradients, ROUNDED)


def test_a_layer_may_be_on_another_device() -> None:
    # accelerate's hook, to a device that every machine has: it holds shapes without values.
    model = tiny_model().model
    add_hook_to_module(model.layers[1].to("meta"), AlignDevicesHook(execution_device="meta"))
    model.norm.to("meta")
    ids = torch.tensor([[1, META, 3, META, 5, 6]])

    assert model(ids, use_cache=False).last_hidden_state.device.type == "meta"
