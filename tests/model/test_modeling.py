"""Properties of the model for any weights: sizes, positions, ways to run it."""

import shutil
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from huggingface_hub.errors import StrictDataclassError
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from metatokens import MetaGPT2Config, MetaGPT2ForCausalLM
from metatokens.errors import UserError
from metatokens.model.configuration import never_generated
from tests.checkpointing import checkpoint_activations
from tests.gradients import far
from tests.model.dense_oracle import rotate_by_position
from tests.model.tiny_models import (
    FAMILIES,
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


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ({"second_attention": "none"}, 123_587_328),
        ({"second_attention": "meta"}, 151_908_096),
        ({"second_attention": "causal"}, 151_908_096),  # as many as the model that it is a control for
        ({"second_attention": "none", "position_embedding": "none"}, 123_587_328),
        ({"second_attention": "none", "position_embedding": "learned"}, 123_587_328 + 786_432),
        ({"second_attention": "meta", "position_embedding": "learned"}, 151_908_096 + 786_432),
    ],
)
def test_parameter_counts_of_the_paper(overrides: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        model = MetaGPT2ForCausalLM(MetaGPT2Config.paper(**overrides))
    assert model.num_parameters() == count


def test_initial_weights_are_those_of_gpt2() -> None:
    torch.manual_seed(0)
    model = MetaGPT2ForCausalLM(tiny_config(hidden_size=128, num_hidden_layers=3, initializer_range=0.05))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith(".bias"):
            assert (parameter == 0).all()
        else:  # layers that write to the residual stream are scaled down with depth
            expected = 0.05 / 6**0.5 if "out_proj" in name else 0.05
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


def test_given_positions_replace_the_counted_ones() -> None:
    model = tiny_model(position_embedding="learned")
    ids = torch.tensor(random_rows((6,)))
    moved = model(ids, position_ids=torch.arange(6)[None] + 3).logits
    with torch.no_grad():
        model.model.learned_positions.weight.copy_(model.model.learned_positions.weight.roll(-3, dims=0))
    assert torch.equal(model(ids).logits, moved)


def test_a_sequence_longer_than_the_learned_table_is_refused() -> None:
    ids = torch.ones(1, 30, dtype=torch.long)
    model = tiny_model(position_embedding="learned", max_position_embeddings=8)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    for more in ({"input_ids": ids[:, :9]}, {"input_ids": ids[:, :1], "past_key_values": cache}):
        with pytest.raises(UserError, match="9 tokens is longer than the 8 learned positions"):
            model(**more)
    tiny_model(position_embedding="rope", max_position_embeddings=8)(ids)


def test_padding_is_not_counted_against_the_learned_table() -> None:
    model = tiny_model(position_embedding="learned", max_position_embeddings=8)
    rows = random_rows((8, 3))
    for side in ("left", "right"):
        ids, mask = pad([*rows, [0] * 20], side)
        ids, mask = ids[:2], mask[:2]
        assert ids.shape[1] == 20
        padded = model(ids, attention_mask=mask).logits
        for row, logits, real in zip(rows, padded, mask.bool(), strict=True):
            assert (logits[real] - model(torch.tensor([row])).logits[0]).abs().max() < ROUNDED_DOUBLE
        out = model.generate(ids[1:], attention_mask=mask[1:], max_new_tokens=5, do_sample=False, pad_token_id=0)
        alone = model.generate(torch.tensor([rows[1]]), max_new_tokens=5, do_sample=False)
        if side == "left":
            assert out[0, 20:].tolist() == alone[0, 3:].tolist()
    ids, mask = pad([[0] * 9, [0] * 20])
    with pytest.raises(UserError, match="9 tokens is longer than the 8 learned positions"):
        model(ids[:1], attention_mask=mask[:1])


@SECOND
@pytest.mark.parametrize("with_config", [True, False])
def test_a_cache_of_transformers_gets_a_second_store(second_attention: str, with_config: bool) -> None:
    model = shared_model(second_attention=second_attention)
    ids = torch.tensor(random_rows((12, 12), seed=3))
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    model(ids[:, :7], past_key_values=cache)
    last = model(ids[:, 7:], past_key_values=cache).logits  # the same object again
    assert cache.get_seq_length() == 12
    assert (last - model(ids).logits[:, 7:]).abs().max() < ROUNDED_DOUBLE


def test_a_cache_without_a_second_store_is_refused() -> None:
    for second_attention in ("meta", "causal"):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with pytest.raises(UserError, match="EncoderDecoderCache; give a MetaTokenCache, a DynamicCache or a StaticC"):
            tiny_model(second_attention=second_attention)(torch.tensor([[1, META]]), past_key_values=cache)


@pytest.mark.parametrize("side", ["left", "right"])
@FAMILIES
def test_embeddings_in_place_of_ids(fields: Fields, side: str) -> None:
    model = shared_model(**fields)
    ids, mask = pad(random_rows((11, 6)), side)
    expected = model(ids, attention_mask=mask).logits
    embeddings = model.get_input_embeddings()(ids)
    by_embedding = model(inputs_embeds=embeddings, attention_mask=mask).logits
    by_ids = model(ids, inputs_embeds=embeddings, attention_mask=mask).logits
    by_mask = model(inputs_embeds=embeddings, meta_token_mask=ids == META, attention_mask=mask).logits
    assert torch.equal(by_embedding, expected)
    assert torch.equal(by_ids, expected)
    assert torch.equal(by_mask, expected)
    if fields["second_attention"] == "meta":  # such as interpolated embeddings: none equals the meta-token's
        blurred = embeddings + 1e-9
        assert (model(inputs_embeds=blurred, attention_mask=mask).logits - expected).abs().max() > 1e-3
        marked = model(inputs_embeds=blurred, meta_token_mask=ids == META, attention_mask=mask).logits
        assert (marked - expected).abs().max() < 1e-6
    with pytest.raises(UserError, match="needs input_ids or inputs_embeds"):
        model(attention_mask=mask)


def test_all_layers_named_are_as_none_named() -> None:
    ids = torch.tensor(random_rows((13,)))
    assert torch.equal(tiny_model(rope_layers=[0, 1])(ids).logits, tiny_model()(ids).logits)


def test_rotary_tables_are_those_of_transformers_and_of_the_formula() -> None:
    positions = torch.arange(40)[None]
    x = torch.randn(1, 4, 40, 8, generator=torch.Generator().manual_seed(0))
    tables = tiny_model(dtype=torch.float32).model.rotary_emb(x, positions)
    llama = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=48)
    expected = LlamaRotaryEmbedding(llama)(x, positions)
    assert torch.equal(tables[0], expected[0])
    assert torch.equal(tables[1], expected[1])
    turned, _ = apply_rotary_pos_emb(x, x, *expected)
    assert far(turned[0], rotate_by_position(x[0].double())) < ROUNDED


