"""transformers' own Trainer, called as its users call it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from metatokens import MetaGPT2ForCausalLM
from tests.gradients import far
from tests.numbers import ROUNDED

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # the Trainer's default, where there is no GPU

TEXTS = [f"the cat sat on mat {number} while two dogs ran over green hills" for number in range(12)]


QUIET = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}


@pytest.fixture
def ids(folder: Path) -> Tensor:
    """Texts with a meta-token after the third id."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = [tokenizer(text)["input_ids"] for text in TEXTS]
    return torch.tensor([[*ids[:3], tokenizer.meta_token_id, *ids[3:]][:16] for ids in encoded])


def items(ids: Tensor, *, ignored: int = -100) -> list[dict[str, Tensor]]:
    """A data set whose labels are the ids, meta-tokens included; but not those of one id, to be `ignored`."""
    return [{"input_ids": row, "labels": row.masked_fill(row == ignored, -100)} for row in ids]


def hit_rate(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    assert logits.shape[:2] == labels.shape
    return {"hits": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).mean())}


def test_it_trains_evaluates_predicts_and_loads_the_best_model(folder: Path, ids: Tensor, tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    steps = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    arguments = TrainingArguments(str(tmp_path), **steps, **best, **QUIET)
    data, model = items(ids), MetaGPT2ForCausalLM.from_pretrained(folder)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=hit_rate)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert 0 <= after["eval_hits"] <= 1
    measured = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert after["eval_loss"] == pytest.approx(min(measured[1:]), rel=ROUNDED)
    predicted = trainer.predict(data)
    assert predicted.predictions.shape == (12, 16, model.config.vocab_size)
    assert np.isfinite(predicted.predictions).all()
    assert predicted.metrics["test_loss"] == pytest.approx(after["eval_loss"], rel=ROUNDED)
    trainer.save_model(str(tmp_path / "best"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    with torch.no_grad():
        logits = again.eval()(ids).logits
    assert far(logits, torch.from_numpy(predicted.predictions)) < ROUNDED


def first_loss(model: Any, data: list[dict[str, Tensor]], out: Path, **settings: Any) -> float:
    arguments = TrainingArguments(str(out), max_steps=1, **QUIET | {"per_device_train_batch_size": 12} | settings)
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return float(trainer.state.log_history[0]["loss"])


@pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
def test_the_loss_with_label_smoothing_is_that_of_the_next_token(
    second_attention: str, small_model: Any, ids: Tensor, tmp_path: Path
) -> None:
    model = MetaGPT2ForCausalLM.from_pretrained(small_model(second_attention=second_attention)).eval()
    meta = model.config.meta_token_id
    with torch.no_grad():
        scores = model(ids).logits[:, :-1].double().log_softmax(-1)[ids[:, 1:] != meta]
    truth = -scores.gather(-1, ids[:, 1:][ids[:, 1:] != meta][:, None]).mean()
    expected = 0.9 * truth + 0.1 * -scores.mean()
    smoothed = first_loss(model, items(ids, ignored=meta), tmp_path, label_smoothing_factor=0.1)
    assert smoothed == pytest.approx(float(expected), abs=2e-4)  # Trainer rounds what it logs


def test_the_loss_of_labels_that_are_the_ids_asks_for_no_meta_token(folder: Path, ids: Tensor, tmp_path: Path) -> None:
    model = MetaGPT2ForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        scores = -model(ids).logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    expected = scores[ids[:, 1:] != model.config.meta_token_id].mean()
    assert first_loss(model, items(ids), tmp_path) == pytest.approx(float(expected), abs=2e-4)


def test_with_gradients_accumulated_it_is_nearly_so(folder: Path, ids: Tensor, tmp_path: Path) -> None:
    meta = int(ids[0, 3])
    ids[0, 5:15:2] = meta  # one row has many more of them
    small = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    losses = [
        first_loss(MetaGPT2ForCausalLM.from_pretrained(folder), data, tmp_path, **small)
        for data in (items(ids), items(ids, ignored=meta))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.03)
    assert losses[0] != losses[1]  # otherwise the docs could promise equality


@pytest.mark.parametrize("has_lengths", [False, True])
@pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
def test_packed_sequences_train_as_separate_rows_do(
    second_attention: str, has_lengths: bool, small_model: Any, ids: Tensor, tmp_path: Path
) -> None:
    folder, meta, weights = small_model(second_attention=second_attention), int(ids[0, 3]), []
    for collator in (None, DataCollatorWithFlattening(return_flash_attn_kwargs=has_lengths)):
        arguments = TrainingArguments(str(tmp_path), max_steps=2, per_device_train_batch_size=6, **QUIET)
        model = MetaGPT2ForCausalLM.from_pretrained(folder)
        trainer = Trainer(model, arguments, train_dataset=items(ids, ignored=meta), data_collator=collator)
        trainer.train()
        weights.append((trainer.state.log_history[0]["loss"], trainer.evaluate(items(ids))["eval_loss"]))
    assert weights[0] == pytest.approx(weights[1], abs=2e-4)  # Trainer rounds what it logs


def test_the_collator_of_transformers_pads_and_labels(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    texts = [{"input_ids": tokenizer(text)["input_ids"][: 4 + number]} for number, text in enumerate(TEXTS)]
    arguments = TrainingArguments(str(tmp_path), max_steps=2, **QUIET)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(
        MetaGPT2ForCausalLM.from_pretrained(folder), arguments, train_dataset=texts, data_collator=collator
    )
    assert math.isfinite(trainer.train().training_loss)
