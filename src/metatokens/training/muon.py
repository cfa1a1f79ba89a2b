"""One optimizer: Muon (Jordan et al., 2024) for matrices inside the blocks, AdamW for everything else.

Muon steps along the orthogonal matrix nearest to the momentum of a matrix's gradient, by Newton-Schulz iterations.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from metatokens.decoder import decoder_of


def block_matrices(model: Any) -> list[nn.Parameter]:
    """The trainable matrices inside a language model's blocks, and those of the heads of `inside_loss`.

    Embeddings, the output projection, and what a model has for images are not among them.
    """
    heads = getattr(model, "inside_heads", nn.ModuleList())
    inside = [*decoder_of(model)[1].parameters(), *heads.parameters()]
    return [one for one in inside if one.ndim == 2 and one.requires_grad]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some matrices, AdamW for the other parameters.

    The learning rates are those of the parameter groups. Muon's group is the last one.

    Args:
        matrices: for Muon, with momentum 0.95 and without weight decay.
        adamw: over all parameters of a model; the matrices are removed from it.
        learning_rate: of Muon.
    """

    def __init__(self, matrices: list[nn.Parameter], adamw: torch.optim.Optimizer, learning_rate: float):
        taken = {id(one) for one in matrices}
        for group in adamw.param_groups:
            group["params"] = [one for one in group["params"] if id(one) not in taken]
        self._adamw = adamw
        muon = {"params": matrices, "lr": learning_rate, "momentum": 0.95}
        # The schedule divides its absolute `min_lr` by this default, AdamW's rate.
        super().__init__([*adamw.param_groups, muon], {"lr": adamw.defaults["lr"]})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter by its own rule."""
        with torch.enable_grad():
            loss = closure() if closure else None
        # Loading a state replaces this optimizer's groups and state, so AdamW gets them again.
        self._adamw.param_groups, self._adamw.state = self.param_groups[:-1], self.state
        self._adamw.step()
        muon = self.param_groups[-1]
        for matrix in muon["params"]:
            if matrix.grad is not None:
                momentum = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix.grad))
                momentum.lerp_(matrix.grad, 1 - muon["momentum"])
                update = orthogonalized(matrix.grad.lerp(momentum, muon["momentum"]))
                rows, columns = matrix.shape
                matrix.add_(update, alpha=-muon["lr"] * math.sqrt(max(1, rows / columns)))
        return loss


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Set all singular values of a matrix to about 1, by five Newton-Schulz iterations.

    `torch.optim.Muon` multiplies in bfloat16 everywhere. CPUs without instructions for it need 30 times as long.
    """
    is_wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if is_wide else matrix.T).to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x if is_wide else x.T).to(matrix.dtype)
