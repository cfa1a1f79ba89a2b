"""A second attention of your own: meta-tokens that see one another, and also the text right before them.

`NearTextModel(NearTextConfig(vocab_size=64, meta_token_id=63))` trains and generates like every model of the family.
"""

from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from metatokens import MetaGPT2Config, MetaGPT2ForCausalLM
from metatokens.model.attention import MetaAttention
from metatokens.model.rows import DenseRows, shown

NEAR = 4  # how many of the last tokens a meta-token sees, itself included


class NearTextAttention(MetaAttention):
    """softmax(Q K^T / sqrt(d) + M + P) V, where P is 0 at meta-tokens and at the last `NEAR` tokens."""

    needs_all_rows = True  # text has keys and values here, so the model does not gather the meta-tokens' rows

    def forward(self, x: torch.Tensor, *, rows: DenseRows, cache: Any, mask: Any, rotary: Any, **others: Any) -> Any:
        """The output for x, both (batch, length, width), which the model adds at meta-tokens; and no weights."""
        q, k, v = self.project(x, rotary, others["log_keys"])
        is_meta = rows.valid[:, None, :, None].expand_as(k[..., :1])
        k, v = torch.cat([k, is_meta.to(k)], dim=-1), pad(v, (0, 1))  # a cache holds which keys are meta-tokens, too
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        k, is_meta_key, v = k[..., :-1], k[..., -1] == 1, v[..., :-1]
        is_static = cache is not None and cache.is_compileable
        if is_static and self.config.text_window is not None:
            raise ValueError("such a cache mixes up the order of the keys; use one that grows")
        cached = 0 if is_static else k.shape[2] - x.shape[1]
        seen = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool, device=x.device).tril(cached)
        if mask is not None:
            seen = shown(mask)[..., -k.shape[2] :]
        seen_from_key_on = seen.flip(-1).cumsum(-1).flip(-1)  # how many keys M shows from a key to the query
        allowed = seen & ((seen_from_key_on <= NEAR) | is_meta_key[:, :, None, :])
        out = scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scaling)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


class NearTextConfig(MetaGPT2Config):
    """Has a type of its own, so that no other class loads the weights."""

    model_type = "near_text_gpt2"


class NearTextModel(MetaGPT2ForCausalLM):
    """GPT-2 with this attention in each block."""

    config_class = NearTextConfig

    def __init__(self, config: NearTextConfig):
        super().__init__(config)
        for number, block in enumerate(self.model.layers):
            block.second_attention = NearTextAttention(config, number, config.num_hidden_layers + number)
            block.second_attention.is_rotated = block.attention.is_rotated
        self.post_init()
