"""transformers' GPT-Neo as this package uses it: its own function, a loss at the labels, a meta-token, its folders."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTNeoConfig, GPTNeoForCausalLM, PreTrainedTokenizerFast

from metatokens.analysis.observation import observe
from metatokens.checkpoint import fetch_model, load_model, save_model
from metatokens.errors import UserError
from metatokens.model import gpt_neo
from metatokens.model.interventions import zero_positions
from tests.model.tiny_models import META, QUICK, pad, random_rows, randomize, tiny_config

TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "max_position_embeddings": 24}
LAYERS = {"attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 3}
NO_IDS = {"bos_token_id": None, "eos_token_id": None}


def published(**changes: Any) -> GPTNeoForCausalLM:
    """A random model of transformers' own class, with no meta-token, in float64."""
    model = GPTNeoForCausalLM(GPTNeoConfig(**(SIZES | LAYERS | NO_IDS | changes))).double().eval()
    randomize(model)
    return model


def ours(**changes: Any) -> tuple[gpt_neo.GPTNeoForCausalLM, GPTNeoForCausalLM]:
    """A model of this package's with the meta-token among its entries, and transformers' own of the same weights."""
    plain = published(**changes)
    model = gpt_neo.GPTNeoForCausalLM(GPTNeoConfig(**(SIZES | LAYERS | NO_IDS | changes), meta_token_id=META)).double()
    model.load_state_dict(plain.state_dict())
    return model.eval(), plain


# --- the function


def test_logits_and_states_are_those_of_transformers() -> None:
    model, plain = ours()
    ids, mask = pad(random_rows((20, 13, 7)))
    expected = plain(ids, attention_mask=mask)
    assert expected.logits.std() > 1  # wide enough to be a test
    assert torch.equal(model(ids, attention_mask=mask).logits, expected.logits)
    whole, keep = plain(ids), torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    states = model.model(ids, use_cache=False)
    assert torch.equal(model.lm_head(states.last_hidden_state), whole.logits)
    kept = model.model(ids, use_cache=False, keep=keep).last_hidden_state
    torch.testing.assert_close(model.lm_head(kept), whole.logits[keep])


def test_it_is_transformers_class_with_nothing_added_to_its_weights() -> None:
    model, plain = ours()
    assert isinstance(model, GPTNeoForCausalLM)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert (model.config.position_embedding, model.config.meta_token_id) == ("learned", META)


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """A ragged batch, labels -100 at padding, at the meta-tokens and in most of the last row."""
    ids, mask = pad(random_rows((20, 9, 15)), "right")
    labels = ids.masked_fill((mask == 0) | (ids == META), -100)
    labels[2, :12] = -100
    return {"input_ids": ids, "labels": labels}


def cross_entropy_in_full(logits: Tensor, labels: Tensor) -> Tensor:
    """Minus log probability of every label but a first one."""
    log_probabilities = logits.log_softmax(dim=-1)
    scored = [(i, t) for i, t in (labels != -100).nonzero().tolist() if t > 0]
    return torch.stack([-log_probabilities[i, t - 1, labels[i, t]] for i, t in scored])


@pytest.mark.parametrize("items", [None, 37])
def test_the_loss_in_training_is_the_full_cross_entropy(batch: dict[str, Tensor], items: int | None) -> None:
    model, plain = ours()
    losses = cross_entropy_in_full(plain(batch["input_ids"]).logits, batch["labels"])
    expected = losses.mean() if items is None else losses.sum() / items
    expected.backward()
    output = model.train()(**batch, **({} if items is None else {"num_items_in_batch": torch.tensor(items)}))
    output.loss.backward()
    assert output.logits.shape == (len(losses), 64)
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-5)  # transformers computes it in float32
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad - theirs[name].grad).abs().max() < 1e-5, name
    in_evaluation = model.eval()(**batch)
    assert in_evaluation.logits.shape == (3, 20, 64)
    assert in_evaluation.loss.item() == pytest.approx(losses.mean().item(), abs=1e-5)


def test_positions_with_gaps_stay_one_sequence(batch: dict[str, Tensor]) -> None:
    model, plain = ours()
    positions = torch.arange(24)[torch.arange(24) % 6 != 2]  # 20 of them, ascending
    with torch.no_grad():  # the table that numbers such a sequence from 0
        plain.transformer.wpe.weight[:20] = plain.transformer.wpe.weight[positions].clone()
    expected = cross_entropy_in_full(plain(batch["input_ids"]).logits, batch["labels"]).mean().item()
    loss = model.train()(**batch, position_ids=positions.expand(3, 20)).loss
    assert loss.item() == pytest.approx(expected, abs=1e-5)


