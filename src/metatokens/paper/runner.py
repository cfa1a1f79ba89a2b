"""The work of a plan's stages, done in a worker process.

Each public method of `Runner` whose first argument is `progress` does one kind of stage. It gets the subject and the
options of the stage (plan.py), uses the library as the commands do, and returns an `Outcome`. Weights go into the run's
folder; the process that runs the plan writes the records of the outcome into the run's files (run_log.py). A stage that
was cut off starts again and resumes from the files that it left. Examples are drawn where they are read, since any
process draws the same ones.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metatokens.analysis.analyses import ANALYSES
from metatokens.checkpoint import fetch_model, load_base, load_model, save_model, weights_sha256
from metatokens.data.tokenizer import load_tokenizer
from metatokens.data.writing import write_token_store
from metatokens.errors import UserError
from metatokens.evaluation.accuracy import draw_test_examples, evaluate, shortcut_rates
from metatokens.evaluation.perplexity import held_out_text, perplexity
from metatokens.evaluation.predictions import answer
from metatokens.files import write_whole
from metatokens.looking.look import look
from metatokens.looking.page import to_html
from metatokens.model.interventions import Intervention, intervene
from metatokens.paper.plan import Stage
from metatokens.paper.records import LOOKS, CurvePoint
from metatokens.paper.variants import (
    Counts,
    CountsByCondition,
    Preset,
    TrainedModel,
    finetune_recipe,
    lengths_tested,
    pretrain_recipe,
    up_to,
    with_data,
)
from metatokens.recipe import FinetuneRecipe, Phase, PretrainRecipe
from metatokens.records import About, ExampleRecord, Measurement, Result, read_lines
from metatokens.retrofit.injection import add_meta_attention
from metatokens.tasks import TASKS
from metatokens.tasks.curriculum import documents_for, task_texts
from metatokens.tasks.example import Encoded, Example
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

Tests = Mapping[int, Sequence[Example]]
"""Test examples by length."""


class Outcome(BaseModel):
    """The records that a stage returns, and the time that it took."""

    results: list[Result] = []
    measurements: list[Measurement] = []
    curves: list[CurvePoint] = []
    facts: dict[str, Any] = {}  # for `run.json`
    seconds: float = 0.0  # by the clock
    cpu_seconds: float = 0.0  # of one core


class Runner:
    """Carries out a preset's stages in the run's folder.

    The folder holds `tokens/` (the token store), `models/NAME/pretrained` or `models/NAME/extended`,
    `models/NAME/TASK/LENGTH` and `looks/TASK.html` (pages of attention).
    """

    def __init__(self, out: Path, name: str, preset: Preset):
        self.out, self.name, self.preset = out, name, preset

    def carry_out(self, stage: Stage, progress: Progress) -> Outcome:
        """Call the stage's method."""
        method: Callable[..., Outcome] = getattr(self, stage.method)
        return method(progress, **stage.subject, **stage.options)

    # --- The stages

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
        with (self.out / "examples.jsonl").open("w", encoding="utf-8") as file:
            for task in TASKS:
                [example] = self._draw(task, "paper", min(self.preset.test_counts), 1)
                file.write(ExampleRecord.model_validate(example.to_record()).line() + "\n")
        return Outcome()

    def draw_tests(
        self, progress: Progress, *, task: str, condition: str, counts: Counts
    ) -> Outcome:
        """Draw a task's test examples in a condition, and measure what shortcuts score on them."""
        tests = self._tests(task, condition, counts)
        rates = shortcut_rates(
            task, condition, tests, self._tokenizer(), self._documents(task), recipe=self.name
        )
        return Outcome(results=rates)

    def pretrain(
        self, progress: Progress, *, model: TrainedModel, recipe: PretrainRecipe
    ) -> Outcome:
        """Pretrain a model."""
        pretrain(self._with_tokens(recipe), self.out / model.weights, progress=progress)
        return self._pretrained(model)

    def fetch(self, progress: Progress, *, model: TrainedModel, published: str) -> Outcome:
        """Give a published model a meta-token; its vocabulary must be that of the token store."""
        source = fetch_model(Path(published))
        tokenizer = load_tokenizer(str(source))
        if tokenizer.get_vocab() != self._tokenizer().get_vocab():
            raise UserError(
                f"{published} and the token store {self.out / 'tokens'} have different vocabularies."
            )
        folder = self.out / model.weights
        folder.mkdir(parents=True, exist_ok=True)
        save_model(add_meta_attention(load_base(source), tokenizer, layers=[]), tokenizer, folder)
        return Outcome(facts={"parameters": _parameters(folder)})

    def extend(
        self, progress: Progress, *, model: TrainedModel, recipe: PretrainRecipe, factor: float
    ) -> Outcome:
        """Extend the context of another pretrained model, and pretrain it further."""
        assert model.pretrained_as is not None
        extend(
            self.out / self.preset.models_by_name[model.pretrained_as].weights,
            self.out / model.weights,
            factor=factor,
            recipe=self._with_tokens(recipe),
            original_length=pretrain_recipe(self.preset, model).data.block_size,
            progress=progress,
        )
        return self._pretrained(model)

    def perplexity(self, progress: Progress, *, model: TrainedModel) -> Outcome:
        """Perplexity on held-out text and a book, if any: without meta-tokens, and in the model's own placement.

        A model whose share of meta-tokens differs from that of the plain `meta` is measured only without meta-tokens.
        """
        trained_on = pretrain_recipe(self.preset, model).data
        # All models read the same text, in the blocks of the plain `meta`.
        blocks = pretrain_recipe(self.preset, TrainedModel(model="meta")).data
        placements = ["none"]
        if trained_on.placement != "none" and trained_on.fraction == blocks.fraction:
            placements.append(trained_on.placement)
        texts = {"held_out": str(self.out / "tokens")}
        if self.preset.book:
            texts["book"] = self.preset.book
        pretrained = load_model(self.out / model.weights)
        results = []
        for source, corpus in texts.items():
            text = held_out_text(corpus, self._tokenizer(), MOST_TEXT)
            for placement in placements:
                result = perplexity(
                    pretrained,
                    text,
                    model.subject(self.name).model_copy(update={"text": source}),
                    block_size=blocks.block_size,
                    fraction=blocks.fraction,
                    placement=placement,
                )
                results.append(result)
        return Outcome(results=results)

    def finetune(
        self,
        progress: Progress,
        *,
        model: TrainedModel,
        task: str,
        recipe: FinetuneRecipe,
        probe_steps: int | None,
    ) -> Outcome:
        """Fine-tune a pretrained model on a task; its learning curve covers all phases up to the first train length."""
        folder = self.out / "models" / model.name / task
        finetune(
            recipe,
            self.out / self.preset.models_by_name[model.start].weights,
            folder,
            task=task,
            documents=self._documents(task),
            draw=partial(_train_examples, self._tokenizer_folder, self.preset.corpus, task, recipe),
            progress=progress,
            probe=self._probing(model, task, recipe, probe_steps) if probe_steps else None,
        )
        tuned = [phase.name for phase in recipe.phases() if phase.curriculum is None]
        return Outcome(
            curves=list(self._learning_curve(model, task, recipe, folder)),
            facts={WEIGHTS: {name: weights_sha256(folder / name) for name in tuned}},
        )

    def evaluate(
        self,
        progress: Progress,
        *,
        model: TrainedModel,
        task: str,
        counts: CountsByCondition,
        train_lengths: Sequence[int],
        ratio: float | None = None,
        question_sees: str | None = None,
    ) -> Outcome:
        """Accuracy of a fine-tuned model, by condition and length, up to `ratio` times the train length."""
        results = []
        for train_length in train_lengths:
            tuned, subject = self._tuned(model, task, train_length)
            longest = math.inf if ratio is None else ratio * train_length
            alone = LandmarksAlone(tuned, self._tokenizer()) if question_sees else None
            for condition, counts_by_length in counts.items():
                tests = self._tests(task, condition, up_to(longest, counts_by_length))
                measured = evaluate(
                    tuned, tests, subject.model_copy(update={"condition": condition}), alone=alone
                )
                results += [self._with_answer(result, tuned, tests, alone) for result in measured]
        return Outcome(results=results)

    def intervene(
        self,
        progress: Progress,
        *,
        model: TrainedModel,
        task: str,
        interventions: Sequence[str],
        counts: Counts,
    ) -> Outcome:
        """Accuracy of a fine-tuned model under interventions; noise is drawn once, for all prompts."""
        tests = self._tests(task, "paper", counts)
        results = []
        for train_length in lengths_tested(self.preset, model, task):
            tuned, subject = self._tuned(model, task, train_length)
            for name in interventions:
                changed = subject.model_copy(update={"intervention": name})
                with intervene(tuned, Intervention.parse(name)):
                    results += evaluate(tuned, tests, changed)
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
        tuned, subject = self._tuned(model, task, train_length)
        examples = self._draw(task, "paper", length, n)
        measurements: list[Measurement] = []
        for name in interventions:
            change = None if name is None else Intervention.parse(name)
            update = {"length": length, "intervention": name}
            with intervene(tuned, change):
                measurements += ANALYSES[kind](tuned, examples, subject.model_copy(update=update))
        return Outcome(measurements=measurements)

    def look(self, progress: Progress, *, task: str, trained: Mapping[str, int]) -> Outcome:
        """Write a page of the models' attention in the example that `describe_tasks` wrote."""
        examples = read_lines(self.out / "examples.jsonl", ExampleRecord)
        example = next(example for example in examples if example.task == task)
        looks = []
        for name, length in trained.items():
            model = load_model(self.out / "models" / name / task / str(length))
            looks.append(look(model, self._tokenizer(), example.prompt, example.markers, name=name))
        page = self.out / LOOKS / f"{task}.html"
        page.parent.mkdir(exist_ok=True)
        write_whole(page, to_html(looks).encode())
        return Outcome()

    # --- What they share

    @property
    def _tokenizer_folder(self) -> str:
        return str(self.out / "tokens" / "tokenizer")

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """The token store's tokenizer."""
        return load_tokenizer(self._tokenizer_folder)

    def _documents(self, task: str) -> Sequence[str]:
        """The texts from which a task takes its excerpts."""
        return documents_for(task, self.preset.corpus)

    def _with_tokens(self, recipe: PretrainRecipe) -> PretrainRecipe:
        """The recipe with this run's tokens."""
        return with_data(recipe, tokens=self.out / "tokens")

    def _draw(self, task: str, condition: str, length: int, n: int) -> Sequence[Example]:
        """The first test examples of one length."""
        return _test_examples(
            self._tokenizer_folder, self.preset.corpus, task, condition, length, n
        )

    def _tests(self, task: str, condition: str, counts: Counts) -> dict[int, Sequence[Example]]:
        """The first test examples of each length."""
        return {length: self._draw(task, condition, length, n) for length, n in counts.items()}

    def _pretrained(self, model: TrainedModel) -> Outcome:
        folder = self.out / model.weights
        facts = {"parameters": _parameters(folder), WEIGHTS: weights_sha256(folder)}
        return Outcome(curves=list(_curve(folder, model.subject(self.name))), facts=facts)

    def _tuned(
        self, model: TrainedModel, task: str, train_length: int
    ) -> tuple[PreTrainedModel, About]:
        """A fine-tuned model, and the fields of its results in the condition `paper`."""
        subject = model.subject(
            self.name,
            task=task,
            condition="paper",
            train_condition=finetune_recipe(self.preset, model, task).task.condition,
            train_length=train_length,
        )
        return load_model(self.out / "models" / model.name / task / str(train_length)), subject

    def _with_answer(
        self, result: Result, model: PreTrainedModel, tests: Tests, alone: LandmarksAlone | None
    ) -> Result:
        """A result with the model's answer to its first prompt, if that is the one that `describe_tasks` wrote."""
        shortest = min(self.preset.test_counts)
        is_shown = (result.condition, result.length, result.metric) == (
            "paper",
            shortest,
            "exact_match",
        )
        if not is_shown or result.value is None:
            return result
        text = answer(model, tests[shortest][0], self._tokenizer(), alone)
        return result.model_copy(update={"answer": text})

    def _probing(
        self, model: TrainedModel, task: str, recipe: FinetuneRecipe, steps: int
    ) -> Callable[[Any, Phase], Probe | None]:
        """The accuracy on some test prompts, measured while a model is trained up to its first train length."""
        first = recipe.task.train_lengths[0]
        tests = self._draw(task, recipe.task.condition, first, PROBED)

        def probe(tuned: PreTrainedModel, phase: Phase) -> Probe | None:
            if phase.train_length != first:
                return None
            alone = LandmarksAlone(tuned, self._tokenizer()) if recipe.task.question_sees else None

            def accuracy(in_training: PreTrainedModel) -> dict[str, float]:
                return {"exact_match": exact_match(in_training, tests, alone), "n": len(tests)}

            return Probe(steps, accuracy)

        return probe

    def _learning_curve(
        self, model: TrainedModel, task: str, recipe: FinetuneRecipe, folder: Path
    ) -> Iterator[CurvePoint]:
        """The points of all phases; steps go on through the phases up to the first train length."""
        steps = 0
        for phase in recipe.phases():
            if phase.train_length != recipe.task.train_lengths[0]:
                steps = 0
            subject = model.subject(self.name, task=task, train_length=phase.train_length)
            yield from _curve(folder / phase.name, subject, steps)
            steps += _logged(folder / phase.name)[-1]["step"]


