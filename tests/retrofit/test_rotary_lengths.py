"""Rotary frequencies that depend on the length of a text: the chunks of a prompt have those of the whole prompt."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from metatokens import add_meta_attention, set_text_window
from metatokens.errors import UserError
from metatokens.model import generation
from metatokens.model.positions import steady_length
from tests.model.tiny_models import META, random_rows, randomize, tiny_model
from tests.retrofit.architectures import error, train_like

SHORT = 40  # tokens that have the frequencies of all shorter texts
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": SHORT}
ROPE: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    "longrope": {"rope_type": "longrope", "factor": 2.0, "rope_theta": 100.0, **FACTORS},
}
KINDS = pytest.mark.parametrize("kind", sorted(ROPE))
MODELS = pytest.mark.parametrize("is_own", [False, True])


def llama_config(rope: dict[str, Any]) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": META + 1, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    return LlamaConfig(**sizes, **tokens, max_position_embeddings=SHORT, rope_parameters=rope)


def forgetful(kind: str, is_own: bool) -> PreTrainedModel:
    """A model of this package, or a retrofitted Llama, that forgets text."""
    if is_own:
        return tiny_model(max_position_embeddings=SHORT, rope_parameters=ROPE[kind], text_window=9, text_sinks=2)
    plain = LlamaForCausalLM(llama_config(ROPE[kind])).eval()
    randomize(plain)
    model = train_like(add_meta_attention(plain, meta_token_id=META, heads=2, head_size=8))
    set_text_window(model, 9, 2)
    return model


def first_logits(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    """The logits by which `generate` chooses the first token."""
    options |= {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options).logits[0][:, :META]


@pytest.mark.parametrize("kind", sorted(ROPE_INIT_FUNCTIONS))
def test_types_whose_frequencies_depend_on_the_length(kind: str) -> None:
    """By what transformers computes for the same positions in a short and in a long text."""
    rope = ROPE.get(kind, {"rope_type": kind, "factor": 4.0, "rope_theta": 100.0, "partial_rotary_factor": 0.5})
    if kind == "llama3":
        rope = rope | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind in ("llama3", "yarn"):
        rope = rope | {"original_max_position_embeddings": SHORT}
    config = llama_config(rope)
    embedding, x = LlamaRotaryEmbedding(config), torch.zeros(1, 1)

    def is_changed_by(length: int) -> bool:
        short, long = (embedding(x, torch.arange(size)[None])[0][:, :8] for size in (8, length))
        return not torch.equal(short, long)

    assert steady_length(config) == (SHORT if kind in ROPE else None)
    assert is_changed_by(SHORT + 1) == (kind in ROPE)
    assert not is_changed_by(SHORT)


def test_each_type_of_layer_may_have_frequencies_of_its_own() -> None:
    plain = {"rope_type": "default", "rope_theta": 100.0}
    for full, steady in ((plain, None), (ROPE["longrope"], SHORT)):
        rope = {"sliding_attention": plain, "full_attention": full}
        assert steady_length(Gemma3TextConfig(rope_parameters=rope)) == steady


@KINDS
@MODELS
@torch.no_grad()
def test_a_prompt_that_changes_the_frequencies_is_read_at_once(
    kind: str, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "READ_AT_ONCE", 16)
    model, lengths = forgetful(kind, is_own), []
    handle = model.get_input_embeddings().register_forward_hook(lambda _, args, out: lengths.append(out.shape[1]))
    ids = torch.tensor(random_rows((90, 90)))
    for length, wanted_lengths in ((SHORT, [16, 16, 8]), (90, [90])):
        lengths.clear()
        read = first_logits(model, ids[:, :length])
        assert lengths == wanted_lengths
        wanted = model(ids[:, :length], use_cache=False).logits[:, -1, :META]
        assert error(read, wanted) < 1e-4 * float(wanted.abs().max())
    handle.remove()


@KINDS
@MODELS
def test_chunks_that_would_have_several_frequencies_are_refused(kind: str, is_own: bool) -> None:
    model, ids = forgetful(kind, is_own), torch.tensor(random_rows((90,)))
    with pytest.raises(UserError, match=f"depend on the length of a text of more than {SHORT} tokens, and a prompt of"):
        first_logits(model, ids, prefill_chunk_size=30)
    wanted = first_logits(model, ids)
    assert torch.equal(first_logits(model, ids, prefill_chunk_size=90), wanted)
    first_logits(model, ids[:, :SHORT], prefill_chunk_size=30)
