"""Retrofitted models on disk: saved whole, and as what was added alone."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from metatokens import add_meta_attention, encode_prompt, load_meta, save_meta
from metatokens.checkpoint import load_model
from metatokens.data.tokenizer import META_TOKEN, load_tokenizer
from metatokens.errors import UserError
from metatokens.model.configuration import UNSAVED
from metatokens.retrofit.identity import settings_of
from metatokens.retrofit.saving import base_of
from tests.retrofit.architectures import (
    ADDED,
    CORPUS,
    META,
    ROWS,
    base,
    error,
    logits,
    retrofitted,
    shared,
    text,
    with_meta_tokens,
)


@pytest.fixture(scope="module")
def saved_whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a retrofitted Llama, not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    shared("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what was added to this Llama, not to be changed."""
    folder = tmp_path_factory.mktemp("delta")
    save_meta(shared("llama"), folder)
    return folder


@pytest.fixture
def delta(saved_delta: Path, tmp_path: Path) -> Path:
    """A copy of `saved_delta` to be changed."""
    return shutil.copytree(saved_delta, tmp_path / "delta")


def change_json(path: Path, change: dict[str, Any]) -> None:
    """Give entries of a JSON file, or of its entry `meta_attention`, other values."""
    content = json.loads(path.read_text())
    for name, value in change.items():
        holder = content if name in content else content["meta_attention"]
        holder[name] = value
    path.write_text(json.dumps(content))


