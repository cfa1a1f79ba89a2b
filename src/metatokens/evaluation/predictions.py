"""A model's answers, prompt by prompt."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from metatokens.checkpoint import LanguageModel
from metatokens.model.positions import reaches
from metatokens.records import Record
from metatokens.tasks.example import Example
from metatokens.tasks.scoring import by_length, score

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
    model: LanguageModel, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Prediction]:
    """The model's greedy answers, in the order of the examples.

    `score` finds the answers that are exactly right. The others are generated, up to their end of text or `FURTHER`
    tokens more than the right answer has.
    """
    exact, _ = score(model, examples)
    answers = {place: example.completion for place, example in enumerate(examples)}
    wrong: dict[int, list[int]] = defaultdict(list)  # places by size of the answer
    for place, example in enumerate(examples):
        if not exact[place]:
            wrong[len(example.input_ids) - example.answer_start].append(place)
    # Answers of one size share a batch: if the longest prompt has positions left for its answer, all have.
    for size, places in wrong.items():
        lengths = [examples[place].answer_start for place in places]
        for rows in by_length(lengths, max(1, TOKENS_A_BATCH // (max(lengths) + size + FURTHER))):
            prompts = [examples[places[row]].input_ids[: lengths[row]] for row in rows]
            ids = _continue(model, prompts, size, tokenizer.eos_token_id)
            answers |= {
                places[row]: text
                for row, text in zip(rows, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True)
            }
    for place, example in enumerate(examples):
        yield Prediction(
            prompt=example.prompt,
            markers=list(example.markers),
            completion=example.completion,
            prediction=answers[place],
            exact=exact[place],
        )


def _continue(model: LanguageModel, prompts: Sequence[Sequence[int]], size: int, eos_token_id: int) -> torch.Tensor:
    """Greedy continuations of up to `size + FURTHER` tokens, as far as positions reach: (prompts, tokens)."""
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
