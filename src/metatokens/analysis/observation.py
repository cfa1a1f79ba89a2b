"""What a model does with one prompt, read off by hooks: states, attention logits, where the meta-tokens stand."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metatokens.errors import UserError
from metatokens.model.attention import Attention
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.tasks.example import Example


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
        queries, keys: (heads, rows, head size) float64, positions applied.
        positions: (rows,) int64, where the rows stand in the prompt; all positions, or the meta-tokens'.
        scaling: 1 / sqrt(head size).
    """

    queries: Tensor
    keys: Tensor
    positions: Tensor
    scaling: float

    def logits(self, rows: Tensor) -> Tensor:
        """What softmax is taken of in some rows: q k^T / sqrt(d), and -inf where the key comes later.

        Args:
            rows: (n,) int64, which of the rows.

        Returns:
            (heads, n, rows) float64.
        """
        logits = self.queries[:, rows] @ self.keys.transpose(1, 2) * self.scaling
        later = torch.arange(len(self.positions), device=rows.device) > rows[:, None]
        return logits.masked_fill(later, -torch.inf)


@dataclass(frozen=True, slots=True)
class Observation:
    """One forward pass.

    Attributes:
        states: the residual stream before the first block and after each, (length, width) float64.
        attention: by name of the module in its block and number of the block.
        final: what the head reads, (length, width).
    """

    states: list[Tensor]
    attention: dict[tuple[str, int], AttentionInputs]
    final: Tensor


@torch.inference_mode()
def observe(model: MetaGPT2ForCausalLM, ids: Tensor) -> Observation:
    """Run a model on one prompt, (length,), and note what passes.

    The model is put into evaluation mode; its code and its weights stay as they are.

    Raises:
        UserError: if the prompt is longer than the model's learned positions.
    """
    model.eval()
    states: list[Tensor] = []
    attention: dict[tuple[str, int], AttentionInputs] = {}

    def note_state(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        states.append(args[0][0].double())

    def note_attention(module: Attention, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        q, k, _ = module.project(args[0], kwargs["rotary"], log_keys=kwargs["log_keys"])
        rows = kwargs.get("rows")
        positions = torch.arange(len(ids), device=q.device) if rows is None else rows.index[0]
        name = "attention" if module is model.model.layers[module.layer_index].attention else "second_attention"
        inputs = AttentionInputs(q[0].double(), k[0].double(), positions, module.scaling)
        attention[name, module.layer_index] = inputs

    with ExitStack() as hooks:
        for module in (*model.model.layers, model.model.norm):  # each is given the residual stream
            hooks.enter_context(module.register_forward_pre_hook(note_state, with_kwargs=True))
        for module in model.modules():
            if isinstance(module, Attention):
                hooks.enter_context(module.register_forward_pre_hook(note_attention, with_kwargs=True))
        final = model.model(ids[None].to(model.device), use_cache=False).last_hidden_state[0]
    return Observation(states, attention, final)