def word_tokenizer(words: dict[str, int], **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words with these ids."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), **options)


def numbered_words(count: int) -> dict[str, int]:
    return {f"w{number}": number for number in range(count)}


# --- what is written and read


def test_a_whole_model_is_written_and_read(saved_whole: Path, tmp_path: Path) -> None:
    config = json.loads((saved_whole / "config.json").read_text())
    assert (config["model_type"], config["base_model_type"]) == ("meta_tokens", "llama")
    assert config["architectures"] == ["MetaTokensLlamaForCausalLM"]  # not to be taken for a Llama
    assert config["meta_attention"]["injection_points"] == ["self_attn"] * 3

    loaded = AutoModelForCausalLM.from_pretrained(saved_whole, device_map="cpu")
    assert isinstance(loaded, LlamaForCausalLM)
    assert torch.equal(
        logits(loaded.eval(), with_meta_tokens()), logits(shared("llama"), with_meta_tokens())
    )

    loaded.save_pretrained(tmp_path, max_shard_size="200KB")
    assert json.loads((tmp_path / "config.json").read_text()) == config
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(
        logits(again, with_meta_tokens()), logits(shared("llama"), with_meta_tokens())
    )


def test_a_delta_holds_what_was_added_alone(saved_delta: Path) -> None:
    added = load_file(saved_delta / "meta_tokens.safetensors")
    assert {name.split("meta_")[1].split(".")[0] for name in added} == {"attention", "token"}
    width, inner = 64, 2 * 16
    parameters = sum(weight.numel() for weight in added.values())
    assert parameters == width + 3 * (width + 4 * width * inner)


def test_a_configuration_that_several_models_share_stays_the_bases(tmp_path: Path) -> None:
    config = base("llama").config
    first, second = LlamaForCausalLM(config), LlamaForCausalLM(config)

    model = add_meta_attention(first, meta_token_id=META)
    for module in model.modules():
        assert getattr(module, "config", None) is not config
    assert not hasattr(config, "meta_attention")

    second.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM
    assert torch.equal(logits(loaded.eval(), text()), logits(second.eval(), text()))


def test_a_retrofitted_model_does_not_have_the_name_of_its_base(tmp_path: Path) -> None:
    base("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    save_meta(add_meta_attention(model, meta_token_id=META), tmp_path / "delta")
    assert base_of(tmp_path / "delta") == str(tmp_path / "base")

    loaded = load_meta(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "delta")
    for retrofit in (model, loaded):
        assert retrofit.name_or_path == retrofit.config.name_or_path == UNSAVED
        retrofit.save_pretrained(tmp_path / "whole")
        assert retrofit.name_or_path == retrofit.config.name_or_path == str(tmp_path / "whole")


# --- the vocabulary


@pytest.mark.quick(name=["llama"])
@pytest.mark.parametrize("name", ["llama", "bloom", "gemma4_text", "gpt_neox"])
def test_a_table_grows_for_a_tokenizer_and_comes_back(name: str, tmp_path: Path) -> None:
    trained = load_tokenizer(f"train:{ROWS}", corpus=CORPUS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained.backend_tokenizer, eos_token="<|endoftext|>"
    )
    model = add_meta_attention(base(name), tokenizer, heads=2, head_size=16)

    rows = model.get_input_embeddings().weight
    assert (tokenizer.meta_token, tokenizer.meta_token_id, len(rows)) == (META_TOKEN, ROWS, 384)
    assert model.config.unpadded_vocab_size == ROWS + 1
    assert error(logits(model, text())[..., :ROWS], logits(base(name), text())) == 0.0
    assert model(text(), labels=text()).loss == base(name)(text(), labels=text()).loss

    ids = torch.tensor([encode_prompt(tokenizer, "the cat _PAUSE_ sat", markers="_PAUSE_")])
    assert (ids == ROWS).sum() == 1
    generated = model.generate(ids, max_new_tokens=40, do_sample=True, top_k=0, temperature=10.0)
    assert generated[0, ids.shape[1] :].max() < ROWS

    save_meta(model, tmp_path)
    assert torch.equal(logits(load_meta(base(name), tmp_path), ids), logits(model, ids))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert (loaded.meta_token, loaded.meta_token_id, len(loaded)) == (META_TOKEN, ROWS, ROWS + 1)


def test_a_meta_token_that_the_tokenizer_has_is_used() -> None:
    tokenizer = load_tokenizer("train:300", corpus=CORPUS)
    model = add_meta_attention(base("llama"), tokenizer)
    assert model.config.meta_token_id == tokenizer.meta_token_id == 300
    assert len(model.get_input_embeddings().weight) == ROWS  # it had room


@pytest.mark.parametrize(
    ("separators", "averaged"),
    [
        ([" ", "\n", ","], [0, 1, 2]),
        (["Ġ", "Ċ", ","], [0, 1, 2]),
        (["▁", "<0x0A>"], [0, 1]),
        ([], range(ROWS)),
    ],
    ids=str,
)
def test_the_meta_token_begins_at_the_mean_of_separators(
    separators: list[str], averaged: Sequence[int]
) -> None:
    words = [*separators, *numbered_words(200)]
    model = base("llama")
    table = model.get_input_embeddings().weight.detach().clone()

    add_meta_attention(model, word_tokenizer({word: number for number, word in enumerate(words)}))

    rows = [row for row in averaged if row != model.config.meta_token_id]
    expected = table[rows].mean(dim=0)
    assert torch.allclose(model.get_input_embeddings().meta_token.weight, expected, atol=1e-6)


@pytest.mark.parametrize("is_tied", [True, False])
def test_tables_that_are_resized_afterwards(is_tied: bool, tmp_path: Path) -> None:
    model, ids = retrofitted("llama", tie_word_embeddings=is_tied), with_meta_tokens()
    before = logits(model, ids)

    model.resize_token_embeddings(ROWS + 3, pad_to_multiple_of=8, mean_resizing=False)

    after = model(ids).logits
    assert after.shape[-1] == ROWS + 8
    assert torch.equal(after[..., :META], before)
    assert (after[..., [META, *range(ROWS + 3, ROWS + 8)]] == -1e4).all()
    assert (after[..., ROWS : ROWS + 3].abs() < 100).all()  # entries in use like any other
    with pytest.raises(UserError, match=r"tokens were added .* Save the whole model"):
        save_meta(model, tmp_path)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(ids).logits, after)
    with pytest.raises(UserError, match="300 rows leave out the meta-token, of the id 319"):
        model.resize_token_embeddings(300)


# --- the base of a delta


@pytest.mark.parametrize(
    ("trained", "loaded"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float16)]
)
def test_a_base_in_another_precision_is_the_same_base(
    trained: torch.dtype, loaded: torch.dtype, tmp_path: Path
) -> None:
    base("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=trained)
    save_meta(add_meta_attention(model, **ADDED), tmp_path / "delta")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=loaded)

    assert load_meta(other, tmp_path / "delta").dtype == loaded


def test_settings_of_training_do_not_make_another_base(saved_delta: Path) -> None:
    model = base("llama")
    model.config.update({"pad_token_id": 2, "attention_dropout": 0.1, "output_hidden_states": True})
    model.config.update({"unk_token_id": 0, "a_field_that_the_class_does_not_declare": 3})
    assert load_meta(model, saved_delta).config.meta_token_id == META


def test_a_release_that_knows_of_further_settings_knows_the_base() -> None:
    class Later(LlamaConfig):
        further: int = 3

    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    assert "further" in Later(**sizes).to_dict()
    assert settings_of(Later(**sizes)) == settings_of(LlamaConfig(**sizes))
    assert settings_of(Later(**sizes, further=4)) == settings_of(LlamaConfig(**sizes)) | {
        "further": 4
    }


