"""Models of both callers that forget text or see all of it, and what they should predict, by masks pair by pair."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from metatokens import add_meta_attention, set_text_window
from metatokens.decoder import decoder_of
from tests.model import generating
from tests.model.agreement import TOLERANCE
from tests.model.dense_oracle import DenseOracle
from tests.model.generating import Score
from tests.model.text_window import FULL, SINKS, SMALL, WINDOW, seen_in_blocks
from tests.model.tiny_models import META, tiny_model
from tests.numbers import decoder_roundings, rounding_error
from tests.retrofit.architectures import ROUNDED, base, error, train_like
from tests.retrofit.callers import SETTINGS

RETROFITS = (
    "cohere", "deepseek_v3", "falcon", "gemma", "glm4", "gpt2", "gpt_neox", "gptj", "granite", "llama", "mixtral",
    "olmo2", "opt", "phi", "qwen3", "smollm3", "stablelm", "xglm",
)  # fmt: skip
FEW_RETROFITS = ("gpt2", "gpt_neox", "llama", "mixtral", "opt")
CALLERS = ("rope-meta", "rope-causal", "rope-none", *FEW_RETROFITS)
QUICK_CALLERS = ("rope-meta", "llama")
EOS = 2

EACH_CALLER = pytest.mark.parametrize("caller", CALLERS)
BOTH_CALLERS = pytest.mark.parametrize("caller", QUICK_CALLERS)
# The blocks that see all text; None: there is no text window.
Blocks = Sequence[int] | None
BLOCKS = pytest.mark.parametrize("full", [(), tuple(FULL)], ids=["text_window", "text_full_layers"])
ALL_BLOCKS = pytest.mark.parametrize(
    "full", [None, (), tuple(FULL)], ids=["all text", "window", "full layers"]
)


def forgetful_retrofit(
    name: str, full: Blocks = FULL, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A retrofitted model whose meta-attention has an effect."""
    plain = base(name).to(dtype)
    model = train_like(
        add_meta_attention(plain, meta_token_id=META, heads=2, head_size=16, freeze=False)
    )
    if full is not None:
        set_text_window(model, WINDOW, SINKS, full)
    return model


def forgetful(caller: str, full: Blocks = (), dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A `MetaGPT2` with settings of this name, or a retrofit."""
    if caller not in SETTINGS:
        return forgetful_retrofit(caller, full, dtype or torch.float32)
    fields = SETTINGS[caller] | SMALL
    if full is None:
        fields["text_window"] = None
    elif full:
        fields |= {"num_hidden_layers": 3, "text_full_layers": list(full)}
    return tiny_model(**fields).to(dtype or torch.float64)


shared_forgetful = cache(forgetful)  # for tests that do not change it
shared_remembering = cache(lambda name, dtype: forgetful_retrofit(name, None, dtype))
_oracle = cache(lambda caller, full: DenseOracle(shared_forgetful(caller, full)))


def tolerance_of(model: PreTrainedModel) -> float:
    """How far logits may be from those of a pass under masks, by rounding."""
    if model.dtype == torch.float64:
        return TOLERANCE[model.config.position_embedding]
    return ROUNDED


def assert_differ_by_rounding(logits: Tensor, expected: Tensor) -> None:
    """Logits of texts of 44 tokens at most, (tokens, entries), differ from the expected ones by rounding alone."""
    dtype = logits.dtype
    roundings = decoder_roundings(dtype, blocks=4, width=64, length=44)
    expected_error = rounding_error(dtype, roundings, float(expected.float().std()))
    # The mean, since rounding may send some tokens to another expert.
    assert (logits - expected).float().abs().mean() < expected_error
    assert dtype != torch.float32 or error(logits, expected) < ROUNDED


@torch.no_grad()
def expected_logits(
    caller: str, row: Sequence[int], full: Blocks = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """What `forgetful` should give for a row, (length, entries): a pass under masks that are written pair by pair."""
    masks = seen_in_blocks(shared_forgetful(caller, full), row)
    if caller in SETTINGS:
        return _oracle(caller, full).logits(row, masks)
    model = shared_remembering(caller, dtype)
    with block_masks(model, masks[:, None, None]) as inputs:
        return model(torch.tensor([row]), **inputs).logits[0]


@contextmanager
def block_masks(model: PreTrainedModel, masks: Tensor) -> Iterator[dict[str, Any]]:
    """Give each block of a model that sees everything a mask of its own; yields the other inputs of such a pass.

    Args:
        model: a retrofitted model without a text window.
        masks: (blocks, batch, 1, T, T) bool.
    """
    hidden = torch.finfo(model.dtype).min
    length = masks.shape[-1]

    def with_mask(mask: Tensor, value: Any) -> Any:
        is_mask = (
            isinstance(value, Tensor) and value.ndim == 4 and value.shape[-2:] == mask.shape[-2:]
        )
        return mask if is_mask else value

    def replace_masks(mask: Tensor) -> Any:
        def change(block: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            changed = {name: with_mask(mask, value) for name, value in kwargs.items()}
            return tuple(with_mask(mask, value) for value in args), changed

        return change

    handles = []
    for block, mask in zip(decoder_of(model)[1], masks, strict=True):
        added = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, hidden)
        handles.append(block.register_forward_pre_hook(replace_masks(added), with_kwargs=True))
    try:
        causal = torch.ones(length, length).tril().bool().expand(masks.shape[1], 1, -1, -1)
        yield {
            "attention_mask": torch.zeros(causal.shape, dtype=model.dtype).masked_fill(
                ~causal, hidden
            ),
            "position_ids": torch.arange(length).expand(masks.shape[1], -1),
            "use_cache": False,
        }
    finally:
        for handle in handles:
            handle.remove()


def expected_scores(caller: str, full: Blocks) -> Score:
    """Log probabilities of the next token, which neither is a meta-token nor ends the text."""

    def score(read: list[int]) -> Tensor:
        logits = expected_logits(caller, read, full)[-1]
        scores = logits.log_softmax(dim=-1)
        scores[[META, EOS]] = -torch.inf
        return scores

    return score


def generate_texts(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], **options: Any
) -> list[list[int]]:
    """The new ids for left-padded rows, which do not end early."""
    return generating.generate(model, rows, suppress_tokens=[EOS], **options).tolist()
