"""Run a model on one prompt, and record what it attends to, what each layer predicts, and what it answers."""

import random
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metatokens.analysis.observation import observe
from metatokens.data.prompts import encode_prompt
from metatokens.data.tokenizer import meta_token_id, text_of_token
from metatokens.decoder import decoder_of, position_embedding_of
from metatokens.errors import UserError
from metatokens.looking.page import Likeliest, Look
from metatokens.model.configuration import never_generated
from metatokens.model.interventions import Intervention, intervene
from metatokens.model.positions import learned_positions
from metatokens.model.wrappers import takes_wrapped
from metatokens.tasks.example import Encoded
from metatokens.tasks.landmarks_alone import LandmarksAlone

MAX_TOKENS = 4096  # of a prompt: attention weights take memory quadratic in its length
ANSWERS = 5  # next tokens that are shown
WITH, WITHOUT, DECOYS, COVERED = (
    "with its meta-tokens",
    "without",
    "among decoys",
    "with the text covered",
)


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

    Raises:
        UserError: if the prompt has no text or is longer than 4,096 tokens or the model's positions, the tokenizer has
            no meta-token, or the model's attention cannot be read.
    """
    ids = prompt_ids(model, tokenizer, text, markers, landmarks=landmarks)
    is_meta = ids == meta_token_id(tokenizer)
    observation = observe(model, ids)
    zeroed = None
    if is_meta.any():
        with intervene(model, Intervention("no_embed")):
            zeroed = observe(model, ids)
        answers = _answers(model, tokenizer, ids, is_meta)
    else:
        answers = {WITHOUT: likeliest(model, _next_logits(model, ids))}
    return Look(
        name=name or type(model).__name__,
        tokens=[text_of_token(tokenizer, token) for token in ids.tolist()],
        ids=ids,
        is_meta=is_meta,
        observation=observation,
        zeroed=zeroed,
        lens=_lens(model, ids, observation.states),
        answers=answers,
        tokenizer=tokenizer,
    )


def _answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    is_meta: Tensor,
) -> dict[str, Likeliest]:
    """The next tokens after a prompt with meta-tokens, and after its variants."""
    decoys = min(int(is_meta.sum()), _longest_prompt(model, MAX_TOKENS) - len(ids))
    prompts = {
        WITH: ids,
        WITHOUT: ids[~is_meta],
        DECOYS: with_decoys(ids, is_meta, meta_token_id(tokenizer), decoys),
    }
    answers = {
        title: likeliest(model, _next_logits(model, prompt)) for title, prompt in prompts.items()
    }
    with suppress(UserError):  # the prompt has no question, or the model's attention takes no mask
        answers[COVERED] = likeliest(model, _next_logits(model, ids, cover(model, tokenizer, ids)))
    return answers


def prompt_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    markers: str | Sequence[int],
    limit: int = MAX_TOKENS,
    landmarks: str | None = None,
) -> Tensor:
    """The ids of a prompt, (length,) int64; without meta-tokens if the model has none."""
    ids = torch.tensor(
        encode_prompt(tokenizer, text, markers, landmarks=landmarks), dtype=torch.int64
    )
    is_text = ids != meta_token_id(tokenizer)
    if not is_text.any():
        raise UserError("the prompt has no text.")
    if getattr(model.config, "meta_token_id", None) is None:
        ids = ids[is_text]
    longest = _longest_prompt(model, limit)
    if len(ids) > longest:
        raise UserError(f"the prompt has {len(ids):,} tokens; at most {longest:,} can be shown.")
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


def with_decoys(ids: Tensor, is_meta: Tensor, meta_token_id: int, count: int) -> Tensor:
    """A prompt with `count` extra meta-tokens, or fewer if it lacks room for them, (length + count,) int64.

    They come before text tokens that are not the first token and have no meta-token before them.
    """
    candidates = [
        index for index in range(1, len(ids)) if not is_meta[index] and not is_meta[index - 1]
    ]
    chosen = random.Random(0).sample(candidates, min(len(candidates), count))
    with_more = ids.tolist()
    for index in sorted(chosen, reverse=True):
        with_more.insert(index, meta_token_id)
    return torch.tensor(with_more)


def likeliest(model: PreTrainedModel, logits: Tensor) -> Likeliest:
    """The five likeliest tokens by logits (..., vocabulary), of those that a text may have."""
    never = torch.tensor(never_generated(model.config), dtype=torch.int64, device=logits.device)
    logits = logits.double().index_fill(-1, never, -torch.inf)
    probabilities, ids = logits.softmax(dim=-1).topk(ANSWERS)
    return Likeliest(ids.cpu(), probabilities.cpu())


def _longest_prompt(model: PreTrainedModel, limit: int) -> int:
    """The most tokens that a prompt may have: the limit, or the positions of a learned table."""
    has_table = position_embedding_of(model) == "learned"
    return min(limit, learned_positions(model.config)) if has_table else limit


def _next_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The logits of the token after a prompt, (vocabulary,); under a mask (1, 1, length, length), if there is one."""
    return model(ids[None].to(model.device), attention_mask=mask, use_cache=False).logits[0, -1]


def _lens(model: PreTrainedModel, ids: Tensor, states: Sequence[Tensor]) -> Likeliest:
    """The model's next tokens from each state, as if the last block had returned it.

    The model itself runs, with every block returning that state, so each norm, scale and cap after the blocks is the
    architecture's own.
    """
    _, blocks = decoder_of(model)
    outputs: list[Any] = []
    with blocks[-1].register_forward_hook(lambda block, args, output: outputs.append(output)):
        _next_logits(model, ids)
    (last_output,) = outputs
    by_state = []
    for state in states:
        batch = state[None].to(model.dtype)
        returned = (batch, *last_output[1:]) if isinstance(last_output, tuple) else batch
        with ExitStack() as patches:
            for block in blocks:
                patches.enter_context(patch.object(block, "forward", return_value=returned))
            logits = model(ids[None].to(model.device), use_cache=False).logits[0]
        by_state.append(likeliest(model, logits))
    return Likeliest(
        ids=torch.stack([tokens.ids for tokens in by_state]),
        probabilities=torch.stack([tokens.probabilities for tokens in by_state]),
    )
