"""What each verb of a plan does, in a worker process. A stage goes on from what an earlier try left."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from metatokens.analysis.rate_distortion import rate_distortion
from metatokens.analysis.residual import residual
from metatokens.analysis.samples import About
from metatokens.analysis.sharpness import sharpness
from metatokens.data.tokenizer import load_tokenizer, meta_token_id
from metatokens.data.writing import write_token_store
from metatokens.errors import UserError
from metatokens.evaluation.accuracy import evaluate, majority_rates, score, test_examples
from metatokens.evaluation.perplexity import held_out_text, perplexity
from metatokens.experiment.plan import PRETRAINED, examples_name
from metatokens.experiment.variants import (
    Preset,
    Variant,
    counts_of,
    drawn_counts,
    extend_recipe,
    finetune_recipe,
    lengths_tested,
    pretrain_recipe,
)
from metatokens.model.checkpoint import fetch_model, load_model, weights_sha256
from metatokens.model.interventions import Intervention, intervene
from metatokens.records import CurvePoint, Measurement, Result, ShownExample
from metatokens.tasks.curriculum import TASKS, documents_for, task_texts
from metatokens.tasks.store import ExampleStore
from metatokens.training.extend import extend
from metatokens.training.finetune import finetune, train_examples, train_source
from metatokens.training.pretrain import pretrain
from metatokens.training.trainer import Probe, Progress

WEIGHTS = "weights_sha256"  # the fact of a stage that trains
MOST_TEXT = 10_000_000  # tokens for perplexity; the held-out part of C4 has 7.8 billion
# What `metatokens analyze` measures and no report shows: half of all lines.
UNREPORTED = {
    "attention_entropy_kept",
    "attention_entropy_zeroed",
    "output_answer_log_probability_change",
    "output_entropy_kept",
    "output_entropy_zeroed",
    "similarity",
    "similarity_to_final",
    "attention_of_final",
    "information",
}
PROBED = 200  # test prompts that a model is probed on while it learns


class Outcome(BaseModel):
    """What a stage leaves in the run's records, weights and examples aside."""

    results: list[Result] = []
    measurements: list[Measurement] = []
    curves: list[CurvePoint] = []
    facts: dict[str, Any] = {}  # for `run.json`


