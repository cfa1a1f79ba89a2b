"""Sequences packed into one row of a retrofitted model, against each of them alone: logits and gradients."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, DynamicCache, PreTrainedModel, StaticCache

from metatokens import set_text_window
from metatokens.errors import UserError
from tests.checkpointing import checkpoint_activations
from tests.gradients import gradients_far
from tests.numbers import decoder_roundings, rounding_bound
from tests.retrofit.architectures import META, ROUNDED, ROUNDED_GRADIENT, base, error, logits, retrofitted

NAMES = (
    "cohere2", "deepseek_v3", "gemma3_text", "gpt2", "gpt_neo", "gpt_neox", "gptj", "granite", "llama", "mistral",
    "mixtral", "modernbert-decoder", "olmo2", "phi", "qwen3",
)  # fmt: skip
JOINED = ["biogpt", "gpt_oss", "opt"]
if Version(transformers.__version__) < Version("5.24"):  # which keeps the sequences of this one apart
    JOINED.append("falcon")
WINDOWED = ("gpt2", "gpt_neox", "llama", "opt")  # `opt` takes the masks of a text window, and makes none for itself
# Without a meta-token; beginning with one; of one token.
SEQUENCES = [
    [5, 6, 7, 8, 9, 10],
    [META, 11, 12, META, 13, 14, 15, META, 16],
    [META],
    [17],
    [18, 19, META, META, 20, 21, 22, 23, 24, 25, META, 26],
    [27, 28, 29, 30],
]


def packed(sequences: Sequence[Sequence[int]] = SEQUENCES) -> dict[str, Tensor]:
    """What transformers' collator makes of them, without labels."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": list(one)} for one in sequences])
    return {name: value for name, value in batch.items() if name != "labels"}


def apart(model: PreTrainedModel, sequences: Sequence[Sequence[int]] = SEQUENCES) -> Tensor:
    """The same logits, (1, tokens, entries), from a pass for each sequence."""
    read = [model(torch.tensor([one]), use_cache=False).logits[..., :META] for one in sequences]
    return torch.cat(read, dim=1)


def differences(model: PreTrainedModel) -> tuple[float, float]:
    """The largest difference of logits, and how far gradients are apart."""
    together, expected = model(**packed()).logits[..., :META], apart(model)
    return error(together.detach(), expected.detach()), gradients_far(model, together, expected)


@pytest.mark.parametrize("name", NAMES)
def test_packed_is_apart(name: str) -> None:
    of_logits, of_gradients = differences(retrofitted(name))
    assert of_logits < ROUNDED
    assert of_gradients < ROUNDED_GRADIENT
    of_logits, of_gradients = differences(retrofitted(name, dtype=torch.bfloat16))
    if name != "mixtral":  # rounding may send a token to another expert, in the base alone too
        roundings = decoder_roundings(torch.bfloat16, blocks=4, width=64, length=12)
        assert of_logits < rounding_bound(torch.bfloat16, roundings)  # logits have a standard deviation of less than 1
        assert of_gradients < rounding_bound(torch.bfloat16, 2 * roundings)


@pytest.mark.parametrize("full_layers", [(), (1,)])
@pytest.mark.parametrize("name", WINDOWED)
def test_packed_is_apart_where_text_is_forgotten(name: str, full_layers: tuple[int, ...]) -> None:
    model = retrofitted(name)
    set_text_window(model, 3, 1, full_layers)
    of_logits, of_gradients = differences(model)
    assert of_logits < ROUNDED
    assert of_gradients < ROUNDED_GRADIENT


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
@torch.no_grad()
def test_a_sequence_begins_where_positions_jump_too(name: str) -> None:
    """As it does for the masks of transformers."""
    model, positions = retrofitted(name), torch.tensor([[*range(9), *range(40, 49)]])
    ids = torch.tensor([[5, META, 6, 7, META, 8, 9, META, 10] * 2])
    found = model(ids, position_ids=positions, use_cache=False).logits
    for start, end in ((0, 9), (9, 18)):
        alone = model(ids[:, start:end], position_ids=positions[:, start:end], use_cache=False).logits
        assert error(found[:, start:end], alone) < ROUNDED


@torch.no_grad()
def test_whether_or_not_there_is_a_meta_token_and_a_cache() -> None:
    """A base, which makes a cache in evaluation, would take the row for one sequence then."""
    model, texts = retrofitted("llama"), [[7 if id_ == META else id_ for id_ in one] for one in SEQUENCES]
    for sequences in (SEQUENCES, texts):
        out = model(**packed(sequences), use_cache=True)
        assert out.past_key_values is None
        assert error(out.logits[..., :META], apart(model, sequences)) < ROUNDED
    plain = base("llama")(**packed(texts), use_cache=False).logits[..., :META]
    assert error(model(**packed(texts)).logits[..., :META], plain) == 0.0


