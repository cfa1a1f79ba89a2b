"""Classes that are made when a program runs: a class of another library with one of our mixins in front.

An ordinary subclass would be simpler, and is used where the base is one known class (`MetaTokenCacheLayer`). These
objects are made by others, and of a class that we do not know in advance:

- **A decoder, its blocks and its table of embeddings** belong to one of a hundred architectures of transformers. Their
  calls have to change (a block runs meta-attention), and forward hooks do not suffice: gradient checkpointing calls a
  block's `forward` again after the pass, when hooks know nothing of it.
- **A model's class and its configuration's** are looked up by transformers, PEFT and TRL, by name. So a class with a
  mixin has the name of its base.
- **A layer of a cache** was made by the user or by `generate()`, and may have a sliding window or a recurrent state.
- **An engine's manager and requests** are made by transformers.

So an object gets another class in place (`add_mixin`). Each class is made once, and torch.compile does not trace how it
is made. Nobody can import such a class, so pickle refuses its objects.
"""

import functools
from typing import Any

import torch


@functools.cache  # one class for all objects
def class_with(mixin: Any, base: Any) -> Any:
    """`base` with a mixin in front, under the base's name, by which transformers looks up most of its settings."""

    attributes = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base)(base.__name__, (mixin, base), attributes)


@torch.compiler.disable  # it would trace `class_with` without its cache, and so make a class for each graph
def add_mixin(target: object, mixin: type) -> None:
    """Put a mixin in front of the class of one object, in place, unless it is there."""
    if not isinstance(target, mixin):
        target.__class__ = class_with(mixin, type(target))  # type: ignore[arg-type]  # a class is hashable
