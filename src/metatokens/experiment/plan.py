"""Which runs answer which question: presets, and the stages that they expand to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from metatokens.errors import UserError
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
class Preset:
    """One experiment's sizes. Every model gets the same text tokens, task prompts, steps and seeds."""

    corpus: str
    tokenizer: str
    pretrain_recipe: str
    finetune_recipe: str
    pretrain_overrides: tuple[str, ...] = ()
    finetune_overrides: tuple[str, ...] = ()
    task_steps: Mapping[str, int]  # fine-tuning steps of each task
    test_counts: Mapping[int, int]  # test prompts of each length
    models: tuple[str, ...] = tuple(MODELS)
    extra_conditions: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"list_recall": ("none", "decoy")})


DEMO = Preset(
    corpus="builtin",
    tokenizer="train:2048",
    pretrain_recipe="demo",
    finetune_recipe="demo_finetune",
    task_steps={"list_recall": 3300, "segment_counting": 500, "parity": 1800, "copying": 500},
    test_counts={128: 500, 256: 200, 512: 200, 1024: 200},
)

SMOKE = Preset(
    corpus="builtin",
    tokenizer="train:1024",
    pretrain_recipe="demo",
    finetune_recipe="demo_finetune",
    pretrain_overrides=("training.max_steps=4", "training.save_steps=4", "training.logging_steps=2"),
    finetune_overrides=("training.save_steps=4", "training.logging_steps=2"),
    task_steps=dict.fromkeys(TASKS, 4),
    test_counts={128: 16, 256: 8},
)

PRESETS: Mapping[str, Preset] = {"smoke": SMOKE, "demo": DEMO}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One unit of work: `verb` with `arguments`, after the stages named in `after`."""

    name: str
    verb: str
    arguments: dict[str, Any] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    cost: float = 1.0  # relative to the plan's other stages; for the order and the time left


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        UserError: if there is none.
    """
    if name not in PRESETS:
        raise UserError(f"no preset {name!r}; the presets are {', '.join(PRESETS)}.")
    return PRESETS[name]


def stages(sizes: Preset) -> list[Stage]:
    """The stages of a preset, each after the ones that it needs."""
    plan = [
        Stage(name="tokenize", verb="tokenize", cost=10),
        Stage(name="describe_tasks", verb="describe_tasks", after=("tokenize",), cost=5),
    ]
    plan += [
        Stage(
            name=f"draw_examples-{task}",
            verb="draw_examples",
            arguments={"task": task},
            after=("tokenize",),
            cost=5 + 0.004 * steps,
        )
        for task, steps in sizes.task_steps.items()
    ]
    for model in sizes.models:
        weight = 1.0 if model in ("gpt2", "pause") else 1.3
        pretrained = f"pretrain-{model}"
        plan.append(
            Stage(name=pretrained, verb="pretrain", arguments={"model": model}, after=("tokenize",), cost=60 * weight)
        )
        plan.append(
            Stage(
                name=f"perplexity-{model}", verb="perplexity", arguments={"model": model}, after=(pretrained,), cost=5
            )
        )
        for task, steps in sizes.task_steps.items():
            run = {"model": model, "task": task}
            tuned = f"finetune-{model}-{task}"
            plan.append(
                Stage(
                    name=tuned,
                    verb="finetune",
                    arguments=run,
                    after=(pretrained, f"draw_examples-{task}"),
                    cost=steps * 0.06 * weight,
                )
            )
            plan.append(
                Stage(
                    name=f"evaluate-{model}-{task}",
                    verb="evaluate",
                    arguments=run,
                    after=(tuned,),
                    cost=6.0 * (1 + len(sizes.extra_conditions.get(task, ()))),
                )
            )
    return plan
