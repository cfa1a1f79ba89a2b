"""Without a second attention, and with learned positions, the model is the GPT-2 of transformers."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.model.agreement import assert_close
from tests.model.tiny_models import random_rows, randomize, tiny_model
from tests.numbers import ROUNDED_DOUBLE

NAMES = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.wpe.": "model.learned_positions.",
    "transformer.ln_f.": "model.norm.",
    "transformer.h.": "model.layers.",
    ".ln_1.": ".attention_norm.",
    ".ln_2.": ".mlp_norm.",
    ".attn.c_attn.": ".attention.qkv_proj.",
    ".attn.c_proj.": ".attention.out_proj.",
    ".mlp.c_fc.": ".mlp.in_proj.",
    ".mlp.c_proj.": ".mlp.out_proj.",
}


def test_the_same_weights_give_the_same_logits() -> None:
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4}
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, n_inner=72)).double().eval()
    randomize(gpt2, seed=1)
    model = tiny_model(
        num_hidden_layers=3,
        intermediate_size=72,
        max_position_embeddings=32,
        position_embedding="learned",
        second_attention="none",
        activation="gelu_new",
        bias=True,
    )
    weights = {}
    for name, weight in gpt2.state_dict().items():
        is_transposed = ".c_" in name and weight.ndim == 2  # GPT-2's layers store them so
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        weights[name] = weight.T if is_transposed else weight
    model.load_state_dict(weights)
    ids = torch.tensor(random_rows((15, 15)))

    assert_close(model(ids).logits, gpt2(ids).logits, ROUNDED_DOUBLE)
    assert model(ids).logits.std() > 1  # wide enough to be a test
