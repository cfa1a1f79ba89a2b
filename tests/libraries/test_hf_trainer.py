"""transformers' own Trainer, called as its users call it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from metatokens import MetaGPT2ForCausalLM
from tests.gradients import far
from tests.numbers import ROUNDED

# The Trainer's default, where there is no GPU.
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument")

TEXTS = [f"the cat sat on mat {number} while two dogs ran over green hills" for number in range(12)]


QUIET = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}


@pytest.fixture
def ids(folder: Path) -> Tensor:
    """Texts with a meta-token after the third id."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = torch.tensor([tokenizer(text)["input_ids"][:15] for text in TEXTS])
    meta_tokens = torch.full((len(TEXTS), 1), tokenizer.meta_token_id)
    return torch.cat([text[:, :3], meta_tokens, text[:, 3:]], dim=1)


def items(ids: Tensor, *, ignored: int = -100) -> list[dict[str, Tensor]]:
    """A data set whose labels are the ids, meta-tokens included; but not those of one id, to be `ignored`."""
    return [{"input_ids": row, "labels": row.masked_fill(row == ignored, -100)} for row in ids]


def hit_rate(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    hits = logits[:, :-1].argmax(-1) == labels[:, 1:]
    return {"hits": float(hits.mean())}


def test_it_trains_evaluates_predicts_and_saves(folder: Path, ids: Tensor, tmp_path: Path) -> None:
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=2,
        **QUIET,
    )
    data, model = items(ids), MetaGPT2ForCausalLM.from_pretrained(folder)
    trainer = Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=hit_rate
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    predicted = trainer.predict(data)
    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        logits = saved(ids).logits
    assert after["eval_loss"] < before["eval_loss"]
    assert 0 <= after["eval_hits"] <= 1
    assert predicted.metrics["test_loss"] == pytest.approx(after["eval_loss"], rel=ROUNDED)
    assert far(logits, torch.from_numpy(predicted.predictions)) < ROUNDED


def first_loss(model: Any, data: list[dict[str, Tensor]], out: Path, **settings: Any) -> float:
    settings = {"per_device_train_batch_size": 12} | settings
    arguments = TrainingArguments(str(out), max_steps=1, **QUIET, **settings)
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return float(trainer.state.log_history[0]["loss"])


def log_probabilities(folder: Path, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A model's log-probabilities where text follows, (tokens, vocabulary), and the text that follows."""
    model = MetaGPT2ForCausalLM.from_pretrained(folder).eval()
    is_text = ids[:, 1:] != model.config.meta_token_id
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    return logits.double().log_softmax(-1)[is_text], ids[:, 1:][is_text]


def test_the_loss_with_label_smoothing_is_that_of_the_next_token(
    folder: Path, ids: Tensor, tmp_path: Path
) -> None:
    predicted, following = log_probabilities(folder, ids)
    truth = -predicted.gather(-1, following[:, None]).mean()
    expected = 0.9 * truth - 0.1 * predicted.mean()
    model = MetaGPT2ForCausalLM.from_pretrained(folder)
    smoothed = first_loss(
        model, items(ids, ignored=int(ids[0, 3])), tmp_path, label_smoothing_factor=0.1
    )
    assert smoothed == pytest.approx(float(expected), abs=2e-4)  # Trainer rounds what it logs


def test_the_loss_of_labels_that_are_the_ids_asks_for_no_meta_token(
    folder: Path, ids: Tensor, tmp_path: Path
) -> None:
    predicted, following = log_probabilities(folder, ids)
    expected = -predicted.gather(-1, following[:, None]).mean()
    model = MetaGPT2ForCausalLM.from_pretrained(folder)
    assert first_loss(model, items(ids), tmp_path) == pytest.approx(float(expected), abs=2e-4)


@pytest.mark.parametrize(("second_attention", "has_lengths"), [("meta", False), ("causal", True)])
def test_packed_sequences_train_as_separate_rows_do(
    second_attention: str, has_lengths: bool, small_model: Any, ids: Tensor, tmp_path: Path
) -> None:
    folder = small_model(second_attention=second_attention)
    meta = int(ids[0, 3])
    losses = []
    for collator in (None, DataCollatorWithFlattening(return_flash_attn_kwargs=has_lengths)):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=6, **QUIET
        )
        model = MetaGPT2ForCausalLM.from_pretrained(folder)
        trainer = Trainer(
            model, arguments, train_dataset=items(ids, ignored=meta), data_collator=collator
        )
        trainer.train()
        in_training = trainer.state.log_history[0]["loss"]
        in_evaluation = trainer.evaluate(items(ids))["eval_loss"]
        losses.append((in_training, in_evaluation))
    rows, packed = losses
    assert packed == pytest.approx(rows, abs=2e-4)  # Trainer rounds what it logs
