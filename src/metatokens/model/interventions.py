"""Interventions at inference: no position or no embedding at the meta-tokens, noise on the positions.

Paper, sections 4.3 and 5.2, Tables 2 and 11-17. They are hooks on the modules that embed tokens and number positions,
so that the model's code and weights stay as they are, and any checkpoint can be examined:

    with intervene(model, Intervention.parse("no_pos")):
        model.generate(...)

The paper does not define them for rotary positions, and gives no unit for the noise; the classes below document what
is done here. A new intervention is a new subclass of `Intervention`, and a name in the help of `--intervention`
(`cli/measure_commands.py`) and in the words of the report (`paper/report/content.yaml`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from metatokens.errors import UserError
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.model.positions import Rotary
from metatokens.model.wrappers import unwrapped

# Width -> standard normal numbers by position, (batch or 1, length, width).
Draw = Callable[[int], Tensor]


class Intervention:
    """A change to the model's input; `str()` gives the name that `parse` reads.

    A subclass overrides the methods for what it changes. `intervene` puts their results at the meta-tokens or, with
    `is_everywhere`, at all tokens.
    """

    kinds: ClassVar[dict[str, type["Intervention"]]] = {}
    usage: ClassVar[str]  # the name, with its options
    has_positions: ClassVar[bool]  # whether it changes positions
    is_random: ClassVar[bool] = False

    @property
    def is_everywhere(self) -> bool:
        """Whether it changes all tokens; otherwise meta-tokens alone."""
        return False

    def __init_subclass__(cls, *, usage: str) -> None:
        cls.usage = usage
        unchanged = Intervention.change_learned, Intervention.change_rotary
        cls.has_positions = (cls.change_learned, cls.change_rotary) != unchanged
        cls.kinds[usage.partition(":")[0]] = cls

    @classmethod
    def parse(cls, name: str) -> "Intervention":
        """The intervention `no_pos`, `no_embed`, `neither` or `noise:S[:meta][:raw]`; brackets mark optional parts.

        Raises:
            UserError: if there is none of that name.
        """
        kind, *options = name.split(":")
        try:
            return cls.kinds[kind].from_options(*options)
        except (KeyError, TypeError, ValueError):
            allowed = ", ".join(kind.usage for kind in cls.kinds.values())
            raise UserError(f"no intervention {name!r}; allowed are {allowed}.") from None

    @classmethod
    def from_options(cls, *options: str) -> Self:
        """Make the intervention from the options after its name. Raises TypeError or ValueError if they do not fit."""
        return cls(*options)

    def __str__(self) -> str:
        return self.usage

    def change_embeddings(self, embeddings: Tensor) -> Tensor:
        """Token embeddings E(x_t), (batch, length, width)."""
        return embeddings

    def change_learned(self, vectors: Tensor, table: nn.Embedding, draw: Draw) -> Tensor:
        """Vectors p_t of a learned table of positions, (batch or 1, length, width)."""
        return vectors

    def change_rotary(self, rotary: Rotary, module: Any, draw: Draw) -> Rotary:
        """Cosines and sines of a rotary module, each (batch or 1, length, head size)."""
        return rotary


@dataclass(frozen=True)
class NoPosition(Intervention, usage="no_pos"):
    """A meta-token has no position.

    Learned: p_t = 0. Rotary: its query and key are not rotated, in either attention, as if its position were 0; YaRN's
    scale of the rotation, which is no position, stays.
    """

    def change_learned(self, vectors: Tensor, table: nn.Embedding, draw: Draw) -> Tensor:
        """Zeros."""
        return torch.zeros_like(vectors)

    def change_rotary(self, rotary: Rotary, module: Any, draw: Draw) -> Rotary:
        """An angle of 0."""
        return torch.full_like(rotary[0], module.attention_scaling), torch.zeros_like(rotary[1])


@dataclass(frozen=True)
class NoEmbedding(Intervention, usage="no_embed"):
    """The embedding of a meta-token is 0; its position stays, and so does its row of the head, tied to the table."""

    def change_embeddings(self, embeddings: Tensor) -> Tensor:
        """Zeros."""
        return torch.zeros_like(embeddings)


@dataclass(frozen=True)
class Neither(NoPosition, NoEmbedding, usage="neither"):
    """A meta-token has neither position nor embedding."""


@dataclass(frozen=True)
class Noise(Intervention, usage="noise:S[:meta][:raw] with S at least 0"):
    """Each position t gets Gaussian noise, one draw for all sequences, layers, heads and both attentions.

    Learned: every entry of p_t gets noise of `scale` standard deviations of the table's entries. Rotary: t gets noise
    of `scale` positions, so that the angles of all frequencies move together, each by its own step.

    Attributes:
        scale: S, the standard deviation of the noise.
        meta_only: whether only meta-tokens get it; otherwise all tokens do.
        raw: whether it is in raw units instead. Learned: the table's. Rotary: the angle of each frequency gets its own
            noise, in radians.
    """

    scale: float
    meta_only: bool = False
    raw: bool = False

    is_random = True

    @classmethod
    def from_options(cls, *options: str) -> "Noise":
        """Noise with options such as `"0.5", "meta", "raw"`."""
        scale, *flags = options
        if not 0 <= float(scale) < math.inf or flags not in (
            [],
            ["meta"],
            ["raw"],
            ["meta", "raw"],
        ):
            raise ValueError
        return cls(float(scale), "meta" in flags, "raw" in flags)

    def __str__(self) -> str:
        scale = str(self.scale).removesuffix(".0")
        return f"noise:{scale}{':meta' * self.meta_only}{':raw' * self.raw}"

    @property
    def is_everywhere(self) -> bool:
        """Whether text tokens get it too."""
        return not self.meta_only

    def change_learned(self, vectors: Tensor, table: nn.Embedding, draw: Draw) -> Tensor:
        """p_t with noise."""
        unit = 1.0 if self.raw else table.weight.std()
        return vectors + self.scale * unit * draw(vectors.shape[-1])

    def change_rotary(self, rotary: Rotary, module: Any, draw: Draw) -> Rotary:
        """Angles with noise: cos(a + b) and sin(a + b)."""
        cos, sin = rotary
        if self.raw:
            angle = (self.scale * draw(cos.shape[-1] // 2)).repeat(1, 1, 2)
        else:
            angle = self.scale * draw(1) * module.inv_freq.repeat(2)
        return cos * angle.cos() - sin * angle.sin(), sin * angle.cos() + cos * angle.sin()


@contextmanager
def intervene(
    model: PreTrainedModel, intervention: Intervention | None, *, seed: int = 0
) -> Iterator[None]:
    """Run a model with an intervention, in `generate()` too, as long as the context lasts.

    Keys that are cached meanwhile keep it. Contexts can be nested: the inner one changes what the outer one left.

    Args:
        model: of this package, or for `no_embed` any other with a meta-token; left as it was. It has to be called with
            `input_ids`.
        intervention: what to do; None does nothing.
        seed: of the noise. The noise of position t is row t of `numpy.random.default_rng(seed).standard_normal((T,
            width))` in float32, for any T, so it depends neither on the batch nor on what is cached.

    Raises:
        UserError: if the model lacks the positions or the meta-token that the intervention changes, is wrapped, or is
            called with `inputs_embeds` or a `meta_token_mask`.
    """
    if intervention is None:
        yield
        return
    if unwrapped(model) is not model:  # a compiled graph does not run hooks that come later
        raise UserError(
            f"interventions change the model itself: give the one that the {type(model).__name__} wraps."
        )
    _check(intervention, model)
    hooks = _Hooks(intervention, model.config.meta_token_id, seed)
    with ExitStack() as stack:
        stack.enter_context(model.register_forward_pre_hook(_check_inputs, with_kwargs=True))
        stack.enter_context(model.get_input_embeddings().register_forward_hook(hooks.on_embedding))
        if intervention.has_positions and model.model.learned_positions is not None:
            stack.enter_context(
                model.model.learned_positions.register_forward_hook(hooks.on_learned)
            )
        if intervention.has_positions and model.model.rotary_emb is not None:
            stack.enter_context(model.model.rotary_emb.register_forward_hook(hooks.on_rotary))
        yield


def _check(intervention: Intervention, model: PreTrainedModel) -> None:
    if intervention.has_positions and not isinstance(model, MetaGPT2ForCausalLM):
        raise UserError(
            f"{intervention} is for this package's own models; on a {type(model).__name__} use no_embed."
        )
    if intervention.has_positions and model.config.position_embedding == "none":
        raise UserError(
            f"{intervention} changes positions, and this model has position_embedding 'none'; use no_embed."
        )
    if not intervention.is_everywhere and model.config.meta_token_id is None:
        raise UserError(f"{intervention} changes meta-tokens, and this model has no meta_token_id.")


def _check_inputs(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
    for name in ("inputs_embeds", "meta_token_mask"):
        if inputs.get(name) is not None:
            raise UserError(
                f"an intervention finds meta-tokens by their ids: give input_ids, and no {name}."
            )


class _Hooks:
    """Hooks, which change what the embedding (always called first), the learned table and the rotary module return."""

    def __init__(self, intervention: Intervention, meta_token_id: int | None, seed: int):
        self.intervention, self.meta_token_id = (
            intervention,
            -1 if meta_token_id is None else meta_token_id,
        )
        self.generator = np.random.default_rng(seed)
        self.rows: np.ndarray | None = None  # the noise of each position, (positions, width)
        self.is_meta: Tensor  # (batch, length, 1), of the current forward pass

    def on_embedding(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        self.is_meta = (args[0] == self.meta_token_id).unsqueeze(-1)
        return self._select(self.intervention.change_embeddings(output), output)

    def on_learned(self, table: nn.Embedding, args: tuple[Tensor], output: Tensor) -> Tensor:
        changed = self.intervention.change_learned(
            output, table, lambda width: self.noise(args[0], width)
        )
        return self._select(changed, output)

    def on_rotary(self, module: Any, args: tuple[Tensor, Tensor], output: Rotary) -> Rotary:
        cos, sin = self.intervention.change_rotary(
            output, module, lambda width: self.noise(args[1], width)
        )
        return self._select(cos, output[0]), self._select(sin, output[1])

    def noise(self, position_ids: Tensor, width: int) -> Tensor:
        """The noise of positions (batch or 1, length), drawn in order, so that later positions change none before."""
        rows = np.empty((0, width), dtype=np.float32) if self.rows is None else self.rows
        if (missing := int(position_ids.max()) + 1 - len(rows)) > 0:
            rows = np.concatenate(
                [rows, self.generator.standard_normal((missing, width), dtype=np.float32)]
            )
        self.rows = rows
        return torch.from_numpy(rows[position_ids.cpu().numpy()]).to(position_ids.device)

    def _select(self, changed: Tensor, plain: Tensor) -> Tensor:
        """`changed`, (batch or 1, length, features), where the intervention applies."""
        changed = changed.to(plain)
        return (
            changed
            if self.intervention.is_everywhere
            else torch.where(self.is_meta, changed, plain)
        )
