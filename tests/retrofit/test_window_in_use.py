"""Models that forget text, in what people do with models of transformers: nothing is lost or wrong without a word."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModel, AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    StaticCache,
    cache_utils,
)
from transformers.generation.streamers import BaseStreamer

from metatokens import add_meta_attention, set_text_window
from metatokens.errors import UserError
from metatokens.model.modeling import MetaGPT2ForCausalLM
from tests.gradients import far
from tests.model.in_pieces import in_steps
from tests.model.text_window import FULL, ROWS, SINKS, SMALL, WINDOW
from tests.model.tiny_models import META, random_rows, tiny_model
from tests.retrofit.architectures import ROUNDED, ROUNDED_GRADIENT, ROUNDED_WEIGHT, base, error, train_like
from tests.retrofit.text_window import model_of

IDS = torch.tensor(ROWS[:1])
LORA = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
pytestmark = [
    pytest.mark.filterwarnings("ignore:::peft"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # that PEFT reads
]


def one_of(is_own: bool) -> PreTrainedModel:
    """A model that forgets: this package's own, or a retrofitted Llama."""
    return tiny_model(**SMALL, text_full_layers=FULL) if is_own else model_of("llama")


def without_modules() -> PreTrainedModel:
    """A Llama with a meta-token and no meta-attention, whose block 1 keeps all text."""
    model = add_meta_attention(base("llama"), meta_token_id=META, layers=[], freeze=False)
    set_text_window(model, WINDOW, SINKS, FULL)
    return model


def gradient(model: PreTrainedModel) -> Tensor:
    model.train()(IDS, labels=IDS, use_cache=False).loss.backward()
    return next(one.grad for name, one in model.named_parameters() if ".1." in name and "k_proj" in name)


