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

# Settings that differ in one of these have other runs.
_BY_RUNS = ("task", "model", "variant", "position_embedding")
# Sides that agree in all of these have the same runs.
_SAME_RUNS = ("model", "variant", "position_embedding", "train_condition")


class Claim(BaseModel):
    """A difference, a less b, that is said to be positive; `claims.yaml` explains the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    question: str
    only: str
    source: str
    number: int | None = None
    primary: bool = False
    a: Side
    b: tuple[Side, ...]
    less: Fields = {}
    over: tuple[Fields, ...]
    scaled: bool = False
    kind: Kind = "gain"
    unit: Literal["points", "percent", "nats", "logits", "cosine", "times"] = "points"
    smallest: float = 0.05
    universal: bool = False
    by_construction: bool = False
    note: str = ""

    @field_validator("b", "over", mode="before")
    @classmethod
    def _one_is_several(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value]

    @property
    def title(self) -> str:
        """Its text, after the number of a claim of the paper."""
        return f"{self.number}. {self.text}" if self.number else self.text

    @property
    def metric(self) -> str:
        """The metric that is compared."""
        sides = [side for side in (self.a, *self.b) if isinstance(side, dict)]
        return str(sides[0].get("metric", "exact_match"))

    @property
    def cases(self) -> int:
        """How many strata it names."""
        combinations = 0
        for over in self.over:
            combinations += prod(len(over[key]) for key in over if key in _BY_RUNS)
        return combinations * len(self.b)

    def figures(self, b: Side) -> list[tuple[int, Fields]]:
        """The figures to measure, each with its sign: a, b, and their counterparts by `less`. A bound is none."""
        figures = [(sign, side) for sign, side in ((1, self.a), (-1, b)) if isinstance(side, dict)]
        if self.less:
            figures += [(-sign, {**side, **self.less}) for sign, side in figures]
        return figures


@dataclass(frozen=True)
class Setting:
    """One setting of a claim.

    Args:
        fields: what it fixes: a task, lengths, and the like.
        means: the mean over runs of each figure, in the order of `Claim.figures`.
        left_out: why it does not count: "both guess" or "both exceed 98 %"; empty where it counts.
    """

    fields: Fields
    means: tuple[float, ...]
    left_out: str


@dataclass(frozen=True, kw_only=True)
class MeasuredStratum(Stratum):
    """A stratum, with what it was made from.

    Args:
        fields: what its runs have in common, where other strata have other runs: a task, a model.
        against: what the claim subtracts.
        settings: what was run on both sides; the stratum is the mean of those that count. A run counts if it has every
            one of these.
    """

    fields: Fields
    against: Side
    settings: Sequence[Setting]


@dataclass(frozen=True)
class ClaimResult:
    """A claim and what was measured of it.

    Args:
        claim: the claim.
        strata: those in which a setting counts.
        empty_strata: those in which no setting counts.
    """

    claim: Claim
    strata: tuple[MeasuredStratum, ...]
    empty_strata: tuple[MeasuredStratum, ...]

    @cached_property
    def effect(self) -> Effect:
        """The claim's one number; a claim about all cases has the number of its worst case."""
        if self.claim.universal and self.strata:
            effects = [rule.effect([stratum]) for stratum in self.strata]
            return min(effects, key=lambda effect: effect.value)
        return rule.effect(self.strata)

    @cached_property
    def tasks(self) -> dict[str, Effect]:
        """The effect in each task. It carries no verdict."""
        return {
            task: rule.effect([stratum for stratum in self.strata if stratum.task == task])
            for task in dict.fromkeys(stratum.task for stratum in self.strata)
        }

    @cached_property
    def without(self) -> dict[str, Effect]:
        """The tasks without which a supported claim would not be supported, and its effect without them."""
        effects: dict[str, Effect] = {}
        if self.verdict != "supported" or self.claim.universal or len(self.tasks) < 2:
            return effects
        for task in self.tasks:
            effect = rule.effect([stratum for stratum in self.strata if stratum.task != task])
            if rule.verdict(effect, self.claim.kind, self.claim.smallest) != "supported":
                effects[task] = effect
        return effects

    @cached_property
    def verdict(self) -> Verdict:
        """The word that the rule gives; inconclusive where every setting is left out."""
        kind, smallest = self.claim.kind, self.claim.smallest
        if not self.strata:
            return "inconclusive" if self.empty_strata else "not measured"
        if self.claim.universal:
            is_complete = len(self.strata) == self.claim.cases
            return rule.verdict_everywhere(self.strata, kind, smallest, is_complete=is_complete)
        return rule.verdict(self.effect, kind, smallest)

    def holds_among(self, tests: int) -> bool:
        """Whether the verdict is the same at a level corrected for the number of claims."""
        effect = rule.effect(self.strata, rule.corrected(tests))
        return rule.verdict(effect, self.claim.kind, self.claim.smallest) == self.verdict


