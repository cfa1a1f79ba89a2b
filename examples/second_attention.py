"""A second attention of your own: meta-tokens that see one another, and also the text right before them.

    model = NearTextModel(MetaGPT2Config(vocab_size=64, meta_token_id=63))

It trains, generates, and is saved like every model of the family, with any cache, and with a text window.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from metatokens import MetaGPT2Config, MetaGPT2ForCausalLM
from metatokens.model.attention import MetaAttention
from metatokens.model.rows import DenseRows, shown

NEAR = 4  # how many of the last tokens a meta-token sees, itself included


class NearTextAttention(MetaAttention):
    """softmax(Q K^T / sqrt(d) + M + P) V, where P is 0 at meta-tokens and at the last `NEAR` tokens."""

    needs_all_rows = True  # text has keys and values here, so the model does not gather the meta-tokens' rows

    def forward(
        self, x: Tensor, *, rows: DenseRows, cache: Any, mask: Tensor | None, rotary: Any, **_: Any
    ) -> tuple[Tensor, None]:
        """The output for x, both (batch, length, width); the model adds it at meta-tokens alone."""
        q, k, v = self.project(x, rotary)
        is_meta = rows.valid[:, None, :, None].to(k)
        k, v = torch.cat([k, is_meta], dim=-1), pad(v, (0, 1))  # a further feature tells a cache which keys are text
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        k, is_meta_key, v = k[..., :-1], k[..., -1:] == 1, v[..., :-1]
        queries, keys = q.shape[2], k.shape[2]
        seen = torch.ones(queries, keys, dtype=torch.bool, device=x.device).tril(keys - queries)
        if mask is not None:
            seen = shown(mask)[..., -keys:]
        is_near = seen.flip(-1).cumsum(-1).flip(-1) <= NEAR  # of the keys that M shows
        allowed = seen & (is_near | is_meta_key.transpose(-1, -2))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scaling)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


class NearTextModel(MetaGPT2ForCausalLM):
    """GPT-2 with this attention in each block."""

    def __init__(self, config: MetaGPT2Config):
        super().__init__(config)
        for number, block in enumerate(self.model.layers):
            block.second_attention = NearTextAttention(config, number, config.num_hidden_layers + number)
        self.post_init()
