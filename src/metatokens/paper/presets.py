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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from metatokens.errors import UserError
from metatokens.paper.variants import COMPARED, Ablation, Analysis, FurtherTest, LandmarksTest, Preset, TrainedModel
from metatokens.tasks import TASKS

# `demo` and `small` share this: their models have the same sizes. Each task has one recipe for all models.
_SMALLEST = Preset(
    corpus="builtin",
    tokenizer="train:2048",
    pretrain_recipe="demo",
    pretrain_overrides=("model.rope_layers=[0]",),  # with positions in all layers, small models count worse
    finetune_recipes={task: f"small_{task}" for task in TASKS},
    extend_recipe="small_extend",
    test_counts={},
)

# A tour of a few minutes: short recipes of its own, and no more test prompts than show which model knows its task. List
# recall, the first task, has `pause` too: asked with the text covered, it differs from `meta` the most.
DEMO = replace(
    _SMALLEST,
    pretrain_overrides=(*_SMALLEST.pretrain_overrides, "training.max_steps=100"),
    finetune_recipes={task: f"demo_{task}" for task in TASKS},
    test_counts={128: 250, 256: 100},
    models=(
        TrainedModel(model="gpt2"),
        TrainedModel(model="pause", tasks=("list_recall",)),
        TrainedModel(model="meta"),
    ),
    extra_conditions={"list_recall": ("landmark", "decoy")},
    extra_condition_limit=128,
    probe_steps=dict.fromkeys(TASKS, 250) | {"list_recall": 50},
    inspections=(LandmarksTest(models=("pause", "meta"), counts={"paper": {128: 250}}),),
    looked_into=("meta", "gpt2"),
)

SMOKE = Preset(
    corpus="builtin",
    tokenizer="train:1024",
    pretrain_recipe="demo",
    finetune_recipes=dict.fromkeys(TASKS, "demo_finetune"),
    pretrain_overrides=("training.max_steps=4", "training.save_steps=4", "training.logging_steps=2"),
    finetune_overrides=("training.max_steps=4", "training.save_steps=4", "training.logging_steps=2"),
    test_counts={128: 16, 256: 8},
    extra_conditions={"list_recall": ("landmark", "decoy")},
)


def _core(seeds: Iterable[int]) -> tuple[TrainedModel, ...]:
    """The four models with rope, seed by seed. `pause` comes last, so that a run cut short lacks only `pause`."""
    last = 100
    return tuple(
        TrainedModel(model=model, seed=seed, priority=order + (last if model == "pause" else 0))
        for order, seed in enumerate(seeds)
        for model in COMPARED
    )


def _unmarked(seeds: Iterable[int], first: int = 0, **more: Any) -> Iterator[TrainedModel]:
    """Models trained on prompts of list recall without markers at the answer; `first` is the first seed's priority."""
    for (order, seed), model in product(enumerate(seeds), COMPARED):
        plain = TrainedModel(model=model, seed=seed)
        own: dict[str, Any] = {"finetune_overrides": ("task.condition=landmark",), "pretrained_as": plain.name, **more}
        yield replace(
            plain, variant="landmark", tables=("markers",), tasks=("list_recall",), priority=first + order, **own
        )


