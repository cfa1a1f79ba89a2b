"""The claims of `claims.yaml`, which explains their fields, and how a claim selects the scores of runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from itertools import product
from math import prod
from typing import Any, Literal

import numpy as np
import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, field_validator

from metatokens.paper import rule
from metatokens.paper.frame import Inputs, select
from metatokens.paper.rule import Effect, Kind, Stratum, Verdict
from metatokens.records import unpack_hits

GUESSES = 0.05  # a side within this share of guessing counts as guessing
CEILING = 0.98  # of the prompts: two sides above it leave no room for a gain

Fields = dict[str, Any]
Side = Fields | float | Literal["chance"]

_TRAINED = ("task", "model", "variant", "position_embedding")  # settings that differ in one of these have other runs
_TRAINING = ("model", "variant", "position_embedding", "train_condition")  # sides that agree in all have the same runs


class Claim(BaseModel):
    """A difference, a less b, that is said to be positive; `claims.yaml` explains the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    question: str
    section: str
    source: str
    number: int | None = None
    primary: bool = False
    a: Side
    b: tuple[Side, ...]
    less: Fields = {}
    over: tuple[Fields, ...]
    scaled: bool = False
    kind: Kind = "gain"
    unit: Literal["points", "percent", "nats", "logits", "cosine", "steps", "times"] = "points"
    smallest: float = 0.05
    universal: bool = False

    @field_validator("b", "over", mode="before")
    @classmethod
    def _one_is_several(cls, found: Any) -> Any:
        return found if isinstance(found, list) else [found]

    @field_validator("a", "b", mode="before")
    @classmethod
    def _name_is_of_model(cls, side: Any) -> Any:
        if isinstance(side, list):
            return [cls._name_is_of_model(one) for one in side]
        return {"model": side} if isinstance(side, str) and side != "chance" else side

    @property
    def metric(self) -> str:
        """The metric that is compared."""
        sides = [side for side in (self.a, *self.b) if isinstance(side, dict)]
        return str(sides[0].get("metric", "exact_match"))

    @property
    def cases(self) -> int:
        """How many strata it names."""
        return sum(prod(len(over[key]) for key in over if key in _TRAINED) for over in self.over) * len(self.b)

    def figures(self, b: Side) -> list[tuple[int, Fields]]:
        """The figures to measure, each with its sign: a, b, and their counterparts by `less`. A bound is none."""
        sides = [(1, self.a), (-1, b)]
        if self.less:
            sides += [(-sign, {**side, **self.less}) for sign, side in sides if isinstance(side, dict)]
        return [(sign, side) for sign, side in sides if isinstance(side, dict)]


@dataclass(frozen=True)
class Setting:
    """One setting of a claim.

    Args:
        fields: what it fixes: a task, lengths, and the like.
        means: the mean over runs of each figure, in the order of `Claim.figures`.
        left_out: why it does not count: "both guess", "both exceed 98 %" or "neither learns"; empty where it counts.
    """

    fields: Fields
    means: tuple[float, ...]
    left_out: str


@dataclass(frozen=True, kw_only=True)
class Part(Stratum):
    """A stratum, with what it was made from.

    Args:
        fields: what its runs have in common, where other strata have other runs: a task, a model.
        against: what the claim subtracts.
        settings: what was run on both sides; the stratum is the mean of those that count.
        seeds: of the runs of each sample; a run counts if it has every setting that counts.
    """

    fields: Fields
    against: Side
    settings: tuple[Setting, ...]
    seeds: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Judged:
    """A claim and what was measured of it.

    Args:
        claim: the claim.
        parts: its strata in which a setting counts.
        empty: its strata in which no setting counts.
    """

    claim: Claim
    parts: tuple[Part, ...]
    empty: tuple[Part, ...]

    @cached_property
    def effect(self) -> Effect:
        """The claim's one number; a claim about all cases has the number of its worst case."""
        return self._effect(self.parts)

    @cached_property
    def tasks(self) -> dict[str, Effect]:
        """The effect in each task. It carries no verdict."""
        tasks = dict.fromkeys(part.task for part in self.parts)
        return {task: self._effect([part for part in self.parts if part.task == task]) for task in tasks}

    def _effect(self, parts: Sequence[Part]) -> Effect:
        if self.claim.universal and parts:
            return min((rule.effect([part]) for part in parts), key=lambda one: one.value)
        return rule.effect(parts)

    @cached_property
    def verdict(self) -> Verdict:
        """The word that the rule gives; inconclusive where every setting is left out."""
        kind, smallest = self.claim.kind, self.claim.smallest
        if not self.parts:
            return "inconclusive" if self.empty else "not run"
        if self.claim.universal:
            is_complete = len(self.parts) == self.claim.cases
            return rule.verdict_everywhere(self.parts, kind, smallest, is_complete=is_complete)
        return rule.verdict(self.effect, kind, smallest)

    @property
    def p(self) -> float:
        """The p-value of the verdict; see `rule.p_value`."""
        return rule.p_value(self.effect, self.claim.kind, self.claim.smallest)


