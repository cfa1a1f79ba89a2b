"""The Hugging Face Trainer with this package's schedule, run folder and checkpoints."""

import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from metatokens.checkpoint import save_model, verify_manifest, write_manifest
from metatokens.errors import UserError
from metatokens.files import library_writes
from metatokens.machine import is_first_process, process_count
from metatokens.model.chunked_attention import attention_by_chunks
from metatokens.recipe import TrainerSettings, TrainingSettings
from metatokens.retrofit.classes import MetaModel, freeze_base
from metatokens.retrofit.layers import added_parameters
from metatokens.retrofit.text_window import apply_text_window
from metatokens.training.batches import Collate, with_hints
from metatokens.training.bracket_loss import bracket_loss
from metatokens.training.lora import with_lora
from metatokens.training.muon import MuonWithAdamW, block_matrices, inputs_first
from metatokens.training.positions import position_jumps
from metatokens.training.probe import Probe

CHECKPOINTS = 2  # of a run; older ones are removed

# The latest value of each of FIGURES and tokens_per_second.
Figures = Mapping[str, float]
FIGURES = ("loss", "learning_rate", "eval_loss", "eval_exact_match")
# Takes the steps done, the steps in all, and the figures.
Progress = Callable[[int, int, Figures], None]


def unwatched(done: int, total: int, figures: Figures) -> None:
    """Ignore progress."""


