"""The parts of an experiment: models that differ in one respect, their recipes, and the tests that they get."""

import math
from dataclasses import field
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from metatokens.data.insertion import meta_token_count
from metatokens.recipe import FinetuneRecipe, PretrainRecipe, load_recipe
from metatokens.records import About
from metatokens.tasks import TASKS

Counts = dict[int, int]
"""Numbers of test prompts, by length in tokens."""
CountsByCondition = dict[str, Counts]

# The paper's model, the baselines and the controls by name, with the differences in pretraining and architecture. Each
# of the first four differs in one thing from the one before it.
MODELS = {
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

_STRICT = ConfigDict(extra="forbid")
# No held-out loss in pretraining: perplexity is measured at its end.
_UNMEASURED = "training.eval_steps=0"


@dataclass(frozen=True, kw_only=True, config=_STRICT)
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
    # The factor by which YaRN lengthens the context before fine-tuning.
    extension: float | None = None
    tasks: tuple[str, ...] = TASKS
    tested: tuple[int, ...] | None = None  # train lengths whose models are tested; default: all
    longer_tests: Counts = field(default_factory=dict, hash=False)  # in addition to the preset's
    tests: CountsByCondition | None = field(default=None, hash=False)  # in place of the preset's

    @property
    def name(self) -> str:
        """The model, with its position embedding unless that is rope, its seed unless 0, and its variant."""
        position = "" if self.position_embedding == "rope" else self.position_embedding
        seed = f"seed{self.seed}" if self.seed else ""
        return "-".join(filter(None, [self.model, position, seed, self.variant]))

    @property
    def description(self) -> str:
        """A phrase that describes it in a report."""
        if self.published is not None:
            return f"{self.published}, as published"
        changes = [*self.pretrain_overrides]
        if self.extension is not None:
            changes.append(f"its context lengthened {self.extension:g} times with YaRN")
        plain = MODELS[self.model]["description"]
        return f"{plain}; but {', '.join(changes)}" if changes else plain

    @property
    def start(self) -> str:
        """The name of the model whose pretrained or extended weights fine-tuning starts from."""
        if self.pretrained_as is None or self.extension is not None:
            return self.name
        return self.pretrained_as

    @property
    def made_by(self) -> str:
        """The kind of stage that makes its weights before fine-tuning."""
        if self.published is not None:
            return "fetch"
        return "pretrain" if self.extension is None else "extend"

    @property
    def weights(self) -> str:
        """The folder of its weights before fine-tuning, in the run's folder."""
        return f"models/{self.name}/{'pretrained' if self.extension is None else 'extended'}"

    def subject(self, preset: str, **fields: Any) -> About:
        """The fields of its records, with further ones."""
        return About(
            model=self.model,
            position_embedding=self.position_embedding,
            seed=self.seed,
            recipe=f"{preset}/{self.variant}" if self.variant else preset,
            **fields,
        )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Inspection:
    """A measurement of fine-tuned models in addition to their accuracy: a method of `Runner`, and its options."""

    method: str  # evaluate, intervene or analyze
    kind: str  # the beginning of its stages' names
    tables: tuple[str, ...]  # tables and figures of the paper
    models: tuple[str, ...]
    tasks: tuple[str, ...] = ("list_recall",)
    options: dict[str, Any] = field(hash=False)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Preset:
    """An experiment: its models, recipes and tests.

    Models of one seed get the same text tokens, task prompts and steps, except where their overrides change these.
    """

    corpus: str
    book: str | None = None  # a second corpus for perplexity, read whole
    tokenizer: str
    pretrain_recipe: str
    finetune_recipes: dict[str, str]  # by task
    extend_recipe: str = ""
    pretrain_overrides: tuple[str, ...] = ()
    finetune_overrides: tuple[str, ...] = ()
    test_counts: Counts
    # The longest bin of tasks with no longer prompts.
    longest_tests: dict[str, int] = field(default_factory=dict)
    # The longest bin tested, in train lengths; None: the longest of all.
    test_ratio: int | None = None
    models: tuple[TrainedModel, ...]
    # For models with rope, by task.
    extra_conditions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    extra_condition_limit: int = 1024  # the longest bin tested in an extra condition
    # Steps between two points of a learning curve.
    probe_steps: dict[str, int] = field(default_factory=dict)
    inspections: tuple[Inspection, ...] = ()
    looked_into: tuple[
        str, ...
    ] = ()  # models that a page shows side by side on an example of each task

    @property
    def models_by_name(self) -> dict[str, TrainedModel]:
        """The models, by the names that inspections and other models call them by."""
        return {model.name: model for model in self.models}

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that at least one model is fine-tuned for."""
        return tuple(dict.fromkeys(task for model in self.models for task in model.tasks))


def pretrain_recipe(preset: Preset, model: TrainedModel) -> PretrainRecipe:
    """A model's pretraining recipe; its blocks hold the same text as every other model's."""
    kind = MODELS[model.model]
    overrides = [
        _UNMEASURED,
        *preset.pretrain_overrides,
        "data.tokens=tokens",
        f"model.second_attention={kind['second_attention']}",
        f"model.position_embedding={model.position_embedding}",
        f"training.seed={model.seed}",
        *model.pretrain_overrides,
    ]
    recipe = load_recipe(PretrainRecipe, preset.pretrain_recipe, overrides)
    if kind["placement"] == "uniform":
        return recipe
    text = recipe.data.block_size - meta_token_count(recipe.data.block_size, recipe.data.fraction)
    return with_data(recipe, placement="none", block_size=text)


def extend_recipe(
    preset: Preset, model: TrainedModel, pretrained: PretrainRecipe
) -> PretrainRecipe:
    """The recipe for pretraining a model further on longer blocks."""
    assert model.extension is not None
    recipe = load_recipe(
        PretrainRecipe, preset.extend_recipe, [_UNMEASURED, f"training.seed={model.seed}"]
    )
    longer = with_data(pretrained, block_size=round(model.extension * pretrained.data.block_size))
    return recipe.model_copy(update={"data": longer.data, "model": longer.model})


def with_data(recipe: PretrainRecipe, **changes: Any) -> PretrainRecipe:
    """The recipe with some settings of its data changed."""
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=changes)})


def finetune_recipe(preset: Preset, model: TrainedModel, task: str) -> FinetuneRecipe:
    """A model's fine-tuning recipe for a task."""
    name = model.finetune_recipe or preset.finetune_recipes[task]
    overrides = [
        *preset.finetune_overrides,
        *model.finetune_overrides,
        f"training.seed={model.seed}",
    ]
    recipe = load_recipe(FinetuneRecipe, name, overrides)
    rates = {
        "learning_rate": model.rate * recipe.training.learning_rate,
        "muon_learning_rate": model.rate * recipe.training.muon_learning_rate,
    }
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=rates)})


