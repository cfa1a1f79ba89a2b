"""The plan of a preset: its stages, each after the stages that it needs, and the tables that its results are for.

`stages` walks through the preset once. It lists the tokenizing, the test and training examples of each task, then for
each model its pretraining, perplexity, fine-tuning and evaluation, and then the inspections of fine-tuned models. A
stage only describes work: its method of `Runner` (runner.py) does it. Everything that its result depends on is in its
options, which the run log compares when a run goes on.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from pydantic import BaseModel

from metatokens.errors import UserError
from metatokens.paper.variants import (
    Ablation,
    Analysis,
    Counts,
    FurtherTest,
    Preset,
    TrainedModel,
    counts_of,
    drawn_counts,
    extend_recipe,
    finetune_recipe,
    lengths_tested,
    pretrain_recipe,
)
from metatokens.recipe import FinetuneRecipe, Phase, PretrainRecipe

# The paper's tables by task, unless a model has its own.
_TASK_TABLES = {
    "list_recall": "table7",
    "segment_counting": "table8",
    "parity": "table9",
    "copying": "table10",
}

Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One unit of work: a method of `Runner`, which gets the subject and the options."""

    name: str
    kind: str  # the beginning of the name
    method: str
    subject: Fields = field(default_factory=dict)  # some of `model`, `task`, `condition`, `recipe`
    # All else that its results depend on, except other stages.
    options: Fields = field(default_factory=dict)
    after: tuple[str, ...] = ()  # the stages that it needs
    product: str | None = None  # the last file that it writes for later stages, in the run's folder
    tables: tuple[str, ...] = ()  # the tables that show its results
    priority: float = 0  # lower priorities run first
    cost: float = 1.0  # estimated seconds on one core, or on one GPU for models trained in bfloat16

    @property
    def settings(self) -> Fields:
        """The options as JSON values; recipes omit defaults, so finished stages stay valid when a setting is added."""
        settings = {}
        for name, option in self.options.items():
            is_recipe = isinstance(option, BaseModel)
            settings[name] = (
                option.model_dump(mode="json", exclude_defaults=True) if is_recipe else option
            )
        return settings

    @property
    def answers(self) -> set[str]:
        """The tables and the task whose results it gives."""
        task = self.subject.get("task")
        return {*self.tables, task} if task else {*self.tables}

    def fields(self, preset: str) -> Fields:
        """Its kind and subject, as fields of a `records.Stage`."""
        fields = {"kind": self.kind, "train_length": self.options.get("train_length")}
        for name, part in self.subject.items():
            if isinstance(part, TrainedModel):
                fields |= part.subject(preset).present_fields()
            elif isinstance(part, FinetuneRecipe):
                fields |= {"seed": part.training.seed, "condition": part.task.condition}
            else:
                fields[name] = part
        return fields


def stages(sizes: Preset) -> list[Stage]:
    """The stages of a preset, each after those that it needs."""
    by_name = {model.name: model for model in sizes.models}
    plan = [
        _stage("tokenize", product="tokens/manifest.json", cost=10),
        _stage("describe_tasks", after=("tokenize",), priority=1),
    ]
    for task in sizes.tasks:
        plan += _test_stages(sizes, task)
    plan += _example_stages(sizes)
    for model in sizes.models:
        plan += _model_stages(model, sizes)
    for inspection in sizes.inspections:
        for name, task in product(inspection.models, inspection.tasks):
            plan.append(_inspection_stage(inspection, by_name[name], task, sizes))
    if sizes.looked_into:
        plan += [
            _look_stage([by_name[name] for name in sizes.looked_into], task, sizes)
            for task in sizes.tasks
        ]
    return plan


def select(plan: list[Stage], only: str | None) -> list[Stage]:
    """The stages whose results a table or a task shows, and the stages that they need; all for None."""
    if only is None:
        return plan
    needed = {stage.name for stage in plan if only in stage.answers}
    if not needed:
        known = set[str]().union(*(stage.answers for stage in plan))
        raise UserError(
            f"no stage of this preset answers {only!r}; --only takes {', '.join(sorted(known))}."
        )
    for stage in reversed(plan):  # each stage follows those that it needs
        if stage.name in needed:
            needed.update(stage.after)
    return [stage for stage in plan if stage.name in needed]


def examples_name(recipe: FinetuneRecipe) -> str:
    """The name of a recipe's encoded training examples: recipes with the same name draw the same examples."""
    phases = [f"{_sizes_of_prompts(phase)}x{phase.examples}" for phase in recipe.phases()]
    return "-".join([recipe.task.condition, f"seed{recipe.training.seed}", *phases])


