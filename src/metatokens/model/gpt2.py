"""What a GPT-2 of transformers is in this family: the same sizes, and its weights under other names."""

from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from metatokens.errors import UserError
from metatokens.model.configuration import MetaGPT2Config, SecondAttention

_NAMES = {
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


def configuration_of(gpt2: GPT2Config, second_attention: SecondAttention) -> MetaGPT2Config:
    """The configuration of a converted GPT-2: see `MetaGPT2ForCausalLM.from_gpt2`.

    Raises:
        UserError: if the model uses a GPT-2 option that this family lacks.
    """
    if gpt2.scale_attn_by_inverse_layer_idx or gpt2.add_cross_attention or not gpt2.scale_attn_weights:
        raise UserError("only the plain GPT-2 can be converted (no cross-attention, attention scaled by sqrt(d)).")
    if not gpt2.tie_word_embeddings:
        raise UserError("this GPT-2 has a head of its own; only one tied to the embedding can be converted.")
    grows = second_attention != "none"
    return MetaGPT2Config(
        vocab_size=(gpt2.vocab_size // 64 + 1) * 64 if grows else gpt2.vocab_size,
        hidden_size=gpt2.n_embd,
        num_hidden_layers=gpt2.n_layer,
        num_attention_heads=gpt2.n_head,
        intermediate_size=gpt2.n_inner,
        max_position_embeddings=gpt2.n_positions,
        position_embedding="learned",
        second_attention=second_attention,
        meta_token_id=gpt2.vocab_size if grows else None,
        unpadded_vocab_size=gpt2.vocab_size + grows,
        bias=True,
        activation=gpt2.activation_function,
        layer_norm_epsilon=gpt2.layer_norm_epsilon,
        initializer_range=gpt2.initializer_range,
        bos_token_id=gpt2.bos_token_id,
        eos_token_id=gpt2.eos_token_id,
        pad_token_id=gpt2.pad_token_id,
    )


def weights_of(hf_model: GPT2LMHeadModel) -> dict[str, Tensor]:
    """A GPT-2's weights under this family's names; its Conv1D stores them transposed."""
    renamed = {}
    for name, weight in hf_model.state_dict().items():
        transposed = name.endswith("weight") and any(part in name for part in (".c_attn.", ".c_proj.", ".c_fc."))
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        if name != "lm_head.weight":  # tied to the embedding
            renamed[name] = weight.T if transposed else weight
    return renamed
