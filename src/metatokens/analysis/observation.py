"""What a model does with one prompt: states, attention logits, and what the head says, read off as they pass.

It is read where every model has the same parts: at its blocks, at the attention function that transformers lets a
caller choose by name, and at the meta-attention modules of this package. So any decoder can be observed whose attention
is computed by such a function; BLOOM, Falcon, GPT-J, GPT-Neo and MPT are among the few that compute it themselves.
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

_FUNCTION = "metatokens_observed"  # the attention function's name while a model is observed


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's ids, without the answer, and its meta-tokens.

    Attributes:
        ids: (length,) int64.
        is_meta: (length,) bool.
        metas: the meta-tokens' positions, ascending; one at least, and the last has text before it.
        answer: the first id of the answer.
    """

    ids: Tensor
    is_meta: Tensor
    metas: list[int]
    answer: int

    @classmethod
    def of(cls, example: Example, meta_token_id: int | None) -> "Prompt":
        """The prompt of an example.

        Raises:
            UserError: if it has no meta-token with text before it.
        """
        ids = torch.tensor(example.input_ids[: example.answer_start])
        is_meta = ids == meta_token_id if meta_token_id is not None else torch.zeros_like(ids, dtype=torch.bool)
        metas = is_meta.nonzero()[:, 0].tolist()
        if not metas or is_meta[: metas[-1]].all():
            raise UserError("a prompt to analyse has no meta-token of the model's after some text; each needs one.")
        return cls(ids, is_meta, metas, example.input_ids[example.answer_start])

    def text_before(self, position: int) -> int | None:
        """The position of the nearest text token before another position, None if there is none."""
        return next((i for i in range(position - 1, -1, -1) if not self.is_meta[i]), None)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Queries and keys of one attention module.

    Attributes:
        queries, keys: (heads, rows, head size) float64, positions applied; a key's head stands for each that shares it.
        values: (heads, rows, head size) float64.
        positions: (rows,) int64, where the rows stand in the prompt; all positions, or the meta-tokens'.
        scaling: what their products are multiplied by, mostly 1 / sqrt(head size).
        softcap: c, where a logit x is made c tanh(x / c), as in Gemma 2; None: it is not.
        mask: (rows, rows) float64, added to the logits; None: -inf where the key comes later.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    scaling: float
    softcap: float | None = None
    mask: Tensor | None = None

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """What softmax is taken of: q k^T / sqrt(d), and -inf where a key is not seen.

        Args:
            rows: (n,) int64, which of the rows; by default all.

        Returns:
            (heads, n, rows) float64.
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
    """One forward pass.

    Attributes:
        states: the residual stream before the first block and after each, (length, width) float64.
        attention: by name of the module, `attention` or `second_attention`, and number of the block.
        logits: of what follows each position, (length, vocabulary); the meta-token's own mean nothing.
        outputs: of the submodules that were asked for by name, without the batch dimension.
    """

    states: list[Tensor]
    attention: dict[tuple[str, int], AttentionInputs]
    logits: Tensor
    outputs: dict[str, Tensor]


@torch.no_grad()
def observe(model: PreTrainedModel, ids: Tensor, modules: Iterable[str] = ()) -> Observation:
    """Run a model on one prompt, and note what passes.

    The model is put into evaluation mode; its code and its weights stay as they are.

    Args:
        model: any decoder, with meta-tokens or without.
        ids: (length,) int64.
        modules: names of submodules, as in `model.named_modules()`, whose outputs to keep.

    Raises:
        UserError: if the prompt is longer than the model's learned positions, or the model computes its attention in
            a way that is not read here.
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
        attention["second_attention", module.layer_index] = inputs

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
        """An attention function of transformers, as plain as can be."""
        if kwargs.get("s_aux") is not None:
            raise UserError(f"the attention of a {type(model).__name__} has sinks, which are not read here.")
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        mask = None
        if attention_mask is not None:
            mask = attention_mask[0, 0].double()
            mask = mask.masked_fill(mask <= torch.finfo(attention_mask.dtype).min, -torch.inf)
        q, k, v = (x[0].double() for x in (query, key, value))
        inputs = AttentionInputs(q, k, v, everywhere.to(query.device), scaling, softcap, mask)
        name = "second_attention" if isinstance(module, CausalAttention) and module.second else "attention"
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
    """Let a model compute its attention by a function of transformers' kind."""
    if not model._can_set_attn_implementation():
        raise _unreadable(model)
    before = model.config._attn_implementation
    AttentionMaskInterface.register(_FUNCTION, eager_mask)
    ALL_ATTENTION_FUNCTIONS[_FUNCTION] = attend
    try:
        model.set_attn_implementation(_FUNCTION)
        yield
    finally:  # a function that stayed would keep the model and all that was noted
        model.set_attn_implementation(before)
        del ALL_ATTENTION_FUNCTIONS[_FUNCTION]


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | ModelOutput) else output


def _unreadable(model: PreTrainedModel) -> UserError:
    return UserError(
        f"a {type(model).__name__} computes its attention itself, where it cannot be read; of the analyses, "
        "rate-distortion alone is possible."
    )
