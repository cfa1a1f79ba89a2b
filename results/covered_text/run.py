"""Covered text: what the meta-tokens of a prompt hold of it, and through which attention the answer passes.

    python -m results.covered_text.run --out runs/covered-text --workers 2

README.md has the claims, the rule and the seeds, which were committed before the run. The same command goes on where it
was cut off. A line in `OUT/lines/ARM-SEED-TASK.jsonl` is one measured accuracy.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from metatokens.checkpoint import load_model
from metatokens.data.tokenizer import load_tokenizer
from metatokens.data.writing import write_token_store
from metatokens.evaluation.accuracy import draw_test_examples, shortcut_rates
from metatokens.evaluation.intervals import wilson_interval
from metatokens.files import write_whole
from metatokens.paper.presets import load_preset
from metatokens.paper.variants import TrainedModel, finetune_recipe, pretrain_recipe, with_data
from metatokens.records import pack_hits
from metatokens.tasks.curriculum import task_texts
from metatokens.tasks.scoring import score
from metatokens.training.finetune import finetune
from metatokens.training.pretrain import pretrain
from results.covered_text.block_text import block_text_attention
from results.covered_text.cuts import CUTS, MARKERS_ALONE, NO_EXCHANGE, Cut, Text, View, cutting

SEEDS = range(40, 52)
BLOCK_TEXT_SEEDS = range(40, 44)
TASKS = ("list_recall", "parity", "segment_counting")
LENGTHS = {128: 2000, 256: 1000, 512: 500}
N = 1000  # prompts of 128 tokens in other conditions, and of cuts in all layers
N_LOCAL = 500  # of cuts in one layer or one head
SMALL = load_preset("small")
UP_TO_128 = ("task.train_lengths=[128]", "task.train_steps=null")
# With a third of these steps `pause` and `gpt2` have not learned list recall with the text in sight.
LONGER = {
    "list_recall": (
        "task.stages=[{lists: [2, 3], items: [3, 6], max_steps: 900}]",
        "training.max_steps=1500",
    )
}
FACTS = (1, 2, 4, 8)  # for each landmark
BRIEF = (50, 200, 500)  # steps of training with covered text


@dataclass(frozen=True)
class Arm:
    """A model with a seed: `pause`, `twin`, `meta`, or `meta` with the text of each meta-token's block."""

    model: str
    seed: int
    sees_block: bool = False

    @property
    def name(self) -> str:
        """The name of its model."""
        return "block-text" if self.sees_block else self.model

    def trained(self, *overrides: str) -> TrainedModel:
        """What the library makes recipes for, with changes to the recipe of a task."""
        return TrainedModel(model=self.model, seed=self.seed, finetune_overrides=overrides)


def stages() -> Iterator[tuple[Arm, str]]:
    """All arms with their tasks: task by task, seed by seed."""
    for task in TASKS:
        for seed in SEEDS:
            for model in ("meta", "twin", "pause"):
                yield Arm(model, seed), task
            if seed in BLOCK_TEXT_SEEDS:
                yield Arm("meta", seed, sees_block=True), task


def main() -> None:
    """Train and measure all arms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    (options.out / "lines").mkdir(parents=True, exist_ok=True)
    if not (options.out / "tokens").exists():
        write_token_store(
            options.out / "tokens", SMALL.corpus, SMALL.tokenizer, extra_texts=task_texts()
        )
    write_shortcuts(options.out)
    with ProcessPoolExecutor(options.workers, initializer=prepare_worker) as pool:
        for name in pool.map(partial(train_and_measure, options.out), stages()):
            print(name, flush=True)


def prepare_worker() -> None:
    """One core for each process, and no progress bars."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()


def train_and_measure(out: Path, stage: tuple[Arm, str]) -> str:
    """Carry out what an arm lacks of a task, and return the name of its lines."""
    arm, task = stage
    name = f"{arm.name}-{arm.seed}"
    lines = out / "lines" / f"{name}-{task}.jsonl"
    if lines.exists():
        return lines.stem
    with block_text_attention() if arm.sees_block else nullcontext():
        folder = out / "models" / name
        recipe = pretrain_recipe(SMALL, arm.trained())
        pretrain(with_data(recipe, tokens=out / "tokens"), folder / "pretrained")
        write_lines(lines, list(measure(out, arm, task, tune(out, arm, task, folder))))
    return lines.stem


def tune(out: Path, arm: Arm, task: str, folder: Path) -> Path:
    """Fine-tune a pretrained model on a task with all text in sight; the folder of the model."""
    recipe = finetune_recipe(SMALL, arm.trained(*UP_TO_128, *LONGER.get(task, ())), task)
    finetune(recipe, folder / "pretrained", folder / task, task=task)
    return folder / task / "128"


