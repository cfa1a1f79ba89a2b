"""Which runs answer which table: the stages that a preset expands to, each after the ones that it needs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from metatokens.data.insertion import meta_token_count
from metatokens.errors import UserError
from metatokens.experiment.variants import (
    Ablation,
    Analysis,
    Preset,
    Variant,
    counts_of,
    drawn_counts,
    extend_recipe,
    finetune_recipe,
    lengths_tested,
    pretrain_recipe,
)
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.cost import flops, forward_products
from metatokens.recipe import FinetuneRecipe, PretrainRecipe

# What one of the paper's tables, or a question of ours, is answered by; `reproduce --only` takes these names.
_TASK_TABLES = {"list_recall": "table7", "segment_counting": "table8", "parity": "table9", "copying": "table10"}
_NOTE_TABLES = {
    "longer": ("table7", "figure1"),
    "unmarked": ("markers",),
    "random-positions": ("lengths",),
    "random-ranges": ("lengths",),
    "one-length": ("lengths",),
    "periodic": ("placement",),
    "k=0": ("placement",),
    "k=0.05": ("placement",),
    "k=0.2": ("placement",),
    "yarn4": ("table1",),
    "yarn8": ("table1",),
    "equal-compute": ("perplexity",),
}

PRETRAINED = {"pretrain": "pretrained", "extend": "extended"}  # the folder that the verb writes


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One unit of work: `verb` with `arguments`, after the stages named in `after`."""

    name: str
    verb: str
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # what its results depend on, beside the stages before
    after: tuple[str, ...] = ()
    product: str | None = None  # the last file that it writes of what later stages need, in the run's folder
    tables: tuple[str, ...] = ()  # that its results stand in
    priority: float = 0  # lower ones first
    cost: float = 1.0  # seconds, estimated: on one core, or, of models trained in bfloat16, on one GPU


def stages(sizes: Preset) -> list[Stage]:
    """The stages of a preset, each after the ones that it needs."""
    plan = [
        _stage("tokenize", product="tokens/manifest.json", cost=10),
        _stage("describe_tasks", after=("tokenize",), tables=("table8", "table9"), priority=1, cost=10),
    ]
    plan += [stage for task in sizes.task_overrides for stage in _test_stages(sizes, task)]
    # Models of one seed and training condition read the same examples, which are made once.
    drawn: dict[str, Stage] = {}
    for one in sizes.variants:
        for task in one.tasks:
            stage = _example_stage(one, finetune_recipe(sizes, one, task), task)
            drawn.setdefault(stage.name, stage)
    plan += drawn.values()
    for variant in sizes.variants:
        plan += _variant_stages(variant, sizes)
    for ablation in sizes.ablations:
        plan += _ablation_stages(ablation, sizes)
    for analysis in sizes.analyses:
        plan += _analysis_stages(analysis, sizes)
    return plan


def select(plan: list[Stage], table: str | None) -> list[Stage]:
    """The stages whose results stand in a table, and those that they need; all of them for None.

    Raises:
        UserError: if no stage answers it.
    """
    if table is None:
        return plan
    known = sorted({name for stage in plan for name in stage.tables})
    if table == "table3":
        raise UserError("no stage answers 'table3', which is measured by `metatokens benchmark decode`.")
    if table not in known:
        raise UserError(f"no stage of this preset answers {table!r}; --only takes {', '.join(known) or 'nothing'}.")
    needed: set[str] = set()
    for stage in reversed(plan):  # every stage stands after the ones that it needs
        if table in stage.tables or stage.name in needed:
            needed |= {stage.name, *stage.after}
    return [stage for stage in plan if stage.name in needed]


def examples_name(recipe: FinetuneRecipe) -> str:
    """What the encoded train examples of a recipe are called: recipes with the same name draw the same ones."""
    sizes = "-".join(f"{length}x{count}" for length, count in _examples(recipe).items())
    return f"{recipe.task.condition}-seed{recipe.training.seed}-{sizes}"


def _test_stages(sizes: Preset, task: str) -> Iterator[Stage]:
    for condition, counts in drawn_counts(sizes, task).items():
        yield _stage(
            "draw_tests",
            {"task": task, "condition": condition},
            settings={"counts": counts},
            after=("tokenize",),
            product=f"examples/{task}/tests-{condition}",
            priority=_wait(task),
            cost=10 + _seconds_to_draw(counts),
        )


