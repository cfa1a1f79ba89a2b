"""Retrofitted models in the programs that people use: Trainer, PEFT, accelerate, threads, torch.compile."""

import json
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

from metatokens import add_meta_attention, freeze_base, save_meta
from metatokens.errors import UserError
from tests.checkpointing import checkpoint_activations
from tests.model.tiny_models import tiny_model
from tests.numbers import decoder_roundings, rounding_bound
from tests.retrofit.architectures import (
    LENGTH,
    META,
    ROUNDED,
    ROWS,
    base,
    error,
    fit,
    logits,
    retrofitted,
    text,
    train_like,
    with_meta_tokens,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument"),  # Trainer's default, where there is no GPU
    pytest.mark.filterwarnings("ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning"),  # PEFT's own
]
ITEMS = [
    {"input_ids": ids, "attention_mask": torch.ones(LENGTH, dtype=torch.long), "labels": ids}
    for seed in range(8)
    for ids in with_meta_tokens(seed)
]
LORA = peft.LoraConfig(
    task_type="CAUSAL_LM",
    r=4,
    target_modules="all-linear",
    exclude_modules=r".*meta_attention.*",
    modules_to_save=["meta_attention", "meta_token"],
)


OWN_AND_RETROFITTED = pytest.mark.parametrize("is_own", [True, False], ids=["own", "retrofitted"])


def own_or_retrofitted(is_own: bool) -> tuple[PreTrainedModel, Tensor]:
    """A model and ids of 2 rows with meta-tokens."""
    if not is_own:
        return retrofitted("llama"), with_meta_tokens()
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    ids[0, 3], ids[1, ::4] = 63, 63
    return tiny_model(), ids


@OWN_AND_RETROFITTED
def test_a_mask_of_meta_tokens_of_another_shape_is_refused(is_own: bool) -> None:
    model, ids = own_or_retrofitted(is_own)
    mask = ids == model.config.meta_token_id
    for wrong in (mask[:, :-2], mask[0], mask[:1]):
        with pytest.raises(UserError, match=r"meta_token_mask has the shape .*, and the input"):
            model(ids, meta_token_mask=wrong)
    assert torch.equal(model(ids, meta_token_mask=mask).logits, model(ids).logits)


@OWN_AND_RETROFITTED
def test_meta_tokens_are_not_looked_for_in_noisy_embeddings(is_own: bool) -> None:
    model, ids = own_or_retrofitted(is_own)
    table = model.get_input_embeddings()
    embeddings = table(ids)
    table.neftune_noise_alpha = 5.0  # as the Trainer sets it
    model.train()
    with pytest.raises(UserError, match="NEFTune changes the embeddings"):
        model(inputs_embeds=embeddings)
    model(inputs_embeds=embeddings, meta_token_mask=ids == model.config.meta_token_id)
    model.eval()
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(ids).logits)


@OWN_AND_RETROFITTED
def test_ids_of_rows_that_pad_the_table_are_not_trained(is_own: bool) -> None:
    """As after `tokenizer.add_tokens` and run_clm.py's lines, which resize a table only if it is too small."""
    own = {"vocab_size": 128, "unpadded_vocab_size": 64}
    full = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({str(word): word for word in range(ROWS)})))
    model = tiny_model(**own) if is_own else add_meta_attention(base("llama"), full)
    added = model.config.unpadded_vocab_size
    ids = torch.tensor([[3, model.config.meta_token_id, added, 5]])
    assert added < len(model.get_input_embeddings().weight)
    model(ids)  # as transformers computes it
    model.train()
    for _ in range(2):  # a cell of a notebook is run again
        with pytest.raises(UserError, match=r"has the id \d+, and the model uses \d+ entries of its table"):
            model(ids, labels=ids)
    model.resize_token_embeddings(added + 1, pad_to_multiple_of=64)
    model(ids, labels=ids).loss.backward()


@torch.no_grad()
def test_copied_blocks_are_refused() -> None:
    """Two of them would share a store of the cache."""
    replicate = peft.LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (1, 3)])
    model = peft.get_peft_model(retrofitted("llama"), replicate)
    with pytest.raises(UserError, match="as with PEFT's layer_replication"):
        model(with_meta_tokens())