def measure(out: Path, arm: Arm, task: str, folder: Path) -> Iterator[dict[str, Any]]:
    """All lines of a fine-tuned model."""
    measuring = Measuring(out, arm, task, load_model(folder))
    texts: tuple[Text, ...] = ("in_sight", "covered")
    for text in texts:
        for length, n in LENGTHS.items():
            yield measuring.line(text, "paper", length, n)
        for condition in ("landmark", "decoy"):
            yield measuring.line(text, condition, 128, N)
        if task == "list_recall":
            for facts in FACTS:
                yield measuring.line(text, f"facts_{facts}", 128, N)
        for cut in cuts_of(arm):
            yield measuring.line(text, "paper", 128, N, cut=cut)
    if arm.model == "meta" and not arm.sees_block:
        yield from measuring.local_lines()
    if task == "list_recall" and arm.model != "meta":
        for steps in BRIEF:
            trained = train_briefly(arm, folder, steps)
            yield Measuring(out, arm, task, load_model(trained)).line(
                "covered", "paper", 128, N, brief_steps=steps
            )


def cuts_of(arm: Arm) -> list[Cut]:
    """The cuts of attentions that the model has."""
    cuts = [*CUTS, MARKERS_ALONE, NO_EXCHANGE]
    return [cut for cut in cuts if cut.attention == "first" or arm.model != "pause"]


def train_briefly(arm: Arm, folder: Path, steps: int) -> Path:
    """Train a model of list recall further with the text covered; the folder of the model."""
    covered = (
        "task.question_sees=landmarks",
        *UP_TO_128,
        "task.stages=[]",
        f"training.max_steps={steps}",
        f"training.warmup_steps={min(30, steps // 5)}",
    )
    recipe = finetune_recipe(SMALL, arm.trained(*covered), "list_recall")
    out = folder.parent / f"covered-{steps}"
    finetune(recipe, folder, out, task="list_recall")
    return out / "128"


class Measuring:
    """Accuracies of one model."""

    def __init__(self, out: Path, arm: Arm, task: str, model: Any):
        self.out, self.arm, self.task, self.model = out, arm, task, model
        self.tokenizer = load_tokenizer(str(out / "tokens" / "tokenizer"))

    def line(
        self,
        text: Text,
        condition: str,
        length: int,
        n: int,
        *,
        cut: Cut | None = None,
        layers: Sequence[int] | None = None,
        head: int | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """The accuracy on the first n test prompts, without the edges of a cut."""
        examples = tests(self.out, self.task, condition, length)[:n]
        view = View(self.model, self.tokenizer, text)
        all_layers = range(len(self.model.model.layers))
        context = (
            nullcontext()
            if cut is None
            else cutting(self.model, view, cut, all_layers if layers is None else layers, head)
        )
        with context:
            exact, _ = score(self.model, examples, alone=view)
        low, high = wilson_interval(sum(exact), n)
        return {
            "model": self.arm.name,
            "seed": self.arm.seed,
            "task": self.task,
            "text": text,
            "condition": condition,
            "length": length,
            "cut": None if cut is None else cut.name,
            "layers": None if layers is None else list(layers),
            "head": head,
            **fields,
            "exact_match": sum(exact) / n,
            "n": n,
            "low": low,
            "high": high,
            "hits": pack_hits(exact),
        }

    def local_lines(self) -> Iterator[dict[str, Any]]:
        """Cuts in one layer, in all layers but one, and in one head of one layer; with the text covered."""
        config = self.model.config
        layers = range(config.num_hidden_layers)
        for cut in CUTS:
            for layer in layers:
                others = [other for other in layers if other != layer]
                yield self.line("covered", "paper", 128, N_LOCAL, cut=cut, layers=[layer])
                yield self.line("covered", "paper", 128, N_LOCAL, cut=cut, layers=others)
                for head in range(config.num_attention_heads):
                    yield self.line(
                        "covered", "paper", 128, N_LOCAL, cut=cut, layers=[layer], head=head
                    )


@cache
def tests(out: Path, task: str, condition: str, length: int) -> list[Any]:
    """The fixed test prompts, the same for all models."""
    n = LENGTHS[length] if condition == "paper" else N
    tokenizer = load_tokenizer(str(out / "tokens" / "tokenizer"))
    return draw_test_examples(task, length, n, tokenizer, condition=condition, documents=())


def write_shortcuts(out: Path) -> None:
    """What rules that do not do the task score on the same prompts."""
    file = out / "lines" / "shortcuts.jsonl"
    if file.exists():
        return
    tokenizer = load_tokenizer(str(out / "tokens" / "tokenizer"))
    rates = []
    for task in TASKS:
        conditions = ["paper", "landmark", "decoy"]
        if task == "list_recall":
            conditions += [f"facts_{facts}" for facts in FACTS]
        for condition in conditions:
            lengths = LENGTHS if condition == "paper" else [128]
            examples = {length: tests(out, task, condition, length) for length in lengths}
            rates += shortcut_rates(task, condition, examples, tokenizer, ())
    lines = [
        {
            "model": rate.model,
            "metric": "shortcut",
            "task": rate.task,
            "condition": rate.condition,
            "length": rate.length,
            "exact_match": rate.value,
            "n": rate.n,
        }
        for rate in rates
    ]
    write_lines(file, lines)


def write_lines(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write all lines at once, so that a file is whole."""
    write_whole(file, "".join(json.dumps(line) + "\n" for line in lines).encode())


if __name__ == "__main__":
    main()
