"""The plan of a preset: its stages, each after the stages that it needs, and the tables that its results are for.

`stages` walks through the preset once. It lists the tokenizing, the test and training examples of each task, then for
each model its pretraining, perplexity, fine-tuning and evaluation, and then the inspections of fine-tuned models. A
stage only describes work: its method of `Runner` (runner.py) does it. Everything that its result depends on is in its
options, which the run log compares when a run goes on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from metatokens.errors import UserError
from metatokens.paper.variants import (
    Ablation,
    Analysis,
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
_TASK_TABLES = {"list_recall": "table7", "segment_counting": "table8", "parity": "table9", "copying": "table10"}

# The folder that each kind of stage writes.
PRETRAINED = {"pretrain": "pretrained", "fetch": "pretrained", "extend": "extended"}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One unit of work: a method of `Runner`, which gets the subject and the options."""

    name: str
    kind: str  # the beginning of the name
    method: str
    subject: dict[str, Any] = field(default_factory=dict)  # some of `model`, `task`, `condition`, `recipe`
    options: dict[str, Any] = field(default_factory=dict)  # all else that its results depend on, except other stages
    after: tuple[str, ...] = ()  # the stages that it needs
    product: str | None = None  # the last file that it writes for later stages, in the run's folder
    tables: tuple[str, ...] = ()  # the tables that show its results
    priority: float = 0  # lower priorities run first
    cost: float = 1.0  # estimated seconds on one core, or on one GPU for models trained in bfloat16

    @property
    def settings(self) -> dict[str, Any]:
        """The options as JSON values; recipes omit defaults, so finished stages stay valid when a setting is added."""
        return {
            name: one.model_dump(mode="json", exclude_defaults=True) if isinstance(one, BaseModel) else one
            for name, one in self.options.items()
        }

    def fields(self, preset: str) -> dict[str, Any]:
        """Its kind and subject, as fields of a `StageRecord`."""
        found = {"kind": self.kind, "train_length": self.options.get("train_length")}
        for key, one in self.subject.items():
            if isinstance(one, TrainedModel):
                found |= one.about(preset).present_fields()
            elif isinstance(one, FinetuneRecipe):
                found |= {"seed": one.training.seed, "condition": one.task.condition}
            else:
                found[key] = one
        return found


def stages(sizes: Preset) -> list[Stage]:
    """The stages of a preset, each after those that it needs."""
    plan = [
        _stage("tokenize", product="tokens/manifest.json", cost=10),
        _stage("describe_tasks", after=("tokenize",), priority=1),
    ]
    plan += [stage for task in sizes.tasks for stage in _test_stages(sizes, task)]
    # Models with the same seed and training condition share their training examples.
    drawn: dict[str, Stage] = {}
    for model in sizes.models:
        for task in model.tasks:
            stage = _example_stage(model, finetune_recipe(sizes, model, task), task)
            drawn.setdefault(stage.name, stage)
    plan += drawn.values()
    for model in sizes.models:
        plan += _model_stages(model, sizes)
    by_name = {model.name: model for model in sizes.models}
    for inspection in sizes.inspections:
        plan += [
            _inspection_stage(inspection, by_name[name], task, sizes)
            for name in inspection.models
            for task in inspection.tasks
        ]
    if sizes.looked_into:
        shown = [by_name[name] for name in sizes.looked_into]
        plan += [_look_stage(shown, task, sizes) for task in sizes.tasks]
    return plan


def select(plan: list[Stage], only: str | None) -> list[Stage]:
    """The stages whose results a table or a task shows, and the stages that they need; all for None."""
    if only is None:
        return plan
    answered = {stage.name: {*stage.tables, *filter(None, [stage.subject.get("task")])} for stage in plan}
    known = sorted({name for names in answered.values() for name in names})
    if only == "table3":
        raise UserError("no stage answers 'table3', which `python -m benchmarks.speed decode` measures.")
    if only not in known:
        raise UserError(f"no stage of this preset answers {only!r}; --only takes {', '.join(known) or 'nothing'}.")
    needed: set[str] = set()
    for stage in reversed(plan):  # each stage follows those that it needs
        if only in answered[stage.name] or stage.name in needed:
            needed |= {stage.name, *stage.after}
    return [stage for stage in plan if stage.name in needed]


