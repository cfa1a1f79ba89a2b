"""Adding a meta-token and meta-attention to a pretrained decoder."""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.quantizers.base import get_keys_to_not_convert

from metatokens.data.tokenizer import META_TOKEN, shares_its_id
from metatokens.decoder import decoder_of, own_blocks
from metatokens.errors import UserError
from metatokens.model.configuration import UNSAVED, check_layers
from metatokens.model.wrappers import uncompiled
from metatokens.retrofit.classes import (
    MetaModel,
    classes_of,
    freeze_base,
    init_added_weights,
    install,
)
from metatokens.retrofit.identity import settings_of, tables_of, weights_checksum
from metatokens.retrofit.injection_points import device_of, find_injection_points
from metatokens.retrofit.layers import run_new_forward
from metatokens.retrofit.settings import MetaSettings, check_entries


def add_meta_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    meta_token_id: int | None = None,
    heads: int = 8,
    head_size: int = 64,
    layers: Sequence[int] | None = None,
    freeze: bool = True,
) -> PreTrainedModel:
    """Add a meta-token to a decoder of transformers, and meta-attention to its blocks, in place.

    Between a block's attention and its feed-forward layer, each meta-token attends to the meta-tokens up to itself
    (paper, section 3), with heads and rotary angles of its own. The output projections start at zero, so meta-attention
    adds nothing until it is trained. As long as the base is frozen, the logits for text without meta-tokens stay
    exactly what they were. Meta-tokens, and the rows that pad the larger vocabulary, are never predicted.

    The meta-token must be trained before it is of use: a base has never seen one, and predicts text among untrained
    meta-tokens worse. With a tokenizer, its embedding starts at the mean of the embeddings of a space, a newline and a
    comma, which disturbed bases least of what we tried. Without a tokenizer, or without such entries, it starts at the
    mean of the table's first 32,768 rows.

    Args:
        model: a causal language model, as `AutoModelForCausalLM` loads it, not wrapped by PEFT or for several
            processes; torch.compile's wrapper is taken.
        tokenizer: the model's tokenizer. It gets the meta-token as `tokenizer.meta_token`, unless it has one. If the
            table of embeddings has no row for it, the table grows to a multiple of 64 rows.
        meta_token_id: instead of a tokenizer, a row of the table that no text uses.
        heads: heads of each module.
        head_size: width of one head, even.
        layers: the blocks that get a module, counted from 0. None: all, except those at the end that share the keys and
            values of others (in small Gemma 4 models), which cannot have one. Empty: the model gets the meta-token
            only, which is then known as a pause token.
        freeze: whether to freeze the base, so that only the new parameters are trained.

    Returns:
        The same model. `generate(..., meta_every=N)` inserts meta-tokens, and meta-tokens among labels are ignored.

    Raises:
        UserError: if the model has meta-tokens already, is an encoder-decoder, or has no attention to add to; if a
            number is out of range; if neither a tokenizer nor a row is given, or the tokenizer does not fit the model.
    """
    base = uncompiled(model)
    _check_base(base)
    if tokenizer is None:
        _check_row(base, meta_token_id)
    elif meta_token_id is None:
        _check_tokenizer(base, tokenizer)
    else:
        raise UserError(
            "give a tokenizer or a meta_token_id: a tokenizer gets a meta-token of its own."
        )
    count = own_blocks(base.config)
    layers = range(count) if layers is None else layers
    check_layers("layers", layers, count)
    points, point_has_residual = find_injection_points(base, layers)
    rows, width = base.get_input_embeddings().weight.shape
    # OPT-350m's table is narrower.
    settings = MetaSettings.checked(
        hidden_size=getattr(base.config.get_text_config(), "hidden_size", width),
        num_attention_heads=heads,
        head_size=head_size,
        layers=layers,
        injection_points=points,
        point_has_residual=point_has_residual,
        base=base.config.name_or_path,
        base_settings=settings_of(base.config),
        base_weights=weights_checksum(base),
        base_rows=rows,
    )
    in_use = rows
    start: list[int] = []
    if tokenizer is not None:
        meta_token_id = _add_to_tokenizer(tokenizer)
        in_use = max(rows, len(tokenizer))
        start = _separators(tokenizer)
    assert meta_token_id is not None  # as checked
    convert(base, settings, meta_token_id, in_use, freeze=freeze, start=start)
    return model


