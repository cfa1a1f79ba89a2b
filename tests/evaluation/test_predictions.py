"""A model's answers in batches, against greedy generation for one prompt at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.evaluation.accuracy import draw_test_examples, evaluate
from metatokens.evaluation.predictions import FURTHER, answer, predict
from metatokens.records import About, unpack_hits
from metatokens.tasks.landmarks_alone import LandmarksAlone
from tests.evaluation.test_accuracy import some_answered_right


@pytest.mark.parametrize(
    "changes", [{}, {"position_embedding": "learned", "max_position_embeddings": 64}], ids=["rope", "learned"]
)
def test_predictions_are_those_of_greedy_generation(
    changes: dict[str, Any],
    small_model: Callable[..., Path],
    small_store: TokenStore,
    small_corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("metatokens.evaluation.predictions.TOKENS_A_BATCH", 200)
    tokenizer, model = small_store.tokenizer, load_model(small_model(**changes)).eval()
    examples = draw_test_examples(
        "copying", 48, 12, tokenizer, condition="paper", documents=small_corpus.read_text().split("\n\n")
    )
    examples = some_answered_right(model, examples)
    (exact, _) = evaluate(model, {64: examples}, About(model="it", task="copying"))
    assert exact.hits is not None
    predictions = list(predict(model, examples, tokenizer, unpack_hits(exact.hits, exact.n).tolist()))
    assert exact.value == sum(one.exact for one in predictions) / len(predictions)
    assert 0 < exact.value < 1
    for example, one in zip(examples, predictions, strict=True):
        assert (one.prompt, tuple(one.markers), one.completion) == (example.prompt, example.markers, example.completion)
        if one.exact:
            assert one.prediction == example.completion
            continue
        prompt, size = example.input_ids[: example.answer_start], len(example.input_ids) - example.answer_start
        # With learned positions a batch may have room for fewer further tokens.
        ids, most = torch.tensor([prompt]), size if changes else size + FURTHER
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        expected = tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)
        assert one.prediction.startswith(expected) if changes else one.prediction == expected


def test_an_answer_is_that_of_greedy_decoding_in_sight_and_covered(
    small_model: Callable[..., Path], small_store: TokenStore, small_corpus: Path
) -> None:
    tokenizer, model = small_store.tokenizer, load_model(small_model()).eval()
    documents, alone = small_corpus.read_text().split("\n\n"), LandmarksAlone(model, tokenizer)
    examples = draw_test_examples("copying", 48, 4, tokenizer, condition="paper", documents=documents)
    never = [model.config.meta_token_id, *range(model.config.unpadded_vocab_size or 10**6, model.config.vocab_size)]
    said = {}
    for is_covered in (False, True):
        for example in examples:
            ids = list(example.input_ids[: example.answer_start])
            while len(ids) < len(example.input_ids) and tokenizer.eos_token_id not in ids[example.answer_start :]:
                row = torch.tensor([ids])
                with torch.no_grad():
                    mask = alone.mask(row, [example]) if is_covered else None
                    logits = model(row, attention_mask=mask).logits[0, -1]
                logits[never] = -torch.inf
                ids.append(int(logits.argmax()))
            expected = tokenizer.decode(ids[example.answer_start :], skip_special_tokens=True)
            said[example, is_covered] = answer(model, example, tokenizer, alone if is_covered else None)
            assert said[example, is_covered] == expected
    assert any(said[example, True] != said[example, False] for example in examples)