def examples_name(recipe: FinetuneRecipe) -> str:
    """The name of a recipe's encoded training examples: recipes with the same name draw the same examples."""
    sizes = (f"{_sizes(phase)}x{phase.examples}" for phase in recipe.phases())
    return "-".join([recipe.task.condition, f"seed{recipe.training.seed}", *sizes])


def _sizes(phase: Phase) -> str:
    own = phase.curriculum
    return phase.name if own is None else "drill" * own.drill + "_".join(map(str, (*own.lists, *own.items)))


def _test_stages(sizes: Preset, task: str) -> Iterator[Stage]:
    for condition, counts in drawn_counts(sizes, task).items():
        yield _stage(
            "draw_tests",
            task=task,
            condition=condition,
            options={"counts": counts},
            after=("tokenize",),
            product=f"examples/{task}/tests-{condition}",
            priority=min(one.priority for one in sizes.models if task in one.tasks) + _wait(task),
            cost=10 + _seconds_to_draw(counts),
        )


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
        cost=5 + sum(_seconds_to_draw({phase.train_length: phase.examples}) for phase in recipe.phases()),
    )


def _model_stages(model: TrainedModel, sizes: Preset) -> Iterator[Stage]:
    recipe = pretrain_recipe(sizes, model)
    estimate = _Estimate(recipe, sizes.tokenizer)
    if model.published is not None:
        own = {"published": model.published}
        product = f"models/{model.name}/{PRETRAINED['fetch']}/manifest.json"
        yield _stage("fetch", model, options=own, after=("tokenize",), product=product, priority=model.priority)
    elif model.extension is not None:
        after, longer = f"pretrain-{model.pretrained_as}", extend_recipe(sizes, model, recipe)
        yield _pretrain_stage(model, estimate, after, recipe=longer, factor=model.extension)
    elif model.pretrained_as is None:
        yield _pretrain_stage(model, estimate, "tokenize", recipe=recipe)
    start = f"{model.made_by}-{model.start}"
    if model.start == model.name:
        tables = tuple(dict.fromkeys((*model.tables, "perplexity")))
        yield _stage("perplexity", model, after=(start,), tables=tables, priority=model.priority, cost=40)
    for task in model.tasks:
        yield from _task_stages(model, sizes, task, estimate, start)


def _pretrain_stage(
    model: TrainedModel, estimate: "_Estimate", after: str, *, recipe: PretrainRecipe, **options: float
) -> Stage:
    tokens = recipe.training.max_steps * recipe.training.batch * recipe.data.block_size
    return _stage(
        model.made_by,
        model,
        options={"recipe": recipe, **options},
        after=(after,),
        product=f"models/{model.name}/{PRETRAINED[model.made_by]}/manifest.json",
        priority=model.priority,
        cost=10 + estimate.seconds_to_pretrain(tokens),
    )


