"""Conversion of transformers' GPT-2: the same sizes, and its weights under other names."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
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


class FromGPT2:
    """Mixin for a language model that can be converted from GPT-2."""

    @classmethod
    def from_gpt2(
        cls: Any, hf_model: GPT2LMHeadModel, second_attention: SecondAttention = "none"
    ) -> Any:
        """Convert a transformers GPT-2; the logits of its vocabulary and its settings of generation stay the same.

        The output projection of a second attention module starts at zero, so that the function is unchanged until it is
        trained. The vocabulary is then padded to a multiple of 64 rows. The first new row is the meta-token; its
        embedding is the mean of the others. With `"none"` the vocabulary is kept as it is.

        Args:
            hf_model: the model to convert; it is not changed.
            second_attention: the module to add.

        Raises:
            UserError: if the model is no GPT-2, or uses an option of GPT-2 that this family lacks.
        """
        if not isinstance(hf_model, GPT2LMHeadModel):
            raise UserError(
                f"a {type(hf_model).__name__} cannot be converted; give transformers' GPT2LMHeadModel."
            )
        config = _configuration_of(hf_model.config, second_attention)
        model = cls(config).to(hf_model.dtype)
        weights = _weights_of(hf_model)
        embedding = weights["model.embed_tokens.weight"]
        new_rows = embedding.mean(dim=0).expand(config.vocab_size - len(embedding), -1)
        weights["model.embed_tokens.weight"] = torch.cat([embedding, new_rows])
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected
        assert all("second_" in name or name == "lm_head.weight" for name in missing)
        model.tie_weights()
        for layer in model.model.layers if second_attention != "none" else ():
            nn.init.zeros_(layer.second_attention.out_proj.weight)
        model.generation_config = deepcopy(hf_model.generation_config)
        return model.to(hf_model.device).train(hf_model.training)


def _configuration_of(gpt2: GPT2Config, second_attention: SecondAttention) -> MetaGPT2Config:
    if (
        gpt2.scale_attn_by_inverse_layer_idx
        or gpt2.add_cross_attention
        or not gpt2.scale_attn_weights
    ):
        raise UserError(
            "only the plain GPT-2 can be converted (no cross-attention, attention scaled by sqrt(d))."
        )
    if not gpt2.tie_word_embeddings:
        raise UserError(
            "this GPT-2 has a separate head; only one that is tied to the embedding can be converted."
        )
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


def _weights_of(hf_model: GPT2LMHeadModel) -> dict[str, Tensor]:
    """The weights under this family's names; GPT-2's Conv1D stores them transposed."""
    renamed = {}
    for name, weight in hf_model.state_dict().items():
        transposed = name.endswith("weight") and any(
            part in name for part in (".c_attn.", ".c_proj.", ".c_fc.")
        )
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        if name != "lm_head.weight":  # tied to the embedding
            renamed[name] = weight.T if transposed else weight
    return renamed
