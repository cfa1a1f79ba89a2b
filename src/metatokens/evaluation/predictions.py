"""A model's answers, prompt by prompt."""

import math
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metatokens.data.tokenizer import decode_continuation
from metatokens.decoder import continue_prompts
from metatokens.model.configuration import never_generated
from metatokens.model.positions import reaches
from metatokens.records import Record
from metatokens.tasks.example import Encoded, Example
from metatokens.tasks.landmarks_alone import LandmarksAlone

FURTHER = 8  # tokens that a generated answer may have more than the right one
TOKENS_A_BATCH = 4_096  # padded


class Prediction(Record):
    """A prompt, the right completion, and the model's, which is the same text if it is exactly right."""

    prompt: str
    markers: list[int]
    completion: str
    prediction: str
    exact: bool


def predict(
    model: PreTrainedModel,
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    exact: Sequence[bool],
) -> Iterator[Prediction]:
    """The model's greedy answers, in the order of the examples.

    The answers that are not `exact`, as `score` found, are generated up to their end of text. They may have `FURTHER`
    tokens more than the longest right answer, as far as the model has positions for them.
    """
    wrong = [example for example, is_exact in zip(examples, exact, strict=True) if not is_exact]
    prompts = [example.input_ids[: example.answer_start] for example in wrong]
    longest = max(map(len, prompts), default=0)
    new_tokens = FURTHER + max(
        (len(example.input_ids) - example.answer_start for example in wrong), default=0
    )
    while not reaches(model.config, longest + new_tokens - 1):
        new_tokens -= 1
    continuations = continue_prompts(
        model,
        tokenizer,
        prompts,
        batch_size=max(1, TOKENS_A_BATCH // (longest + new_tokens)),
        max_new_tokens=new_tokens,
        eos_token_id=tokenizer.eos_token_id,
    )
    for example, is_exact in zip(examples, exact, strict=True):
        yield Prediction(
            prompt=example.prompt,
            markers=list(example.markers),
            completion=example.completion,
            prediction=example.completion if is_exact else next(continuations).text,
            exact=is_exact,
        )


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    example: Encoded,
    tokenizer: PreTrainedTokenizerBase,
    alone: LandmarksAlone | None = None,
) -> str:
    """The model's greedy answer to one prompt, which ends after as many tokens as the right answer has.

    Unlike `predict` it can answer a question that sees landmarks alone. It reads the whole prompt again for each token.
    """
    model.eval()
    ids = list(map(int, example.input_ids[: example.answer_start]))
    for _ in range(len(example.input_ids) - example.answer_start):
        row = torch.tensor([ids])
        mask = None if alone is None else alone.mask(row, [example]).to(model.device)
        logits = model(row.to(model.device), attention_mask=mask, use_cache=False).logits[0, -1]
        logits[never_generated(model.config)] = -math.inf
        next_token = int(logits.argmax())
        if next_token == tokenizer.eos_token_id:
            break
        ids.append(next_token)
    return decode_continuation(tokenizer, ids[: example.answer_start], ids[example.answer_start :])
