"""Perplexity on held-out text, over the same text tokens for every model.

All models read the same blocks of text. The first token of a block is not scored, since without inserted tokens
nothing precedes it. Meta-tokens are context, never targets.
"""

import math
from collections.abc import Callable
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

# Row -> ids and labels of a block, each (positions,) int64.
BlockOf = Callable[[int], tuple[np.ndarray, np.ndarray]]


@torch.inference_mode()
def block_losses(model: PreTrainedModel, block_of: BlockOf, count: int) -> np.ndarray:
    """The summed negative log-likelihood (nats) of each block's text tokens except the first, (blocks,) float64.

    Args:
        model: any model; it is put into evaluation mode.
        block_of: gives the block of a number, with its meta-tokens.
        count: blocks.
    """
    model.eval()
    losses: list[float] = []
    for start in range(0, count, BATCH):
        blocks = [block_of(row) for row in range(start, min(start + BATCH, count))]
        ids = _padded([ids for ids, _ in blocks], 0).to(model.device)
        labels = _padded([labels for _, labels in blocks], IGNORED_LABEL).to(model.device)
        is_scored = labels[:, 1:] != IGNORED_LABEL
        remaining = labels[:, 1:][is_scored]
        token_losses = []
        for logits in logits_at(model, ids, pad(is_scored, (0, 1))):
            targets, remaining = remaining[: len(logits)], remaining[len(logits) :]
            token_losses.append(cross_entropy(logits.double(), targets, reduction="none"))
        of_blocks = torch.cat(token_losses).split(is_scored.sum(dim=1).tolist())
        losses += [of_block.sum().item() for of_block in of_blocks]
    return np.array(losses)


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
    source: str | None = None,
) -> Result:
    """Perplexity of `text` with a 95 % interval over blocks, which are treated as independent.

    Args:
        model: the model.
        text: token ids of the held-out text, (tokens,).
        subject: the model, for the result.
        block_size: n. A block has n - floor(k n) text tokens, with or without meta-tokens. Text after the last whole
            block is ignored.
        fraction: k.
        placement: of the inserted meta-tokens; `none` inserts none.
        landmarks: in place of a placement, a rule for inserting meta-tokens; it may make blocks longer than n.
        source: the name of the text, for the result.

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
    blocks = _text_blocks(text, block_size - meta_token_count(block_size, fraction))
    count, text_per_block = blocks.shape
    if landmarks is None:
        block_of, longest = _with_placement(blocks, meta_token_id, block_size, fraction, placement)
    else:
        block_of, longest = _with_landmarks(blocks, meta_token_id, landmarks)
    if longest == text_per_block and condition != "none" and (fraction or landmarks is not None):
        raise UserError(
            f"{condition} inserts no meta-token into blocks of {block_size} tokens of this text."
        )
    check_length(model.config, longest)
    loss_per_token = block_losses(model, block_of, count) / (text_per_block - 1)
    mean = loss_per_token.mean()
    low, high = normal_interval(mean, loss_per_token.std(ddof=1) / math.sqrt(count))
    # The lowest loss without context.
    return Result(
        **measure_cache_share(model, (block_of(row)[0] for row in range(count))),
        **subject.present_fields(
            position_embedding=model.config.position_embedding,
            condition=condition,
            length=block_size,
            metric="perplexity",
        ),
        text=source,
        value=math.exp(mean),
        n=count * (text_per_block - 1),
        low=math.exp(low),
        high=math.exp(high),
        chance=math.exp(entropy(np.bincount(blocks.reshape(-1)))),
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
    blocks: np.ndarray, meta_token_id: int, block_size: int, fraction: float, placement: str
) -> tuple[BlockOf, int]:
    """The blocks with meta-tokens by a placement, drawn anew for each, and the length of the longest."""
    if placement == "none":  # also for a model without a meta-token
        return lambda row: (blocks[row], blocks[row]), blocks.shape[1]

    def block_of(row: int) -> tuple[np.ndarray, np.ndarray]:
        return insert_meta_tokens(
            blocks[row],
            meta_token_id=meta_token_id,
            block_size=block_size,
            fraction=fraction,
            placement=placement,
            generator=np.random.default_rng(row),
        )

    return block_of, block_size


def _with_landmarks(
    blocks: np.ndarray, meta_token_id: int, landmarks: Landmarks
) -> tuple[BlockOf, int]:
    """The blocks with a meta-token behind each landmark, and the length of the longest."""
    is_landmark = landmarks(blocks.reshape(-1)).reshape(blocks.shape)

    def block_of(row: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.insert(blocks[row], np.flatnonzero(is_landmark[row]) + 1, meta_token_id)
        return ids, labels_of(ids, meta_token_id)

    return block_of, blocks.shape[1] + int(is_landmark.sum(axis=1).max())


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
