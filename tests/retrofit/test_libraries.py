"""Retrofitted models in the programs that people use: Trainer, PEFT, accelerate."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from metatokens import add_meta_attention, freeze_base, save_meta, set_text_window
from metatokens.errors import UserError
from tests.model.tiny_models import tiny_model
from tests.numbers import decoder_roundings, rounding_bound
from tests.retrofit.architectures import (
    ADDED,
    ARCHITECTURES,
    LENGTH,
    META,
    ROUNDED,
    ROWS,
    base,
    error,
    fit,
    logits,
    retrofitted,
    shared,
    text,
    train_like,
    with_meta_tokens,
)
from tests.retrofit.callers import model_of

pytestmark = [
    # Trainer's default, where there is no GPU.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument"),
    # PEFT's own.
    pytest.mark.filterwarnings("ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning"),
]
LORA = peft.LoraConfig(
    task_type="CAUSAL_LM",
    r=4,
    target_modules="all-linear",
    exclude_modules=r".*meta_attention.*",
    modules_to_save=["meta_attention", "meta_token"],
)
# Their forward takes inputs that it does not know, and ignores them.
IGNORE_MASKS = {"bloom", "codegen", "falcon", "gptj", "mpt"}
BOTH_CALLERS = pytest.mark.parametrize("caller", ["rope-meta", "llama"])


@BOTH_CALLERS
def test_a_mask_of_meta_tokens_of_another_shape_is_refused(caller: str) -> None:
    model, ids = model_of(caller), with_meta_tokens()
    mask = ids == model.config.meta_token_id
    for wrong in (mask[:, :-2], mask[0], mask[:1]):
        with pytest.raises(UserError, match="meta_token_mask needs the shape of the input"):
            model(ids, meta_token_mask=wrong)

    assert torch.equal(model(ids, meta_token_mask=mask).logits, model(ids).logits)


@pytest.mark.quick(name=["bloom", "falcon", "gptj", "llama"])
@pytest.mark.parametrize("name", [*ARCHITECTURES])
def test_a_mask_decides_or_is_refused(name: str) -> None:
    model, ids = shared(name), with_meta_tokens()
    none = torch.zeros_like(ids, dtype=torch.bool)
    if name in IGNORE_MASKS:
        with pytest.raises(UserError, match="does not hand meta_token_mask to its blocks"):
            model(ids, meta_token_mask=none)
    else:
        assert not torch.equal(model(ids, meta_token_mask=none).logits, model(ids).logits)


@BOTH_CALLERS
def test_meta_tokens_are_not_looked_for_in_noisy_embeddings(caller: str) -> None:
    model, ids = model_of(caller), with_meta_tokens()
    table = model.get_input_embeddings()
    embeddings = table(ids)
    table.neftune_noise_alpha = 5.0  # as the Trainer sets it
    model.train()

    with pytest.raises(UserError, match="NEFTune changes the embeddings"):
        model(inputs_embeds=embeddings)
    model(inputs_embeds=embeddings, meta_token_mask=ids == model.config.meta_token_id)
    model.eval()
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(ids).logits)


@BOTH_CALLERS
def test_ids_of_rows_that_pad_the_table_are_not_trained(caller: str) -> None:
    """As after `tokenizer.add_tokens` and run_clm.py's lines, which resize a table only if it is too small."""
    if caller == "rope-meta":
        model = tiny_model(vocab_size=128, unpadded_vocab_size=64)
    else:
        words = WordLevel({str(number): number for number in range(ROWS)})
        model = add_meta_attention(
            base("llama"), PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
        )
    added = model.config.unpadded_vocab_size
    ids = torch.tensor([[3, model.config.meta_token_id, added, 5]])
    assert added < len(model.get_input_embeddings().weight)
    model(ids)  # as transformers computes it

    model.train()
    for _ in range(2):  # a cell of a notebook is run again
        with pytest.raises(
            UserError, match=r"has the id \d+, and the model uses \d+ entries of its table"
        ):
            model(ids, labels=ids)
    model.resize_token_embeddings(added + 1, pad_to_multiple_of=64)
    model(ids, labels=ids).loss.backward()


@BOTH_CALLERS
@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace:DeprecationWarning"
)
def test_a_trace_is_refused(caller: str) -> None:
    model, ids = model_of(caller), with_meta_tokens()
    for example in (ids, text()):  # with meta-tokens, and without
        with pytest.raises(UserError, match=r"use torch\.export"):
            torch.jit.trace(model, (example,), strict=False)


# --- Trainer


ITEMS = [
    {"input_ids": ids, "attention_mask": torch.ones(LENGTH, dtype=torch.long), "labels": ids}
    for seed in range(8)
    for ids in with_meta_tokens(seed)
]


