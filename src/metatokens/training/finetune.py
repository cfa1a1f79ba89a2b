"""Fine-tuning on a task or on a user's own records, in phases of growing train length (paper, section 4.2)."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, set_seed

from metatokens.checkpoint import MANIFEST, LanguageModel, load_model, weights_sha256
from metatokens.data.blocks import shuffled
from metatokens.data.insertion import IGNORED_LABEL
from metatokens.data.tokenizer import load_tokenizer, meta_token_id, text_vocab_size
from metatokens.errors import UserError
from metatokens.files import sha256_of
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.positions import check_length
from metatokens.recipe import WITHOUT_EFFECT, FinetuneRecipe, Phase
from metatokens.tasks.curriculum import Drawn, Sizes, TaskData
from metatokens.tasks.example import read_examples
from metatokens.tasks.store import Encoded, ExampleStore
from metatokens.training.inside import check_inside
from metatokens.training.probe import Probe, exact_match, held_out_loss
from metatokens.training.run_folder import open_run
from metatokens.training.trainer import Figures, Goal, Progress, SizedDataset, check_trackers, train, unwatched

VALIDATED = 200  # prompts that decide whether a phase has reached its goal


class TaskExamples:
    """A task's train examples, which are in random order as they are: item i is example `i % len(examples)`."""

    def __init__(self, examples: Sequence[Encoded], *, length: int):
        self.examples, self.length = examples, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Encoded:
        return self.examples[index % len(self.examples)]


class RecordExamples:
    """A user's records, in an order that is a permutation of its own in every epoch."""

    def __init__(self, records: Sequence[Encoded], *, seed: int, length: int):
        self.records, self.seed, self.length = records, seed, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Encoded:
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
        self._open: tuple[int, list[Encoded]] = (-1, [])  # the window that is being read, and its number

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Encoded:
        window, place = divmod(index, self.WINDOW * self.batch)
        if self._open[0] != window:
            self._open = (window, self._read(window))
        return self._open[1][place]

    def _read(self, window: int) -> list[Encoded]:
        size = self.WINDOW * self.batch
        numbers = range(window * size, min((window + 1) * size, len(self.examples)))
        by_length = sorted((self.examples[number] for number in numbers), key=lambda example: example.answer_start)
        batches = [by_length[start : start + self.batch] for start in range(0, len(by_length), self.batch)]
        order = np.random.default_rng((self.seed, window)).permutation(len(batches))
        return [example for number in order for example in batches[number]]


