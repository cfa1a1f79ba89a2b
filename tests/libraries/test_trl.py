"""TRL's trainers, given a folder, which they load by the Auto classes, or a model."""

import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.trainer.dpo_trainer import DataCollatorForPreference

from metatokens import MetaTokenCollator, add_meta_attention
from metatokens.errors import UserError
from tests.numbers import ROUNDED

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's and torch's own, where there is no GPU

ROWS = 90
TWO_STEPS = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "learning_rate": 1e-2,
}
TWO_STEPS |= {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


TEXTS = [{"text": "the cat sat on a mat while two dogs ran"}] * 4
PAIRS = [{"prompt": "the cat sat on", "chosen": " a mat", "rejected": " green hills"}] * 4


def tiny_llama(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), **sizes, eos_token_id=tokenizer.eos_token_id)
    )


def learns(trainer: Any) -> bool:
    trainer.train()
    first, second = (line["loss"] for line in trainer.state.log_history if "loss" in line)
    return second < first


PREFERENCES = [
    {"prompt": "the<|meta|> cat", "chosen": " a<|meta|> mat", "rejected": " two<|meta|>"}
] * 4
VERDICTS = [{"prompt": "the<|meta|> cat", "completion": " a<|meta|> mat", "label": True}] * 4


@pytest.fixture
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    # SFTTrainer writes the end as text.
    return AutoTokenizer.from_pretrained(folder, split_special_tokens=False)


@torch.no_grad()
@pytest.mark.parametrize(
    ("trainer_class", "config", "rows"),
    [(DPOTrainer, DPOConfig, PREFERENCES), (KTOTrainer, KTOConfig, VERDICTS)],
    ids=["DPO", "KTO"],
)
def test_meta_tokens_in_answers_are_not_scored(
    tokenizer: Any, tmp_path: Path, trainer_class: Any, config: Any, rows: list[dict[str, Any]]
) -> None:
    model = add_meta_attention(tiny_llama(tokenizer), tokenizer, heads=2, head_size=8, freeze=False)
    model.save_pretrained(tmp_path / "model")
    arguments = config(str(tmp_path / "run"), **TWO_STEPS)
    trainer = trainer_class(
        model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.data_collator = MetaTokenCollator(trainer.data_collator, tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    names = [name for name in batch if name.endswith("completion_mask")]
    assert names
    for name in names:
        is_scored = batch[name].bool()
        is_meta = batch[name.replace("completion_mask", "input_ids")] == tokenizer.meta_token_id
        assert is_meta.any()
        assert is_scored.any()
        assert not (is_scored & is_meta).any()


def test_a_reference_that_was_computed_before(tokenizer: Any, tmp_path: Path) -> None:
    """The loss of a model that is its own reference is log 2, if one collator made the batches of both."""
    base = add_meta_attention(tiny_llama(tokenizer), tokenizer, heads=2, head_size=8)
    lora = LoraConfig(task_type="CAUSAL_LM", modules_to_save=["meta_attention", "meta_token"])
    collator = MetaTokenCollator(DataCollatorForPreference(tokenizer.eos_token_id), tokenizer)
    trainer = DPOTrainer(
        get_peft_model(base, lora),
        args=DPOConfig(str(tmp_path), precompute_ref_log_probs=True, **TWO_STEPS),
        train_dataset=Dataset.from_list(PREFERENCES),
        processing_class=tokenizer,
        data_collator=collator,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, batch).item()
    assert loss == pytest.approx(math.log(2), abs=1e-4)


@pytest.mark.parametrize(
    ("trainer_class", "config", "rows", "load"),
    [
        (SFTTrainer, SFTConfig, TEXTS, str),
        (DPOTrainer, DPOConfig, PAIRS, AutoModelForCausalLM.from_pretrained),
    ],
    ids=["SFT of a path", "DPO of a model"],
)
def test_a_trainer(
    trainer_class: Any,
    config: Any,
    rows: list[dict[str, str]],
    load: Callable[[Path], Any],
    folder: Path,
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    arguments, data = config(str(tmp_path), **TWO_STEPS), Dataset.from_list(rows)
    assert learns(
        trainer_class(load(folder), args=arguments, train_dataset=data, processing_class=tokenizer)
    )


def test_sft_trainer_on_a_retrofitted_model(tokenizer: Any, tmp_path: Path) -> None:
    texts = Dataset.from_list(
        [{"prompt": "the cat sat on", "completion": " a mat while two dogs ran"}] * 4
    )
    model = add_meta_attention(tiny_llama(tokenizer), tokenizer, heads=2, head_size=8)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer = SFTTrainer(
        model,
        SFTConfig(str(tmp_path), **TWO_STEPS),
        train_dataset=texts,
        processing_class=tokenizer,
    )
    trainer.data_collator = MetaTokenCollator(trainer.data_collator, tokenizer, "every:3")
    batch = next(iter(trainer.get_train_dataloader()))
    is_meta, is_scored = batch["input_ids"] == tokenizer.meta_token_id, batch["labels"] != -100
    has_learned = learns(trainer)
    changed = [
        name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])
    ]
    of_base = [name for name in changed if "meta_" not in name]
    assert is_meta[:, 3::4].any(dim=1).all()
    assert is_scored.any(dim=1).all()
    assert not (is_scored & is_meta).any()
    assert has_learned
    assert changed
    assert of_base == []


def test_the_loss_of_trl_is_the_models(tokenizer: Any, tmp_path: Path) -> None:
    """TRL uses the head's weights directly, and so counts the entries that the model masks.

    The text's logits are far below 0 here, as those of GPT-2 are; an entry of logit 0 would take all the probability.
    """
    vocabulary = {token: number for token, number in tokenizer.get_vocab().items() if number < ROWS}
    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary)), eos_token=tokenizer.eos_token
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=ROWS, n_embd=16, n_layer=2, n_head=2))
    with torch.no_grad():
        model.transformer.wte.weight.add_(1.0)
        model.transformer.ln_f.bias.fill_(-3.0)
    add_meta_attention(model, plain, heads=2, head_size=8)
    rows = len(model.get_output_embeddings().weight)
    texts = Dataset.from_list([{"input_ids": list(range(5, 30))}] * 4)
    trainer = SFTTrainer(
        model, SFTConfig(str(tmp_path), **TWO_STEPS), train_dataset=texts, processing_class=plain
    )
    trainer.data_collator = MetaTokenCollator(trainer.data_collator, plain, "every:3")
    batch = next(iter(trainer.get_train_dataloader()))
    output = model.eval()(**batch)
    ours, theirs = float(output.loss), float(trainer.compute_loss(model, dict(batch)))
    assert rows > ROWS
    assert output.logits[..., :ROWS].max() < -30
    assert ours - 1e-4 <= theirs <= ours + math.log(rows / ROWS) + 1e-4


