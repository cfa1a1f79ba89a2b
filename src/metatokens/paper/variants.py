"""The parts of an experiment: models that differ in one respect, their recipes, and the tests that they get."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, ClassVar

from metatokens.data.insertion import meta_token_count
from metatokens.recipe import FinetuneRecipe, PretrainRecipe, load_recipe
from metatokens.records import About
from metatokens.tasks import TASKS

UNMEASURED = "training.eval_steps=0"  # no held-out loss in pretraining: perplexity is measured at its end

COMPARED = ("gpt2", "pause", "twin", "meta")  # each differs in one thing from the one before it
# The paper's model, the baselines and the controls by name, with the differences in pretraining and architecture.
MODELS: Mapping[str, dict[str, str]] = {
    "gpt2": {
        "second_attention": "none",
        "placement": "none",
        "description": "no meta-tokens in pretraining, no second attention",
    },
    "pause": {
        "second_attention": "none",
        "placement": "uniform",
        "description": "meta-tokens in pretraining, no second attention",
    },
    "twin": {
        "second_attention": "causal",
        "placement": "uniform",
        "description": "meta-tokens in pretraining, a second causal attention over all positions",
    },
    "meta": {
        "second_attention": "meta",
        "placement": "uniform",
        "description": "meta-tokens in pretraining, meta-attention: the paper's model",
    },
    "gpt-neo": {
        "second_attention": "none",
        "placement": "none",
        "description": "transformers' GPT-Neo at this size, from random weights: no meta-tokens in pretraining",
    },
}


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model to pretrain and fine-tune: one of MODELS with the preset's recipes and the changes given here."""

    model: str
    position_embedding: str = "rope"
    seed: int = 0
    variant: str = ""  # a name for its other differences
    tables: tuple[str, ...] = ()  # the tables that show it, in place of its tasks' tables
    pretrain_overrides: tuple[str, ...] = ()
    finetune_recipe: str | None = None  # of its tasks, in place of the preset's
    finetune_overrides: tuple[str, ...] = ()
    rate: float = 1.0  # times the learning rates of its tasks' recipes
    pretrained_as: str | None = None  # the name of a model whose pretrained weights it starts from
    published: str | None = None  # a published model that it starts from, a folder or `hf:NAME`
    extension: float | None = None  # the factor by which YaRN lengthens the context before fine-tuning
    tasks: tuple[str, ...] = TASKS
    tested: tuple[int, ...] | None = None  # train lengths whose models are tested; default: all
    longer_tests: Mapping[int, int] = field(default_factory=dict, hash=False)  # more test prompts, by length
    # All its test prompts, by condition and length, in place of the preset's.
    tests: Mapping[str, Mapping[int, int]] | None = field(default=None, hash=False)
    priority: int = 1  # lower priorities run first; within one, list recall runs before the other tasks

    @property
    def name(self) -> str:
        """The model, with its position embedding unless that is rope, its seed unless 0, and its variant."""
        position = "" if self.position_embedding == "rope" else self.position_embedding
        return "-".join(filter(None, [self.model, position, f"seed{self.seed}" if self.seed else "", self.variant]))

    @property
    def description(self) -> str:
        """A phrase that describes it in a report."""
        if self.published is not None:
            return f"{self.published}, as published"
        what = MODELS[self.model]["description"]
        longer = () if self.extension is None else (f"its context lengthened {self.extension:g} times with YaRN",)
        changed = (*self.pretrain_overrides, *longer)
        return f"{what}; but {', '.join(changed)}" if changed else what

    @property
    def start(self) -> str:
        """The name of the model whose pretrained or extended weights fine-tuning starts from."""
        return self.name if self.pretrained_as is None or self.extension is not None else self.pretrained_as

    @property
    def made_by(self) -> str:
        """The kind of stage that makes its weights before fine-tuning."""
        if self.published is not None:
            return "fetch"
        return "pretrain" if self.extension is None else "extend"

    def about(self, preset: str, **more: Any) -> About:
        """The fields of its records, with further ones."""
        recipe = f"{preset}/{self.variant}" if self.variant else preset
        return About(
            model=self.model, position_embedding=self.position_embedding, seed=self.seed, recipe=recipe, **more
        )


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A measurement of fine-tuned models in addition to their accuracy."""

    method: ClassVar[str]  # of `Runner`
    kind: str
    tables: tuple[str, ...]  # tables and figures of the paper
    models: tuple[str, ...]
    tasks: tuple[str, ...] = ("list_recall",)

    @property
    def options(self) -> dict[str, Any]:
        """The options of its stages."""
        shared = {field.name for field in fields(Inspection)}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in shared}


@dataclass(frozen=True, kw_only=True)
class FurtherTest(Inspection):
    """Accuracy in further conditions, for the models of some train lengths."""

    method = "evaluate"
    counts: Mapping[str, Mapping[int, int]]  # test prompts by condition and length
    train_lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LandmarksTest(FurtherTest):
    """Accuracy if the question sees the meta-tokens of its document alone."""

    kind: str = "landmarks-alone"
    tables: tuple[str, ...] = ("landmarks",)
    train_lengths: tuple[int, ...] = (128,)
    question_sees: str = "landmarks"


@dataclass(frozen=True, kw_only=True)
class Ablation(Inspection):
    """Accuracy when the model's input is changed at inference."""

    method = "intervene"
    kind: str = "ablation"
    interventions: tuple[str, ...]
    counts: Mapping[int, int]  # test prompts by length
    noise_seeds: int = 1  # each is used on another part of the prompts


