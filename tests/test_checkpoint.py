"""Folders of models: written and read back, in shards, cut short, damaged, or not models at all."""

import json
import shutil
from collections.abc import Callable
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
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from metatokens import MetaGPT2ForCausalLM, add_meta_attention
from metatokens.checkpoint import (
    MANIFEST,
    fetch_model,
    load_base,
    load_model,
    save_model,
    verify_manifest,
    weights_sha256,
    write_manifest,
)
from metatokens.errors import UserError
from tests.model.tiny_models import VARIANTS, Fields, random_rows, shared_model, tiny_config, tiny_model
from tests.numbers import ROUNDED_DOUBLE

IDS = torch.tensor(random_rows((10, 10)))
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
WEIGHTS = "model.safetensors"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with its manifest."""
    save_model(shared_model(), TOKENIZER, tmp_path)
    return tmp_path


@pytest.fixture
def unsealed(saved: Path) -> Path:
    """A checkpoint without a manifest, as transformers writes it."""
    (saved / MANIFEST).unlink()
    return saved


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Damage a file: change one bit."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@VARIANTS
def test_a_model_comes_back_as_it_was(fields: Fields, tmp_path: Path) -> None:
    model = shared_model(**fields)
    save_model(model, TOKENIZER, tmp_path)
    loaded = load_model(str(tmp_path))
    assert type(loaded) is MetaGPT2ForCausalLM
    assert not loaded.training
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
    # Loaded weights lie elsewhere in memory, and some processors round by that. transformers computes rotary
    # frequencies in float32 when it loads; the shared model's are rounded to that as well.
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=ROUNDED_DOUBLE)
    saved, kept = loaded.config.to_dict(), model.config.to_dict()
    for field in ("architectures", "dtype", "_name_or_path"):  # what saving itself adds
        saved.pop(field, None), kept.pop(field, None)
    assert saved == kept


def test_a_gpt2_folder_is_converted(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=4, bos_token_id=None, eos_token_id=None)
    gpt2 = GPT2LMHeadModel(config).eval()
    gpt2.save_pretrained(tmp_path)
    for second_attention in (None, "meta"):
        model = load_model(tmp_path, second_attention)
        assert model.config.second_attention == (second_attention or "none")
        ids = IDS % 60
        assert (model(ids).logits[..., :60] - gpt2(ids).logits).abs().max() < 1e-5


def test_a_retrofitted_gpt2_stays_one(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=4, bos_token_id=None, eos_token_id=None)
    model = add_meta_attention(GPT2LMHeadModel(config), meta_token_id=59, heads=2, head_size=8).eval()
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config.meta_token_id == 59
    assert torch.equal(loaded(IDS % 60).logits, model(IDS % 60).logits)


def test_weights_have_a_checksum(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    save_model(shared_model(), TOKENIZER, other)
    assert weights_sha256(saved) == weights_sha256(other)
    save_model(tiny_model(seed=1), TOKENIZER, other)
    assert weights_sha256(saved) != weights_sha256(other)
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        weights_sha256(other / "nowhere")


# --- weights in several files


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint as transformers writes that of a large model."""
    folder = tmp_path / "sharded"
    model = MetaGPT2ForCausalLM(tiny_config(vocab_size=512))
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    assert not (folder / WEIGHTS).exists()
    model.save_pretrained(tmp_path / "whole")
    return folder


def test_shards_are_one_model(sharded: Path) -> None:
    whole = load_model(sharded.parent / "whole")
    assert torch.equal(load_model(sharded)(IDS).logits, whole(IDS).logits)
    before = weights_sha256(sharded)
    assert before != weights_sha256(sharded.parent / "whole")
    write_manifest(sharded)
    assert torch.equal(load_model(sharded)(IDS).logits, whole(IDS).logits)
    last = sorted(sharded.glob("model-*.safetensors"))[-1]
    flip(last, -1)
    assert weights_sha256(sharded) != before
    with pytest.raises(UserError, match=f"{last.name} is damaged"):
        load_model(sharded)


def test_shards_are_fetched(monkeypatch: pytest.MonkeyPatch, sharded: Path) -> None:
    def fetched(name: str, **patterns: list[str]) -> str:
        taken = set(filter_repo_objects([path.name for path in sharded.iterdir()], **patterns))
        assert taken == {path.name for path in sharded.iterdir()} - {"pytorch_model.bin"}
        return str(sharded)

    for name in ("chat_template.jinja", "tokenizer.model", "pytorch_model.bin"):
        (sharded / name).write_bytes(b"")

    monkeypatch.setattr("metatokens.checkpoint.snapshot_download", fetched)
    assert fetch_model(Path("hf:someone/large")) == sharded


ROPE_OF_4 = {  # as transformers 4 wrote them: of Llama 3.1, of Qwen2, and of Phi-2
    "llama": {
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"rope_theta": 1_000_000.0},
    "phi": {"rope_theta": 5000.0, "partial_rotary_factor": 0.25},
    "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 700},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*rope:FutureWarning")  # transformers' own
@pytest.mark.parametrize("kind", ROPE_OF_4)
def test_rotary_positions_as_older_releases_wrote_them(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    sizes |= {} if kind == "gpt_neox" else {"num_key_value_heads": 2}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=99, **sizes)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | ROPE_OF_4[kind]))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    theta = ROPE_OF_4[kind].get("rope_theta", 700)
    assert expected.config.rope_parameters["rope_theta"] == theta
    read = load_base(tmp_path)
    assert read.config.rope_parameters == expected.config.rope_parameters
    ids = torch.arange(90)[None]
    assert torch.equal(read(ids).logits, expected(ids).logits)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    first = sorted(sharded.glob("model-*.safetensors"))[0]
    first.unlink()
    for read in (load_model, weights_sha256):
        with pytest.raises(UserError, match=f"are not complete: there is no {first.name}, which model.safetensors.ind"):
            read(sharded)


