"""One optimizer: Muon (Jordan et al., 2024) for matrices inside the blocks, AdamW for everything else.

Muon steps along the orthogonal matrix nearest to the momentum of a matrix's gradient, by Newton-Schulz iterations.
Those of small matrices take longer to start than to compute, so matrices of one shape share them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from metatokens.decoder import decoder_of

# Entries of the matrices that are stacked, at most: 16 MB; a larger matrix is updated alone.
STACKED = 2**22


def block_matrices(model: Any) -> list[nn.Parameter]:
    """The trainable matrices inside a language model's blocks, and those of the heads of `bracket_loss`.

    Embeddings, the output projection, and what a model has for images are not among them.
    """
    _, blocks = decoder_of(model)
    heads = getattr(model, "bracket_heads", nn.ModuleList())
    parameters = [*blocks.parameters(), *heads.parameters()]
    return [
        parameter for parameter in parameters if parameter.ndim == 2 and parameter.requires_grad
    ]


def inputs_first(model: nn.Module) -> set[int]:
    """The ids of the matrices that layers of GPT-2 in transformers hold as (inputs, outputs)."""
    return {id(module.weight) for module in model.modules() if isinstance(module, Conv1D)}


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some matrices, AdamW for the other parameters.

    The learning rates are those of the parameter groups. Muon's group is the last one.

    Args:
        matrices: for Muon, with momentum 0.95 and without weight decay.
        adamw: over all parameters of a model; the matrices are removed from it.
        learning_rate: of Muon.
        inputs_first: the ids of matrices that are (inputs, outputs); the others are (outputs, inputs).
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        adamw: torch.optim.Optimizer,
        learning_rate: float,
        *,
        inputs_first: Set[int] = frozenset(),
    ):
        ids = {id(matrix) for matrix in matrices}
        for group in adamw.param_groups:
            group["params"] = [
                parameter for parameter in group["params"] if id(parameter) not in ids
            ]
        self._adamw, self._inputs_first = adamw, inputs_first
        muon = {"params": matrices, "lr": learning_rate, "momentum": 0.95}
        # The schedule divides its absolute `min_lr` by this default, AdamW's rate.
        super().__init__([*adamw.param_groups, muon], {"lr": adamw.defaults["lr"]})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter by its own rule."""
        # Loading a state replaces this optimizer's groups and state, so AdamW gets them again.
        self._adamw.param_groups, self._adamw.state = self.param_groups[:-1], self.state
        loss = self._adamw.step(closure)
        self._step_by_muon(**self.param_groups[-1])
        return loss

    def _step_by_muon(
        self, params: list[nn.Parameter], lr: float, momentum: float, **_: Any
    ) -> None:
        """Update the matrices of Muon's group."""
        for matrices in _stacks([matrix for matrix in params if matrix.grad is not None]):
            gradients = torch.stack([cast(Tensor, matrix.grad) for matrix in matrices])
            buffers = [self._momentum(matrix) for matrix in matrices]
            for buffer, gradient in zip(buffers, gradients, strict=True):
                buffer.lerp_(gradient, 1 - momentum)
            nesterov = gradients.lerp(torch.stack(buffers), momentum)
            for matrix, update in zip(matrices, orthogonalized(nesterov), strict=True):
                outputs, inputs = matrix.shape
                if id(matrix) in self._inputs_first:
                    outputs, inputs = inputs, outputs
                matrix.add_(update, alpha=-lr * math.sqrt(max(1, outputs / inputs)))

    def _momentum(self, matrix: nn.Parameter) -> Tensor:
        """A matrix's momentum, which a checkpoint holds for each matrix by itself."""
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _stacks(matrices: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The matrices in lists of one shape, each of at most STACKED entries or a single matrix."""
    by_shape = defaultdict(list)
    for matrix in matrices:
        by_shape[matrix.shape].append(matrix)
    for group in by_shape.values():
        size = max(1, STACKED // group[0].numel())
        for start in range(0, len(group), size):
            yield group[start : start + size]


def orthogonalized(matrices: Tensor) -> Tensor:
    """Set all singular values of each matrix, (count, rows, columns), to about 1, by five Newton-Schulz iterations.

    `torch.optim.Muon` multiplies in bfloat16 everywhere. CPUs without instructions for it need 30 times as long.
    """
    is_wide = matrices.shape[1] <= matrices.shape[2]
    precision = torch.bfloat16 if matrices.is_cuda else torch.float32
    x = (matrices if is_wide else matrices.mT).to(precision)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return (x if is_wide else x.mT).to(matrices.dtype)