def _check_base(model: Any) -> None:
    name = type(model).__name__
    if (
        not isinstance(model, PreTrainedModel)
        or model.get_output_embeddings() is None
        or not model.can_generate()
    ):
        raise UserError(
            f"meta-attention cannot be added to a {name}: give a causal language model of transformers."
        )
    if isinstance(model, MetaModel) or model.config.model_type == "meta_gpt2":
        raise UserError(f"this {name} has meta-tokens already.")
    if model.config.is_encoder_decoder:
        raise UserError(
            f"meta-attention cannot be added to a {name}, an encoder-decoder; give a decoder."
        )
    if getattr(transformers, name, None) is not type(model):
        warnings.warn(
            f"{name} is no class of transformers, so no program can load a folder that save_pretrained writes of it. "
            "save_meta saves what is added, for load_meta.",
            stacklevel=3,
        )


def _check_row(model: PreTrainedModel, meta_token_id: Any) -> None:
    """Refuse a row for the meta-token that the model's table of embeddings or its head does not have."""
    rows = model.get_input_embeddings().weight.shape[0]
    if meta_token_id is None:
        raise UserError(
            "give the model's tokenizer, or as meta_token_id a row of its embeddings that no text uses."
        )
    check_entries(meta_token_id, rows, rows)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if meta_token_id in np.ravel(getattr(model.generation_config, name)):
            raise UserError(
                f"meta_token_id is {meta_token_id}, the model's {name}: give a row that no text uses."
            )
    _check_head(model, meta_token_id)


def _check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with entries that the model does not have, or whose next entry would share another's id."""
    rows, vocabulary = model.get_input_embeddings().weight.shape[0], tokenizer.get_vocab()
    _check_head(model, rows - 1)
    meta_token = getattr(tokenizer, "meta_token", None)
    texts = vocabulary.keys() - {meta_token or META_TOKEN}
    without_row = [token for token in texts if vocabulary[token] >= rows]
    if without_row:
        first = min(without_row, key=vocabulary.__getitem__)
        raise UserError(
            f"the tokenizer has entries for which the model has no row, such as {first!r}: resize the model's "
            "embeddings for them, and save it, before it gets meta-tokens."
        )
    highest = max(vocabulary.values())
    if shares_its_id(tokenizer) or (meta_token is None and highest >= len(tokenizer)):
        raise UserError(
            f"the tokenizer's vocabulary has gaps: {len(tokenizer)} entries with ids up to {highest}. A token that is "
            "added to it would share the id of another; number its entries from 0 without gaps first."
        )


def _check_head(model: PreTrainedModel, row: int) -> None:
    """Refuse a row that the model's output head does not have."""
    head_rows = model.get_output_embeddings().weight.shape[0]
    if row >= head_rows:
        raise UserError(
            f"the output head has {head_rows} rows, fewer than the table of embeddings: give, without a tokenizer, as "
            "meta_token_id one of the head's rows that no text uses."
        )


