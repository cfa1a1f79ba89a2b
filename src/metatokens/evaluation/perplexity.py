"""Perplexity on held-out text, over the same text tokens for every model.

All models read the same blocks of text. The first token of a block is not scored, since without inserted tokens
nothing precedes it. Meta-tokens are context, never targets.
"""

import math
from collections.abc import Callable
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
from metatokens.decoder import measure_cache_share, logits_at
from metatokens.errors import UserError
from metatokens.evaluation.intervals import normal_interval
from metatokens.model.positions import check_length
from metatokens.model.wrappers import takes_wrapped
from metatokens.records import About, Result


@torch.inference_mode()
def block_losses(
    model: PreTrainedModel, block_of: Callable[[int], tuple[np.ndarray, np.ndarray]], count: int, batch: int
) -> np.ndarray:
    """The summed negative log-likelihood (nats) of each block's text tokens except the first, (blocks,) float64.

    Args:
        model: any model; it is put into evaluation mode.
        block_of: the ids of the block of a number, with its meta-tokens, and their labels; each (positions,) int64.
        count: blocks.
        batch: blocks per forward pass.
    """
    model.eval()
    losses: list[float] = []
    for start in range(0, count, batch):
        pairs = map(block_of, range(start, min(start + batch, count)))
        ids, labels = (
            pad_sequence([*map(torch.from_numpy, part)], batch_first=True, padding_value=filled).to(model.device)
            for part, filled in zip(zip(*pairs, strict=True), (0, IGNORED_LABEL), strict=True)
        )
        scored = labels[:, 1:] != IGNORED_LABEL
        targets, done = labels[:, 1:][scored], 0
        loss = torch.empty(len(targets), dtype=torch.float64, device=model.device)
        for logits in logits_at(model, ids, pad(scored, (0, 1))):
            now = slice(done, done := done + len(logits))
            loss[now] = cross_entropy(logits.double(), targets[now], reduction="none")
        losses += [part.sum().item() for part in loss.split(scored.sum(dim=1).tolist())]
    return np.array(losses)


@takes_wrapped
def perplexity(
    model: PreTrainedModel,
    text: np.ndarray,
    about: About,
    *,
    block_size: int,
    fraction: float,
    placement: str,
    landmarks: Landmarks | None = None,
    source: str | None = None,
    batch: int = 16,
) -> Result:
    """Perplexity of `text` with a 95 % interval over blocks, which are treated as independent.

    Args:
        model: the model.
        text: token ids of the held-out text, (tokens,).
        about: the model, for the result.
        block_size: n. A block has n - floor(k n) text tokens, with or without meta-tokens. Text after the last whole
            block is ignored.
        fraction: k.
        placement: of the inserted meta-tokens; `none` inserts none.
        landmarks: in place of a placement, a rule for inserting meta-tokens; it may make blocks longer than n.
        source: the name of the text, for the result.
        batch: blocks per forward pass.

    Raises:
        UserError: if the text has fewer than two blocks, a block has nothing to predict, the model has no meta-token to
            insert, no meta-token is inserted though the fraction is above 0 or there is a rule, or a block is longer
            than the model's learned positions.
    """
    condition = placement if landmarks is None else landmarks.rule
    meta_token_id: Any = model.config.meta_token_id
    if condition != "none" and meta_token_id is None:
        raise UserError(
            f"{about.model} has no meta_token_id, so no meta-tokens can be inserted: set the placement to none."
        )
    text_per_block = block_size - meta_token_count(block_size, fraction)
    if text_per_block < 2:
        raise UserError(f"a block of {block_size} with a fraction {fraction} of meta-tokens has nothing to predict.")
    count = len(text) // text_per_block
    if count < 2:
        raise UserError(f"the text has {len(text)} tokens; perplexity needs two blocks of {text_per_block} at least.")
    blocks = np.asarray(text[: count * text_per_block]).reshape(count, text_per_block)
    behind, longest = None, block_size
    if landmarks is not None:
        behind = landmarks(blocks.reshape(-1)).reshape(blocks.shape)
        longest = text_per_block + int(behind.sum(axis=1).max())
    if longest == text_per_block and condition != "none" and (fraction or landmarks is not None):
        raise UserError(f"{condition} inserts no meta-token into blocks of {block_size} tokens of this text.")
    check_length(model.config, longest)

    def block_of(row: int) -> tuple[np.ndarray, np.ndarray]:
        block = blocks[row].astype(np.int64)
        if behind is not None:
            ids = np.insert(block, np.flatnonzero(behind[row]) + 1, meta_token_id)
            return ids, labels_of(ids, meta_token_id)
        if placement == "none":  # also of a model without a meta-token
            return block, block
        return insert_meta_tokens(
            block,
            meta_token_id=meta_token_id,
            block_size=block_size,
            fraction=fraction,
            placement=placement,
            generator=np.random.default_rng(row),
        )

    a_token = block_losses(model, block_of, count, batch)
    a_token /= text_per_block - 1
    mean = a_token.mean()
    low, high = normal_interval(mean, a_token.std(ddof=1) / math.sqrt(count))
    position = model.config.position_embedding
    where = {"position_embedding": position, "condition": condition, "length": block_size}
    return Result(
        **measure_cache_share(model, (block_of(row)[0] for row in range(count))),
        **about.present_fields(**where, metric="perplexity"),
        text=source,
        value=math.exp(mean),
        n=count * (text_per_block - 1),
        low=math.exp(low),
        high=math.exp(high),
        chance=math.exp(entropy(np.bincount(blocks.reshape(-1)))),  # the lowest loss without context
    )


def held_out_text(source: str, tokenizer: PreTrainedTokenizerBase, most: int | None = None) -> np.ndarray:
    """Read the text that perplexity is measured on, as token ids, (tokens,) int64.

    Args:
        source: the folder of a token store, whose held-out split is read; or a corpus spec, read whole.
        tokenizer: the model's.
        most: tokens to read at most.

    Raises:
        UserError: if the text cannot be read or is empty, or the store has another tokenizer.
    """
    if Path(source, "manifest.json").is_file():
        store = TokenStore.open(Path(source))
        if store.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise UserError(f"the token store {source} was made with another tokenizer than the model's.")
        return store.tokens("held_out")[:most]
    documents, count = [], 0
    for text in read_corpus(source):
        documents.append(np.array(encode_documents(tokenizer, [text])[0]))
        count += len(documents[-1])
        if most is not None and count >= most:
            break
    if not documents:
        raise UserError(f"the corpus {source} holds no text.")
    return np.concatenate(documents)[:most]
