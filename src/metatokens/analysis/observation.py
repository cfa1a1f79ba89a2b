"""Record states, attention and logits of a model while it reads one prompt.

Hooks are on the parts that all models share: the blocks, the attention function, which transformers lets a caller
choose by name, and this package's meta-attention modules. So any decoder that uses such a function can be observed;
BLOOM, Falcon, GPT-J, GPT-Neo and MPT are among the few that compute attention themselves.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from metatokens.decoder import decoder_of
from metatokens.errors import UserError
from metatokens.model.attention import CausalAttention, MetaAttention
from metatokens.retrofit.full_heads import TAKE_MASKS_OF_HEADS, MasksOfHeads
from metatokens.tasks.example import Example

_FUNCTION = "metatokens_observed"  # the attention function's name during an observation
TAKE_MASKS_OF_HEADS.add(_FUNCTION)


@dataclass(frozen=True)
class PromptIds:
    """A prompt's ids, without the answer, and its meta-tokens."""

    ids: Tensor  # (length,) int64
    is_meta: Tensor  # (length,) bool
    # The meta-tokens' positions, ascending; there is at least one, and the last has text before it.
    metas: list[int]
    answer: int  # the answer's first id

    @classmethod
    def of(cls, example: Example, meta_token_id: int) -> "PromptIds":
        """The prompt of an example.

        Raises:
            UserError: if it has no meta-token with text before it.
        """
        ids = torch.tensor(example.input_ids[: example.answer_start])
        is_meta = ids == meta_token_id
        metas = is_meta.nonzero()[:, 0].tolist()
        if not metas or is_meta[: metas[-1]].all():
            raise UserError(
                "an analysed prompt has no meta-token of the model's after some text; each needs one."
            )
        return cls(ids, is_meta, metas, example.input_ids[example.answer_start])

    def text_before(self, position: int) -> int | None:
        """The position of the nearest text token before a position; None if there is none."""
        return next((i for i in range(position - 1, -1, -1) if not self.is_meta[i]), None)


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, keys and values of one attention module, each (heads, rows, head size) float64.

    Positions are applied to queries and keys. Shared key and value heads are repeated.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: (
        Tensor  # (rows,) int64, the rows' positions in the prompt: all of them, or the meta-tokens'
    )
    scaling: float  # of the logits, mostly 1 / sqrt(head size)
    softcap: float | None = None  # c, if a logit x becomes c tanh(x / c), as in Gemma 2
    # (heads or 1, rows, rows) float64, added to the logits; None is a causal mask
    mask: Tensor | None = None

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """The inputs of softmax, q k^T / sqrt(d), and -inf for masked keys: (heads, n, rows) float64.

        `rows`, (n,) int64, selects the queries; by default all.
        """
        if rows is None:
            rows = torch.arange(len(self.positions), device=self.positions.device)
        logits = self.queries[:, rows] @ self.keys.transpose(1, 2) * self.scaling
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.mask is not None:
            return logits + self.mask[:, rows]
        later = torch.arange(len(self.positions), device=rows.device) > rows[:, None]
        return logits.masked_fill(later, -torch.inf)

    def weights(self) -> Tensor:
        """Attention weights, (heads, rows, rows) float64."""
        return self.logits().softmax(dim=-1)


@dataclass(frozen=True)
class Observation:
    """The record of one forward pass.

    Attributes:
        states: the residual stream before the first block and after each, (length, width) float64.
        attention: by module, `attention` or `second_attention`, and number of the block.
        logits: (length, vocabulary); the meta-token's own mean nothing.
    """

    states: list[Tensor]
    attention: dict[tuple[str, int], AttentionInputs]
    logits: Tensor


