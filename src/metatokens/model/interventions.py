"""Interventions at inference: no position or no embedding at the meta-tokens, noise on the positions.

Paper, sections 4.3 and 5.2, Tables 2 and 11-17. They are hooks on the modules that embed tokens and number positions,
so that the model's code and weights stay as they are, and any checkpoint can be examined:

    with intervene(model, Intervention.parse("no_pos")):
        model.generate(...)

The paper does not define them for rotary positions, and gives no unit for the noise; `Intervention` documents what is
done here.
"""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from metatokens.errors import UserError
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.model.positions import Rotary
from metatokens.model.wrappers import unwrapped

_NAME = re.compile(
    r"(no_pos|no_embed|neither)|(noise):(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(:meta)?(:raw)?"
)

NOISE_SEED = 0
KINDS = ("no_pos", "no_embed", "neither", "noise")


@dataclass(frozen=True)
class Intervention:
    """A change to the model's input; `str()` gives the name that `parse` reads.

    Attributes:
        kind: what changes, one of `KINDS`; any other is a UserError.
            `no_pos`: a meta-token has no position. Learned: p_t = 0. Rotary: its query and key are not rotated, in
            either attention, as if its position were 0; YaRN's scale of the rotation, which is no position, stays.
            `no_embed`: the embedding of a meta-token is 0; its position stays, and so does its row of the head, tied to
            the table.
            `neither`: both.
            `noise`: each position t gets Gaussian noise, one draw for all sequences, layers, heads and both attentions.
            Learned: every entry of p_t gets noise of `scale` standard deviations of the table's entries. Rotary: t gets
            noise of `scale` positions, so that the angles of all frequencies move together, each by its own step.
        scale: the standard deviation of the noise.
        meta_only: whether only meta-tokens get the noise; otherwise all tokens do.
        raw: whether the noise is in raw units instead. Learned: the table's. Rotary: the angle of each frequency gets
            its own noise, in radians.
    """

    kind: str
    scale: float = 0.0
    meta_only: bool = True
    raw: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"no intervention {self.kind!r}; allowed are {', '.join(KINDS)}.")

    @classmethod
    def parse(cls, name: str) -> "Intervention":
        """The intervention `no_pos`, `no_embed`, `neither` or `noise:S[:meta][:raw]`; brackets mark optional parts.

        Raises:
            UserError: if there is none of that name.
        """
        parts: Any = _NAME.fullmatch(name)
        if parts is None or not math.isfinite(float(parts[3] or 0)):
            raise UserError(
                f"no intervention {name!r}; allowed are no_pos, no_embed, neither, noise:S[:meta][:raw] with S at "
                "least 0."
            )
        kind, noise, scale, meta, raw = parts.groups()
        if kind is not None:
            return cls(kind)
        return cls(noise, float(scale), meta_only=meta is not None, raw=raw is not None)

    @property
    def is_random(self) -> bool:
        """Whether it draws noise."""
        return self.kind == "noise"

    @property
    def changes_embeddings(self) -> bool:
        """Whether it changes the embeddings of meta-tokens."""
        return self.kind in ("no_embed", "neither")

    @property
    def changes_positions(self) -> bool:
        """Whether it changes positions."""
        return self.kind != "no_embed"

    def __str__(self) -> str:
        if not self.is_random:
            return self.kind
        scale = str(self.scale).removesuffix(".0")
        return f"noise:{scale}{':meta' * self.meta_only}{':raw' * self.raw}"


@contextmanager
def intervene(model: PreTrainedModel, intervention: Intervention | None) -> Iterator[None]:
    """Run a model with an intervention, in `generate()` too, as long as the context lasts.

    Keys that are cached meanwhile keep it. Contexts can be nested: the inner one changes what the outer one left.

    Args:
        model: of this package, or for `no_embed` any other with a meta-token; left as it was. It has to be called with
            `input_ids`.
        intervention: what to do; None does nothing. The noise of position t is row t of
            `numpy.random.default_rng(0).standard_normal((T, width))` in float32, for any T, so it depends neither on
            the batch nor on what is cached.

    Raises:
        UserError: if the model lacks the positions or the meta-token that the intervention changes, is wrapped, or is
            called with `inputs_embeds` or a `meta_token_mask`.
    """
    if intervention is None:
        yield
        return
    if unwrapped(model) is not model:  # a compiled graph does not run hooks that come later
        raise UserError("interventions change the model itself: give it without its wrapper.")
    _check(intervention, model)
    hooks = _Hooks(intervention, model.config.meta_token_id)
    with ExitStack() as stack:
        stack.enter_context(model.register_forward_pre_hook(_check_inputs, with_kwargs=True))
        stack.enter_context(model.get_input_embeddings().register_forward_hook(hooks.on_embedding))
        if intervention.changes_positions:
            body = model.model
            if body.learned_positions is not None:
                stack.enter_context(body.learned_positions.register_forward_hook(hooks.on_learned))
            if body.rotary_emb is not None:
                stack.enter_context(body.rotary_emb.register_forward_hook(hooks.on_rotary))
        yield


