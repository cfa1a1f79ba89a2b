"""Folders of models: written and read back, in shards, cut short, damaged, or not models at all."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    PreTrainedTokenizerFast,
)

from metatokens import MetaGPT2ForCausalLM
from metatokens.checkpoint import (
    MANIFEST,
    fetch_model,
    load_base,
    load_model,
    save_model,
    verify_manifest,
    weights_sha256,
    with_its_base,
    write_manifest,
)
from metatokens.errors import UserError
from tests.model.tiny_models import (
    VARIANTS,
    random_rows,
    shared_model,
    tiny_config,
    tiny_model,
)
from tests.numbers import ROUNDED_DOUBLE

IDS = torch.tensor(random_rows((10, 10)))
BACKEND = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=BACKEND)
WEIGHTS = "model.safetensors"


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with its manifest."""
    save_model(shared_model(), TOKENIZER, tmp_path)
    return tmp_path


@pytest.fixture
def unsealed(saved):
    """A checkpoint without a manifest, as transformers writes it."""
    (saved / MANIFEST).unlink()
    return saved


def flip(path, position, bit=0):
    """Damage a file: change one bit."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@VARIANTS
def test_a_model_comes_back_as_it_was(fields, tmp_path):
    model = shared_model(**fields)
    save_model(model, TOKENIZER, tmp_path)

    loaded = load_model(str(tmp_path))

    assert type(loaded) is MetaGPT2ForCausalLM
    assert not loaded.training
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    weights = loaded.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight)
    # Loaded weights lie elsewhere in memory, and some processors round by that. transformers computes rotary
    # frequencies in float32 when it loads; the shared model's are rounded to that as well.
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=ROUNDED_DOUBLE)
    added_by_saving = {"architectures": None, "dtype": None, "_name_or_path": None}
    assert loaded.config.to_dict() | added_by_saving == model.config.to_dict() | added_by_saving


def test_weights_have_a_checksum(saved, tmp_path_factory):
    equal, other = tmp_path_factory.mktemp("equal"), tmp_path_factory.mktemp("other")
    save_model(shared_model(), TOKENIZER, equal)
    save_model(tiny_model(seed=1), TOKENIZER, other)

    assert weights_sha256(saved) == weights_sha256(equal) != weights_sha256(other)
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        weights_sha256(other / "nowhere")


# --- weights in several files


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint as transformers writes that of a large model, next to one of the same model in one file."""
    model = MetaGPT2ForCausalLM(tiny_config(vocab_size=512))
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(shards_in(tmp_path / "sharded")) > 1
    return tmp_path / "sharded"


def shards_in(folder):
    return sorted(folder.glob("model-*-of-*.safetensors"))


def test_shards_are_one_model(sharded):
    whole = load_model(sharded.parent / "whole")

    assert torch.equal(load_model(sharded)(IDS).logits, whole(IDS).logits)
    write_manifest(sharded)
    assert torch.equal(load_model(sharded)(IDS).logits, whole(IDS).logits)


def test_shards_go_before_a_delta_in_the_same_folder(sharded):
    alone = weights_sha256(sharded)
    (sharded / "meta_tokens.json").write_text("{}")
    (sharded / "meta_tokens.safetensors").write_bytes(b"")

    load_model(sharded)
    assert weights_sha256(sharded) == alone
    assert with_its_base(sharded) == [sharded]


def test_a_damaged_shard_is_named(sharded):
    before = weights_sha256(sharded)
    write_manifest(sharded)
    last = shards_in(sharded)[-1]

    flip(last, -1)

    assert weights_sha256(sharded) != before
    with pytest.raises(UserError, match=f"{last.name} is damaged"):
        load_model(sharded)


@pytest.mark.parametrize("read", [load_model, weights_sha256])
def test_a_missing_shard_is_named(read, sharded):
    first = shards_in(sharded)[0]
    first.unlink()

    with pytest.raises(
        UserError,
        match=f"are not complete: there is no {first.name}, which model.safetensors.index",
    ):
        read(sharded)


def index_of(name):
    """An index with this name of a file."""
    return json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}})


@pytest.mark.parametrize(
    "content",
    [
        index_of("../whole/model.safetensors"),
        index_of("pytorch_model.bin"),
        index_of("a\0b"),
        index_of(3),
        "{",
        "[]",
        '{"weight_map": []}',
        "[" * 99_999,
    ],
    ids=[
        "outside",
        "a pickle",
        "no name",
        "a number",
        "cut",
        "a list",
        "a list of weights",
        "deep",
    ],
)
def test_an_index_that_names_no_shards_of_its_folder_is_refused(sharded, content):
    torch.save({}, sharded / "pytorch_model.bin")
    (sharded / "model.safetensors.index.json").write_text(content)

    with pytest.raises(
        UserError,
        match=r"are not complete: there is no|does not name the files of the weights",
    ):
        load_model(sharded)


def test_shards_are_fetched_and_pickles_are_not(monkeypatch, sharded):
    for name in ("chat_template.jinja", "tokenizer.model", "pytorch_model.bin"):
        (sharded / name).write_bytes(b"")
    names = {path.name for path in sharded.iterdir()}

    def fetched(name, **patterns):
        assert set(filter_repo_objects(names, **patterns)) == names - {"pytorch_model.bin"}
        return str(sharded)

    monkeypatch.setattr("metatokens.checkpoint.snapshot_download", fetched)

    assert fetch_model(Path("hf:someone/large")) == sharded


