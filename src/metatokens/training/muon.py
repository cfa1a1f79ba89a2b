"""One optimizer: Muon (Jordan et al., 2024) for matrices inside the blocks, AdamW for everything else.

Muon steps along the orthogonal matrix nearest to the momentum of a matrix's gradient, by Newton-Schulz iterations.
"""

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
    """`torch.optim.Muon` for some matrices, AdamW for the other parameters.

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
        self._muon = torch.optim.Muon(
            matrices, lr=learning_rate, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original"
        )
        # The schedule divides its absolute `min_lr` by this default, AdamW's rate.
        super().__init__([*adamw.param_groups, *self._muon.param_groups], {"lr": adamw.defaults["lr"]})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter by its own rule."""
        loss = closure() if closure else None
        # Loading a state replaces this optimizer's groups and state, so both parts are given them again.
        self._adamw.param_groups, self._muon.param_groups = self.param_groups[:-1], self.param_groups[-1:]
        for part in (self._adamw, self._muon):
            part.state = self.state
            part.step()
        return loss
