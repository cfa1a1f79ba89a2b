"""The slow oracle of the model's tests, which also records states and scores; and examples of bare ids."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metatokens import MetaGPT2ForCausalLM
from metatokens.tasks.example import Example
from tests.model.dense_oracle import DenseOracle, rotate_by_position

KINDS: dict[str, dict[str, Any]] = {
    "meta, rope": {"position_embedding": "rope"},
    "twin, learned": {"position_embedding": "learned", "second_attention": "causal"},
    "gpt2, no positions": {"position_embedding": "none", "second_attention": "none"},
}


class RecordingOracle(DenseOracle):
    """After `logits(ids)`, `states` holds the residual stream and `scores` the inputs of each softmax."""

    def __init__(self, model: MetaGPT2ForCausalLM, *, zeroed: bool = False):
        super().__init__(model)
        if zeroed:  # the head's row is zeroed too, but the meta-token is no output
            with torch.no_grad():
                self.weights["model.embed_tokens.weight"][self.config.meta_token_id] = 0
        self.states: list[Tensor] = []
        self.scores: dict[tuple[str, int], Tensor] = {}

    def norm(self, x: Tensor, name: str) -> Tensor:
        if name.endswith("attention_norm") or name == "model.norm":
            self.states.append(x.detach())
        return super().norm(x, name)

    def attention(self, x: Tensor, name: str, allowed: Tensor) -> Tensor:
        """Record the scores, (heads, T, T), with -inf for masked keys."""
        size = self.config.hidden_size // self.config.num_attention_heads
        q, k, _ = (
            self._affine(x, name + ".qkv_proj").unflatten(-1, (3, -1, size)).permute(1, 2, 0, 3)
        )
        if self.config.position_embedding == "rope":
            q, k = rotate_by_position(q), rotate_by_position(k)
        scores = torch.einsum("hqd,hkd->hqk", q, k) / math.sqrt(size)
        _, _, layer, module = name.split(".")
        self.scores[module, int(layer)] = scores.masked_fill(~allowed, -math.inf).detach()
        return super().attention(x, name, allowed)


def record(
    model: MetaGPT2ForCausalLM, ids: Sequence[int], *, zeroed: bool = False
) -> RecordingOracle:
    """The oracle after a pass over a prompt."""
    oracle = RecordingOracle(model, zeroed=zeroed)
    with torch.no_grad():
        oracle.logits(ids)
    return oracle


def bare_example(ids: Sequence[int], answer: int = 5) -> Example:
    """An example with these prompt ids and a one-token answer; its text is not used."""
    return Example(
        prompt="?",
        markers=(),
        completion="!",
        input_ids=(*ids, answer, 0),
        answer_start=len(ids),
    )
