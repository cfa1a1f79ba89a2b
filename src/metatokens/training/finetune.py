"""Fine-tuning on a task or on a user's own records, in phases of growing train length (paper, section 4.2)."""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, set_seed

from metatokens.data.blocks import shuffled
from metatokens.data.tokenizer import load_tokenizer, meta_token_id
from metatokens.errors import UserError
from metatokens.model.checkpoint import MANIFEST, load_model, weights_sha256
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.positions import check_length
from metatokens.recipe import WITHOUT_EFFECT, FinetuneRecipe
from metatokens.tasks.curriculum import TaskData
from metatokens.tasks.example import Example, read_examples
from metatokens.training.trainer import Progress, SizedDataset, check_trackers, open_run, train, unwatched

IGNORED = -100  # the label of a position that is not scored


class TaskExamples:
    """A task's train examples, generated when they are asked for: item i is example `i % examples`."""

    def __init__(self, task: TaskData, train_length: int, *, examples: int, length: int):
        self.task, self.train_length, self.examples, self.length = task, train_length, examples, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        return self.task.train(index % self.examples, self.train_length)


class RecordExamples:
    """A user's records, in an order that is a permutation of its own in every epoch."""

    def __init__(self, records: Sequence[Example], *, seed: int, length: int):
        self.records, self.seed, self.length = records, seed, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        epoch, place = divmod(index, len(self.records))
        return self.records[shuffled(place, len(self.records), f"{self.seed} {epoch}")]


class ByLength:
    """A dataset's examples in an order that puts similar lengths into one batch, so that little of it is padding.

    Of every `WINDOW` batches' examples, sorted by length, each batch takes a run; the batches come in random order.
    The order depends on the arguments alone.
    """

    WINDOW = 16  # batches

    def __init__(self, examples: SizedDataset, *, batch: int, seed: int):
        self.examples, self.batch, self.seed = examples, batch, seed
        self._open: tuple[int, list[Example]] = (-1, [])  # the window that is being read, and its number

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        window, place = divmod(index, self.WINDOW * self.batch)
        if self._open[0] != window:
            self._open = (window, self._read(window))
        return self._open[1][place]

    def _read(self, window: int) -> list[Example]:
        size = self.WINDOW * self.batch
        numbers = range(window * size, min((window + 1) * size, len(self.examples)))
        by_length = sorted((self.examples[number] for number in numbers), key=lambda example: example.n_tokens)
        batches = [by_length[start : start + self.batch] for start in range(0, len(by_length), self.batch)]
        order = np.random.default_rng((self.seed, window)).permutation(len(batches))
        return [example for number in order for example in batches[number]]


