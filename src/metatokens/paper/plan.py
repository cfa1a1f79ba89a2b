"""The plan of a preset: its stages, each after the stages that it needs, and the tables that its results are for.

`stages` lists them in the order in which they run: task by task, and within a task model by model, so that a run that
is cut short has compared all models on its first task. A model is pretrained right before its first task. A stage only
describes work: its method of `Runner` (runner.py) does it. Corpus, book, tokenizer and the blocks of the
pretraining are the run's. All else that its result depends on is in its options, which the run log compares when a run
goes on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from metatokens.errors import UserError
from metatokens.paper.variants import (
    Preset,
    TrainedModel,
    counts_of,
    drawn_counts,
    extend_recipe,
    finetune_recipe,
    lengths_tested,
    pretrain_recipe,
)
from metatokens.recipe import FinetuneRecipe

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
    subject: Fields = field(default_factory=dict)  # some of `model`, `task`, `condition`
    # All else that its results depend on, except other stages and what is the run's.
    options: Fields = field(default_factory=dict)
    after: tuple[str, ...] = ()  # the stages that it needs
    product: str | None = None  # the last file that it writes for later stages, in the run's folder
    tables: tuple[str, ...] = ()  # the tables that show its results

    @property
    def settings(self) -> Fields:
        """The options as JSON values; recipes omit defaults, so finished stages stay valid when a setting is added."""
        return TypeAdapter(Fields).dump_python(self.options, mode="json", exclude_defaults=True)

    @property
    def answers(self) -> set[str]:
        """The tables and the task whose results it gives."""
        task = self.subject.get("task")
        return {*self.tables, task} if task else {*self.tables}

    @property
    def steps(self) -> int:
        """The steps of its training, and 50 for any other stage: a measure of its part of the whole run."""
        recipe = self.options.get("recipe")
        if recipe is None:
            return 50
        if isinstance(recipe, FinetuneRecipe):
            return sum(phase.settings.max_steps for phase in recipe.phases())
        return recipe.training.max_steps


def stages(preset: Preset) -> list[Stage]:
    """The stages of a preset, in the order in which they run: each after those that it needs."""
    # Several tasks name the pretraining of a model: it keeps its first place.
    return list({stage.name: stage for stage in _stages(preset)}.values())


def _stages(preset: Preset) -> Iterator[Stage]:
    yield _stage("tokenize", product="tokens/manifest.json")
    yield _stage("describe_tasks", after=("tokenize",))
    for task in preset.tasks:
        for condition, counts in drawn_counts(preset, task).items():
            yield _stage(
                "draw_tests",
                task=task,
                condition=condition,
                options={"counts": counts},
                after=("tokenize",),
            )
        for model in preset.models:
            if task in model.tasks:
                yield from _weights_stages(model, preset)
                yield _finetune_stage(model, preset, task)
                yield _evaluate_stage(model, preset, task)
        yield from _inspection_stages(preset, task)
        if preset.looked_into:
            yield _look_stage(preset, task)
    for model in preset.models:
        yield from _weights_stages(model, preset)


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


def _weights_stages(model: TrainedModel, preset: Preset) -> Iterator[Stage]:
    """The stages that make and measure the weights from which a model is fine-tuned, unless they are another's."""
    if model.start != model.name:
        return
    recipe = pretrain_recipe(preset, model)
    options: Fields
    if model.published is not None:
        after, options = "tokenize", {"published": model.published}
    elif model.extension is None:
        after, options = "tokenize", {"recipe": recipe}
    else:
        longer = extend_recipe(preset, model, recipe)
        after = f"pretrain-{model.pretrained_as}"
        options = {"recipe": longer, "factor": model.extension}
    weights = _stage(
        model.made_by,
        model,
        options=options,
        after=(after,),
        product=f"{model.weights}/manifest.json",
    )
    yield weights
    yield _stage("perplexity", model, after=(weights.name,), tables=(*model.tables, "perplexity"))


def _finetune_stage(model: TrainedModel, preset: Preset, task: str) -> Stage:
    recipe = finetune_recipe(preset, model, task)
    probe_steps = preset.probe_steps.get(task)
    tables = _tables(model, task)
    return _stage(
        "finetune",
        model,
        task,
        options={"recipe": recipe, "probe_steps": probe_steps},
        after=(f"{model.made_by}-{model.start}",),
        product=f"models/{model.name}/{task}/{recipe.task.train_lengths[-1]}/manifest.json",
        tables=(*tables, "learning") if probe_steps else tables,
    )


def _evaluate_stage(model: TrainedModel, preset: Preset, task: str) -> Stage:
    counts, lengths = counts_of(preset, model, task), lengths_tested(preset, model, task)
    options: Fields = {"counts": counts, "train_lengths": lengths, "ratio": preset.test_ratio}
    question_sees = finetune_recipe(preset, model, task).task.question_sees
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
    )


def _tables(model: TrainedModel, task: str) -> tuple[str, ...]:
    return model.tables or (_TASK_TABLES.get(task, task), "figure1")


def _inspection_stages(preset: Preset, task: str) -> Iterator[Stage]:
    for inspection in preset.inspections:
        if task not in inspection.tasks:
            continue
        for name in inspection.models:
            yield _stage(
                inspection.kind,
                preset.models_by_name[name],
                task,
                method=inspection.method,
                options=inspection.options,
                after=(f"finetune-{name}-{task}",),
                tables=inspection.tables,
            )


def _look_stage(preset: Preset, task: str) -> Stage:
    trained = {
        name: finetune_recipe(preset, preset.models_by_name[name], task).task.train_lengths[-1]
        for name in preset.looked_into
    }
    return _stage(
        "look",
        task=task,
        options={"trained": trained},
        after=("describe_tasks", *(f"finetune-{name}-{task}" for name in trained)),
    )


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
