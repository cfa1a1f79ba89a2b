"""The presets of `presets.yaml`, which explains their form: experiments from a smoke test to the paper's size.

`metatokens reproduce --preset demo` gets from a preset to its result lines like this:

1. `PRESETS["demo"]` is a `Preset` (variants.py): a corpus, recipes, numbers of test prompts, and models to train.
2. `stages(preset)` (plan.py) expands it into stages, such as `pretrain-meta`, `finetune-meta-parity` and
   `evaluate-meta-parity`. A stage names a method of `Runner`, its arguments, and the stages that it needs.
3. `reproduce` (run.py) hands each stage, once its needs are met, to a worker (pools.py).
4. The worker calls the method (runner.py), which uses the library as the commands do and returns records.
5. `RunLog.add` (run_log.py) appends the records to `results.jsonl`, `analysis.jsonl` and `curves.jsonl`, and then the
   stage to `stages.jsonl`. A stage that is in there is not carried out again.
"""

from collections.abc import Iterator
from importlib.resources import files
from itertools import product
from typing import Any

import yaml

from metatokens.errors import UserError
from metatokens.paper.variants import (
    Ablation,
    Analysis,
    FurtherTest,
    LandmarksTest,
    Preset,
    TrainedModel,
)
from metatokens.tasks import TASKS

Fields = dict[str, Any]

_INSPECTIONS = {
    "further_tests": FurtherTest,
    "ablations": Ablation,
    "analyses": Analysis,
    "landmarks_tests": LandmarksTest,
}
_BY_TASK = ("finetune_recipes", "extra_conditions", "probe_steps")


def preset(name: str) -> Preset:
    """The preset of this name."""
    if name not in PRESETS:
        raise UserError(f"no preset {name!r}; the presets are {', '.join(PRESETS)}.")
    return PRESETS[name]


def _read() -> dict[str, Preset]:
    blocks = yaml.safe_load(files("metatokens.paper").joinpath("presets.yaml").read_text(encoding="utf-8"))
    del blocks["lists"], blocks["smallest"]
    return {name: _preset(block) for name, block in blocks.items()}


def _preset(block: Fields) -> Preset:
    models = [model for grid in block["models"] for model in _models(grid)]
    inspections = []
    for kind, inspections_of_kind in block.get("inspections", {}).items():
        for inspection in inspections_of_kind:
            fields = inspection | {"models": _names(inspection["models"])}
            inspections.append(_INSPECTIONS[kind](**fields))
    by_task = {key: _for_each_task(block[key]) for key in _BY_TASK if key in block}
    shown = _names(block.get("looked_into", []))
    expanded = {"models": models, "inspections": inspections, "looked_into": shown}
    return Preset(**block | by_task | expanded)


def _models(grid: Fields) -> Iterator[TrainedModel]:
    """The models that a grid stands for."""
    shared = {"priority": 1, "pause_waits": 0, "seed": 0} | grid
    priority, pause_waits = shared.pop("priority"), shared.pop("pause_waits")
    models, seeds = _as_list(shared.pop("model")), _as_list(shared.pop("seed"))
    variants = shared.pop("variants", None) or {shared.get("variant", ""): {}}
    for (order, seed), model, (variant, changes) in product(enumerate(seeds), models, variants.items()):
        fields = shared | changes | {"model": model, "seed": seed, "variant": variant}
        fields["priority"] = priority + order + (pause_waits if model == "pause" else 0)
        if fields.get("pretrained_as") == "plain":
            fields["pretrained_as"] = TrainedModel(model=model, seed=seed).name
        yield TrainedModel(**fields)


def _names(grids: list[Fields]) -> list[str]:
    return [model.name for grid in grids for model in _models(grid)]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _for_each_task(value: Any) -> Fields:
    """A value for each task; in the name of a recipe, `{task}` stands for it."""
    if isinstance(value, dict):
        return value
    return {task: value.format(task=task) if isinstance(value, str) else value for task in TASKS}


PRESETS = _read()
DEMO, SMALL, GPU, PAPER = (PRESETS[name] for name in ("demo", "small", "gpu", "paper"))
