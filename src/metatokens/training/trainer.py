"""The Hugging Face Trainer with this package's schedule, run folder and checkpoints."""

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from metatokens.checkpoint import load_model, name_base, save_model, verify_manifest, write_manifest
from metatokens.errors import UserError
from metatokens.files import library_writes
from metatokens.machine import is_first_process, process_count
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.recipe import TrainerSettings, TrainingSettings
from metatokens.retrofit.classes import MetaModel, freeze_base, own_parameters
from metatokens.retrofit.saving import DELTA_WEIGHTS, save_meta
from metatokens.training.batches import WithLogitsToKeep, WithPositions
from metatokens.training.inside import inside_loss
from metatokens.training.lora import check_rank, with_lora
from metatokens.training.muon import MuonWithAdamW, block_matrices
from metatokens.training.positions import position_jumps
from metatokens.training.probe import Probe

# FSDP2, in the layers that the model names; the weights of a checkpoint are saved whole.
FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}

# The latest of a run's figures by name, each with the step that it is of: those of FIGURES, and tokens_per_second.
Figures = Mapping[str, tuple[float, int]]
Progress = Callable[[int, int, Figures], None]  # is called with the steps done, the steps in all, and figures
FIGURES = ("loss", "learning_rate", "eval_loss", "eval_exact_match")


def unwatched(done: int, total: int, figures: Figures) -> None:
    """Progress that nobody follows."""


class SizedDataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


Goal = Callable[[Any], bool]  # whether a model in evaluation mode has learned enough
GOAL_STEPS = 50  # between two looks
KEPT = 2  # checkpoints


class MetaTokenTrainer(Trainer):
    """Trainer that stops at a loss that is no number.

    Its learning rate may decay over a longer horizon than the run (paper: 600k against 200k steps), and its optimizer
    may be Muon.
    """

    def __init__(self, *args: Any, settings: TrainingSettings, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.settings = settings
        self.tokens_read, self.seconds_paused = 0, 0.0

    @property
    def saves_added_alone(self) -> bool:
        """Whether checkpoints hold what was added to a base, which is not trained, and not the base again."""
        return isinstance(self.model, MetaModel) and not (self.settings.train_base or self.settings.fsdp)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not spent on training, which the tokens a second leave out."""
        start = time.monotonic()
        yield
        self.seconds_paused += time.monotonic() - start

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """AdamW; or Muon with what is left of it, where there is a matrix to train."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        if self.settings.optimizer == "muon" and (matrices := block_matrices(self.model)):
            optimizer = MuonWithAdamW(matrices, optimizer, self.settings.muon_learning_rate)
        self.optimizer = optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule over `decay_steps`, where given."""
        return super().create_scheduler(self.settings.decay_steps or num_training_steps, optimizer)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with library_writes(Path(self.args.output_dir).parent), self.paused():
            super()._save_checkpoint(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.saves_added_alone:
            super()._save(output_dir, state_dict)
            name_base(self.model, Path(output_dir or self.args.output_dir))
        elif self.args.should_save and output_dir is not None:
            if self.model.base_is_elsewhere:
                save_meta(self.model, output_dir)
            else:  # its base may be another than the one that meta-attention was added to
                Path(output_dir).mkdir(parents=True, exist_ok=True)
                weights = {name: one.detach().contiguous() for name, one in own_parameters(self.model).items()}
                save_file(weights, Path(output_dir) / DELTA_WEIGHTS, metadata={"format": "pt"})
            self.processing_class.save_pretrained(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not (Path(resume_from_checkpoint) / DELTA_WEIGHTS).exists():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        weights = load_file(Path(resume_from_checkpoint) / DELTA_WEIGHTS)
        with torch.no_grad():
            for name, one in own_parameters(self.model).items():
                one.copy_(weights[name])

    def restored(self, checkpoint: Path) -> Any:
        """The model, with the weights of a checkpoint."""
        if self.is_fsdp_enabled:  # the model is not wrapped yet
            self.model.load_state_dict(load_model(checkpoint).state_dict())
        else:
            self._load_from_checkpoint(str(checkpoint))
        return self.model

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Keeps the loss, to name it where training stops, and counts the tokens of all processes."""
        self.tokens_read += inputs["input_ids"].numel() * process_count()
        self._loss = super().training_step(model, inputs, *args, **kwargs)
        return self._loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # The last look before the update: a loss or a gradient that is no number would spoil the weights for good.
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not math.isfinite(norm):
            step, size = self.state.global_step, self.settings.batch
            raise UserError(
                f"training stopped before step {step + 1}: the loss is {float(self._loss):g} and the gradient's norm "
                f"{float(norm):g}, at learning rate {self._get_learning_rate():g}, on the items {step * size} to "
                f"{(step + 1) * size - 1} of the training data; the last checkpoint is kept, and a lower "
                "training.learning_rate or a longer warm-up is the usual remedy."
            )
        return norm


class RunCallback(TrainerCallback):
    """Marks saved checkpoints as complete, keeps the last few, probes the model, and says how far the run is."""

    def __init__(self, trainer: MetaTokenTrainer, progress: Progress, probe: Probe | None, goal: Goal | None):
        self.trainer, self.progress, self.probe, self.goal = trainer, progress, probe, goal
        self.last_report = 0.0
        self.last_log = (0.0, 0)  # when, and the tokens read until then
        self.figures: dict[str, tuple[float, int]] = {}  # the latest

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to take the time, with the figures of a run that goes on."""
        self.last_log = time.monotonic(), self.trainer.tokens_read
        for point in state.log_history:
            self._keep(point, point["step"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the manifest of the checkpoint that was just saved, and only then drop an older one."""
        if state.is_world_process_zero:
            write_manifest(Path(args.output_dir) / f"checkpoint-{state.global_step}")
            # Not by the time that each was written, as the Trainer has it: a clock may go backwards.
            rotate_checkpoints(args.output_dir, KEPT)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure, where it is time, and report progress, unless the step's figures are still to come."""
        if self.probe is not None and state.global_step % self.probe.every == 0:
            model, is_due = kwargs["model"].eval(), control.should_log
            with self.trainer.paused():
                self.trainer.log(self.probe.measure(model))  # to trackers too
            model.train()
            control.should_log = is_due  # the loss, which that call would have taken for logged
        if self.goal is not None and state.global_step % GOAL_STEPS == 0:
            with self.trainer.paused():
                is_reached = self.goal(kwargs["model"].eval())
            if is_reached:
                control.should_training_stop = control.should_log = True
            kwargs["model"].train()
        if not control.should_log:
            self._report(state)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: Any
    ) -> None:
        """Take the figures and, since the last loss, the speed, and report progress."""
        self._keep(logs, state.global_step)
        if "loss" in logs:
            (before, tokens), self.last_log = self.last_log, (time.monotonic(), self.trainer.tokens_read)
            seconds = self.last_log[0] - before - self.trainer.seconds_paused
            self.trainer.seconds_paused = 0.0
            self.figures["tokens_per_second"] = (self.last_log[1] - tokens) / max(seconds, 1e-9), state.global_step
            self._report(state)

    def _keep(self, logs: Mapping[str, float], step: int) -> None:
        self.figures |= {name: (logs[name], step) for name in FIGURES if name in logs}

    def _report(self, state: TrainerState) -> None:
        """Once a second at most, and at the end."""
        if time.monotonic() - self.last_report > 1.0 or state.global_step == state.max_steps:
            self.last_report = time.monotonic()
            self.progress(state.global_step, state.max_steps, dict(self.figures))