def wrapped(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose blocks are wrapped for activation checkpointing, as FSDP users do."""
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "LlamaDecoderLayer")
    return model


def test_a_wrapper_for_checkpointing_gives_full_blocks_their_mask() -> None:
    wanted = gradient(without_modules())
    assert far(gradient(wrapped(without_modules())), wanted) < ROUNDED_GRADIENT
    with pytest.raises(UserError, match=r"use model\.gradient_checkpointing_enable\(\) in its place"):
        gradient(wrapped(model_of("llama")))
    with pytest.raises(UserError, match=r"use model\.gradient_checkpointing_enable\(\) in its place"):
        gradient(wrapped(model_of("llama", None)))


def test_an_adapter_is_loaded_with_the_window_or_not_at_all(tmp_path: Path) -> None:
    model_of("llama", None).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    set_text_window(model, WINDOW, SINKS, FULL)
    tuned = get_peft_model(model, LORA).eval()
    tuned.save_pretrained(tmp_path / "adapter")
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
    model = model_of("llama", None)
    model.save_pretrained(tmp_path / "model")
    config = LoraConfig(
        target_modules="all-linear",
        exclude_modules=".*meta_attention.*",
        modules_to_save=["meta_attention", "meta_token"],
    )
    tuned = get_peft_model(model, config).eval()
    for parameter in tuned.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape) if parameter.requires_grad else 0
    tuned.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(loaded(IDS).logits, tuned(IDS).logits)
    with pytest.raises(ValueError, match="Cannot use `AutoPeftModel` with a task type"):
        AutoPeftModel.from_pretrained(tmp_path / "adapter")


def test_a_model_of_this_package_has_its_name_again_when_it_is_saved(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "old")
    model = MetaGPT2ForCausalLM.from_pretrained(tmp_path / "old")
    set_text_window(model, 5)
    assert "not saved as it is" in model.config.name_or_path
    model.save_pretrained(tmp_path / "new")
    assert model.name_or_path == model.config.name_or_path == str(tmp_path / "new")


def phi3(window: int | None) -> PreTrainedModel:
    """A Phi-3, which drops its cache where a text becomes longer than 48 tokens, and its angles change."""
    torch.manual_seed(0)
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.5] * 8}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    long = {"max_position_embeddings": 4096, "original_max_position_embeddings": 48, "sliding_window": None}
    rope = {"rope_parameters": {**factors, "rope_theta": 10000.0, "original_max_position_embeddings": 48}}
    tokens = {"vocab_size": META + 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    plain = Phi3ForCausalLM(Phi3Config(**sizes, **long, **rope, **tokens, initializer_range=0.2)).eval()
    model = train_like(add_meta_attention(plain, meta_token_id=META, heads=2, head_size=16, freeze=False))
    set_text_window(model, window, SINKS)
    return model


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_base_that_drops_its_cache_reads_everything_again(window: int | None) -> None:
    model, ids = phi3(window), torch.tensor(random_rows((130,), meta_rate=0.1, seed=1))
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    wanted = model.generate(ids, use_cache=False, **how)
    assert torch.equal(model.generate(ids, prefill_chunk_size=20, **how), wanted)
    assert torch.equal(model.generate(ids, **how), wanted)
    with pytest.raises(UserError, match=r"this base drops its cache at \d+ tokens"):
        model.generate(ids[:, :46], meta_every=2, **how)


@pytest.mark.parametrize(
    "changed", [(None,), (WINDOW + 9, SINKS, FULL), (WINDOW, SINKS + 9, FULL), (WINDOW, SINKS, [])]
)
@pytest.mark.parametrize("is_own", [False, True])
def test_a_cache_that_another_window_filled_is_refused(is_own: bool, changed: tuple) -> None:
    model = one_of(is_own)
    _, cache = in_steps(model, IDS, torch.ones_like(IDS), (20, *range(30, 40)))
    set_text_window(model, *changed)
    with pytest.raises(UserError, match="this cache was filled with another text_window, text_sinks or text_full"):
        model(IDS[:, 40:41], past_key_values=cache)


@pytest.mark.parametrize("is_own", [False, True])
def test_blocks_that_a_model_lacks_are_refused(is_own: bool) -> None:
    model = one_of(is_own)
    for layers in ([model.config.num_hidden_layers], [1, 0], [-1]):
        with pytest.raises(UserError, match="text_full_layers is "):
            set_text_window(model, WINDOW, SINKS, layers)
    assert model.config.text_full_layers == FULL


@pytest.mark.parametrize("is_own", [False, True])
def test_a_model_that_forgets_drafts_for_another(is_own: bool) -> None:
    target, draft = (tiny_model(text_full_layers=None) for _ in range(2)) if is_own else map(model_of, ["llama"] * 2)
    set_text_window(target, None)
    set_text_window(draft, 5, 2, FULL)
    draft.generation_config.update(num_assistant_tokens=20, assistant_confidence_threshold=0.0)
    how: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    wanted = target.generate(IDS, **how)
    assert torch.equal(target.generate(IDS, assistant_model=draft, **how), wanted)
    with pytest.raises(UserError, match="assistant_early_exit does not support a text_window"):
        draft.generate(IDS, assistant_early_exit=1, **how)


def test_hidden_states_of_a_long_prompt_are_whole() -> None:
    model, ids = model_of("llama"), torch.tensor(random_rows((600,), meta_rate=0.1, seed=1))
    shown = {"output_hidden_states": True, "return_dict_in_generate": True}
    found = model.generate(ids, max_new_tokens=1, do_sample=False, **shown)
    assert found.hidden_states[0][-1].shape[1] == 600


@pytest.mark.parametrize("full", [None, FULL])
@torch.no_grad()
def test_inputs_by_place_are_inputs_by_name(full: list[int] | None) -> None:
    model = model_of("llama", full)
    mask, first, last = torch.ones_like(IDS), IDS[:, :30], IDS[:, 30:]
    wanted = model.model(IDS).last_hidden_state
    assert torch.equal(model.model(IDS, mask).last_hidden_state, wanted)
    cache = model.model(first, use_cache=True).past_key_values
    assert error(model.model(last, None, None, cache).last_hidden_state, wanted[:, 30:]) < ROUNDED
    by_name = model(IDS, attention_mask=mask, labels=IDS, use_cache=False).loss
    assert torch.equal(model(IDS, mask, None, None, None, IDS, False).loss, by_name)
    with pytest.raises(TypeError, match="multiple values"):
        model(IDS, mask, attention_mask=mask)


@torch.no_grad()
def test_a_mask_of_meta_tokens_decides() -> None:
    model, is_meta = model_of("llama"), IDS == META
    embeddings = model.get_input_embeddings()(IDS).detach() + 1e-6  # not quite the meta-token's
    found = model(inputs_embeds=embeddings, meta_token_mask=is_meta, use_cache=False).logits
    assert error(found, model(IDS, use_cache=False).logits) < 2e-3
    assert error(found, model(inputs_embeds=embeddings, use_cache=False).logits) > 0.1


def test_only_the_function_that_checks_the_base_sets_a_window(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    for given in ({"text_window": 9}, {"text_sinks": 1}, {"text_full_layers": [0]}):
        [name] = given
        with pytest.raises(UserError, match=f"{name} cannot be set in a configuration: set_text_window"):
            AutoModelForCausalLM.from_pretrained(tmp_path, **given)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="text_full_layers cannot be set in a configuration"):
        loaded.config.text_full_layers = [0]
    for wrong in (True, "9", 9.0):
        with pytest.raises(UserError, match="text_window"):
            set_text_window(loaded, wrong)
    assert (loaded.config.text_window, loaded.config.text_full_layers) == (WINDOW, FULL)
    with pytest.raises(UserError, match="full_layers is 1; give the numbers of the blocks"):
        set_text_window(loaded, 9, 1, 1)
    with torch.autocast("cpu", torch.bfloat16):  # the check of the base compares in the base's precision
        set_text_window(loaded, 5, 2, FULL)


@pytest.mark.parametrize("is_own", [False, True])
@torch.no_grad()
def test_positions_have_to_grow(is_own: bool) -> None:
    """By its position a key is before a query: positions that fall would show a query what comes after it."""
    model, ones = one_of(is_own), torch.ones_like(IDS)
    grow = torch.arange(IDS.shape[1])[None]
    wanted = model(IDS, use_cache=False).logits
    assert error(model(IDS, attention_mask=ones, position_ids=grow, use_cache=False).logits, wanted) < ROUNDED
    for positions in (grow % 20, grow // 2, grow.flip(1)):
        with pytest.raises(UserError, match="positions have to grow from each real token to the next"):
            model(IDS, attention_mask=ones, position_ids=positions, use_cache=False)
    cache = model(IDS[:, :20], use_cache=True).past_key_values
    for first in (0, 19):
        with pytest.raises(UserError, match=r"positions have to grow|a meta-token's position is not after"):
            model(IDS[:, 20:], position_ids=grow[:, : IDS.shape[1] - 20] + first, past_key_values=cache)
    with pytest.raises(UserError, match="a column for each cached token"):
        model(IDS[:, 20:30], attention_mask=ones[:, :10], past_key_values=cache)
    after = model(IDS[:, 20:], attention_mask=ones, past_key_values=cache).logits
    assert error(after, wanted[:, 20:]) < ROUNDED


def seen_rows(ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Each row without what the mask hides, (1, tokens)."""
    return [row[is_seen][None] for row, is_seen in zip(ids, mask.bool(), strict=True)]


@pytest.mark.parametrize("name", [None, "gpt2", "gpt_neox", "llama"])  # None: this package's own model
@torch.no_grad()
def test_tokens_that_a_mask_hides_take_no_position(name: str | None) -> None:
    model = one_of(True) if name is None else model_of(name)
    ids = torch.tensor(random_rows((40, 40), meta_rate=0.3, seed=2))
    mask = torch.ones_like(ids)
    mask[0, :6], mask[1, 3:9], mask[:, 12:16], mask[0, 30:34] = 0, 0, 0, 0
    wanted = [model(row, use_cache=False).logits[0] for row in seen_rows(ids, mask)]
    longer = torch.nn.functional.pad(mask, (0, 9), value=1)  # with columns for tokens to come
    pieces, cache = [], DynamicCache()
    for start in range(0, 40, 8):
        out = model(ids[:, start : start + 8], attention_mask=longer, past_key_values=cache, use_cache=True)
        pieces.append(out.logits)
    first = model(ids[:, :20], attention_mask=mask[:, :20], use_cache=True)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, 20:]  # as `generate` gives them
    rest = model(ids[:, 20:], attention_mask=mask, position_ids=positions, past_key_values=first.past_key_values)
    for logits in (
        model(ids, attention_mask=mask, use_cache=False).logits,
        model(ids, attention_mask=longer, use_cache=False).logits,
        torch.cat(pieces, dim=1),
        torch.cat([first.logits, rest.logits], dim=1),
    ):
        for row in range(2):
            assert error(logits[row][mask[row].bool()], wanted[row]) < 1e-4


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("is_own", [False, True])
@torch.no_grad()
def test_positions_are_whole_numbers_of_any_type(is_own: bool, window: int | None) -> None:
    model, positions = one_of(is_own), torch.arange(IDS.shape[1])[None]
    set_text_window(model, window, SINKS)
    wanted = model(IDS, position_ids=positions, use_cache=False).logits
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(model(IDS, position_ids=positions.to(dtype), use_cache=False).logits, wanted)
        cache = model(IDS[:, :20], position_ids=positions[:, :20].to(dtype), use_cache=True).past_key_values
        rest = model(IDS[:, 20:], position_ids=positions[:, 20:].to(dtype), past_key_values=cache).logits
        assert error(rest, wanted[:, 20:]) < 1e-5
    if window is None:
        assert error(model(IDS, position_ids=positions.double(), use_cache=False).logits, wanted) < 1e-5
    else:
        with pytest.raises(UserError, match=r"positions are whole numbers; these are of the type torch\.float64"):
            model(IDS, position_ids=positions.double(), use_cache=False)


