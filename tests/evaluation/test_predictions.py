"""A model's answers in batches, against greedy generation for one prompt at a time."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.evaluation.accuracy import draw_test_examples
from metatokens.evaluation.predictions import FURTHER, answer, predict
from metatokens.tasks.example import Example
from metatokens.tasks.landmarks_alone import LandmarksAlone
from metatokens.tasks.scoring import score
from tests.evaluation.test_accuracy import prompt_of, some_answered_right

Models = Callable[..., Path]
POSITIONS = 64  # of a learned table, which ends within an answer


@pytest.fixture(scope="module")
def examples(small_store: TokenStore, small_corpus: Path) -> list[Example]:
    documents = small_corpus.read_text().split("\n\n")
    return draw_test_examples(
        "copying", 48, 12, small_store.tokenizer, condition="paper", documents=documents
    )


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({}, math.inf),
        ({"position_embedding": "learned", "max_position_embeddings": POSITIONS}, POSITIONS),
    ],
    ids=["rope", "learned"],
)
def test_predictions_are_those_of_greedy_generation(
    changes: dict[str, Any],
    positions: float,
    small_model: Models,
    small_store: TokenStore,
    examples: list[Example],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("metatokens.evaluation.predictions.TOKENS_A_BATCH", 200)
    # In double precision, where no two tokens are as likely but for rounding.
    tokenizer, model = small_store.tokenizer, load_model(small_model(**changes)).double()
    answered = some_answered_right(model, examples)
    exact, _ = score(model, answered)
    wrong = [example for example, is_exact in zip(answered, exact, strict=True) if not is_exact]
    longest_prompt = max(example.answer_start for example in wrong)
    longest_answer = max(len(example.input_ids) - example.answer_start for example in wrong)
    # The last token that is generated is never read.
    new_tokens = min(longest_answer + FURTHER, positions + 1 - longest_prompt)

    predictions = list(predict(model, answered, tokenizer, exact))

    assert 0 < sum(exact) < len(exact)
    for example, prediction, is_exact in zip(answered, predictions, exact, strict=True):
        assert prediction.exact == is_exact
        assert (prediction.prompt, tuple(prediction.markers)) == (example.prompt, example.markers)
        assert prediction.completion == example.completion
        if prediction.exact:
            assert prediction.prediction == example.completion
            continue
        ids = torch.tensor([prompt_of(example)])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
        expected = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        assert prediction.prediction == expected


@pytest.mark.parametrize("is_covered", [False, True])
def test_an_answer_is_that_of_greedy_decoding_in_sight_and_covered(
    is_covered: bool, small_model: Models, small_store: TokenStore, examples: list[Example]
) -> None:
    tokenizer, model = small_store.tokenizer, load_model(small_model())
    alone = LandmarksAlone(model, tokenizer) if is_covered else None
    for example in examples[:4]:
        ids = list(prompt_of(example))
        for _ in example.input_ids[example.answer_start :]:
            row = torch.tensor([ids])
            mask = alone.mask(row, [example]) if alone else None
            with torch.no_grad():
                logits = model(row, attention_mask=mask).logits[0, -1]
            logits[model.config.meta_token_id] = -torch.inf
            ids.append(int(logits.argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        expected = tokenizer.decode(ids[example.answer_start :], skip_special_tokens=True)
        assert answer(model, example, tokenizer, alone) == expected
