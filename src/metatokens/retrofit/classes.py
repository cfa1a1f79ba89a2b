"""The classes of a retrofitted model and of its configuration: the base's, each with a mixin in front.

The Auto classes that load the base as a language model load the retrofitted model. The others refuse it, so that none
gives a model without meta-attention.

The classes keep the base's names, by which transformers and PEFT find their settings for a model. On disk the model
type is `meta_tokens` and architectures have a prefix, so a program without this package refuses the folder instead of
dropping weights. Loading by a base's own class, such as `LlamaForCausalLM`, drops them, with a warning.
"""

import functools
import json
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from metatokens.decoder import decoder_of, own_blocks, position_embedding_of
from metatokens.errors import UserError
from metatokens.model.configuration import TEXT_SINKS, write_remote_code
from metatokens.model.forgetting_cache import full_heads_by_block
from metatokens.model.generation import MetaTokenGenerationMixin, register_architecture
from metatokens.model.labels import without_meta_tokens
from metatokens.model.mixins import class_with
from metatokens.model.positions import packed_sequences
from metatokens.model.releases import with_cache_renamed
from metatokens.model.vocabulary import MetaVocabulary
from metatokens.model.wrappers import takes_wrapped
from metatokens.retrofit.hooks import (
    add_at_injection_point,
    begin_pass,
    bind_inputs,
    mask_logits,
)
from metatokens.retrofit.layers import (
    MetaBlock,
    MetaDecoder,
    MetaEmbeddingTable,
    MetaModule,
    MetaTokenEmbedding,
    added_parameters,
    change_class,
    set_full,
)
from metatokens.retrofit.settings import MetaSettings, check_entries

MODEL_TYPE = "meta_tokens"
# The prefix of architectures on disk. TRL and serving engines look the architecture up in transformers; without the
# prefix they would find the base's class and drop meta-attention.
PREFIX = "MetaTokens"
_AUTO_MAP = {"AutoConfig": "metatokens_classes.MetaTokensConfig"}


def _setting(name: str, default: int | None = None) -> Any:
    """A property for one of the fields of `meta_attention`."""

    def read(config: Any) -> Any:
        return getattr(config, "meta_attention", {}).get(name, default)

    def refuse(config: Any, value: Any) -> None:
        raise UserError(
            f"{name} is set by set_text_window(model, ...), which also checks the model."
        )

    return property(read, refuse)


class MetaConfig(PreTrainedConfig):
    """Mixin for a base's configuration, with more attributes.

    Attributes:
        meta_token_id: the meta-token's row of the vocabulary.
        unpadded_vocab_size: entries in use; the rows after them are never generated.
        position_embedding: the kind of the base's positions, `learned`, `rope` or `none`.
        meta_attention: the fields of a `MetaSettings`.
        text_window, text_sinks, text_full_layers, text_full_heads: of `meta_attention`, as in `MetaSettings`.
    """

    text_window = _setting("text_window")
    text_sinks = _setting("text_sinks", TEXT_SINKS)
    text_full_layers = _setting("text_full_layers")
    text_full_heads = _setting("text_full_heads")

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read as transformers does, under the base's model type: it would warn of another one."""
        fields, remaining = super().get_config_dict(*args, **kwargs)
        if fields.get("model_type") == MODEL_TYPE:
            fields["model_type"] = fields.get("base_model_type", MODEL_TYPE)
        return fields, remaining

    def to_json_string(self, *args: Any, **kwargs: Any) -> str:
        """The base's JSON, under this package's model type."""
        fields = json.loads(super().to_json_string(*args, **kwargs))
        if Path(fields["meta_attention"]["base"]).is_absolute():
            # A folder of this machine means nothing elsewhere, and a whole model needs no base.
            fields["meta_attention"]["base"] = ""
        architectures = fields.get("architectures") or ()
        fields |= {
            "model_type": MODEL_TYPE,
            "base_model_type": type(self).model_type,
            "architectures": [PREFIX + name.removeprefix(PREFIX) for name in architectures],
            "auto_map": _AUTO_MAP,
        }
        return json.dumps(fields, indent=2, sort_keys=True) + "\n"

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, and write the file that `auto_map` names next to `config.json`."""
        write_remote_code(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)


class MetaTokensConfig(PreTrainedConfig):
    """The class that transformers finds by the model type on disk; it loads the base's configuration with the mixin."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> PreTrainedConfig:
        """The configuration of a retrofitted model.

        Raises:
            UserError: if it names no language model of transformers, or the folder holds a delta.
        """
        fields = {
            key: value
            for key, value in config_dict.items()
            if key not in ("model_type", "auto_map")
        }
        if not fields:
            raise UserError(
                "this folder holds what was added to a base, and not the base: metatokens.load_meta puts it into one."
            )
        base = fields.pop("base_model_type", None)
        architectures = fields.get("architectures") or [""]
        name = architectures[0].removeprefix(PREFIX)
        model = getattr(transformers, name, None)
        # The decoder of a language model, saved alone, cannot generate.
        if base not in CONFIG_MAPPING or not (
            isinstance(model, type) and issubclass(model, GenerationMixin)
        ):
            raise UserError(
                "base_model_type and architectures name no retrofitted model that metatokens supports."
            )
        # TRL reads `auto_map` if transformers does not have the architecture.
        _, meta_config = classes_of(model, CONFIG_MAPPING[base])
        return meta_config.from_dict(fields | {"auto_map": _AUTO_MAP}, **kwargs)


