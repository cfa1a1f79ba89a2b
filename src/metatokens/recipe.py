"""Recipes: the settings of a run, typed and strict, read from YAML; `--set a.b=c` overrides one of them.

A recipe of `pretrain` has the sections `data`, `model` and `training`; one of `finetune` has `task` and `training`; one
of `shrink` has `cache`, `mixture`, `tests` and `training`.
Bundled recipes are named without a path: `demo`, `demo_finetune`, `paper`, ...
"""

import copy
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
    model_validator,
)

from metatokens.errors import UserError, broken_rule, one_line
from metatokens.machine import process_count
from metatokens.model.choices import AttentionScale, PositionEmbedding, SecondAttention

# Choices that recipes, functions and the command line share.
Task = Literal["list_recall", "segment_counting", "parity", "copying"]  # a module of `tasks` each
# List recall: a meta-token after so many lists of one item.
Facts = Literal["facts_1", "facts_2", "facts_4", "facts_8"]
# Which meta-tokens a prompt has.
Condition = Literal["paper", "landmark", "decoy", "long_prompt", Facts]
Split = Literal["train", "validation", "test"]  # of a task's examples
Placement = Literal["uniform", "periodic", "none"]  # the functions of `data.insertion.PLACEMENTS`
Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]

Positive = Annotated[int, Field(gt=0, lt=2**31)]
AtLeastZero = Annotated[int, Field(ge=0, lt=2**31)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Heads = list[tuple[AtLeastZero, AtLeastZero]]  # pairs of a block and a head in it

_NEVER = 2**30  # `decay_steps` of a learning rate that stays constant
_APART = 2**32  # between the indices of two phases' examples; no phase has as many
_PACKAGED = files("metatokens") / "recipes"


_LANDMARK_RULE = re.compile("line|paragraph|sentence|every:[1-9][0-9]{0,5}")
_LANDMARK_RULES = "line, paragraph, sentence or every:N, such as every:10"


def landmark_rule(rule: str) -> str:
    """Return `rule` if it is a rule for landmarks, and refuse it if it is not."""
    if _LANDMARK_RULE.fullmatch(rule):
        return rule
    raise UserError(f"{rule!r} is no rule for landmarks: give {_LANDMARK_RULES}.")


LandmarkRule = Annotated[str, AfterValidator(landmark_rule)]


def _placement(name: str) -> str:
    if name in get_args(Placement) or _LANDMARK_RULE.fullmatch(name):
        return name
    raise UserError(
        f"{name!r} is no placement: give uniform, periodic or none, or a rule for landmarks: {_LANDMARK_RULES}."
    )


class _Settings(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


class DataSettings(_Settings):
    """The text of a pretraining, and how meta-tokens are inserted into it (paper, section 3)."""

    tokens: Path | None = None  # the folder that `metatokens tokenize` wrote
    block_size: Annotated[int, Field(ge=2)] = 1024  # positions of a block, meta-tokens included
    # Share of a block's positions that are meta-tokens: the paper's k, in [0, 0.5].
    fraction: float = 0.1
    # uniform, periodic or none; or a rule for landmarks (see `Landmarks`), which does not use the fraction.
    placement: Annotated[str, AfterValidator(_placement)] = "uniform"


class ModelSettings(_Settings):
    """The `architecture`, and some fields of `MetaGPT2Config`; vocabulary and special ids come from the tokenizer."""

    # A GPT-Neo of transformers in these sizes; None: MetaGPT2.
    architecture: Literal["gpt_neo"] | None = None
    hidden_size: Positive = 768
    num_hidden_layers: Positive = 12
    num_attention_heads: Positive = 12
    max_position_embeddings: Positive = 1024
    position_embedding: PositionEmbedding = "rope"
    # With rope: the layers that have it, from 0; None: all.
    rope_layers: list[AtLeastZero] | None = None
    second_attention: SecondAttention = "meta"
    attention_scale: AttentionScale = "constant"
    bias: bool = False
    initializer_range: PositiveFloat = 0.02


class TrainerSettings(_Settings):
    """The fields that transformers' `TrainingArguments` takes as they are: its names, meanings and units."""

    max_steps: Positive
    per_device_train_batch_size: Positive = 12
    gradient_accumulation_steps: Positive = 1
    learning_rate: PositiveFloat = 6e-4  # of AdamW
    warmup_steps: AtLeastZero = 0
    weight_decay: NonNegativeFloat = 0.1  # not of biases and norms
    adam_beta1: BelowOne = 0.9
    adam_beta2: BelowOne = 0.95
    max_grad_norm: PositiveFloat = 1.0
    logging_steps: Positive = 10
    save_steps: Positive = 1000
    bf16: bool = False
    torch_compile: bool = False
    dataloader_num_workers: AtLeastZero = 0
    report_to: Literal["none", "all"] = "none"  # all: every tracker that is installed
    seed: AtLeastZero = 0


class TrainingSettings(TrainerSettings):
    """How a model is trained: the Trainer's fields, and those that this package adds or reads differently."""

    decay_steps: Positive | None = None  # horizon of the learning rate's cosine; None: max_steps
    min_learning_rate: NonNegativeFloat = 6e-5  # where that cosine ends
    # Muon (Jordan et al., 2024) updates the matrices inside the blocks; AdamW updates everything else.
    optimizer: Literal["adamw", "muon"] = "adamw"
    # Muon's rate is warmed up and decayed by the same factors. Its momentum is 0.95, and it has no weight decay.
    muon_learning_rate: PositiveFloat = 0.02
    # Steps between two measurements of the held-out loss; 0: never. None: about ten measurements in a run that has a
    # held-out split, or fewer, so that training reads about twice as many items as they measure (`measured_every`).
    eval_steps: AtLeastZero | None = None
    use_cpu: bool = False  # even if there is a GPU
    # Train the base of a retrofitted model too, not only what was added to it.
    train_base: bool = False
    # Rank of LoRA adapters, which train instead of the linear layers and are merged into them at the end; 0: none.
    lora_rank: AtLeastZero = 0
    # Half of the training sequences have one jump in their positions, which all stay below this; None: no jumps. Stages
    # have none.
    position_jumps: Annotated[int, Field(gt=0, le=2**20)] | None = None
    # The arguments of `set_text_window`: the window, and the layers and heads that see everything. None: as before.
    text_window: Positive | None = None
    text_full_layers: list[AtLeastZero] | None = None
    text_full_heads: Heads | None = None

    @model_validator(mode="after")
    def _fit_each_other(self) -> "TrainingSettings":
        keeps_text = self.text_full_layers is not None or self.text_full_heads is not None
        if keeps_text and self.text_window is None:
            raise ValueError(
                "training.text_full_layers and text_full_heads need training.text_window: without one the model sees "
                "all text"
            )
        if self.train_base and self.lora_rank:
            raise ValueError(
                "training.train_base trains the whole base, and training.lora_rank adapters of it: give one of them"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"training.min_learning_rate is {self.min_learning_rate}, above training.learning_rate "
                f"({self.learning_rate})"
            )
        return self

    def measured_every(self, held_out: int) -> int:
        """Steps between two measurements on `held_out` items; 0: never.

        By default a run has about ten, or fewer: between two of them, training reads about twice as many items as are
        measured, or more. It has at least one, at the end.
        """
        if self.eval_steps is not None:
            return self.eval_steps
        return min(
            self.max_steps, max(1, self.max_steps // 10, math.ceil(2 * held_out / self.batch))
        )

    def check_decay(self, steps: int) -> None:
        """Refuse a cosine that would rise again within a training of `steps`.

        Raises:
            UserError: if it would.
        """
        if self.decay_steps is not None and self.decay_steps < steps:
            raise UserError(
                f"training.decay_steps is {self.decay_steps}, less than the {steps} steps of the training: the "
                "learning rate would rise again after it."
            )

    @property
    def batch(self) -> int:
        """Items of an optimizer step, over all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * process_count()


# Settings that a run may be resumed with other values of. They change the result by rounding alone, except for what is
# made for each micro-batch: the auxiliary loss `bracket_loss`, a mean, and the draws of `position_jumps` and dropout.
WITHOUT_EFFECT = {
    "training": {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "dataloader_num_workers",
        "eval_steps",
        "report_to",
    }
}

Range = tuple[Positive, Positive]


class CurriculumSettings(_Settings):
    """A phase before the first train length, on prompts of given sizes. After warm-up its learning rate is constant."""

    lists: Range  # the fewest and the most lists of a prompt
    items: Range  # the fewest and the most items of a list
    max_steps: Positive
    per_device_train_batch_size: Positive | None = None  # default: as in `training`
    learning_rate: PositiveFloat | None = None  # default: as in `training`
    # For every task: copy random entries of the vocabulary. This teaches a model to find a bracket and a token.
    drill: bool = False
    # For segment counting: the weight of an auxiliary loss (`metatokens.training.bracket_loss`).
    bracket_loss: PositiveFloat | None = None

    @model_validator(mode="after")
    def _ranges_ascend(self) -> "CurriculumSettings":
        for name, (low, high) in (("lists", self.lists), ("items", self.items)):
            if low > high:
                raise ValueError(
                    f"the {name} of a stage are {low} to {high}: give the smaller number first"
                )
        return self


class TaskSettings(_Settings):
    """The examples of a fine-tuning (paper, section 4.2 and Appendix D)."""

    # The longest prompts, in tokens; each length is a phase of training and leaves a checkpoint.
    train_lengths: Annotated[tuple[Positive, ...], Field(min_length=1)] = (128, 256, 512)
    stages: tuple[
        CurriculumSettings, ...
    ] = ()  # phases before these, on prompts of at most the first length
    # Steps for each train length; None: training.max_steps each.
    train_steps: tuple[Positive, ...] | None = None
    condition: Literal["paper", "landmark", "decoy", Facts] = "paper"
    # landmarks: the question sees the meta-tokens of its document alone (`LandmarksAlone`). None: all of it.
    question_sees: Literal["landmarks"] | None = None
    # Where the prompts of a user's own records get meta-tokens: a rule for landmarks, see `Landmarks`.
    landmarks: LandmarkRule | None = None
    examples: Positive = 90_000


class PretrainRecipe(_Settings):
    """Settings of `metatokens pretrain`."""

    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings

    @model_validator(mode="after")
    def _rate_falls(self) -> "PretrainRecipe":
        self.training.check_decay(self.training.max_steps)
        return self


class FinetuneRecipe(_Settings):
    """Settings of `metatokens finetune`."""

    task: TaskSettings = TaskSettings()
    training: TrainingSettings

    @model_validator(mode="after")
    def _steps_fit_the_lengths(self) -> "FinetuneRecipe":
        steps, lengths = self.task.train_steps, self.task.train_lengths
        if list(lengths) != sorted(set(lengths)):
            raise ValueError(
                f"task.train_lengths are {list(lengths)}: each has to be longer than the one before"
            )
        if steps is not None and len(steps) != len(lengths):
            raise ValueError(f"{len(steps)} task.train_steps for {len(lengths)} task.train_lengths")
        return self

    @model_validator(mode="after")
    def _losses_fit_the_task(self) -> "FinetuneRecipe":
        stages, condition = self.task.stages, self.task.condition
        if condition != "paper" and any(stage.drill or stage.bracket_loss for stage in stages):
            raise ValueError(
                "a stage's drill or bracket_loss is for task.condition paper, whose markers bracket the answer, and "
                f"task.condition is {condition}"
            )
        if self.training.torch_compile and any(stage.bracket_loss for stage in stages):
            raise ValueError(
                "a stage's bracket_loss reads the states after each block, which training.torch_compile hides"
            )
        return self

    def phases(self) -> list["Phase"]:
        """The phases of training on a task, in order: those of `task.stages`, then one for each train length."""
        return [*self._stage_phases(), *self._length_phases()]

    def _stage_phases(self) -> Iterator["Phase"]:
        first_length = self.task.train_lengths[0]
        for number, stage in enumerate(self.task.stages, start=1):
            shared = stage.model_fields_set & TrainingSettings.model_fields.keys()
            update = stage.model_dump(include=shared, exclude_none=True)
            settings = self.training.model_copy(
                update=update | {"decay_steps": _NEVER, "position_jumps": None}
            )
            yield Phase(
                f"stage-{number}",
                settings,
                first_length,
                curriculum=stage,
                first_example=number * _APART,
            )

    def _length_phases(self) -> Iterator["Phase"]:
        # One learning rate schedule spans all train lengths: a second warm-up would damage what the first one taught.
        total = sum(self.train_steps)
        horizon = self.training.decay_steps or total
        start = 0
        for length, steps in zip(self.task.train_lengths, self.train_steps, strict=True):
            settings = self.training.model_copy(update={"max_steps": steps, "decay_steps": horizon})
            yield Phase(str(length), settings, length, schedule_start=start)
            start += steps

    @property
    def train_steps(self) -> tuple[int, ...]:
        """The steps of each train length."""
        return self.task.train_steps or (self.training.max_steps,) * len(self.task.train_lengths)


class CacheSettings(_Settings):
    """What is kept of a text (`metatokens shrink`)."""

    keep: Annotated[float, Field(gt=0, lt=1)] = (
        0.125  # the share of the keys and values of a text of this length
    )
    length: Positive = 4096  # tokens, at most the model's limit
    window: Positive | None = None  # in place of that share
    # The key-value heads that keep everything: pairs of a block and a head. None: those that need it most, which take
    # four fifths of the share at most, or are a single one.
    full_heads: Heads | None = None
    number_of_full_heads: AtLeastZero | None = None  # to choose, in place of that number
    # Where meta-tokens are inserted, which are kept too; a rule for landmarks, see `Landmarks`.
    landmarks: LandmarkRule | None = None

    @model_validator(mode="after")
    def _names_heads_or_their_number(self) -> "CacheSettings":
        if self.full_heads is not None and self.number_of_full_heads is not None:
            raise ValueError(
                "cache.full_heads and number_of_full_heads exclude each other: give one of them"
            )
        if (
            self.window is not None
            and self.full_heads is None
            and self.number_of_full_heads is None
        ):
            raise ValueError(
                "cache.window decides no number of full heads: give cache.full_heads or number_of_full_heads too"
            )
        return self


class MixtureSettings(_Settings):
    """What `metatokens shrink` trains on."""

    tokens: Positive = 2048  # of a batch
    # Tokens of a text, at most half of the model's limit. Longer if most of it would be within the window.
    longest: Annotated[int, Field(ge=128)] = 2048
    prose_share: BelowOne = 1 / 3  # of the batches
    replies: AtLeastZero = 128  # of the model itself, if it has a chat template


class ShrinkTestSettings(_Settings):
    """What `metatokens shrink` measures."""

    texts: dict[
        Positive, Positive
    ]  # with new look-ups, by length in tokens; those up to the model's limit are used
    excerpts: Annotated[int, Field(ge=2)]  # of prose, as long as the longest text of the training
    replies: AtLeastZero  # of the model itself to other requests
    choosing: Positive  # texts to choose full heads by
    cost_lengths: tuple[Positive, ...]


class ShrinkRecipe(_Settings):
    """Settings of `metatokens shrink`."""

    cache: CacheSettings = CacheSettings()
    mixture: MixtureSettings = MixtureSettings()
    tests: ShrinkTestSettings
    training: TrainingSettings

    @model_validator(mode="after")
    def _decides_window_and_batches(self) -> "ShrinkRecipe":
        training = self.training
        training.check_decay(training.max_steps)
        if training.text_window is not None:
            raise ValueError(
                "training.text_window is not for shrink: cache.keep decides the window"
            )
        if not (training.lora_rank or training.train_base):
            raise ValueError(
                "shrink trains adapters of the model: give training.lora_rank, or training.train_base=true"
            )
        if training.position_jumps or training.eval_steps:
            raise ValueError(
                "training.position_jumps and eval_steps are not for shrink, which has texts and tests of its own"
            )
        # The loss is a mean over the tokens that count. Prose has most of them, so in a sum of batches look-ups would
        # weigh little.
        if training.batch != 1:
            raise ValueError(
                "shrink runs in one process, with training.per_device_train_batch_size and gradient_accumulation_steps "
                "of 1: mixture.tokens decides the size of a batch"
            )
        return self


@dataclass(frozen=True)
class Phase:
    """A part of a fine-tuning, which starts from the model of the phase before it and writes a checkpoint."""

    name: str  # of its folder
    settings: TrainingSettings
    train_length: int  # tokens of its longest prompts
    # Its entry in `task.stages`; None for a train length.
    curriculum: CurriculumSettings | None = None
    # The index of its first example, so that no two phases read the same ones.
    first_example: int = 0
    schedule_start: int = 0  # the step of the learning rate's schedule at which it begins

    @property
    def examples(self) -> int:
        """How many examples it reads."""
        return self.settings.max_steps * self.settings.batch

    @property
    def bracket_loss(self) -> float | None:
        """The weight of its auxiliary loss, if it has one."""
        return self.curriculum.bracket_loss if self.curriculum else None


Recipe = TypeVar("Recipe", PretrainRecipe, FinetuneRecipe, ShrinkRecipe)


def load_recipe(kind: type[Recipe], source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply overrides.

    Args:
        kind: `PretrainRecipe`, `FinetuneRecipe` or `ShrinkRecipe`.
        source: path of a YAML file, or the name of a bundled recipe.
        overrides: strings such as `training.max_steps=60`; values are read as YAML.

    Raises:
        UserError: if the file is missing or not YAML, or a key or value is not allowed; the message names it.
    """
    settings = _read_yaml(source)
    for override in overrides:
        _apply(override, settings)
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise UserError(f"recipe {source}: {broken_rule(error)}.") from error


def _apply(override: str, settings: dict[str, Any]) -> None:
    """Change one of the nested settings by `section.key=value`."""
    key, equals, value = override.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"--set {override!r} is not of the form section.key=value.")
    *sections, name = key.split(".")
    for section in sections:
        settings = settings.setdefault(section, {})
        if not isinstance(settings, dict):
            raise UserError(f"--set {override!r}: {section} is not a section.")
    try:
        settings[name] = parse_yaml(value)
    except yaml.YAMLError as error:
        raise UserError(f"--set {override!r}: the value is not valid YAML.") from error


def recipe_names() -> list[str]:
    """The names of the bundled recipes."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _PACKAGED.iterdir())


def _read_yaml(source: str) -> dict[str, Any]:
    path = Path(source) if Path(source).is_file() else _PACKAGED / f"{source}.yaml"
    if not path.is_file():
        raise UserError(
            f"no recipe at {source}; give a YAML file or one of: {', '.join(recipe_names())}."
        )
    try:
        settings = parse_yaml(path.read_bytes())
    except (yaml.YAMLError, OSError) as error:
        raise UserError(f"recipe {source} cannot be read as YAML: {one_line(error)}.") from error
    if not isinstance(settings, dict):
        raise UserError(f"recipe {source} must be a mapping of sections.")
    return settings


def parse_yaml(text: str | bytes) -> Any:
    """Parse a YAML text of plain values, lists and mappings.

    Raises:
        YAMLError: if it is anything else, or if a mapping has a key twice: one value would be lost.
    """
    return copy.deepcopy(_parsed(text))


class _LoaderOfUniqueKeys(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value]
        if len(keys) > len(set(keys)):
            raise yaml.YAMLError(f"a mapping has a key twice among {', '.join(keys)}")
        return node


@lru_cache(maxsize=100)  # a plan reads its recipes and overrides hundreds of times
def _parsed(text: str | bytes) -> Any:
    try:
        return yaml.load(text, _LoaderOfUniqueKeys)
    except yaml.YAMLError:
        raise
    except Exception as error:  # PyYAML's converters raise others: `!!int x` a ValueError
        raise yaml.YAMLError(str(error)) from error
