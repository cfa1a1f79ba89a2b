"""The classes of a retrofitted model and its configuration: the base's own, with a mixin ahead.

Each Auto class that has a class for the base has one for the retrofitted model: `AutoModel` the decoder without a head,
`AutoModelForSequenceClassification` one with another head, and so on. All of them have meta-attention, or are refused.

They have the base's names, since transformers and PEFT find their settings for a model by its name. On disk the model
type is `meta_tokens`, and the architecture has a prefix, so that a program without this package refuses the folder,
instead of leaving weights out. A class that a user names, such as `LlamaForCausalLM`, leaves them out, with a warning.
"""

import functools
import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from metatokens.decoder import decoder_of
from metatokens.errors import UserError
from metatokens.model.cache import derived, give
from metatokens.model.configuration import write_remote_code
from metatokens.model.generation import MetaTokenGenerationMixin, mark_as_own
from metatokens.model.labels import without_meta_tokens
from metatokens.model.vocabulary import MetaVocabulary
from metatokens.records import Result
from metatokens.retrofit.card import model_card
from metatokens.retrofit.layers import (
    MetaBlock,
    MetaEmbedding,
    MetaModule,
    MetaRow,
    add_at_site,
    find_rows,
    forget_rows,
    leave_out,
)
from metatokens.retrofit.settings import MetaSettings

MODEL_TYPE = "meta_tokens"
# The name of a model that is on no disk. Libraries that load a model again by its name show it in their error.
UNSAVED = "this retrofitted model was not saved: call model.save_pretrained(folder) first"
# Names of architectures on disk begin with it. TRL and serving engines take the class of transformers that has the name
# on disk. Without the prefix they would leave meta-attention out.
PREFIX = "MetaTokens"
_AUTO_MAP = {"AutoConfig": "metatokens_classes.MetaTokensConfig"}


class MetaConfig(PreTrainedConfig):
    """Mixin for a base's configuration, which beside its own has four attributes.

    Attributes:
        meta_token_id: the meta-token's row of the vocabulary.
        unpadded_vocab_size: entries in use; the rows behind them are never generated.
        position_embedding: the base's, `learned`, `rope` or `none`, as in `MetaGPT2Config`.
        meta_attention: a `MetaSettings` as a dictionary.
    """

    def to_json_string(self, *args: Any, **kwargs: Any) -> str:
        """As the base's, under this package's model type."""
        given = json.loads(super().to_json_string(*args, **kwargs))
        if (base := Path(given["meta_attention"]["base"])).is_absolute():
            given["meta_attention"]["base"] = f"../{base.name}"  # a reader of the file does not see where it was
        own = {"model_type": MODEL_TYPE, "base_model_type": type(self).model_type}
        own["architectures"] = [PREFIX + one.removeprefix(PREFIX) for one in given.get("architectures") or ()]
        return json.dumps(given | own | {"auto_map": _AUTO_MAP}, indent=2, sort_keys=True) + "\n"

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        """As transformers', with the file that `auto_map` names beside `config.json`."""
        write_remote_code(save_directory, _AUTO_MAP)
        super().save_pretrained(save_directory, *args, **kwargs)


