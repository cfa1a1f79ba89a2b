"""Functions for any decoder: find its blocks and its kind of positions, compute chosen logits, continue prompts."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metatokens.data.tokenizer import decode_continuation
from metatokens.errors import UserError
from metatokens.model.releases import CACHE
from metatokens.model.wrappers import takes_wrapped

# Logits at a time, 8 MB; with a large vocabulary, a batch's logits are larger than the model.
PIECE = 2**21
LEAST_TEMPERATURE = 1e-4  # of sampling; logits divided by less could be infinite


def decoder_of(model: PreTrainedModel) -> tuple[Any, Any]:
    """The module that runs a language model's blocks, and the list of its blocks.

    Raises:
        UserError: if no module has a list of so many blocks.
    """
    count = model.config.get_text_config().num_hidden_layers
    # In some models, get_decoder() returns a head.
    for root in (model.get_decoder(), model.base_model):
        for module in root.modules():
            for child in module.children():
                if isinstance(child, nn.ModuleList) and len(child) >= count:
                    return module, child
    raise UserError(
        f"a {type(model).__name__} is no decoder that can be used: it has no list of {count} blocks."
    )


def own_blocks(config: Any) -> int:
    """The number of blocks with keys and values of their own.

    In small Gemma 4 models the last blocks share those of earlier ones, and run only where logits are kept.
    """
    text = config.get_text_config()
    return text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)


def position_embedding_of(model: PreTrainedModel) -> str:
    """The kind of a decoder's positions: `learned` (a table, which limits the length), `rope` or `none`."""
    decoder, _ = decoder_of(model)
    for name, module in decoder.named_children():
        # Other tables are of tokens, in some models one per layer.
        if isinstance(module, nn.Embedding) and re.search("pos|wpe", name):
            return "learned"
    if getattr(model.config, "alibi", False):  # a Falcon with distances in place of angles
        return "none"
    has_angles = getattr(model.config.get_text_config(), "rope_parameters", None) or hasattr(
        model.config, "rotary_dim"
    )
    return "rope" if has_angles else "none"


