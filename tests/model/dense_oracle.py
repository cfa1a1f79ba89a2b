"""The tests' oracle: the model written again from the paper's formulas, as plainly and slowly as possible.

It reads one sequence at a time, without padding: full T x T scores, masks of minus infinity, and angles from the
formula of rotary positions. It shares no line with the package; it takes a model's configuration and parameters.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from metatokens import MetaGPT2ForCausalLM


def rotate_by_position(x: Tensor, base: float = 10000.0) -> Tensor:
    """Turn features i and i + d/2 of x (heads, T, d) at position t by the angle t / base^(2i/d)."""
    length, size = x.shape[1:]
    frequency = base ** (-2.0 * torch.arange(size // 2, dtype=torch.float64) / size)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    first, second = x[..., : size // 2], x[..., size // 2 :]
    turned = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
    return torch.cat(turned, dim=-1)


def masked_weights(q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(d) + mask), (heads, T, T); a row without an allowed key is zero by definition."""
    scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~allowed, -math.inf)
    empty = ~allowed.any(dim=-1)
    weights = (
        scores.masked_fill(empty[..., None], 0.0).softmax(dim=-1).masked_fill(empty[..., None], 0.0)
    )
    return weights


class DenseOracle:
    """A float64 copy of a model's parameters, and the forward pass over one sequence."""

    def __init__(self, model: MetaGPT2ForCausalLM):
        self.config = model.config
        self.seen: dict[
            str, Tensor
        ] = {}  # the attention weights of the last pass, (heads, T, T), by module
        self.weights = {
            name: parameter.detach().double().clone().requires_grad_()
            for name, parameter in model.named_parameters()
        }

    def norm(self, x: Tensor, name: str) -> Tensor:
        """LayerNorm of x (T, width)."""
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        return self._affine(centred / (variance + self.config.layer_norm_epsilon).sqrt(), name)

    def _affine(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (
            self.weights[name + ".weight"],
            self.weights.get(name + ".bias", torch.zeros(())),
        )
        return (x * weight if weight.ndim == 1 else x @ weight.T) + bias

    def attention(self, x: Tensor, name: str, allowed: Tensor) -> Tensor:
        """Multi-head attention of x (T, width) to itself, where `allowed` (T, T) is True."""
        length, width = x.shape
        heads = self.config.num_attention_heads
        q, k, v = self._affine(x, name + ".qkv_proj").split(width, dim=-1)
        q, k, v = (
            part.reshape(length, heads, width // heads).transpose(0, 1) for part in (q, k, v)
        )
        rotated = self.config.rope_layers
        if self.config.position_embedding == "rope" and (
            rotated is None or int(name.split(".")[2]) in rotated
        ):
            q, k = rotate_by_position(q), rotate_by_position(k)
        if self.config.attention_scale == "log_length":  # each query times s_h ln(keys)
            for t, keys in enumerate(allowed.sum(dim=1).tolist()):
                q = q.clone()
                q[:, t] *= self.weights[name + ".length_scale"][:, None] * math.log(max(keys, 1))
        self.seen[name] = masked_weights(q, k, allowed)
        joined = (self.seen[name] @ v).transpose(0, 1).reshape(length, width)
        return self._affine(joined, name + ".out_proj")

    def meta_attention(self, x: Tensor, name: str, is_meta: Tensor, causal: Tensor) -> Tensor:
        """The paper's: causal mask M plus P, 0 where query and key are both meta-tokens; other rows are zero."""
        return (
            self.attention(x, name, causal & is_meta[:, None] & is_meta[None, :]) * is_meta[:, None]
        )

    def logits(self, sequence: Sequence[int] | Tensor, causal: Tensor | None = None) -> Tensor:
        """Next-token logits (T, vocabulary) of one sequence of ids.

        In place of the causal mask there may be another, (T, T), or one for each layer, (layers, T, T).
        """
        ids = torch.as_tensor(sequence)
        masks = torch.ones(len(ids), len(ids)).tril().bool() if causal is None else causal
        masks = masks.expand(self.config.num_hidden_layers, -1, -1)
        x = self.weights["model.embed_tokens.weight"][ids]
        if self.config.position_embedding == "learned":
            x = x + self.weights["model.learned_positions.weight"][: len(ids)]
        for i, causal in enumerate(masks):
            block = f"model.layers.{i}."
            x = x + self.attention(
                self.norm(x, block + "attention_norm"), block + "attention", causal
            )
            if self.config.second_attention == "meta":
                is_meta = ids == self.config.meta_token_id
                normed = self.norm(x, block + "second_norm")
                x = x + self.meta_attention(normed, block + "second_attention", is_meta, causal)
            elif self.config.second_attention == "causal":
                x = x + self.attention(
                    self.norm(x, block + "second_norm"), block + "second_attention", causal
                )
            inner = self._affine(self.norm(x, block + "mlp_norm"), block + "mlp.in_proj")
            gelu = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
            x = x + self._affine(gelu, block + "mlp.out_proj")
        return self.norm(x, "model.norm") @ self.weights["model.embed_tokens.weight"].T