@dataclass(frozen=True, kw_only=True)
class Analysis(Inspection):
    """One of the analyses of `metatokens analyze`."""

    method = "analyze"
    train_length: int
    length: int  # of the prompts
    n: int
    interventions: tuple[str | None, ...] = (None,)

    @property
    def options(self) -> dict[str, Any]:
        """The options of its stages."""
        return {"kind": self.kind, **super().options}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """An experiment: its models, recipes and tests.

    Models of one seed get the same text tokens, task prompts and steps, except where their overrides change these.
    """

    corpus: str
    book: str | None = None  # a second corpus for perplexity, read whole
    tokenizer: str
    pretrain_recipe: str
    finetune_recipes: Mapping[str, str]  # by task
    extend_recipe: str = ""
    pretrain_overrides: tuple[str, ...] = ()
    finetune_overrides: tuple[str, ...] = ()
    test_counts: Mapping[int, int]  # test prompts by length
    longest_tests: Mapping[str, int] = field(default_factory=dict)  # the longest bin of tasks with no longer prompts
    test_ratio: int | None = None  # the longest bin tested, in train lengths; None: the longest of all
    models: tuple[TrainedModel, ...] = tuple(TrainedModel(model=model) for model in COMPARED)
    extra_conditions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # for models with rope, by task
    extra_condition_limit: int = 1024  # the longest bin tested in an extra condition
    probe_steps: Mapping[str, int] = field(default_factory=dict)  # steps between two points of a learning curve
    inspections: tuple[FurtherTest | Ablation | Analysis, ...] = ()
    looked_into: tuple[str, ...] = ()  # models that a page shows side by side on an example of each task

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that at least one model is fine-tuned for."""
        return tuple(dict.fromkeys(task for one in self.models for task in one.tasks))


def pretrain_recipe(sizes: Preset, model: TrainedModel) -> PretrainRecipe:
    """A model's pretraining recipe; its blocks hold the same text as every other model's."""
    own = MODELS[model.model]
    overrides = [
        UNMEASURED,
        *sizes.pretrain_overrides,
        "data.tokens=tokens",
        f"model.second_attention={own['second_attention']}",
        f"model.position_embedding={model.position_embedding}",
        f"training.seed={model.seed}",
        *model.pretrain_overrides,
    ]
    recipe = load_recipe(PretrainRecipe, sizes.pretrain_recipe, overrides)
    if own["placement"] == "uniform":
        return recipe
    text = recipe.data.block_size - meta_token_count(recipe.data.block_size, recipe.data.fraction)
    data = recipe.data.model_copy(update={"placement": "none", "block_size": text})
    return recipe.model_copy(update={"data": data})


def extend_recipe(sizes: Preset, model: TrainedModel, pretrained: PretrainRecipe) -> PretrainRecipe:
    """The recipe for pretraining a model further on longer blocks."""
    assert model.extension is not None
    recipe = load_recipe(PretrainRecipe, sizes.extend_recipe, [UNMEASURED, f"training.seed={model.seed}"])
    longer = round(model.extension * pretrained.data.block_size)
    data = pretrained.data.model_copy(update={"block_size": longer})
    return recipe.model_copy(update={"data": data, "model": pretrained.model})


def finetune_recipe(sizes: Preset, model: TrainedModel, task: str) -> FinetuneRecipe:
    """A model's fine-tuning recipe for a task."""
    overrides = [*sizes.finetune_overrides, *model.finetune_overrides, f"training.seed={model.seed}"]
    recipe = load_recipe(FinetuneRecipe, model.finetune_recipe or sizes.finetune_recipes[task], overrides)
    training = recipe.training
    rates = {"learning_rate": training.learning_rate, "muon_learning_rate": training.muon_learning_rate}
    scaled = training.model_copy(update={key: model.rate * rate for key, rate in rates.items()})
    return recipe.model_copy(update={"training": scaled})


def lengths_tested(sizes: Preset, model: TrainedModel, task: str) -> tuple[int, ...]:
    """The train lengths whose models are tested on a task."""
    return model.tested or finetune_recipe(sizes, model, task).task.train_lengths


def counts_of(sizes: Preset, model: TrainedModel, task: str) -> dict[str, dict[int, int]]:
    """The number of a model's test prompts on a task, by condition and length."""
    if model.tests is not None:
        return {condition: {**own} for condition, own in model.tests.items()}
    is_rope = model.position_embedding == "rope"
    longest = sizes.longest_tests.get(task, math.inf)
    plain = {length: n for length, n in {**sizes.test_counts, **model.longer_tests}.items() if length <= longest}
    short = {length: n for length, n in sizes.test_counts.items() if length <= sizes.extra_condition_limit}
    extra = sizes.extra_conditions.get(task, ()) if is_rope else ()
    own = finetune_recipe(sizes, model, task).task.condition  # tested at every length
    return {"paper": plain} | dict.fromkeys(extra, short) | {own: plain}


def drawn_counts(sizes: Preset, task: str) -> dict[str, dict[int, int]]:
    """The number of test prompts to draw for a task, by condition and length."""
    found: dict[str, dict[int, int]] = {}
    asked: list[Mapping[str, Mapping[int, int]]]
    asked = [counts_of(sizes, model, task) for model in sizes.models if task in model.tasks]
    asked += [one.counts for one in sizes.inspections if isinstance(one, FurtherTest) and task in one.tasks]
    for condition, own in chain.from_iterable(counts.items() for counts in asked):
        found.setdefault(condition, {}).update(own)
    return found