def _extended(
    base: TrainedModel, block: int, steps: Mapping[int, list[int]], *overrides: str, tasks: tuple[str, ...]
) -> tuple[TrainedModel, ...]:
    """Models of Table 1: `base` with its context extended by a factor, fine-tuned up to half of it and all of it.

    Args:
        base: the model whose pretrained weights are extended.
        block: its block size, in tokens.
        steps: for each factor, the fine-tuning steps at 128 and the two extended lengths.
        overrides: of the fine-tuning recipe.
        tasks: of the fine-tuning.
    """
    return tuple(
        replace(
            base,
            variant=f"yarn{factor}",
            tables=("table1",),
            pretrained_as=base.name,
            extension=float(factor),
            finetune_overrides=(
                f"task.train_lengths=[128, {factor * block // 2}, {factor * block}]",
                f"task.train_steps={own}",
                *overrides,
            ),
            tasks=tasks,
            priority=50,
            tested=(factor * block // 2, factor * block),
            longer_tests={
                own: 100 for own in (factor * block // 2 * times for times in (1, 2, 4)) if own not in _COUNTS
            },
        )
        for factor, own in steps.items()
    )


_COUNTS = {128: 2000, 256: 2000, 512: 2000, 1024: 500, 2048: 500}  # test prompts by length
_SEEDS = tuple(range(22, 34))  # no run that sought a recipe had one of them
_INSPECTED = ("twin", "meta")
_TAKEN_AWAY = ("no_pos", "no_embed", "neither")


def _with_seeds(models: Iterable[str], seeds: Iterable[int]) -> tuple[str, ...]:
    """The names of the models with rope and these seeds."""
    return tuple(TrainedModel(model=model, seed=seed).name for seed in seeds for model in models)


def _analyses(models: Sequence[str], with_distortion: Sequence[str]) -> tuple[Analysis, ...]:
    """The measurements of Figures 2 and 3 in list recall."""
    return (
        *(
            Analysis(kind=kind, tables=tables, models=tuple(models), train_length=512, length=256, n=100)
            for kind, tables in {"sharpness": ("figure2",), "residual": ("figure2", "figure3")}.items()
        ),
        Analysis(
            kind="rate-distortion",
            tables=("figure3",),
            models=tuple(with_distortion),
            train_length=128,
            length=128,
            n=2500,
            interventions=(None, "no_pos"),
        ),
    )


_AT_128 = {128: _COUNTS[128]}
_UP_TO_512 = {length: n for length, n in _COUNTS.items() if length <= 512}
_FACTS: dict[str, Any] = {"finetune_recipe": "small_facts", "tasks": ("list_recall",), "tables": ("landmarks", "facts")}
_SHORT = ("task.question_sees=landmarks", "task.train_lengths=[128]", "task.train_steps=null")


def _through_landmarks(
    variant: str, condition: str, models: Sequence[str], seeds: Sequence[int], *overrides: str, **more: Any
) -> Iterator[TrainedModel]:
    """Models trained and tested on prompts of up to 128 tokens, in a condition; variants `alone` run last."""
    for order, (seed, model) in enumerate(product(seeds, models)):
        yield TrainedModel(
            model=model,
            variant=variant,
            finetune_overrides=(f"task.condition={condition}", *overrides),
            pretrained_as=TrainedModel(model=model, seed=seed).name,
            tests={condition: _AT_128},
            seed=seed,
            priority=(300 if "alone" in variant else 60) + order // len(models),
            **{"tables": ("landmarks",), **more},
        )


# The number of facts per landmark; the question sees the landmarks alone, or in training all text.
_BEHIND = ("facts_1", "facts_2", "facts_4", "facts_8")
_IN_SIGHT = (
    *_through_landmarks("facts_4-in-sight", "facts_4", COMPARED[1:], _SEEDS[:4], "task.question_sees=null", **_FACTS),
)


def _with_other_recipes() -> Iterator[TrainedModel]:
    """Models at half and at twice the rates of their recipes, and with three times the steps of list recall."""
    longer = ("task.stages=[{lists: [2, 3], items: [3, 6], max_steps: 900}]", "task.train_steps=[1500, 300]")
    changes: dict[str, tuple[int, dict[str, Any]]] = {  # the number of seeds, and what differs
        "half-rate": (2, {"rate": 0.5}),
        "twice-rate": (2, {"rate": 2.0}),
        "longer": (4, {"finetune_overrides": longer, "tasks": ("list_recall",)}),
    }
    for variant, (runs, changed) in changes.items():
        for (order, seed), model in product(enumerate(_SEEDS[:runs]), COMPARED):
            yield TrainedModel(
                model=model,
                variant=variant,
                tables=("recipes",),
                pretrained_as=TrainedModel(model=model, seed=seed).name,
                tests={"paper": _UP_TO_512},
                seed=seed,
                priority=200 + order + (50 if model == "pause" else 0),
                **changed,
            )


SMALL = replace(
    _SMALLEST,
    test_counts=_COUNTS,
    longest_tests={"copying": 1024},  # in this vocabulary the longest texts have more than 2,048 tokens
    test_ratio=4,
    models=(
        *_core(_SEEDS),
        *(
            longer
            for seed in _SEEDS[-3:]
            for model in ("gpt2", "meta")
            for longer in _extended(
                TrainedModel(model=model, seed=seed),
                256,
                {factor: [500, 300, 300] for factor in (4, 8)},
                tasks=("list_recall",),
            )
        ),
        *_unmarked(
            _SEEDS[:8],
            first=150,
            pretrain_overrides=("model.num_hidden_layers=4", "model.rope_layers=null"),
            pretrained_as=None,
            finetune_recipe="small_landmarks",
            finetune_overrides=(),
            tests={"landmark": _UP_TO_512},
        ),
        *(one for facts in _BEHIND for one in _through_landmarks(facts, facts, COMPARED, _SEEDS[:8], **_FACTS)),
        *_IN_SIGHT,
        *_with_other_recipes(),
        *_through_landmarks("alone", "paper", COMPARED[1:], _SEEDS[:3], *_SHORT),
        *_through_landmarks(
            "alone-landmark", "landmark", COMPARED[1:], _SEEDS[:3], *_SHORT, tasks=("list_recall", "parity")
        ),
    ),
    extra_conditions=dict.fromkeys(TASKS, ("decoy",)),
    extra_condition_limit=128,
    probe_steps=dict.fromkeys(TASKS, 100),
    inspections=(
        *(
            FurtherTest(
                kind="long-prompts",
                tables=("lengths",),
                models=_with_seeds(COMPARED, _SEEDS),
                tasks=tasks,
                counts={"long_prompt": counts},
                train_lengths=(128,),
            )
            for tasks, counts in (
                (tuple(task for task in TASKS if task != "copying"), {512: 500, 2048: 500}),
                (("copying",), {512: 500}),
            )
        ),
        Ablation(
            tables=("table2", "table11", "table12", "table13", "table14", "table17"),
            models=_with_seeds(_INSPECTED, _SEEDS),
            tasks=TASKS,
            interventions=_TAKEN_AWAY,
            counts={128: 250, 256: 250, 512: 250},
        ),
        Ablation(
            kind="noise",
            tables=("table15", "table16"),
            models=_with_seeds(("gpt2", *_INSPECTED), _SEEDS),
            tasks=("list_recall", "copying"),
            interventions=("noise:0.1", "noise:0.5"),
            counts={128: 250, 512: 250},
        ),
        *_analyses(_with_seeds(_INSPECTED, _SEEDS), _with_seeds(("gpt2", *_INSPECTED), _SEEDS)),
        LandmarksTest(models=_with_seeds(COMPARED, _SEEDS[:3]), tasks=TASKS, counts={"paper": _AT_128}),
        LandmarksTest(
            models=tuple(one.name for one in _IN_SIGHT), counts={"facts_4": _AT_128}, tables=_FACTS["tables"]
        ),
    ),
)

# --- The paper's sizes and text. Four A100 pretrain one of its models in about two weeks.

_PAPER_COUNTS = {128: 500, 256: 500, 512: 500, 1024: 200, 2048: 100}
_PAPER_SEEDS = (0, 1, 2)
_SHORT_COUNTS = {length: n for length, n in _PAPER_COUNTS.items() if length <= 1024}
_CONTROLLED = ("gpt2", "twin", "meta")  # the models of the length controls
_LONG = ("training.per_device_train_batch_size=4", "training.gradient_accumulation_steps=16")

# Every position embedding (Tables 7-10). Learned positions have room for prompts of 1,024 tokens and their answers.
_OTHER_POSITIONS = tuple(
    TrainedModel(
        model=model,
        position_embedding=position,
        pretrain_overrides=("model.max_position_embeddings=1152",) if position == "learned" else (),
        priority=3,
    )
    for position in ("learned", "none")
    for model in COMPARED
)
_PUBLISHED_NEO = TrainedModel(
    model="gpt-neo", position_embedding="learned", published="hf:EleutherAI/gpt-neo-125m", priority=3
)
_RANDOM_NEO = TrainedModel(
    model="gpt-neo",
    variant="random",
    position_embedding="learned",
    pretrain_overrides=("model.architecture=gpt_neo", "model.max_position_embeddings=1152"),
    priority=3,
)
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
# For lengths beyond the paper: trained on up to 128 tokens, half of the sequences with a jump in positions. Attention
# logits grow with the logarithm of the number of keys.
_JUMPS = tuple(
    TrainedModel(
        model=model,
        variant="jumps",
        tables=("lengths",),
        pretrain_overrides=("model.attention_scale=log_length",),
        finetune_overrides=("training.position_jumps=2304", "task.train_lengths=[128]"),
    )
    for model in _CONTROLLED
)
# As much pretraining compute as `meta`, in place of as much text.
_EQUAL_COMPUTE = tuple(
    TrainedModel(
        model=model,
        variant="equal-compute",
        tables=("perplexity",),
        pretrain_overrides=(f"training.max_steps={count}",),
        tasks=(),
        priority=3,
    )
    for model, count in {"gpt2": 221_352, "pause": 204_530, "twin": 158_129}.items()
)
# Noise on positions, for all tokens or only the meta-tokens, in either unit.
_NOISE = tuple(
    Ablation(
        kind=kind,
        tables=("table15", "table16"),
        models=("gpt2", "gpt2-learned", "meta", "meta-learned"),
        tasks=("list_recall", "copying"),
        interventions=tuple(
            f"noise:{scale}{place}{unit}" for place in ("", ":meta") for scale in ("0.1", "0.5", "1", "2")
        ),
        counts={128: 500, 512: 500},
        noise_seeds=5,
    )
    for kind, unit in {"noise": "", "raw-noise": ":raw"}.items()
)
# Longer prompts whose question is as in training on 128 tokens.
_LONG_PROMPTS = tuple(
    FurtherTest(
        kind=kind,
        tables=("lengths",),
        models=(*models, *(f"{model}-jumps" for model in _CONTROLLED)),
        tasks=tasks,
        counts={"long_prompt": counts},
        train_lengths=(128,),
    )
    for kind, models, tasks, counts in (
        ("long-prompts", _with_seeds(_CONTROLLED, _PAPER_SEEDS), TASKS, _PAPER_COUNTS),
        # Few documents are long enough for copying.
        ("longest-prompts", _CONTROLLED, tuple(task for task in TASKS if task != "copying"), {8192: 50}),
    )
)
PAPER = Preset(
    corpus="hf:allenai/c4:en",
    tokenizer="gpt2",
    pretrain_recipe="paper",
    finetune_recipes=dict.fromkeys(TASKS, "paper_finetune"),
    extend_recipe="paper_extend",
    finetune_overrides=("training.train_base=true",),  # of GPT-Neo, whose meta-token a retrofit added
    test_counts=_PAPER_COUNTS,
    models=(
        *_core(_PAPER_SEEDS),
        *_OTHER_POSITIONS,
        *_unmarked(_PAPER_SEEDS),
        _PUBLISHED_NEO,
        _RANDOM_NEO,
        *_JUMPS,
        *_PLACEMENT,
        *_extended(
            TrainedModel(model="meta"),
            1024,
            {factor: [2800, 1000, 1000] for factor in (4, 8)},
            *_LONG,
            tasks=("list_recall", "segment_counting"),
        ),
        *_EQUAL_COMPUTE,
    ),
    extra_conditions=dict.fromkeys(TASKS, ("landmark", "decoy")),
    extra_condition_limit=512,
    probe_steps={"list_recall": 50},
    inspections=(
        *_LONG_PROMPTS,
        Ablation(
            tables=("table2", "table11", "table12", "table13", "table14", "table17"),
            models=("meta-learned", *_with_seeds(["meta"], _PAPER_SEEDS)),
            tasks=TASKS,
            interventions=_TAKEN_AWAY,
            counts=_PAPER_COUNTS,
        ),
        Ablation(
            tables=("table2", "table11"),
            models=("gpt2", "pause", "twin"),
            interventions=_TAKEN_AWAY,
            counts=_SHORT_COUNTS,
        ),
        *_NOISE,
        *_analyses(
            (*_with_seeds(("pause", *_INSPECTED), _PAPER_SEEDS), "meta-learned"),
            _with_seeds(_CONTROLLED, _PAPER_SEEDS),
        ),
    ),
)

# The paper's model and lengths, with the training that fits into half an hour on one H100.
_GPU_TASKS = ("list_recall", "parity")
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
    models=(
        *(TrainedModel(model=model, tasks=_GPU_TASKS, priority=0) for model in COMPARED),
        replace(_RANDOM_NEO, tasks=_GPU_TASKS),
    ),
    extra_conditions={"list_recall": ("landmark", "decoy")},
    inspections=(
        Ablation(
            tables=("table2", "table11", "table13"),
            models=("meta",),
            tasks=_GPU_TASKS,
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