def _add_to_tokenizer(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of a tokenizer's meta-token, which is added unless it is there."""
    if getattr(tokenizer, "meta_token", None) is None:
        # Allowed as a key.
        tokenizer.SPECIAL_TOKENS_ATTRIBUTES = [*tokenizer.SPECIAL_TOKENS_ATTRIBUTES, "meta_token"]
        tokenizer.add_special_tokens({"meta_token": META_TOKEN})
    return tokenizer.convert_tokens_to_ids(tokenizer.meta_token)


def _separators(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a space, a newline and a comma, where the vocabulary (byte-level or SentencePiece) has them."""
    vocabulary = tokenizer.get_vocab()
    ids = []
    for spellings in (("Ġ", "▁", " "), ("Ċ", "<0x0A>", "\n"), (",",)):
        known = [vocabulary[token] for token in spellings if token in vocabulary]
        ids += known[:1]
    return ids


def convert(
    model: PreTrainedModel,
    settings: MetaSettings,
    meta_token_id: int,
    in_use: int,
    *,
    freeze: bool = True,
    start: Sequence[int] = (),
) -> None:
    """Change a base, in place, as the settings describe: its vocabulary, its classes, its modules.

    A table of fewer than `in_use` rows grows. The meta-token starts at the mean embedding of the ids in `start`; if
    there are none, of the table's first 32,768 rows.
    """
    _unshare_configuration(model)
    rows = model.get_input_embeddings().weight.shape[0]
    if in_use > rows:
        model.resize_token_embeddings(in_use, pad_to_multiple_of=64, mean_resizing=False)
        _fill_new_rows(model, rows)
    meta_model, meta_config = classes_of(type(model), type(model.config))
    model.__class__ = meta_model
    model.config.__class__ = meta_config
    run_new_forward(model)
    model.config.meta_attention = settings.model_dump()
    model.config.meta_token_id = meta_token_id
    model.config.unpadded_vocab_size = in_use
    _keep_unquantised(model)
    install(model)
    freeze_base(model, trained=not freeze)
    _init_added(model, start)
    # PEFT and TRL load a model again by its name. By the base's name they would load the base.
    model.name_or_path = model.config.name_or_path = UNSAVED


def _unshare_configuration(model: PreTrainedModel) -> None:
    """Give a model its own copy of its configuration, which other models may share."""
    copies: dict[int, Any] = {}
    deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                setattr(module, name, copies[id(value)])


def _keep_unquantised(model: PreTrainedModel) -> None:
    """Have a quantised model, when it is loaded, leave the added modules as they are."""
    settings: Any = getattr(model.config, "quantization_config", None)
    if hasattr(settings, "llm_int8_skip_modules"):
        skipped = settings.llm_int8_skip_modules or get_keys_to_not_convert(model)
        settings.llm_int8_skip_modules = [*skipped, r".*\.meta_attention"]


@torch.no_grad()
def _fill_new_rows(model: PreTrainedModel, rows: int) -> None:
    """Set the new rows of the tables of embeddings and of the head to the mean of the first `rows`.

    The model masks their logits. Losses that use the head's weights directly, as TRL's do, count them, and are too
    large by log(1 + new / rows) at most: the mean of the logits is below the logarithm of their mean exponential.
    """
    for module in tables_of(model):
        for values in (module.weight, getattr(module, "bias", None)):
            if values is not None and values.is_floating_point() and not values.is_meta:
                values[rows:] = values[:rows].float().mean(dim=0)


@torch.no_grad()
def _init_added(model: PreTrainedModel, start: Sequence[int]) -> None:
    """Initialise what was added, on the devices of the modules next to it.

    Without ids to start from, the meta-token starts at the mean of the table's first 32,768 rows. Zero would disturb a
    base less, but there the gradient of RMSNorm is a thousand times too large.
    """
    table = model.get_input_embeddings()
    _, blocks = decoder_of(model)
    device = device_of(table)
    table.meta_token.to(device)
    for layer in model.config.meta_attention["layers"]:
        blocks[layer].meta_attention.to(device_of(blocks[layer]))
    init_added_weights(model)
    first_rows = range(min(table.weight.shape[0], 32_768))
    ids = torch.tensor(start or first_rows, device=device)
    embeddings = table(ids[ids != model.config.meta_token_id])
    table.meta_token.weight.copy_(embeddings.float().mean(dim=0))
