"""Activation checkpointing by the name that the installed transformers has for it."""

from typing import Any

from transformers import PreTrainedModel


def checkpoint_activations(model: PreTrainedModel, **options: Any) -> None:
    """Have the backward pass compute activations again; `options` are those of PyTorch's `checkpoint`."""
    # Releases before 5.23 have the older name alone, and later ones warn of it.
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options or None)


def keep_activations(model: PreTrainedModel) -> None:
    """Undo it."""
    disable: Any = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()