def test_checkpointed_activations_and_eager_attention() -> None:
    model = retrofitted("llama").train()
    model.set_attn_implementation("eager")
    checkpoint_activations(model, use_reentrant=False)
    assert gradients_far(model, model(**packed()).logits[..., :META], apart(model)) < ROUNDED_GRADIENT


@pytest.mark.quick(window=[3])
@torch.no_grad()
@pytest.mark.parametrize(("window", "full_layers"), [(None, ()), (3, ()), (3, (1,))])
def test_a_compiled_model(window: int | None, full_layers: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    model = retrofitted("llama")
    set_text_window(model, window, 1, full_layers)
    got = torch.compile(model, backend="eager")(**packed(), use_cache=False).logits[..., :META]
    assert error(got, apart(model)) < ROUNDED


@pytest.mark.quick(is_exported=[False])
@torch.no_grad()
@pytest.mark.parametrize("is_exported", [False, True], ids=["compiled", "exported"])
def test_a_graph_of_a_base_that_does_not_keep_them_apart_refuses_them(is_exported: bool) -> None:
    torch._dynamo.reset()
    model, batch = retrofitted("opt"), packed()
    given: dict[str, Any] = {"input_ids": batch["input_ids"], "use_cache": False}
    one = torch.arange(batch["input_ids"].shape[1])[None]
    run: Any = torch.compile(model, backend="eager", fullgraph=True)
    if is_exported:
        run = torch.export.export(model, (), {**given, "position_ids": one}, strict=False).module()
    got = run(**given, position_ids=one).logits[..., :META]
    assert error(got, logits(model, batch["input_ids"], position_ids=one)) < ROUNDED
    with pytest.raises(RuntimeError, match="this base lets sequences that are packed into one row see one another"):
        run(**given, position_ids=batch["position_ids"])


@torch.no_grad()
def test_four_axes_of_positions() -> None:
    """Multimodal models take the positions of text first, and three axes of positions after it."""
    model, batch = retrofitted("qwen3_vl:multimodal"), packed()
    batch["position_ids"] = batch["position_ids"].expand(4, 1, -1)
    assert error(model(**batch).logits[..., :META], apart(model)) < ROUNDED


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # torch's own, of flex attention
def test_flex_attention() -> None:
    model, other = retrofitted("llama"), retrofitted("opt")
    expected = apart(model)
    for one in (model, other):
        one.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):  # compiling flex attention would take minutes
        assert error(model(**packed()).logits[..., :META], expected) < ROUNDED
        with pytest.raises(UserError, match="this base lets sequences that are packed into one row see one another"):
            other(**packed())


def test_blocks_with_a_state_need_more_than_positions() -> None:
    model, batch = retrofitted("qwen3_next"), packed()
    with pytest.raises(UserError, match="keep packed sequences apart by cu_seq_lens_q and seq_idx alone"):
        model(batch["input_ids"], position_ids=batch["position_ids"])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", JOINED)
def test_a_base_that_does_not_keep_them_apart_is_refused(name: str, attention: str) -> None:
    model = retrofitted(name)
    model.set_attn_implementation("eager" if name == "gpt_oss" else attention)
    with pytest.raises(UserError, match="this base lets sequences that are packed into one row see one another"):
        model(**packed())
    one = packed(SEQUENCES[4:5])
    assert error(model(**one).logits[..., :META].detach(), logits(model, torch.tensor(SEQUENCES[4:5]))) < ROUNDED


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_a_base_that_ignores_positions_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="this base ignores position_ids, and so packed sequences"):
        retrofitted(name)(**packed())
    with pytest.raises(UserError, match="this base ignores position_ids, and so packed sequences"):
        retrofitted(name)(torch.tensor([[5, META, 6, META]]), position_ids=torch.tensor([[0, 1, 40, 41]]))


def test_what_would_be_wrong_is_refused(tmp_path: Path) -> None:
    retrofitted("llama").save_pretrained(tmp_path)
    model, batch = AutoModelForCausalLM.from_pretrained(tmp_path), packed()
    with pytest.raises(UserError, match="sequences packed into one row cannot have a cache"):
        model(**batch, past_key_values=DynamicCache())
    with pytest.raises(UserError, match="sequences packed into one row cannot have a cache"):
        model(**batch, past_key_values=StaticCache(model.config, max_cache_len=64))
    for run in (model, torch.compile(model, backend="eager")):
        with pytest.raises(UserError, match="need position_ids that start again with each, not cu_seq_lens_q alone"):
            run(batch["input_ids"], cu_seq_lens_q=batch["cu_seq_lens_q"], use_cache=False)