class Collator:
    """Examples to a batch padded on the right, where causal attention needs no mask for padding.

    Labels are the completion and the end of text; with `loss_on="sequence"`, the prompt's text too.
    """

    def __init__(self, *, pad_token_id: int, meta_token_id: int, loss_on: str):
        self.pad_token_id, self.meta_token_id, self.loss_on = pad_token_id, meta_token_id, loss_on

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, each (batch, longest)."""
        longest = max(len(example.input_ids) for example in examples)
        input_ids = torch.full((len(examples), longest), self.pad_token_id)
        labels = torch.full((len(examples), longest), IGNORED)
        for row, example in enumerate(examples):
            ids = torch.tensor(example.input_ids)
            first = example.answer_start if self.loss_on == "answer" else 1
            input_ids[row, : len(ids)] = ids
            labels[row, first : len(ids)] = ids[first:]
        return {"input_ids": input_ids, "labels": labels.masked_fill(labels == self.meta_token_id, IGNORED)}


def finetune(
    recipe: FinetuneRecipe,
    model_folder: Path,
    out: Path,
    *,
    task: str | None = None,
    data: Path | None = None,
    documents: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress = unwatched,
) -> None:
    """Fine-tune a model for each of the recipe's train lengths in turn, each phase from the last one's model.

    Args:
        recipe: the settings; `training.max_steps` counts the steps of one train length.
        model_folder: the checkpoint to start from.
        out: gets a folder a train length, each with a model, and `settings.json`. Resumed if it holds this run.
        task: a task's name; or
        data: a JSON-lines file of the user's own records, trained on as they stand, into `out/data`.
        documents: corpus texts, which the task `copying` copies from.
        overwrite: replace another run in `out`.
        progress: called with the steps done and the steps in all.

    Raises:
        UserError: if settings, model, task or data do not fit each other.
    """
    settings = recipe.training
    check_trackers(settings)
    model = load_model(model_folder)
    tokenizer = load_tokenizer(str(model_folder))
    check_meta_token(model.config, tokenizer, model_folder)
    needed = settings.max_steps * settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    phases: dict[str, SizedDataset] = {}
    run = {
        "verb": "finetune",
        "recipe": recipe.model_dump(mode="json", exclude=WITHOUT_EFFECT),
        "model_sha256": weights_sha256(model_folder),
    }
    if data is not None:
        records = read_examples(data, tokenizer)
        check_length(model.config, max(len(record.input_ids) for record in records))
        phases["data"] = RecordExamples(records, seed=settings.seed, length=needed)
        run |= {"data_sha256": hashlib.sha256(data.read_bytes()).hexdigest()}
    elif task is not None:
        source = TaskData(
            task, tokenizer=tokenizer, condition=recipe.task.condition, seed=settings.seed, documents=documents
        )
        for length in recipe.task.train_lengths:
            check_length(model.config, length)
            source.train(0, length)  # whether there is such a prompt at all is said before any training
            phases[str(length)] = TaskExamples(source, length, examples=recipe.task.examples, length=needed)
        run |= {"task": task, "documents_sha256": hashlib.sha256("\0".join(documents).encode()).hexdigest()}
    else:
        raise UserError("fine-tuning needs a task or a file of records.")
    open_run(out, run, overwrite=overwrite)

    collator = Collator(
        pad_token_id=tokenizer.eos_token_id, meta_token_id=model.config.meta_token_id, loss_on=recipe.task.loss_on
    )
    for number, (name, examples) in enumerate(phases.items()):
        folder = out / name
        if (folder / MANIFEST).exists():
            model = load_model(folder)
            continue
        folder.mkdir(exist_ok=True)
        set_seed(settings.seed)
        before, total = number * settings.max_steps, len(phases) * settings.max_steps
        dataset = ByLength(examples, batch=settings.per_device_train_batch_size, seed=settings.seed)
        report = partial(_report_phase, progress, before, total)
        train(model, dataset, tokenizer, settings, folder, collator=collator, progress=report)


def _report_phase(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def training_of(folder: Path) -> dict[str, Any]:
    """How a model in `folder` was fine-tuned, as fields of a result; empty if no run wrote it.

    Returns:
        `seed` and, but for a user's own records, `train_length` (tokens) and `train_condition`.
    """
    try:
        run = json.loads((folder.parent / "settings.json").read_text(encoding="utf-8"))
        seed, condition = run["recipe"]["training"]["seed"], run["recipe"]["task"]["condition"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if "task" not in run:  # a user's own records
        return {"seed": seed}
    length = int(folder.name) if folder.name.isdecimal() else None
    return {"seed": seed, "train_condition": condition, "train_length": length}


def check_meta_token(config: MetaGPT2Config, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Refuse a model that cannot read the tasks' markers.

    Raises:
        UserError: if the model has no meta-token, or not the one that its tokenizer implies.
    """
    if config.meta_token_id is None:
        raise UserError(f"the model in {folder} has no meta_token_id, which the tasks' markers need.")
    if config.meta_token_id != meta_token_id(tokenizer):
        raise UserError(
            f"the model in {folder} has meta_token_id {config.meta_token_id}, and its tokenizer has "
            f"{len(tokenizer)} entries, which makes it {meta_token_id(tokenizer)}."
        )
