"""The findings of `look`, and the page that shows them: one self-contained HTML file, drawn by Plotly."""

import base64
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from torch import Tensor
from torch.nn.functional import avg_pool2d
from transformers import PreTrainedTokenizerBase

from metatokens.analysis.observation import Observation
from metatokens.analysis.sharpness import entropy
from metatokens.data.tokenizer import text_of_token
from metatokens.looking.style import page_templates, readable

SIGNATURE = "metatokens look"  # is in every page, so that no other file is ever overwritten
# Cells of a map at most, across and down; in longer prompts each covers several tokens.
MAX_SIDE = 256
MAX_CELLS = 12_000_000  # of all maps of a model together
# From light to dark, so that it can be read without colour vision.
SCALE = [[0, "#ffffff"], [0.5, "#6baed6"], [1, "#08306b"]]


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The likeliest next tokens, likeliest first, without the meta-token.

    Attributes:
        ids: (..., 5) int64.
        probabilities: (..., 5).
    """

    ids: Tensor
    probabilities: Tensor


@dataclass(frozen=True, slots=True)
class Look:
    """The inside of a model as it reads one prompt.

    Attributes:
        name: of the model.
        tokens: of the prompt, as text; a meta-token is `<|meta|>`.
        ids: (length,) int64.
        is_meta: (length,) bool.
        observation: states, queries, keys, values and logits (`analysis.observation`).
        zeroed: the same while the embeddings of meta-tokens are zero (paper, Figure 2); None without a meta-token.
        lens: the logit lens (nostalgebraist, 2020), (layers + 1, length, 5): what the head makes of the residual stream
            before the first block and after each block.
        answers: the next tokens, each (5,): `with its meta-tokens`, `without` them, `among decoys`, which are as many
            extra meta-tokens at random places, and `with the text covered`, if the prompt has a question: from its
            `Q:` on, that sees the meta-tokens before it alone.
        tokenizer: of the model.
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
        """For each kind of attention, `attention` and `second_attention`, the layers that have it."""
        layers_of: defaultdict[str, list[int]] = defaultdict(list)
        for module, layer in sorted(self.observation.attention):
            layers_of[module].append(layer)
        return dict(layers_of)

    def positions(self, module: str, layer: int) -> Tensor:
        """The positions of an attention module's rows, (rows,) int64: those of all tokens, or of the meta-tokens."""
        return self.observation.attention[module, layer].positions

    def attention(self, module: str, layer: int) -> Tensor:
        """Attention weights, (heads, queries, keys); each row sums to 1."""
        return self.observation.attention[module, layer].weights()

    def forgotten(self, module: str, layer: int) -> Tensor | None:
        """Which keys before a query no head of it sees, (queries, keys) bool; None if all are seen."""
        mask = self.observation.attention[module, layer].mask
        if mask is None:
            return None
        hidden = (mask == -torch.inf).all(dim=0).tril()
        return hidden if hidden.any() else None

    def entropy(self, module: str, layer: int, *, zeroed: bool = False) -> Tensor:
        """The entropy (nats) of each row of attention weights, (heads, rows).

        With `zeroed`, the embeddings of meta-tokens are zero; a prompt without one raises a ValueError.
        """
        seen = self.zeroed if zeroed else self.observation
        if seen is None:
            raise ValueError("the prompt has no meta-token.")
        return entropy(seen.attention[module, layer].logits())

    def to_html(self) -> str:
        """The page that `metatokens look` writes: one self-contained file."""
        return to_html([self])

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{escape(self.to_html())}" title="Inside {escape(self.name)}" '
            'style="width: 100%; height: 50rem; border: 0"></iframe>'
        )


def to_html(looks: Sequence[Look]) -> str:
    """The page of one model, or of several on the same prompt, next to each other."""
    models = [_model(look) for look in looks]
    data = gzip.compress(json.dumps(models).encode(), mtime=0)
    names = [look.name for look in looks]
    template = page_templates("metatokens.looking").get_template("page.html.j2")
    return template.render(
        signature=SIGNATURE,
        scale=SCALE,
        names=names,
        answers=[_answers(look) for look in looks],
        forgets=any(
            look.forgotten(*module) is not None
            for look in looks
            for module in look.observation.attention
        ),
        script=Markup(files("metatokens.looking").joinpath("page.js").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()),
        data=base64.b64encode(data).decode(),
    )