@OWN_AND_RETROFITTED
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace:DeprecationWarning")
def test_a_trace_is_refused(is_own: bool) -> None:
    model, ids = own_or_retrofitted(is_own)
    for example in (ids, ids.clamp(max=59)):  # with meta-tokens, and without
        with pytest.raises(UserError, match=r"use torch\.export"):
            torch.jit.trace(model, (example,), strict=False)


AFTER_A_PICKLE = """
import pickle, sys, torch
ids = torch.tensor([[int(one)] for one in sys.argv[1:]])
with torch.inference_mode(), open("pairs", "rb") as file:
    pairs = pickle.load(file)
    torch.save([model(ids, past_key_values=cache).logits for model, cache in pairs], "logits.pt")
print([(type(model).__name__, type(model.config).__mro__[1].__name__) for model, _ in pairs])
"""
IN_TWO_PROCESSES = """
import torch
from datasets import Dataset
from tests.retrofit.architectures import retrofitted, with_meta_tokens
model, ids = retrofitted("llama"), with_meta_tokens()
def likeliest(row):
    with torch.inference_mode():
        return {"next": model(torch.tensor([row["ids"]])).logits[0].argmax(dim=-1).tolist()}
made = Dataset.from_dict({"ids": ids.tolist()}).map(likeliest, num_proc=2)
print(made["next"][:] == [likeliest({"ids": row})["next"] for row in ids.tolist()])
"""


