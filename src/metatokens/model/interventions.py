"""Interventions at inference: no position or no embedding at the meta-tokens, noise on the positions.

Paper, sections 4.3 and 5.2, Tables 2 and 11-17. They are hooks on the modules that embed tokens and number positions,
so the model's code and weights stay as they are, and any checkpoint can be examined:

    with intervene(model, Intervention.parse("no_pos")):
        model.generate(...)

The paper defines none of them for rotary positions, and gives the noise no unit; `Intervention` says what is done here.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from metatokens.errors import UserError
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.model.positions import Rotary

Kind = Literal["no_pos", "no_embed", "neither", "noise"]


@dataclass(frozen=True, slots=True)
class Intervention:
    """What is changed at the model's input; `str()` gives the name that `parse` reads.

    `no_pos`: a meta-token has no position. Learned: p_t = 0. Rotary: its query and key are not rotated, in either
    attention, as if it stood at position 0; YaRN's scale of the rotation, which is no position, is kept.

    `no_embed`: the embedding of a meta-token is 0, its position stays. As a row of the head, to which the table is
    tied, it stays too.

    `neither`: both.

    `noise`: each position t gets Gaussian noise of standard deviation S, one draw for all sequences, layers, heads and
    both attentions. Learned: it is added to every entry of p_t, S in standard deviations of the table's entries.
    Rotary: it is added to t, S in positions, so that every frequency's angle moves by its own step times the same
    number. `raw` instead takes the numbers as they are. Learned: S in the table's units. Rotary: every frequency's
    angle moves by a number of its own, S in radians.

    Attributes:
        kind: one of the above.
        scale: S, the standard deviation of the noise.
        meta_only: whether the noise is at the meta-tokens alone; otherwise at all tokens.
        raw: whether the noise is in raw units.
    """

    kind: Kind
    scale: float = 0.0
    meta_only: bool = False
    raw: bool = False

    @classmethod
    def parse(cls, name: str) -> "Intervention":
        """The intervention `no_pos`, `no_embed`, `neither` or `noise:S`, the last with `:meta`, `:raw` or `:meta:raw`.

        Raises:
            UserError: if there is none of that name.
        """
        if name in ("no_pos", "no_embed", "neither"):
            return cls(cast(Kind, name))
        kind, _, rest = name.partition(":")
        scale, *options = rest.split(":")
        try:
            number = float(scale) if kind == "noise" else math.nan
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf or options not in ([], ["meta"], ["raw"], ["meta", "raw"]):
            raise UserError(
                f"no intervention {name!r}; allowed are no_pos, no_embed, neither and noise:S with a number S of at "
                "least 0, then :meta for the meta-tokens alone, then :raw for raw units."
            )
        return cls("noise", number, "meta" in options, "raw" in options)

    def __str__(self) -> str:
        if self.kind != "noise":
            return self.kind
        scale = str(self.scale).removesuffix(".0")
        return f"noise:{scale}{':meta' * self.meta_only}{':raw' * self.raw}"


@contextmanager
def intervene(model: PreTrainedModel, intervention: Intervention | None, *, seed: int = 0) -> Iterator[None]:
    """Run a model with an intervention, from `generate()` too, as long as the context lasts.

    Keys that are cached while it lasts keep it. Contexts can be nested: the inner one changes what the outer one left.

    Args:
        model: of this package, or for `no_embed` any other with a meta-token; left as it was.
        intervention: what to do; None does nothing.
        seed: of the noise. That of position t is row t of `numpy.random.default_rng(seed).standard_normal((T, width))`
            in float32, whatever T; so it depends neither on the batch nor on what is cached.

    Raises:
        UserError: if the model lacks the positions or the meta-token that the intervention is about.
    """
    if intervention is None:
        yield
        return
    _check(intervention, model)
    hooks = _Hooks(intervention, model.config, seed)
    handles = [model.get_input_embeddings().register_forward_hook(hooks.on_embedding)]
    if intervention.kind != "no_embed" and model.model.learned_positions is not None:
        handles.append(model.model.learned_positions.register_forward_hook(hooks.on_learned))
    if intervention.kind != "no_embed" and model.model.rotary_emb is not None:
        handles.append(model.model.rotary_emb.register_forward_hook(hooks.on_rotary))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def zero_positions(model: MetaGPT2ForCausalLM) -> AbstractContextManager[None]:
    """Run a model without positions at the meta-tokens: the intervention `no_pos`."""
    return intervene(model, Intervention("no_pos"))


def _check(intervention: Intervention, model: PreTrainedModel) -> None:
    config = model.config
    if intervention.kind != "no_embed" and not isinstance(model, MetaGPT2ForCausalLM):
        raise UserError(
            f"{intervention} is for this package's own models, whose positions it knows; of a {type(model).__name__} "
            "only no_embed is possible."
        )
    if intervention.kind != "no_embed" and config.position_embedding == "none":
        raise UserError(
            f"{intervention} is about positions, and this model has position_embedding 'none'; only no_embed applies."
        )
    if config.meta_token_id is None and (intervention.kind != "noise" or intervention.meta_only):
        raise UserError(f"{intervention} is about meta-tokens, and this model has no meta_token_id.")


class _Hooks:
    """What replaces the outputs of the embedding (always called first), the learned table and the rotary tables."""

    def __init__(self, intervention: Intervention, config: Any, seed: int):
        self.kind, self.scale, self.raw = intervention.kind, intervention.scale, intervention.raw
        self.everywhere = intervention.kind == "noise" and not intervention.meta_only
        self.meta_token_id = -1 if config.meta_token_id is None else config.meta_token_id
        self.is_meta: Tensor  # (batch, length, 1), of the forward pass that is going on
        width = config.hidden_size
        if config.position_embedding == "rope":
            width = config.head_size // 2 if intervention.raw else 1
        self.noise = _Noise(width, seed)

    def on_embedding(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        self.is_meta = (args[0] == self.meta_token_id).unsqueeze(-1)
        return torch.where(self.is_meta, 0.0, output) if self.kind in ("no_embed", "neither") else output

    def on_learned(self, table: nn.Embedding, args: tuple[Tensor], output: Tensor) -> Tensor:
        if self.kind != "noise":
            return self._where_meant(torch.zeros_like(output), output)
        unit = 1.0 if self.raw else table.weight.std()
        return self._where_meant(output + self.scale * unit * self.noise(args[0]), output)

    def on_rotary(self, module: Any, args: tuple[Tensor, Tensor], output: Rotary) -> Rotary:
        cos, sin = output
        if self.kind != "noise":
            turned = torch.full_like(cos, module.attention_scaling), torch.zeros_like(sin)
        else:
            angle = self.scale * self.noise(args[1])
            angle = angle.repeat(1, 1, 2) if self.raw else angle * module.inv_freq.repeat(2)
            turned = cos * angle.cos() - sin * angle.sin(), sin * angle.cos() + cos * angle.sin()
        return self._where_meant(turned[0], cos), self._where_meant(turned[1], sin)

    def _where_meant(self, changed: Tensor, plain: Tensor) -> Tensor:
        """`changed`, (batch or 1, length, features), at the positions that the intervention is about."""
        return changed.to(plain) if self.everywhere else torch.where(self.is_meta, changed.to(plain), plain)


class _Noise:
    """Standard normal numbers by position, drawn in the order of positions, so that later ones change none before."""

    def __init__(self, width: int, seed: int):
        self.generator = np.random.default_rng(seed)
        self.rows = np.empty((0, width), dtype=np.float32)

    def __call__(self, position_ids: Tensor) -> Tensor:
        """(batch or 1, length) -> (batch or 1, length, width), on the same device."""
        missing = int(position_ids.max()) + 1 - len(self.rows)
        if missing > 0:
            drawn = self.generator.standard_normal((missing, self.rows.shape[1]), dtype=np.float32)
            self.rows = np.concatenate([self.rows, drawn])
        return torch.from_numpy(self.rows[position_ids.cpu().numpy()]).to(position_ids.device)
