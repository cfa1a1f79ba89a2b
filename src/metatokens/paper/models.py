"""What an experiment is made of: models that differ in one thing, the recipes they get, and what is asked of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, ClassVar

from metatokens.data.insertion import meta_token_count
from metatokens.recipe import DataSettings, FinetuneRecipe, PretrainRecipe, load_recipe
from metatokens.tasks import TASKS

UNMEASURED = "training.eval_steps=0"  # in pretraining, at whose end perplexity is measured

# The baselines and controls by name: what their pretraining and architecture differ in. `pause` reads the same blocks
# as `meta` without the second module; `twin` has the second module over all positions.
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
    """One model, pretrained and fine-tuned: one of MODELS with the preset's recipes, but for what is said here."""

    model: str
    position_embedding: str = "rope"
    seed: int = 0
    variant: str = ""  # names what else sets it apart
    tables: tuple[str, ...] = ()  # that it stands in, in place of its tasks' own
    pretrain_overrides: tuple[str, ...] = ()
    finetune_overrides: tuple[str, ...] = ()
    pretrained_as: str | None = None  # starts from the pretrained model of that name
    published: str | None = None  # starts from this model, a folder or `hf:NAME`, in place of one made here
    extension: float | None = None  # the factor by which YaRN lengthens the context before fine-tuning
    tasks: tuple[str, ...] = TASKS
    tested: tuple[int, ...] | None = None  # train lengths whose models are tested; all where not given
    longer_tests: Mapping[int, int] = field(default_factory=dict, hash=False)  # further test prompts of each length
    priority: int = 1  # lower ones are carried out first; the other tasks wait for list recall

    @property
    def name(self) -> str:
        """The model, and what differs from rope, seed 0 and the plain recipes."""
        position = "" if self.position_embedding == "rope" else self.position_embedding
        return "-".join(filter(None, [self.model, position, f"seed{self.seed}" if self.seed else "", self.variant]))

    @property
    def description(self) -> str:
        """What it is, for a reader."""
        if self.published is not None:
            return f"{self.published}, as published"
        what = MODELS[self.model]["description"]
        longer = () if self.extension is None else (f"its context lengthened {self.extension:g} times with YaRN",)
        changed = (*self.pretrain_overrides, *longer)
        return f"{what}; but {', '.join(changed)}" if changed else what

    @property
    def start(self) -> str:
        """The model whose pretrained, or extended, weights fine-tuning starts from."""
        return self.name if self.pretrained_as is None or self.extension is not None else self.pretrained_as

    @property
    def made_by(self) -> str:
        """The kind of stage that makes weights of its own for it, if it has any."""
        if self.published is not None:
            return "fetch"
        return "pretrain" if self.extension is None else "extend"

    def fields(self, preset: str) -> dict[str, Any]:
        """What tells its records from those of other models."""
        return {
            "model": self.model,
            "position_embedding": self.position_embedding,
            "seed": self.seed,
            "recipe": self.recipe(preset),
        }

    def recipe(self, preset: str) -> str:
        """What its records are filed under."""
        return f"{preset}/{self.variant}" if self.variant else preset


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What is measured of fine-tuned models beside how well they do."""

    method: ClassVar[str]  # of `Runner`
    kind: str
    tables: tuple[str, ...]  # and figures of the paper
    models: tuple[str, ...]
    tasks: tuple[str, ...] = ("list_recall",)

    @property
    def options(self) -> dict[str, Any]:
        """What is measured, and how."""
        shared = {field.name for field in fields(Inspection)}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in shared}


@dataclass(frozen=True, kw_only=True)
class FurtherTest(Inspection):
    """Accuracy in conditions that models of some train lengths alone are tested in."""

    method = "evaluate"
    counts: Mapping[str, Mapping[int, int]]  # test prompts of each condition and length
    train_lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Ablation(Inspection):
    """What models still do when their input is changed at inference."""

    method = "intervene"
    kind: str = "ablation"
    interventions: tuple[str, ...]
    counts: Mapping[int, int]  # test prompts of each length
    noise_seeds: int = 1  # each of them on its own part of the prompts


@dataclass(frozen=True, kw_only=True)
class Analysis(Inspection):
    """What goes on inside models; of the kinds that `metatokens analyze` names."""

    method = "analyze"
    train_length: int
    length: int  # of the prompts
    n: int
    interventions: tuple[str | None, ...] = (None,)

    @property
    def options(self) -> dict[str, Any]:
        """What is measured, and how."""
        return {"kind": self.kind, **super().options}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One experiment's sizes. Every model gets the same text tokens, task prompts and steps."""

    corpus: str
    book: str | None = None  # a second corpus that perplexity is measured on, read whole
    tokenizer: str
    pretrain_recipe: str
    finetune_recipes: Mapping[str, str]  # by task
    extend_recipe: str = ""
    pretrain_overrides: tuple[str, ...] = ()
    finetune_overrides: tuple[str, ...] = ()
    task_overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # such as the steps of each task
    test_counts: Mapping[int, int]  # test prompts of each length
    models: tuple[TrainedModel, ...] = tuple(TrainedModel(model=model) for model in ("gpt2", "pause", "twin", "meta"))
    extra_conditions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of the models with rope
    extra_condition_limit: int = 1024  # the longest bin in which they are tested
    probe_steps: Mapping[str, int] = field(default_factory=dict)  # of a task: how often its learning is measured
    inspections: tuple[FurtherTest | Ablation | Analysis, ...] = ()
    looked_into: tuple[str, ...] = ()  # models shown side by side on an example of each task

    @property
    def tasks(self) -> tuple[str, ...]:
        """Those that some model is fine-tuned for."""
        return tuple(dict.fromkeys(task for one in self.models for task in one.tasks))