def printed(program: str, *args: str, folder: Path) -> str:
    """What a program in a new Python process prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()


@pytest.mark.quick(library=["pickle"])
@pytest.mark.parametrize("library", ["pickle", "dill", "cloudpickle"])
def test_a_pickle_is_read_by_another_process(library: str, tmp_path: Path) -> None:
    pickler = pytest.importorskip(library, reason=f"{library} is not installed")
    models, ids = [retrofitted(name) for name in ("llama", "gpt2", "qwen3_next")], with_meta_tokens()
    with torch.inference_mode():
        pairs = [(model, model(ids, use_cache=True).past_key_values) for model in models]
        (tmp_path / "pairs").write_bytes(pickler.dumps(pairs))
        following = [model(ids[:, :1], past_key_values=cache).logits for model, cache in pairs]
    firsts = [str(one) for one in ids[:, 0].tolist()]
    names = printed(AFTER_A_PICKLE, *firsts, folder=tmp_path)
    assert names == str([(type(model).__name__, "MetaConfig") for model in models])
    for ours, theirs in zip(following, torch.load(tmp_path / "logits.pt"), strict=True):
        assert error(ours, theirs) < ROUNDED  # not bit for bit: some processors round by the place in memory


@pytest.mark.slow
def test_datasets_runs_a_retrofitted_model_in_two_processes(tmp_path: Path) -> None:
    assert printed(IN_TWO_PROCESSES, folder=tmp_path) == "True"


def is_new(name: str) -> bool:
    return "meta_attention" in name or "meta_token" in name


def train(model: PreTrainedModel, out: Path, steps: int, **options: Any) -> Trainer:
    quiet = {"report_to": [], "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    usual = {"learning_rate": 5e-3, "per_device_train_batch_size": 4, "seed": 0}
    return Trainer(model, TrainingArguments(out, max_steps=steps, **quiet | usual | options), train_dataset=ITEMS)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3_text"])
def test_trainer_changes_the_new_weights_alone_and_resumes(name: str, tmp_path: Path) -> None:
    def fresh() -> PreTrainedModel:
        return add_meta_attention(base(name), meta_token_id=META, heads=2, head_size=16)

    model = fresh()
    before = {key: weight.clone() for key, weight in model.named_parameters()}
    whole = train(model, tmp_path, 8, save_strategy="steps", save_steps=4)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    changed = {key for key, weight in model.named_parameters() if not torch.equal(weight, before[key])}
    assert changed == {key for key in before if is_new(key)}
    assert error(logits(model, text()), logits(base(name), text())) == 0.0
    again = fresh()
    train(again, tmp_path, 8, save_strategy="steps", save_steps=4).train(str(tmp_path / "checkpoint-4"))
    for key, weight in again.named_parameters():
        assert torch.equal(weight, model.state_dict()[key]), key


# In half precision, a step of 1e-5 would not change a weight of 1, the initial weight of norms.
@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["as it is", "under autocast"])
def test_trainer_moves_what_was_added_to_a_base_in_half_precision(options: dict[str, Any], tmp_path: Path) -> None:
    base("llama").to(torch.bfloat16).save_pretrained(tmp_path)

    def from_disk() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(tmp_path)

    model = train_like(add_meta_attention(from_disk(), meta_token_id=META, heads=2, head_size=16))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    train(model, tmp_path / "out", 2, learning_rate=1e-5, lr_scheduler_type="constant", **options).train()
    for name, weight in model.named_parameters():
        moved = (weight.detach() - before[name]).abs()
        if is_new(name):
            assert (moved > 1e-6).float().mean() > 0.9, name
        else:
            assert moved.max() == 0.0, name
    assert torch.equal(logits(model.eval(), text()), logits(from_disk(), text()))
    assert model.generate(text(), max_new_tokens=9, meta_every=3).shape == (len(text()), LENGTH + 9)


def test_meta_tokens_are_no_labels() -> None:
    model, ids = retrofitted("llama"), with_meta_tokens()
    text_alone = ids.masked_fill(ids == META, -100)
    assert torch.equal(model(ids, labels=ids).loss, model(ids, labels=text_alone).loss)
    count = (text_alone[:, 1:] != -100).sum()
    given = {"num_items_in_batch": (ids[:, 1:] != -100).sum()}
    torch.testing.assert_close(model(ids, labels=ids, **given).loss, model(ids, labels=text_alone).loss)
    expected = model(ids, labels=text_alone, num_items_in_batch=count).loss
    torch.testing.assert_close(model(ids, labels=ids, **given).loss, expected)


def test_text_that_is_read_behind_checkpointed_gradients() -> None:
    model = retrofitted("llama", freeze=True).train()
    checkpoint_activations(model, use_reentrant=False)
    ids = with_meta_tokens()
    model(ids, labels=ids).loss.backward()
    short = text()[:, :5]
    assert error(logits(model.eval(), short), logits(base("llama"), short)) == 0.0


@pytest.mark.parametrize(
    "choices", [{"target_modules": ["embed_tokens"]}, {"target_modules": ["q_proj"], "trainable_token_indices": [5]}]
)
def test_adapters_of_the_embeddings_are_refused(choices: dict[str, Any]) -> None:
    """They bypass the meta-token's row, which is not in the table. Training the whole table is possible."""
    ids = with_meta_tokens()
    with pytest.raises(UserError, match="around the embeddings bypasses the meta-token's; train them by modules_to"):
        peft.get_peft_model(retrofitted("llama"), peft.LoraConfig(r=4, **choices))(input_ids=ids)
    whole = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["meta_attention", "embed_tokens"])
    model = peft.get_peft_model(retrofitted("llama"), whole)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modules_to_save.default.meta_token" in name:
                weight.normal_()
        got = model.eval()(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False).logits[..., :META]
    assert error(got, logits(model, ids)) == 0.0
    assert error(got, logits(retrofitted("llama"), ids)) > 0.01
    assert error(logits(model.merge_and_unload(), ids), got) < ROUNDED