# Bases whose forward takes inputs that it does not know, and ignores them.
DROP_INPUTS = {"bloom", "codegen", "falcon", "gptj", "mpt"}


class MetaModel(MetaVocabulary, MetaTokenGenerationMixin):
    """Mixin for a retrofitted model: it never predicts a meta-token, and `generate` can insert them.

    Attributes:
        base_is_elsewhere: whether `save_model` writes a delta, since the base is kept elsewhere.
    """

    base_is_elsewhere = False

    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        model: Any = super()
        model.__init__(config, *args, **kwargs)
        install(self)
        init_added_weights(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; PEFT's adapters without a task get one.

        `AutoPeftModel` would load such adapters around the plain base.
        """
        if name == "peft_config" and isinstance(value, dict):
            for adapter in value.values():
                adapter.task_type = adapter.task_type or "CAUSAL_LM"
        super().__setattr__(name, value)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, but refuse a checkpoint in which weights of what was added are not found."""
        base: Any = super()
        model, report = base.from_pretrained(*args, output_loading_info=True, **kwargs)
        lacking = sorted(added_parameters(model).keys() & set(report["missing_keys"]))
        if lacking:
            raise UserError(
                f"the weights lack what was added to the {cls.__name__}, such as {lacking[0]}. If transformers gives "
                "weights of this type other names, save what was added by save_meta, and load it by load_meta."
            )
        return (model, report) if output_loading_info else model

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize as `MetaVocabulary` does; the head may then be a new module, which masks the same entries."""
        table = super().resize_token_embeddings(*args, **kwargs)
        connect_head(self)
        return table

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base's forward, with meta-tokens among the labels ignored, in `shift_labels` too."""
        if len(args) > 1:
            args, kwargs = (), bind_inputs(self, args, kwargs)
        kwargs = with_cache_renamed(kwargs)
        if "meta_token_mask" in kwargs and self.config.model_type in DROP_INPUTS:
            raise UserError(
                f"the forward of a {self.config.model_type} does not hand meta_token_mask to its blocks: give "
                "input_ids."
            )
        if not torch.compiler.is_compiling():  # an adapter may have replaced the head
            connect_head(self)
            reads_positions = "position_ids" in signature(decoder_of(self)[0].forward).parameters
            mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
            if (
                not reads_positions
                and packed_sequences(mask, positions, None, None, at_jumps=True) is not None
            ):
                raise UserError(
                    "this base ignores position_ids, and so packed sequences; give each its own row."
                )
        labels = kwargs.pop("labels", None)
        if labels is not None:
            labels, kwargs = without_meta_tokens(labels, self.config.meta_token_id, kwargs)
        return super().forward(*args, labels=labels, **kwargs)


class NoClass:
    """Registered with Auto classes that would load a model without meta-attention: loading raises."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse."""
        raise UserError(
            "this Auto class has no class with meta-attention for the model; load it by AutoModelForCausalLM."
        )

    _from_config = from_pretrained


def classes_of(model: Any, config: Any) -> tuple[Any, Any]:
    """A base's classes of models and configurations with the mixins, registered with the Auto classes.

    Auto classes find classes by the configuration's name. One without a registration would load the base. The last
    registration holds, so each call registers again: a base may have several classes of models.
    """
    meta_model, meta_config = _made_classes(model, config)
    register_architecture(PREFIX + model.__name__, meta_model)
    for name, auto in vars(modeling_auto).items():
        if name.startswith("AutoModel"):
            loads_it = auto._model_mapping.get(config, None) is model
            auto.register(meta_config, meta_model if loads_it else NoClass, exist_ok=True)
    AutoModelForCausalLM.register(meta_config, meta_model, exist_ok=True)
    return meta_model, meta_config


@functools.cache
def _made_classes(model: Any, config: Any) -> tuple[Any, Any]:
    meta_config, meta_model = class_with(MetaConfig, config), class_with(MetaModel, model)
    meta_model.config_class = meta_config

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return MetaModel.forward(self, *args, **kwargs)

    # transformers reads the names of its arguments; accelerate would put what `functools.wraps` wraps in its place.
    cast(Any, forward).__signature__ = signature(model.forward)
    forward.__doc__ = model.forward.__doc__
    meta_model.forward = forward
    return meta_model, meta_config


@takes_wrapped
def freeze_base(model: nn.Module, *, trained: bool = False) -> None:
    """Freeze the base of a retrofitted model, so that only what was added is trained; or unfreeze it.

    A model loaded from disk is trained whole, like any model of transformers, until this is called.

    Args:
        model: a retrofitted model.
        trained: whether to unfreeze the base, except for quantised weights.

    Raises:
        UserError: if nothing was added to the model, or it has adapters of PEFT.
    """
    added = added_parameters(model)
    if not added:
        raise UserError("this is no retrofitted model: call add_meta_attention first.")
    if any(hasattr(module, "adapter_layer_names") for module in model.modules()):
        raise UserError(
            "this model has adapters of PEFT, which decide what is trained: call freeze_base before they are added."
        )
    for parameter in model.parameters():
        parameter.requires_grad_(trained and parameter.is_floating_point())
    for parameter in added.values():
        parameter.requires_grad_(True)


def install(model: Any) -> None:
    """Add the modules that the configuration describes to a model, with uninitialised weights.

    The weights are in float32, or in the base's precision if that is wider.
    """
    decoder, blocks = decoder_of(model)
    config = model.config
    table = model.get_input_embeddings()
    settings = MetaSettings.checked(**config.meta_attention)
    settings.check_blocks(own_blocks(config))
    check_entries(config.meta_token_id, config.unpadded_vocab_size, rows=len(table.weight))
    config.position_embedding = position_embedding_of(model)
    connect_head(model)
    # Keeps these layers from being quantised when a model is loaded.
    model._keep_in_fp32_modules |= {
        "meta_attention.attention.qkv_proj",
        "meta_attention.attention.out_proj",
    }
    decoder.meta_config = config
    set_full(blocks, settings.text_full_layers or (), full_heads_by_block(config))
    decoder.meta_settings = settings
    decoder.meta_has_trained = False
    decoder.meta_depth = getattr(decoder.config, "num_hidden_layers", None)
    decoder.meta_cache_layers = len(blocks) + len(settings.layers)  # of a cache of a fixed size
    decoder.register_forward_pre_hook(begin_pass, with_kwargs=True)
    change_class(decoder, MetaDecoder)
    # Half precision would round small training steps away. PEFT's adapters are in float32 for the same reason.
    dtype = torch.promote_types(table.weight.dtype, torch.float32)
    change_class(table, MetaEmbeddingTable)
    table.meta_token = MetaTokenEmbedding(table.weight.shape[1]).to(dtype)
    table.meta_token_id = config.meta_token_id
    for further, (index, injection_point) in enumerate(
        zip(settings.layers, settings.injection_points, strict=True)
    ):
        block = blocks[index]
        change_class(block, MetaBlock)
        block.meta_attention = MetaModule(settings, index, len(blocks) + further).to(dtype)
        block.meta_point_has_residual = settings.point_has_residual
        block.get_submodule(injection_point).register_forward_hook(add_at_injection_point)


def connect_head(model: Any) -> None:
    """Make the output head of a language model mask the meta-token and unused rows."""
    head = model.get_output_embeddings()
    if "meta_token_id" not in vars(head):  # not hasattr: PEFT's wrappers forward attributes
        head.register_forward_hook(mask_logits)
    head.meta_token_id = model.config.meta_token_id
    head.used_rows = model.config.unpadded_vocab_size


def init_added_weights(model: nn.Module) -> None:
    """Initialise what was added so that it adds nothing, except weights that were loaded."""
    for module in model.modules():
        if isinstance(module, MetaModule | MetaTokenEmbedding):
            module.reset_parameters()
