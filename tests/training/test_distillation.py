"""The loss by which a model learns from its own base, recomputed row by row with a base that has nothing added."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from metatokens import add_meta_attention, set_text_window
from metatokens.checkpoint import load_model, save_model
from metatokens.data.tokenizer import load_tokenizer
from metatokens.errors import UserError
from metatokens.recipe import FinetuneRecipe, load_recipe
from metatokens.training.distillation import divergence
from metatokens.training.finetune import finetune
from metatokens.training.lora import with_lora
from tests.model.tiny_models import tiny_model
from tests.retrofit.architectures import META, base, error, train_like
from tests.training.conftest import Models

pytestmark = pytest.mark.filterwarnings("ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's
ROWS = ([5, META, 9, 8, META, META, 7, 6, 5, 4, 11, 12], [META, 20, 21, META, 22, 23, 24])


def batch_of(rows: Any) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row)], mask[place, : len(row)] = torch.tensor(row), 1
        labels[place, 3 : len(row)] = torch.tensor(row[3:])  # no loss on the first three
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(ids == META, -100)}


def slowly(model: Any, plain: Any, entries: int = META) -> tuple[float, int]:
    """The sum of the divergences over the first entries of the vocabulary, and their number."""
    total, count = 0.0, 0
    for row in ROWS:
        read = model(torch.tensor([row]), use_cache=False).logits[0, :, :entries].double().softmax(dim=-1)
        for place in range(3, len(row)):
            text = [one for one in row[:place] if one != META]
            if row[place] != META and text:
                wanted = plain(torch.tensor([text]), use_cache=False).logits[0, -1, :entries].double().softmax(dim=-1)
                total += float((wanted * (wanted.log() - read[place - 1].log())).sum())
                count += 1
    return total, count


@torch.no_grad()
@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_divergence_from_the_base(name: str, has_lora: bool) -> None:
    model: Any = train_like(add_meta_attention(base(name), meta_token_id=META, heads=2, head_size=16))
    plain = base(name)
    plain.get_input_embeddings().weight[META] = plain.lm_head.weight[META] = 0  # masked in the model
    set_text_window(model, 2, 1)
    tuned = model
    if has_lora:
        tuned = with_lora(model, 2)
        for weight_name, weight in tuned.named_parameters():
            if "lora_" in weight_name:
                weight.normal_(0, 0.1)
    tuned.eval()
    total, count = divergence(tuned, tuned, batch_of(ROWS))
    wanted = slowly(tuned, plain)
    assert count == wanted[1] == 10
    assert float(total) == pytest.approx(wanted[0], rel=1e-4)
    assert wanted[0] > 0.05
    assert model.config.text_window == 2
    set_text_window(model, None)
    text = batch_of([[one for one in row if one != META] for row in ROWS])
    if not has_lora:  # nothing is there that could make a difference
        assert float(divergence(tuned, tuned, text)[0]) < 1e-6


@torch.no_grad()
def test_a_model_of_this_package_has_a_base_with_lora() -> None:
    model, plain = (tiny_model(vocab_size=320, meta_token_id=META, dtype=torch.float32) for _ in range(2))
    tuned = with_lora(model, 2).eval()
    for name, weight in tuned.named_parameters():
        if "lora_" in name:
            weight.normal_(0, 0.1)
    set_text_window(model, 2, 1)
    total, count = divergence(tuned, tuned, batch_of(ROWS))
    assert (float(total), count) == (pytest.approx(slowly(tuned, plain, 320)[0], rel=1e-4), 10)


def test_the_teacher_has_no_dropout_and_no_gradient() -> None:
    model: Any = train_like(add_meta_attention(base("gpt2"), meta_token_id=META, heads=2, head_size=16)).train()
    passes = []
    model.register_forward_hook(lambda module, args, out: passes.append((module.training, out.logits.requires_grad)))
    before = [one.detach().clone() for one in model.parameters()]
    loss, _ = divergence(model, model, batch_of(ROWS))
    loss.backward()
    assert passes == [(True, True), (False, False)]
    assert model.training
    assert all("meta_" in name for name, one in model.named_parameters() if one.grad is not None)
    assert max(error(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True)) == 0


def recipe(*settings: str) -> FinetuneRecipe:
    shared = {"max_steps": 30, "logging_steps": 1, "learning_rate": 0.02, "warmup_steps": 0, "use_cpu": "true"}
    changed = [f"training.{name}={value}" for name, value in shared.items()]
    return load_recipe(FinetuneRecipe, "demo_finetune", [*changed, *settings])


def test_fine_tuning_by_the_base(small_model: Models, tmp_path: Path) -> None:
    folder = small_model(second_attention="none")
    tokenizer, rows = load_tokenizer(str(folder)), load_model(folder).config.vocab_size
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=rows)
    plain = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in plain.parameters():
            weight.mul_(20 if weight.ndim == 2 else 1)
    model = add_meta_attention(plain, tokenizer, heads=2, head_size=8)
    save_model(model, tokenizer, tmp_path / "model")
    records = [{"prompt": f"one two three {word}", "completion": " four five"} for word in ("six", "seven", "eight")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    options = [
        "training.teacher=base",
        "training.text_window=4",
        "training.gradient_accumulation_steps=2",
        "task.landmarks=every:2",
        "task.loss_on=sequence",
    ]
    adapted = [*options, "training.lora_rank=4"]
    finetune(recipe(*adapted), tmp_path / "model", tmp_path / "tuned", data=tmp_path / "data.jsonl")
    lines = (tmp_path / "tuned/data/curve.jsonl").read_text().splitlines()
    losses = [point["loss"] for point in map(json.loads, lines) if "loss" in point]
    assert 0 < losses[-1] < 0.9 * losses[0]
    for settings, source in (([*options, "training.train_base=true"], tmp_path / "model"), (options, folder)):
        with pytest.raises(
            UserError, match=r"training\.teacher needs a model with meta-tokens whose base stays as it is"
        ):
            finetune(recipe(*settings), source, tmp_path / "refused", data=tmp_path / "data.jsonl", overwrite=True)
