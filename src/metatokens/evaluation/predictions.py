"""What a model answers, prompt by prompt."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from transformers import PreTrainedTokenizerBase

from metatokens.checkpoint import LanguageModel
from metatokens.model.positions import reaches
from metatokens.records import Record
from metatokens.tasks.example import Example
from metatokens.tasks.scoring import score

FURTHER = 8  # tokens that a wrong answer may have beyond the right one's
TOKENS_A_BATCH = 4_096  # padded


class Prediction(Record):
    """A prompt, the right completion, and the model's: the same text if it is exactly right."""

    prompt: str
    markers: list[int]
    completion: str
    prediction: str
    exact: bool


def predict(
    model: LanguageModel, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Prediction]:
    """The model's greedy answers, in the order of the examples.

    Which are exactly right is what `score` finds. The others are generated, up to their end of text or `FURTHER` tokens
    more than the right answer has.

    Raises:
        UserError: if a sequence is longer than the model's learned positions.
    """
    exact, _ = score(model, examples)
    answers = {place: example.completion for place, example in enumerate(examples)}
    wrong = [place for place, is_right in enumerate(exact) if not is_right]
    sizes = {place: len(examples[place].input_ids) - examples[place].answer_start for place in wrong}
    wrong.sort(key=lambda place: (sizes[place], examples[place].answer_start))
    # Answers of one size share a batch: if there are positions for the longest prompt's answer, then for all.
    for size, group in groupby(wrong, key=sizes.__getitem__):
        places = list(group)
        rows = max(1, TOKENS_A_BATCH // (examples[places[-1]].answer_start + size + FURTHER))
        for start in range(0, len(places), rows):
            batch = places[start : start + rows]
            prompts = [examples[place].input_ids[: examples[place].answer_start] for place in batch]
            ids = _continue(model, prompts, size, tokenizer.eos_token_id)
            answers |= zip(batch, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True)
    for place, example in enumerate(examples):
        yield Prediction(
            prompt=example.prompt,
            markers=list(example.markers),
            completion=example.completion,
            prediction=answers[place],
            exact=exact[place],
        )


def _continue(model: LanguageModel, prompts: Sequence[Sequence[int]], size: int, eos_token_id: int) -> torch.Tensor:
    """Greedy continuations of `size + FURTHER` tokens at most, as far as there are positions: (prompts, tokens)."""
    longest = max(map(len, prompts))
    further = next(more for more in range(FURTHER, -1, -1) if reaches(model.config, longest + size + more - 1))
    ids = torch.full((len(prompts), longest), eos_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    continued = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=size + further,
        do_sample=False,
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id,
    )
    return continued[:, longest:]