@cache
def claims() -> tuple[Claim, ...]:
    """The claims of the paper and our own, in the order of the questions that they answer."""
    questions = yaml.safe_load(files("metatokens.paper").joinpath("claims.yaml").read_text(encoding="utf-8"))
    del questions["lists"]
    return tuple(
        Claim.model_validate({**block, **own, "text": text, "question": question})
        for question, blocks in questions.items()
        for block in blocks
        for text, own in block.pop("claims").items()
    )


def judge(inputs: Inputs, claim: Claim) -> Judged:
    """The claim with what was measured of it."""
    parts = [part for b, over in product(claim.b, claim.over) for part in _parts(inputs, claim, b, over)]
    empty = [all(one.left_out for one in part.settings) for part in parts]
    counted, left = (
        [part for part, is_empty in zip(parts, empty, strict=True) if is_empty == want] for want in (False, True)
    )
    return Judged(claim, tuple(counted), tuple(left))


def after_holm(judged: Sequence[Judged]) -> dict[str, bool]:
    """By the text of each primary claim, whether its verdict holds after Holm's correction for their number."""
    return rule.holm({one.claim.text: one.p for one in judged if one.claim.primary})


def _parts(inputs: Inputs, claim: Claim, b: Side, over: Fields) -> Iterator[Part]:
    """The strata of one comparison, in the order of its lists."""
    keys = [key for key in over if key != "ratio"]
    scores = _scores(inputs, claim, b, over, keys)
    strata = [key for key in keys if key in _TRAINED]
    for values in product(*(over[key] for key in strata)):
        fields = dict(zip(strata, values, strict=True))
        settings, kept = [], []
        for setting, rows in select(scores, **fields).groupby(keys):
            means = rows.groupby("figure")["value"].mean()
            left_out = _why_left_out(claim, means.to_numpy(), rows["chance"].iloc[0])
            settings.append(Setting(dict(zip(keys, setting, strict=True)), tuple(means), left_out))
            kept += [] if left_out else [rows]
        own = _complete(pd.concat(kept) if kept else scores[:0], len(kept))
        if settings and (not kept or own["figure"].nunique() == len(claim.figures(b))):
            yield _part(claim, b, fields, tuple(settings), own)