def _sizes_of_prompts(phase: Phase) -> str:
    curriculum = phase.curriculum
    if curriculum is None:
        return phase.name
    sizes = "_".join(map(str, (*curriculum.lists, *curriculum.items)))
    return f"drill{sizes}" if curriculum.drill else sizes


def _test_stages(sizes: Preset, task: str) -> Iterator[Stage]:
    first = min(model.priority for model in sizes.models if task in model.tasks)
    for condition, counts in drawn_counts(sizes, task).items():
        yield _stage(
            "draw_tests",
            task=task,
            condition=condition,
            options={"counts": counts},
            after=("tokenize",),
            product=f"examples/{task}/tests-{condition}",
            priority=first + _wait(task),
            cost=10 + _seconds_to_draw(counts),
        )


def _example_stages(sizes: Preset) -> Iterable[Stage]:
    """The drawing of training examples, which models with the same seed and training condition share."""
    drawn: dict[str, Stage] = {}
    for model in sizes.models:
        for task in model.tasks:
            stage = _example_stage(model, finetune_recipe(sizes, model, task), task)
            drawn.setdefault(stage.name, stage)
    return drawn.values()


def _example_stage(model: TrainedModel, recipe: FinetuneRecipe, task: str) -> Stage:
    name = examples_name(recipe)
    return Stage(
        name=f"draw_examples-{task}-{name}",
        kind="draw_examples",
        method="draw_examples",
        subject={"task": task, "recipe": recipe},
        after=("tokenize",),
        product=f"examples/{task}/{name}/complete",
        priority=model.priority + _wait(task),
        cost=5
        + sum(_seconds_to_draw({phase.train_length: phase.examples}) for phase in recipe.phases()),
    )


def _model_stages(model: TrainedModel, sizes: Preset) -> Iterator[Stage]:
    estimate = _Estimate(pretrain_recipe(sizes, model), sizes.tokenizer)
    start = f"{model.made_by}-{model.start}"
    if model.start == model.name:
        tables = tuple(dict.fromkeys([*model.tables, "perplexity"]))
        yield _weights_stage(model, sizes, estimate)
        yield _stage(
            "perplexity", model, after=(start,), tables=tables, priority=model.priority, cost=40
        )
    for task in model.tasks:
        yield _finetune_stage(model, sizes, task, estimate, start)
        yield _evaluate_stage(model, sizes, task, estimate)


def _weights_stage(model: TrainedModel, sizes: Preset, estimate: "_Estimate") -> Stage:
    """The stage that makes the weights from which a model is fine-tuned."""
    recipe = pretrain_recipe(sizes, model)
    after = "tokenize"
    options: Fields = {"recipe": recipe}
    if model.published is not None:
        options = {"published": model.published}
    elif model.extension is not None:
        after = f"pretrain-{model.pretrained_as}"
        recipe = extend_recipe(sizes, model, recipe)
        options = {"recipe": recipe, "factor": model.extension}
    tokens = recipe.training.max_steps * recipe.training.batch * recipe.data.block_size
    return _stage(
        model.made_by,
        model,
        options=options,
        after=(after,),
        product=f"{model.weights}/manifest.json",
        priority=model.priority,
        cost=1.0 if model.published else 10 + estimate.seconds_to_pretrain(tokens),
    )


def _finetune_stage(
    model: TrainedModel, sizes: Preset, task: str, estimate: "_Estimate", start: str
) -> Stage:
    recipe = finetune_recipe(sizes, model, task)
    probe_steps = sizes.probe_steps.get(task)
    tables = _tables(model, task)
    tokens = sum(phase.examples * _mean(phase.train_length) for phase in recipe.phases())
    tests = [f"draw_tests-{task}-{condition}" for condition in counts_of(sizes, model, task)]
    return _stage(
        "finetune",
        model,
        task,
        options={"recipe": recipe, "probe_steps": probe_steps},
        after=(start, f"draw_examples-{task}-{examples_name(recipe)}", *tests),
        product=f"models/{model.name}/{task}/{recipe.task.train_lengths[-1]}/manifest.json",
        tables=(*tables, "learning") if probe_steps else tables,
        priority=model.priority + _wait(task),
        cost=10 + estimate.seconds_to_finetune(tokens),
    )


def _evaluate_stage(model: TrainedModel, sizes: Preset, task: str, estimate: "_Estimate") -> Stage:
    counts, lengths = counts_of(sizes, model, task), lengths_tested(sizes, model, task)
    options: Fields = {"counts": counts, "train_lengths": lengths, "ratio": sizes.test_ratio}
    question_sees = finetune_recipe(sizes, model, task).task.question_sees
    if question_sees:
        options["question_sees"] = question_sees
    tables = _tables(model, task)
    return _stage(
        "evaluate",
        model,
        task,
        options=options,
        after=(f"finetune-{model.name}-{task}",),
        tables=(*tables, "markers") if len(counts) > 1 else tables,
        priority=model.priority + _wait(task) - 0.25,  # before the next model is trained
        cost=10 + len(lengths) * sum(map(estimate.seconds_to_test, counts.values())),
    )