def train(
    model: MetaGPT2ForCausalLM,
    dataset: SizedDataset,
    tokenizer: PreTrainedTokenizerBase,
    settings: TrainingSettings,
    out: Path,
    *,
    collator: Callable[[list[Any]], dict[str, torch.Tensor]],
    progress: Progress,
    probe: Probe | None = None,
    goal: Goal | None = None,
    inside_weight: float | None = None,
) -> None:
    """Train until `settings.max_steps` or a goal, resuming from the last good checkpoint, and write the model to `out`.

    `out` then holds the model, `curve.jsonl` (a line a logged step: step, loss, learning_rate; and a line a step that
    was probed) and `checkpoints/`.

    Args:
        model: changed in place.
        dataset: items in the order of training, enough for all steps.
        tokenizer: saved beside the model.
        settings: of the recipe.
        out: an existing folder.
        collator: makes a batch of items.
        progress: called about once a second.
        probe: what is measured in between, if anything is.
        goal: says, every `GOAL_STEPS`, whether to end before `settings.max_steps`.
        inside_weight: of the auxiliary loss `inside_loss`, if it is added. Its heads are in no checkpoint:
            such a training, when it was cut off, begins again, and ends the same.
    """
    if settings.lora_rank and settings.fsdp:
        raise UserError("training.lora_rank does not go with training.fsdp; leave one of them out.")
    tuned: Any = model
    if hasattr(model, "get_base_model"):  # an adapter that was kept is trained further
        model = model.get_base_model()
        model.base_is_elsewhere = False
        check_rank(tuned, settings.lora_rank)
    elif isinstance(model, MetaModel):
        freeze_base(model, trained=settings.train_base)
        model.base_is_elsewhere &= not (settings.train_base or settings.lora_rank)
    if isinstance(model, MetaGPT2ForCausalLM):
        collator = WithPositions(collator, model.config.meta_token_id)
    elif model._supports_logits_to_keep():
        collator = WithLogitsToKeep(collator)
    if settings.lora_rank and tuned is model:
        tuned = with_lora(model, settings.lora_rank)
    if any(one.requires_grad and one.dtype in (torch.bfloat16, torch.float16) for one in tuned.parameters()):
        tuned.float()  # half precision rounds small steps away
    checkpoints = out / "checkpoints"
    checkpoint = last_good_checkpoint(checkpoints)
    if settings.fsdp and checkpoint is not None and (Path(checkpoint) / DELTA_WEIGHTS).exists():
        raise UserError(f"{checkpoint} lacks the base's weights, which FSDP reads too: go on without training.fsdp.")
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": settings.min_learning_rate},
        train_sampling_strategy="sequential",  # the datasets shuffle by (seed, epoch), so that resuming is exact
        remove_unused_columns=False,
        save_strategy="steps" if inside_weight is None else "no",
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=settings.use_cpu or not torch.cuda.is_available(),
        disable_tqdm=True,
        logging_first_step=True,
        report_to=settings.report_to.split(","),
        ddp_find_unused_parameters=False,
        fsdp=settings.fsdp,
        fsdp_config=FSDP if settings.fsdp else None,
        **settings.model_dump(include={*TrainerSettings.model_fields}),
    )
    if arguments.n_gpu > 1:
        # The Trainer would give each of them a batch (DataParallel), and so read other items than the settings say.
        print(
            f"one process trains on one of the {arguments.n_gpu} GPUs; `torchrun --nproc-per-node {arguments.n_gpu} -m "
            "metatokens ...` starts a process for each, which train together.",
            file=sys.stderr,
        )
        arguments._n_gpu = 1
    trainer = MetaTokenTrainer(
        model=tuned,
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        data_collator=collator,
        settings=settings,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(RunCallback(trainer, progress, probe, goal))
    try:
        if checkpoint is not None and _is_last(trainer, Path(checkpoint), goal):
            # Cut off between its last checkpoint and its end. The Trainer would do a step more.
            trainer.restored(Path(checkpoint))
            trainer.state = TrainerState.load_from_json(f"{checkpoint}/{TRAINER_STATE_NAME}")
        else:
            pieces = settings.batch // settings.per_device_train_batch_size
            with position_jumps(model, settings.position_jumps), inside_loss(model, inside_weight, pieces):
                trainer.train(resume_from_checkpoint=checkpoint)
    except UnpicklingError as error:  # Trainer takes tensors and numbers from a pickle, and runs nothing of it
        raise UserError(f"the checkpoint {checkpoint} cannot be loaded: it has more than tensors in it.") from error
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if settings.fsdp else None  # of all processes
    if trainer.is_world_process_zero():
        with (out / "curve.jsonl").open("w", encoding="utf-8") as file:
            for entry in trainer.state.log_history:
                if "train_runtime" not in entry:  # the summary of the whole run
                    point = {"step": entry["step"]} | {key: entry[key] for key in sorted(entry.keys() - {"epoch"})}
                    file.write(json.dumps(point) + "\n")
        is_merged = settings.lora_rank and not settings.keep_adapter
        save_model(tuned.merge_and_unload() if is_merged else tuned, tokenizer, out, weights)


def _is_last(trainer: MetaTokenTrainer, checkpoint: Path, goal: Goal | None) -> bool:
    """Whether the training that wrote a checkpoint was over with it."""
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    is_due = goal is not None and step % GOAL_STEPS == 0
    is_over = step == trainer.settings.max_steps
    return is_over or (is_due and goal is not None and goal(trainer.restored(checkpoint).eval()))


def check_trackers(settings: TrainingSettings) -> None:
    """Refuse a tracker that is unknown or not installed.

    Raises:
        UserError: if `report_to` is neither `none` nor `all` nor installed trackers separated by commas.
    """
    installed = get_available_reporting_integrations()
    unknown = sorted(set(settings.report_to.split(",")) - {*installed})
    if unknown and settings.report_to not in ("none", "all"):
        raise UserError(
            f"training.report_to names the tracker {unknown[0]!r}, which is not installed; give none, all, or some of: "
            f"{', '.join(installed) or '(none is installed)'}."
        )


def last_good_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint below `folder` that is complete and unchanged; damaged ones are removed."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    found = [path for path, step in steps.items() if step.isdecimal()]
    for path in sorted(found, key=lambda path: int(steps[path]), reverse=True):
        try:
            verify_manifest(path)
        except UserError as error:
            if is_first_process():
                print(f"{error} It is dropped, and an earlier one is used.", file=sys.stderr)
                shutil.rmtree(path, ignore_errors=True)
        else:
            return str(path)
    return None