class MetaTokenTrainer(Trainer):
    """The Trainer, which can run a part of a longer schedule (paper: 200k of 600k steps), and can use Muon.

    It stops before an update whose gradient is not finite. Its checkpoints leave out a base that is not trained.
    """

    def __init__(self, *args: Any, settings: TrainingSettings, schedule_start: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.settings, self.schedule_start = settings, schedule_start
        self.positions_read = 0

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """0: the Trainer would count the parameters anew at every step, for a figure that nothing here reads."""
        return 0

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """AdamW; or, if the settings ask for it and there is a matrix to train, Muon together with AdamW."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        matrices = block_matrices(self.model) if self.settings.optimizer == "muon" else []
        if matrices:
            optimizer = MuonWithAdamW(
                matrices,
                optimizer,
                self.settings.muon_learning_rate,
                inputs_first=inputs_first(self.model),
            )
        self.optimizer = optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule, over `decay_steps` if the settings have them, from `schedule_start` on."""
        steps = self.settings.decay_steps or num_training_steps
        schedule: Any = super().create_scheduler(steps, optimizer)
        schedule.last_epoch = self.schedule_start - 1
        schedule._initial_step()  # a step, which sets the optimizer's rates
        return schedule

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with library_writes(Path(self.args.output_dir).parent):
            super()._save_checkpoint(*args, **kwargs)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        if isinstance(self.model, MetaModel) and not self.settings.train_base:
            state_dict = added_parameters(self.model)
        super()._save(output_dir, state_dict)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Say nothing: checkpoints leave out a base that is not trained."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load nothing: no setting scales the loss, so such a file in a checkpoint is somebody else's."""

    def training_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Compute a micro-batch's gradient, and count its positions, padding too, times the processes."""
        self.positions_read += inputs["input_ids"].numel() * process_count()
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # The last chance before the update: a non-finite gradient would ruin the weights.
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not math.isfinite(norm):
            step, batch = self.state.global_step, self.settings.batch
            raise UserError(
                f"training stopped before step {step + 1}: the gradient's norm is {float(norm):g}, at learning rate "
                f"{self._get_learning_rate():g}, on the items {step * batch} to {(step + 1) * batch - 1} in the "
                "order of training; the last checkpoint is kept, and a lower "
                "training.learning_rate or a longer warm-up is the usual remedy."
            )
        return norm


class RunCallback(TrainerCallback):
    """Marks saved checkpoints as complete, keeps the last two, probes the model, and reports progress."""

    def __init__(self, trainer: MetaTokenTrainer, progress: Progress, probe: Probe | None):
        self.trainer, self.progress, self.probe = trainer, progress, probe
        self.last_report = 0.0
        self.last_log = (0.0, 0)  # its time, and the tokens read until then
        self.figures: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self.last_log = time.monotonic(), self.trainer.positions_read

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Write the manifest of the checkpoint that was just saved, and only then remove an older one."""
        if state.is_world_process_zero:
            write_manifest(Path(args.output_dir) / f"checkpoint-{state.global_step}")
            # By step. The Trainer sorts by modification time, and clocks may go backwards.
            rotate_checkpoints(args.output_dir, CHECKPOINTS)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure if a measurement is due. Report progress, unless this step is logged: then `on_log` reports it."""
        is_end = state.global_step == state.max_steps
        control.should_log |= is_end
        if self.probe is not None and (is_end or state.global_step % self.probe.every == 0):
            model, is_logged = kwargs["model"].eval(), control.should_log
            self.trainer.log(self.probe.measure(model))  # to trackers too
            model.train()
            # That call has reset it, and the loss is still to be logged.
            control.should_log = is_logged
        if not control.should_log:
            self._report(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any
    ) -> None:
        """Refuse a training that ended early: the Trainer takes some errors of a dataset for its end."""
        if state.global_step < state.max_steps:
            raise RuntimeError(
                f"the training ended after {state.global_step} of {state.max_steps} steps"
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        logs: dict[str, float],
        **kwargs: Any,
    ) -> None:
        """Keep the figures; with a loss, measure the speed since the last one and report progress."""
        self.figures |= {name: logs[name] for name in FIGURES if name in logs}
        if "loss" in logs:
            self.figures["tokens_per_second"] = self._speed_since_last_log()
            self._report(state)

    def _speed_since_last_log(self) -> float:
        time_before, tokens_before = self.last_log
        self.last_log = time.monotonic(), self.trainer.positions_read
        seconds = self.last_log[0] - time_before
        return (self.trainer.positions_read - tokens_before) / max(seconds, 1e-9)

    def _report(self, state: TrainerState) -> None:
        """Report at most once a second, and at the end."""
        if time.monotonic() - self.last_report > 1.0 or state.global_step == state.max_steps:
            self.last_report = time.monotonic()
            self.progress(state.global_step, state.max_steps, dict(self.figures))


def train(
    model: PreTrainedModel,
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    settings: TrainingSettings,
    out: Path,
    *,
    collator: Collate,
    progress: Progress,
    probe: Probe | None = None,
    bracket_weight: float | None = None,
    schedule_start: int = 0,
) -> None:
    """Train until `settings.max_steps`, resuming from the last good checkpoint, and write the model to `out`.

    `out` then holds the model, `curve.jsonl` and `checkpoints/`. The curve has a line for each logged step (step, loss,
    learning rate, gradient norm) and for each measurement of the probe.

    Args:
        model: changed in place.
        dataset: a map-style dataset of items in the order of training, enough for all steps.
        tokenizer: saved with the model.
        settings: of the Trainer, the optimizer and the schedule.
        out: an existing folder.
        collator: makes a batch of items.
        progress: called after a step, at most once a second, and after the last step.
        probe: what to measure during the training, and how often; None measures nothing.
        bracket_weight: the weight of the auxiliary loss `bracket_loss`. Its heads are not saved, so such a training
            writes no checkpoints and starts again if it is interrupted.
        schedule_start: the step of the learning rate's schedule at which the training begins.

    Raises:
        UserError: if the settings do not fit the model, PEFT is missing, the last checkpoint has more than tensors in
            it, or a gradient is not finite.
    """
    if settings.text_window is not None:
        apply_text_window(
            model,
            settings.text_window,
            full_layers=settings.text_full_layers,
            full_heads=settings.text_full_heads,
        )
    trained = _made_trainable(model, settings)
    uses_cache = getattr(model.config, "use_cache", True)
    checkpoints = out / "checkpoints"
    checkpoint = last_good_checkpoint(checkpoints)
    trainer = MetaTokenTrainer(
        model=trained,
        args=_arguments(settings, checkpoints, saves=bracket_weight is None),
        train_dataset=dataset,
        processing_class=tokenizer,
        data_collator=with_hints(collator, model),
        settings=settings,
        schedule_start=schedule_start,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(RunCallback(trainer, progress, probe))
    if checkpoint is not None and _step_of(checkpoint) == settings.max_steps:
        # The run was interrupted after its last checkpoint. The Trainer would train one step more.
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = TrainerState.load_from_json(f"{checkpoint}/{TRAINER_STATE_NAME}")
    else:
        has_window = getattr(model.config, "text_window", None) is not None
        micro_batches = settings.batch // settings.per_device_train_batch_size
        with (
            attention_by_chunks(model) if has_window else nullcontext(),
            position_jumps(model, settings.position_jumps),
            bracket_loss(model, bracket_weight, micro_batches),
        ):
            _train_from(checkpoint, trainer)
    model.config.use_cache = uses_cache  # the Trainer has turned it off
    _save_run(trainer, trained, out)


def _train_from(checkpoint: Path | None, trainer: MetaTokenTrainer) -> None:
    """Train, from a checkpoint if there is one. The Trainer unpickles tensors and numbers alone, so no code runs."""
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except UnpicklingError as error:
        raise UserError(
            f"the checkpoint {checkpoint} cannot be loaded: it has more than tensors in it."
        ) from error


def _save_run(trainer: MetaTokenTrainer, model: Any, out: Path) -> None:
    """Write the model and the curve to `out`; called in all processes, which may train the model further."""
    if trainer.settings.lora_rank:
        model = model.merge_and_unload()
    if trainer.is_world_process_zero():
        _write_curve(trainer.state.log_history, out / "curve.jsonl")
        save_model(model, trainer.processing_class, out)
    trainer.accelerator.wait_for_everyone()  # the others may load what the first one saves


def _made_trainable(model: Any, settings: TrainingSettings) -> Any:
    """What the Trainer gets: the model, or PEFT's wrapper of it with adapters."""
    trained = model
    if isinstance(model, MetaModel):
        freeze_base(model, trained=settings.train_base)
        model.base_is_elsewhere &= not (settings.train_base or settings.lora_rank)
    if settings.lora_rank:
        trained = with_lora(model, settings.lora_rank)
    trained_types = {weight.dtype for weight in trained.parameters() if weight.requires_grad}
    if trained_types & {torch.bfloat16, torch.float16}:
        trained.float()  # half precision rounds small steps away
    return trained


def _arguments(settings: TrainingSettings, checkpoints: Path, *, saves: bool) -> TrainingArguments:
    """The Trainer's arguments; on one GPU, even where there are several."""
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": settings.min_learning_rate},
        train_sampling_strategy="sequential",  # the datasets shuffle by (seed, epoch), so that resuming is exact
        remove_unused_columns=False,
        save_strategy="steps" if saves else "no",
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=settings.use_cpu or not torch.cuda.is_available(),
        disable_tqdm=True,
        logging_first_step=True,
        ddp_find_unused_parameters=False,
        **settings.model_dump(include={*TrainerSettings.model_fields}),
    )
    # The Trainer would take another one from the launcher's environment.
    arguments.mixed_precision = "bf16" if settings.bf16 else "no"
    if arguments.n_gpu > 1:
        # The Trainer would give each GPU a batch (DataParallel), so a step would read more items than the settings ask.
        print("one of several GPUs is used; torchrun starts a process for each.", file=sys.stderr)
        arguments._n_gpu = 1
    return arguments


def _write_curve(log_history: Iterable[Mapping[str, float]], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for entry in log_history:
            if "train_runtime" not in entry:  # the summary of the whole run
                names = ["step", *sorted(entry.keys() - {"step", "epoch"})]
                file.write(json.dumps({name: entry[name] for name in names}) + "\n")


def last_good_checkpoint(folder: Path) -> Path | None:
    """The newest complete and unaltered checkpoint in `folder`. Newer ones, which are damaged, are removed."""
    checkpoints = [
        path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)
    ]
    for path in sorted(checkpoints, key=_step_of, reverse=True):
        try:
            verify_manifest(path)
        except (UserError, FileNotFoundError) as error:  # another process may have removed it
            if is_first_process():
                print(f"{error} It is dropped.", file=sys.stderr)
                shutil.rmtree(path, ignore_errors=True)
        else:
            return path
    return None


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))
