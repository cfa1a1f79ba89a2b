"""Which runs answer which question: presets, and the stages that they expand to."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metatokens.data.insertion import meta_token_count
from metatokens.errors import UserError
from metatokens.recipe import FinetuneRecipe, ModelSettings, PretrainRecipe, load_recipe
from metatokens.tasks.curriculum import TASKS

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
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One model, pretrained and fine-tuned: one of MODELS with the preset's recipes, but for what is said here."""

    model: str
    position: str = "rope"
    seed: int = 0
    note: str = ""  # names what else sets it apart; filed under the recipe "PRESET/NOTE"
    pretrain_overrides: tuple[str, ...] = ()
    finetune_overrides: tuple[str, ...] = ()
    pretrained_as: str | None = None  # fine-tuned from the pretrained model of the variant of that name
    tasks: tuple[str, ...] = TASKS
    priority: int = 1  # lower ones are carried out first, list recall before the other tasks

    @property
    def name(self) -> str:
        """The model's name and what differs from rope, seed 0 and the plain recipes."""
        position = "" if self.position == "rope" else self.position
        return "-".join(filter(None, [self.model, position, f"seed{self.seed}" if self.seed else "", self.note]))


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One experiment's sizes. Every model gets the same text tokens, task prompts and steps."""

    corpus: str
    tokenizer: str
    pretrain_recipe: str
    finetune_recipe: str
    pretrain_overrides: tuple[str, ...] = ()
    finetune_overrides: tuple[str, ...] = ()
    task_overrides: Mapping[str, tuple[str, ...]]  # of the fine-tuning recipe, such as the steps of each task
    test_counts: Mapping[int, int]  # test prompts of each length
    variants: tuple[Variant, ...] = tuple(Variant(model=model) for model in MODELS)
    extra_conditions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of the variants with rope
    extra_condition_limit: int = 1024  # the longest bin in which they are tested
    rope_test_counts: Mapping[int, int] = field(default_factory=dict)  # further bins, of the variants with rope


def _steps(**steps: int) -> dict[str, tuple[str, ...]]:
    return {task: (f"training.max_steps={count}",) for task, count in steps.items()}


DEMO = Preset(
    corpus="builtin",
    tokenizer="train:2048",
    pretrain_recipe="demo",
    finetune_recipe="demo_finetune",
    task_overrides=_steps(list_recall=3300, segment_counting=500, parity=2500, copying=500),
    test_counts={128: 500, 256: 200, 512: 200, 1024: 200},
    extra_conditions={"list_recall": ("none", "decoy")},
)

SMOKE = Preset(
    corpus="builtin",
    tokenizer="train:1024",
    pretrain_recipe="demo",
    finetune_recipe="demo_finetune",
    pretrain_overrides=("training.max_steps=4", "training.save_steps=4", "training.logging_steps=2"),
    finetune_overrides=("training.save_steps=4", "training.logging_steps=2"),
    task_overrides=_steps(**dict.fromkeys(TASKS, 4)),
    test_counts={128: 16, 256: 8},
    extra_conditions={"list_recall": ("none", "decoy")},
)

_CONDITIONS = ("none", "decoy")
_SEEDED = ("gpt2", "twin", "meta")  # three seeds with rope

# Every model with every kind of positions; more seeds, and training without markers, with rope (Tables 7-10).
_GRID = (
    *(Variant(model=model, priority=0 if model in _SEEDED else 1) for model in MODELS),
    *(Variant(model=model, seed=seed, priority=0) for seed in (1, 2) for model in _SEEDED),
    *(Variant(model=model, position=position) for position in ("learned", "none") for model in MODELS),
    *(
        Variant(
            model=model,
            note="unmarked",
            finetune_overrides=("task.condition=none",),
            pretrained_as=model,
            tasks=("list_recall",),
        )
        for model in _SEEDED
    ),
)
# Lengths beyond the paper: positions drawn at random from 2,304 in pretraining and in fine-tuning at 128 tokens.
_RANDOM = tuple(
    Variant(
        model=model,
        note="random-positions",
        pretrain_overrides=("training.random_positions=2304",),
        finetune_overrides=(
            "training.random_positions=2304",
            "task.train_lengths=[128]",
            "task.train_steps=[6000]",
        ),
    )
    for model in _SEEDED
)
# Where meta-tokens are put in pretraining, and how many.
_PLACEMENT = tuple(
    Variant(model="meta", note=note, pretrain_overrides=(override,), tasks=("list_recall",))
    for note, override in {
        "periodic": "data.placement=periodic",
        "k=0": "data.placement=none",
        "k=0.05": "data.fraction=0.05",
        "k=0.2": "data.fraction=0.2",
    }.items()
)

SMALL = Preset(
    corpus="builtin",
    tokenizer="train:4096",
    pretrain_recipe="small",
    finetune_recipe="small_finetune",
    task_overrides=dict.fromkeys(TASKS, ()),
    test_counts={128: 500, 256: 500, 512: 500, 1024: 500, 2048: 200},
    variants=(*_GRID, *_RANDOM, *_PLACEMENT),
    extra_conditions=dict.fromkeys(TASKS, _CONDITIONS),
    rope_test_counts={4096: 200},
)

PRESETS: Mapping[str, Preset] = {"smoke": SMOKE, "demo": DEMO, "small": SMALL}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One unit of work: `verb` with `arguments`, after the stages named in `after`."""

    name: str
    verb: str
    arguments: dict[str, Any] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    product: str | None = None  # the last file that it writes of what later stages need, in the run's folder
    priority: int = 0  # lower ones first
    cost: float = 1.0  # seconds, estimated; for the order within a priority, the longest first, and the time left


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        UserError: if there is none.
    """
    if name not in PRESETS:
        raise UserError(f"no preset {name!r}; the presets are {', '.join(PRESETS)}.")
    return PRESETS[name]


