"""The presets: experiments from a smoke test to the paper's size.

`metatokens reproduce --preset demo` gets from a preset to its result lines like this:

1. `PRESETS["demo"]` is a `Preset` (variants.py): a corpus, recipes, numbers of test prompts, and models to train.
2. `stages(preset)` (plan.py) expands it into stages, such as `pretrain-meta`, `finetune-meta-parity` and
   `evaluate-meta-parity`. A stage names a method of `Runner`, its arguments, and the stages that it needs.
3. `reproduce` (run.py) hands each stage, once its needs are met, to a worker (pools.py).
4. The worker calls the method (runner.py), which uses the library as the commands do and returns records.
5. `RunLog.add` (run_log.py) appends the records to `results.jsonl`, `analysis.jsonl` and `curves.jsonl`, and then the
   stage to `stages.jsonl`. A stage that is in there is not carried out again.
"""

from collections.abc import Mapping
from dataclasses import replace

from metatokens.errors import UserError
from metatokens.paper.variants import Ablation, Analysis, FurtherTest, Preset, TrainedModel
from metatokens.tasks import TASKS


def _steps(**steps: int) -> dict[str, tuple[str, ...]]:
    return {task: (f"training.max_steps={count}",) for task, count in steps.items()}


# Each task has one recipe for all models of a preset. The demo stops at the first train length.
_SMALL_RECIPES = {task: f"small_{task}" for task in TASKS}

DEMO = Preset(
    corpus="builtin",
    tokenizer="train:2048",
    pretrain_recipe="demo",
    finetune_recipes=_SMALL_RECIPES | {"segment_counting": "demo_segment_counting"},
    task_overrides={
        task: ("task.train_lengths=[128]", f"task.train_steps=[{steps}]")
        for task, steps in {"list_recall": 250, "parity": 1000, "copying": 800}.items()
    },
    test_counts={128: 500, 256: 200, 512: 200, 1024: 200},
    # Only the first of three layers has positions: with positions in all layers, small models count worse.
    models=tuple(
        TrainedModel(model=model, pretrain_overrides=("model.rope_layers=[0]",)) for model in ("gpt2", "meta")
    ),
    extra_conditions=dict.fromkeys(("list_recall", "parity"), ("landmark", "decoy")),
    probe_steps=dict.fromkeys(TASKS, 250) | {"list_recall": 100},
    looked_into=("meta", "gpt2"),
)

SMOKE = Preset(
    corpus="builtin",
    tokenizer="train:1024",
    pretrain_recipe="demo",
    finetune_recipes=dict.fromkeys(TASKS, "demo_finetune"),
    pretrain_overrides=("training.max_steps=4", "training.save_steps=4", "training.logging_steps=2"),
    finetune_overrides=("training.save_steps=4", "training.logging_steps=2"),
    task_overrides=_steps(**dict.fromkeys(TASKS, 4)),
    test_counts={128: 16, 256: 8},
    extra_conditions={"list_recall": ("landmark", "decoy")},
)

_COUNTS = {128: 500, 256: 500, 512: 500, 1024: 200, 2048: 100}  # test prompts by length
_SHORT_COUNTS = {length: n for length, n in _COUNTS.items() if length <= 1024}
_CONDITIONS = ("landmark", "decoy")
_MODELS = ("gpt2", "pause", "twin", "meta")
_SEEDED = ("gpt2", "twin", "meta")  # the models of the length controls
_SEEDS = (1, 2)  # in addition to 0, with rope
_SOONER_LEARNED = tuple(task for task in TASKS if task != "segment_counting")

# Every model with rope in three seeds, and with the other position embeddings in two (Tables 7-10).
_GRID = (
    *(TrainedModel(model=model, seed=seed, priority=seed) for seed in (0, *_SEEDS) for model in _MODELS),
    *(
        TrainedModel(model=model, position_embedding=position, seed=seed, tasks=tasks, priority=priority)
        for seed, tasks, priority in ((0, TASKS, 3), (1, _SOONER_LEARNED, 6))
        for position in ("learned", "none")
        for model in _MODELS
    ),
)


