"""The forward pass of a decoder: what it hands to its blocks and their hooks.

The state is thread-local, so several threads may run one model at once.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from metatokens.model.attention import AttentionFunction
from metatokens.model.positions import Rotary
from metatokens.model.rows import DenseRows, GatheredRows


class ForwardContext(NamedTuple):
    """The rows of meta-attention in one forward pass, and what it needs with them.

    Attributes:
        rows: those of meta-tokens; all rows where an engine owns the batch, the cache has a fixed size, or a graph
            without a cache is compiled.
        rotary: rotary tables for their positions.
        mask: (batch, 1, length, total), which positions each position may attend to; None unless the model was given a
            mask of four dimensions, or one was made of all positions.
        attend: the attention function of the base where an engine owns the batch; otherwise None.
        engine: as in `AttentionKwargs`.
    """

    rows: GatheredRows | DenseRows
    rotary: Rotary
    mask: Tensor | None
    attend: AttentionFunction | None
    engine: Mapping[str, Any]


@dataclass(slots=True)
class Pass:
    """What one pass of a decoder hands to its blocks.

    Attributes:
        context: that of meta-attention; None if there are no meta-tokens.
        sequences: numbers of the packed sequences, until the first block's mask is checked.
        masks: the mask that every block is given, and the one of the blocks that see all text.
    """

    context: ForwardContext | None = None
    sequences: Tensor | None = None
    masks: tuple[Any, Any] | None = None


class _State:
    """The innermost pass that runs at present, and the block whose injection point comes next.

    Passes nest, since a hook may run a model inside a pass of another model, or of the same one. So each pass and each
    block puts back what it found here when it ends, by an exception too.

    Attributes:
        forward_pass: the pass; None outside all passes.
        block: the block with its input, context and cache; None if it has no meta-token.
    """

    def __init__(self) -> None:
        # Not as attributes of the class: a graph that sees an object's first attribute is compiled again.
        self.forward_pass: Pass | None = None
        self.block: tuple[Any, Tensor, ForwardContext, Cache | None] | None = None


class _Thread(_State, threading.local):
    """The state of one thread, which `threading.local` initialises in each."""


thread, traced = _Thread(), _State()


def current() -> _State:
    """The state; in a graph of the whole pass, one that torch.compile can trace."""
    return traced if torch.compiler.is_compiling() and traced.forward_pass is not None else thread
