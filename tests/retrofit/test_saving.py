"""Retrofitted models on disk: saved whole, and as a delta."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from metatokens import add_meta_attention, encode_prompt, freeze_base, load_meta, save_meta
from metatokens.checkpoint import load_model
from metatokens.data.tokenizer import META_TOKEN, load_tokenizer
from metatokens.errors import UserError
from metatokens.model.configuration import UNSAVED
from metatokens.retrofit.identity import difference, settings_of
from metatokens.retrofit.saving import base_of
from metatokens.tasks.curriculum import TaskData
from metatokens.tasks.drills import draw_drill
from metatokens.tasks.encoding import SegmentEncoder
from metatokens.tasks.phases import Sizes
from tests.retrofit.architectures import (
    CORPUS,
    META,
    ROWS,
    base,
    error,
    logits,
    retrofitted,
    text,
    train_like,
    with_meta_tokens,
)


def test_what_is_written(tmp_path: Path) -> None:
    model = retrofitted("llama")
    model.save_pretrained(tmp_path / "whole", max_shard_size="200KB")
    save_meta(model, tmp_path / "meta")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert (config["model_type"], config["base_model_type"]) == ("meta_tokens", "llama")
    assert config["architectures"] == ["MetaTokensLlamaForCausalLM"]  # not to be taken for a Llama
    assert config["meta_attention"]["sites"] == ["self_attn"] * 3
    added = load_file(tmp_path / "meta" / "meta_tokens.safetensors")
    assert {name.split("meta_")[1].split(".")[0] for name in added} == {"attention", "token"}
    width, inner = 64, 2 * 16
    assert sum(one.numel() for one in added.values()) == width + 3 * (width + 4 * width * inner)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", device_map="cpu")
    assert isinstance(again, LlamaForCausalLM)
    assert torch.equal(logits(again.eval(), with_meta_tokens()), logits(model, with_meta_tokens()))
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    base("llama").to(dtype).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = train_like(add_meta_attention(model, meta_token_id=META, heads=2, head_size=16)).eval()
    model.save_pretrained(tmp_path / "whole")
    save_meta(model, tmp_path / "meta")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    put_together = load_meta(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "meta").eval()
    for again in (whole, put_together):
        assert again.dtype == dtype
        for name, weight in again.named_parameters():
            assert weight.dtype == (torch.float32 if "meta_" in name else dtype), name
            assert torch.equal(weight, model.get_parameter(name)), name
        assert torch.equal(logits(again, with_meta_tokens()), logits(model, with_meta_tokens()))
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval()
    assert error(logits(wide, with_meta_tokens()), logits(model, with_meta_tokens())) < 0.05


def test_a_whole_model_may_be_put_into_half_precision() -> None:
    model = retrofitted("llama").to(torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert error(logits(model, with_meta_tokens()), logits(retrofitted("llama"), with_meta_tokens())) < 0.05


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt_neox"])
def test_a_table_grows_for_a_tokenizer_and_comes_back(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(f"train:{ROWS}", corpus=CORPUS)
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    model = add_meta_attention(base(name), plain, heads=2, head_size=16)
    rows = model.get_input_embeddings().weight
    assert (plain.meta_token, plain.meta_token_id, len(rows)) == (META_TOKEN, ROWS, 384)
    assert error(logits(model, text())[..., :ROWS], logits(base(name), text())) == 0.0
    assert model(text(), labels=text()).loss == base(name)(text(), labels=text()).loss
    assert model.config.unpadded_vocab_size == ROWS + 1
    ids = torch.tensor([encode_prompt(plain, "the cat _PAUSE_ sat", markers="_PAUSE_")])
    assert (ids == ROWS).sum() == 1
    generated = model.generate(ids, max_new_tokens=40, do_sample=True, top_k=0, temperature=10.0)
    assert generated[0, ids.shape[1] :].max() < ROWS
    save_meta(model, tmp_path)
    assert torch.equal(logits(load_meta(base(name), tmp_path), ids), logits(model, ids))
    plain.save_pretrained(tmp_path / "tokenizer")
    again = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert (again.meta_token, again.meta_token_id, len(again)) == (META_TOKEN, ROWS, ROWS + 1)


def test_a_meta_token_that_the_tokenizer_has_is_used() -> None:
    tokenizer = load_tokenizer("train:300", corpus=CORPUS)
    model = add_meta_attention(base("llama"), tokenizer)
    assert model.config.meta_token_id == tokenizer.meta_token_id == 300
    assert len(model.get_input_embeddings().weight) == ROWS  # it had room


def test_a_wrong_base_is_refused(tmp_path: Path) -> None:
    save_meta(retrofitted("llama"), tmp_path)
    rotary = {"rope_type": "default", "rope_theta": 5e5}
    for other, message in (
        (base("llama", rope_parameters=rotary), "rope_parameters was 'the default' and is .*500000.0"),
        (base("mistral"), "sliding_window was 'the default' and is"),
    ):
        with pytest.raises(UserError, match=f"trained with another base.*{message}"):
            load_meta(other, tmp_path)
        assert not hasattr(other.config, "meta_attention")
    with pytest.raises(UserError, match="this LlamaForCausalLM is no model of transformers without meta-tokens"):
        load_meta(retrofitted("llama"), tmp_path)
    with pytest.raises(UserError, match="is no retrofitted model"):
        save_meta(base("llama"), tmp_path)
    with pytest.raises(UserError, match="cannot be written to"):
        save_meta(retrofitted("llama"), tmp_path / "meta_tokens.json")  # a file


def test_settings_of_training_do_not_make_another_base(tmp_path: Path) -> None:
    save_meta(retrofitted("llama"), tmp_path)
    model = base("llama")
    model.config.update({"pad_token_id": 2, "attention_dropout": 0.1, "output_hidden_states": True})
    model.config.update({"unk_token_id": 0, "a_field_that_the_class_does_not_declare": 3})
    assert load_meta(model, tmp_path).config.meta_token_id == META


def test_a_release_that_knows_of_further_settings_knows_the_base() -> None:
    class Later(LlamaConfig):
        further: int = 3

    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    assert "further" in Later(**sizes).to_dict()
    assert settings_of(Later(**sizes)) == settings_of(LlamaConfig(**sizes))
    assert settings_of(Later(**sizes, further=4)) == settings_of(LlamaConfig(**sizes)) | {"further": 4}


PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("loaded", PRECISIONS)
@pytest.mark.parametrize("trained", PRECISIONS)
def test_a_base_in_another_precision_is_the_same_base(
    trained: torch.dtype, loaded: torch.dtype, tmp_path: Path
) -> None:
    base("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=trained)
    save_meta(add_meta_attention(model, meta_token_id=META, heads=2, head_size=16), tmp_path / "meta")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=loaded)
    assert load_meta(again, tmp_path / "meta").dtype == loaded


@pytest.mark.parametrize("name", ["layers.1.self_attn.q_proj", "down_proj", "embed_tokens", "model.norm", "lm_head"])
def test_a_base_of_other_weights_is_refused(name: str, tmp_path: Path) -> None:
    save_meta(retrofitted("llama"), tmp_path)
    other = base("llama")
    for key, weight in other.named_parameters():
        weight.data.mul_(1 + 2**-6 if name in key else 1)
    with pytest.raises(UserError, match="the weights have other checksums"):
        load_meta(other, tmp_path)
    assert not hasattr(other.config, "meta_attention")
    with pytest.raises(UserError, match="the weights have other checksums"):
        load_meta(other.to(torch.bfloat16), tmp_path)
    half = base("llama").to(torch.bfloat16)  # for another half precision, sizes are compared
    save_meta(add_meta_attention(half, meta_token_id=META), tmp_path / "half")
    for weight in other.parameters():
        weight.data.mul_(1.1)
    with pytest.raises(UserError, match="the weights have other checksums"):
        load_meta(other.to(torch.float16), tmp_path / "half")


def test_a_configuration_comes_back_from_its_file_as_the_same_settings() -> None:
    differing = {}
    for kind, config in CONFIG_MAPPING.items():
        try:
            made = config()
            again = config.from_dict(json.loads(made.to_json_string(use_diff=False)))
        except Exception as error:  # some need arguments, or cannot be read again
            differing.setdefault(type(error).__name__, []).append(kind)
            continue
        if found := difference(settings_of(made), settings_of(again)):
            differing[kind] = found
    found = {kind for kind, found in differing.items() if isinstance(found, str)}
    assert found <= {"moshi"}  # in some releases, reading it computes a setting


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
def test_a_base_that_was_trained_is_not_left_out(tmp_path: Path) -> None:
    model = retrofitted("llama", freeze=False)
    save_meta(model, tmp_path / "before")
    lora = LoraConfig(target_modules=["v_proj"], modules_to_save=["meta_attention", "meta_token"])
    adapted = get_peft_model(retrofitted("llama"), lora)
    for name, weight in adapted.named_parameters():
        weight.data.add_(0.01 if "lora_B" in name else 0)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.001)
    model.save_pretrained(tmp_path / "whole")
    for changed in (adapted.merge_and_unload(), model, AutoModelForCausalLM.from_pretrained(tmp_path / "whole")):
        with pytest.raises(UserError, match=r"weights are not those .* Save the whole model, by save_pretrained"):
            save_meta(changed, tmp_path / "meta")
    assert not (tmp_path / "meta").exists()


@pytest.mark.parametrize(
    ("name", "trained"), [("llama", "embed_tokens"), ("qwen3_moe", "experts"), ("gptj", "lm_head")]
)
def test_a_base_of_which_little_was_trained_is_another_base(name: str, trained: str, tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(ROWS)}  # the table and the head grow by the meta-token
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)))
    model = add_meta_attention(base(name), tokenizer, freeze=False)
    save_meta(model, tmp_path / "meta")
    load_meta(base(name), tmp_path / "meta")
    for place, weight in model.named_parameters():
        if trained in place and "meta_token" not in place:
            weight.data[1 if trained == "experts" else ROWS - 2] += 0.01  # one expert, one row
    with pytest.raises(UserError, match="weights are not those that meta-attention was added to"):
        save_meta(model, tmp_path / "again")


def test_a_configuration_that_several_models_share_stays_the_bases(tmp_path: Path) -> None:
    config = base("llama").config
    first, second = LlamaForCausalLM(config), LlamaForCausalLM(config)
    model = add_meta_attention(first, meta_token_id=META)
    assert {id(one.config) for one in model.modules() if hasattr(one, "config")}.isdisjoint({id(config)})
    assert not hasattr(config, "meta_attention")
    second.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is LlamaForCausalLM
    assert torch.equal(logits(again.eval(), text()), logits(second.eval(), text()))


def test_what_is_on_no_disk_begins_as_it_does_in_a_base() -> None:
    model = retrofitted("llama")
    again = AutoModelForCausalLM.from_config(model.config)
    added = {name: one for name, one in again.named_parameters() if "meta_" in name}
    assert added.keys() == {name for name, _ in model.named_parameters() if "meta_" in name}
    assert all(one.abs().max() == 0 for name, one in added.items() if "out_proj" in name)
    assert all((one == 1).all() for name, one in added.items() if "norm" in name)
    drawn = [one for name, one in added.items() if "qkv_proj" in name or "meta_token" in name]
    assert all(one.isfinite().all() and 0.01 < one.std() < 0.03 for one in drawn)


def test_the_auto_classes_name_a_folder_of_what_was_added_alone(tmp_path: Path) -> None:
    save_meta(retrofitted("llama"), tmp_path)
    with pytest.raises(UserError, match="this folder holds what was added to a base, and not the base"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("entries", "used"),
    [([" ", "\n", ","], [0, 1, 2]), (["Ġ", "Ċ", ","], [0, 1, 2]), (["▁", "<0x0A>"], [0, 1]), ([], range(ROWS))],
    ids=str,
)
def test_where_the_meta_token_begins(entries: list[str], used: Sequence[int]) -> None:
    words = {one: i for i, one in enumerate([*entries, *(f"w{i}" for i in range(200))])}
    model = base("llama")
    table = model.get_input_embeddings().weight.detach().clone()
    add_meta_attention(model, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words))))
    others = [one for one in used if one != model.config.meta_token_id]
    assert torch.allclose(model.get_input_embeddings().meta_token.weight, table[others].mean(dim=0), atol=1e-6)


def test_a_vocabulary_with_gaps_is_refused() -> None:
    words = {f"w{i}": i for i in range(300)}
    del words["w7"], words["w200"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)))
    refused(base("llama"), "has gaps: 298 entries with ids up to 299", tokenizer=tokenizer, meta_token_id=None)
    named = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), meta_token="<|meta|>")
    assert named.meta_token_id == words["w298"]
    refused(base("llama"), "has gaps: 299 entries with ids up to 299", tokenizer=named, meta_token_id=None)
    assert len(tokenizer) == 298


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("meta_tokens.json", b""),
        ("meta_tokens.json", b"[" * 100_000),
        ("meta_tokens.json", b"[]"),
        ("meta_tokens.json", b'{"meta_attention": {"layers": 3}, "meta_token_id": 1, "unpadded_vocab_size": 3}'),
        ("meta_tokens.json", b" " * (2**20 + 1)),
        ("meta_tokens.json", None),
        ("meta_tokens.safetensors", b"x" * 100),
        ("meta_tokens.safetensors", None),
    ],
)
def test_damaged_files_are_refused(file: str, content: bytes | None, tmp_path: Path) -> None:
    save_meta(retrofitted("llama"), tmp_path)
    (tmp_path / file).write_bytes(content) if content is not None else (tmp_path / file).unlink()
    with pytest.raises(UserError, match=file):
        load_meta(base("llama"), tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: {name: one.flatten()[:8].clone() for name, one in weights.items()},
        lambda weights: dict(list(weights.items())[1:]),
        lambda weights: {name: one.to(torch.int8) for name, one in weights.items()},
    ],
    ids=["shorter", "fewer", "whole numbers"],
)
def test_weights_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path
) -> None:
    save_meta(retrofitted("llama"), tmp_path)
    weights = load_file(tmp_path / "meta_tokens.safetensors")
    save_file(change(weights), tmp_path / "meta_tokens.safetensors")
    model = base("llama")
    with pytest.raises(UserError, match=r"do not fit its meta_tokens\.json"):
        load_meta(model, tmp_path)
    save_file(weights, tmp_path / "meta_tokens.safetensors")  # the base is unchanged
    assert all(weight.requires_grad for weight in model.parameters())
    model = load_meta(model, tmp_path)
    assert torch.equal(logits(model, with_meta_tokens()), logits(retrofitted("llama"), with_meta_tokens()))
    assert {"meta_" in name for name, weight in model.named_parameters() if weight.requires_grad} == {True}


SITES = ["self_attn"] * 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sites": ["nowhere"] * 3}, "does not fit the base"),
        ({"layers": [0, 1, 9]}, r"layers is \[0, 1, 9\]; give a list of some of 0 to 2"),
        ({"hidden_size": 32}, "do not fit"),
        ({"layers": [0, 1]}, "2 blocks have 3 sites"),
        ({"sites": ["", "", ""]}, "sites.0 is '': string should have at least 1 character"),
        ({"sites": None}, "missing or damaged"),
        ({"layers": "abc"}, "layers is 'abc'"),
        ({"layers": [-1, 0, 1]}, "layers is"),
        ({"head_size": 2.5}, "head_size is 2.5: input should be a valid integer"),
        ({"meta_token_id": 99_999}, "meta_token_id is 99999 and unpadded_vocab_size"),
        ({"meta_token_id": -5}, "meta_token_id is -5"),
        ({"unpadded_vocab_size": 0}, "unpadded_vocab_size 0:"),
        ({"unpadded_vocab_size": 10**15}, "which does not fit the 320 rows of the base"),
        ({"meta_token_id": 50, "unpadded_vocab_size": 100}, "which does not fit the 320 rows of the base"),
        ({"meta_token_id": 3.7}, "meta_token_id is 3.7"),
        ({"site_has_residual": "x"}, "site_has_residual is 'x': input should be a valid boolean"),
        ({"base_weights": {"float32": "x"}}, "base_weights.bfloat16 is missing"),
        ({"base_weights": {"dtype": ["a"]}}, "base_weights.float32 is missing"),
        ({"base_settings": []}, r"base_settings is \[\]: input should be a valid dictionary"),
    ],
)
def test_settings_that_cannot_be_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_meta(retrofitted("llama"), tmp_path)
    given = json.loads((tmp_path / "meta_tokens.json").read_text())
    assert given["meta_attention"]["sites"] == SITES
    for name, value in changed.items():
        (given if name in given else given["meta_attention"])[name] = value
    (tmp_path / "meta_tokens.json").write_text(json.dumps(given))
    model = base("llama")
    with pytest.raises(UserError, match=message):
        load_meta(model, tmp_path)
    assert not hasattr(model.config, "meta_attention")


@pytest.mark.parametrize("key", ["base_model_type", "architectures"])
def test_a_configuration_that_names_no_model_is_refused(key: str, tmp_path: Path) -> None:
    retrofitted("llama").config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: "os" if key != "architectures" else ["os"]}))
    with pytest.raises(UserError, match="is none that metatokens supports"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [{"meta_token_id": one} for one in ("x", None, True, -3, 10**9)]
    + [{"unpadded_vocab_size": one} for one in ("x", -5, 10**9)],
    ids=str,
)
def test_a_whole_model_without_a_row_for_its_meta_token_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    retrofitted("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    for load in (AutoModelForCausalLM.from_pretrained, load_model):
        with pytest.raises(UserError, match=r"meta_token_id is .* and that at most 320, the rows"):
            load(tmp_path)


@pytest.mark.parametrize("is_tied", [True, False])
def test_tables_that_are_resized_afterwards(is_tied: bool, tmp_path: Path) -> None:
    model, ids = retrofitted("llama", tie_word_embeddings=is_tied), with_meta_tokens()
    before = logits(model, ids)
    model.resize_token_embeddings(ROWS + 3, pad_to_multiple_of=8, mean_resizing=False)
    after = model(ids).logits
    assert (after.shape[-1], torch.equal(after[..., :META], before)) == (ROWS + 8, True)
    assert (after[..., [META, *range(ROWS + 3, ROWS + 8)]] == -1e4).all()
    assert (after[..., ROWS : ROWS + 3].abs() < 100).all()  # entries in use like any other
    with pytest.raises(UserError, match=r"tokens were added .* Save the whole model"):
        save_meta(model, tmp_path)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids).logits, after)
    with pytest.raises(UserError, match="300 rows leave out the meta-token, whose id is 319"):
        model.resize_token_embeddings(300)


def test_it_is_not_what_stands_where_its_base_was(tmp_path: Path) -> None:
    base("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    save_meta(add_meta_attention(model, meta_token_id=META), tmp_path / "meta")
    assert base_of(tmp_path / "meta") == str(tmp_path / "base")
    loaded = load_meta(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "meta")
    for one in (model, loaded):
        assert one.name_or_path == one.config.name_or_path == UNSAVED
        one.save_pretrained(tmp_path / "whole")
        assert one.name_or_path == one.config.name_or_path == str(tmp_path / "whole")


def refused(model: Any, message: str, **options: Any) -> None:
    with pytest.raises(UserError, match=message):
        add_meta_attention(model, **{"meta_token_id": META, **options})


def test_what_cannot_be_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    refused(MambaForCausalLM(MambaConfig(**sizes)), "MambaForCausalLM: block 0 has no attention")
    t5 = T5Config(vocab_size=320, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    refused(T5ForConditionalGeneration(t5), "an encoder-decoder; give a decoder")
    refused(retrofitted("llama"), "has meta-tokens already")
    refused(base("llama").model, "give a causal language model of transformers")
    refused(torch.nn.Linear(2, 2), "a Linear: give a causal language model")
    refused(base("llama"), "meta_token_id 320 is outside the 320 rows", meta_token_id=320)
    refused(base("llama"), "give the model's tokenizer, or as meta_token_id a row", meta_token_id=None)
    refused(base("llama"), r"layers is \[0, 3\]; give a list of some of 0 to 2", layers=[0, 3])
    model = base("llama")
    refused(model, "head_size is 7: input should be a multiple of 2", heads=2, head_size=7)
    assert type(model) is LlamaForCausalLM  # as it was
    assert torch.equal(logits(model, text()), logits(base("llama"), text()))
    assert all(weight.requires_grad for weight in model.parameters())
    refused(base("llama"), "num_attention_heads is 2.5: input should be a valid integer", heads=2.5)
    refused(base("llama"), "layers is 2; give a list of some of 0 to 2", layers=2)
    refused(base("llama"), r"layers is \[\[0\]\]; give a list", layers=[[0]])
    refused(base("llama"), "meta_token_id 5.5 is outside the 320 rows", meta_token_id=5.5)
    with pytest.raises(UserError, match="this LlamaForCausalLM is no retrofitted model"):
        freeze_base(base("llama"))
    tokenizer = load_tokenizer("train:320", corpus=CORPUS)
    tokenizer.add_tokens([f"<|{number}|>" for number in range(ROWS + 3 - len(tokenizer))])
    refused(base("llama"), "the tokenizer has entries for which the model has no row, such as", tokenizer=tokenizer)
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({str(i): i for i in range(ROWS + 3)})))
    refused(base("llama"), "has no row, such as '320'", tokenizer=plain)
    assert len(plain) == ROWS + 3  # a tokenizer that is refused gets no token


def test_prompts_begin_as_the_bases_tokenizer_begins_a_text() -> None:
    tokenizer = load_tokenizer("train:300", corpus=CORPUS)
    assert (
        encode_prompt(tokenizer, "the cat") == tokenizer("the cat")["input_ids"]
    )  # this tokenizer adds no token at the start
    bos = ("<|endoftext|>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    plain = encode_prompt(tokenizer, "the cat _PAUSE_ sat", markers="_PAUSE_")
    assert plain[0] == tokenizer.eos_token_id
    assert plain.count(tokenizer.eos_token_id) == 1
    assert [one for one in plain if one != tokenizer.meta_token_id] == tokenizer("the cat sat")["input_ids"]
    encoder = SegmentEncoder(tokenizer)
    assert encoder.encode_prompt(["the cat", " sat"]) == plain
    texts = [f"{CORPUS[0]} and {number} more" for number in range(9)]
    source = TaskData("copying", tokenizer=tokenizer, condition="paper", seed=0, documents=texts)
    drill = draw_drill(source, 0, 60, Sizes(lists=(2, 3), lengths=((3, 4),)))
    assert drill.input_ids[0] == tokenizer.eos_token_id
