"""What an experiment is made of: models that differ in one thing, the recipes they get, and what is asked of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from metatokens.data.insertion import meta_token_count
from metatokens.recipe import DataSettings, FinetuneRecipe, PretrainRecipe, load_recipe
from metatokens.tasks.curriculum import TASKS

UNMEASURED = "training.eval_steps=0"  # in pretraining, at whose end perplexity is measured

# The baselines and controls by name: what their pretraining and architecture differ in. `pause` reads the same blocks
# as `meta` without the second module; `twin` has the second module over all positions.
MODELS: Mapping[str, dict[str, str]] = {
    "gpt2": {
        "second_attention": "none",
        "placement": "none",
        "description": "no meta-tokens in pretraining, no second attention",
    },
    "pause": {
        "second_attention": "none",
        "placement": "uniform",
        "description": "meta-tokens in pretraining, no second attention",
    },
    "twin": {
        "second_attention": "causal",
        "placement": "uniform",
        "description": "meta-tokens in pretraining, a second causal attention over all positions",
    },
    "meta": {
        "second_attention": "meta",
        "placement": "uniform",
        "description": "meta-tokens in pretraining, meta-attention: the paper's model",
    },
    "gpt-neo": {
        "second_attention": "none",
        "placement": "none",
        "description": "transformers' GPT-Neo at this size, from random weights: no meta-tokens in pretraining",
    },
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One model, pretrained and fine-tuned: one of MODELS with the preset's recipes, but for what is said here."""

    model: str
    position: str = "rope"
    seed: int = 0
    note: str = ""  # names what else sets it apart; filed under the recipe "PRESET/NOTE"
    pretrain_overrides: tuple[str, ...] = ()
    finetune_overrides: tuple[str, ...] = ()
    pretrained_as: str | None = None  # starts from the pretrained model of the variant of that name
    published: str | None = None  # starts from this model, a folder or `hf:NAME`, in place of one made here
    extension: float | None = None  # the factor by which YaRN lengthens the context before fine-tuning
    tasks: tuple[str, ...] = TASKS
    tested: tuple[int, ...] | None = None  # train lengths whose models are tested; all where not given
    priority: int = 1  # lower ones are carried out first; the other tasks wait for list recall

    @property
    def name(self) -> str:
        """The model's name and what differs from rope, seed 0 and the plain recipes."""
        position = "" if self.position == "rope" else self.position
        return "-".join(filter(None, [self.model, position, f"seed{self.seed}" if self.seed else "", self.note]))

    @property
    def description(self) -> str:
        """What it is, for a reader."""
        if self.published is not None:
            return f"{self.published}, as published"
        what = MODELS[self.model]["description"]
        longer = () if self.extension is None else (f"its context lengthened {self.extension:g} times with YaRN",)
        changed = (*self.pretrain_overrides, *longer)
        return f"{what}; but {', '.join(changed)}" if changed else what

    @property
    def start(self) -> str:
        """The variant whose pretrained, or extended, model fine-tuning starts from."""
        return self.name if self.pretrained_as is None or self.extension is not None else self.pretrained_as

    @property
    def made_by(self) -> str:
        """The verb that makes a model of its own for it, if it has one."""
        if self.published is not None:
            return "fetch"
        return "pretrain" if self.extension is None else "extend"


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What fine-tuned models still do when their input is changed at inference."""

    name: str
    tables: tuple[str, ...]  # of the paper
    variants: tuple[str, ...]
    tasks: tuple[str, ...]
    interventions: tuple[str, ...]
    counts: Mapping[int, int]  # test prompts of each length
    noise_seeds: int = 1  # each of them on its own part of the prompts


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What is measured inside fine-tuned models."""

    kind: str  # as `metatokens analyze` names it
    tables: tuple[str, ...]  # and figures of the paper
    variants: tuple[str, ...]
    task: str = "list_recall"
    train_length: int
    length: int  # of the prompts
    n: int
    interventions: tuple[str | None, ...] = (None,)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One experiment's sizes. Every model gets the same text tokens, task prompts and steps."""

    corpus: str
    book: str | None = None  # a second corpus that perplexity is measured on, read whole
    tokenizer: str
    pretrain_recipe: str
    finetune_recipe: str
    extend_recipe: str = ""
    pretrain_overrides: tuple[str, ...] = ()
    finetune_overrides: tuple[str, ...] = ()
    task_overrides: Mapping[str, tuple[str, ...]]  # of the fine-tuning recipe, such as the steps of each task
    test_counts: Mapping[int, int]  # test prompts of each length
    variants: tuple[Variant, ...] = tuple(Variant(model=model) for model in ("gpt2", "pause", "twin", "meta"))
    extra_conditions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of the variants with rope
    extra_condition_limit: int = 1024  # the longest bin in which they are tested
    rope_test_counts: Mapping[int, int] = field(default_factory=dict)  # further bins, of the variants with rope
    probe_steps: Mapping[str, int] = field(default_factory=dict)  # of a task: how often its learning is measured
    ablations: tuple[Ablation, ...] = ()
    analyses: tuple[Analysis, ...] = ()