def _task_stages(model: TrainedModel, sizes: Preset, task: str, estimate: "_Estimate", start: str) -> Iterator[Stage]:
    tables = model.tables or (_TASK_TABLES.get(task, task), "figure1")
    recipe = finetune_recipe(sizes, model, task)
    probe, counts = sizes.probe_steps.get(task), counts_of(sizes, model, task)
    tokens = sum(one.examples * _mean(one.train_length) for one in recipe.phases())
    yield _stage(
        "finetune",
        model,
        task,
        options={"recipe": recipe, "probe_steps": probe},
        after=(
            start,
            f"draw_examples-{task}-{examples_name(recipe)}",
            *(f"draw_tests-{task}-{condition}" for condition in counts),
        ),
        product=f"models/{model.name}/{task}/{recipe.task.train_lengths[-1]}/manifest.json",
        tables=(*tables, "learning") if probe else tables,
        priority=model.priority + _wait(task),
        cost=10 + estimate.seconds_to_finetune(tokens),
    )
    lengths, sees = lengths_tested(sizes, model, task), recipe.task.question_sees
    yield _stage(
        "evaluate",
        model,
        task,
        options={"counts": counts, "train_lengths": lengths, "ratio": sizes.test_ratio}
        | ({"question_sees": sees} if sees else {}),
        after=(f"finetune-{model.name}-{task}",),
        tables=(*tables, "markers") if len(counts) > 1 else tables,
        priority=model.priority + _wait(task) - 0.25,  # before the next model is trained
        cost=10 + len(lengths) * sum(estimate.seconds_to_test(own) for own in counts.values()),
    )


def _inspection_stage(one: FurtherTest | Ablation | Analysis, model: TrainedModel, task: str, sizes: Preset) -> Stage:
    after = [f"finetune-{model.name}-{task}"]
    estimate = _Estimate(pretrain_recipe(sizes, model), sizes.tokenizer)
    if isinstance(one, FurtherTest):
        after += [f"draw_tests-{task}-{condition}" for condition in one.counts]
        cost = 10 + len(one.train_lengths) * sum(map(estimate.seconds_to_test, one.counts.values()))
    elif isinstance(one, Ablation):
        passes = len(one.interventions) * len(lengths_tested(sizes, model, task))
        cost = 10 + passes * estimate.seconds_to_test(one.counts)
    else:  # measured on one core: rate-distortion trains many bottlenecks, the others take a few passes
        cost = 100 * len(one.interventions) if one.kind == "rate-distortion" else 10
    return _stage(
        one.kind,
        model,
        task,
        method=one.method,
        options=one.options,
        after=tuple(after),
        tables=one.tables,
        priority=model.priority + _wait(task),
        cost=cost,
    )


def _look_stage(models: Sequence[TrainedModel], task: str, sizes: Preset) -> Stage:
    trained = {one.name: finetune_recipe(sizes, one, task).task.train_lengths[-1] for one in models}
    return _stage(
        "look",
        task=task,
        options={"trained": trained},
        after=("describe_tasks", *(f"finetune-{name}-{task}" for name in trained)),
        priority=max(one.priority for one in models) + _wait(task),
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
    given = {"model": model, "task": task, "condition": condition}
    subject = {key: value for key, value in given.items() if value is not None}
    name = "-".join([kind, *(one.name if isinstance(one, TrainedModel) else one for one in subject.values())])
    return Stage(name=name, kind=kind, method=method or kind, subject=subject, **fields)


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
        sizes, trained = recipe.model, tokenizer.removeprefix("train:")
        vocabulary = int(trained) if trained.isdigit() else 50_304  # GPT-2's, padded
        attentions = 2 if sizes.second_attention == "causal" else 1  # meta-attention reads one position in ten
        self.blocks = sizes.num_hidden_layers * (8 + 4 * attentions) * sizes.hidden_size**2
        self.output_layer = vocabulary * sizes.hidden_size
        self.attention = attentions * sizes.num_hidden_layers * sizes.hidden_size  # for each key before a token
        self.rate = self.GPU if recipe.training.bf16 else self.CORE

    def seconds_to_pretrain(self, tokens: int) -> float:
        return 6 * (self.blocks + self.output_layer) * tokens / self.rate

    def seconds_to_finetune(self, tokens: int) -> float:
        return 6 * self.blocks * tokens / self.rate

    def seconds_to_test(self, counts: Mapping[int, int]) -> float:
        means = [(_mean(length), n) for length, n in counts.items()]
        return 2 * sum(n * length * (self.blocks + self.attention * length) for length, n in means) / self.rate


def _seconds_to_draw(counts: Mapping[int, int]) -> float:
    return sum(n * _mean(length) for length, n in counts.items()) / _DRAWN
