"""Activation checkpointing under the name that the installed transformers has for it."""

from typing import Any

from transformers import PreTrainedModel


def checkpoint_activations(model: PreTrainedModel, **options: Any) -> None:
    """Recompute activations in the backward pass; `options` are those of PyTorch's `checkpoint`."""
    # Releases before 5.23 only have the older name; later ones warn about it.
    enable: Any = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable(options or None)


def keep_activations(model: PreTrainedModel) -> None:
    """Undo `checkpoint_activations`."""
    disable: Any = (
        getattr(model, "activation_checkpointing_disable", None)
        or model.gradient_checkpointing_disable
    )
    disable()