def pretrain_recipe(sizes: Preset, variant: Variant, tokens: Path) -> PretrainRecipe:
    """A variant's pretraining recipe, on the same text a block as every other's."""
    own = MODELS[variant.model]
    overrides = [
        UNMEASURED,
        *sizes.pretrain_overrides,
        f"data.tokens={tokens}",
        f"model.second_attention={own['second_attention']}",
        f"model.position_embedding={variant.position}",
        f"training.seed={variant.seed}",
        *variant.pretrain_overrides,
    ]
    recipe = load_recipe(PretrainRecipe, sizes.pretrain_recipe, overrides)
    if own["placement"] == "none":
        recipe = recipe.model_copy(update={"data": _without_meta_tokens(recipe.data)})
    return recipe


def extend_recipe(sizes: Preset, variant: Variant, pretrained: PretrainRecipe) -> PretrainRecipe:
    """The recipe of a variant's further pretraining on longer blocks, from that of its pretraining."""
    assert variant.extension is not None
    recipe = load_recipe(PretrainRecipe, sizes.extend_recipe, [UNMEASURED, f"training.seed={variant.seed}"])
    longer = round(variant.extension * pretrained.data.block_size)
    data = pretrained.data.model_copy(update={"block_size": longer})
    return recipe.model_copy(update={"data": data, "model": pretrained.model})


def finetune_recipe(sizes: Preset, variant: Variant, task: str) -> FinetuneRecipe:
    """A variant's fine-tuning recipe for a task."""
    overrides = [*sizes.finetune_overrides, *sizes.task_overrides[task], *variant.finetune_overrides]
    return load_recipe(FinetuneRecipe, sizes.finetune_recipe, [*overrides, f"training.seed={variant.seed}"])


def lengths_tested(sizes: Preset, variant: Variant, task: str) -> tuple[int, ...]:
    """The train lengths whose models are tested."""
    return variant.tested or finetune_recipe(sizes, variant, task).task.train_lengths


def counts_of(sizes: Preset, variant: Variant, task: str) -> dict[str, dict[int, int]]:
    """In which conditions a variant is tested on a task, and on how many prompts of each length."""
    is_rope = variant.position == "rope"
    plain = {**sizes.test_counts, **(sizes.rope_test_counts if is_rope else {})}
    short = {length: n for length, n in sizes.test_counts.items() if length <= sizes.extra_condition_limit}
    extra = sizes.extra_conditions.get(task, ()) if is_rope else ()
    own = finetune_recipe(sizes, variant, task).task.condition  # that it is trained in: at every length
    return {"paper": plain} | dict.fromkeys(extra, short) | {own: plain}


def drawn_counts(sizes: Preset, task: str) -> dict[str, dict[int, int]]:
    """The prompts of each condition and length that the variants are tested on, between them."""
    found: dict[str, dict[int, int]] = {}
    for variant in sizes.variants:
        for condition, own in counts_of(sizes, variant, task).items() if task in variant.tasks else ():
            found.setdefault(condition, {}).update(own)
    return found


def _without_meta_tokens(data: DataSettings) -> DataSettings:
    text = data.block_size - meta_token_count(data.block_size, data.fraction)
    return data.model_copy(update={"placement": "none", "block_size": text})
