"""Language models with learned meta-tokens and sparse meta-attention.

The names below are loaded when first used, so that `import metatokens` needs neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metatokens.data.insertion import insert_meta_tokens
    from metatokens.model.cache import MetaTokenCache
    from metatokens.model.configuration import MetaGPT2Config
    from metatokens.model.modeling import MetaGPT2ForCausalLM

_HOMES = {
    "MetaGPT2Config": "metatokens.model.configuration",
    "MetaGPT2ForCausalLM": "metatokens.model.modeling",
    "MetaTokenCache": "metatokens.model.cache",
    "insert_meta_tokens": "metatokens.data.insertion",
}

__all__ = ["MetaGPT2Config", "MetaGPT2ForCausalLM", "MetaTokenCache", "insert_meta_tokens"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'metatokens' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