def logits_at(
    model: Any, input_ids: Tensor, chosen: Tensor, *, mask: Tensor | None = None
) -> Iterator[Tensor]:
    """Next-token logits at some positions, row by row, in pieces of shape (positions, vocabulary).

    Args:
        model: any model that `load_model` returns, in evaluation mode.
        input_ids: (batch, length), without left padding.
        chosen: (batch, length) bool.
        mask: (batch, 1, length, length), True where a query sees a key; by default attention is causal.
    """
    # Unwraps PEFT's wrapper; the adapters stay.
    model = getattr(model, "get_base_model", lambda: model)()
    decoder, _ = decoder_of(model)
    output = decoder(input_ids, attention_mask=mask, use_cache=False)
    rows_per_piece = max(1, PIECE // model.config.get_text_config().vocab_size)
    for piece in output[0][chosen].split(rows_per_piece):
        yield _logits_of_states(model, decoder, output, piece)


def _logits_of_states(model: Any, decoder: Any, output: Any, states: Tensor) -> Tensor:
    """The logits of final states, (states, features): the model's own forward may scale or cap them.

    The blocks do not run: the decoder returns `output`, with these states in it.
    """
    output["last_hidden_state"] = states[None]
    with patch.object(decoder, "forward", lambda *args, **kwargs: output):
        return model(states.new_zeros((1, 1), dtype=torch.int64), use_cache=False).logits[0]


@torch.no_grad()
def measure_cache_share(
    model: Any, texts: Iterable[Any], *, metas_alone: bool = False
) -> dict[str, Any]:
    """Measure how much of texts a cache of keys and values keeps: fields of a `Result`.

    There are none without a text window, unless `metas_alone`.

    Args:
        model: any model that `load_model` gives; it is put into evaluation mode.
        texts: token ids, (length,) each.
        metas_alone: the cache keeps the meta-tokens alone, whatever the text window.
    """
    config = model.config
    window = 0 if metas_alone else getattr(config, "text_window", None)
    if window is None:
        return {}
    sinks = 0 if metas_alone else config.text_sinks
    counts = []
    for text in texts:
        ids = np.asarray(text)
        position = np.arange(len(ids))
        is_meta = ids == config.meta_token_id
        is_held = is_meta | (position < sinks) | (position >= len(ids) - window)
        counts.append((len(ids), is_held.sum()))
    tokens, held = np.sum(counts, axis=0).tolist()
    full_share = 0.0 if metas_alone else _share_that_keeps_all_text(model)
    share_kept = full_share + (1 - full_share) * held / tokens
    return {"text_window": window or None, "kv_kept": round(share_kept, 4)}


def _share_that_keeps_all_text(model: Any) -> float:
    """The share of the keys and values that blocks and heads without a window have."""
    one_meta_token = torch.tensor([[model.config.meta_token_id]], device=model.device)
    sizes: Counter[bool] = Counter()
    for layer in model.eval()(one_meta_token, use_cache=True)[CACHE].layers:
        if not getattr(layer, "has_notes", False):
            keeps_all_text = getattr(layer, "holds_everything", False)
            sizes[keeps_all_text] += layer.keys.nbytes + layer.values.nbytes
    return sizes[True] / sizes.total()


def left_padded(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """The ids of prompts, (prompts, longest) int64, with padding on the left, and their mask, 1 at real tokens."""
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    masks = map(torch.ones_like, ids)
    padded = pad_sequence(ids, batch_first=True, padding_value=pad_token_id, padding_side="left")
    return padded, pad_sequence([*masks], batch_first=True, padding_side="left")


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt that a model continued: the new text, and the prompt and the new text with visible meta-tokens."""

    text: str
    with_meta: str


@takes_wrapped
def continue_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int = 1,
    temperature: float = 0.0,
    **options: Any,
) -> Iterator[Continuation]:
    """Continue prompts of any lengths, given as token ids.

        [new.text for new in continue_prompts(model, tokenizer, [encode_prompt(tokenizer, "The cat")])]

    Args:
        model: any model that `load_model` gives.
        tokenizer: the model's.
        prompts: token ids, such as `encode_prompt` gives.
        batch_size: prompts per call of `generate`.
        temperature: of sampling; 0 decodes greedily, and so does anything below 0.0001, by which logits cannot be
            divided.
        options: for `model.generate`, such as `max_new_tokens`, `meta_every` and `streamer`.

    Returns:
        A continuation for each prompt, in order; each batch is generated when its first one is asked for.
    """
    options["do_sample"] = temperature >= LEAST_TEMPERATURE
    if options["do_sample"]:
        options["temperature"] = temperature
    ends = end_tokens(options.get("eos_token_id", model.generation_config.eos_token_id))
    for start in range(0, len(prompts), batch_size):
        rows = prompts[start : start + batch_size]
        ids, mask = left_padded(rows, tokenizer.eos_token_id)
        output = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            pad_token_id=tokenizer.eos_token_id,
            return_dict_in_generate=True,
            use_cache=True,  # the cache records where meta-tokens were inserted
            num_return_sequences=1,
            **options,
        )
        length = ids.shape[1]
        for row, sequence in zip(rows, output.sequences.tolist(), strict=True):
            new_ids = up_to_end(sequence[length:], ends)
            with_metas = sequence[:length] + new_ids
            for position in reversed(getattr(output[CACHE], "inserted", [])):
                if position < length + len(new_ids):
                    with_metas.insert(position, model.config.meta_token_id)
            text = decode_continuation(tokenizer, row, new_ids)
            yield Continuation(text, tokenizer.decode(with_metas[length - len(row) :]))


def end_tokens(eos_token_id: int | list[int] | None) -> list[int]:
    """The ids that end a text, by the field of a generation configuration, which may also hold one or none."""
    if eos_token_id is None:
        return []
    return eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]


def up_to_end(ids: list[int], ends: Collection[int]) -> list[int]:
    """Generated ids without the padding after their end of text."""
    for index, token in enumerate(ids, start=1):
        if token in ends:
            return ids[:index]
    return ids
