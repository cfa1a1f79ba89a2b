"""The loss by which a model learns from its own base, recomputed row by row with a base that has nothing added."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from metatokens import add_meta_attention, set_text_window
from metatokens.checkpoint import save_model
from metatokens.data.tokenizer import load_tokenizer
from metatokens.errors import UserError
from metatokens.recipe import FinetuneRecipe, load_recipe
from metatokens.training.distillation import divergence
from metatokens.training.finetune import finetune
from metatokens.training.lora import with_lora
from tests.model.tiny_models import tiny_model
from tests.retrofit.architectures import META, base, train_like
from tests.training.conftest import Models, figures_of

# PEFT's.
pytestmark = pytest.mark.filterwarnings(
    "ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning"
)
ROWS = [
    [5, META, 9, 8, META, META, 7, 6, 5, 4, 11, 12],
    [META, 20, 21, META, 22, 23, 24],
]


def batch_of(rows: list[list[int]]) -> dict[str, Tensor]:
    """A padded batch, without a loss on the first three tokens of each row."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    lengths = torch.tensor([[len(row)] for row in rows])
    index = torch.arange(ids.shape[1])
    is_token = index < lengths
    labels = torch.where(is_token & (index >= 3) & (ids != META), ids, -100)
    return {"input_ids": ids, "attention_mask": is_token.long(), "labels": labels}


def next_token(model: Any, ids: list[int], entries: int) -> Tensor:
    """The log-probabilities of the first entries of the vocabulary, in double."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1, :entries]
    return logits.double().log_softmax(dim=-1)


def slow_divergence(model: Any, plain: Any, entries: int) -> tuple[float, int]:
    """The sum of the divergences over the first entries of the vocabulary, and their number."""
    total, count = 0.0, 0
    for row in ROWS:
        for index in range(3, len(row)):
            text = [token for token in row[:index] if token != META]
            if row[index] != META and text:
                wanted = next_token(plain, text, entries)
                predicted = next_token(model, row[:index], entries)
                total += float((wanted.exp() * (wanted - predicted)).sum())
                count += 1
    return total, count


def with_random_adapters(model: Any) -> Any:
    tuned = with_lora(model, 2).eval()
    for name, weight in tuned.named_parameters():
        if "lora_" in name:
            weight.normal_(0, 0.1)
    return tuned


@torch.no_grad()
@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_divergence_from_the_base(name: str, has_lora: bool) -> None:
    model: Any = train_like(
        add_meta_attention(base(name), meta_token_id=META, heads=2, head_size=16)
    )
    plain = base(name)
    # Masked in the model.
    plain.get_input_embeddings().weight[META] = plain.lm_head.weight[META] = 0
    set_text_window(model, 2, 1)
    tuned = with_random_adapters(model) if has_lora else model.eval()
    total, count = divergence(tuned, tuned, batch_of(ROWS))
    expected, expected_count = slow_divergence(tuned, plain, META)
    assert count == expected_count == 10
    assert float(total) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.05
    assert model.config.text_window == 2


@torch.no_grad()
def test_a_model_of_this_package_has_a_base_with_lora() -> None:
    model, plain = (
        tiny_model(vocab_size=320, meta_token_id=META, dtype=torch.float32) for _ in range(2)
    )
    tuned = with_random_adapters(model)
    set_text_window(model, 2, 1)
    total, count = divergence(tuned, tuned, batch_of(ROWS))
    expected, _ = slow_divergence(tuned, plain, 320)
    assert float(total) == pytest.approx(expected, rel=1e-4)
    assert count == 10


def test_the_teacher_has_no_dropout_and_no_gradient() -> None:
    model: Any = train_like(
        add_meta_attention(base("gpt2"), meta_token_id=META, heads=2, head_size=16)
    ).train()
    passes = []
    model.register_forward_hook(
        lambda module, args, out: passes.append((module.training, out.logits.requires_grad))
    )
    loss, _ = divergence(model, model, batch_of(ROWS))
    loss.backward()
    with_gradient = [
        name for name, parameter in model.named_parameters() if parameter.grad is not None
    ]
    of_base = [name for name in with_gradient if "meta_" not in name]
    assert passes == [(True, True), (False, False)]
    assert model.training
    assert with_gradient
    assert of_base == []


def recipe(*settings: str) -> FinetuneRecipe:
    shared = (
        "training.teacher=base",
        "training.text_window=4",
        "training.logging_steps=1",
        "training.learning_rate=0.02",
        "training.warmup_steps=0",
        "training.use_cpu=true",
        "task.landmarks=every:2",
    )
    return load_recipe(FinetuneRecipe, "demo_finetune", [*shared, *settings])


@pytest.fixture
def records(tmp_path: Path) -> Path:
    lines = [
        {"prompt": f"one two three {word}", "completion": " four five"}
        for word in ("six", "seven", "eight")
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_fine_tuning_by_the_base(small_model: Models, records: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(small_model()))
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=832, **sizes))
    with torch.no_grad():
        plain.lm_head.weight.mul_(20)
    model = add_meta_attention(plain, tokenizer, heads=2, head_size=8)
    save_model(model, tokenizer, tmp_path / "model")
    accumulating = (
        "training.gradient_accumulation_steps=2",
        "training.max_steps=30",
        "training.lora_rank=4",
    )
    finetune(recipe(*accumulating), tmp_path / "model", tmp_path / "tuned", data=records)
    losses = figures_of(tmp_path / "tuned" / "data", "loss")
    assert 0 < losses[-1] < 0.9 * losses[0]


def test_a_base_that_changes_is_no_teacher(
    small_model: Models, records: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError,
        match=r"training\.teacher needs a model with meta-tokens whose base stays as it is",
    ):
        finetune(recipe("training.max_steps=1"), small_model(), tmp_path / "run", data=records)
