"""TRL's trainers, which load what they are given by the Auto classes, from a folder and from a model."""

from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import metatokens  # noqa: F401  (registers the model)

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's and torch's own, where there is no GPU

TWO_STEPS = {"max_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-2}
TWO_STEPS |= {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}


@pytest.mark.parametrize("given", [str, AutoModelForCausalLM.from_pretrained], ids=["path", "model"])
def test_sft_trainer(given: Callable[[Path], str | PreTrainedModel], folder: Path, tmp_path: Path) -> None:
    texts = Dataset.from_list([{"text": "the cat sat on a mat while two dogs ran"}] * 4)
    tokenizer = AutoTokenizer.from_pretrained(folder, split_special_tokens=False)  # TRL writes the end as text
    arguments = SFTConfig(str(tmp_path), **TWO_STEPS)
    trainer = SFTTrainer(given(folder), arguments, train_dataset=texts, processing_class=tokenizer)
    assert all(row["input_ids"][-1] == tokenizer.eos_token_id for row in trainer.train_dataset)
    trainer.train()
    first, second = (line["loss"] for line in trainer.state.log_history if "loss" in line)
    assert second < first


@pytest.mark.parametrize("given", [str, AutoModelForCausalLM.from_pretrained], ids=["path", "model"])
def test_dpo_trainer(given: Callable[[Path], str | PreTrainedModel], folder: Path, tmp_path: Path) -> None:
    pairs = Dataset.from_list([{"prompt": "the cat sat on", "chosen": " a mat", "rejected": " green hills"}] * 4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arguments = DPOConfig(str(tmp_path), **TWO_STEPS)
    trainer = DPOTrainer(given(folder), args=arguments, train_dataset=pairs, processing_class=tokenizer)
    trainer.train()
    first, second = (line["loss"] for line in trainer.state.log_history if "loss" in line)
    assert second < first
