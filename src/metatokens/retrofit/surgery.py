"""Giving a pretrained decoder meta-tokens and meta-attention."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.quantizers.base import get_keys_to_not_convert

from metatokens.data.tokenizer import META_TOKEN
from metatokens.decoder import decoder_of, position_embedding_of
from metatokens.errors import UserError
from metatokens.retrofit.classes import UNSAVED, MetaModel, classes_of, first_weights, freeze_base, install
from metatokens.retrofit.identity import settings_of, weight_checksums
from metatokens.retrofit.settings import MetaSettings
from metatokens.retrofit.sites import device_of, find_sites


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
    """Give a decoder of transformers a meta-token and, in each block, meta-attention; in place.

    Between a block's attention and its feed-forward layer the meta-tokens attend causally to one another (paper,
    section 3), by heads and rotary angles of their own. The new output projections start at zero, so that until they
    are trained they add nothing. For text without meta-tokens the model computes exactly what it did, as long as the
    base is not trained. Meta-tokens and rows that no text uses are never predicted.

    The meta-token has to be trained before it is of use: a base has never seen one, and predicts the text among
    untrained ones worse. With a tokenizer, its embedding begins at the mean of a space's, a newline's and a comma's,
    which disturbs a base least of what was tried; otherwise at the mean of the table.

    Args:
        model: a causal language model, as `AutoModelForCausalLM` loads it; not one that PEFT has wrapped.
        tokenizer: its tokenizer, to which the meta-token is added as `tokenizer.meta_token`, unless it has one. Where
            the table of embeddings has no row for it, it grows to a multiple of 64 rows.
        meta_token_id: in place of a tokenizer, a row of the table that no text uses.
        heads: of each module.
        head_size: width of one head, even.
        layers: the blocks that get a module; None: all; empty: meta-tokens alone, known as pause tokens.
        freeze: whether only the new parameters are trained from here on.

    Returns:
        The same model. `generate(..., meta_every=N)` inserts meta-tokens; labels that are meta-tokens are not learned.

    Raises:
        UserError: if the model has meta-attention already, is an encoder-decoder, or has no attention beside which to
            put it; if there is neither a tokenizer nor a row, or the tokenizer has other entries without one, or gaps
            between its ids; or if a number is impossible.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None or not model.can_generate():
        raise UserError(f"meta-attention cannot be added to a {name}: give a causal language model of transformers.")
    if isinstance(model, MetaModel) or model.config.model_type == "meta_gpt2":
        raise UserError(f"this {name} has meta-tokens already.")
    if model.config.is_encoder_decoder:
        raise UserError(f"meta-attention cannot be added to a {name}, an encoder-decoder; give a decoder.")
    text = model.config.get_text_config()
    count = text.num_hidden_layers
    layers = range(count) if layers is None else layers
    is_list = isinstance(layers, range | list | tuple) and all(type(one) is int for one in layers)
    if not is_list or sorted({*layers} & {*range(count)}) != list(layers):
        raise UserError(f"layers are {layers}; give a list of some of 0 to {count - 1}, ascending.")
    layers = tuple(layers)
    sites, site_has_residual = find_sites(model, layers)
    settings = MetaSettings(
        hidden_size=model.get_input_embeddings().weight.shape[1],
        num_attention_heads=heads,
        head_size=head_size,
        layers=layers,
        sites=sites,
        site_has_residual=site_has_residual,
        base=model.config.name_or_path,
        base_settings=settings_of(model.config),
        base_weights=weight_checksums(model),
    )
    rows = used = model.get_input_embeddings().weight.shape[0]
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        raise UserError(f"the tokenizer is a {type(tokenizer).__name__}; give one of transformers.")
    head = model.get_output_embeddings().weight.shape[0]
    if head < rows and (tokenizer is not None or meta_token_id is None or meta_token_id >= head):
        raise UserError(
            f"the output head of this {name} has {head} rows and its table of embeddings {rows}: give, without a "
            "tokenizer, as meta_token_id one of the head's rows that no text uses."
        )
    if tokenizer is not None:
        meta = getattr(tokenizer, "meta_token", None) or META_TOKEN
        if further := sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= rows and token != meta):
            raise UserError(
                f"the tokenizer has entries for which the model has no row, such as {further[0][1]!r}: resize the "
                "model's embeddings for them, and save it, before it gets meta-tokens."
            )
        highest = max(tokenizer.get_vocab().values())
        if getattr(tokenizer, "meta_token", None) is None and highest >= len(tokenizer):
            raise UserError(
                f"the tokenizer's vocabulary has gaps: {len(tokenizer)} entries with ids up to {highest}. A token that "
                "is added to it would share the id of another; number its entries from 0 without gaps first."
            )
        meta_token_id = _in_tokenizer(tokenizer)
        used = max(rows, len(tokenizer))
    elif meta_token_id is None:
        raise UserError("give the model's tokenizer, or as meta_token_id a row of its embeddings that no text uses.")
    elif type(meta_token_id) is not int or not 0 <= meta_token_id < rows:
        raise UserError(f"meta_token_id {meta_token_id} is outside the {rows} rows of the table of embeddings.")
    alike = [] if tokenizer is None else _separators(tokenizer)
    put_in(model, settings, meta_token_id, used, freeze=freeze, alike=alike)
    return model