@cache
def claims() -> tuple[Claim, ...]:
    """The claims of the paper and our own, in the order of the questions that they answer."""
    questions = yaml.safe_load(
        files("metatokens.paper").joinpath("claims.yaml").read_text(encoding="utf-8")
    )
    del questions["lists"]
    read: list[Claim] = []
    for question, blocks in questions.items():
        for block in blocks:
            for text, fields in block.pop("claims").items():
                read.append(
                    Claim.model_validate({**block, **fields, "text": text, "question": question})
                )
    return tuple(read)


def judge(inputs: Inputs, claim: Claim) -> ClaimResult:
    """The claim with what was measured of it."""
    strata: list[MeasuredStratum] = []
    empty_strata: list[MeasuredStratum] = []
    for b, over in product(claim.b, claim.over):
        for stratum in _strata(inputs, claim, b, over):
            is_empty = all(setting.left_out for setting in stratum.settings)
            (empty_strata if is_empty else strata).append(stratum)
    return ClaimResult(claim, tuple(strata), tuple(empty_strata))


def _strata(inputs: Inputs, claim: Claim, b: Side, over: Fields) -> Iterator[MeasuredStratum]:
    """The strata of one comparison, in the order of its lists."""
    keys = [key for key in over if key != "ratio"]
    scores = _scores(inputs, claim, b, over, keys)
    stratum_keys = [key for key in keys if key in _BY_RUNS]
    for stratum_values in product(*(over[key] for key in stratum_keys)):
        fields = dict(zip(stratum_keys, stratum_values, strict=True))
        settings: list[Setting] = []
        counted: list[pd.DataFrame] = []
        for setting_values, rows in select(scores, **fields).groupby(keys):
            means = rows.groupby("figure")["value"].mean().to_numpy()
            left_out = _why_left_out(claim, means, rows["chance"].iloc[0])
            settings.append(
                Setting(dict(zip(keys, setting_values, strict=True)), tuple(means), left_out)
            )
            if not left_out:
                counted.append(rows)
        complete = _complete(pd.concat([scores[:0], *counted]), len(counted))
        is_whole = complete["figure"].nunique() == len(claim.figures(b))
        if settings and (is_whole or not counted):
            yield _stratum(claim, b, fields, settings, complete)