def trainer_of(model: PreTrainedModel, out: Path, steps: int, **options: Any) -> Trainer:
    quiet = {
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
    }
    usual = {"learning_rate": 5e-3, "per_device_train_batch_size": 4, "seed": 0}
    arguments = TrainingArguments(out, max_steps=steps, **quiet | usual | options)
    return Trainer(model, arguments, train_dataset=ITEMS)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """A copy of all weights."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def is_added(name: str) -> bool:
    return "meta_attention" in name or "meta_token" in name


@pytest.mark.quick(name=["llama"])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3_text"])
def test_trainer_changes_the_new_weights_alone_and_resumes(name: str, tmp_path: Path) -> None:
    model, resumed = (add_meta_attention(base(name), **ADDED) for _ in range(2))
    before = weights_of(model)
    saving = {"save_strategy": "steps", "save_steps": 4}

    trainer = trainer_of(model, tmp_path, 8, **saving)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    changed = {
        key for key, weight in model.named_parameters() if not torch.equal(weight, before[key])
    }
    assert changed == set(filter(is_added, before))
    assert error(logits(model, text()), logits(base(name), text())) == 0.0

    trainer_of(resumed, tmp_path, 8, **saving).train(str(tmp_path / "checkpoint-4"))
    for key, weight in resumed.named_parameters():
        assert torch.equal(weight, model.get_parameter(key)), key


# In half precision, a step of 1e-5 would not change a weight of 1, the initial weight of norms.
@pytest.mark.quick(options=[{"bf16": True}])
@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["as it is", "under autocast"])
def test_trainer_moves_what_was_added_to_a_base_in_half_precision(
    options: dict[str, Any], tmp_path: Path
) -> None:
    base("llama").bfloat16().save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = train_like(add_meta_attention(AutoModelForCausalLM.from_pretrained(tmp_path), **ADDED))
    before = weights_of(model)

    slow = {"learning_rate": 1e-5, "lr_scheduler_type": "constant"}
    trainer_of(model, tmp_path / "out", 2, **slow, **options).train()

    for name, weight in weights_of(model).items():
        moved = (weight - before[name]).abs()
        if is_added(name):
            assert (moved > 1e-6).float().mean() > 0.9, name
        else:
            assert moved.max() == 0.0, name
    assert torch.equal(logits(model.eval(), text()), logits(plain, text()))
    assert model.generate(text(), max_new_tokens=9, meta_every=3).shape == (len(text()), LENGTH + 9)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_training_that_leaves_out_what_was_added_says_so(tmp_path: Path) -> None:
    """Other tests show that no other training says so: a warning would make them fail."""
    model = add_meta_attention(base("llama"), **ADDED)
    without_meta_tokens = trainer_of(deepcopy(model), tmp_path, 3)
    without_meta_tokens.train_dataset = [{"input_ids": ids, "labels": ids} for ids in text()] * 4
    with pytest.warns(UserWarning, match="no meta-token is in this batch"):
        without_meta_tokens.train()

    lora = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.warns(
        UserWarning, match="nothing of what add_meta_attention added is trained"
    ) as caught:
        trainer_of(peft.get_peft_model(model, lora), tmp_path, 3).train()
    messages = [str(warning.message) for warning in caught if "meta" in str(warning.message)]
    assert len(messages) == 1


def test_a_training_for_a_window_needs_no_meta_token_and_a_frozen_base_does(tmp_path: Path) -> None:
    """A text has no meta-token here. A warning makes the first training fail."""
    texts = [{"input_ids": ids, "labels": ids} for ids in text()] * 4

    def moved_by_training(**options: Any) -> float:
        model = add_meta_attention(base("llama"), **ADDED, layers=[], **options)
        set_text_window(model, 5)
        before = weights_of(model)
        trainer = trainer_of(model, tmp_path, 2)
        trainer.train_dataset = texts
        trainer.train()
        return max(
            float((weight - before[name]).abs().max()) for name, weight in weights_of(model).items()
        )

    assert moved_by_training(freeze=False) > 0
    with pytest.warns(UserWarning, match="no meta-token is in this batch"):
        assert moved_by_training() == 0


# --- PEFT


@torch.no_grad()
def test_copied_blocks_are_refused() -> None:
    """Two of them would share a store of the cache."""
    replicate = peft.LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (1, 3)])
    model = peft.get_peft_model(retrofitted("llama"), replicate)
    with pytest.raises(UserError, match="as with PEFT's layer_replication"):
        model(with_meta_tokens())


@pytest.mark.parametrize(
    "choices",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [5]},
    ],
)
def test_adapters_around_the_embeddings_are_refused(choices: dict[str, Any]) -> None:
    """They bypass the meta-token's row, which is not in the table."""
    model = peft.get_peft_model(retrofitted("llama"), peft.LoraConfig(r=4, **choices))
    with pytest.raises(
        UserError, match="around the embeddings bypasses the meta-token's; train them by modules_to"
    ):
        model(input_ids=with_meta_tokens())


