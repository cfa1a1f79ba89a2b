"""transformers' own Trainer, called as its users call it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from metatokens import MetaGPT2ForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # the Trainer's default, where there is no GPU

TEXTS = [f"the cat sat on mat {number} while two dogs ran over green hills" for number in range(12)]


class Tokens:
    """Texts with a meta-token after the third id; the labels are the ids, meta-tokens included."""

    def __init__(self, folder: Path):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        encoded = [tokenizer(text)["input_ids"] for text in TEXTS]
        self.meta = tokenizer.meta_token_id
        self.items = [[*ids[:3], self.meta, *ids[3:]][:16] for ids in encoded]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.items[index], "labels": self.items[index]}


class WithoutMetaLabels(Tokens):
    """The same with -100 at meta-tokens, for losses that the Trainer computes."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        item = super().__getitem__(index)
        return item | {"labels": [-100 if label == self.meta else label for label in item["labels"]]}


def collate(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([item[name] for item in items]) for name in items[0]}


def hit_rate(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    assert logits.shape[:2] == labels.shape
    return {"hits": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).mean())}


def test_it_trains_evaluates_predicts_and_loads_the_best_model(folder: Path, tmp_path: Path) -> None:
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        load_best_model_at_end=True,
        report_to="none",
        use_cpu=True,
    )
    data = Tokens(folder)
    model = MetaGPT2ForCausalLM.from_pretrained(folder)
    trainer = Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, data_collator=collate, compute_metrics=hit_rate
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert 0 <= after["eval_hits"] <= 1
    measured = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert after["eval_loss"] == pytest.approx(min(measured[1:]), rel=1e-5)
    predicted = trainer.predict(data)
    assert predicted.predictions.shape == (12, 16, model.config.vocab_size)
    assert np.isfinite(predicted.predictions).all()
    assert predicted.metrics["test_loss"] == pytest.approx(after["eval_loss"], rel=1e-5)
    trainer.save_model(str(tmp_path / "best"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    with torch.no_grad():
        logits = again.eval()(torch.tensor(data.items)).logits
    torch.testing.assert_close(logits, torch.from_numpy(predicted.predictions), rtol=1e-4, atol=1e-4)


class FirstLoss(TrainerCallback):
    """Keeps the loss of the first step."""

    loss = math.nan

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if state.global_step == 1 and "loss" in logs:
            self.loss = logs["loss"]


def first_loss(model: Any, data: Tokens, out: Path, **settings: Any) -> float:
    kept = FirstLoss()
    arguments = TrainingArguments(
        str(out),
        max_steps=1,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        **{"per_device_train_batch_size": 12} | settings,
    )
    Trainer(model, arguments, train_dataset=data, data_collator=collate, callbacks=[kept]).train()
    return kept.loss


@pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
def test_the_loss_with_label_smoothing_is_that_of_the_next_token(
    second_attention: str, small_model: Any, tmp_path: Path
) -> None:
    folder = small_model(second_attention=second_attention)
    data, model = WithoutMetaLabels(folder), MetaGPT2ForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor(data.items)
    with torch.no_grad():
        scores = model(ids).logits[:, :-1].double().log_softmax(-1)[ids[:, 1:] != data.meta]
    truth = -scores.gather(-1, ids[:, 1:][ids[:, 1:] != data.meta][:, None]).mean()
    expected = 0.9 * truth + 0.1 * -scores.mean()
    smoothed = first_loss(model, data, tmp_path, label_smoothing_factor=0.1)
    assert smoothed == pytest.approx(float(expected), abs=2e-4)  # Trainer rounds what it logs


def test_the_loss_of_labels_that_are_the_ids_asks_for_no_meta_token(folder: Path, tmp_path: Path) -> None:
    data, model = Tokens(folder), MetaGPT2ForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor(data.items)
    with torch.no_grad():
        scores = -model(ids).logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    expected = scores[ids[:, 1:] != model.config.meta_token_id].mean()
    assert first_loss(model, data, tmp_path) == pytest.approx(float(expected), abs=2e-4)


def test_with_gradients_accumulated_it_is_nearly_so(folder: Path, tmp_path: Path) -> None:
    data, exact = Tokens(folder), WithoutMetaLabels(folder)
    data.items[0][5:15:2] = exact.items[0][5:15:2] = [data.meta] * 5  # one row has many more of them
    small = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    losses = [
        first_loss(MetaGPT2ForCausalLM.from_pretrained(folder), items, tmp_path / name, **small)
        for name, items in (("given", data), ("exact", exact))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.03)
    assert losses[0] != losses[1]  # otherwise the docs could promise equality


def test_the_collator_of_transformers_pads_and_labels(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    texts = [{"input_ids": tokenizer(text)["input_ids"][: 4 + number]} for number, text in enumerate(TEXTS)]
    arguments = TrainingArguments(str(tmp_path), max_steps=2, report_to="none", use_cpu=True, logging_steps=1)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(
        MetaGPT2ForCausalLM.from_pretrained(folder), arguments, train_dataset=texts, data_collator=collator
    )
    assert math.isfinite(trainer.train().training_loss)