class Workshop:
    """The run folder of a preset. Every public method that takes `progress` is a verb of the plan.

    The folder holds `tokens/` (the store), `examples/TASK` (encoded), and of each variant `models/VARIANT/pretrained`,
    `models/VARIANT/extended` where its context is lengthened, and `models/VARIANT/TASK/LENGTH`.
    """

    def __init__(self, out: Path, name: str, preset: Preset):
        self.out, self.name, self.preset = out, name, preset
        self.variants = {variant.name: variant for variant in preset.variants}

    def tokenize(self, progress: Progress) -> Outcome:
        """Write the token store, its tokenizer trained on the tasks' words too."""
        store = write_token_store(
            self.out / "tokens", self.preset.corpus, self.preset.tokenizer, extra_texts=task_texts()
        )
        corpus = store.manifest.model_dump(mode="json")
        for counts in corpus["splits"].values():
            del counts["shards"]  # of which there may be thousands
        return Outcome(facts={"corpus": corpus})

    def describe_tasks(self, progress: Progress) -> Outcome:
        """Write an example of each task to `examples.jsonl`, and measure the majority rates."""
        tokenizer = self.tokenizer()
        shortest = min(self.preset.test_counts)
        with (self.out / "examples.jsonl").open("w", encoding="utf-8") as file:
            for task in TASKS:
                example = test_examples(
                    task, shortest, 1, tokenizer, condition="paper", documents=self.documents(task)
                )[0]
                file.write(ShownExample.model_validate(example.to_record()).line() + "\n")
        counts = {**self.preset.test_counts, **self.preset.rope_test_counts}
        rates = (majority_rates(task, counts, tokenizer, recipe=self.name) for task in ("segment_counting", "parity"))
        return Outcome(results=list(chain.from_iterable(rates)))

    def draw_tests(self, progress: Progress, *, task: str, condition: str) -> Outcome:
        """Write a task's test examples, encoded, for all models that are tested in the condition."""
        tokenizer, documents = self.tokenizer(), self.documents(task)
        for length, n in drawn_counts(self.preset, task)[condition].items():
            file = self.test_file(task, condition, length)
            if not file.exists():
                tests = test_examples(task, length, n, tokenizer, condition=condition, documents=documents)
                ExampleStore.write(file, tests)
        (self.out / "examples" / task / f"tests-{condition}").touch()
        return Outcome()

    def draw_examples(self, progress: Progress, *, variant: str, task: str) -> Outcome:
        """Write the train examples of a variant, and of those that read the same, encoded."""
        recipe = finetune_recipe(self.preset, self.variants[variant], task)
        source = train_source(recipe, task, self.tokenizer(), self.documents(task))
        folder = self.examples(variant, task)
        for length in recipe.task.train_lengths:
            train_examples(recipe, source, length, folder)
        (folder / "complete").touch()
        return Outcome()

    def pretrain(self, progress: Progress, *, variant: str) -> Outcome:
        """Pretrain one of the models."""
        recipe = pretrain_recipe(self.preset, self.variants[variant], self.out / "tokens")
        folder = self.pretrained(variant)
        pretrain(recipe, folder, progress=progress)
        return self._pretrained(variant, folder)

    def fetch(self, progress: Progress, *, variant: str) -> Outcome:
        """Have a published model here, whose vocabulary must be that of the token store."""
        one = self.variants[variant]
        folder = self.pretrained(variant)
        if load_tokenizer(str(folder)).get_vocab() != self.tokenizer().get_vocab():
            raise UserError(f"{one.published} and the token store {self.out / 'tokens'} have different vocabularies.")
        return Outcome(facts={"parameters": _parameters(folder / "model.safetensors")})

    def extend(self, progress: Progress, *, variant: str) -> Outcome:
        """Lengthen the context of another variant's pretrained model, and pretrain it further."""
        one = self.variants[variant]
        assert one.pretrained_as is not None
        assert one.extension is not None
        short = pretrain_recipe(self.preset, one, self.out / "tokens")
        folder = self.pretrained(variant)
        extend(
            self.pretrained(one.pretrained_as),
            folder,
            factor=one.extension,
            recipe=extend_recipe(self.preset, one, short),
            original_length=short.data.block_size,
            progress=progress,
        )
        return self._pretrained(variant, folder)

    def perplexity(self, progress: Progress, *, variant: str) -> Outcome:
        """Perplexity without inserted meta-tokens and, for models that know them, with: held-out text, and a book."""
        one = self.variants[variant]
        own = pretrain_recipe(self.preset, one, self.out / "tokens").data
        # The same text for all, in the blocks of the plain `meta`.
        data = pretrain_recipe(self.preset, Variant(model="meta"), self.out / "tokens").data
        model, tokenizer = load_model(self.pretrained(variant)), self.tokenizer()
        placements = ["none", own.placement] if own.fraction == data.fraction else ["none"]
        texts = {"held_out": str(self.out / "tokens")} | ({"book": self.preset.book} if self.preset.book else {})
        results = []
        for source, spec in texts.items():
            text = held_out_text(spec, tokenizer, MOST_TEXT)
            for placement in dict.fromkeys(placements):
                results.append(
                    perplexity(
                        model,
                        text,
                        block_size=data.block_size,
                        fraction=data.fraction,
                        placement=placement,
                        name=one.model,
                        source=source,
                        seed=one.seed,
                        recipe=self.recipe_name(one),
                    )
                )
        return Outcome(results=results)

    def finetune(self, progress: Progress, *, variant: str, task: str) -> Outcome:
        """Fine-tune a pretrained model on a task."""
        one = self.variants[variant]
        recipe = finetune_recipe(self.preset, one, task)
        folder, examples = self.out / "models" / variant / task, self.examples(variant, task)
        first, condition = recipe.task.train_lengths[0], recipe.task.condition
        tests = ExampleStore(self.test_file(task, condition, first))[:PROBED]
        every = self.preset.probe_steps.get(task)
        finetune(
            recipe,
            self.pretrained(one.start),
            folder,
            task=task,
            documents=self.documents(task),
            examples=examples,
            progress=progress,
            probe=lambda _, name, __: (
                Probe(every, partial(_probe, tests=tests)) if every and name == str(first) else None
            ),
        )
        curves: list[CurvePoint] = []
        weights: dict[str, str] = {}
        for length, settings in recipe.phases().items():
            weights[str(length)] = weights_sha256(folder / str(length))
            tokens = settings.batch * self.text_tokens(ExampleStore(examples / f"train-{length}.arrow"))
            curves += _curve(folder / str(length), tokens, **self.about_curve(one, task=task, train_length=length))
        return Outcome(curves=curves, facts={WEIGHTS: weights})

    def evaluate(self, progress: Progress, *, variant: str, task: str) -> Outcome:
        """Accuracy of a fine-tuned model at every length, in every condition asked for."""
        results = [
            result
            for model, about in self._tuned(variant, task)
            for condition, counts in counts_of(self.preset, self.variants[variant], task).items()
            for result in evaluate(model, self.tests(task, condition, counts), condition=condition, **about)
        ]
        return Outcome(results=results)

    def intervene(
        self,
        progress: Progress,
        *,
        variant: str,
        task: str,
        interventions: Sequence[str],
        counts: Mapping[int, int],
        noise_seeds: int,
    ) -> Outcome:
        """Accuracy of a fine-tuned model whose input is changed; noise of each seed on a part of the prompts."""
        results = []
        for model, about in self._tuned(variant, task):
            tests = self.tests(task, "paper", counts)
            for change in map(Intervention.parse, interventions):
                seeds = range(noise_seeds) if change.kind == "noise" else [None]
                for seed in seeds:
                    part = (
                        tests if seed is None else {length: each[seed::noise_seeds] for length, each in tests.items()}
                    )
                    with intervene(model, change, seed=seed or 0):
                        results += evaluate(model, part, intervention=str(change), noise_seed=seed, **about)
        return Outcome(results=results)

    def analyze(
        self,
        progress: Progress,
        *,
        variant: str,
        task: str,
        kind: str,
        train_length: int,
        length: int,
        n: int,
        interventions: Sequence[str | None],
    ) -> Outcome:
        """Measure what meta-tokens do inside a fine-tuned model, and keep what a report shows."""
        one = self.variants[variant]
        model = load_model(self.out / "models" / variant / task / str(train_length))
        examples = test_examples(task, length, n, self.tokenizer(), condition="paper", documents=self.documents(task))
        about: About = {
            "model": one.model,
            "task": task,
            "condition": "paper",
            "train_condition": finetune_recipe(self.preset, one, task).task.condition,
            "train_length": train_length,
            "length": length,
            "seed": one.seed,
            "recipe": self.recipe_name(one),
        }
        found: list[Measurement] = []
        for name in interventions:
            if kind == "rate-distortion":
                change = None if name is None else Intervention.parse(name)
                found += rate_distortion(model, examples, about, fits=3, intervention=change, held_out=n // 5)
            else:
                assert name is None  # these take none
                found += {"sharpness": sharpness, "residual": residual}[kind](model, examples, about)
        reported = [one for one in found if one.metric not in UNREPORTED]
        if kind != "sharpness":  # whose changes alone are shown with their spread
            reported = [one.model_copy(update={"quantiles": None}) for one in reported]
        return Outcome(measurements=reported)

    def pretrained(self, variant: str) -> Path:
        """The folder of the model that a variant's fine-tuning starts from."""
        one = self.variants[variant]
        if one.published is not None:
            return fetch_model(Path(one.published))
        return self.out / "models" / variant / PRETRAINED[one.made_by]

    def examples(self, variant: str, task: str) -> Path:
        """The folder of a variant's encoded train examples."""
        return self.out / "examples" / task / examples_name(finetune_recipe(self.preset, self.variants[variant], task))

    def test_file(self, task: str, condition: str, length: int) -> Path:
        """The encoded test examples of one bin of prompt length."""
        return self.out / "examples" / task / f"test-{condition}-{length}.arrow"

    def tests(self, task: str, condition: str, counts: Mapping[int, int]) -> dict[int, Sequence[Any]]:
        """The first examples of each length."""
        return {length: ExampleStore(self.test_file(task, condition, length))[:n] for length, n in counts.items()}

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """That of the token store."""
        return load_tokenizer(str(self.out / "tokens" / "tokenizer"))

    def text_tokens(self, examples: ExampleStore) -> float:
        """Text tokens of an example, on average."""
        marker = meta_token_id(self.tokenizer())
        return sum(int((example.input_ids != marker).sum()) for example in examples) / len(examples)

    def documents(self, task: str) -> Sequence[str]:
        """The texts that a task takes its excerpts from."""
        return documents_for(task, self.preset.corpus)

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

    def _pretrained(self, variant: str, folder: Path) -> Outcome:
        one = self.variants[variant]
        facts = {"parameters": _parameters(folder / "model.safetensors"), WEIGHTS: weights_sha256(folder)}
        about = self.about_curve(one, task=None, train_length=None)
        return Outcome(curves=list(_curve(folder, None, **about)), facts=facts)

    def _tuned(self, variant: str, task: str) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The models of each train length that is tested, and the fields of their results."""
        one = self.variants[variant]
        for length in lengths_tested(self.preset, one, task):
            yield (
                load_model(self.out / "models" / variant / task / str(length)),
                {
                    "task": task,
                    "name": one.model,
                    "seed": one.seed,
                    "train_length": length,
                    "train_condition": finetune_recipe(self.preset, one, task).task.condition,
                    "recipe": self.recipe_name(one),
                },
            )


def carry_out(workshop: Workshop, verb: str, arguments: Mapping[str, Any], progress: Progress) -> Outcome:
    """Call a verb of the workshop."""
    method: Callable[..., Outcome] = getattr(workshop, verb)
    return method(progress, **arguments)


def _probe(model: Any, tests: Sequence[Any]) -> dict[str, float]:
    exact, _ = score(model, tests)
    return {"exact_match": sum(exact) / len(exact), "n": len(exact)}


def _curve(folder: Path, tokens_a_step: float | None, **about: Any) -> Iterator[CurvePoint]:
    """What a run of training says of loss and accuracy; the learning rate and the like stay in its folder."""
    for line in (folder / "curve.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        figures = {name: entry[name] for name in ("loss", "exact_match", "n") if name in entry}
        if figures:
            tokens = None if tokens_a_step is None else round(entry["step"] * tokens_a_step)
            yield CurvePoint(step=entry["step"], text_tokens=tokens, **figures, **about)


def _parameters(weights: Path) -> int:
    with safe_open(weights, framework="np") as file:
        return sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118  (it is no mapping)
