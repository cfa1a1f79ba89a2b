"""Key-value heads that see all text, in blocks whose other heads forget it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from metatokens import load_meta, save_meta, set_text_window
from metatokens.decoder import measure_cache_share
from metatokens.errors import UserError
from metatokens.model.chunked_attention import CHUNK
from metatokens.model.forgetting_cache import LayerOfHeads
from metatokens.retrofit.text_window import text_window_of
from tests.checkpointing import checkpoint_activations
from tests.gradients import Gradients, gradients_by
from tests.model.agreement import assert_gradients_close
from tests.model.in_pieces import in_steps, sizes_of
from tests.model.text_window import ROWS, SINKS, WINDOW, seen
from tests.model.tiny_models import META, pad, random_rows, tiny_model
from tests.retrofit.architectures import ROUNDED, ROUNDED_GRADIENT, base, error
from tests.retrofit.forgetful import (
    assert_differ_by_rounding,
    block_masks,
    forgetful_retrofit,
    generate_texts,
)
from tests.retrofit.full_heads import (
    HEADS,
    expected_logits,
    masks_of_heads,
    shared,
    with_full_heads,
)

ARCHITECTURES = (
    "cohere", "gemma", "glm4", "gpt2", "gpt_neox", "granite", "llama", "mixtral", "olmo2", "opt", "phi", "qwen3",
    "smollm3", "stablelm",
)  # fmt: skip
IDS, MASK = pad(ROWS)


@pytest.mark.quick(name=["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_pass_and_steps_are_the_masked_recomputation(name: str, dtype: torch.dtype) -> None:
    model = shared(name, dtype)
    expected = torch.cat([expected_logits(name, row, dtype) for row in ROWS])[:, :META]

    with torch.no_grad():
        whole = model(IDS, attention_mask=MASK, use_cache=False).logits
    pieces, _ = in_steps(model, IDS, MASK, (20, 25, *range(36, 44)))

    for logits in (whole, pieces):
        assert_differ_by_rounding(logits[MASK.bool()][:, :META], expected)


def test_full_heads_alone_hold_all_text() -> None:
    _, held = in_steps(shared("llama"), IDS, MASK, (20, 25, *range(36, 44)))

    assert held.get_seq_length() == 44
    sizes = sizes_of(held)[:3]
    assert len({*sizes}) == 1
    assert sizes[0] < 40
    assert [layer.keys.shape[1] for layer in held.layers[:3]] == [1, 2, 1]
    of_everything = [layer for layer in held.layers[3:] if layer.keys.shape[2] == 44]
    # The first is the notes on what the others hold.
    assert [layer.keys.shape[1:] for layer in of_everything[1:]] == 2 * [(1, 44, 16)]


def test_a_training_step_is_that_under_masks() -> None:
    row = random_rows([2 * CHUNK + 9], seed=1, meta_rate=0.1)[0]
    ids = torch.tensor([row])
    model, remembering = with_full_heads("llama"), forgetful_retrofit("llama", None)

    with block_masks(remembering, masks_of_heads(remembering, row)) as inputs:
        loss = remembering(ids, labels=ids, **inputs).loss
        expected = gradients_by(remembering, loss)

    def gradients() -> Gradients:
        return gradients_by(model, model(ids, labels=ids, use_cache=False).loss)

    assert_gradients_close(gradients(), expected, ROUNDED_GRADIENT)
    checkpoint_activations(model)
    assert_gradients_close(gradients(), expected, ROUNDED_GRADIENT)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 7}], ids=str)
def test_generation_with_a_cache_is_generation_without(options: dict[str, Any]) -> None:
    model, prompts = shared("llama"), [row[:30] for row in ROWS[:2]]
    without = generate_texts(
        model, prompts, max_new_tokens=20, use_cache=False, **options | {"prefill_chunk_size": None}
    )
    assert generate_texts(model, prompts, max_new_tokens=20, **options) == without


@torch.no_grad()
def test_rows_of_a_cache_are_repeated_selected_and_put_in_order() -> None:
    model = shared("llama")
    ids = torch.tensor(random_rows([40, 40], seed=4, meta_rate=0.2))
    order = torch.tensor([1, 0])
    _, held = in_steps(model, ids[:, :36], None, (20, *range(30, 36)))

    held.batch_repeat_interleave(2)
    held.reorder_cache(torch.tensor([2, 0, 1, 3]))
    held.batch_select_indices(torch.tensor([0, 1]))

    logits = model(ids[order, 36:], past_key_values=held).logits
    expected = model(ids[order], use_cache=False).logits[:, 36:]
    assert error(logits, expected) < ROUNDED


# PEFT's.
@pytest.mark.filterwarnings("ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning")
@torch.no_grad()
def test_the_heads_are_saved_with_the_model_and_with_what_was_added(tmp_path: Path) -> None:
    model = with_full_heads("llama")
    expected = model(IDS, attention_mask=MASK).logits
    model.save_pretrained(tmp_path / "whole")
    save_meta(model, tmp_path / "delta")

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    put_together = load_meta(base("llama"), tmp_path / "delta")
    for loaded in (whole, put_together):
        assert loaded.config.text_full_heads == [[0, 1], [2, 0]]
        assert torch.equal(loaded(IDS, attention_mask=MASK).logits, expected)
    # Its adapters add nothing yet.
    tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert torch.equal(tuned(IDS, attention_mask=MASK).logits, expected)


@torch.no_grad()
def test_a_window_that_was_taken_away_can_be_put_back() -> None:
    model = with_full_heads("llama")
    before = text_window_of(model.config)

    taken_away = set_text_window(model, None)
    assert taken_away == before | {"full_layers": []}
    assert text_window_of(model.config)["full_heads"] is None
    set_text_window(model, **taken_away)

    assert text_window_of(model.config) == before
    assert before["full_heads"]

    set_text_window(model, WINDOW, full_heads=[])
    without = set_text_window(model, WINDOW, full_heads=[(0, 0)])
    set_text_window(model, **without)

    assert text_window_of(model.config)["full_heads"] is None


def test_heads_are_changed_and_all_heads_of_a_block_are_a_full_block() -> None:
    model = with_full_heads("llama")
    set_text_window(model, WINDOW, SINKS, full_heads=[(0, 0), (1, 0), (1, 1)])
    assert model.config.text_full_heads == [[0, 0]]
    assert model.config.text_full_layers == [1]
    heads_and_block = model(IDS, attention_mask=MASK).logits

    set_text_window(model, WINDOW, SINKS, [1], [])
    block = model(IDS, attention_mask=MASK).logits
    expected = forgetful_retrofit("llama", [1])(IDS, attention_mask=MASK).logits
    assert error(block, expected) < ROUNDED
    assert error(heads_and_block, expected) > 0.01

    set_text_window(model, None)
    assert model.config._attn_implementation == "sdpa"
    assert model.config.text_full_heads is None
    assert model.config.text_full_layers is None


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([(3, 0)], "text_full_heads is .*0 to 2"),
        ([(1, 0), (1, 0)], "give different pairs"),
        ([(1, -1)], "text_full_heads is "),
        ([(1,)], "text_full_heads is "),
        ([(1, 2)], "head 2 of block 1, which has 2 key-value heads"),
        ([("1", 0.5)], "text_full_heads"),
    ],
    ids=str,
)
def test_heads_that_are_not_there_are_refused(heads: Any, message: str) -> None:
    model = with_full_heads("llama")
    with pytest.raises(UserError, match=message):
        set_text_window(model, 9, full_heads=heads)
    assert (model.config.text_window, model.config.text_full_heads) == (WINDOW, [[0, 1], [2, 0]])


def test_a_base_without_sdpa_is_refused() -> None:
    model = forgetful_retrofit("xglm", ())
    with pytest.raises(UserError, match=r"full heads need attn_implementation 'sdpa'"):
        set_text_window(model, WINDOW, SINKS, full_heads=[(0, 0)])
    assert model.config.text_full_heads is None


def test_a_model_of_this_package_has_no_full_heads() -> None:
    model = tiny_model()
    with pytest.raises(UserError, match="give full_layers to this one"):
        set_text_window(model, 5, full_heads=[(0, 0)])


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_compiled_model_reads_with_a_cache(name: str) -> None:
    model = with_full_heads(name)
    expected, _ = in_steps(model, IDS, MASK, (40, 42))
    compiled = torch.compile(model, backend="eager")

    logits, _ = in_steps(compiled, IDS, MASK, (40, 42))

    assert error(logits[MASK.bool()], expected[MASK.bool()]) < ROUNDED


@torch.no_grad()
def test_other_heads_take_the_place_of_a_block_that_heads_filled() -> None:
    model = forgetful_retrofit("llama", ())
    set_text_window(model, WINDOW, SINKS, full_heads=[(0, 0), (0, 1)])
    assert model.config.text_full_layers == [0]
    set_text_window(model, WINDOW, SINKS, full_heads=[(1, 0)])
    assert (model.config.text_full_layers, model.config.text_full_heads) == (None, [[1, 0]])


@torch.no_grad()
def test_a_cache_stays_as_it_was_where_the_attention_function_is_refused() -> None:
    model, row = with_full_heads("llama"), IDS[:1]
    expected = model(row, use_cache=False).logits[:, 40:]
    held = model(row[:, :40], use_cache=True).past_key_values
    model.set_attn_implementation("eager")
    with pytest.raises(UserError, match="this model has 'eager'"):
        model(row[:, 40:], past_key_values=held)
    model.set_attn_implementation("sdpa")
    assert error(model(row[:, 40:], past_key_values=held).logits, expected) < ROUNDED


def test_a_base_that_mixes_its_heads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = forgetful_retrofit("llama", ())
    update = LayerOfHeads.update

    def mixed(layer: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = update(layer, *args, **kwargs)
        return keys, values._replace(full=values.full.flip(2))

    monkeypatch.setattr(LayerOfHeads, "update", mixed)
    with pytest.raises(UserError, match=r"cannot be told apart.*changes what it predicts"):
        set_text_window(model, WINDOW, SINKS, full_heads=HEADS)
    assert model.config.text_full_heads is None
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("heads", [[[0, 7]], [[0, 0], [0, 1]]], ids=str)
def test_a_configuration_with_heads_that_are_not_there_is_refused(
    heads: list[list[int]], tmp_path: Path
) -> None:
    with_full_heads("llama").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["meta_attention"]["text_full_heads"] = heads
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="text_full_heads does not fit a block with 2 key-value"):
        model(IDS)


def test_a_cache_of_other_heads_is_refused() -> None:
    model = with_full_heads("llama")
    held = model(IDS, use_cache=True).past_key_values
    set_text_window(model, WINDOW, SINKS, full_heads=[(0, 0)])
    with pytest.raises(UserError, match="other full blocks or heads, than the model has now"):
        model(IDS[:, :1], past_key_values=held)


def test_the_share_is_counted_head_by_head() -> None:
    model = shared("llama")
    entries_held, all_entries = 0, 0
    for row in ROWS:
        near = seen(row)[-1].tolist()
        for block in range(3):
            for head in range(2):
                entries_held += len(row) if (block, head) in HEADS else sum(near)
                all_entries += len(row)
    assert measure_cache_share(model, ROWS)["kv_kept"] == round(entries_held / all_entries, 4)