# Cached, since a worker carries out the stages of several models, which read the same examples.
@lru_cache(maxsize=16)
def _test_examples(
    tokenizer_folder: str, corpus: str, task: str, condition: str, length: int, n: int
) -> list[Example]:
    tokenizer, documents = load_tokenizer(tokenizer_folder), documents_for(task, corpus)
    return draw_test_examples(task, length, n, tokenizer, condition=condition, documents=documents)


@lru_cache(maxsize=4)
def _train_examples(
    tokenizer_folder: str, corpus: str, task: str, recipe: FinetuneRecipe, phase: Phase
) -> list[Encoded]:
    tokenizer, documents = load_tokenizer(tokenizer_folder), documents_for(task, corpus)
    return train_examples(recipe, train_source(recipe, task, tokenizer, documents), phase)


def _curve(folder: Path, subject: About, steps_before: int = 0) -> Iterator[CurvePoint]:
    """The loss and accuracy that a training logged, after the steps of earlier phases."""
    for entry in _logged(folder):
        figures = {name: entry[name] for name in ("loss", "exact_match", "n") if name in entry}
        if figures:
            fields = subject.present_fields(step=steps_before + entry["step"])
            yield CurvePoint(**fields, **figures)


def _logged(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / "curve.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def _parameters(folder: Path) -> int:
    """The number of parameters of a model's weights."""
    with safe_open(folder / "model.safetensors", framework="np") as file:
        return sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118  (it is no mapping)