class Collator:
    """Examples to a batch padded on the right, where causal attention needs no mask for padding.

    Labels are the completion and the end of text; with `loss_on="sequence"`, the prompt's text too.
    """

    def __init__(self, *, pad_token_id: int, meta_token_id: int, loss_on: str):
        self.pad_token_id, self.meta_token_id, self.loss_on = pad_token_id, meta_token_id, loss_on

    def __call__(self, examples: Sequence[Encoded]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, each (batch, longest)."""
        longest = max(len(example.input_ids) for example in examples)
        input_ids = np.full((len(examples), longest), self.pad_token_id)
        labels = np.full((len(examples), longest), IGNORED_LABEL)
        for row, example in enumerate(examples):
            ids = example.input_ids
            first = example.answer_start if self.loss_on == "answer" else 1
            input_ids[row, : len(ids)] = ids
            labels[row, first : len(ids)] = ids[first:]
        labels[labels == self.meta_token_id] = IGNORED_LABEL
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


def train_source(
    recipe: FinetuneRecipe, task: str, tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]
) -> TaskData:
    """The examples that a recipe trains on.

    Raises:
        UserError: if there are none, or a stage of the recipe is for another task.
    """
    if task != "segment_counting" and any(stage.inside_loss for stage in recipe.task.stages):
        raise UserError(f"a stage's inside_loss is for segment_counting, whose bracket is counted in, not for {task}.")
    return TaskData(
        task, tokenizer=tokenizer, condition=recipe.task.condition, seed=recipe.training.seed, documents=documents
    )


def train_examples(recipe: FinetuneRecipe, source: TaskData, phase: Phase, folder: Path) -> ExampleStore:
    """The examples of one phase: those that `folder` has from an earlier run of the recipe, or new ones."""
    path = folder / phase.file
    if path.exists():
        return ExampleStore(path)
    count = min(recipe.task.examples, phase.examples)
    return ExampleStore.write(path, map(_drawn(source, phase), range(count)))


def _drawn(source: TaskData, phase: Phase, split: Drawn = "train") -> Callable[[int], Encoded]:
    """The function that draws a phase's example of an index."""
    if phase.curriculum is None:
        return partial(source.train, train_length=phase.train_length, split=split)
    draw = source.drill if phase.curriculum.drill else source.train
    sizes = Sizes(phase.curriculum.lists, (phase.curriculum.items,))
    return lambda index: draw(phase.first_example + index, phase.train_length, sizes, split)


def _goal(source: TaskData, phase: Phase) -> Goal | None:
    """Whether a model answers as many validation prompts as the phase asks for; None if it asks for none."""
    until = phase.curriculum.until if phase.curriculum else None
    if until is None:
        return None
    asked = list(map(_drawn(source, phase, "validation"), range(VALIDATED)))
    return lambda model: exact_match(model, asked) >= until


# Gives the probe of a model that is about to be trained in a phase.
Probing = Callable[[LanguageModel, Phase], Probe | None]


def unprobed(model: LanguageModel, phase: Phase) -> Probe | None:
    """Nothing is measured in between."""
    return None


def held_out_probe(records: Sequence[Encoded], pad_token_id: int, model: LanguageModel, phase: Phase) -> Probe | None:
    """Measure the loss on held-out records (mean over answer tokens) and their exact match.

    They are measured every `training.eval_steps`, or up to ten times in a phase; None for never.

    Raises:
        UserError: if a record is longer than the model's learned positions.
    """
    check_length(model.config, max(len(record.input_ids) for record in records))
    size = phase.settings.per_device_train_batch_size
    ordered = sorted(records, key=lambda record: len(record.input_ids))

    def measure(model: LanguageModel) -> dict[str, float]:
        collator = Collator(pad_token_id=pad_token_id, meta_token_id=model.config.meta_token_id, loss_on="answer")
        batches = (collator(ordered[start : start + size]) for start in range(0, len(ordered), size))
        loss = held_out_loss(model, batches)  # first, since FSDP gathers the weights only in a call of the model itself
        return loss | {"eval_exact_match": exact_match(model, ordered)}

    every = phase.settings.measured_every(len(records))
    return Probe(every, measure) if every else None


def finetune(
    recipe: FinetuneRecipe,
    model_folder: Path,
    out: Path,
    *,
    task: str | None = None,
    data: Path | None = None,
    documents: Sequence[str] = (),
    examples: Path | None = None,
    overwrite: bool = False,
    progress: Progress = unwatched,
    probe: Probing = unprobed,
) -> bool:
    """Fine-tune a model for each of the recipe's train lengths in turn, each phase from the last one's model.

    Args:
        recipe: the settings.
        model_folder: the checkpoint to start from.
        out: gets a folder a train length, each with a model, and `settings.json`. Resumed if it holds this run.
        task: a task's name; or
        data: a JSON-lines file of the user's own records, trained on as they stand, into `out/data`.
        documents: corpus texts, which the task `copying` copies from.
        examples: the folder of the task's encoded train examples, if other runs share them; default: in `out`.
        overwrite: replace another run in `out`.
        progress: called with the steps done, the steps in all and the latest figures.
        probe: gives what is measured in between, in each phase.

    Returns:
        Whether anything was left to train.

    Raises:
        UserError: if settings, model, task or data do not fit each other.
    """
    settings = recipe.training
    check_trackers(settings)
    if settings.eval_steps and probe is unprobed:
        raise UserError("training.eval_steps asks for a held-out loss, which needs held-out records: give --eval-data.")
    model = load_model(model_folder)
    tokenizer = load_tokenizer(str(model_folder))
    check_meta_token(model.config, tokenizer, model_folder)
    run = {
        "verb": "finetune",
        "recipe": recipe.model_dump(mode="json", exclude=WITHOUT_EFFECT),
        "batch": settings.batch,
        "model_sha256": weights_sha256(model_folder),
    }
    goals: dict[str, Goal | None] = {}
    if data is not None:
        records = read_examples(data, tokenizer, landmarks=recipe.task.landmarks)
        phases = [Phase("data", settings, max(len(record.input_ids) for record in records))]
        check_length(model.config, phases[0].train_length)
        if recipe.task.stages:
            raise UserError("task.stages are for the tasks; with records, give a recipe without them.")
        run |= {"data_sha256": sha256_of(data.read_bytes())}

        def open_examples(phase: Phase) -> SizedDataset:
            return RecordExamples(records, seed=settings.seed, length=phase.examples)

    elif task is not None:
        if recipe.task.landmarks is not None:
            raise UserError("landmarks are for your own records (--data); task.condition places a task's meta-tokens.")
        source, phases = train_source(recipe, task, tokenizer, documents), recipe.phases()
        if any(phase.curriculum and phase.curriculum.inside_loss for phase in phases):
            check_inside(model)
        for phase in phases:
            check_length(model.config, phase.train_length)
            _drawn(source, phase)(0)  # fails before any training if there is no such prompt
            goals[phase.name] = _goal(source, phase)
        run |= {"task": task, "documents_sha256": sha256_of("\0".join(documents).encode())}

        def open_examples(phase: Phase) -> SizedDataset:
            stored = train_examples(recipe, source, phase, examples or out / "examples")
            return TaskExamples(stored, length=phase.examples)

    else:
        raise UserError("fine-tuning needs a task or a file of records.")
    collator = Collator(
        pad_token_id=tokenizer.eos_token_id, meta_token_id=model.config.meta_token_id, loss_on=recipe.task.loss_on
    )
    before, trained, total = 0, False, sum(phase.settings.max_steps for phase in phases)
    with open_run(out, run, overwrite=overwrite):
        for phase in phases:
            folder, own, report = out / phase.name, phase.settings, partial(_report_phase, progress, before, total)
            before += own.max_steps
            if (folder / MANIFEST).exists():
                model = load_model(folder)
                continue
            folder.mkdir(exist_ok=True)
            set_seed(own.seed)
            train(
                model,
                ByLength(open_examples(phase), batch=own.batch, seed=own.seed),
                tokenizer,
                own,
                folder,
                collator=collator,
                progress=report,
                probe=probe(model, phase),
                goal=goals.get(phase.name),
                inside_weight=phase.curriculum.inside_loss if phase.curriculum else None,
            )
            trained = True
            if own.keep_adapter:  # and not what PEFT has made of the model
                model = load_model(folder)
    return trained


def _report_phase(progress: Progress, before: int, total: int, done: int, _: int, figures: Figures) -> None:
    progress(before + done, total, {name: (value, before + step) for name, (value, step) in figures.items()})


def training_of(folder: Path) -> dict[str, Any]:
    """How a model in `folder` was trained, as fields of a result; empty if no run wrote it.

    Returns:
        `seed` and, of a model that was fine-tuned on a task, `train_length` (tokens) and `train_condition`.
    """
    for place in (folder.parent, folder):  # a run of fine-tuning has a folder for each phase
        try:
            run = json.loads((place / "settings.json").read_text(encoding="utf-8"))
            about = {"seed": run["recipe"]["training"]["seed"]}
            if "task" in run:  # and not a user's own records
                length = int(folder.name) if folder.name.isdecimal() else None
                about |= {"train_condition": run["recipe"]["task"]["condition"], "train_length": length}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        return about
    return {}


def check_meta_token(config: MetaGPT2Config, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Refuse a model that cannot read the tasks' markers, or give all that its tokenizer has.

    Raises:
        UserError: if the model has no meta-token, or not its tokenizer's, or uses fewer entries.
    """
    if config.meta_token_id is None:
        raise UserError(
            f"the model in {folder} has no meta_token_id, which markers need; `metatokens retrofit` gives it one."
        )
    if config.meta_token_id != meta_token_id(tokenizer):
        raise UserError(
            f"the model in {folder} has meta_token_id {config.meta_token_id}, and its tokenizer's meta-token is "
            f"{meta_token_id(tokenizer)}."
        )
    entries, used = text_vocab_size(tokenizer), getattr(config, "unpadded_vocab_size", None) or config.vocab_size
    if entries > used:
        raise UserError(
            f"the tokenizer in {folder} has {entries} entries, and the model's unpadded_vocab_size is {used}: call "
            "model.resize_token_embeddings(len(tokenizer)) after adding tokens, and save both."
        )
