"""Muon for the matrices inside the blocks, AdamW for everything else, as one optimizer (Jordan et al., 2024).

Muon takes the momentum of a matrix's gradient to the nearest orthogonal matrix, by Newton-Schulz iterations.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The matrices to train inside a language model's blocks: neither embeddings nor the output projection.

    Blocks are what is numbered, whatever an architecture calls the list of them.
    """
    named = model.named_parameters()
    return [
        one for name, one in named if one.ndim == 2 and one.requires_grad and any(map(str.isdigit, name.split(".")))
    ]


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for some matrices, and an AdamW for its other parameters.

    The learning rates are those of the parameter groups, Muon's group being the last one.

    Args:
        matrices: those for Muon, with momentum 0.95 and without weight decay.
        adamw: over all of a model's parameters; the matrices are taken out of it.
        learning_rate: of Muon.
    """

    def __init__(self, matrices: list[nn.Parameter], adamw: torch.optim.Optimizer, learning_rate: float):
        taken = {id(one) for one in matrices}
        for group in adamw.param_groups:
            group["params"] = [one for one in group["params"] if id(one) not in taken]
        self._adamw = adamw
        self._muon = torch.optim.Muon(
            matrices, lr=learning_rate, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original"
        )
        # A schedule that says its lowest rate in absolute terms finds AdamW's here.
        super().__init__([*adamw.param_groups, *self._muon.param_groups], {"lr": adamw.defaults["lr"]})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change every parameter by its own rule."""
        loss = closure() if closure else None
        # Groups and state are this optimizer's, whatever it has loaded since.
        self._adamw.param_groups, self._muon.param_groups = self.param_groups[:-1], self.param_groups[-1:]
        for part in (self._adamw, self._muon):
            part.state = self.state
            part.step()
        return loss
