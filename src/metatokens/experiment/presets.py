"""The experiments by size."""

from collections.abc import Mapping
from dataclasses import replace

from metatokens.errors import UserError
from metatokens.experiment.models import Ablation, Analysis, Preset, TrainedModel
from metatokens.tasks import TASKS


def _steps(**steps: int) -> dict[str, tuple[str, ...]]:
    return {task: (f"training.max_steps={count}",) for task, count in steps.items()}


DEMO = Preset(
    corpus="builtin",
    tokenizer="train:2048",
    pretrain_recipe="demo",
    finetune_recipe="demo_finetune",
    task_overrides=_steps(list_recall=3300, segment_counting=500, parity=2500, copying=500),
    test_counts={128: 500, 256: 200, 512: 200, 1024: 200},
    extra_conditions=dict.fromkeys(("list_recall", "parity"), ("landmark", "decoy")),
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
    extra_conditions={"list_recall": ("landmark", "decoy")},
)

_CONDITIONS = ("none", "decoy")
_SEEDED = ("gpt2", "twin", "meta")  # three seeds with rope
_SEEDS = (1, 2)

# Every model with every kind of positions; more seeds, and training without markers, with rope (Tables 7-10). Of
# GPT-Neo's positions, the 2,304 are for prompts of 2,048 and their answers; the published one has 2,048.
_GRID = (
    *(TrainedModel(model=model, priority=0) for model in ("gpt2", "pause", "twin", "meta")),
    *(TrainedModel(model=model, seed=seed, priority=0) for seed in _SEEDS for model in _SEEDED),
    *(
        TrainedModel(
            model=model,
            variant="unmarked",
            tables=("markers",),
            finetune_overrides=("task.condition=none",),
            pretrained_as=model,
            tasks=("list_recall",),
        )
        for model in _SEEDED
    ),
    *(
        TrainedModel(model=model, position_embedding=position)
        for position in ("learned", "none")
        for model in ("gpt2", "pause", "twin", "meta")
    ),
)
_SMALL_NEO = TrainedModel(
    model="gpt-neo",
    position_embedding="learned",
    pretrain_overrides=("model.architecture=gpt_neo", "model.max_position_embeddings=2304"),
    priority=2,
)
# List recall once more where 3,000 steps are too few: with learned positions or none every model is at chance then.
_LONGER = tuple(
    replace(
        model,
        variant="longer",
        tables=("table7", "figure1"),
        finetune_overrides=("task.train_steps=[16000, 500, 300]", "training.logging_steps=50"),
        pretrained_as=model.name,
        tasks=("list_recall",),
    )
    for model in (*(one for one in _GRID if one.position_embedding != "rope"), _SMALL_NEO)
)
_PUBLISHED_NEO = replace(_SMALL_NEO, published="hf:EleutherAI/gpt-neo-125m")
# Lengths beyond the paper: positions drawn at random from 2,304 in pretraining and in fine-tuning at 128 tokens.
_RANDOM = tuple(
    TrainedModel(
        model=model,
        variant="random-positions",
        tables=("lengths",),
        pretrain_overrides=("training.random_positions=2304",),
        finetune_overrides=(
            "training.random_positions=2304",
            "task.train_lengths=[128]",
            "task.train_steps=[8000]",
        ),
    )
    for model in _SEEDED
)
# The same from ranges of every size: drawn from 2,304 always, positions are hardly ever as dense as they are at test.
_RANDOM_RANGES = tuple(
    replace(
        model,
        variant="random-ranges",
        finetune_overrides=(*model.finetune_overrides, "training.random_positions_from=1"),
        pretrained_as=model.name,
    )
    for model in _RANDOM
)
# What random positions are to be compared with: plain ones, trained as long on the same prompts.
_ONE_LENGTH = tuple(
    TrainedModel(
        model=model,
        variant="one-length",
        tables=("lengths",),
        finetune_overrides=("task.train_lengths=[128]", "task.train_steps=[8000]"),
        pretrained_as=model,
        tasks=("list_recall",),
    )
    for model in _SEEDED
)
# Where meta-tokens are put in pretraining, and how many: beside the same text, in longer or shorter blocks.
_PLACEMENT = tuple(
    TrainedModel(
        model="meta",
        variant=variant,
        tables=("placement",),
        pretrain_overrides=overrides,
        tasks=("list_recall",),
    )
    for variant, overrides in {
        "periodic": ("data.placement=periodic",),
        "k=0": ("data.placement=none", "data.block_size=922"),
        "k=0.05": ("data.fraction=0.05", "data.block_size=970"),
        "k=0.2": ("data.fraction=0.2", "data.block_size=1152"),
    }.items()
)
# Pretrained on blocks of 256, so that Table 1 has a counterpart at a quarter of its lengths.
_SHORT = TrainedModel(
    model="meta",
    variant="short",
    pretrain_overrides=("data.block_size=256", "training.per_device_train_batch_size=16"),
    tasks=(),
)


