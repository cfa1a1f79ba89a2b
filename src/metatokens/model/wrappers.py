"""Wrappers around a model: of torch.compile, and of what trains it in several processes."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from accelerate.utils import extract_model_from_parallel, is_compiled_module
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])


def unwrapped(model: Any) -> Any:
    """The model inside the wrappers of torch.compile, DistributedDataParallel and others that accelerate unwraps."""
    inner = (
        extract_model_from_parallel(model, keep_torch_compile=False)
        if isinstance(model, nn.Module)
        else model
    )
    return model if inner is model else unwrapped(inner)


def uncompiled(model: Any) -> Any:
    """The model inside torch.compile's wrapper, which traces the model again when the classes of its parts change."""
    return uncompiled(model._orig_mod) if is_compiled_module(model) else model


def takes_wrapped(function: Function) -> Function:
    """Decorate a function so that its first argument, `model`, may be wrapped (`unwrapped`)."""

    @wraps(function)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        return function(unwrapped(model), *args, **kwargs)

    return call  # type: ignore[return-value]  # has the same signature