ROPE_OF_4 = {  # as transformers 4 wrote them: of Llama 3.1, of Qwen2, of Phi-2 and of GPT-NeoX
    "llama": {
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"rope_theta": 1_000_000.0},
    "phi": {"rope_theta": 5000.0, "partial_rotary_factor": 0.25},
    "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 700},
}


@pytest.mark.filterwarnings("ignore:.*rope:FutureWarning")  # transformers' own
@pytest.mark.parametrize("kind", ROPE_OF_4)
def test_rotary_positions_as_older_releases_wrote_them(kind, tmp_path):
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    if kind != "gpt_neox":
        sizes["num_key_value_heads"] = 2
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, vocab_size=99, **sizes)
    ).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | ROPE_OF_4[kind]))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(90)[None]

    model = load_base(tmp_path)

    assert expected.config.rope_parameters["rope_theta"] == ROPE_OF_4[kind].get("rope_theta", 700)
    assert model.config.rope_parameters == expected.config.rope_parameters
    assert torch.equal(model(ids).logits, expected(ids).logits)


# --- folders of models


# --- complete or not


def test_a_save_that_is_cut_off_is_not_taken_for_complete(saved, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TOKENIZER, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_model(tiny_model(seed=1), TOKENIZER, saved)
    with pytest.raises(UserError, match=r"missing or damaged, so .* may not be complete"):
        verify_manifest(saved)

    # What a crash while the manifest was written leaves.
    (saved / (MANIFEST + ".partial")).write_text("{")
    save_model(tiny_model(seed=1), TOKENIZER, saved)

    load_model(saved)
    assert not (saved / (MANIFEST + ".partial")).exists()


@settings(
    deadline=None,
    max_examples=settings.default.max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_flipped_bit_is_noticed(saved, data):
    path = data.draw(st.sampled_from(sorted(saved.iterdir())))
    good = path.read_bytes()
    flip(path, data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7)))

    try:
        with pytest.raises(UserError, match=r"damaged|missing") as caught:
            load_model(saved)
    finally:
        path.write_bytes(good)

    sentence = str(caught.value)
    # It may have got another file's name wrong.
    is_misnamed = path.name == MANIFEST and "missing" in sentence
    assert path.name in sentence or is_misnamed


@pytest.mark.parametrize("content", ["", "{", "[]", '{"sha256": []}', '{"md5": {}}'])
def test_a_manifest_that_is_none_is_refused(saved, content):
    (saved / MANIFEST).write_text(content)

    with pytest.raises(UserError, match="missing or damaged"):
        load_model(saved)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "meta_gpt3"}, "config.json cannot be used"),
        (
            {"model_type": "gemma3"},
            "holds a gemma3 model, which takes more than text: load it by transformers",
        ),
        (
            {"hidden_size": 30},
            "config.json cannot be used: .*hidden_size has to be a multiple",
        ),
        (
            {"position_embedding": "sinusoidal"},
            "config.json cannot be used: .*position_embedding",
        ),
        ({"second_attention": "dense"}, "config.json cannot be used: .*second_attention"),
        ({"vocab_size": 128}, "the weights in .* cannot be read|do not fit"),
        ({"num_hidden_layers": 3}, "do not fit its configuration: see model.layers.2"),
        ({"num_hidden_layers": 1}, "do not fit its configuration: see model.layers.1"),
        (
            {"second_attention": "none"},
            "do not fit its configuration: see .*second_attention",
        ),
    ],
    ids=str,
)
def test_a_configuration_that_is_of_another_model_is_refused(unsealed, fields, message):
    change_config(unsealed, **fields)

    with pytest.raises(UserError, match=message) as refusal:
        load_model(unsealed)

    assert "\n" not in str(refusal.value)


def no_folder(folder):
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def no_json(folder):
    (folder / "config.json").write_text("{")


def no_weights(folder):
    (folder / WEIGHTS).unlink()


def no_decoder(folder):
    BertConfig(hidden_size=32, num_attention_heads=4).save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_folder, "there is no model in"),
        (no_json, "config.json cannot be used"),
        (no_weights, "weights in .* cannot be read"),
        (no_decoder, "holds a bert model, which is no decoder"),
    ],
)
def test_what_is_no_model_is_refused(unsealed, damage, message):
    damage(unsealed)

    with pytest.raises(UserError, match=message) as refusal:
        load_model(unsealed)

    assert "\n" not in str(refusal.value)


# --- models of the Hub


def test_a_model_of_the_hub_is_fetched_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "metatokens.checkpoint.snapshot_download",
        lambda name, **_: str(tmp_path / name),
    )

    assert (
        fetch_model(Path("hf:EleutherAI/gpt-neo-125m")) == tmp_path / "EleutherAI" / "gpt-neo-125m"
    )
    for folder in (Path("EleutherAI/gpt-neo-125m"), Path("example:mistyped")):
        assert fetch_model(folder) == folder


@pytest.mark.parametrize("name", ["", "nobody/nothing"])
def test_a_model_that_the_hub_does_not_give_is_refused(name):
    with pytest.raises(
        UserError, match=f"the Hugging Face Hub gave no model '{name}': "
    ) as refusal:
        fetch_model(Path(f"hf:{name}"))

    assert "\n" not in str(refusal.value)
