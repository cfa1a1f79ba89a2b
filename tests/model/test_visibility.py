"""Who sees whom: each kind of pass, of `MetaGPT2` and of a retrofitted Llama, pair by pair against a slow rule.

A model of one block reads a row once for each of its tokens, with the embedding of that token changed. A query sees a
key if the query's logits change. One of the two attentions adds nothing, so that the other is looked at alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from metatokens import add_meta_attention, set_text_window
from tests.model.tiny_models import META, randomize, tiny_model

LENGTH, WINDOW, SINKS = 14, 3, 2
IS_META = [token in (3, 4, 8, 13) for token in range(LENGTH)]
CUTS = (0, 5, 6, 7, 11, LENGTH)  # of a row that is read in pieces


@dataclass(frozen=True)
class Pass:
    """A kind of pass.

    Attributes:
        padding: the tokens that are padding.
        sequences: where a packed sequence begins.
        hidden: pairs of query and key that a mask of four dimensions hides.
        cache: makes the cache with which the row is read in pieces; None: it is read at once.
        further_columns: how many columns the mask has for tokens to come.
    """

    padding: Sequence[int] = ()
    sequences: Sequence[int] = (0,)
    hidden: Sequence[tuple[int, int]] = ()
    cache: Callable[[Any], Any] | None = None
    further_columns: int = 0

    def sees(self, query: int, key: int, window: int | None) -> bool:
        """The rule, written from its sentences."""
        if key > query or key in self.padding or (query, key) in self.hidden:
            return False
        if any(key < first <= query for first in self.sequences):
            return False
        if window is None or IS_META[key]:
            return True
        positions = self.positions()
        return positions[key] < SINKS or positions[query] - positions[key] < window

    def positions(self) -> list[int]:
        """Each real token's position in its sequence."""
        positions: list[int] = []
        reached = 0
        for token in range(LENGTH):
            if token in self.sequences:
                reached = 0
            positions.append(reached)
            reached += token not in self.padding
        return positions

    def inputs(self) -> dict[str, Tensor]:
        """What a model is given besides the embeddings."""
        if self.hidden:
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            for pair in self.hidden:
                mask[pair] = False
            return {"attention_mask": mask[None, None]}
        if len(self.sequences) > 1:
            return {"position_ids": torch.tensor([self.positions()])}
        if not self.padding and not self.further_columns:
            return {}
        mask = torch.ones(1, LENGTH + self.further_columns, dtype=torch.long)
        mask[:, list(self.padding)] = 0
        return {"attention_mask": mask}


def growing(config: Any) -> DynamicCache:
    """A cache that grows."""
    return DynamicCache(config=config)


def fixed(config: Any) -> StaticCache:
    """A cache of a fixed size, with more room than is needed."""
    return StaticCache(config=config, max_cache_len=LENGTH + 6)


LEFT, RIGHT, HOLE = (0, 1, 2), (12, 13), (5, 6)
AT_ONCE = {
    "plain": Pass(),
    "padded on the left": Pass(padding=LEFT),
    "padded on the right": Pass(padding=RIGHT),
    "a mask with a hole": Pass(padding=HOLE),
    "packed": Pass(sequences=(0, 6)),
}
IN_PIECES = {
    "a cache that grows": Pass(cache=growing),
    "a cache that grows, padded": Pass(cache=growing, padding=LEFT),
    "a cache that grows, a hole": Pass(cache=growing, padding=HOLE),
    "a cache that grows, columns to come": Pass(cache=growing, padding=LEFT, further_columns=3),
    "a cache of a fixed size": Pass(cache=fixed),
    "a cache of a fixed size, padded": Pass(cache=fixed, padding=LEFT, further_columns=6),
}
MASKED = {
    "a mask of four dimensions": Pass(hidden=[(9, 3), (9, 8), (8, 2), (13, 4)]),
    "a mask of four dimensions, in pieces": Pass(
        hidden=[(9, 3), (9, 8), (8, 2), (13, 4)], cache=growing
    ),
}
ALL = AT_ONCE | IN_PIECES | MASKED
# Without a window a Llama itself refuses columns to come, unless there is a cache.
GROWING = {name: case for name, case in IN_PIECES.items() if case.cache is growing}
NOT_PACKED = {name: case for name, case in AT_ONCE.items() if len(case.sequences) == 1}
WINDOWED = NOT_PACKED | GROWING | {"columns to come": Pass(padding=LEFT, further_columns=3)}


def meta_gpt2(attention: str) -> PreTrainedModel:
    """A `MetaGPT2` of one block, in which one attention alone adds something."""
    model = tiny_model(num_hidden_layers=1, bias=False)
    block = model.model.layers[0]
    _silence((block.second_attention if attention == "causal" else block.attention).out_proj)
    return model