def _scores(inputs: Inputs, claim: Claim, b: Side, over: Fields, keys: list[str]) -> pd.DataFrame:
    """A row for each setting, figure and run, of settings that have every figure.

    Columns: the keys of the settings, `figure` (its number), `sign`, `training` (the number of the side that was
    trained), `seed`, `value`, `error` (the standard error in the line), `hits` (right or wrong of each prompt that all
    figures have, or empty), `chance`, and `prompts`, in which rows that were measured on the same prompts are alike.
    """
    lists = {key: over[key] for key in keys}
    if claim.scaled:
        for key in ("train_length", "length"):
            lists[key] = [length // inputs.scale for length in over[key]]
    figures = claim.figures(b)
    trainings = [tuple(fields.get(key) for key in _SAME_RUNS) for _, fields in figures]
    in_settings: list[pd.DataFrame] = []
    for figure, (sign, fields) in enumerate(figures):
        rows = _measured(inputs, claim, {**lists, **fields})
        if figure == 0:
            settings = rows[keys].drop_duplicates()
        prompts = rows["task"] + rows["condition"] + rows["length"].fillna(0).astype(str)
        training = trainings.index(trainings[figure])
        rows = rows.assign(figure=figure, sign=sign, training=training, prompts=prompts)
        # A side that fixes one of the keys, such as a train length, has that figure in all settings.
        fixed = [key for key in keys if key in fields]
        in_settings.append(settings.merge(rows.drop(columns=fixed)))
    runs = pd.concat(in_settings).groupby(
        [*keys, "figure", "sign", "training", "seed"], as_index=False, sort=False
    )
    first = dict.fromkeys(("n", "hits", "chance", "prompts"), "first")
    scores = runs.agg({"value": "mean", "error": "mean", **first})  # heads and layers are averaged
    if "ratio" in over:
        scores = scores[(scores["length"] / scores["train_length"]).isin(over["ratio"])]
    figures_of_setting = scores.groupby(keys)["figure"].transform("nunique")
    return _on_common_prompts(scores[figures_of_setting == len(figures)])


def _measured(inputs: Inputs, claim: Claim, fields: Fields) -> pd.DataFrame:
    """The figures of the claim's metric, with their standard errors; the logarithm of a perplexity."""
    rows = inputs.measured(**{"metric": claim.metric, **fields})
    if claim.unit == "percent":  # all models read the same text, which is not taken as a draw
        return rows.assign(value=np.log(rows["value"]), error=0.0)
    return rows.assign(error=((rows["high"] - rows["low"]) / 2 / 1.96).fillna(0.0))


def _on_common_prompts(scores: pd.DataFrame) -> pd.DataFrame:
    """The scores of the prompts that all tests have, where every line says which prompts it answered."""
    if not scores["hits"].all():
        return scores.assign(hits="")
    # A test with fewer prompts has the first ones.
    fewest = scores.groupby("prompts")["n"].transform("min").astype(int)
    hits = list(map(unpack_hits, scores["hits"], fewest))
    return scores.assign(hits=hits, value=[float(of_run.mean()) for of_run in hits])


def _why_left_out(claim: Claim, means: np.ndarray, chance: float) -> str:
    """Why a setting does not count, by the means of its figures; the first two are of the sides themselves."""
    if claim.metric != "exact_match" or len(means) == 1:
        return ""
    if (means[:2] <= chance + GUESSES).all():
        return "both guess"
    if claim.kind == "gain" and (means > CEILING).all():
        return "both exceed 98 %"
    return ""


def _complete(scores: pd.DataFrame, count: int) -> pd.DataFrame:
    """The scores of the runs that have every figure of their training in `count` settings, with the `share` of each."""
    figures_of_side = scores.groupby("training")["figure"].transform("nunique")
    scores_of_run = scores.groupby(["training", "seed"])["figure"].transform("size")
    complete = scores[scores_of_run == count * figures_of_side]
    return complete.assign(share=complete["sign"] / count)


def _stratum(
    claim: Claim, b: Side, fields: Fields, settings: Sequence[Setting], scores: pd.DataFrame
) -> MeasuredStratum:
    """The stratum, of the scores in the settings that count."""
    runs = _sum_by(scores, "value", "training", "seed")
    samples = [sample.droplevel("training").to_dict() for _, sample in runs.groupby("training")]
    constant = claim.a if isinstance(claim.a, float) else 0.0
    if not isinstance(b, dict):
        constant -= scores["chance"].mean() if b == "chance" else b
    if claim.unit == "times":  # a time has no luck of training
        constant += sum(sum(sample.values()) for sample in samples)
        samples = []
    return MeasuredStratum(
        task=fields.get("task", ""),
        samples=samples,
        constant=constant,
        prompts=_prompt_variance(scores),
        fields=fields,
        against=b,
        settings=settings,
    )


def _prompt_variance(scores: pd.DataFrame) -> float:
    """The variance that the draw of prompts adds to the sum of the scores' shares.

    Where lines hold right and wrong of each prompt, `rule.prompt_variance` gives it. Other lines give a standard error;
    then those of runs, and of settings with the same prompts, are taken as wholly dependent, those of the figures as
    independent.
    """
    variance = 0.0
    for _, rows in scores.groupby("prompts"):
        if len(rows["hits"].iloc[0]):
            answers = _sum_by(rows, "hits", "training", "seed")
            variance += rule.prompt_variance(
                [np.stack(of_side.to_list()) for _, of_side in answers.groupby("training")]
            )
        else:
            errors = _sum_by(rows, "error", "figure", "seed")
            variance += float((errors.groupby("figure").mean() ** 2).sum())
    return max(variance, 0.0)


def _sum_by(scores: pd.DataFrame, column: str, *keys: str) -> pd.Series:
    """The sums of the scores' shares of a column."""
    return (scores["share"] * scores[column]).groupby([scores[key] for key in keys]).sum()