def named(name: object) -> str:
    """An index with this name of a file."""
    return json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}})


@pytest.mark.parametrize(
    "content",
    [named(name) for name in ("../whole/model.safetensors", "pytorch_model.bin", "", "a\0b", 3)]
    + ["", "{", "[]", '{"weight_map": []}', '{"weight_map": {"a": ["b"]}}', "[" * 99_999],
)
def test_an_index_that_names_no_shards_of_its_folder_is_refused(sharded: Path, content: str) -> None:
    torch.save({}, sharded / "pytorch_model.bin")
    (sharded / "model.safetensors.index.json").write_text(content)
    for read in (load_model, weights_sha256):
        with pytest.raises(UserError, match=r"are not complete: there is no|does not name the files of the weights"):
            read(sharded)


# --- folders of models


def test_the_nearest_models_below_a_folder_are_named(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path_factory.mktemp("run")
    with pytest.raises(UserError, match=r"it has no config\.json\.$"):
        load_model(run)
    for name in ("64", "data", "512", "128"):
        shutil.copytree(saved, run / name)
    with pytest.raises(UserError) as caught:
        load_model(run)
    assert str(caught.value).endswith(f"no config.json; there are models in {run}/128, {run}/512, {run}/64.")


# --- complete or not


def test_a_save_that_is_cut_off_is_not_taken_for_complete(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TOKENIZER, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_model(tiny_model(seed=1), TOKENIZER, saved)
    with pytest.raises(UserError, match=r"missing or damaged, so .* may not be complete"):
        verify_manifest(saved)
    (saved / (MANIFEST + ".partial")).write_text("{")  # what a crash while the manifest was written leaves
    save_model(tiny_model(seed=1), TOKENIZER, saved)
    load_model(saved)
    assert not (saved / (MANIFEST + ".partial")).exists()


@settings(
    deadline=None,
    max_examples=settings.default.max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_flipped_bit_is_noticed(saved: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(saved.iterdir())))
    whole = path.read_bytes()
    flip(path, data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7)))
    try:
        with pytest.raises(UserError, match=r"damaged|missing") as caught:
            load_model(saved)
        # A manifest may have got another file's name wrong.
        assert path.name in str(caught.value) or (path.name == MANIFEST and "missing" in str(caught.value))
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"sha256": []}', '{"sha256": null}', '{"md5": {}}'])
def test_a_manifest_that_is_none_is_refused(saved: Path, content: str) -> None:
    (saved / MANIFEST).write_text(content)
    with pytest.raises(UserError, match="missing or damaged"):
        load_model(saved)


def file_for_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def config(**overrides: object) -> Callable[[Path], None]:
    """Change fields of config.json."""

    def change(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | overrides))

    return change


def config_text(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(content) and None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "there is no model in .*: it has no config.json"),
        (file_for_folder, "there is no model in"),
        (lambda folder: (folder / "config.json").unlink(), "there is no model in"),
        (lambda folder: (folder / WEIGHTS).unlink(), "weights in .* cannot be read"),
        (BertConfig(hidden_size=32, num_attention_heads=4).save_pretrained, "holds a bert model, which is no decoder"),
        (lambda folder: flip(folder / WEIGHTS, 12), "weights in .* cannot be read"),
        (config_text("{"), "config.json is not a model configuration"),
        (config_text("[]"), "config.json is not a model configuration"),
        (config_text("{}"), "config.json is not a model configuration"),
        (config(model_type="meta_gpt3"), "config.json is not a model configuration"),
        (config(hidden_size=30), "not a model configuration: .*hidden_size 30 is not a multiple"),
        (config(position_embedding="sinusoidal"), "not a model configuration: .*position_embedding"),
        (config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "not a model configuration: .*factor"),
        (config(vocab_size=128), "the weights in .* cannot be read|do not fit"),
        (config(num_hidden_layers=3), "do not fit its configuration: see model.layers.2"),
        (config(num_hidden_layers=1), "do not fit its configuration: see model.layers.1"),
        (config(model_type="gemma3"), "holds a gemma3 model, which takes more than text: load it by transformers"),
        (config(second_attention="none"), "do not fit its configuration: see .*second_attention"),
    ],
)
def test_what_is_no_model_is_refused(unsealed: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(unsealed)
    with pytest.raises(UserError, match=message) as refusal:
        load_model(unsealed)
    assert "\n" not in str(refusal.value)


# --- models of the Hub


def test_a_model_of_the_hub_is_fetched_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metatokens.checkpoint.snapshot_download", lambda name, **_: str(tmp_path / name))
    assert fetch_model(Path("hf:EleutherAI/gpt-neo-125m")) == tmp_path / "EleutherAI" / "gpt-neo-125m"
    assert fetch_model(Path("EleutherAI/gpt-neo-125m")) == Path("EleutherAI/gpt-neo-125m")


@pytest.mark.parametrize("name", ["", "a/b/c", "nobody/nothing"])
def test_a_model_that_the_hub_does_not_give_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"the Hugging Face Hub gave no model '{name}': ") as refusal:
        fetch_model(Path(f"hf:{name}"))
    assert "\n" not in str(refusal.value)
