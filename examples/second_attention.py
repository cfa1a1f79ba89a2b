"""A second attention of your own: meta-tokens see one another, and the text right before them."""

from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from metatokens import MetaGPT2Config, MetaGPT2ForCausalLM
from metatokens.model.attention import MetaAttention
from metatokens.model.rows import shown

NEAR = 4  # how many of the last tokens a meta-token sees, itself included


class NearTextAttention(MetaAttention):
    """softmax(Q K^T / sqrt(d) + M + P) V, where P is 0 at meta-tokens and at the last `NEAR` tokens."""

    needs_all_rows = True  # text has keys and values here, so that no rows are gathered

    def forward(self, x: torch.Tensor, *, rows: Any, cache: Any, mask: Any, **others: Any) -> Any:
        """The output for x, both (batch, length, width), which the model adds at meta-tokens; no weights."""
        q, k, v = self.project(x, others["rotary"], others["log_keys"])
        is_meta = rows.valid[:, None, :, None].expand_as(k[..., :1])
        # A cache holds which keys are meta-tokens, too, as one more feature.
        k, v = torch.cat([k, is_meta.to(k)], dim=-1), pad(v, (0, 1))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        k, is_meta_key, v = k[..., :-1], k[..., -1] == 1, v[..., :-1]
        is_static = cache is not None and cache.is_compileable
        cached = 0 if is_static else k.shape[2] - x.shape[1]
        seen = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool, device=x.device).tril(cached)
        if mask is not None:
            seen = shown(mask)[..., -k.shape[2] :]
        # How many keys M shows from a key to the query, both included.
        distance = seen.flip(-1).cumsum(-1).flip(-1)
        allowed = seen & ((distance <= NEAR) | is_meta_key[:, :, None, :])
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
        blocks = len(self.model.layers)
        for number, block in enumerate(self.model.layers):
            block.second_attention = NearTextAttention(config, number, blocks + number)
            block.second_attention.is_rotated = block.attention.is_rotated
        self.post_init()