def _example_stage(variant: Variant, recipe: FinetuneRecipe, task: str) -> Stage:
    name = examples_name(recipe)
    return Stage(
        name=f"draw_examples-{task}-{name}",
        verb="draw_examples",
        arguments={"variant": variant.name, "task": task},
        after=("tokenize",),
        product=f"examples/{task}/{name}/complete",
        priority=variant.priority + _wait(task),
        cost=5 + _seconds_to_draw(_examples(recipe)),
    )


def _variant_stages(variant: Variant, sizes: Preset) -> Iterator[Stage]:
    own_tables = _NOTE_TABLES.get(variant.note, ())
    recipe = pretrain_recipe(sizes, variant, Path("tokens"))
    if variant.published is not None:
        own = {"published": variant.published}
        yield _stage("fetch", {"variant": variant.name}, settings=own, after=("tokenize",), priority=variant.priority)
    elif variant.extension is not None:
        longer = extend_recipe(sizes, variant, recipe)
        yield _pretrain_stage("extend", variant, sizes, longer, after=(f"pretrain-{variant.pretrained_as}",))
    elif variant.pretrained_as is None:
        yield _pretrain_stage("pretrain", variant, sizes, recipe, after=("tokenize",))
    start = f"{variant.made_by}-{variant.start}"
    if variant.start == variant.name:
        tables = tuple(dict.fromkeys((*own_tables, "perplexity")))
        about = {"variant": variant.name}
        yield _stage("perplexity", about, after=(start,), tables=tables, priority=variant.priority, cost=40)
    for task in variant.tasks:
        yield from _task_stages(variant, sizes, task, start, own_tables or _tables_of(task))


def _tables_of(task: str) -> tuple[str, ...]:
    """What a task answers: a table of the paper's, or, of a task that the paper has not, one of its own name."""
    return _TASK_TABLES.get(task, task), "figure1"


def _pretrain_stage(
    verb: str, variant: Variant, sizes: Preset, recipe: PretrainRecipe, after: tuple[str, ...]
) -> Stage:
    data, blocks = recipe.data, recipe.training.max_steps * recipe.training.batch
    inserted = meta_token_count(data.block_size, data.fraction, data.placement)
    estimate = _Estimate(recipe, sizes.tokenizer)
    text = (data.block_size - inserted) / data.block_size
    seconds = estimate.seconds(data.block_size, meta_tokens=inserted, scored=text, training=True)
    return _stage(
        verb,
        {"variant": variant.name},
        settings={"recipe": _settings(recipe), "factor": variant.extension},
        after=after,
        product=f"models/{variant.name}/{PRETRAINED[verb]}/manifest.json",
        priority=variant.priority,
        cost=10 + blocks * seconds,
    )


def _task_stages(variant: Variant, sizes: Preset, task: str, start: str, tables: tuple[str, ...]) -> Iterator[Stage]:
    about = {"variant": variant.name, "task": task}
    estimate = _Estimate(pretrain_recipe(sizes, variant, Path("tokens")), sizes.tokenizer)
    recipe = finetune_recipe(sizes, variant, task)
    probe, counts = sizes.probe_steps.get(task), counts_of(sizes, variant, task)
    trained = sum(n * estimate.seconds(_mean(length), training=True) for length, n in _examples(recipe).items())
    yield _stage(
        "finetune",
        about,
        settings={"recipe": _settings(recipe), "probe_steps": probe},
        after=(
            start,
            f"draw_examples-{task}-{examples_name(recipe)}",
            *(f"draw_tests-{task}-{condition}" for condition in counts),
        ),
        product=f"models/{variant.name}/{task}/{recipe.task.train_lengths[-1]}/manifest.json",
        tables=(*tables, "learning") if probe else tables,
        priority=variant.priority + _wait(task),
        cost=10 + trained,
    )
    lengths = lengths_tested(sizes, variant, task)
    yield _stage(
        "evaluate",
        about,
        settings={"counts": counts, "train_lengths": lengths},
        after=(f"finetune-{variant.name}-{task}",),
        tables=(*tables, "markers") if len(counts) > 1 else tables,
        priority=variant.priority + _wait(task) - 0.5,  # a model is measured before the next one is made
        cost=10 + len(lengths) * sum(estimate.seconds_to_test(own) for own in counts.values()),
    )