def _extended(
    base: TrainedModel, block: int, steps: Mapping[int, list[int]], *overrides: str
) -> tuple[TrainedModel, ...]:
    """Table 1: `base`, pretrained on blocks of this length, with a longer context, fine-tuned to half of it and to it.

    Args:
        base: whose pretrained model is extended.
        block: tokens.
        steps: of fine-tuning at 128, 256 and the two extended lengths, by the factor of the extension.
        overrides: of the fine-tuning recipe, further ones.
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
            tested=(factor * block // 2, factor * block),
        )
        for factor, own in steps.items()
    )


def _equal_compute(**steps: int) -> tuple[TrainedModel, ...]:
    """Models that are given as much compute in pretraining as `meta`, in place of as much text."""
    return tuple(
        TrainedModel(
            model=model,
            variant="equal-compute",
            tables=("perplexity",),
            pretrain_overrides=(f"training.max_steps={count}",),
            tasks=(),
        )
        for model, count in steps.items()
    )


_TAKEN_AWAY = ("no_pos", "no_embed", "neither")


def _noise(*models: str, tasks: tuple[str, ...]) -> tuple[Ablation, ...]:
    """Noise on positions, at all tokens and at the meta-tokens alone, in either unit."""
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
        counts={128: 500, 256: 500, 512: 500, 1024: 500, 2048: 200},
    ),
    Ablation(
        tables=("table2", "table11"),
        models=("gpt2", "pause", "twin"),
        interventions=_TAKEN_AWAY,
        counts={128: 500, 256: 500, 512: 500, 1024: 500},
    ),
    *_noise("gpt2", "gpt2-learned", "meta", "meta-learned", tasks=("list_recall", "copying")),
)
_LONGER_ABLATIONS = (
    Ablation(
        tables=("table2", "table11", "table17"),
        models=("gpt2-learned-longer", "meta-learned-longer"),
        interventions=_TAKEN_AWAY,
        counts={128: 500, 256: 500, 512: 500, 1024: 500},
    ),
    *_noise("gpt2-learned-longer", "meta-learned-longer", tasks=("list_recall",)),
)


def _with_seeds(*models: str) -> tuple[str, ...]:
    """The names of the models with rope, of every seed."""
    return tuple(TrainedModel(model=model, seed=seed).name for model in models for seed in (0, *_SEEDS))


_ANALYSES = (
    Analysis(
        kind="sharpness",
        tables=("figure2",),
        models=("pause", *_with_seeds("twin", "meta"), "meta-learned"),
        train_length=512,
        length=256,
        n=100,
    ),
    Analysis(
        kind="residual",
        tables=("figure2", "figure3"),
        models=("pause", *_with_seeds("twin", "meta"), "meta-learned"),
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
_LONGER_ANALYSES = tuple(
    replace(analysis, models=("meta-learned-longer",)) for analysis in _ANALYSES if "meta-learned" in analysis.models
)

SMALL = Preset(
    corpus="builtin",
    tokenizer="train:4096",
    pretrain_recipe="small",
    finetune_recipe="small_finetune",
    extend_recipe="small_extend",
    test_counts={128: 500, 256: 500, 512: 500, 1024: 500, 2048: 200},
    models=(
        *_GRID,
        _SMALL_NEO,
        *_LONGER,
        *_RANDOM,
        *_RANDOM_RANGES,
        *_ONE_LENGTH,
        *_PLACEMENT,
        _SHORT,
        *_extended(_SHORT, 256, {4: [3000, 500, 300, 200], 8: [3000, 500, 200, 150]}),
        *_equal_compute(gpt2=672, pause=608, twin=413),
    ),
    extra_conditions=dict.fromkeys(TASKS, _CONDITIONS),
    extra_condition_limit=512,
    rope_test_counts={4096: 200},
    probe_steps={"list_recall": 50},
    inspections=(*_ABLATIONS, *_LONGER_ABLATIONS, *_ANALYSES, *_LONGER_ANALYSES),
)


def _with_room(model: TrainedModel) -> TrainedModel:
    """A learned table that holds answers to prompts of 1,024 tokens too, as that of `small` does."""
    if model.position_embedding != "learned":
        return model
    room = "model.max_position_embeddings=1152"
    return replace(model, pretrain_overrides=(*model.pretrain_overrides, room))


# The paper's sizes and text: 4 x A100 pretrain one of its models in about two weeks.
_LONG = ("training.per_device_train_batch_size=4", "training.gradient_accumulation_steps=16")
PAPER = replace(
    SMALL,
    corpus="hf:allenai/c4:en",
    tokenizer="gpt2",
    pretrain_recipe="paper",
    finetune_recipe="paper_finetune",
    extend_recipe="paper_extend",
    rope_test_counts=dict.fromkeys((4096, 8192, 16384), 200),
    models=(
        *map(_with_room, _GRID),
        _PUBLISHED_NEO,
        *_RANDOM,
        *_RANDOM_RANGES,
        *_ONE_LENGTH,
        *_PLACEMENT,
        *_extended(TrainedModel(model="meta"), 1024, {factor: [2800, 2800, 1000, 1000] for factor in (4, 8)}, *_LONG),
        *_equal_compute(gpt2=221_352, pause=204_530, twin=158_129),
    ),
    inspections=(*_ABLATIONS, *_ANALYSES),
)

# The paper's model and lengths, with as little training as fits into half an hour of one H100.
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
    rope_test_counts={},
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
            counts={128: 500, 256: 500, 512: 500, 1024: 500},
        ),
    ),
)

PRESETS: Mapping[str, Preset] = {"smoke": SMOKE, "demo": DEMO, "small": SMALL, "gpu": GPU, "paper": PAPER}


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        UserError: if there is none.
    """
    if name not in PRESETS:
        raise UserError(f"no preset {name!r}; the presets are {', '.join(PRESETS)}.")
    return PRESETS[name]
