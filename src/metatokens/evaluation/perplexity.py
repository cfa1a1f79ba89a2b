"""Perplexity on held-out text, over the same text tokens for every model.

All models read the same blocks of text. The first token of a block is not scored, since without inserted tokens
nothing precedes it. Meta-tokens are context, never targets.
"""

import math
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import entropy
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metatokens.data.corpus import read_corpus
from metatokens.data.insertion import IGNORED_LABEL, insert_meta_tokens, labels_of, meta_token_count
from metatokens.data.landmarks import Landmarks
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import encode_documents
from metatokens.decoder import logits_at, measure_cache_share
from metatokens.errors import UserError
from metatokens.evaluation.intervals import normal_interval
from metatokens.model.positions import check_length
from metatokens.model.wrappers import takes_wrapped
from metatokens.records import About, Result

BATCH = 16  # blocks per forward pass
PAPER_FRACTION = 0.1  # k

# Ids and labels of a block with its meta-tokens, each (positions,) int64.
Block = tuple[np.ndarray, np.ndarray]


@torch.inference_mode()
def block_losses(model: PreTrainedModel, blocks: Sequence[Block]) -> np.ndarray:
    """The summed negative log-likelihood (nats) of each block's text tokens except the first, (blocks,) float64.

    The model may be any; it is put into evaluation mode.
    """
    model.eval()
    losses: list[float] = []
    for start in range(0, len(blocks), BATCH):
        batch = blocks[start : start + BATCH]
        ids = _padded([ids for ids, _ in batch], 0).to(model.device)
        labels = _padded([labels for _, labels in batch], IGNORED_LABEL).to(model.device)
        scored_of_each = (labels[:, 1:] != IGNORED_LABEL).sum(dim=1).tolist()
        of_blocks = token_losses(model, ids, labels).split(scored_of_each)
        losses += [of_block.sum().item() for of_block in of_blocks]
    return np.array(losses)