def _tables(model: TrainedModel, task: str) -> tuple[str, ...]:
    return model.tables or (_TASK_TABLES.get(task, task), "figure1")


def _inspection_stage(
    inspection: FurtherTest | Ablation | Analysis, model: TrainedModel, task: str, sizes: Preset
) -> Stage:
    after = [f"finetune-{model.name}-{task}"]
    estimate = _Estimate(pretrain_recipe(sizes, model), sizes.tokenizer)
    if isinstance(inspection, FurtherTest):
        after += [f"draw_tests-{task}-{condition}" for condition in inspection.counts]
        seconds = len(inspection.train_lengths) * sum(
            map(estimate.seconds_to_test, inspection.counts.values())
        )
    elif isinstance(inspection, Ablation):
        passes = len(inspection.interventions) * len(lengths_tested(sizes, model, task))
        seconds = passes * estimate.seconds_to_test(inspection.counts)
    elif inspection.kind == "rate-distortion":  # measured on one core: it trains many bottlenecks
        seconds = 100 * len(inspection.interventions) - 10
    else:  # a few passes
        seconds = 0
    return _stage(
        inspection.kind,
        model,
        task,
        method=inspection.method,
        options=inspection.options,
        after=tuple(after),
        tables=inspection.tables,
        priority=model.priority + _wait(task),
        cost=10 + seconds,
    )


def _look_stage(models: list[TrainedModel], task: str, sizes: Preset) -> Stage:
    trained = {
        model.name: finetune_recipe(sizes, model, task).task.train_lengths[-1] for model in models
    }
    return _stage(
        "look",
        task=task,
        options={"trained": trained},
        after=("describe_tasks", *(f"finetune-{name}-{task}" for name in trained)),
        priority=max(model.priority for model in models) + _wait(task),
        cost=5,
    )


def _wait(task: str) -> float:
    # List recall comes first, so that a run that is cut short has compared all models on one task.
    return 0 if task == "list_recall" else 0.5


def _stage(
    kind: str,
    model: TrainedModel | None = None,
    task: str | None = None,
    condition: str | None = None,
    *,
    method: str | None = None,
    **fields: Any,
) -> Stage:
    """A stage that is named by its kind and its subject."""
    parts = {"model": model, "task": task, "condition": condition}
    subject = {key: part for key, part in parts.items() if part is not None}
    words = [part.name if isinstance(part, TrainedModel) else part for part in subject.values()]
    return Stage(
        name="-".join([kind, *words]), kind=kind, method=method or kind, subject=subject, **fields
    )


_DRAWN = 1.5e6  # tokens of examples drawn per second


def _mean(length: int) -> int:
    """The mean length of prompts of at most `length` tokens."""
    return length * 2 // 3


class _Estimate:
    """The seconds that a model takes: 2 N operations per token, 6 N in training.

    N counts the parameters of the blocks, and in pretraining those of the output layer as well: the other stages
    compute the logits of a few positions alone. In tests, whose prompts may be long, attention counts too.
    """

    # Operations per second: on a core, what the models of `small` reach on an AMD EPYC; on a GPU, a fifth of an H100's
    # nominal rate.
    CORE, GPU = 5.2e10, 2e14

    def __init__(self, recipe: PretrainRecipe, tokenizer: str):
        sizes = recipe.model
        trained = tokenizer.removeprefix("train:")
        vocabulary = int(trained) if trained.isdigit() else 50_304  # GPT-2's, padded
        # Meta-attention reads one position in ten.
        attentions = 2 if sizes.second_attention == "causal" else 1
        self.blocks = sizes.num_hidden_layers * (8 + 4 * attentions) * sizes.hidden_size**2
        self.output_layer = vocabulary * sizes.hidden_size
        # For each key before a token.
        self.attention = attentions * sizes.num_hidden_layers * sizes.hidden_size
        self.rate = self.GPU if recipe.training.bf16 else self.CORE

    def seconds_to_pretrain(self, tokens: int) -> float:
        return 6 * (self.blocks + self.output_layer) * tokens / self.rate

    def seconds_to_finetune(self, tokens: int) -> float:
        return 6 * self.blocks * tokens / self.rate

    def seconds_to_test(self, counts: Counts) -> float:
        operations = 0
        for length, n in counts.items():
            tokens = _mean(length)
            operations += n * tokens * (self.blocks + self.attention * tokens)
        return 2 * operations / self.rate


def _seconds_to_draw(counts: Counts) -> float:
    return sum(n * _mean(length) for length, n in counts.items()) / _DRAWN
