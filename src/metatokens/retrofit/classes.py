"""The classes of a retrofitted model and of its configuration: the base's, each with a mixin in front.

Each Auto class that supports the base supports the retrofitted model: `AutoModel` loads the decoder without a head,
`AutoModelForSequenceClassification` with another head, and so on. Each either has meta-attention or refuses to load.

The classes keep the base's names, by which transformers and PEFT find their settings for a model. On disk the model
type is `meta_tokens` and architectures have a prefix, so a program without this package refuses the folder instead of
dropping weights. Loading by a base's own class, such as `LlamaForCausalLM`, drops them, with a warning.
"""

import functools
import json
from collections.abc import Sequence
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from metatokens.decoder import decoder_of, own_blocks, position_embedding_of
from metatokens.errors import UserError
from metatokens.model.configuration import TEXT_SINKS, write_remote_code
from metatokens.model.generation import MetaTokenGenerationMixin, register_architecture
from metatokens.model.labels import without_meta_tokens
from metatokens.model.mixins import add_mixin, class_with
from metatokens.model.positions import packed_sequences
from metatokens.model.releases import with_cache_renamed
from metatokens.model.vocabulary import MetaVocabulary
from metatokens.model.wrappers import takes_wrapped
from metatokens.records import Result
from metatokens.retrofit.card import model_card
from metatokens.retrofit.hooks import (
    add_at_site,
    begin_pass,
    bind_inputs,
    mask_logits,
    note_tokens_read,
)
from metatokens.retrofit.layers import (
    MetaBlock,
    MetaDecoder,
    MetaEmbeddingTable,
    MetaModule,
    MetaTokenEmbedding,
    added_parameters,
    check_table,
    set_full_layers,
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

    def write(config: Any, value: Any) -> None:
        raise UserError(
            f"{name} cannot be set in a configuration: set_text_window(model, ...) also checks the model."
        )

    return property(read, write)


class MetaConfig(PreTrainedConfig):
    """Mixin for a base's configuration, with more attributes.

    Attributes:
        meta_token_id: the meta-token's row of the vocabulary.
        unpadded_vocab_size: entries in use; the rows after them are never generated.
        position_embedding: the kind of the base's positions, `learned`, `rope` or `none`.
        meta_attention: the fields of a `MetaSettings`.
        text_window, text_sinks, text_full_layers: of `meta_attention`, as in `MetaGPT2Config`.
    """

    text_window, text_sinks = _setting("text_window"), _setting("text_sinks", TEXT_SINKS)
    text_full_layers = _setting("text_full_layers")

    def to_json_string(self, *args: Any, **kwargs: Any) -> str:
        """The base's JSON, under this package's model type."""
        fields = json.loads(super().to_json_string(*args, **kwargs))
        base = Path(fields["meta_attention"]["base"])
        if base.is_absolute():
            # Does not show where it was on this machine.
            fields["meta_attention"]["base"] = f"../{base.name}"
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
        write_remote_code(save_directory, _AUTO_MAP)
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
        if base not in CONFIG_MAPPING or not (
            isinstance(model, type) and issubclass(model, PreTrainedModel)
        ):
            raise UserError(
                f"a retrofitted {base} with architectures {fields.get('architectures')} is none that metatokens "
                "supports."
            )
        # TRL reads `auto_map` if transformers does not have the architecture.
        _, meta_config = classes_of(model, CONFIG_MAPPING[base])
        return meta_config.from_dict(fields | {"auto_map": _AUTO_MAP}, **kwargs)


class MetaBody(MetaVocabulary):
    """Mixin for any model around a retrofitted decoder: it has meta-attention."""

    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        model: Any = super()
        model.__init__(config, *args, **kwargs)
        install(self)
        init_added_weights(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Prepare the model for adapters when PEFT has put them in."""
        if name == "peft_config" and isinstance(value, dict):
            settle_adapters(self, value)
        super().__setattr__(name, value)

    def initialize_weights(self: Any) -> None:
        """Initialise the weights that are not on disk, those of what was added included."""
        model: Any = super()
        model.initialize_weights()
        init_added_weights(self)

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


class MetaModel(MetaBody, MetaTokenGenerationMixin):
    """Mixin for a language model: it has meta-attention and never predicts a meta-token; `generate` can insert them.

    Attributes:
        base_is_elsewhere: whether `save_model` writes a delta, since the base is kept elsewhere.
    """

    base_is_elsewhere = False

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the base's forward, with meta-tokens among the labels ignored, in `shift_labels` too."""
        if len(args) > 1:
            kwargs = bind_inputs(
                self, args, kwargs if labels is None else kwargs | {"labels": labels}
            )
            args, labels = (), kwargs.pop("labels", None)
        kwargs = with_cache_renamed(kwargs)
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
        if labels is not None:
            labels, kwargs = without_meta_tokens(labels, self.config.meta_token_id, kwargs)
        return super().forward(*args, labels=labels, **kwargs)

    def push_to_hub(
        self,
        repo_id: str,
        *args: Any,
        trained: str = "",
        results: Sequence[Result] = (),
        licence: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Push as transformers does, with a model card unless the repository has one.

        Args:
            repo_id: the repository.
            *args: as in transformers.
            trained: how the model was trained, in words, for the card.
            results: what was measured: `metatokens.records.read_lines` of a file that `metatokens evaluate` wrote.
            licence: the Hub's identifier of the licence; by default that of the base's card, if it can be read.
            **kwargs: as in transformers.
        """
        self._card = str(
            model_card(self, repo_id, trained=trained, results=results, licence=licence)
        )
        return super().push_to_hub(repo_id, *args, **kwargs)

    def _upload_modified_files(self, working_dir: str | PathLike, *args: Any, **kwargs: Any) -> Any:
        readme = Path(working_dir) / "README.md"
        # By transformers, just now.
        if "has been automatically generated" in readme.read_text(encoding="utf-8"):
            readme.write_text(self._card, encoding="utf-8")
        return super()._upload_modified_files(working_dir, *args, **kwargs)


class NoClass:
    """Registered with Auto classes that cannot have meta-attention for a model: loading raises."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse."""
        raise UserError(
            "this Auto class has no class with meta-attention for the model; load it as a language model."
        )

    _from_config = from_pretrained


@functools.cache
def classes_of(model: Any, config: Any) -> tuple[Any, Any]:
    """A base's classes of models and configurations with the mixins, registered with the Auto classes."""
    meta_config = _config_of(config)
    meta_model = _class_of(model, meta_config)
    register_architecture(PREFIX + model.__name__, meta_model)
    if issubclass(meta_model, MetaModel):
        AutoModelForCausalLM.register(meta_config, meta_model, exist_ok=True)
    return meta_model, meta_config


@functools.cache
def _config_of(config: Any) -> Any:
    """A base's class of configurations with the mixin, registered with each Auto class that supports the base.

    Auto classes find classes by the configuration's name. Without a registration they would load the base.
    """
    meta_config = class_with(MetaConfig, config)
    meta_config.made_by = (_config_of, config)
    auto_classes = [
        auto for name, auto in vars(modeling_auto).items() if name.startswith("AutoModel")
    ]
    for auto in auto_classes:
        models = auto._model_mapping.get(config, None)
        if models is None:
            continue
        model = models[0] if isinstance(models, tuple) else models
        # Some take only the text part of a configuration, and some run an encoder too.
        is_wrong = (
            model.config_class is config.sub_configs.get("text_config") or config.is_encoder_decoder
        )
        auto.register(
            meta_config, NoClass if is_wrong else _class_of(model, meta_config), exist_ok=True
        )
    return meta_config


@functools.cache
def _class_of(model: Any, meta_config: Any) -> Any:
    meta_model = class_with(MetaModel if model.can_generate() else MetaBody, model)
    meta_model.config_class, meta_model.made_by = meta_config, (_class_of, model, meta_config)
    if model.can_generate():

        @functools.wraps(model.forward)  # transformers reads the names of its arguments
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return MetaModel.forward(self, *args, **kwargs)

        meta_model.forward = forward
    return meta_model


@takes_wrapped
def freeze_base(model: nn.Module, *, trained: bool = False) -> None:
    """Freeze the base of a retrofitted model, so that only what was added is trained; or unfreeze it.

    A model loaded from disk is trained whole, like any model of transformers, until this is called. A head that
    predicts no tokens, such as that of `AutoModelForSequenceClassification`, is new too and so stays trained.

    Args:
        model: a retrofitted model.
        trained: whether to unfreeze the base, except for quantised weights.

    Raises:
        UserError: if nothing was added to the model.
    """
    added = added_parameters(model)
    if not added:
        raise UserError(
            f"this {type(model).__name__} is no retrofitted model: call add_meta_attention first."
        )
    for parameter in model.parameters():
        parameter.requires_grad_(trained and parameter.is_floating_point())
    for parameter in added.values():
        parameter.requires_grad_(True)
    if (
        isinstance(model, PreTrainedModel)
        and not model.can_generate()
        and model.base_model is not model
    ):
        new_heads = [part for part in model.children() if part is not model.base_model]
        nn.ModuleList(new_heads).requires_grad_(True)


def install(model: Any) -> None:
    """Add the modules that the configuration describes to a model, with uninitialised weights.

    The weights are in float32, or in the base's precision if that is wider.
    """
    (decoder, blocks), config, table = decoder_of(model), model.config, model.get_input_embeddings()
    settings = MetaSettings.checked(**config.meta_attention)
    settings.check_blocks(own_blocks(config))
    check_entries(config.meta_token_id, config.unpadded_vocab_size, rows=len(table.weight))
    config.position_embedding = position_embedding_of(model)
    connect_head(model)
    # Keeps these layers from being quantised when a model is loaded.
    model._keep_in_fp32_modules |= {
        f"meta_attention.attention.{name}" for name in ("qkv_proj", "out_proj")
    }
    decoder.meta_config = config
    set_full_layers(blocks, settings.text_full_layers or ())
    # Installed already: the decoder was made by `AutoModel.from_config`.
    if hasattr(decoder, "meta_settings"):
        return
    decoder.meta_settings, decoder.meta_has_trained = settings, False
    decoder.meta_depth = getattr(decoder.config, "num_hidden_layers", None)
    decoder.meta_cache_layers = len(blocks) + len(settings.layers)  # of a cache of a fixed size
    decoder.register_forward_pre_hook(begin_pass, with_kwargs=True)
    decoder.register_forward_hook(note_tokens_read)
    _add_mixin(decoder, MetaDecoder)
    # Half precision would round small training steps away. PEFT's adapters are in float32 for the same reason.
    dtype = torch.promote_types(table.weight.dtype, torch.float32)
    _add_mixin(table, MetaEmbeddingTable)
    table.meta_token, table.meta_token_id = (
        MetaTokenEmbedding(table.weight.shape[1]).to(dtype),
        config.meta_token_id,
    )
    for further, (index, site) in enumerate(
        zip(settings.layers, settings.injection_points, strict=True)
    ):
        block = blocks[index]
        _add_mixin(block, MetaBlock)
        block.meta_attention = MetaModule(settings, index, len(blocks) + further).to(dtype)
        block.meta_site_has_residual = settings.point_has_residual
        block.get_submodule(site).register_forward_hook(add_at_site)


def connect_head(model: Any) -> None:
    """Make the output head of a language model mask the meta-token and unused rows."""
    if not isinstance(model, MetaModel):
        return
    head = model.get_output_embeddings()
    if "meta_token_id" not in vars(head):  # not hasattr: PEFT's wrappers forward attributes
        head.register_forward_hook(mask_logits)
    head.meta_token_id, head.used_rows = (
        model.config.meta_token_id,
        model.config.unpadded_vocab_size,
    )


def settle_adapters(model: Any, adapters: dict[str, Any]) -> None:
    """Prepare a model for PEFT's adapters, which are in its layers already.

    Adapters of a causal model without a task get one: AutoPeftModel would load them around the plain base.

    The table of embeddings has the meta-token in it. If an adapter names both in `modules_to_save`, PEFT wraps the
    meta-token again, inside the wrapper of the table. That second wrapper is never run; it freezes the meta-token that
    is, and what it saves cannot be loaded. It is taken out, so the meta-token is trained and saved with the table.

    Args:
        model: a retrofitted model.
        adapters: PEFT's configurations by the names of the adapters; changed in place.

    Raises:
        UserError: if adapters wrap the table and the meta-token in another way.
    """
    if type(model).__name__.endswith("ForCausalLM"):
        for adapter in adapters.values():
            adapter.task_type = adapter.task_type or "CAUSAL_LM"
    wrapper = model.get_input_embeddings()
    if isinstance(wrapper, MetaEmbeddingTable) or "meta_token" not in wrapper._modules:
        return
    del wrapper._modules["meta_token"]
    for name, table in wrapper.modules_to_save.items():
        table.meta_token.requires_grad_(table.weight.requires_grad)
        adapters[name].modules_to_save = [
            part for part in adapters[name].modules_to_save if part != "meta_token"
        ]
    check_table(wrapper)


def init_added_weights(model: nn.Module) -> None:
    """Initialise what was added so that it adds nothing, except weights that were loaded."""
    for module in model.modules():
        if isinstance(module, MetaModule | MetaTokenEmbedding):
            module.reset_parameters()


def _add_mixin(module: Any, mixin: type) -> None:
    add_mixin(module, mixin)
    run_new_forward(module)


def run_new_forward(module: Any) -> None:
    """Have a module whose class was changed run the new class's forward, also where accelerate moves its weights.

    accelerate keeps the forward of the class that it met on the object.
    """
    if "_old_forward" in vars(module):
        module._old_forward = functools.partial(type(module).forward, module)