def _unmarked(*overrides: str) -> tuple[TrainedModel, ...]:
    """Models trained on list recall whose markers do not reveal the answer."""
    return tuple(
        TrainedModel(
            model=model,
            variant="landmark",
            tables=("markers",),
            finetune_overrides=("task.condition=landmark", *overrides),
            pretrained_as=TrainedModel(model=model, seed=seed).name,
            tasks=("list_recall",),
            seed=seed,
            priority=seed,
        )
        for seed in (0, *_SEEDS)
        for model in _MODELS
    )


# With the recipe for marked prompts (AdamW, one curriculum phase) no model learns this: 9 to 14 %. So the curriculum
# starts with as few as two items, and Muon trains the matrices.
_SMALL_UNMARKED = (
    "task.stages=["
    "{lists: [1, 2], items: [2, 4], max_steps: 1500, until: 0.95, per_device_train_batch_size: 64},"
    "{lists: [2, 3], items: [3, 6], max_steps: 3000, until: 0.9, per_device_train_batch_size: 48},"
    "{lists: [3, 8], items: [3, 10], max_steps: 3000, until: 0.95}]",
    "training.optimizer=muon",
    "training.muon_learning_rate=0.01",
    "training.learning_rate=2.0e-3",
)
# 2,304 positions hold prompts of 2,048 tokens and their answers; the published model has 2,048.
_SMALL_NEO = TrainedModel(
    model="gpt-neo",
    position_embedding="learned",
    pretrain_overrides=("model.architecture=gpt_neo", "model.max_position_embeddings=2304"),
    priority=3,
)
_PUBLISHED_NEO = replace(_SMALL_NEO, published="hf:EleutherAI/gpt-neo-125m")
# Other placements and numbers of meta-tokens in pretraining; block sizes vary so that the text stays the same.
_PLACEMENT = tuple(
    TrainedModel(
        model="meta",
        variant=variant,
        tables=("placement",),
        pretrain_overrides=overrides,
        tasks=("list_recall",),
        priority=3,
    )
    for variant, overrides in {
        "periodic": ("data.placement=periodic",),
        "k=0": ("data.placement=none", "data.block_size=922"),
        "k=0.05": ("data.fraction=0.05", "data.block_size=970"),
        "k=0.2": ("data.fraction=0.2", "data.block_size=1152"),
    }.items()
)
# Pretrained on blocks of 256, for a counterpart of Table 1 at a quarter of its lengths.
_SHORT = TrainedModel(
    model="meta",
    variant="short",
    pretrain_overrides=("data.block_size=256", "training.per_device_train_batch_size=16"),
    tasks=(),
    priority=3,
)


def _jumps(*overrides: str) -> tuple[TrainedModel, ...]:
    """Models for lengths beyond the paper: trained on up to 128 tokens, half of the sequences with a jump in positions.

    Their attention logits grow with the logarithm of the number of keys. The control is the grid's model at train
    length 128, which has had the same number of steps.
    """
    return tuple(
        TrainedModel(
            model=model,
            variant="jumps",
            tables=("lengths",),
            pretrain_overrides=("model.attention_scale=log_length",),
            finetune_overrides=("training.position_jumps=2304", "task.train_lengths=[128]", *overrides),
        )
        for model in _SEEDED
    )


