"""Fine-tuning on a task or on a user's own records, in phases of growing train length (paper, section 4.2)."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from metatokens.checkpoint import load_model, weights_sha256
from metatokens.data.tokenizer import check_meta_token, load_tokenizer
from metatokens.errors import UserError
from metatokens.files import sha256_of
from metatokens.model.positions import check_length
from metatokens.recipe import WITHOUT_EFFECT, FinetuneRecipe, Phase
from metatokens.tasks.example import Encoded, read_examples, records_sha256
from metatokens.tasks.landmarks_alone import LandmarksAlone
from metatokens.training.examples import (
    Collator,
    drawing,
    grouped_by_length,
    in_epochs,
    train_examples,
    train_source,
)
from metatokens.training.probe import Probe
from metatokens.training.run_folder import is_finished, open_run
from metatokens.training.trainer import Figures, Progress, train, unwatched

# Returns the probe of a model that is about to be trained in a phase; None: nothing is measured.
Probing = Callable[[PreTrainedModel, Phase], Probe | None]


class _Source(NamedTuple):
    """The examples of a fine-tuning."""

    phases: Sequence[Phase]
    identity: dict[str, str]  # what determines the examples, for the run's settings
    read: Callable[[Phase], list[Encoded]]  # the examples of a phase


def finetune(
    recipe: FinetuneRecipe,
    model_folder: Path,
    out: Path,
    *,
    task: str | None = None,
    data: Path | None = None,
    documents: Sequence[str] = (),
    draw: Callable[[Phase], Sequence[Encoded]] | None = None,
    overwrite: bool = False,
    progress: Progress = unwatched,
    probe: Probing | None = None,
) -> bool:
    """Fine-tune a model in the phases of a recipe, each from the model of the phase before it.

    Args:
        recipe: the settings.
        model_folder: the checkpoint to start from.
        out: the run's folder: `settings.json`, and for each phase a folder with a model. Resumed if it holds this run.
        task: the name of a task; give it or `data`.
        data: a JSON-lines file of the user's own records, which are trained on in one phase, `out/data`.
        documents: corpus texts, from which the task `copying` copies.
        draw: gives the train examples of a phase of the task, in place of `train_examples`.
        overwrite: replace another run in `out`.
        progress: called with the steps done, the steps in all and the latest figures.
        probe: returns the measurement that is repeated during a phase.

    Returns:
        Whether anything was left to train.

    Raises:
        UserError: if settings, model, task or data do not fit each other.
    """
    settings = recipe.training
    if settings.eval_steps and probe is None:
        raise UserError(
            "training.eval_steps asks for a held-out loss, which needs held-out records: give --eval-data."
        )
    model = load_model(model_folder)
    tokenizer = load_tokenizer(str(model_folder))
    check_meta_token(model.config, tokenizer, model_folder)
    if data is not None:
        source = _record_source(recipe, data, tokenizer)
    elif task is not None:
        source = _task_source(recipe, task, tokenizer, documents, draw)
    else:
        raise UserError("fine-tuning needs a task or a file of records.")
    for phase in source.phases:
        check_length(model.config, phase.train_length)
    run = {
        "verb": "finetune",
        "recipe": recipe.model_dump(mode="json", exclude=WITHOUT_EFFECT),
        "batches": [phase.settings.batch for phase in source.phases],
        "model_sha256": weights_sha256(model_folder),
        **source.identity,
    }
    collator = Collator(
        pad_token_id=tokenizer.eos_token_id,
        alone=LandmarksAlone(model, tokenizer) if recipe.task.question_sees else None,
    )
    with open_run(out, run, overwrite=overwrite, inputs=[model_folder, data]):
        return _train_phases(source, model, tokenizer, out, collator, progress, probe)


def _train_phases(
    source: _Source,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    collator: Collator,
    progress: Progress,
    probe: Probing | None,
) -> bool:
    """Train the phases that no earlier run has finished; return whether there was one."""
    is_trained = False
    steps_before = 0
    total = sum(phase.settings.max_steps for phase in source.phases)
    for phase in source.phases:
        folder = out / phase.name
        settings = phase.settings
        if is_finished(folder):
            model = load_model(folder)
        else:
            folder.mkdir(exist_ok=True)
            examples = source.read(phase)
            check_length(model.config, max(len(example.input_ids) for example in examples))
            set_seed(settings.seed)
            train(
                model,
                grouped_by_length(examples, batch=settings.batch, seed=settings.seed),
                tokenizer,
                settings,
                folder,
                collator=collator,
                progress=partial(_report_phase, progress, steps_before, total),
                probe=probe(model, phase) if probe else None,
                bracket_weight=phase.bracket_loss,
                schedule_start=phase.schedule_start,
            )
            is_trained = True
        steps_before += settings.max_steps
    return is_trained


def _record_source(
    recipe: FinetuneRecipe, file: Path, tokenizer: PreTrainedTokenizerBase
) -> _Source:
    """A user's own records, in one phase."""
    if recipe.task.stages:
        raise UserError("task.stages are for the tasks; with records, give a recipe without them.")
    if recipe.task.question_sees:
        raise UserError(
            "task.question_sees is for the tasks, whose prompts have a question; records may have none."
        )
    recipe.training.check_decay(recipe.training.max_steps)
    records = read_examples(file, tokenizer, landmarks=recipe.task.landmarks)
    longest = max(len(record.input_ids) for record in records)
    return _Source(
        phases=[Phase("data", recipe.training, longest)],
        identity={"data_sha256": records_sha256(records)},
        read=lambda phase: in_epochs(records, seed=phase.settings.seed, length=phase.examples),
    )


def _task_source(
    recipe: FinetuneRecipe,
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    draw: Callable[[Phase], Sequence[Encoded]] | None,
) -> _Source:
    """The prompts of a task, in the recipe's phases."""
    if recipe.task.landmarks is not None:
        raise UserError(
            "landmarks are for your own records (--data); task.condition places a task's meta-tokens."
        )
    recipe.training.check_decay(sum(recipe.train_steps))  # one schedule spans all train lengths
    source = train_source(recipe, task, tokenizer, documents)
    phases = recipe.phases()
    for phase in phases:
        drawing(source, phase)(0)  # fails before any training if there is no such prompt
    draw_phase = draw or partial(train_examples, recipe, source)
    return _Source(
        phases=phases,
        identity={"task": task, "documents_sha256": sha256_of("\0".join(documents).encode())},
        read=lambda phase: in_epochs(draw_phase(phase), length=phase.examples),
    )


def _report_phase(
    progress: Progress, before: int, total: int, done: int, _: int, figures: Figures
) -> None:
    """Report a phase's step as a step of the whole run."""
    progress(before + done, total, figures)