def _scores(inputs: Inputs, claim: Claim, b: Side, over: Fields, keys: list[str]) -> pd.DataFrame:
    """A row for each setting, figure and run, of settings that have every figure.

    Columns: the keys of the settings, `figure` (its number), `sign`, `training` (the number of the side that was
    trained), `seed`, `value`, `error` (the standard error in the line), `hits` (right or wrong of each prompt that all
    figures have, or empty), `chance`, and `prompts`, in which rows that were measured on the same prompts are alike.
    """
    scale = inputs.scale if claim.scaled else 1
    lists = {key: [one // scale for one in over[key]] if key.endswith("length") else over[key] for key in keys}
    figures = claim.figures(b)
    trainings = [{key: fields.get(key) for key in _TRAINING} for _, fields in figures]
    found, settings = [], pd.DataFrame()
    for figure, (sign, fields) in enumerate(figures):
        rows = inputs.select(**{"metric": claim.metric, **lists, **fields}).dropna(subset=["value"])
        if figure == 0:
            settings = rows[keys].drop_duplicates()
            if "ratio" in over:
                settings = settings[(settings["length"] / settings["train_length"]).isin(over["ratio"])]
        rows = rows.assign(
            figure=figure,
            sign=sign,
            training=trainings.index(trainings[figure]),
            prompts=rows["task"] + rows["condition"] + rows["length"].fillna(0).astype(str),
            error=((rows["high"] - rows["low"]) / 2 / 1.96).fillna(0.0),
        )
        own = [key for key in keys if key not in fields]
        rows = rows.drop(columns=[key for key in keys if key in fields])
        found.append(settings.merge(rows, on=own) if own else settings.merge(rows, how="cross"))
    about = [*keys, "figure", "sign", "training", "seed"]
    columns = {"value": "mean", "error": "mean", **dict.fromkeys(("n", "hits", "chance", "prompts"), "first")}
    scores = pd.concat(found).groupby(about, as_index=False, sort=False).agg(columns)  # heads and layers are averaged
    scores = scores[scores.groupby(keys)["figure"].transform("nunique") == len(figures)]
    if not scores["hits"].all():
        return scores.assign(hits="")
    fewest = scores.groupby("prompts")["n"].transform("min").astype(int)  # a test with fewer prompts has the first ones
    hits = [unpack_hits(*one) for one in zip(scores["hits"], fewest, strict=True)]
    return scores.assign(hits=hits, value=[float(own.mean()) for own in hits])


def _why_left_out(claim: Claim, means: np.ndarray, chance: float) -> str:
    if claim.metric == "log_steps_to_learn":
        return "neither learns" if (means >= chance).all() else ""
    if claim.metric != "exact_match" or len(means) == 1:
        return ""
    if (means <= chance + GUESSES).all():
        return "both guess"
    return "both exceed 98 %" if claim.kind == "gain" and (means > CEILING).all() else ""


def _complete(scores: pd.DataFrame, settings: int) -> pd.DataFrame:
    """The scores of the runs that have every figure of their training in so many settings, with the `share` of each."""
    figures = scores.groupby("training")["figure"].transform("nunique")
    has = scores.groupby(["training", "seed"])["figure"].transform("size")
    return scores[has == settings * figures].assign(share=lambda own: own["sign"] / settings)


def _part(claim: Claim, b: Side, fields: Fields, settings: tuple[Setting, ...], kept: pd.DataFrame) -> Part:
    """The stratum, of the scores in the settings that count."""
    runs = (kept["share"] * kept["value"]).groupby([kept["training"], kept["seed"]]).sum()
    samples = [own.droplevel("training") for _, own in runs.groupby("training")]
    bounds = ((1, claim.a), (-1, kept["chance"].mean() if b == "chance" else b))
    constant = float(sum(sign * bound for sign, bound in bounds if isinstance(bound, (int, float))))
    if claim.unit == "times":  # a time has no luck of training
        constant, samples = constant + sum(float(one.mean()) for one in samples), []
    return Part(
        task=fields.get("task", ""),
        samples=tuple(own.to_numpy() for own in samples),
        constant=constant,
        prompts=_prompts(kept),
        fields=fields,
        against=b,
        settings=settings,
        seeds=tuple(tuple(map(int, own.index)) for own in samples),
    )


def _prompts(kept: pd.DataFrame) -> float:
    """The variance that the draw of prompts adds to the sum of the scores' shares.

    Where lines hold right and wrong of each prompt, `rule.prompt_variance` gives it. Other lines give a standard error;
    then those of runs, and of settings with the same prompts, are taken as wholly dependent, those of the figures as
    independent.
    """
    variance = 0.0
    for _, own in kept.groupby("prompts"):
        if len(own["hits"].iloc[0]):
            shares = (own["share"] * own["hits"]).groupby([own["training"], own["seed"]]).sum()
            variance += rule.prompt_variance([np.stack(side.to_list()) for _, side in shares.groupby("training")])
        else:
            errors = (own["share"] * own["error"]).groupby([own["figure"], own["seed"]]).sum()
            variance += float((errors.groupby("figure").mean() ** 2).sum())
    return max(variance, 0.0)