@SECOND
def test_hidden_states_and_attentions_of_each_layer(second_attention: str) -> None:
    model = tiny_model(second_attention=second_attention, num_hidden_layers=3)
    model.set_attn_implementation("eager")
    first = []
    for layer in model.model.layers:
        layer.attention.register_forward_hook(lambda module, args, output: first.append(output[1]))
    ids = torch.tensor(random_rows((7, 7)))
    outputs = model(ids, output_hidden_states=True, output_attentions=True)
    assert [tuple(state.shape) for state in outputs.hidden_states] == [(2, 7, 32)] * 4
    # One for each layer, of the first module, even if the second is a causal attention too.
    assert len(outputs.attentions) == 3
    assert (outputs.meta_attentions is None) == (second_attention == "none")
    assert all(torch.equal(*pair) for pair in zip(outputs.attentions, first, strict=True))
    model.set_attn_implementation("sdpa")
    assert far(outputs.logits, model(ids).logits) < ROUNDED  # the eager softmax is float32 in transformers


@pytest.mark.parametrize("second_attention", ["meta", "causal"])
def test_gradient_checkpointing_gives_the_same_gradients(second_attention: str) -> None:
    ids = torch.tensor(random_rows((12, 12)))
    gradients, runs = [], []
    for checkpointing in (False, True):
        model = tiny_model(second_attention=second_attention).train()
        if checkpointing:
            checkpoint_activations(model)
        calls: list[int] = []
        model.model.layers[0].attention.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        runs.append(len(calls))
    assert runs == [1, 2]  # it was on: the forward pass ran again
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_autocast_trains() -> None:
    model = tiny_model(dtype=torch.float32).train()
    ids = torch.tensor(random_rows((12, 12)))
    exact = model(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


HAS_COMPILER = any(map(shutil.which, ("g++", "c++", "clang++")))
NEEDS_COMPILER = pytest.mark.skipif(not HAS_COMPILER, reason="torch.compile on a CPU needs a C++ compiler")


# aot_eager takes all steps except the last, which generates machine code.
@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.thorough, NEEDS_COMPILER])]
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, like the next,
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # while it compiles
def test_compiled_model_equals_eager(backend: str) -> None:
    model = tiny_model(num_hidden_layers=1, dtype=torch.float32).train()
    compiled = torch.compile(model, backend=backend)
    for lengths in ((9, 9), (9, 9)):
        ids = torch.tensor(random_rows(lengths))
        expected = model(ids, labels=ids).loss
        expected.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        loss = compiled(ids, labels=ids).loss
        loss.backward()
        torch.testing.assert_close(loss, expected)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], msg=name)
        model.zero_grad()


