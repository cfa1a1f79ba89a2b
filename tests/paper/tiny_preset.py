"""A preset of seconds, and the command that carries it out.

If the environment variable STALL holds a path, the worker that pretrains `meta` writes its process id to it after the
first checkpoint and then stalls, so that a test can cut the run off at the same point on every machine.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from metatokens import cli
from metatokens.evaluation import accuracy
from metatokens.paper import presets, runner
from metatokens.paper.variants import (
    Inspection,
    Preset,
    TrainedModel,
)
from metatokens.training.trainer import RunCallback

accuracy.SHORTCUT_PROMPTS = 40  # in place of 2,000, which each run would draw again
runner.PROBED = 4  # in place of 200, which each curve would answer again

TRAINING = (
    "training.save_steps=2",
    "training.logging_steps=1",
    "training.per_device_train_batch_size=4",
)
SIZES = (
    "model.hidden_size=16",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "data.block_size=32",
)


class Tiny(Preset):
    """A preset whose class makes a worker import this file, so that the worker stalls too."""


def tiny(corpus: str, models: Sequence[str] = ("gpt2", "meta")) -> Tiny:
    """Two models and one task."""
    return Tiny(
        corpus=corpus,
        tokenizer="train:768",
        pretrain_recipe="demo",
        finetune_recipes={"parity": "demo_finetune"},
        pretrain_overrides=("training.max_steps=4", *TRAINING, *SIZES),
        finetune_overrides=(
            "task.train_lengths=[64]",
            "training.max_steps=4",
            *TRAINING,
        ),
        test_counts={64: 4, 128: 3},
        models=tuple(TrainedModel(model=model, tasks=("parity",)) for model in models),
        extra_conditions={"parity": ("decoy",)},
    )


def text_covered(**of: tuple[str, ...]) -> Inspection:
    """Four prompts whose question sees landmarks alone."""
    return Inspection(
        method="evaluate",
        kind="landmarks-alone",
        tables=("landmarks",),
        **of,
        options={
            "counts": {"paper": {64: 4}},
            "train_lengths": (64,),
            "question_sees": "landmarks",
        },
    )


def wide(corpus: str) -> Preset:
    """One model, and every kind of stage."""
    longer = TrainedModel(
        model="meta",
        variant="yarn",
        pretrained_as="meta",
        extension=2.0,
        finetune_overrides=("task.train_lengths=[64, 128]",),
        tasks=("parity",),
        tested=(128,),
    )
    of = {"models": ("meta",), "tasks": ("parity",)}
    changes = ("no_pos", "noise:1")
    ablation = Inspection(
        method="intervene",
        kind="ablation",
        tables=("table13",),
        **of,
        options={"interventions": changes, "counts": {64: 4}},
    )
    alone = text_covered(**of)
    through = TrainedModel(
        model="meta",
        variant="alone",
        pretrained_as="meta",
        finetune_recipe="demo_finetune",
        finetune_overrides=("task.question_sees=landmarks", "task.condition=landmark"),
        tests={"landmark": {64: 4}},
        tasks=("parity",),
    )
    analyses = [
        Inspection(
            method="analyze",
            kind=kind,
            tables=("figure3",),
            **of,
            options={
                "kind": kind,
                "train_length": 64,
                "length": 64,
                "n": n,
                "interventions": changes,
            },
        )
        for kind, n, changes in (
            ("sharpness", 2, (None,)),
            ("residual", 2, (None,)),
            ("rate-distortion", 70, (None, "no_pos")),
        )
    ]
    return replace(
        tiny(corpus),
        book=corpus,
        extend_recipe="small_extend",
        models=(TrainedModel(model="meta", tasks=("parity",)), longer, through),
        extra_conditions={},
        probe_steps={"parity": 2},
        inspections=(ablation, alone, *analyses),
        looked_into=("meta", "meta-yarn"),
    )


if stall := os.environ.get("STALL"):
    save = RunCallback.on_save

    def save_and_stall(self: RunCallback, args, state, control, **kwargs) -> None:
        save(self, args, state, control, **kwargs)
        if Path(args.output_dir).match("meta/pretrained/checkpoints"):
            Path(stall).write_text(str(os.getpid()))
            time.sleep(600)

    RunCallback.on_save = save_and_stall


def reproduce(preset: Tiny, out: Path, options: str) -> None:
    """The command."""
    presets.PRESETS = {"tiny": preset}
    sys.argv = [
        "metatokens",
        "reproduce",
        "--preset",
        "tiny",
        "--out",
        str(out),
        *options.split(),
    ]
    cli.main()