def pretrain_recipe(sizes: Preset, variant: Variant, tokens: Path) -> PretrainRecipe:
    """A variant's pretraining recipe, on the same text a block as every other's."""
    overrides = [
        *sizes.pretrain_overrides,
        f"data.tokens={tokens}",
        f"model.second_attention={MODELS[variant.model]['second_attention']}",
        f"model.position_embedding={variant.position}",
        f"training.seed={variant.seed}",
        *variant.pretrain_overrides,
    ]
    recipe = load_recipe(PretrainRecipe, sizes.pretrain_recipe, overrides)
    data = recipe.data
    if MODELS[variant.model]["placement"] == "none":
        text = data.block_size - meta_token_count(data.block_size, data.fraction)
        data = data.model_copy(update={"placement": "none", "block_size": text})
    return recipe.model_copy(update={"data": data})


def finetune_recipe(sizes: Preset, variant: Variant, task: str) -> FinetuneRecipe:
    """A variant's fine-tuning recipe for a task."""
    overrides = [*sizes.finetune_overrides, *sizes.task_overrides[task], *variant.finetune_overrides]
    return load_recipe(FinetuneRecipe, sizes.finetune_recipe, [*overrides, f"training.seed={variant.seed}"])


def counts_of(sizes: Preset, variant: Variant, task: str) -> dict[str, dict[int, int]]:
    """In which conditions a variant is tested on a task, and on how many prompts of each length."""
    is_rope = variant.position == "rope"
    extra = sizes.extra_conditions.get(task, ()) if is_rope else ()
    short = {length: n for length, n in sizes.test_counts.items() if length <= sizes.extra_condition_limit}
    plain = {**sizes.test_counts, **(sizes.rope_test_counts if is_rope else {})}
    return {"paper": plain} | dict.fromkeys(extra, short)


def stages(sizes: Preset) -> list[Stage]:
    """The stages of a preset, each after the ones that it needs."""
    plan = [
        Stage(name="tokenize", verb="tokenize", product="tokens/manifest.json", cost=5),
        Stage(name="describe_tasks", verb="describe_tasks", after=("tokenize",), priority=1, cost=2),
    ]
    for task in sizes.task_overrides:
        drawn = sum(sizes.test_counts.values()) * (1 + len(sizes.extra_conditions.get(task, ())))
        drawn += max(sum(_examples(finetune_recipe(sizes, one, task)).values()) for one in sizes.variants)
        plan.append(
            _stage(
                "draw_examples",
                {"task": task},
                after=("tokenize",),
                product=f"examples/{task}/complete",
                priority=task != "list_recall",
                cost=1 + drawn / 5000,
            )
        )
    for variant in sizes.variants:
        plan += _stages_of(variant, sizes)
    return plan


def _stages_of(variant: Variant, sizes: Preset) -> Iterator[Stage]:
    recipe = pretrain_recipe(sizes, variant, Path("tokens"))
    tokens = recipe.training.max_steps * recipe.training.per_device_train_batch_size * recipe.data.block_size
    seconds = _seconds_a_token(recipe.model)
    about = {"variant": variant.name}
    if variant.pretrained_as is None:
        manifest = f"models/{variant.name}/pretrained/manifest.json"
        cost = 3 + 2 * seconds * tokens
        yield _stage("pretrain", about, after=("tokenize",), product=manifest, priority=variant.priority, cost=cost)
        yield _stage("perplexity", about, after=(f"pretrain-{variant.name}",), priority=variant.priority, cost=3)
    needs = f"pretrain-{variant.pretrained_as or variant.name}"
    for task in variant.tasks:
        about = {"variant": variant.name, "task": task}
        priority = variant.priority + (task != "list_recall")
        tuning = finetune_recipe(sizes, variant, task)
        trained = sum(0.75 * length * count for length, count in _examples(tuning).items())
        tested = sum(n * length for counts in counts_of(sizes, variant, task).values() for length, n in counts.items())
        yield _stage(
            "finetune",
            about,
            after=(needs, f"draw_examples-{task}"),
            product=f"models/{variant.name}/{task}/{tuning.task.train_lengths[-1]}/manifest.json",
            priority=priority,
            cost=3 + seconds * trained,
        )
        tested *= len(tuning.task.train_lengths)
        after = (f"finetune-{variant.name}-{task}", f"draw_examples-{task}")
        yield _stage("evaluate", about, after=after, priority=priority, cost=3 + seconds * tested / 3)


def _stage(verb: str, arguments: dict[str, str], **fields: Any) -> Stage:
    return Stage(name="-".join([verb, *arguments.values()]), verb=verb, arguments=arguments, **fields)


def _examples(recipe: FinetuneRecipe) -> dict[int, int]:
    phases = recipe.phases().items()
    return {length: settings.max_steps * settings.per_device_train_batch_size for length, settings in phases}


def _seconds_a_token(model: ModelSettings) -> float:
    """Of training on answers, on one core: the products of the blocks at 50 GFLOP/s. An estimate for the time left."""
    second = 1 + {"none": 0.0, "meta": 0.2, "causal": 0.6}[model.second_attention]
    return 6 * model.num_hidden_layers * 12 * model.hidden_size**2 * second / 5e10