@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "it had another rope_parameters",
        ),
        ("mistral", {}, "it had another .*sliding_window"),
    ],
)
def test_a_base_of_other_settings_is_refused(
    name: str, choices: dict[str, Any], message: str, saved_delta: Path
) -> None:
    other = base(name, **choices)
    with pytest.raises(UserError, match=f"trained with another base.*{message}"):
        load_meta(other, saved_delta)
    assert not hasattr(other.config, "meta_attention")


@pytest.mark.parametrize("changed", ["layers.1.self_attn.q_proj", "embed_tokens", "lm_head"])
def test_a_base_of_other_weights_is_refused(changed: str, saved_delta: Path) -> None:
    other = base("llama")
    for name, weight in other.named_parameters():
        if changed in name:
            weight.data.mul_(1 + 2**-6)

    with pytest.raises(UserError, match="the weights have another checksum"):
        load_meta(other, saved_delta)
    assert not hasattr(other.config, "meta_attention")
    with pytest.raises(UserError, match="the weights have another checksum"):
        load_meta(other.to(torch.bfloat16), saved_delta)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
def test_a_base_that_was_trained_is_not_left_out(tmp_path: Path) -> None:
    model = retrofitted("llama")
    save_meta(model, tmp_path / "before")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.001)
    model.save_pretrained(tmp_path / "whole")
    lora = LoraConfig(target_modules=["v_proj"], modules_to_save=["meta_attention", "meta_token"])
    adapted = get_peft_model(retrofitted("llama"), lora)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data.add_(0.01)

    for changed in (
        adapted.merge_and_unload(),
        model,
        AutoModelForCausalLM.from_pretrained(tmp_path / "whole"),
    ):
        with pytest.raises(
            UserError, match=r"weights are not those .* Save the whole model, by save_pretrained"
        ):
            save_meta(changed, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


@pytest.mark.quick(name=["llama"])
@pytest.mark.parametrize(
    ("name", "trained", "row"),
    [
        ("llama", "embed_tokens", ROWS - 2),
        ("qwen3_moe", "experts", 1),
        ("gptj", "lm_head", ROWS - 2),
    ],
)
def test_a_base_of_which_little_was_trained_is_another_base(
    name: str, trained: str, row: int, tmp_path: Path
) -> None:
    """One row of a table, or one expert; the table and the head grow by the meta-token."""
    model = add_meta_attention(base(name), word_tokenizer(numbered_words(ROWS)), freeze=False)
    save_meta(model, tmp_path / "before")
    load_meta(base(name), tmp_path / "before")
    for weight_name, weight in model.named_parameters():
        if trained in weight_name and "meta_token" not in weight_name:
            weight.data[row] += 0.01

    with pytest.raises(UserError, match="weights are not those that meta-attention was added to"):
        save_meta(model, tmp_path / "after")


# --- what is refused


def test_models_with_and_without_meta_tokens_are_not_confused(
    saved_delta: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="this is no model of transformers without meta-tokens"):
        load_meta(retrofitted("llama"), saved_delta)
    with pytest.raises(UserError, match="is no retrofitted model"):
        save_meta(base("llama"), tmp_path)
    with pytest.raises(UserError, match="cannot be written to"):
        save_meta(shared("llama"), saved_delta / "meta_tokens.json")  # a file
    with pytest.raises(
        UserError, match="this folder holds what was added to a base, and not the base"
    ):
        AutoModelForCausalLM.from_pretrained(saved_delta)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("meta_tokens.json", b"[" * 100_000),
        ("meta_tokens.json", b"[]"),
        ("meta_tokens.json", b" " * (2**20 + 1)),
        ("meta_tokens.safetensors", b"x" * 100),
    ],
    ids=["nested", "a list", "long", "random"],
)
def test_damaged_files_are_refused(file: str, content: bytes, delta: Path) -> None:
    (delta / file).write_bytes(content)
    with pytest.raises(UserError, match=file):
        load_meta(base("llama"), delta)
    (delta / file).unlink()
    with pytest.raises(UserError, match=file):
        load_meta(base("llama"), delta)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: {name: weight.flatten()[:8].clone() for name, weight in weights.items()},
        lambda weights: dict(list(weights.items())[1:]),
        lambda weights: {name: weight.to(torch.int8) for name, weight in weights.items()},
    ],
    ids=["shorter", "fewer", "whole numbers"],
)
def test_weights_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], saved_delta: Path, delta: Path
) -> None:
    weights = load_file(delta / "meta_tokens.safetensors")
    save_file(change(weights), delta / "meta_tokens.safetensors")
    model = base("llama")

    with pytest.raises(UserError, match=r"do not fit its meta_tokens\.json"):
        load_meta(model, delta)
    assert all(weight.requires_grad for weight in model.parameters())  # the base is unchanged
    load_meta(model, saved_delta)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"injection_points": ["nowhere"] * 3}, "does not fit the base"),
        ({"layers": [0, 1, 9]}, r"layers is \[0, 1, 9\]; give a list of some of 0 to 2"),
        ({"layers": [0, 1]}, "each of the layers needs one of the injection_points"),
        ({"hidden_size": 32}, "do not fit"),
        ({"injection_points": None}, "missing or damaged"),
        ({"head_size": 2.5}, "head_size: Input should be a valid integer"),
        ({"meta_token_id": 99_999}, "meta_token_id is 99999 and unpadded_vocab_size"),
        ({"unpadded_vocab_size": 10**15}, "which does not fit the 320 rows of the base"),
        (
            {"meta_token_id": 50, "unpadded_vocab_size": 100},
            "which does not fit the 320 rows of the base",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(
    change: dict[str, Any], message: str, delta: Path
) -> None:
    change_json(delta / "meta_tokens.json", change)
    model = base("llama")

    with pytest.raises(UserError, match=message):
        load_meta(model, delta)
    assert not hasattr(model.config, "meta_attention")


@pytest.mark.parametrize(
    "change",
    [
        {"meta_token_id": "x"},
        {"meta_token_id": True},
        {"meta_token_id": -3},
        {"unpadded_vocab_size": 10**9},
    ],
    ids=str,
)
def test_a_whole_model_without_a_row_for_its_meta_token_is_refused(
    change: dict[str, Any], saved_whole: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved_whole, tmp_path / "whole")
    change_json(folder / "config.json", change)
    for load in (AutoModelForCausalLM.from_pretrained, load_model):
        with pytest.raises(UserError, match=r"meta_token_id is .* and that at most 320, the rows"):
            load(folder)


def assert_refused(model: Any, message: str, **options: Any) -> None:
    options.setdefault("meta_token_id", None if "tokenizer" in options else META)
    with pytest.raises(UserError, match=message):
        add_meta_attention(model, **options)


def test_models_that_cannot_have_meta_attention_are_refused() -> None:
    mamba = MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=8)
    t5 = T5Config(vocab_size=320, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2)

    assert_refused(MambaForCausalLM(mamba), "MambaForCausalLM: block 0 has no attention")
    assert_refused(T5ForConditionalGeneration(t5), "an encoder-decoder; give a decoder")
    assert_refused(shared("llama"), "has meta-tokens already")
    assert_refused(base("llama").model, "give a causal language model of transformers")


