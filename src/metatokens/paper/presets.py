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

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import chain, product
from typing import Any

import yaml

from metatokens.errors import UserError
from metatokens.paper.variants import Inspection, Preset, TrainedModel
from metatokens.tasks import TASKS

Fields = dict[str, Any]

_METHODS = {"tests": "evaluate", "ablations": "intervene", "analyses": "analyze"}


def load_preset(name: str) -> Preset:
    """The preset of this name."""
    if name not in PRESETS:
        raise UserError(f"no preset {name!r}; the presets are {', '.join(PRESETS)}.")
    return PRESETS[name]


def _read() -> dict[str, Preset]:
    blocks = yaml.safe_load(
        files("metatokens.paper").joinpath("presets.yaml").read_text(encoding="utf-8")
    )
    del blocks["lists"], blocks["smallest"]
    return {name: _preset(block) for name, block in blocks.items()}


def _preset(block: Fields) -> Preset:
    fields = dict(block)
    fields["models"] = _models_of(block["models"])
    fields["looked_into"] = _names_of(block.get("looked_into", []))
    fields["inspections"] = []
    for group, inspections in block.get("inspections", {}).items():
        fields["inspections"] += [_inspection(_METHODS[group], **each) for each in inspections]
    for name in ("finetune_recipes", "extra_conditions", "probe_steps"):
        if name in block:
            fields[name] = _by_task(block[name])
    return Preset(**fields)


def _inspection(method: str, *, models: list[Fields], **fields: Any) -> Inspection:
    """An inspection; what is none of its fields is an option of its method."""
    shared = {name: fields.pop(name) for name in ("tables", "tasks") if name in fields}
    kind = fields.pop("kind")
    if method == "analyze":  # which takes it too
        fields["kind"] = kind
    names = tuple(_names_of(models))
    return Inspection(method=method, kind=kind, models=names, options=fields, **shared)


def _models_of(grids: list[Fields]) -> list[TrainedModel]:
    return list(chain.from_iterable(_models(**grid) for grid in grids))


def _names_of(grids: list[Fields]) -> list[str]:
    return [model.name for model in _models_of(grids)]


def _models(
    *,
    models: list[str],
    seeds: Sequence[int] = (0,),
    variant: str | None = None,
    variants: dict[str, Fields] | None = None,
    shares_pretraining: bool = False,
    **fields: Any,
) -> Iterator[TrainedModel]:
    """The models that a grid stands for."""
    assert variant is None or variants is None
    changes_by_variant = variants or {variant or "": {}}
    for seed, model, name in product(seeds, models, changes_by_variant):
        plain = TrainedModel(model=model, seed=seed)
        yield replace(
            plain,
            variant=name,
            pretrained_as=plain.name if shares_pretraining else None,
            **fields | changes_by_variant[name],
        )


def _by_task(value: Any) -> Fields:
    """A value for each task, if it is not by task; in the name of a recipe, `{task}` stands for the task."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str):
        return {task: value.format(task=task) for task in TASKS}
    return dict.fromkeys(TASKS, value)


PRESETS = _read()
