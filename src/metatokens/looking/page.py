"""What `look` finds in a model, and the page that shows it: one self-contained HTML file, drawn by Plotly."""

import base64
import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from torch import Tensor
from torch.nn.functional import avg_pool2d
from transformers import PreTrainedTokenizerBase

from metatokens.analysis.observation import Observation
from metatokens.analysis.sharpness import entropy

SIGNATURE = "metatokens look"  # stands in every page, so that no other file is ever overwritten
MAX_SIDE = 256  # cells of a map, across and down; a longer prompt's are averages over several tokens
# From light to dark, so that it is read without colour vision too.
SCALE = [[0, "#ffffff"], [0.5, "#6baed6"], [1, "#08306b"]]
MAX_CELLS = 12_000_000  # of all maps of a model together


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The likeliest next tokens, likeliest first; the meta-token is none of them.

    Attributes:
        ids: (..., 5) int64.
        probabilities: (..., 5).
    """

    ids: Tensor
    probabilities: Tensor


@dataclass(frozen=True, slots=True)
class Look:
    """What a model did with one prompt.

    Attributes:
        name: the model's.
        tokens: the prompt's, as text; a meta-token is `<|meta|>`.
        ids: (length,) int64.
        is_meta: (length,) bool.
        observation: states, queries, keys and values, logits (`analysis.observation`).
        zeroed: the same while the meta-tokens' embeddings are zero (paper, Figure 2); None without a meta-token.
        lens: what the head makes of the residual stream before the first block and after each, (layers + 1, length, 5):
            the logit lens (nostalgebraist, 2020).
        answers: what follows the prompt as it stands, `with its meta-tokens`; `without` them; and `among decoys`, as
            many meta-tokens more at places that were drawn. Each (5,).
        tokenizer: the model's.
    """

    name: str
    tokens: list[str]
    ids: Tensor
    is_meta: Tensor
    observation: Observation
    zeroed: Observation | None
    lens: Likeliest
    answers: dict[str, Likeliest]
    tokenizer: PreTrainedTokenizerBase

    @property
    def modules(self) -> dict[str, list[int]]:
        """The layers that have an attention module, by its name: `attention`, `second_attention`."""
        found: dict[str, list[int]] = {}
        for module, layer in sorted(self.observation.attention):
            found.setdefault(module, []).append(layer)
        return found

    def positions(self, module: str, layer: int) -> Tensor:
        """Where the rows of an attention module stand in the prompt, (rows,) int64; all, or the meta-tokens'."""
        return self.observation.attention[module, layer].positions

    def attention(self, module: str, layer: int) -> Tensor:
        """Attention weights, (heads, queries, keys); a row's sum is 1."""
        return self.observation.attention[module, layer].weights()

    def entropy(self, module: str, layer: int, *, zeroed: bool = False) -> Tensor:
        """The entropy (nats) of each row of attention weights, (heads, rows).

        Args:
            module: `attention` or `second_attention`.
            layer: number of the block.
            zeroed: while the meta-tokens' embeddings are zero.

        Raises:
            ValueError: if there is no meta-token whose embedding could be zero.
        """
        if zeroed and self.zeroed is None:
            raise ValueError("the prompt has no meta-token.")
        seen = self.zeroed if zeroed and self.zeroed is not None else self.observation
        return entropy(seen.attention[module, layer].logits())

    def to_html(self) -> str:
        """The page that `metatokens look` writes: one file that needs no other."""
        return to_html([self])

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{escape(self.to_html())}" title="Inside {escape(self.name)}" '
            'style="width: 100%; height: 50rem; border: 0"></iframe>'
        )


def to_html(looks: Sequence[Look]) -> str:
    """One page of one model or of several side by side, on the same prompt."""
    models = [_model(look) for look in looks]
    data = gzip.compress(json.dumps(models).encode(), mtime=0)
    environment = Environment(
        loader=PackageLoader("metatokens.looking", "."), undefined=StrictUndefined, autoescape=True, trim_blocks=True
    )
    names = [look.name for look in looks]
    return environment.get_template("page.html.j2").render(
        signature=SIGNATURE,
        scale=SCALE,
        names=names,
        looks=looks,
        answers=[_answers(look) for look in looks],
        script=Markup(files("metatokens.looking").joinpath("page.js").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()),
        data=base64.b64encode(data).decode(),
    )