def test_options_that_do_not_fit_the_model_are_refused() -> None:
    model = base("llama")
    assert_refused(model, "meta_token_id is 320 and unpadded_vocab_size 320", meta_token_id=320)
    assert_refused(
        model, "give the model's tokenizer, or as meta_token_id a row", meta_token_id=None
    )
    assert_refused(model, "meta_token_id is 2, the model's eos_token_id", meta_token_id=2)
    assert_refused(model, r"layers is \[0, 3\]; give a list of some of 0 to 2", layers=[0, 3])
    assert_refused(model, "head_size: Input should be a multiple of 2", heads=2, head_size=7)

    assert type(model) is LlamaForCausalLM  # as it was
    assert torch.equal(logits(model, text()), logits(base("llama"), text()))
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_tokenizer_with_more_entries_than_the_model_has_rows_is_refused() -> None:
    tokenizer = word_tokenizer(numbered_words(ROWS + 3))
    assert_refused(base("llama"), "has no row, such as 'w320'", tokenizer=tokenizer)
    assert len(tokenizer) == ROWS + 3  # a tokenizer that is refused gets no token


def test_a_tokenizer_and_a_row_are_not_taken_together() -> None:
    tokenizer = word_tokenizer(numbered_words(9))
    assert_refused(
        base("llama"),
        "give a tokenizer or a meta_token_id",
        tokenizer=tokenizer,
        meta_token_id=META,
    )


def test_a_vocabulary_with_gaps_is_refused() -> None:
    words = numbered_words(300)
    del words["w7"], words["w200"]
    tokenizer = word_tokenizer(words)
    gaps = "has gaps: 298 entries with ids up to 299"

    assert_refused(base("llama"), gaps, tokenizer=tokenizer, meta_token_id=None)
    assert len(tokenizer) == 298