def llama(attention: str) -> PreTrainedModel:
    """The same of a retrofitted Llama."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    base = (
        LlamaForCausalLM(LlamaConfig(vocab_size=META + 1, num_hidden_layers=1, **sizes))
        .double()
        .eval()
    )
    model = add_meta_attention(base, meta_token_id=META, heads=2, head_size=8, freeze=False)
    randomize(model)
    block = model.model.layers[0]
    _silence(
        block.meta_attention.attention.out_proj if attention == "causal" else block.self_attn.o_proj
    )
    return model


def _silence(projection: torch.nn.Linear) -> None:
    torch.nn.init.zeros_(projection.weight)


@cache
def model_of(caller: Callable[[str], PreTrainedModel], attention: str) -> PreTrainedModel:
    """A model made once; each test sets the window that it needs."""
    return caller(attention)


@torch.no_grad()
def seen(model: PreTrainedModel, case: Pass) -> Tensor:
    """Which keys each query sees, (T, T) bool, itself included."""
    rows = LENGTH + 1
    generator = torch.Generator().manual_seed(0)
    width = model.config.hidden_size
    embeddings = torch.randn(1, LENGTH, width, generator=generator, dtype=torch.float64).repeat(
        rows, 1, 1
    )
    for key in range(LENGTH):  # the last row has nothing changed
        embeddings[key, key] += torch.randn(width, generator=generator, dtype=torch.float64)
    is_meta = torch.tensor([IS_META]).expand(rows, -1)
    inputs = {
        name: tensor.expand(rows, *tensor.shape[1:]) for name, tensor in case.inputs().items()
    }
    if case.cache is None:
        logits = model(
            inputs_embeds=embeddings, meta_token_mask=is_meta, use_cache=False, **inputs
        ).logits
    else:
        logits = _read_in_pieces(model, case, embeddings, is_meta, inputs.get("attention_mask"))
    changes = (logits[:-1] - logits[-1]).abs().amax(dim=-1)
    return (changes > 1e-9).T  # effects are above 1e-4, and hidden keys have a weight of exactly 0


def _read_in_pieces(
    model: PreTrainedModel, case: Pass, embeddings: Tensor, is_meta: Tensor, mask: Tensor | None
) -> Tensor:
    assert case.cache is not None
    filled = case.cache(model.config)
    pieces = []
    for start, end in pairwise(CUTS):
        piece = {
            "inputs_embeds": embeddings[:, start:end],
            "meta_token_mask": is_meta[:, start:end],
        }
        if mask is not None and mask.ndim == 4:
            piece["attention_mask"] = mask[:, :, start:end, :end]
        elif mask is not None:
            piece["attention_mask"] = mask if case.further_columns else mask[:, :end]
        pieces.append(model(**piece, past_key_values=filled, use_cache=True).logits)
    return torch.cat(pieces, dim=1)


def assert_follows_the_rule(
    model: PreTrainedModel, case: Pass, attention: str, window: int | None
) -> None:
    """Each real query sees what the rule says, and itself."""
    is_seen = seen(model, case)
    for query in range(LENGTH):
        if query in case.padding:
            continue
        for key in range(LENGTH):
            is_read = attention == "causal" or (IS_META[query] and IS_META[key])
            expected = key == query or (is_read and case.sees(query, key, window))
            assert bool(is_seen[query, key]) == expected, f"query {query}, key {key}"


CALLERS = pytest.mark.parametrize("caller", [meta_gpt2, llama])
ATTENTIONS = pytest.mark.parametrize("attention", ["causal", "meta"])


@CALLERS
@ATTENTIONS
@pytest.mark.parametrize("name", ALL)
def test_all_text(caller: Callable[[str], PreTrainedModel], attention: str, name: str) -> None:
    model = model_of(caller, attention)
    set_text_window(model, None)
    assert_follows_the_rule(model, ALL[name], attention, None)


@CALLERS
@ATTENTIONS
@pytest.mark.parametrize("name", WINDOWED)
def test_a_text_window(caller: Callable[[str], PreTrainedModel], attention: str, name: str) -> None:
    model = model_of(caller, attention)
    set_text_window(model, WINDOW, SINKS, [])
    assert_follows_the_rule(model, WINDOWED[name], attention, WINDOW)


@CALLERS
@ATTENTIONS
@pytest.mark.parametrize("name", WINDOWED)
def test_a_full_block_of_a_model_with_a_text_window(
    caller: Callable[[str], PreTrainedModel], attention: str, name: str
) -> None:
    model = model_of(caller, attention)
    set_text_window(model, WINDOW, SINKS, [0])
    assert_follows_the_rule(model, WINDOWED[name], attention, None)


@CALLERS
def test_eager_attention_sees_what_the_default_function_sees(
    caller: Callable[[str], PreTrainedModel],
) -> None:
    model = caller("causal")
    model.set_attn_implementation("eager")
    set_text_window(model, WINDOW, SINKS, [])
    assert_follows_the_rule(model, AT_ONCE["padded on the left"], "causal", WINDOW)
