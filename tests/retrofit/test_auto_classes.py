"""The Auto classes on the folder of a retrofitted model: each has meta-attention, or refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

from metatokens import add_meta_attention, freeze_base
from metatokens.data.tokenizer import load_tokenizer
from metatokens.errors import UserError
from tests.model.agreement import gradients_of
from tests.retrofit.architectures import (
    CORPUS,
    META,
    base,
    fails_in,
    logits,
    retrofitted,
    shared,
    train_like,
    with_meta_tokens,
)

LLAMA4_FAILS = (
    "Llama 4 with images reads an output that there is not: an AttributeError in each pass"
)
WITH_ANOTHER_HEAD = pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("llama", AutoModel),
        ("llama", AutoModelForSequenceClassification),
        ("gpt2", AutoModelForQuestionAnswering),
        ("bloom", AutoModelForTokenClassification),
        ("gemma3_text", AutoModelForSequenceClassification),
    ],
)


@torch.no_grad()
def states_of(model: PreTrainedModel) -> Tensor:
    """The states after the last block and its norm."""
    body = getattr(model, model.base_model_prefix, model)
    return body(with_meta_tokens(), use_cache=False).last_hidden_state


@WITH_ANOTHER_HEAD
def test_a_decoder_without_its_head_or_with_another(name: str, auto: Any, tmp_path: Path) -> None:
    model = retrofitted(name)
    model.save_pretrained(tmp_path / "model")
    loaded, report = auto.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any("meta" in key for key in (*report["missing_keys"], *report["unexpected_keys"]))
    assert torch.equal(states_of(loaded.eval()), states_of(model))

    loaded.save_pretrained(tmp_path / "again")
    again = auto.from_pretrained(tmp_path / "again").eval()
    assert type(again) is type(loaded)
    assert again.config.architectures == [f"MetaTokens{type(loaded).__name__}"]
    for key, weight in loaded.state_dict().items():
        assert torch.equal(again.state_dict()[key], weight), key
    decoder = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(states_of(decoder), states_of(model))
    assert "meta_attention" in str(auto.from_config(model.config))


@WITH_ANOTHER_HEAD
def test_a_new_head_is_trained_with_what_was_added(name: str, auto: Any, tmp_path: Path) -> None:
    retrofitted(name).save_pretrained(tmp_path)
    model = auto.from_pretrained(tmp_path)
    freeze_base(model)
    for weight_name, weight in model.named_parameters():
        is_head = weight_name.split(".")[0] in ("score", "classifier", "qa_outputs")
        is_added = "meta_attention" in weight_name or "meta_token" in weight_name
        assert weight.requires_grad == (is_head or is_added), weight_name


def test_the_pipeline_of_features(tmp_path: Path) -> None:
    trained = load_tokenizer("train:300", corpus=CORPUS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained.backend_tokenizer, eos_token="<|endoftext|>"
    )
    model = train_like(add_meta_attention(base("llama"), tokenizer, heads=2, head_size=16))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = f"the cat{tokenizer.meta_token} sat on{tokenizer.meta_token} a mat"
    with torch.no_grad():
        expected = model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state

    features = pipeline("feature-extraction", model=str(tmp_path), return_tensors=True)

    torch.testing.assert_close(features(text), expected)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
def test_adapters_of_peft_for_classes_of_texts(tmp_path: Path) -> None:
    retrofitted("llama").save_pretrained(tmp_path / "model")
    ids, parts = with_meta_tokens(), ["meta_attention", "meta_token", "score"]
    plain, other = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=3)
        for _ in range(2)
    )
    lora = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], modules_to_save=parts)
    adapted = get_peft_model(plain, lora)

    adapted(ids, labels=torch.tensor([0, 2])).loss.backward()
    torch.optim.SGD(adapted.parameters(), lr=0.01).step()

    gradients = gradients_of(adapted)
    for part in ("lora_B", "out_proj", "meta_token", "score"):
        assert any(part in name and gradient.any() for name, gradient in gradients.items()), part
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(other, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, adapted.eval()(ids).logits)


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
    body = AutoModel.from_pretrained(tmp_path).eval()
    # In Llama 4 the body is the whole model.
    expected = model if type(body) is type(model) else model.base_model
    with torch.no_grad():
        assert torch.equal(body(ids, use_cache=False)[0], expected(ids, use_cache=False)[0])


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("bart", AutoModel),  # runs an encoder too
        ("bart", AutoModelForSeq2SeqLM),
        # It takes the text part of the configuration.
        fails_in("5.24.0", "llama4:multimodal", AutoModelForTextEncoding, why=LLAMA4_FAILS),
    ],
)
def test_what_cannot_have_it_is_refused(name: str, auto: Any, tmp_path: Path) -> None:
    model, ids = shared(name), with_meta_tokens()
    model.save_pretrained(tmp_path)
    refusal = "no class with meta-attention for the model; load it as a language model"

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
    for auto in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(UserError, match="the weights lack what was added to the Llama"):
            auto.from_pretrained(tmp_path)