@pytest.mark.parametrize("is_own", [False, True])
@torch.no_grad()
def test_a_mask_cannot_hide_tokens_that_a_cache_read_as_text(is_own: bool) -> None:
    """As in a batched chat, where a row ended early: `generate` read its padding as text."""
    model = one_of(is_own)
    ids = IDS[:, :30].repeat(2, 1)
    cache = model(ids, use_cache=True).past_key_values
    later = torch.ones(2, 33, dtype=torch.long)
    later[0, 26:30] = 0
    with pytest.raises(UserError, match="a cache the mask that it was filled with"):
        model(ids[:, :3], attention_mask=later, past_key_values=cache)


@pytest.mark.parametrize("is_own", [False, True])
def test_other_caches_are_refused(is_own: bool) -> None:
    model, cache = one_of(is_own), DynamicCache()
    cache.offloading = True
    with pytest.raises(UserError, match="neither quantized nor offloaded"):
        model(IDS, past_key_values=cache)
    if not is_own:  # its own generation refuses them by name
        with pytest.raises(UserError, match="neither quantized nor offloaded"):
            model.generate(IDS, max_new_tokens=3, cache_implementation="offloaded")


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no fp8 cache")
def test_a_quantized_cache_is_refused() -> None:
    how: dict[str, Any] = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    with pytest.raises(UserError, match="neither quantized nor offloaded"):
        one_of(False).generate(IDS, max_new_tokens=3, **how)