def lengths_tested(preset: Preset, model: TrainedModel, task: str) -> tuple[int, ...]:
    """The train lengths whose models are tested on a task."""
    return model.tested or finetune_recipe(preset, model, task).task.train_lengths


def counts_of(preset: Preset, model: TrainedModel, task: str) -> CountsByCondition:
    """The number of a model's test prompts on a task, by condition and length."""
    if model.tests is not None:
        return model.tests
    at_every_length = up_to(
        preset.longest_tests.get(task, math.inf), preset.test_counts | model.longer_tests
    )
    counts = {"paper": at_every_length}
    if model.position_embedding == "rope":
        for condition in preset.extra_conditions.get(task, ()):
            counts[condition] = up_to(preset.extra_condition_limit, preset.test_counts)
    train_condition = finetune_recipe(preset, model, task).task.condition
    return counts | {train_condition: at_every_length}


def up_to(longest: float, counts: Counts) -> Counts:
    """The numbers of prompts that are no longer than that."""
    return {length: n for length, n in counts.items() if length <= longest}


def drawn_counts(preset: Preset, task: str) -> CountsByCondition:
    """The number of test prompts to draw for a task, by condition and length."""
    tests = [counts_of(preset, model, task) for model in preset.models if task in model.tasks]
    for inspection in preset.inspections:
        if inspection.method == "evaluate" and task in inspection.tasks:
            tests.append(inspection.options["counts"])
    drawn: CountsByCondition = {}
    for counts_by_condition in tests:
        for condition, counts in counts_by_condition.items():
            drawn.setdefault(condition, {}).update(counts)
    return drawn