@pytest.mark.parametrize("parts", [["meta_token"], ["meta_token", "embed_tokens"]], ids=str)
def test_adapters_that_separate_the_table_and_its_meta_token_are_refused(parts: list[str]) -> None:
    adapted = peft.get_peft_model(
        retrofitted("llama"),
        peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    )
    adapted.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"], modules_to_save=parts))
    adapted.set_adapter("other")

    with pytest.raises(UserError, match="name the table alone, in each of them"):
        adapted(with_meta_tokens())


def test_adapters_are_not_left_out_of_what_was_added(tmp_path: Path) -> None:
    model, ids = retrofitted("llama"), with_meta_tokens()
    adapted = peft.get_peft_model(model, deepcopy(LORA)).eval()
    expected = logits(adapted, ids)
    for with_adapters in (model, adapted):
        with pytest.raises(UserError, match=r"save what their merge_and_unload\(\) returns"):
            save_meta(with_adapters, tmp_path)

    adapted.merge_and_unload().save_pretrained(tmp_path / "whole")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert error(logits(loaded, ids), expected) < ROUNDED


@pytest.mark.parametrize("further", [{}, {"ensure_weight_tying": True}], ids=str)
def test_a_tied_head_that_peft_replaces_predicts_no_meta_token(further: dict[str, Any]) -> None:
    model, ids = retrofitted("llama", tie_word_embeddings=True), with_meta_tokens()
    linear = {"target_modules": "all-linear", "exclude_modules": r".*meta_attention.*"}
    lora = peft.LoraConfig(**linear, modules_to_save=["meta_attention", "embed_tokens"], **further)
    adapted = peft.get_peft_model(model, lora)

    assert (adapted(ids).logits[..., META:] == -1e4).all()
    assert (adapted.merge_and_unload()(ids).logits[..., META:] == -1e4).all()


# --- embeddings, and weights elsewhere


@torch.no_grad()
def test_embeddings_in_half_precision_under_autocast() -> None:
    model, ids = shared("llama"), with_meta_tokens()
    embeddings = model.get_input_embeddings()(ids)
    expected = logits(model, ids)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_half = model(inputs_embeds=embeddings.bfloat16(), use_cache=False).logits[..., :META]
        rounded = model(inputs_embeds=embeddings.bfloat16().float(), use_cache=False).logits[
            ..., :META
        ]

    roundings = decoder_roundings(torch.bfloat16, blocks=3, width=64, length=LENGTH)
    bound = rounding_bound(torch.bfloat16, roundings, float(expected.std()))
    assert error(in_half, expected) < bound
    assert error(rounded, expected) > bound  # in float32 none is exactly the meta-token's


# transformers' own, before 5.23, of any such model.
@pytest.mark.filterwarnings("ignore:.*on a device type different")
@pytest.mark.parametrize(("name", "is_base_offloaded"), [("llama", False), ("gpt_neox", True)])
def test_weights_that_accelerate_keeps_elsewhere(name: str, is_base_offloaded: bool) -> None:
    ids, plain = with_meta_tokens(), shared(name)
    model = base(name) if is_base_offloaded else retrofitted(name)
    cpu_offload(model, torch.device("cpu"))
    if is_base_offloaded:
        model = train_like(add_meta_attention(model, **ADDED))

    assert any(hasattr(module, "_hf_hook") for module in model.modules())
    assert error(logits(model, ids), logits(plain, ids)) == 0.0
    options = {"max_new_tokens": 5, "meta_every": 2, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    assert model(ids, labels=ids).loss.item() == plain(ids, labels=ids).loss.item()


@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own
def test_a_base_in_eight_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    def load(folder: Path) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
        )

    base("llama").save_pretrained(tmp_path / "base")
    plain, ids = load(tmp_path / "base"), with_meta_tokens()
    model = train_like(add_meta_attention(load(tmp_path / "base"), **ADDED))
    assert error(logits(model, text()), logits(plain, text())) == 0.0
    fit(model, ids, steps=4, rate=0.01)
    model.save_pretrained(tmp_path / "whole")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert error(logits(loaded, ids), logits(model, ids)) == 0.0

    # A model that was saved whole unquantised: what was added is not quantised when it is loaded.
    shared("llama").save_pretrained(tmp_path / "wide")
    wide = load(tmp_path / "wide")
    save_meta(wide, tmp_path / "added")
    for name, weight in load_file(tmp_path / "added" / "meta_tokens.safetensors").items():
        assert torch.equal(weight, shared("llama").get_parameter(name)), name
    freeze_base(wide, trained=True)  # except quantised weights
    # Without adapters, Trainer refuses quantised models.
    lora = peft.get_peft_model(model, deepcopy(LORA))
    trainer_of(lora, tmp_path / "run", 2).train()