def _ablation_stages(ablation: Ablation, sizes: Preset) -> Iterator[Stage]:
    variants = {variant.name: variant for variant in sizes.variants}
    for name, task in product(ablation.variants, ablation.tasks):
        variant = variants[name]
        settings: dict[str, Any] = {
            "interventions": ablation.interventions,
            "counts": dict(ablation.counts),
            "noise_seeds": ablation.noise_seeds,
        }
        estimate = _Estimate(pretrain_recipe(sizes, variant, Path("tokens")), sizes.tokenizer)
        passes = len(settings["interventions"]) * len(lengths_tested(sizes, variant, task))
        yield Stage(
            name=f"{ablation.name}-{name}-{task}",
            verb="intervene",
            arguments={"variant": name, "task": task, **settings},
            settings=settings,
            after=(f"finetune-{name}-{task}",),
            tables=ablation.tables,
            priority=variant.priority + _wait(task),
            cost=10 + passes * estimate.seconds_to_test(ablation.counts),
        )


def _analysis_stages(analysis: Analysis, sizes: Preset) -> Iterator[Stage]:
    variants = {variant.name: variant for variant in sizes.variants}
    settings = {
        "kind": analysis.kind,
        "train_length": analysis.train_length,
        "length": analysis.length,
        "n": analysis.n,
        "interventions": analysis.interventions,
    }
    for name in analysis.variants:
        yield Stage(
            name=f"{analysis.kind}-{name}-{analysis.task}",
            verb="analyze",
            arguments={"variant": name, "task": analysis.task, **settings},
            settings=settings,
            after=(f"finetune-{name}-{analysis.task}",),
            tables=analysis.tables,
            priority=variants[name].priority,
            # As measured on a core: the head is fitted for each rate, the rest is a few passes.
            cost=100 * len(analysis.interventions) if analysis.kind == "rate-distortion" else 10,
        )


def _wait(task: str) -> int:
    # Other tasks come after list recall of any model, so that a run that is cut short has compared all of them on one.
    return 0 if task == "list_recall" else 2


def _stage(verb: str, arguments: dict[str, str] | None = None, **fields: Any) -> Stage:
    arguments = arguments or {}
    return Stage(name="-".join([verb, *arguments.values()]), verb=verb, arguments=arguments, **fields)


def _settings(recipe: PretrainRecipe | FinetuneRecipe) -> dict[str, Any]:
    # Without defaults, so that a setting that a later version adds leaves finished stages as they are.
    return recipe.model_dump(mode="json", exclude_defaults=True)


def _examples(recipe: FinetuneRecipe) -> dict[int, int]:
    return {length: settings.max_steps * settings.batch for length, settings in recipe.phases().items()}


_DRAWN = 1.5e6  # tokens of examples made a second


def _mean(length: int) -> int:
    """Tokens of a prompt of at most `length`, on average."""
    return length * 2 // 3


class _Estimate:
    """Of the seconds that a model's arithmetic takes."""

    # Floating-point operations a second: of a core, what the models of `small` reach on an AMD EPYC; of a GPU, a fifth
    # of what an H100 is sold with.
    CORE, GPU = 4e10, 2e14

    def __init__(self, recipe: PretrainRecipe, tokenizer: str):
        trained = tokenizer.removeprefix("train:")
        sizes = recipe.model.model_dump(exclude={"architecture"})
        sizes["vocab_size"] = int(trained) if trained.isdigit() else 50_304  # GPT-2's, padded
        self.config = MetaGPT2Config(**sizes, meta_token_id=1, bos_token_id=0, eos_token_id=0)
        self.rate = self.GPU if recipe.training.bf16 else self.CORE

    def seconds(self, length: int, *, meta_tokens: int = 2, scored: float = 0.0, training: bool = False) -> float:
        """A sequence's share of a batch; `scored` is the share of its positions whose logits are needed."""
        needed = max(1, int(scored * length))
        products = forward_products(self.config, batch=1, length=length, meta_tokens=meta_tokens, scored=needed)
        return flops(products, training=training) / self.rate

    def seconds_to_test(self, counts: Mapping[int, int]) -> float:
        return sum(n * self.seconds(_mean(length)) for length, n in counts.items())


def _seconds_to_draw(counts: Mapping[int, int]) -> float:
    return sum(n * _mean(length) for length, n in counts.items()) / _DRAWN
