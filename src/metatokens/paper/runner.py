"""The work of a plan's stages, done in a worker process.

Each public method of `Runner` whose first argument is `progress` does one kind of stage. It gets the subject and the
options of the stage (plan.py), uses the library as the commands do, and returns an `Outcome`. Weights and examples go
into the run's folder; the process that runs the plan writes the records of the outcome into the run's files
(run_log.py). A stage that was cut off starts again and resumes from the files that it left.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metatokens.analysis.rate_distortion import rate_distortion
from metatokens.analysis.residual import residual
from metatokens.analysis.sharpness import sharpness
from metatokens.checkpoint import fetch_model, load_base, load_model, save_model, weights_sha256
from metatokens.data.tokenizer import load_tokenizer, meta_token_id
from metatokens.data.writing import write_token_store
from metatokens.errors import UserError
from metatokens.evaluation.accuracy import draw_test_examples, evaluate, shortcut_rates
from metatokens.evaluation.perplexity import held_out_text, perplexity
from metatokens.evaluation.predictions import answer
from metatokens.files import write_whole
from metatokens.looking.look import look
from metatokens.looking.page import to_html
from metatokens.model.interventions import Intervention, intervene
from metatokens.paper.plan import PRETRAINED, Stage, examples_name
from metatokens.paper.records import LOOKS, CurvePoint
from metatokens.paper.variants import Preset, TrainedModel, finetune_recipe, lengths_tested, pretrain_recipe
from metatokens.recipe import FinetuneRecipe, Phase, PretrainRecipe
from metatokens.records import About, ExampleRecord, Measurement, Result, read_lines
from metatokens.retrofit.injection import add_meta_attention
from metatokens.tasks import TASKS
from metatokens.tasks.curriculum import documents_for, task_texts
from metatokens.tasks.example import Encoded
from metatokens.tasks.example_store import ExampleStore
from metatokens.tasks.landmarks_alone import LandmarksAlone
from metatokens.training.examples import train_examples, train_source
from metatokens.training.extend import extend
from metatokens.training.finetune import finetune
from metatokens.training.pretrain import pretrain
from metatokens.training.probe import Probe, exact_match
from metatokens.training.trainer import Progress

WEIGHTS = "weights_sha256"  # the fact that holds the checksums of a training stage's weights
MOST_TEXT = 10_000_000  # tokens for perplexity; the held-out part of C4 has 7.8 billion
PROBED = 200  # test prompts of a learning curve


class Outcome(BaseModel):
    """The records that a stage returns."""

    results: list[Result] = []
    measurements: list[Measurement] = []
    curves: list[CurvePoint] = []
    facts: dict[str, Any] = {}  # for `run.json`


class Runner:
    """Carries out a preset's stages in the run's folder.

    The folder holds `tokens/` (the token store), `examples/TASK/` (encoded examples), `models/NAME/pretrained` or
    `models/NAME/extended`, `models/NAME/TASK/LENGTH` and `looks/TASK.html` (pages of attention).
    """

    def __init__(self, out: Path, name: str, preset: Preset):
        self.out, self.name, self.preset = out, name, preset
        self.models = {model.name: model for model in preset.models}

    def carry_out(self, stage: Stage, progress: Progress) -> Outcome:
        """Call the stage's method."""
        method: Callable[..., Outcome] = getattr(self, stage.method)
        return method(progress, **stage.subject, **stage.options)

    def tokenize(self, progress: Progress) -> Outcome:
        """Write the token store, with a tokenizer trained on the tasks' words too."""
        store = write_token_store(
            self.out / "tokens", self.preset.corpus, self.preset.tokenizer, extra_texts=task_texts()
        )
        corpus = store.manifest.model_dump(mode="json")
        for counts in corpus["splits"].values():
            del counts["shards"]  # there may be thousands
        return Outcome(facts={"corpus": corpus})

    def describe_tasks(self, progress: Progress) -> Outcome:
        """Write an example of each task to `examples.jsonl`."""
        tokenizer, shortest = self.tokenizer(), min(self.preset.test_counts)
        with (self.out / "examples.jsonl").open("w", encoding="utf-8") as file:
            for task in TASKS:
                [example] = draw_test_examples(
                    task, shortest, 1, tokenizer, condition="paper", documents=self.documents(task)
                )
                file.write(ExampleRecord.model_validate(example.to_record()).line() + "\n")
        return Outcome()

    def draw_tests(self, progress: Progress, *, task: str, condition: str, counts: Mapping[int, int]) -> Outcome:
        """Write a task's encoded test examples in a condition, and measure what shortcuts score on them."""
        tokenizer, documents = self.tokenizer(), self.documents(task)
        tests = {
            length: draw_test_examples(task, length, n, tokenizer, condition=condition, documents=documents)
            for length, n in counts.items()
        }
        for length, examples in tests.items():
            ExampleStore.write(self.test_file(task, condition, length), examples)
        (self.out / "examples" / task / f"tests-{condition}").touch()
        return Outcome(results=shortcut_rates(task, condition, tests, tokenizer, documents, recipe=self.name))

    def draw_examples(self, progress: Progress, *, task: str, recipe: FinetuneRecipe) -> Outcome:
        """Write a recipe's encoded training examples, which other recipes may share."""
        source = train_source(recipe, task, self.tokenizer(), self.documents(task))
        folder = self.examples(task, recipe)
        for phase in recipe.phases():
            train_examples(recipe, source, phase, folder)
        (folder / "complete").touch()
        return Outcome()

    def pretrain(self, progress: Progress, *, model: TrainedModel, recipe: PretrainRecipe) -> Outcome:
        """Pretrain a model."""
        folder = self.pretrained(model)
        pretrain(self._here(recipe), folder, progress=progress)
        return self._pretrained(model, folder)

    def fetch(self, progress: Progress, *, model: TrainedModel, published: str) -> Outcome:
        """Give a published model a meta-token; its vocabulary must be that of the token store."""
        source, folder = fetch_model(Path(published)), self.pretrained(model)
        tokenizer = load_tokenizer(str(source))
        if tokenizer.get_vocab() != self.tokenizer().get_vocab():
            raise UserError(f"{published} and the token store {self.out / 'tokens'} have different vocabularies.")
        folder.mkdir(parents=True, exist_ok=True)
        save_model(add_meta_attention(load_base(source), tokenizer, layers=[]), tokenizer, folder)
        return Outcome(facts={"parameters": _parameters(folder / "model.safetensors")})

    def extend(self, progress: Progress, *, model: TrainedModel, recipe: PretrainRecipe, factor: float) -> Outcome:
        """Extend the context of another pretrained model, and pretrain it further."""
        assert model.pretrained_as is not None
        folder = self.pretrained(model)
        extend(
            self.pretrained(self.models[model.pretrained_as]),
            folder,
            factor=factor,
            recipe=self._here(recipe),
            original_length=pretrain_recipe(self.preset, model).data.block_size,
            progress=progress,
        )
        return self._pretrained(model, folder)

    def perplexity(self, progress: Progress, *, model: TrainedModel) -> Outcome:
        """Perplexity on held-out text and a book, if any: without meta-tokens, and in the model's own placement.

        A model whose share of meta-tokens differs from that of the plain `meta` is measured only without meta-tokens.
        """
        own = pretrain_recipe(self.preset, model).data
        # All models read the same text, in the blocks of the plain `meta`.
        data = pretrain_recipe(self.preset, TrainedModel(model="meta")).data
        pretrained, tokenizer = load_model(self.pretrained(model)), self.tokenizer()
        placements = ["none", own.placement] if own.fraction == data.fraction else ["none"]
        texts = {"held_out": str(self.out / "tokens")} | ({"book": self.preset.book} if self.preset.book else {})
        results = []
        for source, spec in texts.items():
            text = held_out_text(spec, tokenizer, MOST_TEXT)
            for placement in dict.fromkeys(placements):
                results.append(
                    perplexity(
                        pretrained,
                        text,
                        model.about(self.name),
                        block_size=data.block_size,
                        fraction=data.fraction,
                        placement=placement,
                        source=source,
                    )
                )
        return Outcome(results=results)

    def finetune(
        self, progress: Progress, *, model: TrainedModel, task: str, recipe: FinetuneRecipe, probe_steps: int | None
    ) -> Outcome:
        """Fine-tune a pretrained model on a task; its learning curve covers all phases up to the first train length."""
        folder, examples = self.out / "models" / model.name / task, self.examples(task, recipe)
        first, condition = recipe.task.train_lengths[0], recipe.task.condition
        tests, sees = ExampleStore(self.test_file(task, condition, first))[:PROBED], recipe.task.question_sees

        def probe(model: PreTrainedModel, phase: Phase) -> Probe | None:
            if not probe_steps or phase.train_length != first:
                return None
            alone = LandmarksAlone(model, self.tokenizer()) if sees else None
            return Probe(probe_steps, lambda model: {"exact_match": exact_match(model, tests, alone), "n": len(tests)})

        finetune(
            recipe,
            self.pretrained(self.models[model.start]),
            folder,
            task=task,
            documents=self.documents(task),
            examples=examples,
            progress=progress,
            probe=probe,
        )
        curves: list[CurvePoint] = []
        weights: dict[str, str] = {}
        steps, seen = 0, 0.0
        for phase in recipe.phases():
            if phase.train_length != first:
                steps, seen = 0, 0.0
            tokens = phase.settings.batch * self.text_tokens(ExampleStore(examples / phase.file))
            about = model.about(self.name, task=task, train_length=phase.train_length)
            curves += _curve(folder / phase.name, about, tokens, steps, seen)
            done = _logged(folder / phase.name)[-1]["step"]
            steps, seen = steps + done, seen + done * tokens
            if phase.curriculum is None:
                weights[phase.name] = weights_sha256(folder / phase.name)
        return Outcome(curves=curves, facts={WEIGHTS: weights})

    def evaluate(
        self,
        progress: Progress,
        *,
        model: TrainedModel,
        task: str,
        counts: Mapping[str, Mapping[int, int]],
        train_lengths: Sequence[int],
        ratio: int | None = None,
        question_sees: str | None = None,
    ) -> Outcome:
        """Accuracy of a fine-tuned model, by condition and length, up to `ratio` times the train length."""
        results = []
        for tuned, about in self._tuned(model, task, train_lengths):
            longest = math.inf if ratio is None else ratio * (about.train_length or 0)
            alone = LandmarksAlone(tuned, self.tokenizer()) if question_sees else None
            for condition, own in counts.items():
                tests = self.tests(task, condition, {length: n for length, n in own.items() if length <= longest})
                measured = evaluate(tuned, tests, about.model_copy(update={"condition": condition}), alone=alone)
                results += [self._with_answer(result, tuned, tests, alone) for result in measured]
        return Outcome(results=results)

    def intervene(
        self,
        progress: Progress,
        *,
        model: TrainedModel,
        task: str,
        interventions: Sequence[str],
        counts: Mapping[int, int],
        noise_seeds: int,
    ) -> Outcome:
        """Accuracy of a fine-tuned model under interventions; each seed of a noise gets another part of the prompts."""
        results = []
        for tuned, about in self._tuned(model, task, lengths_tested(self.preset, model, task)):
            tests = self.tests(task, "paper", counts)
            for change in map(Intervention.parse, interventions):
                for seed in range(noise_seeds) if change.is_random else [None]:
                    part = (
                        tests if seed is None else {length: each[seed::noise_seeds] for length, each in tests.items()}
                    )
                    changed = about.model_copy(update={"intervention": str(change), "noise_seed": seed})
                    with intervene(tuned, change, seed=seed or 0):
                        results += evaluate(tuned, part, changed)
        return Outcome(results=results)

    def analyze(
        self,
        progress: Progress,
        *,
        model: TrainedModel,
        task: str,
        kind: str,
        train_length: int,
        length: int,
        n: int,
        interventions: Sequence[str | None],
    ) -> Outcome:
        """Run one of the analyses on a fine-tuned model."""
        [(tuned, about)] = self._tuned(model, task, [train_length])
        about = about.model_copy(update={"length": length})
        examples = draw_test_examples(
            task, length, n, self.tokenizer(), condition="paper", documents=self.documents(task)
        )
        if kind == "sharpness":
            return Outcome(measurements=sharpness(tuned, examples, about))
        if kind == "residual":
            found = residual(tuned, examples, about)
        else:
            found = [
                measurement
                for change in (None if name is None else Intervention.parse(name) for name in interventions)
                for measurement in rate_distortion(tuned, examples, about, fits=3, intervention=change, held_out=n // 5)
            ]
        # Only the changes that sharpness measures keep their quantiles; no table or figure reads them.
        return Outcome(measurements=[one.model_copy(update={"quantiles": None}) for one in found])

    def look(self, progress: Progress, *, task: str, trained: Mapping[str, int]) -> Outcome:
        """Write a page of the models' attention in the example that `describe_tasks` wrote."""
        shown = next(one for one in read_lines(self.out / "examples.jsonl", ExampleRecord) if one.task == task)
        looks = [
            look(
                load_model(self.out / "models" / name / task / str(length)),
                self.tokenizer(),
                shown.prompt,
                shown.markers,
                name=name,
            )
            for name, length in trained.items()
        ]
        page = self.out / LOOKS / f"{task}.html"
        page.parent.mkdir(exist_ok=True)
        write_whole(page, to_html(looks).encode())
        return Outcome()

    def _with_answer(
        self,
        result: Result,
        model: PreTrainedModel,
        tests: Mapping[int, Sequence[Encoded]],
        alone: LandmarksAlone | None,
    ) -> Result:
        """A result with the model's answer to its first prompt, if that is the one that `describe_tasks` wrote."""
        shortest = min(self.preset.test_counts)
        is_shown = (result.condition, result.length, result.metric) == ("paper", shortest, "exact_match")
        if not is_shown or result.value is None:
            return result
        said = answer(model, tests[shortest][0], self.tokenizer(), alone)
        return result.model_copy(update={"answer": said})

    def pretrained(self, model: TrainedModel) -> Path:
        """The folder of a model before fine-tuning."""
        return self.out / "models" / model.name / PRETRAINED[model.made_by]

    def examples(self, task: str, recipe: FinetuneRecipe) -> Path:
        """The folder of a recipe's encoded training examples."""
        return self.out / "examples" / task / examples_name(recipe)

    def test_file(self, task: str, condition: str, length: int) -> Path:
        """The file of encoded test examples of one length."""
        return self.out / "examples" / task / f"test-{condition}-{length}.arrow"

    def tests(self, task: str, condition: str, counts: Mapping[int, int]) -> dict[int, Sequence[Any]]:
        """The first test examples of each length."""
        return {length: ExampleStore(self.test_file(task, condition, length))[:n] for length, n in counts.items()}

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The token store's tokenizer."""
        return load_tokenizer(str(self.out / "tokens" / "tokenizer"))

    def text_tokens(self, examples: ExampleStore) -> float:
        """The mean number of text tokens of an example."""
        marker = meta_token_id(self.tokenizer())
        return sum(int((np.asarray(example.input_ids) != marker).sum()) for example in examples) / len(examples)

    def documents(self, task: str) -> Sequence[str]:
        """The texts from which a task takes its excerpts."""
        return documents_for(task, self.preset.corpus)

    def _here(self, recipe: PretrainRecipe) -> PretrainRecipe:
        """The recipe with this run's tokens."""
        return recipe.model_copy(update={"data": recipe.data.model_copy(update={"tokens": self.out / "tokens"})})

    def _pretrained(self, model: TrainedModel, folder: Path) -> Outcome:
        facts = {"parameters": _parameters(folder / "model.safetensors"), WEIGHTS: weights_sha256(folder)}
        return Outcome(curves=list(_curve(folder, model.about(self.name))), facts=facts)

    def _tuned(self, model: TrainedModel, task: str, train_lengths: Sequence[int]) -> Iterator[tuple[Any, About]]:
        """The fine-tuned models of some train lengths, and the fields of their results in the condition `paper`."""
        trained = {"task": task, "train_condition": finetune_recipe(self.preset, model, task).task.condition}
        for length in train_lengths:
            about = model.about(self.name, condition="paper", train_length=length, **trained)
            yield load_model(self.out / "models" / model.name / task / str(length)), about


def _curve(
    folder: Path, about: About, tokens_a_step: float | None = None, steps: int = 0, seen: float = 0.0
) -> Iterator[CurvePoint]:
    """The loss and accuracy that a training logged, after `steps` and `seen` text tokens of earlier phases."""
    for entry in _logged(folder):
        figures = {name: entry[name] for name in ("loss", "exact_match", "n") if name in entry}
        if figures:
            tokens = None if tokens_a_step is None else round(seen + entry["step"] * tokens_a_step)
            yield CurvePoint(**about.present_fields(step=steps + entry["step"], text_tokens=tokens), **figures)


def _logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text(encoding="utf-8").splitlines()]


def _parameters(weights: Path) -> int:
    with safe_open(weights, framework="np") as file:
        return sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118  (it is no mapping)
