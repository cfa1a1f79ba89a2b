"""Rotary frequencies that depend on the length of a text: such a prompt is read at once."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from metatokens import add_meta_attention, set_text_window
from metatokens.model import generation
from metatokens.model.positions import rotates_by_length
from tests.model.agreement import assert_close
from tests.model.tiny_models import META, random_rows, randomize, tiny_model
from tests.retrofit.architectures import train_like

SHORT = 40  # tokens that have the frequencies of all shorter texts
FACTORS = {
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "original_max_position_embeddings": SHORT,
}
ROPE: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    "longrope": {"rope_type": "longrope", "factor": 2.0, "rope_theta": 100.0, **FACTORS},
}
KINDS = pytest.mark.parametrize("kind", sorted(ROPE))
BOTH_CALLERS = pytest.mark.parametrize("is_meta_gpt2", [True, False], ids=["MetaGPT2", "Llama"])
IDS = torch.tensor(random_rows((90, 90)))


def llama_config(rope: dict[str, Any]) -> LlamaConfig:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    tokens = {"vocab_size": META + 1, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    return LlamaConfig(**sizes, **tokens, max_position_embeddings=SHORT, rope_parameters=rope)


def forgetful(kind: str, is_meta_gpt2: bool) -> PreTrainedModel:
    """A model that forgets text."""
    if is_meta_gpt2:
        return tiny_model(
            max_position_embeddings=SHORT, rope_parameters=ROPE[kind], text_window=9, text_sinks=2
        )
    plain = LlamaForCausalLM(llama_config(ROPE[kind])).eval()
    randomize(plain)
    model = train_like(add_meta_attention(plain, meta_token_id=META, heads=2, head_size=8))
    set_text_window(model, 9, 2)
    return model


def first_logits(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    """The logits by which `generate` chooses the first token."""
    options |= {
        "max_new_tokens": 1,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options).logits[0][:, :META]


@pytest.mark.parametrize("kind", sorted(ROPE_INIT_FUNCTIONS))
def test_types_whose_frequencies_depend_on_the_length(kind: str) -> None:
    """By what transformers computes for the same positions in a short and in a long text."""
    rope = ROPE.get(
        kind, {"rope_type": kind, "factor": 4.0, "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    )
    if kind in ("llama3", "yarn"):
        rope = rope | {"original_max_position_embeddings": SHORT}
    if kind == "llama3":
        rope = rope | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = llama_config(rope)
    embedding, x = LlamaRotaryEmbedding(config), torch.zeros(1, 1)
    tables = [
        embedding(x, torch.arange(length)[None])[0][:, :8] for length in (8, SHORT, SHORT + 1)
    ]

    assert rotates_by_length(config) == (kind in ROPE)
    assert torch.equal(tables[0], tables[1])
    assert torch.equal(tables[0], tables[2]) == (kind not in ROPE)


@KINDS
@BOTH_CALLERS
@torch.no_grad()
def test_a_prompt_that_changes_the_frequencies_is_read_at_once(
    kind: str, is_meta_gpt2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "READ_AT_ONCE", 16)
    model, lengths = forgetful(kind, is_meta_gpt2), []
    model.get_input_embeddings().register_forward_hook(
        lambda _, args, out: lengths.append(out.shape[1])
    )
    expected = model(IDS, use_cache=False).logits[:, -1, :META]
    lengths.clear()

    for chunk in (None, 30):
        assert_close(first_logits(model, IDS, prefill_chunk_size=chunk), expected, 1e-4)
    assert lengths == [90, 90]