@torch.inference_mode()
def token_losses(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood (nats) of each token that has a label, row by row, (tokens,) float64.

    Args:
        model: in evaluation mode.
        ids: (batch, length).
        labels: the same, with IGNORED_LABEL where a token is not scored. The first tokens of rows are never scored.
    """
    is_scored = labels[:, 1:] != IGNORED_LABEL
    remaining = labels[:, 1:][is_scored]
    losses = []
    # In pieces: the logits of all tokens would take gigabytes.
    for logits in logits_at(model, ids, pad(is_scored, (0, 1))):
        targets, remaining = remaining[: len(logits)], remaining[len(logits) :]
        losses.append(cross_entropy(logits.double(), targets, reduction="none"))
    return torch.cat(losses)


def _padded(rows: list[np.ndarray], padding: int) -> torch.Tensor:
    return pad_sequence(
        [torch.from_numpy(row) for row in rows], batch_first=True, padding_value=padding
    )


@takes_wrapped
def perplexity(
    model: PreTrainedModel,
    text: np.ndarray,
    subject: About,
    *,
    block_size: int,
    fraction: float,
    placement: str,
    landmarks: Landmarks | None = None,
) -> Result:
    """Perplexity of `text` with a 95 % interval over blocks, which are treated as independent.

    Args:
        model: the model.
        text: token ids of the held-out text, (tokens,).
        subject: the model and the name of the text, for the result.
        block_size: n. A block has n - floor(k n) text tokens, with or without meta-tokens. Text after the last whole
            block is ignored.
        fraction: k.
        placement: of the inserted meta-tokens; `none` inserts none.
        landmarks: in place of a placement, a rule for inserting meta-tokens; it may make blocks longer than n.

    Raises:
        UserError: if the text has fewer than two blocks, a block has nothing to predict, the model has no meta-token to
            insert, no meta-token is inserted though the fraction is above 0 or there is a rule, or a block is longer
            than the model's learned positions.
    """
    condition = placement if landmarks is None else landmarks.rule
    meta_token_id: Any = model.config.meta_token_id
    if condition != "none" and meta_token_id is None:
        raise UserError(
            f"{subject.model} has no meta_token_id, so no meta-tokens can be inserted: set the placement to none."
        )
    texts = _text_blocks(text, block_size - meta_token_count(block_size, fraction))
    count, text_per_block = texts.shape
    if landmarks is None:
        blocks = _with_placement(texts, meta_token_id, block_size, fraction, placement)
    else:
        blocks = _with_landmarks(texts, meta_token_id, landmarks)
    longest = max(len(ids) for ids, _ in blocks)
    if longest == text_per_block and condition != "none" and (fraction or landmarks is not None):
        raise UserError(
            f"{condition} inserts no meta-token into blocks of {block_size} tokens of this text."
        )
    check_length(model.config, longest)
    loss_per_token = block_losses(model, blocks) / (text_per_block - 1)
    mean = loss_per_token.mean()
    low, high = normal_interval(mean, loss_per_token.std(ddof=1) / math.sqrt(count))
    return Result(
        **measure_cache_share(model, (ids for ids, _ in blocks)),
        **subject.present_fields(
            position_embedding=model.config.position_embedding,
            condition=condition,
            length=block_size,
            metric="perplexity",
        ),
        fraction=None if fraction == PAPER_FRACTION else fraction,
        value=math.exp(mean),
        n=count * (text_per_block - 1),
        low=math.exp(low),
        high=math.exp(high),
        chance=math.exp(entropy(np.bincount(texts.reshape(-1)))),  # the lowest without context
    )


def _text_blocks(text: np.ndarray, size: int) -> np.ndarray:
    """The whole blocks of a text, (blocks, size) int64."""
    count = len(text) // size
    if count < 2 or size < 2:
        raise UserError(
            f"the text has {len(text)} tokens; perplexity needs two blocks of {size} at least, and something to "
            "predict in each."
        )
    return np.asarray(text[: count * size], dtype=np.int64).reshape(count, size)


def _with_placement(
    texts: np.ndarray, meta_token_id: int, block_size: int, fraction: float, placement: str
) -> list[Block]:
    """The blocks with meta-tokens by a placement, drawn anew for each."""
    if placement == "none":  # also for a model without a meta-token
        return [(text, text) for text in texts]
    return [
        insert_meta_tokens(
            text,
            meta_token_id=meta_token_id,
            block_size=block_size,
            fraction=fraction,
            placement=placement,
            generator=np.random.default_rng(row),
        )
        for row, text in enumerate(texts)
    ]


def _with_landmarks(texts: np.ndarray, meta_token_id: int, landmarks: Landmarks) -> list[Block]:
    """The blocks with a meta-token behind each landmark."""
    are_landmarks = landmarks(texts.reshape(-1)).reshape(texts.shape)
    blocks = []
    for text, is_landmark in zip(texts, are_landmarks, strict=True):
        ids = np.insert(text, np.flatnonzero(is_landmark) + 1, meta_token_id)
        blocks.append((ids, labels_of(ids, meta_token_id)))
    return blocks


def held_out_text(
    source: str, tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> np.ndarray:
    """Read the text that perplexity is measured on, as token ids, (tokens,) int64.

    Args:
        source: the folder of a token store, whose held-out split is read; or a corpus spec, read whole.
        tokenizer: the model's.
        limit: tokens to read at most.

    Raises:
        UserError: if the text cannot be read or is empty, or the store has another tokenizer.
    """
    if Path(source, "manifest.json").is_file():
        store = TokenStore(Path(source))
        if store.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise UserError(
                f"the token store {source} was made with another tokenizer than the model's."
            )
        return store.tokens("held_out")[:limit]
    documents = (encode_documents(tokenizer, [text])[0] for text in read_corpus(source))
    ids = np.fromiter(islice(chain.from_iterable(documents), limit), np.int64)
    if not len(ids):
        raise UserError(f"the corpus {source} holds no text.")
    return ids