class Written(BaseStreamer):
    """Keeps the ids that it is given."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, value: Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ids.append(-1)


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("is_own", [False, True])
def test_a_streamer_gets_what_generation_returns(is_own: bool, chunk: int | None) -> None:
    streamer = Written()
    options = {"max_new_tokens": 9, "prefill_chunk_size": chunk, "do_sample": False}
    returned = one_of(is_own).generate(IDS, streamer=streamer, **options)
    assert streamer.ids == [*returned[0].tolist(), -1]


@pytest.mark.parametrize("is_own", [False, True])
@torch.no_grad()
def test_attention_weights_are_those_of_the_tokens_or_refused(is_own: bool) -> None:
    model = one_of(is_own)
    model.set_attn_implementation("eager")
    whole = model(IDS, use_cache=False, output_attentions=True).attentions
    _, cache = in_steps(model, IDS, torch.ones_like(IDS), (20, *range(30, 40)))
    with pytest.raises(UserError, match="this cache drops text, and attention weights with it"):
        model(IDS[:, 40:41], past_key_values=cache, output_attentions=True)
    with pytest.raises(UserError, match="this cache drops text, and attention weights with it"):
        model.generate(IDS[:, :40], max_new_tokens=3, output_attentions=True, return_dict_in_generate=True)
    first = model(IDS[:, :8], use_cache=True, output_attentions=True)
    assert error(first.attentions[0], whole[0][:, :, :8, :8]) < ROUNDED_WEIGHT


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_step_refuses_a_cache_that_is_too_small() -> None:
    model = model_of("llama", None)
    set_text_window(model, 5, 2)
    ids = torch.tensor(random_rows((60,), meta_rate=0.5, seed=3))

    def fill(step: Any) -> None:
        cache = StaticCache(model.config, max_cache_len=24)
        for place in range(60):
            step(ids[:, place : place + 1], past_key_values=cache)

    for step, kind in ((model, UserError), (torch.compile(model, backend="eager"), RuntimeError)):
        with pytest.raises(kind, match="a cache of 24 tokens is too small for the text_window"):
            fill(step)