@torch.no_grad()
def observe(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Observation:
    """Run a model on one prompt, and record the pass.

    Args:
        model: any decoder, with or without meta-tokens; it is put into evaluation mode, and not changed otherwise.
        ids: (length,) int64.
        mask: (1, 1, length, length), True where a query sees a key; by default attention is causal.

    Returns:
        The states around each block, the inputs of each attention, and the logits.

    Raises:
        UserError: if the attention of the model cannot be read.
    """
    model.eval()
    _, blocks = decoder_of(model)
    recorder = _Recorder(model, len(ids))
    added = None  # to the logits, as `eager_mask` makes masks
    if mask is not None:
        added = (~mask).to(model.device, model.dtype) * torch.finfo(model.dtype).min
    with ExitStack() as hooks:
        hooks.enter_context(_attending(model, recorder.attend))
        for block in blocks:
            hooks.enter_context(
                block.register_forward_pre_hook(recorder.note_state_before, with_kwargs=True)
            )
        hooks.enter_context(blocks[-1].register_forward_hook(recorder.note_last_state))
        for module in model.modules():
            if isinstance(module, MetaAttention):
                hooks.enter_context(
                    module.register_forward_pre_hook(recorder.note_meta_attention, with_kwargs=True)
                )
        logits = model(ids[None].to(model.device), attention_mask=added, use_cache=False).logits[0]
    if "attention" not in {module for module, _ in recorder.attention}:
        raise _unreadable(model)
    return Observation(recorder.states, recorder.attention, logits)


class _Recorder:
    """The hooks of one pass, and what they noted; see `Observation`."""

    def __init__(self, model: PreTrainedModel, length: int):
        self.states: list[Tensor] = []
        self.attention: dict[tuple[str, int], AttentionInputs] = {}
        self._model_class = type(model).__name__
        self._positions = torch.arange(length)

    def note_state_before(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        self.states.append(hidden_states[0].double())

    def note_last_state(self, block: nn.Module, args: tuple, output: Any) -> None:
        hidden_states = output[0] if isinstance(output, tuple | ModelOutput) else output
        self.states.append(hidden_states[0].double())

    def note_meta_attention(
        self, module: MetaAttention, args: tuple[Tensor], kwargs: dict[str, Any]
    ) -> None:
        if module.needs_all_rows:
            raise UserError("a second attention that needs all rows cannot be observed.")
        projected = module.project(args[0], kwargs["rotary"], log_keys=kwargs.get("log_keys"))
        queries, keys, values = (tensor[0].double() for tensor in projected)
        inputs = AttentionInputs(queries, keys, values, kwargs["rows"].indices[0], module.scaling)
        self.attention["second_attention", module.block] = inputs

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | MasksOfHeads | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """A plain attention function with the interface of transformers."""
        if kwargs.get("s_aux") is not None:
            raise UserError(
                f"the attention of a {self._model_class} has sinks, which cannot be observed."
            )
        queries_per_key = query.shape[1] // key.shape[1]
        if isinstance(attention_mask, MasksOfHeads):
            attention_mask = attention_mask.of_each_head(key.shape[1])
            attention_mask = attention_mask.repeat_interleave(queries_per_key, dim=1)
        inputs = AttentionInputs(
            queries=query[0].double(),
            keys=key[0].repeat_interleave(queries_per_key, dim=0).double(),
            values=value[0].repeat_interleave(queries_per_key, dim=0).double(),
            positions=self._positions.to(query.device),
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            mask=None if attention_mask is None else _added_mask(attention_mask[0]),
        )
        is_second = isinstance(module, CausalAttention) and module.is_second
        self.attention["second_attention" if is_second else "attention", len(self.states) - 1] = (
            inputs
        )
        attended = inputs.weights().to(value.dtype) @ inputs.values.to(value.dtype)
        return attended.transpose(0, 1)[None], None


def _added_mask(mask: Tensor) -> Tensor:
    """A mask that is added to logits, in float64, where -inf takes the place of the smallest number of its type."""
    wide = mask.double()
    return wide.masked_fill(wide <= torch.finfo(mask.dtype).min, -torch.inf)


@contextmanager
def _attending(model: PreTrainedModel, attend: Any) -> Iterator[None]:
    """Have a model use `attend` as its attention function."""
    if not model._can_set_attn_implementation():
        raise _unreadable(model)
    before = model.config._attn_implementation
    AttentionMaskInterface.register(_FUNCTION, eager_mask)
    ALL_ATTENTION_FUNCTIONS[_FUNCTION] = attend
    try:
        model.set_attn_implementation(_FUNCTION)
        yield
    finally:  # a registered function would keep the model and the record in memory
        model.set_attn_implementation(before)
        del ALL_ATTENTION_FUNCTIONS[_FUNCTION]


def _unreadable(model: PreTrainedModel) -> UserError:
    return UserError(
        f"a {type(model).__name__} computes its attention itself, so it cannot be observed; only the analysis "
        "rate-distortion is possible."
    )