def _answers(look: Look) -> list[tuple[str, list[tuple[str, float]]]]:
    """The likeliest next tokens after each prompt, with their probabilities."""
    columns = []
    for title, likeliest in look.answers.items():
        tokens = zip(_texts(look, likeliest.ids), likeliest.probabilities.tolist(), strict=True)
        columns.append((title, list(tokens)))
    return columns


def _texts(look: Look, ids: Tensor) -> list[str]:
    return [readable(text_of_token(look.tokenizer, token)) for token in ids.tolist()]


def _model(look: Look) -> dict[str, Any]:
    """A model's data for the page's script."""
    maps = sum(len(inputs.queries) + 1 for inputs in look.observation.attention.values())
    side = min(MAX_SIDE, max(16, math.isqrt(MAX_CELLS // maps)))
    modules = []
    for module, layers in look.modules.items():
        of_layer = {layer: _module(look, module, layer, side) for layer in layers}
        modules.append({"title": _title_of(look, module), "layers": of_layer})
    return {
        "name": look.name,
        "tokens": [readable(token) for token in look.tokens],
        "isMeta": look.is_meta.tolist(),
        "modules": modules,
        "lens": {
            "tokens": [[_texts(look, ids) for ids in row] for row in look.lens.ids],
            "probabilities": _rounded(look.lens.probabilities),
        },
    }


def _title_of(look: Look, module: str) -> str:
    """The title of an attention module; its rows decide between meta-attention and a second attention."""
    if module == "attention":
        return "Causal attention"
    rows = len(look.positions(module, look.modules[module][0]))
    return "Second attention" if rows == len(look.ids) else "Meta-attention"


def _module(look: Look, module: str, layer: int, side: int) -> dict[str, Any]:
    """A layer's attention: maps and row entropies, of the mean over heads and of each head."""
    weights = _after_their_mean(look.attention(module, layer).float().cpu())
    step = math.ceil(weights.shape[-1] / side)
    forgotten = look.forgotten(module, layer)
    # The mean of the heads' entropies, which is not the entropy of their mean weights.
    entropies = {"kept": _rounded(_after_their_mean(look.entropy(module, layer)))}
    if look.zeroed is not None:
        entropies["zeroed"] = _rounded(_after_their_mean(look.entropy(module, layer, zeroed=True)))
    return {
        "positions": look.positions(module, layer).tolist(),
        "forgotten": None
        if forgotten is None
        else _bytes(_means_of_cells(forgotten[None].float().cpu(), step)),
        "step": step,
        "maps": [_bytes(weights_of_head) for weights_of_head in coarse(weights, step)],
        "entropy": entropies,
    }


def _after_their_mean(heads: Tensor) -> Tensor:
    """The mean over heads, and then each head, (heads + 1, ...)."""
    return torch.cat([heads.mean(dim=0, keepdim=True), heads])


def _rounded(values: Tensor) -> list[Any]:
    """Nested lists of numbers with four digits after the point, which is all that the page shows."""
    return np.round(values.double().cpu().numpy(), 4).tolist()


def coarse(weights: Tensor, step: int) -> Tensor:
    """Attention weights (maps, queries, keys), summed over `step` keys and averaged over as many queries.

    Returns:
        (maps, ceil(queries / step), ceil(keys / step)); each row still sums to 1.
    """
    means = _means_of_cells(weights, step)
    keys = torch.full((means.shape[-1],), float(step))
    keys[-1] = weights.shape[-1] - step * (len(keys) - 1)
    return means * keys


def _means_of_cells(maps: Tensor, step: int) -> Tensor:
    """Maps averaged over `step` queries and as many keys; the last cells have what is left."""
    return avg_pool2d(maps[:, None], step, ceil_mode=True, count_include_pad=False)[:, 0]


def _bytes(weights: Tensor) -> str:
    """A map as bytes, 255 times the square root of each weight, so that small weights are not all 0."""
    return base64.b64encode(
        (weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).numpy().tobytes()
    ).decode()
