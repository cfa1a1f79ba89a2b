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
from tests.retrofit.architectures import (
    CORPUS,
    META,
    base,
    fails_in,
    logits,
    retrofitted,
    train_like,
    with_meta_tokens,
)

LLAMA4_FAILS = "Llama 4 with images reads an output that there is not: an AttributeError in each pass"

HEADS = {
    "llama": [AutoModelForSequenceClassification, AutoModelForTokenClassification],
    "gpt2": [AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering],
    "bloom": [AutoModelForSequenceClassification, AutoModelForTokenClassification],
    "gemma3_text": [AutoModelForSequenceClassification],
}


@torch.no_grad()
def hidden(model: PreTrainedModel) -> Tensor:
    """The states after the last block and its norm."""
    body = getattr(model, model.base_model_prefix, model)
    return body(with_meta_tokens(), use_cache=False).last_hidden_state


@pytest.mark.parametrize("name", HEADS)
def test_a_decoder_without_its_head_or_with_another(name: str, tmp_path: Path) -> None:
    model = retrofitted(name)
    model.save_pretrained(tmp_path / "model")
    for auto in (AutoModel, *HEADS[name]):
        loaded, report = auto.from_pretrained(tmp_path / "model", output_loading_info=True)
        assert not any("meta" in key for key in (*report["missing_keys"], *report["unexpected_keys"]))
        assert torch.equal(hidden(loaded.eval()), hidden(model))
        loaded.save_pretrained(tmp_path / "again")
        again = auto.from_pretrained(tmp_path / "again").eval()
        assert type(again) is type(loaded)
        assert again.config.architectures == [f"MetaTokens{type(loaded).__name__}"]
        for key, weight in loaded.state_dict().items():
            assert torch.equal(again.state_dict()[key], weight), key
        assert torch.equal(hidden(again), hidden(model))
        assert torch.equal(hidden(AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()), hidden(model))
        assert "meta_attention" in str(auto.from_config(model.config))


def test_the_pipeline_of_features(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("train:300", corpus=CORPUS)
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    model = train_like(add_meta_attention(base("llama"), plain, heads=2, head_size=16))
    model.save_pretrained(tmp_path)
    plain.save_pretrained(tmp_path)
    features = pipeline("feature-extraction", model=str(tmp_path), return_tensors=True)
    text = f"the cat{plain.meta_token} sat on{plain.meta_token} a mat"
    with torch.no_grad():
        expected = model.model(**plain(text, return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(features(text), expected)
    start = add_meta_attention(base("llama"), plain, heads=2, head_size=16)
    with torch.no_grad():
        assert not torch.equal(start.model(**plain(text, return_tensors="pt")).last_hidden_state, expected)


@pytest.mark.parametrize(("name", "auto"), [(name, auto) for name, autos in HEADS.items() for auto in autos])
def test_a_new_head_is_trained_with_what_was_added(name: str, auto: Any, tmp_path: Path) -> None:
    retrofitted(name).save_pretrained(tmp_path)
    model = auto.from_pretrained(tmp_path)
    freeze_base(model)
    trained = {one for one, parameter in model.named_parameters() if parameter.requires_grad}
    names = [one for one, _ in model.named_parameters()]
    heads = {one for one in names if one.split(".")[0] in ("score", "classifier", "qa_outputs")}
    assert len(heads) in (1, 2)
    assert trained == heads | {one for one in names if "meta_attention" in one or "meta_token" in one}
    body = AutoModel.from_pretrained(tmp_path)
    freeze_base(body)
    assert all("meta" in one for one, parameter in body.named_parameters() if parameter.requires_grad)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
def test_adapters_of_peft_for_classes_of_texts(tmp_path: Path) -> None:
    retrofitted("llama").save_pretrained(tmp_path / "model")
    load = AutoModelForSequenceClassification.from_pretrained
    lora = LoraConfig(
        task_type="SEQ_CLS", target_modules=["q_proj"], modules_to_save=["meta_attention", "meta_token", "score"]
    )
    torch.manual_seed(0)
    adapted = get_peft_model(load(tmp_path / "model", num_labels=3), lora)
    optimizer = torch.optim.SGD([one for one in adapted.parameters() if one.requires_grad], lr=0.01)
    before = {name: one.clone() for name, one in adapted.named_parameters()}
    adapted(with_meta_tokens(), labels=torch.tensor([0, 2])).loss.backward()
    optimizer.step()
    moved = {name for name, one in adapted.named_parameters() if not torch.equal(one, before[name])}
    for part in ("lora_B", "out_proj.modules_to_save", "meta_token.modules_to_save", "score.modules_to_save"):
        assert any(all(piece in name for piece in part.split(".")) for name in moved), part
    adapted.save_pretrained(tmp_path / "adapter")
    torch.manual_seed(1)
    again = PeftModel.from_pretrained(load(tmp_path / "model", num_labels=3), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(again(with_meta_tokens()).logits, adapted.eval()(with_meta_tokens()).logits)


@pytest.mark.parametrize(
    "name",
    ["gemma3", fails_in("5.24.0", "llama4:multimodal", why=LLAMA4_FAILS), "qwen2_vl:multimodal", "llava:multimodal"],
)
def test_a_model_of_text_and_images(name: str, tmp_path: Path) -> None:
    model = retrofitted(name)
    model.save_pretrained(tmp_path)
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        loaded = auto.from_pretrained(tmp_path).eval()
        assert type(loaded) is type(model)
        assert torch.equal(logits(loaded, with_meta_tokens()), logits(model, with_meta_tokens()))
    body = AutoModel.from_pretrained(tmp_path).eval()
    same = model if type(body) is type(model) else model.base_model  # in Llama 4 the body is the whole model
    with torch.no_grad():
        assert torch.equal(body(with_meta_tokens(), use_cache=False)[0], same(with_meta_tokens(), use_cache=False)[0])


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("bart", AutoModel),  # runs an encoder too
        ("bart", AutoModelForSeq2SeqLM),
        ("bart", AutoModelForSequenceClassification),
        # It takes the text part of the configuration.
        fails_in("5.24.0", "llama4:multimodal", AutoModelForTextEncoding, why=LLAMA4_FAILS),
    ],
)
def test_what_cannot_have_it_is_refused(name: str, auto: Any, tmp_path: Path) -> None:
    model = retrofitted(name)
    model.save_pretrained(tmp_path)
    for load in (auto.from_pretrained, lambda folder: auto.from_config(model.config)):
        with pytest.raises(UserError, match="no class with meta-attention for the model; load it as a language model"):
            load(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, with_meta_tokens()), logits(model, with_meta_tokens()))
    assert (loaded(with_meta_tokens()).logits[..., META] == -1e4).all()


def test_weights_that_lack_what_was_added_are_refused(tmp_path: Path) -> None:
    retrofitted("llama").save_pretrained(tmp_path)
    save_file(base("llama").state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    for auto in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(UserError, match="the weights lack what was added to the Llama"):
            auto.from_pretrained(tmp_path)