@pytest.mark.parametrize(
    ("parts", "further"),
    [
        (["meta_token", "embed_tokens"], {}),
        (["meta_attention", "meta_token", "lm_head"], {"ensure_weight_tying": True}),
    ],
)
def test_an_adapter_that_names_the_meta_token_and_its_table(
    parts: list[str], further: dict[str, Any], tmp_path: Path
) -> None:
    """The meta-token is trained and saved with the table, also by adapters saved before this was so."""

    def fresh() -> PreTrainedModel:
        return retrofitted("llama", tie_word_embeddings=bool(further))

    ids, start = with_meta_tokens(), fresh().get_input_embeddings().meta_token.weight.detach()
    lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=parts, **further)
    adapted = peft.get_peft_model(fresh(), lora)
    fit(adapted, ids, steps=2, rate=0.01)
    assert error(adapted.get_input_embeddings().meta_token.weight.detach(), start) > 1e-3
    expected = logits(adapted.eval(), ids)
    adapted.save_pretrained(tmp_path)
    saved = tmp_path / "adapter_config.json"
    settings = json.loads(saved.read_text(encoding="utf-8"))
    assert "meta_token" not in settings["modules_to_save"]
    for names in (settings["modules_to_save"], [*settings["modules_to_save"], "meta_token"]):
        saved.write_text(json.dumps(settings | {"modules_to_save": names}), encoding="utf-8")
        assert torch.equal(logits(peft.PeftModel.from_pretrained(fresh(), tmp_path).eval(), ids), expected)
    other = fresh()
    other.load_adapter(tmp_path)
    assert torch.equal(logits(other.eval(), ids), expected)
    assert error(logits(adapted.merge_and_unload(), ids), expected) < 1e-5


@pytest.mark.parametrize(
    ("first", "second"), [(["embed_tokens"], ["meta_token"]), ([], ["meta_token", "embed_tokens"])]
)
def test_adapters_that_differ_in_the_table_and_its_meta_token_are_refused(first: list[str], second: list[str]) -> None:
    lora = {"target_modules": ["q_proj"]}
    adapted = peft.get_peft_model(retrofitted("llama"), peft.LoraConfig(**lora, modules_to_save=first))
    adapted.add_adapter("other", peft.LoraConfig(**lora, modules_to_save=second))
    adapted.set_adapter("other")
    with pytest.raises(UserError, match="name the table alone, in each of them"):
        adapted(with_meta_tokens())


def test_adapters_are_not_left_out_of_what_was_added(tmp_path: Path) -> None:
    model = retrofitted("llama")
    adapted = peft.get_peft_model(model, deepcopy(LORA))
    with pytest.raises(UserError, match=r"save what their merge_and_unload\(\) returns"):
        save_meta(model, tmp_path)
    with pytest.raises(UserError, match="adapters are in this model"):
        save_meta(adapted, tmp_path)
    other = retrofitted("llama")
    peft.get_peft_model(other, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(UserError, match="adapters are in this model"):
        save_meta(other, tmp_path)
    ids = with_meta_tokens()
    expected = logits(adapted.eval(), ids)
    adapted.merge_and_unload().save_pretrained(tmp_path / "whole")
    assert error(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval(), ids), expected) < ROUNDED


def packed(name: str) -> dict[str, Tensor]:
    """Two sequences in one row, separated by a mask of four dimensions, and by positions."""
    alone = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    positions = torch.arange(LENGTH).repeat(2)[None]
    return {
        "input_ids": with_meta_tokens().view(1, -1),
        "attention_mask": torch.block_diag(alone, alone).bool()[None, None],
    } | ({} if name == "bloom" else {"position_ids": positions})


@torch.no_grad()
@pytest.mark.parametrize("is_added", [False, True], ids=["bool", "added to the logits"])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi"])
def test_sequences_packed_by_a_mask_are_apart(name: str, is_added: bool) -> None:
    model, batch = retrofitted(name), packed(name)
    if is_added:
        low = torch.finfo(torch.float32).min
        batch["attention_mask"] = torch.zeros(batch["attention_mask"].shape).masked_fill(~batch["attention_mask"], low)
    got = model(**batch, use_cache=False).logits[..., :META].view(2, LENGTH, -1)
    assert error(got, logits(model, with_meta_tokens())) < ROUNDED


@torch.no_grad()
@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_sequences_packed_beside_a_window_that_slides_are_refused(name: str) -> None:
    batch, model = packed(name), retrofitted(name)
    for positions in (batch["position_ids"], torch.arange(2 * LENGTH)[None]):
        with pytest.raises(UserError, match="does not define which meta-tokens see one another; give a dictionary"):
            model(**batch | {"position_ids": positions}, use_cache=False)
    if name == "gemma3_text":  # takes a mask for each kind of layer
        full = batch["attention_mask"]
        mask = {"full_attention": full, "sliding_attention": full.triu(1 - model.config.sliding_window)}
        got = model(**batch | {"attention_mask": mask}, use_cache=False).logits[..., :META].view(2, LENGTH, -1)
        assert error(got, logits(model, with_meta_tokens())) < ROUNDED


