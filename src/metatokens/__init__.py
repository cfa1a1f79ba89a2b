"""Language models with learned meta-tokens and sparse meta-attention.

The names below are loaded when first used, so that `import metatokens` needs neither torch nor transformers. After that
import, the Auto classes of transformers can load this package's models. The Auto classes look for a type's classes in
`transformers.models.TYPE`, and find this package's there, whichever of the two packages is imported first.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from metatokens.data.collating import MetaTokenCollator
    from metatokens.data.insertion import insert_meta_tokens
    from metatokens.data.landmarks import Landmarks
    from metatokens.data.prompts import encode_prompt
    from metatokens.looking.look import look
    from metatokens.looking.page import Look
    from metatokens.model.configuration import MetaGPT2Config
    from metatokens.model.modeling import MetaGPT2ForCausalLM, MetaGPT2Model
    from metatokens.retrofit.classes import MetaTokensConfig, freeze_base
    from metatokens.retrofit.injection import add_meta_attention
    from metatokens.retrofit.saving import load_meta, save_meta
    from metatokens.retrofit.text_window import set_text_window

_HOMES = {
    "Landmarks": "metatokens.data.landmarks",
    "Look": "metatokens.looking.page",
    "MetaGPT2Config": "metatokens.model.modeling",  # which makes the model's class known too
    "MetaGPT2ForCausalLM": "metatokens.model.modeling",
    "MetaGPT2Model": "metatokens.model.modeling",
    "MetaTokenCollator": "metatokens.data.collating",
    "MetaTokensConfig": "metatokens.retrofit.classes",
    "add_meta_attention": "metatokens.retrofit.injection",
    "encode_prompt": "metatokens.data.prompts",
    "freeze_base": "metatokens.retrofit.classes",
    "insert_meta_tokens": "metatokens.data.insertion",
    "load_meta": "metatokens.retrofit.saving",
    "look": "metatokens.looking.look",
    "save_meta": "metatokens.retrofit.saving",
    "set_text_window": "metatokens.retrofit.text_window",
}

__all__ = [
    "Landmarks",
    "Look",
    "MetaGPT2Config",
    "MetaGPT2ForCausalLM",
    "MetaGPT2Model",
    "MetaTokenCollator",
    "MetaTokensConfig",
    "add_meta_attention",
    "encode_prompt",
    "freeze_base",
    "insert_meta_tokens",
    "load_meta",
    "look",
    "save_meta",
    "set_text_window",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'metatokens' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


@wrapt.when_imported("transformers.models.auto.configuration_auto")
def _register(auto: ModuleType) -> None:
    for model_type, name in (("meta_gpt2", "MetaGPT2Config"), ("meta_tokens", "MetaTokensConfig")):
        auto.CONFIG_MAPPING_NAMES[model_type] = name
        sys.modules[f"transformers.models.{model_type}"] = sys.modules[__name__]