def _extended(
    base: TrainedModel, block: int, steps: Mapping[int, list[int]], *overrides: str
) -> tuple[TrainedModel, ...]:
    """Models of Table 1: `base` with its context extended by a factor, fine-tuned up to half of it and all of it.

    Args:
        base: the model whose pretrained weights are extended.
        block: its block size, in tokens.
        steps: for each factor, the fine-tuning steps at 128, 256 and the two extended lengths.
        overrides: of the fine-tuning recipe.
    """
    return tuple(
        TrainedModel(
            model="meta",
            variant=f"yarn{factor}",
            tables=("table1",),
            pretrain_overrides=base.pretrain_overrides,
            pretrained_as=base.name,
            extension=float(factor),
            finetune_overrides=(
                f"task.train_lengths=[128, 256, {factor * block // 2}, {factor * block}]",
                f"task.train_steps={own}",
                *overrides,
            ),
            tasks=("list_recall", "segment_counting"),
            priority=3,
            tested=(factor * block // 2, factor * block),
            longer_tests={
                own: 50 for own in (factor * block // 2 * times for times in (1, 2, 4)) if own not in _COUNTS
            },
        )
        for factor, own in steps.items()
    )


def _equal_compute(**steps: int) -> tuple[TrainedModel, ...]:
    """Models with the same pretraining compute as `meta`, in place of the same amount of text."""
    return tuple(
        TrainedModel(
            model=model,
            variant="equal-compute",
            tables=("perplexity",),
            pretrain_overrides=(f"training.max_steps={count}",),
            tasks=(),
            priority=3,
        )
        for model, count in steps.items()
    )


_TAKEN_AWAY = ("no_pos", "no_embed", "neither")


def _noise(*models: str, tasks: tuple[str, ...]) -> tuple[Ablation, ...]:
    """Noise on positions, for all tokens or only the meta-tokens, in either unit."""
    return tuple(
        Ablation(
            kind=kind,
            tables=("table15", "table16"),
            models=models,
            tasks=tasks,
            interventions=tuple(
                f"noise:{scale}{place}{unit}" for place in ("", ":meta") for scale in ("0.1", "0.5", "1", "2")
            ),
            counts={128: 500, 512: 500},
            noise_seeds=5,
        )
        for kind, unit in {"noise": "", "raw-noise": ":raw"}.items()
    )


_ABLATIONS = (
    Ablation(
        tables=("table2", "table11", "table12", "table13", "table14", "table17"),
        models=("meta", "meta-learned", *(f"meta-seed{seed}" for seed in _SEEDS)),
        tasks=TASKS,
        interventions=_TAKEN_AWAY,
        counts=_COUNTS,
    ),
    Ablation(
        tables=("table2", "table11"), models=("gpt2", "pause", "twin"), interventions=_TAKEN_AWAY, counts=_SHORT_COUNTS
    ),
    *_noise("gpt2", "gpt2-learned", "meta", "meta-learned", tasks=("list_recall", "copying")),
)


def _with_seeds(*models: str) -> tuple[str, ...]:
    """The names of the models with rope and every seed."""
    return tuple(TrainedModel(model=model, seed=seed).name for model in models for seed in (0, *_SEEDS))


# Longer prompts whose question is as in training on 128 tokens.
_LONG_PROMPTS = tuple(
    FurtherTest(
        kind=kind,
        tables=("lengths",),
        models=(*models, *(f"{model}-jumps" for model in _SEEDED)),
        tasks=tasks,
        counts={"long_prompt": counts},
        train_lengths=(128,),
    )
    for kind, models, tasks, counts in (
        ("long-prompts", _with_seeds(*_SEEDED), TASKS, {128: 500, 256: 200, 512: 200, 1024: 200, 2048: 100}),
        # Few documents are long enough for copying.
        ("longest-prompts", _SEEDED, tuple(task for task in TASKS if task != "copying"), {8192: 50}),
    )
)

_ANALYSES = (
    Analysis(
        kind="sharpness",
        tables=("figure2",),
        models=(*_with_seeds("pause", "twin", "meta"), "meta-learned"),
        train_length=512,
        length=256,
        n=100,
    ),
    Analysis(
        kind="residual",
        tables=("figure2", "figure3"),
        models=(*_with_seeds("pause", "twin", "meta"), "meta-learned"),
        train_length=512,
        length=256,
        n=100,
    ),
    Analysis(
        kind="rate-distortion",
        tables=("figure3",),
        models=_with_seeds(*_SEEDED),
        train_length=128,
        length=128,
        n=2500,
        interventions=(None, "no_pos"),
    ),
)
SMALL = Preset(
    corpus="builtin",
    tokenizer="train:4096",
    pretrain_recipe="small",
    finetune_recipes=_SMALL_RECIPES,
    extend_recipe="small_extend",
    finetune_overrides=("training.train_base=true",),  # of GPT-Neo, whose meta-token a retrofit added
    test_counts=_COUNTS,
    models=(
        *_GRID,
        *_unmarked(*_SMALL_UNMARKED),
        _SMALL_NEO,
        *_jumps("task.train_steps=[1500]"),
        *_PLACEMENT,
        _SHORT,
        *_extended(_SHORT, 256, {4: [1500, 150, 60, 40], 8: [1500, 150, 60, 40]}),
        *_equal_compute(gpt2=358, pause=324, twin=220),
    ),
    extra_conditions=dict.fromkeys(TASKS, _CONDITIONS),
    extra_condition_limit=512,
    probe_steps=dict.fromkeys(TASKS, 100),
    inspections=(*_LONG_PROMPTS, *_ABLATIONS, *_ANALYSES),
)


def _with_room(model: TrainedModel) -> TrainedModel:
    """Learned positions for prompts of 1,024 tokens and their answers, as in `small`."""
    if model.position_embedding != "learned":
        return model
    room = "model.max_position_embeddings=1152"
    return replace(model, pretrain_overrides=(*model.pretrain_overrides, room))


# The paper's sizes and text. Four A100 pretrain one of its models in about two weeks.
_LONG = ("training.per_device_train_batch_size=4", "training.gradient_accumulation_steps=16")
PAPER = replace(
    SMALL,
    corpus="hf:allenai/c4:en",
    tokenizer="gpt2",
    pretrain_recipe="paper",
    finetune_recipes=dict.fromkeys(TASKS, "paper_finetune"),
    extend_recipe="paper_extend",
    models=(
        *map(_with_room, _GRID),
        *_unmarked(),
        _PUBLISHED_NEO,
        *_jumps(),
        *_PLACEMENT,
        *_extended(TrainedModel(model="meta"), 1024, {factor: [2800, 2800, 1000, 1000] for factor in (4, 8)}, *_LONG),
        *_equal_compute(gpt2=221_352, pause=204_530, twin=158_129),
    ),
    probe_steps={"list_recall": 50},
)

# The paper's model and lengths, with the training that fits into half an hour on one H100.
GPU = replace(
    PAPER,
    pretrain_overrides=(
        "training.max_steps=500",
        "training.decay_steps=500",
        "training.warmup_steps=50",
        "training.gradient_accumulation_steps=4",
        "training.save_steps=250",
        "training.logging_steps=10",
    ),
    finetune_overrides=("task.train_steps=[800, 150, 100]", "training.warmup_steps=50", "training.save_steps=400"),
    models=tuple(
        TrainedModel(model=model, tasks=("list_recall", "parity"), priority=0)
        for model in ("gpt2", "pause", "twin", "meta")
    ),
    extra_conditions={"list_recall": _CONDITIONS},
    inspections=(
        Ablation(
            tables=("table2", "table11", "table13"),
            models=("meta",),
            tasks=("list_recall", "parity"),
            interventions=_TAKEN_AWAY,
            counts=_SHORT_COUNTS,
        ),
    ),
)

PRESETS: Mapping[str, Preset] = {"smoke": SMOKE, "demo": DEMO, "small": SMALL, "gpu": GPU, "paper": PAPER}


def preset(name: str) -> Preset:
    """The preset of this name."""
    if name not in PRESETS:
        raise UserError(f"no preset {name!r}; the presets are {', '.join(PRESETS)}.")
    return PRESETS[name]