def put_in(
    model: PreTrainedModel,
    settings: MetaSettings,
    meta_token_id: int,
    used: int,
    *,
    freeze: bool = True,
    alike: Sequence[int] = (),
) -> None:
    """Change a model as the settings tell: rows of its table, its classes, its modules.

    Args:
        model: the base, changed in place.
        settings: sizes and places of meta-attention.
        meta_token_id: the meta-token's.
        used: the entries that are in use then; the table grows where it has fewer rows.
        freeze: whether the base is frozen.
        alike: ids of tokens at whose mean the meta-token begins.
    """
    _own_configuration(model)
    rows = model.get_input_embeddings().weight.shape[0]
    if used > rows:
        model.resize_token_embeddings(used, pad_to_multiple_of=64, mean_resizing=False)
        _fill(model, rows)
    classes = classes_of(type(model), type(model.config))  # type: ignore[arg-type]  # a class is hashable
    model.__class__, model.config.__class__ = classes
    model.config.meta_attention = asdict(settings)
    model.config.meta_token_id, model.config.unpadded_vocab_size = meta_token_id, used
    model.config.position_embedding = position_embedding_of(model)
    quantised: Any = getattr(model.config, "quantization_config", None)
    if hasattr(quantised, "llm_int8_skip_modules"):
        skipped = quantised.llm_int8_skip_modules or get_keys_to_not_convert(model)
        quantised.llm_int8_skip_modules = [*skipped, r".*\.meta_attention"]
    install(model)
    freeze_base(model, trained=not freeze)
    _start(model, alike)
    # PEFT and TRL load a model again by its name, and by the base's they would get the base.
    model.name_or_path = model.config.name_or_path = UNSAVED


def _own_configuration(model: PreTrainedModel) -> None:
    """Give a model a copy of its configuration, which other models may share."""
    copies: dict[int, Any] = {}
    deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                setattr(module, name, copies[id(value)])


def _in_tokenizer(tokenizer: PreTrainedTokenizerBase) -> int:
    if getattr(tokenizer, "meta_token", None) is None:
        tokenizer.SPECIAL_TOKENS_ATTRIBUTES = [*tokenizer.SPECIAL_TOKENS_ATTRIBUTES, "meta_token"]  # allowed as a key
        tokenizer.add_special_tokens({"meta_token": META_TOKEN})
    return tokenizer.convert_tokens_to_ids(tokenizer.meta_token)


@torch.no_grad()
def _fill(model: PreTrainedModel, rows: int) -> None:
    """Make the rows behind the first ones their mean, in the table of embeddings and in the output head.

    Who takes the head's weights by themselves, as TRL's losses do, counts entries that the head leaves out. With so
    many rows more such a loss is too large by log(1 + more / rows) at most: the mean of the logits is below the
    logarithm of their mean exponential.
    """
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        for values in (module.weight, getattr(module, "bias", None)):
            if values is not None and values.is_floating_point() and not values.is_meta:
                values[rows:] = values[:rows].float().mean(dim=0)


@torch.no_grad()
def _start(model: PreTrainedModel, alike: Sequence[int]) -> None:
    """First weights, on the devices of their neighbours: modules that add nothing, and a token between some others.

    With no token to start from it is the mean of the table. Zero would disturb a base less, but the gradient of RMSNorm
    is a thousand times too large there.
    """
    table, (_, blocks) = model.get_input_embeddings(), decoder_of(model)
    device = device_of(table)
    table.meta_token.to(device)
    for index in model.config.meta_attention["layers"]:
        blocks[index].meta_attention.to(device_of(blocks[index]))
    first_weights(model)
    ids = torch.tensor(alike or range(min(table.weight.shape[0], 32_768)), device=device)
    table.meta_token.weight.copy_(table(ids[ids != model.config.meta_token_id]).float().mean(dim=0))


def _separators(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a space, a newline and a comma, each as far as a vocabulary has it, bytewise or of SentencePiece."""
    vocabulary = tokenizer.get_vocab()
    spellings = (("Ġ", "▁", " "), ("Ċ", "<0x0A>", "\n"), (",",))
    found = (next((vocabulary[one] for one in names if one in vocabulary), None) for names in spellings)
    return [one for one in found if one is not None]