def test_it_generates_what_it_finds_likeliest_but_no_meta_token() -> None:
    model, plain = ours()
    with torch.no_grad():
        for one in (model, plain):
            one.transformer.wte.weight[META] *= 4
    prompt = ids = torch.tensor(random_rows((6, 6)))
    wanted = 0
    for _ in range(12):
        logits = plain(ids).logits[:, -1]
        wanted += int((logits.argmax(dim=-1) == META).sum())
        logits[:, META] = -math.inf
        ids = torch.cat([ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    assert wanted  # which it would have given
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    assert torch.equal(generated, ids)
    with pytest.raises(UserError, match="a gpt_neo generates without meta-tokens"):
        model.generate(prompt, meta_every=4)


def test_padding_on_the_left_changes_nothing_that_it_generates() -> None:
    model, plain = ours()
    ids, mask = pad([[token for token in row if token != META] for row in random_rows((9, 5))], side="left")
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(ids, suppress_tokens=[META], **options)
    assert torch.equal(model.generate(ids, **options), expected)


def test_without_a_meta_token_nothing_is_suppressed() -> None:
    model, plain = ours()
    model.config.meta_token_id = None
    prompt = torch.tensor(random_rows((6,)))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


# --- a new one


@pytest.mark.parametrize(
    ("layers", "kinds"), [(1, ["global"]), (2, ["global", "local"]), (5, ["global", "local"] * 2 + ["global"])]
)
def test_a_new_one_has_the_sizes_asked_for_and_every_second_layer_local(layers: int, kinds: list[str]) -> None:
    shared = {"num_hidden_layers": layers, "intermediate_size": 40, "layer_norm_epsilon": 1e-3}
    config = tiny_config(position_embedding="learned", second_attention="none", activation="relu", **shared)
    model = gpt_neo.GPTNeoForCausalLM.like(config)
    assert [block.attn.attention_type for block in model.transformer.h] == kinds
    assert (model.config.window_size, model.config.meta_token_id) == (256, META)
    assert (model.config.activation_function, model.config.layer_norm_epsilon) == ("relu", 1e-3)
    assert model.transformer.wte.weight.shape == (64, 32)
    assert model.transformer.wpe.weight.shape == (48, 32)
    assert model.transformer.h[0].mlp.c_fc.weight.shape == (40, 32)
    assert model.transformer.wte.weight.std().item() == pytest.approx(config.initializer_range, rel=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"position_embedding": "rope", "second_attention": "none"},
        {"position_embedding": "none", "second_attention": "none"},
        {"position_embedding": "learned", "second_attention": "causal"},
        {"position_embedding": "learned"},
    ],
)
def test_what_it_lacks_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"set model\.position_embedding=learned, model.second_attention=none"):
        gpt_neo.GPTNeoForCausalLM.like(tiny_config(**changes))


# --- folders


@pytest.mark.parametrize("tied", [True, False])
def test_a_published_checkpoint_gets_a_meta_token_and_keeps_its_logits(tmp_path: Path, tied: bool) -> None:
    plain = published(vocab_size=61, tie_word_embeddings=tied)
    plain.save_pretrained(tmp_path)
    model, ids = load_model(tmp_path), torch.tensor(random_rows((20, 20))) % 61
    assert type(model) is gpt_neo.GPTNeoForCausalLM
    assert (model.config.vocab_size, model.config.meta_token_id, model.training) == (62, 61, False)
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    logits, before = model(ids).logits, plain(ids).logits
    torch.testing.assert_close(logits[..., :61], before)
    torch.testing.assert_close(logits[..., 61], before.mean(dim=-1))
    torch.testing.assert_close(model.transformer.wte.weight[61], plain.transformer.wte.weight.mean(dim=0))
    save_model(model, TOKENIZER, tmp_path)
    again = load_model(tmp_path)  # has one already
    assert (again.config.vocab_size, again.config.meta_token_id) == (62, 61)
    assert torch.equal(again(ids).logits, logits)


@QUICK
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=20))
def test_the_average_logit_takes_no_more_than_an_average_share(logits: list[float]) -> None:
    before = torch.tensor(logits, dtype=torch.float64)
    after = torch.cat([before, before.mean()[None]])
    growth = before.log_softmax(dim=0) - after.log_softmax(dim=0)[:-1]
    assert growth.max() <= math.log(1 + 1 / len(logits)) + 1e-12


