"""Sequences packed into one row of a retrofitted model: which bases keep them apart, and which are refused."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from metatokens.errors import UserError
from tests.gradients import gradients_far
from tests.numbers import decoder_roundings, rounding_bound
from tests.retrofit.architectures import (
    META,
    ROUNDED,
    ROUNDED_GRADIENT,
    base,
    error,
    logits,
    retrofitted,
    shared,
)
from tests.retrofit.packed import SEQUENCES, alone, block_mask, packed

NAMES = (
    "cohere2", "deepseek_v3", "gemma3_text", "gpt2", "gpt_neo", "gpt_neox", "gptj", "granite", "llama", "mistral",
    "mixtral", "modernbert-decoder", "olmo2", "phi", "qwen3",
)  # fmt: skip
JOINED = ["biogpt", "gpt_oss", "opt"]
# Which keeps the sequences of this one apart.
if Version(transformers.__version__) < Version("5.24"):
    JOINED.append("falcon")
JOINS = "this base lets sequences that are packed into one row see one another"


@pytest.mark.quick(name=["gpt_neo", "mixtral", "modernbert-decoder", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_packed_is_alone(name: str, dtype: torch.dtype) -> None:
    if name == "mixtral" and dtype == torch.bfloat16:
        pytest.skip("rounding may send a token to another expert, in the base alone too")
    model = retrofitted(name, dtype=dtype)
    together, apart = model(**packed()).logits[..., :META], alone(model)
    bounds = (ROUNDED, ROUNDED_GRADIENT)
    if dtype == torch.bfloat16:  # logits have a standard deviation of less than 1
        roundings = decoder_roundings(dtype, blocks=4, width=64, length=12)
        bounds = (rounding_bound(dtype, roundings), rounding_bound(dtype, 2 * roundings))

    assert error(together.detach(), apart.detach()) < bounds[0]
    assert gradients_far(model, together, apart) < bounds[1]


@torch.no_grad()
def test_whether_or_not_there_is_a_meta_token_and_a_cache() -> None:
    """A base, which makes a cache in evaluation, would take the row for one sequence then."""
    model = shared("llama")
    texts = [[7 if token == META else token for token in sequence] for sequence in SEQUENCES]
    for sequences in (SEQUENCES, texts):
        out = model(**packed(sequences), use_cache=True)
        assert out.past_key_values is None
        assert error(out.logits[..., :META], alone(model, sequences)) < ROUNDED
    plain = base("llama")(**packed(texts), use_cache=False).logits[..., :META]

    assert error(model(**packed(texts)).logits[..., :META], plain) == 0.0


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
def test_positions_with_gaps_are_what_they_are_to_the_base(use_cache: bool) -> None:
    """transformers takes a gap for the begin of a sequence where there is no cache, and else for a distance."""
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    inputs = {"position_ids": torch.tensor([[0, 1, 2, 9, 10, 30]]), "use_cache": use_cache}

    got, expected = (model(ids, **inputs).logits for model in (shared("llama"), base("llama")))

    assert error(got[..., :META], expected[..., :META]) < ROUNDED


@torch.no_grad()
def test_four_axes_of_positions() -> None:
    """Multimodal models take the positions of text first, and three axes of positions after it."""
    model, batch = shared("qwen3_vl:multimodal"), packed()
    batch["position_ids"] = batch["position_ids"].expand(4, 1, -1)
    assert error(model(**batch).logits[..., :META], alone(model)) < ROUNDED


@torch.no_grad()
@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_a_mask_beside_a_window_that_slides(name: str) -> None:
    """It is refused unless there is a mask for each kind of layer, as Gemma 3 takes them."""
    model, mask = shared(name), block_mask()
    batch = {key: packed()[key] for key in ("input_ids", "position_ids")}

    with pytest.raises(
        UserError, match="does not define which meta-tokens see one another; give a dictionary"
    ):
        model(**batch, attention_mask=mask, use_cache=False)
    if name == "gemma3_text":
        masks = {
            "full_attention": mask,
            "sliding_attention": mask.triu(1 - model.config.sliding_window),
        }
        got = model(**batch, attention_mask=masks, use_cache=False).logits[..., :META]
        assert error(got, alone(model)) < ROUNDED


@pytest.mark.quick(is_exported=[False])
@torch.no_grad()
@pytest.mark.parametrize("is_exported", [False, True], ids=["compiled", "exported"])
def test_a_graph_of_a_base_that_does_not_keep_them_apart_refuses_them(is_exported: bool) -> None:
    torch._dynamo.reset()
    model, batch = shared("opt"), packed()
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"], "use_cache": False}
    positions = torch.arange(batch["input_ids"].shape[1])[None]
    run: Any = torch.compile(model, backend="eager", fullgraph=True)
    if is_exported:
        run = torch.export.export(
            model, (), {**inputs, "position_ids": positions}, strict=False
        ).module()
    as_one_sequence = run(**inputs, position_ids=positions).logits[..., :META]

    assert (
        error(as_one_sequence, logits(model, batch["input_ids"], position_ids=positions)) < ROUNDED
    )
    with pytest.raises(RuntimeError, match=JOINS):
        run(**inputs, position_ids=batch["position_ids"])


@pytest.mark.quick(attention=["sdpa", "flex_attention"])
@pytest.mark.filterwarnings("ignore")  # torch's own, of flex attention
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("name", JOINED)
@torch.no_grad()
def test_a_base_that_does_not_keep_them_apart_is_refused(name: str, attention: str) -> None:
    model = retrofitted(name)
    model.set_attn_implementation("eager" if name in ("gpt_oss", "falcon") else attention)
    with torch.compiler.set_stance("force_eager"):  # compiling flex attention would take minutes
        with pytest.raises(UserError, match=JOINS):
            model(**packed())
        got = model(**packed(SEQUENCES[4:5])).logits[..., :META]
        assert error(got, logits(model, torch.tensor(SEQUENCES[4:5]))) < ROUNDED


def test_a_base_with_blocks_with_a_state_is_refused() -> None:
    batch = packed()
    with pytest.raises(
        UserError, match="this base has blocks with a state; give each packed sequence its own row"
    ):
        shared("qwen3_next")(**batch)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_a_base_that_ignores_positions_is_refused(name: str) -> None:
    model = shared(name)
    with pytest.raises(UserError, match="this base ignores position_ids, and so packed sequences"):
        model(**packed())
    with pytest.raises(UserError, match="this base ignores position_ids, and so packed sequences"):
        model(torch.tensor([[5, META, 6, META]]), position_ids=torch.tensor([[0, 1, 40, 41]]))
