"""The Auto classes on the folder of a retrofitted model: each has meta-attention, or refuses."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
)
from transformers.utils import PushToHubMixin

from metatokens import add_meta_attention
from metatokens.errors import UserError
from tests.retrofit.architectures import (
    META,
    base,
    fails_in,
    logits,
    retrofitted,
    shared,
    with_meta_tokens,
)

LLAMA4_FAILS = (
    "Llama 4 with images reads an output that there is not: an AttributeError in each pass"
)


@pytest.mark.quick(name=["gemma3", "llava:multimodal"])
@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        fails_in("5.24.0", "llama4:multimodal", why=LLAMA4_FAILS),
        "qwen2_vl:multimodal",
        "llava:multimodal",
    ],
)
def test_a_model_of_text_and_images(name: str, tmp_path: Path) -> None:
    model, ids = retrofitted(name), with_meta_tokens()
    model.save_pretrained(tmp_path)
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        loaded = auto.from_pretrained(tmp_path).eval()
        assert type(loaded) is type(model)
        assert torch.equal(logits(loaded, ids), logits(model, ids))


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("llama", AutoModel),
        ("llama", AutoModelForSequenceClassification),
        ("bart", AutoModelForSeq2SeqLM),  # runs an encoder too
    ],
)
def test_other_classes_are_refused(name: str, auto: Any, tmp_path: Path) -> None:
    model, ids = shared(name), with_meta_tokens()
    model.save_pretrained(tmp_path)
    refusal = "no class with meta-attention for the model; load it by AutoModelForCausalLM"

    with pytest.raises(UserError, match=refusal):
        auto.from_pretrained(tmp_path)
    with pytest.raises(UserError, match=refusal):
        auto.from_config(model.config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert (loaded(ids).logits[..., META] == -1e4).all()


def test_weights_that_lack_what_was_added_are_refused(tmp_path: Path) -> None:
    retrofitted("llama").save_pretrained(tmp_path)
    save_file(base("llama").state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="the weights lack what was added to the Llama"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


class OwnLlama(LlamaForCausalLM):
    """A base of the user's own class."""


def test_the_users_own_class_is_named_and_hides_no_class_of_transformers(tmp_path: Path) -> None:
    model = retrofitted("llama")
    model.save_pretrained(tmp_path / "llama")
    with pytest.warns(UserWarning, match="OwnLlama is no class of transformers"):
        add_meta_attention(OwnLlama(base("llama").config), meta_token_id=META)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "llama")) is type(model)


def test_a_decoder_saved_alone_is_no_language_model(tmp_path: Path) -> None:
    model = retrofitted("llama")
    model.model.save_pretrained(tmp_path / "decoder")
    model.save_pretrained(tmp_path / "whole")
    with pytest.raises(UserError, match="name no retrofitted model that metatokens supports"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "decoder")
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole")


def test_the_forward_survives_an_accelerator_that_unwraps_it() -> None:
    model, ids = retrofitted("llama"), with_meta_tokens()
    assert list(signature(model.forward).parameters) == list(
        signature(base("llama").forward).parameters
    )
    assert not hasattr(model.forward, "__wrapped__")
    assert model(ids, labels=ids).loss < 20  # no meta-token counts


def test_a_pushed_model_is_named_after_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = retrofitted("llama")

    def push(self: Any, repo_id: str) -> str:
        self.save_pretrained(tmp_path / "temporary")
        return "commit"

    monkeypatch.setattr(PushToHubMixin, "push_to_hub", push)
    assert model.push_to_hub("me/model") == "commit"
    assert model.config.name_or_path == model.name_or_path == "me/model"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "temporary")
    loaded.push_to_hub("me/other")
    assert loaded.name_or_path == str(tmp_path / "temporary")