def _check(intervention: Intervention, model: PreTrainedModel) -> None:
    if intervention.changes_positions:
        if not isinstance(model, MetaGPT2ForCausalLM):
            raise UserError(
                f"{intervention} is for this package's own models; on others use no_embed."
            )
        if model.config.position_embedding == "none":
            raise UserError(
                f"{intervention} changes positions, and this model has position_embedding 'none'; use no_embed."
            )
    if intervention.meta_only and getattr(model.config, "meta_token_id", None) is None:
        raise UserError(f"{intervention} changes meta-tokens, and this model has no meta_token_id.")


def _check_inputs(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
    for name in ("inputs_embeds", "meta_token_mask"):
        if inputs.get(name) is not None:
            raise UserError(
                f"an intervention finds meta-tokens by their ids: give input_ids, and no {name}."
            )


class _Hooks:
    """Hooks, which change what the embedding (always called first), the learned table and the rotary module return."""

    def __init__(self, intervention: Intervention, meta_token_id: int | None):
        self.intervention = intervention
        self.meta_token_id = -1 if meta_token_id is None else meta_token_id
        self.generator = np.random.default_rng(NOISE_SEED)
        self.rows: np.ndarray | None = None  # the noise of each position, (positions, width)
        self.is_changed: Tensor  # (batch, length, 1), in the current forward pass

    def on_embedding(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        is_meta = (args[0] == self.meta_token_id).unsqueeze(-1)
        everywhere = torch.ones_like(is_meta)
        self.is_changed = is_meta if self.intervention.meta_only else everywhere
        if not self.intervention.changes_embeddings:
            return output
        return self._select(torch.zeros_like(output), output)

    def on_learned(self, table: Any, args: tuple[Tensor], output: Tensor) -> Tensor:
        if not self.intervention.is_random:
            return self._select(torch.zeros_like(output), output)
        unit = 1.0 if self.intervention.raw else table.weight.std()
        noise = self._noise(args[0], output.shape[-1])
        return self._select(output + self.intervention.scale * unit * noise, output)

    def on_rotary(self, module: Any, args: tuple[Tensor, Tensor], output: Rotary) -> Rotary:
        cos, sin = output
        if not self.intervention.is_random:
            without_angle = torch.full_like(cos, module.attention_scaling)
            return self._select(without_angle, cos), self._select(torch.zeros_like(sin), sin)
        scale = self.intervention.scale
        if self.intervention.raw:
            angle = (scale * self._noise(args[1], cos.shape[-1] // 2)).repeat(1, 1, 2)
        else:
            angle = scale * self._noise(args[1], 1) * module.inv_freq.repeat(2)
        # cos(a + b) and sin(a + b)
        new_cos = cos * angle.cos() - sin * angle.sin()
        new_sin = sin * angle.cos() + cos * angle.sin()
        return self._select(new_cos, cos), self._select(new_sin, sin)

    def _noise(self, position_ids: Tensor, width: int) -> Tensor:
        """The noise of positions (batch or 1, length), drawn in order, so that later positions change none before."""
        rows = np.empty((0, width), dtype=np.float32) if self.rows is None else self.rows
        missing = int(position_ids.max()) + 1 - len(rows)
        if missing > 0:
            drawn = self.generator.standard_normal((missing, width), dtype=np.float32)
            rows = np.concatenate([rows, drawn])
        self.rows = rows
        return torch.from_numpy(rows[position_ids.cpu().numpy()]).to(position_ids.device)

    def _select(self, changed: Tensor, plain: Tensor) -> Tensor:
        """`changed`, (batch or 1, length, features), where the intervention applies."""
        return torch.where(self.is_changed, changed.to(plain), plain)