def readable(token: str) -> str:
    """A token as it can be shown: what is only white space is made visible."""
    return token.replace("\n", "⏎").replace("\t", "⇥") if token.strip() else token.replace("\n", "⏎").replace(" ", "␣")


def _answers(look: Look) -> list[tuple[str, list[tuple[str, float]]]]:
    """For each prompt the likeliest next tokens with their probabilities."""
    return [
        (title, list(zip(_texts(look, likeliest.ids), likeliest.probabilities.tolist(), strict=True)))
        for title, likeliest in look.answers.items()
    ]


def _texts(look: Look, ids: Tensor) -> list[str]:
    return [readable(look.tokenizer.decode([token])) for token in ids.tolist()]


def _model(look: Look) -> dict[str, Any]:
    """What the page's script reads of a model."""
    modules = look.modules
    maps = sum(len(inputs.queries) + 1 for inputs in look.observation.attention.values())
    side = min(MAX_SIDE, max(16, math.isqrt(MAX_CELLS // maps)))
    return {
        "name": look.name,
        "tokens": [readable(token) for token in look.tokens],
        "isMeta": look.is_meta.tolist(),
        "modules": [
            {
                "title": title_of(look, module),
                "layers": {layer: _module(look, module, layer, side) for layer in layers},
            }
            for module, layers in modules.items()
        ],
        "lens": _lens(look, look.lens),
    }


def title_of(look: Look, module: str) -> str:
    """What an attention module is called, by what its rows are."""
    if module == "attention":
        return "Causal attention"
    rows = len(look.positions(module, look.modules[module][0]))
    return "Second attention" if rows == len(look.ids) else "Meta-attention"


def _module(look: Look, module: str, layer: int, side: int) -> dict[str, Any]:
    """One layer's attention: maps of the heads' mean and of each head, and each row's entropy."""
    weights = look.attention(module, layer).float()
    weights = torch.cat([weights.mean(dim=0, keepdim=True), weights])
    step = math.ceil(weights.shape[-1] / side)
    entropies = {"kept": look.entropy(module, layer)}
    if look.zeroed is not None:
        entropies["zeroed"] = look.entropy(module, layer, zeroed=True)
    return {
        "positions": look.positions(module, layer).tolist(),
        "step": step,
        "maps": [_bytes(one) for one in coarse(weights, step)],
        # A mean over heads of entropies: that of the mean of their weights would be another number.
        "entropy": {
            name: [[round(x, 4) for x in row] for row in torch.cat([of.mean(dim=0, keepdim=True), of]).tolist()]
            for name, of in entropies.items()
        },
    }


def coarse(weights: Tensor, step: int) -> Tensor:
    """Attention weights summed over `step` keys and averaged over as many queries.

    Args:
        weights: (maps, queries, keys).
        step: tokens that a cell stands for, across and down; the last ones may stand for fewer.

    Returns:
        (maps, ceil(queries / step), ceil(keys / step)); a row's sum stays 1.
    """
    if step == 1:
        return weights
    means = avg_pool2d(weights[:, None], step, ceil_mode=True, count_include_pad=False)[:, 0]
    keys = torch.full((means.shape[-1],), float(step))
    keys[-1] = weights.shape[-1] - step * (len(keys) - 1)
    return means * keys


def _bytes(weights: Tensor) -> str:
    """A map as bytes of 255 times the square root, so that small weights are not all 0."""
    return base64.b64encode((weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).numpy().tobytes()).decode()


def _lens(look: Look, lens: Likeliest) -> dict[str, Any]:
    return {
        "tokens": [[_texts(look, ids) for ids in row] for row in lens.ids],
        "probabilities": [[[round(p, 4) for p in ps] for ps in row] for row in lens.probabilities.tolist()],
    }
