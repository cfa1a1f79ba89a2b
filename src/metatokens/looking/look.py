"""Run a model on one prompt, and record what it attends to, what each layer predicts, and what it answers."""

import random
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metatokens.analysis.observation import Observation, observe
from metatokens.data.prompts import encode_prompt
from metatokens.data.tokenizer import meta_token_id
from metatokens.decoder import decoder_of, position_embedding_of
from metatokens.errors import UserError
from metatokens.looking.page import Likeliest, Look
from metatokens.model.interventions import NoEmbedding, intervene
from metatokens.model.positions import learned_positions
from metatokens.model.wrappers import takes_wrapped
from metatokens.tasks.example import Encoded
from metatokens.tasks.landmarks_alone import LandmarksAlone

MAX_TOKENS = 4096  # of a prompt: attention weights take memory quadratic in its length
ANSWERS = 5  # next tokens that are shown
WITH, WITHOUT, DECOYS, COVERED = "with its meta-tokens", "without", "among decoys", "with the text covered"


@takes_wrapped
@torch.no_grad()
def look(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    markers: str | Sequence[int] = (),
    *,
    landmarks: str | None = None,
    name: str | None = None,
    seed: int = 0,
    layers: Sequence[int] | None = None,
) -> Look:
    """Run a model on a prompt, and record what it attends to, what each layer predicts, and what it answers.

        look = metatokens.look(model, tokenizer, "Bits: 0 _PAUSE_ 1 0", markers="_PAUSE_")
        look.attention("second_attention", 2)  # (heads, meta-tokens, meta-tokens)

    A notebook shows the result as the page that `metatokens look` writes.

    Args:
        model: any decoder that `observe` can read, with or without meta-tokens; is put into evaluation mode.
        tokenizer: of the model.
        text: the prompt.
        markers: the text that marks a meta-token, or the offsets of those ` _PAUSE_` that do (`encode_prompt`). They
            are left out for a model without a meta-token.
        landmarks: a rule for further meta-tokens (`encode_prompt`).
        name: of the model; by default its class.
        seed: for the places of decoys.
        layers: the blocks whose attention is kept, from 0; None: all.

    Raises:
        UserError: if there is no such block, the prompt has no text or is longer than 4,096 tokens or the model's
            positions, the tokenizer has no meta-token, or the model's attention cannot be read.
    """
    meta = meta_token_id(tokenizer)
    ids = prompt_ids(model, tokenizer, text, markers, landmarks=landmarks)
    is_meta = ids == meta
    observation, zeroed = _of_layers(observe(model, ids), layers), None
    followed = {WITHOUT: ids[~is_meta]}
    if is_meta.any():
        with intervene(model, NoEmbedding()):
            zeroed = _of_layers(observe(model, ids), layers)
        decoys = min(int(is_meta.sum()), _room(model) - len(ids))
        followed = {WITH: ids, WITHOUT: ids[~is_meta], DECOYS: with_decoys(ids, is_meta, meta, decoys, seed)}
    answers = {title: likeliest(model, _next(model, prompt)) for title, prompt in followed.items()}
    if is_meta.any():
        with suppress(UserError):  # the prompt has no question, or the model's attention takes no mask
            answers[COVERED] = likeliest(model, _next(model, ids, cover(model, tokenizer, ids)))
    return Look(
        name=name or type(model).__name__,
        tokens=[tokenizer.decode([token]) for token in ids.tolist()],
        ids=ids,
        is_meta=is_meta,
        observation=observation,
        zeroed=zeroed,
        lens=_lens(model, ids, observation.states),
        answers=answers,
        tokenizer=tokenizer,
    )


def _of_layers(seen: Observation, layers: Sequence[int] | None) -> Observation:
    """An observation with the attention of only some blocks."""
    count = len(seen.states) - 1
    if layers is None:
        return seen
    if unknown := set(layers) - set(range(count)):
        raise UserError(f"there is no block {min(unknown)}; the model has the blocks 0 to {count - 1}.")
    kept = {key: inputs for key, inputs in seen.attention.items() if key[1] in layers}
    return replace(seen, attention=kept)