def pretrain_recipe(sizes: Preset, model: TrainedModel) -> PretrainRecipe:
    """A model's pretraining recipe, on the same text a block as every other's; the tokens are in the run's folder."""
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
    if own["placement"] == "none":
        recipe = recipe.model_copy(update={"data": _without_meta_tokens(recipe.data)})
    return recipe


def extend_recipe(sizes: Preset, model: TrainedModel, pretrained: PretrainRecipe) -> PretrainRecipe:
    """The recipe of a model's further pretraining on longer blocks, from that of its pretraining."""
    assert model.extension is not None
    recipe = load_recipe(PretrainRecipe, sizes.extend_recipe, [UNMEASURED, f"training.seed={model.seed}"])
    longer = round(model.extension * pretrained.data.block_size)
    data = pretrained.data.model_copy(update={"block_size": longer})
    return recipe.model_copy(update={"data": data, "model": pretrained.model})


def finetune_recipe(sizes: Preset, model: TrainedModel, task: str) -> FinetuneRecipe:
    """A model's fine-tuning recipe for a task."""
    overrides = [*sizes.finetune_overrides, *sizes.task_overrides.get(task, ()), *model.finetune_overrides]
    return load_recipe(FinetuneRecipe, sizes.finetune_recipes[task], [*overrides, f"training.seed={model.seed}"])


def lengths_tested(sizes: Preset, model: TrainedModel, task: str) -> tuple[int, ...]:
    """The train lengths whose models are tested."""
    return model.tested or finetune_recipe(sizes, model, task).task.train_lengths


def counts_of(sizes: Preset, model: TrainedModel, task: str) -> dict[str, dict[int, int]]:
    """In which conditions a model is tested on a task, and on how many prompts of each length."""
    is_rope = model.position_embedding == "rope"
    plain = {**sizes.test_counts, **model.longer_tests}
    short = {length: n for length, n in sizes.test_counts.items() if length <= sizes.extra_condition_limit}
    extra = sizes.extra_conditions.get(task, ()) if is_rope else ()
    own = finetune_recipe(sizes, model, task).task.condition  # that it is trained in: at every length
    return {"paper": plain} | dict.fromkeys(extra, short) | {own: plain}


def drawn_counts(sizes: Preset, task: str) -> dict[str, dict[int, int]]:
    """The prompts of each condition and length that the models are tested on, between them."""
    found: dict[str, dict[int, int]] = {}
    asked: list[Mapping[str, Mapping[int, int]]]
    asked = [counts_of(sizes, model, task) for model in sizes.models if task in model.tasks]
    asked += [one.counts for one in sizes.inspections if isinstance(one, FurtherTest) and task in one.tasks]
    for condition, own in chain.from_iterable(counts.items() for counts in asked):
        found.setdefault(condition, {}).update(own)
    return found


def _without_meta_tokens(data: DataSettings) -> DataSettings:
    text = data.block_size - meta_token_count(data.block_size, data.fraction)
    return data.model_copy(update={"placement": "none", "block_size": text})