def test_masks_in_an_old_file_are_passed_over_and_other_tensors_are_not(tmp_path: Path) -> None:
    plain = published()
    plain.save_pretrained(tmp_path)
    weights, file = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    old = {f"transformer.h.{i}.attn.attention.masked_bias": torch.tensor(-1e9) for i in range(3)}
    old |= {f"transformer.h.{i}.attn.attention.bias": torch.zeros(1, 1, 24, 24, dtype=torch.uint8) for i in range(3)}
    save_file(weights | old, file, metadata={"format": "pt"})
    ids = torch.tensor(random_rows((20,))) % 64
    torch.testing.assert_close(load_model(tmp_path)(ids).logits[..., :64], plain(ids).logits)
    save_file(
        weights | {"transformer.h.0.attn.attention.q_proj.bias": torch.zeros(32)}, file, metadata={"format": "pt"}
    )
    with pytest.raises(
        UserError, match=r"do not fit its configuration: see transformer\.h\.0\.attn\.attention\.q_proj\.bias"
    ):
        load_model(tmp_path)


def test_a_saved_one_comes_back_and_transformers_reads_it_too(tmp_path: Path) -> None:
    model, plain = ours()
    save_model(model, TOKENIZER, tmp_path)
    ids = torch.tensor(random_rows((20, 20)))
    assert torch.equal(load_model(tmp_path)(ids).logits, plain(ids).logits)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("gpt_neo", ["GPTNeoForCausalLM"])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs) is GPTNeoForCausalLM
    assert torch.equal(theirs(ids).logits, plain(ids).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meta_token_id": 64}, "meta_token_id 64 is outside the vocabulary of 64"),
        ({"meta_token_id": -1}, "meta_token_id -1 is outside the vocabulary of 64"),
        ({"num_layers": 2}, "config.json is not a model configuration"),
        ({"num_heads": 5}, "embed_dim must be divisible by num_heads"),
        ({"activation_function": "step"}, "the weights in .* cannot be read: .*step"),
        ({"attention_layers": ["global", "sparse", "local"]}, "Only attn layer types 'global' and 'local' exist"),
        ({"max_position_embeddings": 25}, "the weights in .* cannot be read|do not fit"),
    ],
)
def test_a_folder_that_is_damaged_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    published().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=message) as refusal:
        load_model(tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_model_of_the_hub_is_fetched_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metatokens.checkpoint.snapshot_download", lambda name, **_: str(tmp_path / name))
    assert fetch_model(Path("hf:EleutherAI/gpt-neo-125m")) == tmp_path / "EleutherAI" / "gpt-neo-125m"
    assert fetch_model(Path("EleutherAI/gpt-neo-125m")) == Path("EleutherAI/gpt-neo-125m")


@pytest.mark.parametrize("name", ["", "a/b/c", "nobody/nothing"])
def test_a_model_that_the_hub_does_not_give_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"the Hugging Face Hub gave no model '{name}': ") as refusal:
        fetch_model(Path(f"hf:{name}"))
    assert "\n" not in str(refusal.value)


# --- what it cannot do


@pytest.mark.parametrize(
    "use",
    [
        lambda model, ids: model(ids),
        lambda model, ids: model.train()(ids, labels=ids),
        lambda model, ids: model.model(ids, use_cache=False),
        lambda model, ids: model.generate(ids[:, :20], max_new_tokens=8, do_sample=False),
    ],
)
def test_sequences_beyond_its_positions_are_refused(use: Callable[..., Any]) -> None:
    model, _ = ours()
    with pytest.raises(UserError, match="a sequence of 25 tokens is longer than the 24 learned positions"):
        use(model, torch.tensor(random_rows((25,))))


def test_interventions_and_analyses_are_refused() -> None:
    model, _ = ours()
    with pytest.raises(UserError, match="is for this package's own models"), zero_positions(model):
        pass
    with pytest.raises(UserError, match="a GPTNeoForCausalLM computes its attention itself"):
        observe(model, torch.tensor([1, META, 2]))


def test_what_a_user_suppresses_comes_on_top_of_the_meta_token() -> None:
    model, _ = ours()
    with torch.no_grad():
        model.lm_head.weight[META] = 100 * model.transformer.ln_f.bias
        model.lm_head.weight[7] = 99 * model.transformer.ln_f.bias
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert (model.generate(torch.tensor([[1, 2]]), **options)[:, 2:] == 7).all()
    out = model.generate(torch.tensor([[1, 2]]), suppress_tokens=[7], **options)[:, 2:]
    assert not torch.isin(out, torch.tensor([7, META])).any()
