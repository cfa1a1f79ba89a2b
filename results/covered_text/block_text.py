"""A second attention with which a meta-token sees the meta-tokens before it, and the text of its own block.

Its block is the text between it and the meta-token before it. The paper's meta-attention sees the meta-tokens alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from metatokens.model import modeling
from metatokens.model.attention import MetaAttention


class BlockTextAttention(MetaAttention):
    """softmax(Q K^T / sqrt(d) + M + P) V, where P is 0 at meta-tokens and in the query's own block; without a cache."""

    needs_all_rows = True

    def forward(self, x: Tensor, *, rows: Any, mask: Tensor | None, **others: Any) -> Any:
        """The output for x, both (batch, length, width), which the model adds at meta-tokens; no weights."""
        if others["cache"] is not None:
            raise ValueError("this attention has no cache: give use_cache=False")
        q, k, v = self.project(x, others["rotary"], others["log_keys"])
        is_meta = rows.valid
        block = is_meta.cumsum(-1) - is_meta.long()  # the number of meta-tokens before a token
        in_block = block[:, :, None] == block[:, None, :]
        seen = (in_block | is_meta[:, None, :])[:, None]
        length = x.shape[1]
        is_causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        allowed = seen & (is_causal if mask is None else mask)
        out = scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scaling)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


@contextmanager
def block_text_attention() -> Iterator[None]:
    """Models that are made or loaded meanwhile have this attention in place of meta-attention."""
    with patch.object(modeling, "MetaAttention", BlockTextAttention):
        yield
