"""What each verb of a plan does, in a worker process. A stage goes on from what an earlier try left."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from metatokens.data.blocks import TokenStore, write_token_store
from metatokens.data.corpus import read_corpus
from metatokens.data.insertion import meta_token_count
from metatokens.data.tokenizer import load_tokenizer
from metatokens.evaluation.accuracy import evaluate, majority_rates, test_examples
from metatokens.evaluation.perplexity import perplexity
from metatokens.evaluation.results import Result
from metatokens.experiment.plan import MODELS, Preset
from metatokens.model.checkpoint import load_model
from metatokens.recipe import FinetuneRecipe, PretrainRecipe, load_recipe
from metatokens.tasks.curriculum import TASKS, TaskData, task_texts
from metatokens.tasks.store import ExampleStore
from metatokens.training.finetune import finetune, train_examples
from metatokens.training.pretrain import pretrain
from metatokens.training.trainer import Progress

COPIED_DOCUMENTS = 500  # at most, of the corpus, for the task `copying`


class Workshop:
    """The run folder of a preset. Every public method is a verb of the plan; what it returns goes into `results.jsonl`.

    The folder holds `tokens/` (the store), `examples/TASK` (encoded), `models/MODEL/pretrained` and
    `models/MODEL/TASK/LENGTH`.
    """

    def __init__(self, out: Path, name: str, preset: Preset):
        self.out, self.name, self.preset = out, name, preset

    def tokenize(self, progress: Progress) -> list[Result]:
        """Write the token store, its tokenizer trained on the tasks' words too."""
        write_token_store(self.out / "tokens", self.preset.corpus, self.preset.tokenizer, extra_texts=task_texts())
        return []

    def describe_tasks(self, progress: Progress) -> list[Result]:
        """Write an example of each task to `examples.jsonl`, and measure the majority rates."""
        tokenizer = load_tokenizer(str(self.out / "tokens" / "tokenizer"))
        shortest = min(self.preset.test_counts)
        with (self.out / "examples.jsonl").open("w", encoding="utf-8") as file:
            for task in TASKS:
                documents = self.documents(task)
                example = test_examples(task, shortest, 1, tokenizer, condition="paper", documents=documents)[0]
                file.write(json.dumps(example.to_record(), ensure_ascii=False) + "\n")
        return [
            result
            for task in ("segment_counting", "parity")
            for result in majority_rates(task, self.preset.test_counts, tokenizer, recipe=self.name)
        ]

    def pretrain(self, progress: Progress, *, model: str) -> list[Result]:
        """Pretrain one of the models."""
        pretrain(pretrain_recipe(self.preset, model, self.out / "tokens"), self.model(model), progress=progress)
        return []

    def perplexity(self, progress: Progress, *, model: str) -> list[Result]:
        """Held-out perplexity without inserted meta-tokens and, for models that know them, with."""
        data = pretrain_recipe(self.preset, "meta", self.out / "tokens").data
        store = TokenStore.open(self.out / "tokens")
        placements = ["none"] if MODELS[model]["placement"] == "none" else ["none", data.placement]
        return [
            perplexity(
                load_model(self.model(model)),
                store.tokens("held_out")[:],
                block_size=data.block_size,
                fraction=data.fraction,
                placement=placement,
                name=model,
                recipe=self.name,
            )
            for placement in placements
        ]

    def draw_examples(self, progress: Progress, *, task: str) -> list[Result]:
        """Write a task's train and test examples, encoded, for all models."""
        recipe = finetune_recipe(self.preset, task)
        tokenizer = load_tokenizer(str(self.out / "tokens" / "tokenizer"))
        documents = self.documents(task)
        source = TaskData(
            task,
            tokenizer=tokenizer,
            condition=recipe.task.condition,
            seed=recipe.training.seed,
            documents=documents,
        )
        for train_length in recipe.task.train_lengths:
            train_examples(recipe, source, train_length, self.examples(task))
        for condition in self.conditions(task):
            for length, count in self.preset.test_counts.items():
                tests = test_examples(task, length, count, tokenizer, condition=condition, documents=documents)
                ExampleStore.write(self.test_file(task, condition, length), tests)
        return []

    def finetune(self, progress: Progress, *, model: str, task: str) -> list[Result]:
        """Fine-tune a pretrained model on a task."""
        finetune(
            finetune_recipe(self.preset, task),
            self.model(model),
            self.model(model, task),
            task=task,
            documents=self.documents(task),
            examples=self.examples(task),
            progress=progress,
        )
        return []

    def evaluate(self, progress: Progress, *, model: str, task: str) -> list[Result]:
        """Accuracy of a fine-tuned model at every length, in every condition asked for."""
        recipe = finetune_recipe(self.preset, task)
        results = []
        for train_length in recipe.task.train_lengths:
            tuned = load_model(self.model(model, task) / str(train_length))
            for condition in self.conditions(task):
                results += evaluate(
                    tuned,
                    {
                        length: ExampleStore(self.test_file(task, condition, length))
                        for length in self.preset.test_counts
                    },
                    task=task,
                    name=model,
                    condition=condition,
                    seed=recipe.training.seed,
                    train_length=train_length,
                    train_condition=recipe.task.condition,
                    recipe=self.name,
                )
        return results

    def model(self, model: str, task: str | None = None) -> Path:
        """The folder of a pretrained model, or of one fine-tuned on a task."""
        return self.out / "models" / model / (task or "pretrained")

    def examples(self, task: str) -> Path:
        """The folder of a task's encoded examples."""
        return self.out / "examples" / task

    def test_file(self, task: str, condition: str, length: int) -> Path:
        """The encoded test examples of one bin of prompt length."""
        return self.examples(task) / f"test-{condition}-{length}.arrow"

    def conditions(self, task: str) -> tuple[str, ...]:
        """The conditions in which a task is tested."""
        return ("paper", *self.preset.extra_conditions.get(task, ()))

    def documents(self, task: str) -> Sequence[str]:
        """What `copying` copies from; nothing for the other tasks."""
        return list(islice(read_corpus(self.preset.corpus), COPIED_DOCUMENTS)) if task == "copying" else ()


def pretrain_recipe(preset: Preset, model: str, tokens: Path) -> PretrainRecipe:
    """A model's pretraining recipe: the preset's, and what sets the model apart, on the same text a block."""
    overrides = [*preset.pretrain_overrides, f"data.tokens={tokens}"]
    overrides.append(f"model.second_attention={MODELS[model]['second_attention']}")
    recipe = load_recipe(PretrainRecipe, preset.pretrain_recipe, overrides)
    data = recipe.data
    if MODELS[model]["placement"] == "none":
        text = data.block_size - meta_token_count(data.block_size, data.fraction)
        data = data.model_copy(update={"placement": "none", "block_size": text})
    return recipe.model_copy(update={"data": data})


def finetune_recipe(preset: Preset, task: str) -> FinetuneRecipe:
    """A task's fine-tuning recipe, the same for every model."""
    overrides = [*preset.finetune_overrides, f"training.max_steps={preset.task_steps[task]}"]
    return load_recipe(FinetuneRecipe, preset.finetune_recipe, overrides)


def carry_out(workshop: Workshop, verb: str, arguments: Mapping[str, Any], progress: Progress) -> list[Result]:
    """Call a verb of the workshop."""
    method: Callable[..., list[Result]] = getattr(workshop, verb)
    return method(progress, **arguments)