def prompt_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    markers: str | Sequence[int],
    limit: int = MAX_TOKENS,
    landmarks: str | None = None,
) -> Tensor:
    """The ids of a prompt, (length,) int64; without meta-tokens if the model has none."""
    ids = torch.tensor(encode_prompt(tokenizer, text, markers, landmarks=landmarks), dtype=torch.int64)
    is_text = ids != meta_token_id(tokenizer)
    if not is_text.any():
        raise UserError("the prompt has no text.")
    ids = ids if _meta_token(model) is not None else ids[is_text]
    room = min(limit, _room(model))
    if len(ids) > room:
        raise UserError(f"the prompt has {len(ids):,} tokens; at most {room:,} can be shown.")
    return ids


def cover(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> Tensor:
    """The mask that covers the text of a prompt: its question sees the meta-tokens before it, and no text there.

    Returns:
        True where a query sees a key, (1, 1, length, length).

    Raises:
        UserError: if the prompt has no question, or the model's attention takes no mask.
    """
    prompt = Encoded(input_ids=ids.tolist(), answer_start=len(ids))
    return LandmarksAlone(model, tokenizer).mask(ids[None], [prompt]).to(model.device)


def with_decoys(ids: Tensor, is_meta: Tensor, meta_token_id: int, count: int, seed: int) -> Tensor:
    """A prompt with `count` extra meta-tokens, or fewer if it has not enough places, (length + count,) int64.

    A place is before a text token that is not the first token and has no meta-token before it.
    """
    places = [i for i in range(1, len(ids)) if not is_meta[i] and not is_meta[i - 1]]
    drawn = set(random.Random(seed).sample(places, min(len(places), count)))
    rows = [[meta_token_id, token] if i in drawn else [token] for i, token in enumerate(ids.tolist())]
    return torch.tensor(list(chain.from_iterable(rows)))


def likeliest(model: PreTrainedModel, logits: Tensor) -> Likeliest:
    """The five likeliest tokens by logits (..., vocabulary), without the meta-token."""
    logits = logits.double()
    if (meta := _meta_token(model)) is not None:
        logits = logits.index_fill(-1, torch.tensor([meta], device=logits.device), -torch.inf)
    probabilities, ids = logits.softmax(dim=-1).topk(ANSWERS)
    return Likeliest(ids.cpu(), probabilities.cpu())


def _room(model: PreTrainedModel) -> int:
    """The most tokens that a prompt may have."""
    has_table = position_embedding_of(model) == "learned"
    return min(MAX_TOKENS, learned_positions(model.config)) if has_table else MAX_TOKENS


def _meta_token(model: PreTrainedModel) -> int | None:
    return getattr(model.config, "meta_token_id", None)


def _next(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The logits of the token after a prompt, (vocabulary,); under a mask (1, 1, length, length), if there is one."""
    return model(ids[None].to(model.device), attention_mask=mask, use_cache=False).logits[0, -1]


def _lens(model: PreTrainedModel, ids: Tensor, states: Sequence[Tensor]) -> Likeliest:
    """The model's next tokens from each state, as if the last block had returned it.

    The model itself runs, with every block returning that state, so each norm, scale and cap after the blocks is the
    architecture's own.
    """
    _, blocks = decoder_of(model)
    returned: list[Any] = []
    with blocks[-1].register_forward_hook(lambda block, args, output: returned.append(output)):
        _next(model, ids)
    rows = []
    for state in states:
        batch = state[None].to(model.dtype)
        output = (batch, *returned[0][1:]) if isinstance(returned[0], tuple) else batch
        with ExitStack() as patches:
            for block in blocks:
                patches.enter_context(patch.object(block, "forward", lambda *args, output=output, **kwargs: output))
            rows.append(likeliest(model, model(ids[None].to(model.device), use_cache=False).logits[0]))
    return Likeliest(torch.stack([row.ids for row in rows]), torch.stack([row.probabilities for row in rows]))