class MetaTokensConfig(PreTrainedConfig):
    """What transformers finds under the model type on disk; what it loads is the base's configuration."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> PreTrainedConfig:
        """The configuration of a retrofitted model.

        Raises:
            UserError: if it names no language model of transformers.
        """
        given = {key: value for key, value in config_dict.items() if key not in ("model_type", "auto_map")}
        if not given:
            raise UserError(
                "this folder holds what was added to a base, and not the base: metatokens.load_meta puts it into one."
            )
        base = given.pop("base_model_type", None)
        name = next(iter(given.get("architectures") or ()), "").removeprefix(PREFIX)
        model = getattr(transformers, name, None)
        if base not in CONFIG_MAPPING or not (isinstance(model, type) and issubclass(model, PreTrainedModel)):
            raise UserError(f"a retrofitted {base} with architectures {given.get('architectures')} is not known here.")
        # TRL asks a configuration of an architecture that transformers does not have for its `auto_map`.
        return classes_of(model, CONFIG_MAPPING[base])[1].from_dict(given | {"auto_map": _AUTO_MAP}, **kwargs)


class MetaBody(MetaVocabulary):
    """Mixin for a model with a retrofitted decoder in it: it has meta-attention."""

    saved_as = UNSAVED

    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        model: Any = super()
        model.__init__(config, *args, **kwargs)
        install(self)
        first_weights(self)

    def initialize_weights(self: Any) -> None:
        """As transformers', which calls it for weights that are on no disk; also for those of what was added."""
        model: Any = super()
        model.initialize_weights()
        first_weights(self)

    def save_pretrained(self: Any, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        """As transformers'. TRL and PEFT then find a model that had no name of its own in the last such folder.

        Except for a Trainer's checkpoints, which come and go.
        """
        model: Any = super()
        mark_as_own(getattr(self, "generation_config", None))
        model.save_pretrained(save_directory, *args, **kwargs)
        if self.config.name_or_path == self.saved_as and not Path(save_directory).name.startswith("checkpoint-"):
            self.saved_as = self.name_or_path = self.config.name_or_path = str(save_directory)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers'.

        Raises:
            UserError: if weights of meta-attention are not there, or not under names that transformers finds them by.
        """
        base: Any = super()
        model, report = base.from_pretrained(*args, output_loading_info=True, **kwargs)
        if lacking := sorted(own_parameters(model).keys() & set(report["missing_keys"])):
            raise UserError(
                f"the weights lack what was added to the {cls.__name__}, such as {lacking[0]}. If transformers gives "
                "weights of this type other names, save what was added by save_meta, and load it by load_meta."
            )
        return (model, report) if output_loading_info else model

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As `MetaVocabulary`'s; the head, which may be another module then, leaves out what it did."""
        table = super().resize_token_embeddings(*args, **kwargs)
        connect_head(self)
        return table


class MetaModel(MetaBody, MetaTokenGenerationMixin):
    """Mixin for a language model: it has meta-attention, never predicts a meta-token, and inserts them by policy.

    Attributes:
        base_is_elsewhere: whether this package saves what was added alone, since the base is kept by somebody else.
    """

    base_is_elsewhere = False

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        """As the base's, but a meta-token among the labels counts as -100, in `shift_labels` too."""
        if not torch.compiler.is_compiling():  # since then, an adapter may have replaced the head
            connect_head(self)
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
        """As transformers', with a model card, unless the repository has one.

        Args:
            repo_id: the repository.
            *args: as transformers'.
            trained: how the model was trained, in words, for the card.
            results: what was measured, such as `metatokens.records.read_lines` reads of `metatokens evaluate --out`.
            licence: as the Hub abbreviates it; by default that of the base's card, where it can be read.
            **kwargs: as transformers'.
        """
        self._card = str(model_card(self, repo_id, trained=trained, results=results, licence=licence))
        return super().push_to_hub(repo_id, *args, **kwargs)

    def _upload_modified_files(self, working_dir: str | PathLike, *args: Any, **kwargs: Any) -> Any:
        readme = Path(working_dir) / "README.md"
        if "has been automatically generated" in readme.read_text(encoding="utf-8"):  # by transformers, a moment ago
            readme.write_text(self._card, encoding="utf-8")
        return super()._upload_modified_files(working_dir, *args, **kwargs)


class NoClass:
    """A refusal, registered where an Auto class cannot load a retrofitted model with meta-attention."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse.

        Raises:
            UserError: always.
        """
        raise UserError("this Auto class has no class with meta-attention for the model; load it as a language model.")

    _from_config = from_pretrained


@functools.cache
def classes_of(model: Any, config: Any) -> tuple[Any, Any]:
    """A base's classes with the mixins, known to the Auto classes; a language model also to `AutoModelForCausalLM`."""
    meta_config = _config_of(config)
    meta_model = _class_of(model, meta_config)
    if issubclass(meta_model, MetaModel):
        AutoModelForCausalLM.register(meta_config, meta_model, exist_ok=True)
    return meta_model, meta_config


@functools.cache
def _config_of(config: Any) -> Any:
    """A base's class of configurations with the mixin. Each Auto class that has a class for the base gets one for it.

    An Auto class finds classes by the configuration's name, and so would load the base otherwise.
    """
    meta_config = derived(MetaConfig, config)
    for name, auto in vars(modeling_auto).items():
        if name.startswith("AutoModel") and (found := auto._model_mapping.get(config, None)) is not None:
            model = found[0] if isinstance(found, tuple) else found
            # Some take only the text's part of a configuration, and some run an encoder too.
            is_wrong = model.config_class is config.sub_configs.get("text_config") or config.is_encoder_decoder
            auto.register(meta_config, NoClass if is_wrong else _class_of(model, meta_config), exist_ok=True)
    return meta_config


@functools.cache
def _class_of(model: Any, meta_config: Any) -> Any:
    meta_model = derived(MetaModel if model.can_generate() else MetaBody, model)
    meta_model.config_class = meta_config
    if model.can_generate():

        @functools.wraps(model.forward)  # transformers reads the names of its arguments
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return MetaModel.forward(self, *args, **kwargs)

        meta_model.forward = forward
    return meta_model


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What `install` put into a model, by name."""
    own = {"meta_attention", "meta_token"}
    return {name: one for name, one in model.named_parameters() if own & set(name.split("."))}


def freeze_base(model: nn.Module, *, trained: bool = False) -> None:
    """Train what was added to a base alone; or the base too, if it is to be `trained`.

    A model from disk is trained whole, as any of transformers, until this is called.

    Args:
        model: a retrofitted model.
        trained: whether the base is trained too, as far as its weights are not quantised.

    Raises:
        UserError: if nothing was added to the model.
    """
    if not (own := own_parameters(model)):
        raise UserError(f"this {type(model).__name__} is no retrofitted model: add_meta_attention makes one of it.")
    for parameter in model.parameters():
        parameter.requires_grad_(trained and parameter.is_floating_point())
    for parameter in own.values():
        parameter.requires_grad_(True)


def install(model: Any) -> None:
    """Put the modules that the configuration names into a model, with weights that mean nothing yet.

    They are in float32 where the base is in half precision, and otherwise as the base.
    """
    connect_head(model)
    settings = MetaSettings(**model.config.meta_attention)
    decoder, blocks = decoder_of(model)
    # Read where a model is loaded quantised, which these layers are not to be.
    model._keep_in_fp32_modules |= {f"meta_attention.attention.{name}" for name in ("qkv_proj", "out_proj")}
    if hasattr(decoder, "meta_settings"):  # by `AutoModel`, which a model with another head may be made from
        return
    decoder.meta_settings, decoder.meta_has_trained = settings, False
    decoder.register_forward_pre_hook(find_rows, with_kwargs=True)
    decoder.register_forward_hook(forget_rows, always_call=True)
    table = model.get_input_embeddings()
    # Training takes small steps, which half precision rounds away; PEFT keeps its adapters so too.
    dtype = torch.promote_types(table.weight.dtype, torch.float32)
    _give(table, MetaEmbedding)
    table.meta_token, table.meta_token_id = MetaRow(settings.hidden_size).to(dtype), model.config.meta_token_id
    for index, site in zip(settings.layers, settings.sites, strict=True):
        block = blocks[index]
        _give(block, MetaBlock)
        block.meta_attention = MetaModule(settings, index).to(dtype)
        block.meta_site_has_residual = settings.site_has_residual
        block.get_submodule(site).register_forward_hook(add_at_site)


def connect_head(model: Any) -> None:
    """Have the output head, if there is one, leave out the meta-token and the rows that no text uses."""
    if not isinstance(model, MetaModel):
        return
    head = model.get_output_embeddings()
    if "meta_token_id" not in vars(head):  # PEFT's wrappers show the attributes of what they wrap
        head.register_forward_hook(leave_out)
    head.meta_token_id, head.used_rows = model.config.meta_token_id, model.config.unpadded_vocab_size


def first_weights(model: nn.Module) -> None:
    """Give what was added weights with which it adds nothing, except where weights were loaded."""
    for module in model.modules():
        if isinstance(module, MetaModule | MetaRow):
            module.start()


def _give(module: Any, mixin: type) -> None:
    give(module, mixin)
    if "_old_forward" in vars(module):  # accelerate keeps the class's own forward on the object
        module._old_forward = functools.partial(type(module).forward, module)
