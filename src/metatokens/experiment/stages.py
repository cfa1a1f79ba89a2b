"""What each verb of a plan does, in a worker process. A stage goes on from what an earlier try left."""

import json
from collections.abc import Callable, Mapping
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from metatokens.data.blocks import TokenStore, write_token_store
from metatokens.data.tokenizer import load_tokenizer
from metatokens.evaluation.accuracy import evaluate, majority_rates, test_examples
from metatokens.evaluation.perplexity import perplexity
from metatokens.evaluation.results import Result
from metatokens.experiment.plan import Preset, Variant, counts_of, finetune_recipe, pretrain_recipe
from metatokens.model.checkpoint import load_model
from metatokens.tasks.curriculum import TASKS, documents_for, task_texts
from metatokens.tasks.store import ExampleStore
from metatokens.training.finetune import finetune, train_examples, train_source
from metatokens.training.pretrain import pretrain
from metatokens.training.trainer import Progress


class Outcome(BaseModel):
    """What a stage leaves in the run's records, weights and examples aside."""

    results: list[Result] = []
    curves: list[dict[str, Any]] = []  # points of training curves
    facts: dict[str, Any] = {}  # for `run.json`


class Workshop:
    """The run folder of a preset. Every public method is a verb of the plan.

    The folder holds `tokens/` (the store), `examples/TASK` (encoded), `models/VARIANT/pretrained` and
    `models/VARIANT/TASK/LENGTH`.
    """

    def __init__(self, out: Path, name: str, preset: Preset):
        self.out, self.name, self.preset = out, name, preset
        self.variants = {variant.name: variant for variant in preset.variants}

    def tokenize(self, progress: Progress) -> Outcome:
        """Write the token store, its tokenizer trained on the tasks' words too."""
        store = write_token_store(
            self.out / "tokens", self.preset.corpus, self.preset.tokenizer, extra_texts=task_texts()
        )
        return Outcome(facts={"corpus": store.manifest.model_dump(mode="json")})

    def describe_tasks(self, progress: Progress) -> Outcome:
        """Write an example of each task to `examples.jsonl`, and measure the majority rates."""
        tokenizer = self.tokenizer()
        shortest = min(self.preset.test_counts)
        with (self.out / "examples.jsonl").open("w", encoding="utf-8") as file:
            for task in TASKS:
                documents = documents_for(task, self.preset.corpus)
                example = test_examples(task, shortest, 1, tokenizer, condition="paper", documents=documents)[0]
                file.write(json.dumps(example.to_record(), ensure_ascii=False) + "\n")
        rates = (
            majority_rates(task, self.preset.test_counts, tokenizer, recipe=self.name)
            for task in ("segment_counting", "parity")
        )
        return Outcome(results=list(chain.from_iterable(rates)))

    def draw_examples(self, progress: Progress, *, task: str) -> Outcome:
        """Write a task's train and test examples, encoded, for all models."""
        tokenizer, documents = self.tokenizer(), documents_for(task, self.preset.corpus)
        for variant in self.preset.variants:
            if task not in variant.tasks:
                continue
            recipe = finetune_recipe(self.preset, variant, task)
            source = train_source(recipe, task, tokenizer, documents)
            for length in recipe.task.train_lengths:
                train_examples(recipe, source, length, self.examples(variant, task))
            for condition, counts in counts_of(self.preset, variant, task).items():
                for length, n in counts.items():
                    file = self.test_file(task, condition, length)
                    if not file.exists():
                        tests = test_examples(task, length, n, tokenizer, condition=condition, documents=documents)
                        ExampleStore.write(file, tests)
        (self.out / "examples" / task / "complete").touch()
        return Outcome()

    def pretrain(self, progress: Progress, *, variant: str) -> Outcome:
        """Pretrain one of the models."""
        one = self.variants[variant]
        recipe = pretrain_recipe(self.preset, one, self.out / "tokens")
        folder = self.model(variant)
        pretrain(recipe, folder, progress=progress)
        about = self.about_curve(one, task=None, train_length=None)
        parameters = _parameters(folder / "model.safetensors")
        return Outcome(curves=_curve(folder, **about), facts={"parameters": parameters})

    def perplexity(self, progress: Progress, *, variant: str) -> Outcome:
        """Held-out perplexity without inserted meta-tokens and, for models that know them, with."""
        one = self.variants[variant]
        own = pretrain_recipe(self.preset, one, self.out / "tokens").data
        # The same text for all, in the blocks of the plain `meta`.
        data = pretrain_recipe(self.preset, Variant(model="meta"), self.out / "tokens").data
        store = TokenStore.open(self.out / "tokens")
        placements = ["none", own.placement] if own.fraction == data.fraction else ["none"]
        results = [
            perplexity(
                load_model(self.model(variant)),
                store.tokens("held_out")[:],
                block_size=data.block_size,
                fraction=data.fraction,
                placement=placement,
                name=one.model,
                seed=one.seed,
                recipe=self.recipe_name(one),
            )
            for placement in dict.fromkeys(placements)
        ]
        return Outcome(results=results)

    def finetune(self, progress: Progress, *, variant: str, task: str) -> Outcome:
        """Fine-tune a pretrained model on a task."""
        one = self.variants[variant]
        recipe = finetune_recipe(self.preset, one, task)
        folder = self.model(variant, task)
        finetune(
            recipe,
            self.model(one.pretrained_as or variant),
            folder,
            task=task,
            documents=documents_for(task, self.preset.corpus),
            examples=self.examples(one, task),
            progress=progress,
        )
        curves = [
            _curve(folder / str(length), **self.about_curve(one, task=task, train_length=length))
            for length in recipe.task.train_lengths
        ]
        return Outcome(curves=list(chain.from_iterable(curves)))

    def evaluate(self, progress: Progress, *, variant: str, task: str) -> Outcome:
        """Accuracy of a fine-tuned model at every length, in every condition asked for."""
        one = self.variants[variant]
        recipe = finetune_recipe(self.preset, one, task)
        results = []
        for train_length in recipe.task.train_lengths:
            tuned = load_model(self.model(variant, task) / str(train_length))
            for condition, counts in counts_of(self.preset, one, task).items():
                results += evaluate(
                    tuned,
                    {length: ExampleStore(self.test_file(task, condition, length)) for length in counts},
                    task=task,
                    name=one.model,
                    condition=condition,
                    seed=one.seed,
                    train_length=train_length,
                    train_condition=recipe.task.condition,
                    recipe=self.recipe_name(one),
                )
        return Outcome(results=results)

    def model(self, variant: str, task: str | None = None) -> Path:
        """The folder of a pretrained model, or of one fine-tuned on a task."""
        return self.out / "models" / variant / (task or "pretrained")

    def examples(self, variant: Variant, task: str) -> Path:
        """The folder of a task's encoded train examples: the same for all models of a seed and training condition."""
        recipe = finetune_recipe(self.preset, variant, task)
        steps = "-".join(str(settings.max_steps) for settings in recipe.phases().values())
        settings = f"{recipe.task.condition}-seed{variant.seed}-{steps}"
        return self.out / "examples" / task / settings

    def test_file(self, task: str, condition: str, length: int) -> Path:
        """The encoded test examples of one bin of prompt length."""
        return self.out / "examples" / task / f"test-{condition}-{length}.arrow"

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """That of the token store."""
        return load_tokenizer(str(self.out / "tokens" / "tokenizer"))

    def recipe_name(self, variant: Variant) -> str:
        """What a variant's results are filed under."""
        return f"{self.name}/{variant.note}" if variant.note else self.name

    def about_curve(self, variant: Variant, **run: Any) -> dict[str, Any]:
        """The fields of a curve's points that say which run it is of."""
        return {
            "model": variant.model,
            "position_embedding": variant.position,
            "recipe": self.recipe_name(variant),
            "seed": variant.seed,
            **run,
        }


def carry_out(workshop: Workshop, verb: str, arguments: Mapping[str, Any], progress: Progress) -> Outcome:
    """Call a verb of the workshop."""
    method: Callable[..., Outcome] = getattr(workshop, verb)
    return method(progress, **arguments)


def _curve(folder: Path, **about: Any) -> list[dict[str, Any]]:
    lines = (folder / "curve.jsonl").read_text(encoding="utf-8").splitlines()
    return [about | json.loads(line) for line in lines]


def _parameters(weights: Path) -> int:
    with safe_open(weights, framework="np") as file:
        return sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118  (it is no mapping)