def test_a_layer_may_be_on_another_device() -> None:
    # accelerate's hook, to a device that every machine has: it holds shapes without values.
    model = tiny_model().model
    add_hook_to_module(model.layers[1].to("meta"), AlignDevicesHook(execution_device="meta"))
    model.norm.to("meta")
    ids = torch.tensor([[1, META, 3, META, 5, 6]])
    assert model(ids, use_cache=False).last_hidden_state.device.type == "meta"


def test_the_meta_token_keeps_its_row() -> None:
    model = tiny_model()
    for rows, multiple in ((META, None), (META, 7), (10, 16)):
        with pytest.raises(
            UserError, match=f"{rows} rows leave out the meta-token, whose id is 63: keep the present 64"
        ):
            model.resize_token_embeddings(rows, pad_to_multiple_of=multiple)
    assert model.resize_token_embeddings().num_embeddings == 64
    assert model.resize_token_embeddings(META, pad_to_multiple_of=8).num_embeddings == 64
    assert model.resize_token_embeddings(70).num_embeddings == model.config.vocab_size == 70
    without = tiny_model(second_attention="none", meta_token_id=None)
    assert without.resize_token_embeddings(10).num_embeddings == 10


def test_rows_that_pad_the_vocabulary() -> None:
    paper = MetaGPT2Config.paper()
    assert (paper.vocab_size, paper.unpadded_vocab_size) == (50304, 50258)
    assert never_generated(paper) == list(range(50257, 50304))
    assert tiny_config(vocab_size=128, meta_token_id=90).unpadded_vocab_size == 128  # unless given
    with pytest.raises(StrictDataclassError, match="meta_token_id is 90, unpadded_vocab_size 90"):
        tiny_config(vocab_size=128, meta_token_id=90, unpadded_vocab_size=90)
    model = tiny_model(vocab_size=128, meta_token_id=90)
    model.resize_token_embeddings(94, pad_to_multiple_of=64)  # after three tokens were added
    assert (model.config.vocab_size, model.config.unpadded_vocab_size) == (128, 94)
    assert never_generated(model.config) == [90, *range(94, 128)]
