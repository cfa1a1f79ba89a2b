"""Language models with learned meta-tokens and sparse meta-attention.

The names below are loaded when first used, so that `import metatokens` needs neither torch nor transformers. Yet from
that import on the Auto classes of transformers know the model: they find a model type's classes by name in
`transformers.models.TYPE`, and so find them here, whichever of the two packages is imported first.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from metatokens.data.insertion import insert_meta_tokens
    from metatokens.data.prompts import encode_prompt
    from metatokens.model.cache import MetaTokenCache
    from metatokens.model.configuration import MetaGPT2Config
    from metatokens.model.modeling import MetaGPT2ForCausalLM, MetaGPT2Model

_HOMES = {
    "MetaGPT2Config": "metatokens.model.modeling",  # which makes the model's class known too
    "MetaGPT2ForCausalLM": "metatokens.model.modeling",
    "MetaGPT2Model": "metatokens.model.modeling",
    "MetaTokenCache": "metatokens.model.cache",
    "encode_prompt": "metatokens.data.prompts",
    "insert_meta_tokens": "metatokens.data.insertion",
}

__all__ = [
    "MetaGPT2Config",
    "MetaGPT2ForCausalLM",
    "MetaGPT2Model",
    "MetaTokenCache",
    "encode_prompt",
    "insert_meta_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'metatokens' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


@wrapt.when_imported("transformers.models.auto.configuration_auto")
def _register(auto: ModuleType) -> None:
    auto.CONFIG_MAPPING_NAMES["meta_gpt2"] = "MetaGPT2Config"
    sys.modules["transformers.models.meta_gpt2"] = sys.modules[__name__]