@torch.no_grad()
def test_embeddings_in_half_precision_under_autocast() -> None:
    model, ids = retrofitted("llama"), with_meta_tokens()
    embeddings = model.get_input_embeddings()(ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(inputs_embeds=embeddings.bfloat16().float(), use_cache=False).logits[..., :META]
        got = model(inputs_embeds=embeddings.bfloat16(), use_cache=False).logits[..., :META]
    expected, roundings = logits(model, ids), decoder_roundings(torch.bfloat16, blocks=3, width=64, length=LENGTH)
    bound = rounding_bound(torch.bfloat16, roundings, float(expected.std()))
    assert error(got, expected) < bound < error(rounded, expected)  # in float32 none is exactly the meta-token's


@torch.no_grad()
def test_a_padded_meta_token_sees_nothing_and_nothing_sees_it() -> None:
    """Whether the mask has two dimensions or four."""
    model, ids = retrofitted("llama"), with_meta_tokens()
    padded = torch.cat([torch.full((2, 5), META), ids], dim=1)
    seen = torch.ones(LENGTH + 5, LENGTH + 5, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    seen[..., :5] = False
    positions = (torch.arange(LENGTH + 5) - 5).clamp(min=0).expand(2, -1)
    mask = (torch.arange(LENGTH + 5) >= 5).long().expand(2, -1)
    for given in ({"attention_mask": seen, "position_ids": positions}, {"attention_mask": mask}):
        assert error(logits(model, padded, **given)[:, 5:], logits(model, ids)) < ROUNDED


@pytest.mark.parametrize("name", ["llama", "bloom", "gemma3_text"])
def test_embeddings_in_place_of_ids(name: str) -> None:
    model, ids = retrofitted(name), with_meta_tokens()
    embeddings = model.get_input_embeddings()(ids)
    with torch.no_grad():
        got = model(inputs_embeds=embeddings, use_cache=False).logits[..., :META]
    assert error(got, logits(model, ids)) == 0.0
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(inputs_embeds=embeddings, **options), model.generate(ids, **options)[:, LENGTH:])


@pytest.mark.filterwarnings("ignore:.*on a device type different")  # transformers' own, before 5.23, of any such model
@pytest.mark.parametrize("late", [False, True], ids=["offloaded behind", "offloaded before"])
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_weights_that_accelerate_keeps_elsewhere(name: str, late: bool) -> None:
    expected = logits(retrofitted(name), with_meta_tokens())
    if late:
        model = base(name)
        cpu_offload(model, torch.device("cpu"))
        model = train_like(add_meta_attention(model, meta_token_id=META, heads=2, head_size=16))
    else:
        model = retrofitted(name)
        cpu_offload(model, torch.device("cpu"))
    assert any(hasattr(module, "_hf_hook") for module in model.modules())
    assert error(logits(model, with_meta_tokens()), expected) == 0.0
    options = {"max_new_tokens": 5, "meta_every": 2, "do_sample": False}
    got = model.generate(with_meta_tokens(), **options)
    assert torch.equal(got, retrofitted(name).generate(with_meta_tokens(), **options))
    labels = with_meta_tokens()
    loss = model(labels, labels=labels).loss
    assert loss.item() == retrofitted(name)(labels, labels=labels).loss.item()  # meta-tokens among labels are ignored


def test_a_device_map_with_weights_on_disk(tmp_path: Path) -> None:
    model = retrofitted("llama")
    model.save_pretrained(tmp_path / "model")
    places: dict[str, Any] = dict.fromkeys(("model.norm", "model.rotary_emb", "lm_head", "model.layers.0"), "cpu")
    places |= dict.fromkeys(("model.embed_tokens", "model.layers.1", "model.layers.2"), "disk")
    folders = {"pretrained_model_name_or_path": tmp_path / "model", "offload_folder": tmp_path / "disk"}
    again = AutoModelForCausalLM.from_pretrained(**folders, device_map=places)
    assert error(logits(again, with_meta_tokens()), logits(model, with_meta_tokens())) == 0.0
    with torch.no_grad():
        got = again(inputs_embeds=again.get_input_embeddings()(with_meta_tokens()), use_cache=False).logits[..., :META]
    assert error(got, logits(model, with_meta_tokens())) == 0.0
    dispatch_model(retrofitted("llama"), {"": "cpu"})


@pytest.mark.quick(name=["llama"])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "bloom"])
def test_several_threads_run_one_model(name: str) -> None:
    model = retrofitted(name)
    batches = [with_meta_tokens(seed) if seed % 3 else text(seed) for seed in range(10)]
    expected = [logits(model, ids) for ids in batches]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda number: logits(model, batches[number % 10]), range(100)))
    assert sum(error(one, expected[number % 10]) > 1e-5 for number, one in enumerate(got)) == 0