@pytest.mark.parametrize("is_retrofitted", [False, True], ids=["own", "retrofitted"])
def test_the_loss_of_packed_sequences_is_that_of_each_alone(
    is_retrofitted: bool, folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    if is_retrofitted:
        model = add_meta_attention(tiny_llama(tokenizer), tokenizer, heads=2, head_size=8)
        for name, weight in model.named_parameters():
            if "meta_attention" in name:
                weight.data.normal_()
    lengths = (1, 6, 9, 13, 4, 8)
    texts = Dataset.from_list([{"input_ids": list(range(5, 5 + length))} for length in lengths])
    arguments = SFTConfig(str(tmp_path), **TWO_STEPS, padding_free=True, max_length=None)
    trainer = SFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer)
    trainer.data_collator = MetaTokenCollator(trainer.data_collator, tokenizer, "every:3")
    batch = next(iter(trainer.get_train_dataloader()))
    ids, is_first = batch["input_ids"][0], batch["position_ids"][0] == 0
    is_meta = ids == tokenizer.meta_token_id
    rows = ids.tensor_split(is_first.nonzero()[1:, 0])
    padded = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    is_ignored = (mask == 0) | (padded == tokenizer.meta_token_id)
    apart = {
        "input_ids": padded,
        "attention_mask": mask,
        "labels": padded.masked_fill(is_ignored, -100),
    }
    expected = float(trainer.compute_loss(model, apart))
    assert is_first.sum() > 2
    assert is_meta.sum() > 2
    assert torch.equal(batch["labels"][0], ids.masked_fill(is_first | is_meta, -100))
    assert float(trainer.compute_loss(model, dict(batch))) == pytest.approx(expected, rel=ROUNDED)
    assert learns(trainer)


GROUPS = {
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "num_generations": 2,
    "max_completion_length": 8,
}
GROUPS |= {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def test_grpo_inserts_no_meta_tokens_and_needs_a_saved_reference(
    folder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = Dataset.from_list([{"prompt": "the cat sat on"}] * 4)
    model = add_meta_attention(tiny_llama(tokenizer), tokenizer, heads=2, head_size=8)

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    def trainer(**options: Any) -> GRPOTrainer:
        arguments = GRPOConfig(str(tmp_path / "run"), **GROUPS, **options)
        return GRPOTrainer(
            model, reward, args=arguments, train_dataset=prompts, processing_class=tokenizer
        )

    trainer().train()
    with pytest.raises(
        UserError,
        match="a trainer that generates, such as TRL's GRPO, would learn from ids without",
    ):
        trainer(generation_kwargs={"meta_every": 2}).train()
    with pytest.raises(
        OSError, match=r"this model was not saved as it is: call model\.save_pretrained"
    ):
        trainer(beta=0.04)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    reference = dict(trainer(beta=0.04).ref_model.named_parameters())
    assert "model.layers.0.meta_attention.attention.out_proj.weight" in reference


def test_the_example_from_a_base_to_a_model_that_generates(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Path(__file__).parents[2] / "examples" / "any_decoder.py"
    tokenizer = AutoTokenizer.from_pretrained(folder, split_special_tokens=False)
    tokenizer.save_pretrained(tmp_path / "base")
    tiny_llama(tokenizer).save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text(
        "the cat sat on a mat while two dogs ran over green hills\n" * 8, encoding="utf-8"
    )
    paths = [tmp_path / "base", tmp_path / "text.txt", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, paths)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1].startswith("the cat sat on a mat")
    added = load_file(tmp_path / "out" / "added" / "meta_tokens.safetensors")
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "added").meta_token == "<|meta|>"
    # Its initial value.
    assert added["model.layers.0.meta_attention.attention.out_proj.weight"].abs().max() > 0
