"""Which answers a model gets right."""

import math
from collections.abc import Iterator, Sequence

import torch

from metatokens.checkpoint import LanguageModel
from metatokens.decoder import logits_at
from metatokens.model.configuration import never_generated
from metatokens.tasks.example import Encoded


def score(
    model: LanguageModel, examples: Sequence[Encoded], *, batch: int | None = None, tokens_per_batch: int | None = None
) -> tuple[list[bool], list[int]]:
    """Which of each example's answer tokens greedy decoding gets right.

    Greedy decoding gives the whole answer, its end of text included, exactly if each of its tokens is the likeliest
    one after the prompt and the answer's tokens before it, those left out that `generate()` never gives. So one
    forward pass over prompt and answer tells.

    Args:
        model: in any mode; it is put into evaluation mode.
        examples: are never cut; those of similar length share a batch.
        batch: examples at a time; where not given,
        tokens_per_batch: padded tokens of a batch; where not given, 16,384 on a GPU, and 4,096 on a CPU, whose cache
            larger ones leave (a tenth slower; GPT-Neo, which holds all attention scores, up to 1.6 times).

    Returns:
        For each example, whether the whole answer is right, and how many of its tokens are.

    Raises:
        UserError: if a sequence is longer than the model's learned positions.
    """
    model.eval()
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].input_ids))
    exact, tokens = [False] * len(examples), [0] * len(examples)
    longest = max(len(example.input_ids) for example in examples)
    batch = batch or max(1, (tokens_per_batch or (16_384 if model.device.type == "cuda" else 4_096)) // longest)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        for row, hits in zip(rows, _hits(model, [examples[row] for row in rows]), strict=True):
            exact[row], tokens[row] = bool(hits.all()), int(hits.sum())
    return exact, tokens


@torch.inference_mode()
def _hits(model: LanguageModel, examples: Sequence[Encoded]) -> Iterator[torch.Tensor]:
    """For each example, a bool for each token of its answer."""
    longest = max(len(example.input_ids) for example in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    answer = torch.zeros_like(ids, dtype=torch.bool)
    for row, example in enumerate(examples):
        size = len(example.input_ids)
        ids[row, :size] = torch.tensor(example.input_ids)
        answer[row, example.answer_start : size] = True
    ids, answer = ids.to(model.device), answer.to(model.device)
    # Padding is on the right, where causal attention never looks, so no mask is needed.
    best = []
    for logits in logits_at(model, ids[:, :-1], answer[:, 1:]):
        logits[:, never_generated(model.config)] = -math.inf
        best.append(logits.argmax(-1))
    hit = torch.cat(best) == ids[answer]
    return iter(hit.cpu().split(answer.sum(dim=1).tolist()))