@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own
def test_a_base_in_eight_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    base("llama").save_pretrained(tmp_path / "base")

    def load(folder: Path) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))

    plain, ids = load(tmp_path / "base"), with_meta_tokens()
    model = train_like(add_meta_attention(load(tmp_path / "base"), meta_token_id=META, heads=2, head_size=16))
    assert error(logits(model, text()), logits(plain, text())) == 0.0
    fit(model, ids, steps=4, rate=0.01)
    model.save_pretrained(tmp_path / "whole")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert error(logits(again, ids), logits(model, ids)) == 0.0
    # A model that was saved whole unquantised: what was added is not quantised when it is loaded.
    retrofitted("llama").save_pretrained(tmp_path / "wide")
    wide = load(tmp_path / "wide")
    save_meta(wide, tmp_path / "added")
    for name, weight in load_file(tmp_path / "added" / "meta_tokens.safetensors").items():
        assert torch.equal(weight, retrofitted("llama").get_parameter(name)), name
    freeze_base(wide, trained=True)  # except quantised weights
    assert error(logits(wide.eval(), ids), logits(retrofitted("llama"), ids)) < 0.5
    lora = peft.get_peft_model(model, deepcopy(LORA))  # without adapters, Trainer refuses quantised models
    train(lora, tmp_path / "run", 2).train()


@pytest.mark.parametrize("further", [{}, {"ensure_weight_tying": True}], ids=str)
def test_a_tied_head_that_peft_replaces_leaves_out_what_it_did(further: dict[str, Any]) -> None:
    model = retrofitted("llama", tie_word_embeddings=True)
    linear = {"target_modules": "all-linear", "exclude_modules": r".*meta_attention.*"}
    settings = peft.LoraConfig(**linear, modules_to_save=["meta_attention", "embed_tokens"], **further)
    adapted = peft.get_peft_model(model, settings)
    assert (adapted(with_meta_tokens()).logits[..., META:] == -1e4).all()
    assert (adapted.merge_and_unload()(with_meta_tokens()).logits[..., META:] == -1e4).all()


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_training_that_leaves_out_what_was_added_says_so(tmp_path: Path) -> None:
    def fresh() -> PreTrainedModel:
        return add_meta_attention(base("llama"), meta_token_id=META, heads=2, head_size=16)

    adapted = peft.get_peft_model(fresh(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.warns(UserWarning, match="nothing of what add_meta_attention added is trained") as caught:
        train(adapted, tmp_path, 3).train()
    assert [str(one.message) for one in caught if "meta" in str(one.message)] == [str(caught[0].message)]
    plain = [{"input_ids": one, "labels": one} for one in text()] * 4
    trainer = train(fresh(), tmp_path, 3)
    trainer.train_dataset = plain
    with pytest.warns(UserWarning, match="no meta-token is in this batch"):
        trainer.train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(fresh(), tmp_path, 2).train()
        train(peft.get_peft_model(fresh(), deepcopy(LORA)), tmp_path, 2).train()
        fresh().train().eval()(text())
    assert not [one for one in caught if "meta" in str(one.message)]
