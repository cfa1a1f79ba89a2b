"""Record states, attention and logits of a model while it reads one prompt.

Hooks are on the parts that all models share: the blocks, the attention function, which transformers lets a caller
choose by name, and this package's meta-attention modules. So any decoder that uses such a function can be observed;
BLOOM, Falcon, GPT-J, GPT-Neo and MPT are among the few that compute attention themselves.
"""

from collections.abc import Callable, Iterable, Iterator
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
from metatokens.tasks.example import Example

_FUNCTION = "metatokens_observed"  # the attention function's name during an observation


@dataclass(frozen=True, slots=True)
class PromptIds:
    """A prompt's ids, without the answer, and its meta-tokens."""

    ids: Tensor  # (length,) int64
    is_meta: Tensor  # (length,) bool
    metas: list[int]  # the meta-tokens' positions, ascending; there is at least one, and the last has text before it
    answer: int  # the answer's first id

    @classmethod
    def of(cls, example: Example, meta_token_id: int | None) -> "PromptIds":
        """The prompt of an example.

        Raises:
            UserError: if it has no meta-token with text before it.
        """
        ids = torch.tensor(example.input_ids[: example.answer_start])
        is_meta = ids == meta_token_id if meta_token_id is not None else torch.zeros_like(ids, dtype=torch.bool)
        metas = is_meta.nonzero()[:, 0].tolist()
        if not metas or is_meta[: metas[-1]].all():
            raise UserError("an analysed prompt has no meta-token of the model's after some text; each needs one.")
        return cls(ids, is_meta, metas, example.input_ids[example.answer_start])

    def text_before(self, position: int) -> int | None:
        """The position of the nearest text token before a position; None if there is none."""
        return next((i for i in range(position - 1, -1, -1) if not self.is_meta[i]), None)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Queries, keys and values of one attention module, each (heads, rows, head size) float64.

    Positions are applied to queries and keys. Shared key and value heads are repeated.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor  # (rows,) int64, the rows' positions in the prompt: all of them, or the meta-tokens'
    scaling: float  # of the logits, mostly 1 / sqrt(head size)
    softcap: float | None = None  # c, if a logit x becomes c tanh(x / c), as in Gemma 2
    mask: Tensor | None = None  # (rows, rows) float64, added to the logits; None is a causal mask

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
            return logits + self.mask[rows]
        later = torch.arange(len(self.positions), device=rows.device) > rows[:, None]
        return logits.masked_fill(later, -torch.inf)

    def weights(self) -> Tensor:
        """Attention weights, (heads, rows, rows) float64."""
        return self.logits().softmax(dim=-1)


@dataclass(frozen=True, slots=True)
class Observation:
    """The record of one forward pass.

    Attributes:
        states: the residual stream before the first block and after each, (length, width) float64.
        attention: by module, `attention` or `second_attention`, and number of the block.
        logits: (length, vocabulary); the meta-token's own mean nothing.
        outputs: of the requested submodules, by name, without the batch dimension.
    """

    states: list[Tensor]
    attention: dict[tuple[str, int], AttentionInputs]
    logits: Tensor
    outputs: dict[str, Tensor]


@torch.no_grad()
def observe(model: PreTrainedModel, ids: Tensor, modules: Iterable[str] = ()) -> Observation:
    """Run a model on one prompt, and record the pass.

    Args:
        model: any decoder, with or without meta-tokens; it is put into evaluation mode, and not changed otherwise.
        ids: (length,) int64.
        modules: names of submodules, as in `model.named_modules()`, whose outputs are kept.

    Returns:
        The states around each block, the inputs of each attention, the logits, and the outputs of `modules`.

    Raises:
        UserError: if the attention of the model cannot be read.
    """
    model.eval()
    _, blocks = decoder_of(model)
    states: list[Tensor] = []
    attention: dict[tuple[str, int], AttentionInputs] = {}
    outputs: dict[str, Tensor] = {}
    everywhere = torch.arange(len(ids))

    def note_input(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        states.append((args[0] if args else kwargs["hidden_states"])[0].double())

    def note_output(block: nn.Module, args: tuple, output: Any) -> None:
        states.append(_first(output)[0].double())

    def keep(name: str) -> Callable[[nn.Module, tuple, Any], None]:
        def note(module: nn.Module, args: tuple, output: Any) -> None:
            first = _first(output)
            if isinstance(first, Tensor):
                outputs[name] = first.squeeze(0)

        return note

    def note_meta_attention(module: MetaAttention, args: tuple[Tensor], kwargs: dict[str, Any]) -> None:
        q, k, v = (x[0].double() for x in module.project(args[0], kwargs["rotary"], log_keys=kwargs.get("log_keys")))
        inputs = AttentionInputs(q, k, v, kwargs["rows"].index[0], module.scaling)
        attention["second_attention", module.block] = inputs

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """A plain attention function with the interface of transformers."""
        if kwargs.get("s_aux") is not None:
            raise UserError(f"the attention of a {type(model).__name__} has sinks, which cannot be observed.")
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        mask = None
        if attention_mask is not None:
            mask = attention_mask[0, 0].double()
            mask = mask.masked_fill(mask <= torch.finfo(attention_mask.dtype).min, -torch.inf)
        q, k, v = (x[0].double() for x in (query, key, value))
        inputs = AttentionInputs(q, k, v, everywhere.to(query.device), scaling, softcap, mask)
        name = "second_attention" if isinstance(module, CausalAttention) and module.is_second else "attention"
        attention[name, len(states) - 1] = inputs
        return (inputs.weights().to(value.dtype) @ value[0]).transpose(0, 1)[None], None

    with ExitStack() as hooks:
        hooks.enter_context(_attending(model, attend))
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(note_input, with_kwargs=True))
        hooks.enter_context(blocks[-1].register_forward_hook(note_output))
        for module in model.modules():
            if isinstance(module, MetaAttention):
                hooks.enter_context(module.register_forward_pre_hook(note_meta_attention, with_kwargs=True))
        for name in modules:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(keep(name)))
        logits = model(ids[None].to(model.device), use_cache=False).logits[0]
    if all(name != "attention" for name, _ in attention):
        raise _unreadable(model)
    return Observation(states, attention, logits, outputs)


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


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | ModelOutput) else output


def _unreadable(model: PreTrainedModel) -> UserError:
    return UserError(
        f"a {type(model).__name__} computes its attention itself, so it cannot be observed; only the analysis "
        "rate-distortion is possible."
    )
