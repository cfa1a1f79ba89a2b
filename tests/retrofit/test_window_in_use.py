"""Models that forget text, in what people do with models of transformers: nothing is lost or wrong without a word."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from transformers import (
    AutoModelForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    cache_utils,
)
from transformers.generation.streamers import BaseStreamer

from metatokens import add_meta_attention, set_text_window
from metatokens.errors import UserError
from tests.model.text_window import FULL, ROWS, SINKS, WINDOW
from tests.model.tiny_models import META, random_rows
from tests.retrofit.architectures import error, train_like
from tests.retrofit.forgetful import (
    BOTH_CALLERS,
    EOS,
    forgetful,
    forgetful_retrofit,
    shared_forgetful,
)

IDS = torch.tensor(ROWS[:1])
LORA = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
pytestmark = [
    pytest.mark.filterwarnings("ignore:::peft"),
    # That PEFT reads.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]


@pytest.mark.parametrize("full", [FULL, None])
def test_a_wrapper_for_checkpointing_is_refused(full: list[int] | None) -> None:
    model = forgetful_retrofit("llama", full)
    apply_activation_checkpointing(  # as FSDP users do
        model, check_fn=lambda module: type(module).__name__ == "LlamaDecoderLayer"
    )
    loss = model.train()(IDS, labels=IDS, use_cache=False).loss
    with pytest.raises(
        UserError, match=r"use model\.gradient_checkpointing_enable\(\) in its place"
    ):
        loss.backward()


def test_an_adapter_is_loaded_with_the_window_or_not_at_all(tmp_path: Path) -> None:
    forgetful_retrofit("llama", None).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    set_text_window(model, WINDOW, SINKS, FULL)
    get_peft_model(model, LORA).save_pretrained(tmp_path / "adapter")
    with pytest.raises(OSError, match="this model was not saved as it is"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    set_text_window(model, WINDOW, SINKS, FULL)
    model.save_pretrained(tmp_path / "forgets")
    tuned = get_peft_model(model, LORA).eval()
    tuned.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert loaded.config.text_full_layers == FULL
    assert torch.equal(loaded(IDS).logits, tuned(IDS).logits)

    set_text_window(loaded, WINDOW)  # what it has: the names stay
    assert loaded.peft_config["default"].base_model_name_or_path == str(tmp_path / "forgets")
    set_text_window(loaded, WINDOW + 1)
    assert "not saved as it is" in loaded.peft_config["default"].base_model_name_or_path


def test_an_adapter_without_a_task_is_loaded_around_meta_attention(tmp_path: Path) -> None:
    """PEFT would take the base's class by its name, which drops what was added."""
    model = forgetful_retrofit("llama", None)
    model.save_pretrained(tmp_path / "model")
    lora = LoraConfig(
        target_modules="all-linear",
        exclude_modules=".*meta_attention.*",
        modules_to_save=["meta_attention", "meta_token"],
    )
    tuned = get_peft_model(model, lora).eval()
    for weight in tuned.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn(weight.shape)
    tuned.save_pretrained(tmp_path / "adapter")

    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()

    assert torch.equal(loaded(IDS).logits, tuned(IDS).logits)


def phi3(window: int | None) -> PreTrainedModel:
    """A Phi-3, which drops its cache where a text becomes longer than 48 tokens, and its angles change."""
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=META + 1,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
        original_max_position_embeddings=48,
        sliding_window=None,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [1.5] * 8,
            "original_max_position_embeddings": 48,
        },
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        initializer_range=0.2,
    )
    plain = Phi3ForCausalLM(config).eval()
    model = train_like(
        add_meta_attention(plain, meta_token_id=META, heads=2, head_size=16, freeze=False)
    )
    set_text_window(model, window, SINKS)
    return model


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_base_that_drops_its_cache_reads_everything_again(window: int | None) -> None:
    model, ids = phi3(window), torch.tensor(random_rows((130,), meta_rate=0.1, seed=1))
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)

    assert torch.equal(model.generate(ids, prefill_chunk_size=20, **options), expected)
    assert torch.equal(model.generate(ids, **options), expected)
    with pytest.raises(UserError, match="this base drops its cache at a length"):
        model.generate(ids[:, :46], meta_every=2, **options)


@BOTH_CALLERS
def test_assisted_generation_is_refused(caller: str) -> None:
    draft = shared_forgetful(caller)
    target = forgetful(caller, None)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    for model, further in (
        (draft, {"prompt_lookup_num_tokens": 3}),
        (target, {"assistant_model": draft}),
    ):
        with pytest.raises(UserError, match="assisted generation supports neither"):
            model.generate(IDS, **options, **further)


@pytest.mark.parametrize("full", [None, FULL])
@torch.no_grad()
def test_inputs_by_place_are_inputs_by_name(full: list[int] | None) -> None:
    model, mask = forgetful_retrofit("llama", full), torch.ones_like(IDS)
    expected = model.model(IDS).last_hidden_state

    assert torch.equal(model.model(IDS, mask).last_hidden_state, expected)
    cache = model.model(IDS[:, :30], use_cache=True).past_key_values
    rest = model.model(IDS[:, 30:], None, None, cache).last_hidden_state
    assert error(rest, expected[:, 30:]) < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "offloaded"},
        pytest.param(
            {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
            marks=pytest.mark.skipif(
                not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="there is no fp8 cache"
            ),
        ),
    ],
    ids=str,
)
def test_caches_that_store_entries_elsewhere_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="neither quantized nor offloaded"):
        shared_forgetful("llama").generate(IDS, max_new_tokens=3, **options)


class Written(BaseStreamer):
    """Keeps the ids that it gets."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, value: Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ids.append(-1)


@BOTH_CALLERS
def test_a_streamer_gets_what_generation_returns(caller: str) -> None:
    streamer = Written()
    options = {
        "max_new_tokens": 9,
        "prefill_chunk_size": 7,
        "do_sample": False,
        "suppress_tokens": [EOS],
    }
    [row] = shared_forgetful(caller).generate(IDS, streamer=streamer, **options)
    assert streamer.ids == [*row.tolist(), -1]
