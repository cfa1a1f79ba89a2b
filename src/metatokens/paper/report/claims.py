"""The claims of `claims.yaml`, which says what its fields mean."""

import math
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from metatokens.paper.report.compare import Versus

SMALL = 0.05  # of a proportion: a gain below this is none to speak of, and a loss below this is a match


class Claim(BaseModel):
    """Something said to be so: each of some differences lies above a margin."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    source: str
    section: str
    """The anchor of the section that shows it."""
    versus: tuple[Versus, ...]
    says: Literal["gain", "above", "match"] = "gain"
    within: float = SMALL
    universal: bool = False
    """Whether one exception refutes it."""
    unit: Literal["points", "percent", "nats", "times", "plain"] = "points"
    quote: str = ""
    """The label of the comparison that stands first."""
    headline: int = 0
    """Its place among the first sentences of the page; 0 if it is none."""

    @property
    def is_the_papers(self) -> bool:
        """Whether the paper says so, or we ask."""
        return self.source not in ("control", "beyond the paper")

    @property
    def margin(self) -> float:
        """Above which each difference is said to lie; negative for a claim that nothing is lost."""
        lost = math.log1p(self.within) if self.unit == "percent" else self.within
        return -lost if self.says == "match" else 0.0

    @property
    def negligible(self) -> float:
        """A difference shown to be below this is none to speak of."""
        return SMALL if self.says == "gain" else self.margin


@cache
def claims(scale: int) -> dict[str, list[Claim]]:
    """The claims of the paper and our own, by the question that they answer.

    Args:
        scale: how many times as long as ours the paper's prompts are where the context is extended.
    """
    blocks = yaml.safe_load(files("metatokens.paper.report").joinpath("claims.yaml").read_text(encoding="utf-8"))
    del blocks["lists"]
    return {
        question: [_claim(text, block | own, scale) for block in found for text, own in block.pop("claims").items()]
        for question, found in blocks.items()
    }


def _claim(text: str, fields: dict[str, Any], scale: int) -> Claim:
    compared = {name: fields.pop(name) for name in [*fields] if name in Versus.model_fields}
    by_scale = {"scale": scale} if fields.pop("scaled", False) else {}
    is_match = {"is_match": fields.get("says") == "match"}
    parts = fields.pop("compare", [{}])
    versus = tuple(Versus.model_validate(compared | by_scale | is_match | part) for part in parts)
    return Claim(text=text, versus=versus, **fields)
