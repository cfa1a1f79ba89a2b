"""Shrink the cache of a model: choose full heads, train, test, and write the page (`metatokens shrink`)."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from pydantic import BaseModel
from transformers import set_seed

from metatokens.checkpoint import (
    fetch_model,
    load_base_and_tokenizer,
    load_model,
    weights_sha256,
)
from metatokens.data.corpus import files_of
from metatokens.data.landmarks import Landmarks, with_landmarks
from metatokens.data.tokenizer import backend_of
from metatokens.errors import UserError
from metatokens.files import DAMAGED, sha256_of, write_whole
from metatokens.machine import has_fast_bfloat16, return_freed_memory
from metatokens.model.positions import reaches
from metatokens.recipe import WITHOUT_EFFECT, ShrinkRecipe
from metatokens.records import Result, read_lines, stamped
from metatokens.retrofit.injection import add_meta_attention
from metatokens.retrofit.text_window import apply_text_window, key_value_heads
from metatokens.shrink.choosing import Head, HeadLoss, loss_without, most_needed
from metatokens.shrink.cost import CONTINUATION, Cost, costs
from metatokens.shrink.lookups import USERS, Asked, Lookups, Question, Turns, read_forms
from metatokens.shrink.measuring import (
    BASE,
    SHRUNK,
    TRAINED_FULL,
    TRAINED_WINDOW,
    Measuring,
    Tests,
    draw_tests,
)
from metatokens.shrink.mixture import MOST_FORMS, ROOM_IN_CHAT, Mixture
from metatokens.shrink.page import Findings, write_page
from metatokens.shrink.replies import draw_replies
from metatokens.shrink.sizes import MARGIN_BEHIND_WINDOW, Sizes
from metatokens.shrink.texts import HELD_OUT_EVERY, MOST_CHARACTERS, UserText, split_apart
from metatokens.tasks.example import Encoded, Example, read_examples, records_sha256
from metatokens.training.lora import check_peft
from metatokens.training.run_folder import is_finished, open_run
from metatokens.training.trainer import Figures, Progress, train, unwatched

LONGEST_ASSUMED = 1_000_000  # tokens, for a model without a limit
WINDOW_TO_CHOOSE_BY = 64  # of a head that forgets
FACTS_TO_CHOOSE_BY = 12  # in a text
PAGE = "page.html"

Line = TypeVar("Line", HeadLoss, Cost)
# Shows the progress of a step, by its name.
Watch = Callable[[str], AbstractContextManager[Progress]]


class Arm(NamedTuple):
    """A model that is measured.

    Attributes:
        name: in the results.
        folder: of the trained model, in the run's folder; None: the base as it is.
        window: the last positions, which each head but the full ones keeps, in training too; None: everything.
        full_heads: the key-value heads that keep everything.
    """

    name: str
    folder: str | None = None
    window: int | None = None
    full_heads: Sequence[Head] = ()


class Choice(NamedTuple):
    """The key-value heads that keep everything; and, if they were chosen by it, what answers lose without each head."""

    heads: Sequence[Head]
    losses: Sequence[HeadLoss] = ()


MODELS = (BASE, SHRUNK, TRAINED_FULL, TRAINED_WINDOW)


def shrink(
    recipe: ShrinkRecipe,
    model: Path,
    corpora: Sequence[str],
    out: Path,
    *,
    forms: Path | None = None,
    questions: Path | None = None,
    controls: bool = True,
    overwrite: bool = False,
    tell: Callable[[str], None] = lambda sentences: None,
    watch: Watch = lambda name: nullcontext(unwatched),
) -> Findings:
    """Train a model to keep a part of its cache, and measure what it still finds.

    `out` then holds `model`, whose cache is smaller wherever it is loaded; the controls `full` and `window`;
    `page.html`; the base's `replies.json`; and what was measured: `heads.json`, `results/` and `costs.json`. The same
    call goes on where it was cut off.

    Args:
        recipe: the settings.
        model: a base, a folder or `hf:NAME`.
        corpora: the user's text, as `read_corpus` takes it.
        out: the run's folder.
        forms: a YAML file with further forms of look-ups, as forms.yaml of this package.
        questions: a JSON-lines file of the user's own records, trained on too; every tenth is held out.
        controls: also train and measure the full cache and a window alone, each of which takes as long.
        overwrite: replace another run in `out`.
        tell: takes what the run will do, as text, before it begins.
        watch: shows the progress of each step.

    Returns:
        What the page shows.

    Raises:
        UserError: if model, text and settings do not fit each other.
    """
    if recipe.training.lora_rank:
        check_peft()
    # Recorded with the other settings: a run that goes on elsewhere trains and measures in the same precision.
    if "bf16" not in recipe.training.model_fields_set:
        training = recipe.training.model_copy(update={"bf16": has_fast_bfloat16()})
        recipe = recipe.model_copy(update={"training": training})
    run = _Run(recipe, model, list(corpora), out, forms, questions)
    text_files = [Path(file) for corpus in corpora for file in files_of(corpus)]
    inputs = [model, forms, questions, *text_files]
    # Before anything is written: tests that cannot be drawn need another recipe.
    tests = run.draw_tests()
    with open_run(out, run.settings, overwrite=overwrite, inputs=inputs):
        tell(run.plan(controls=controls))
        choice = run.choose(watch)
        run.ask_base(watch)
        arms = run.arms(choice.heads, controls=controls)
        for arm in arms:
            run.train(arm, watch)
            run.measure(arm, tests, watch)
            write_page(run.findings(choice), out / PAGE)
        # Last, since a long text with the full cache may need more memory than there is.
        run.measure_costs(arms[0], watch)
        write_page(run.findings(choice), out / PAGE)
        return run.findings(choice)


class _Run:
    """The steps of a run; each leaves a file, and is skipped if that is there."""

    def __init__(
        self,
        recipe: ShrinkRecipe,
        model: Path,
        corpora: list[str],
        out: Path,
        forms: Path | None,
        questions: Path | None,
    ):
        self.recipe, self.model, self.corpora, self.out = recipe, model, corpora, out
        self.forms = read_forms(forms)
        base, self.tokenizer = load_base_and_tokenizer(model)
        text_config = base.config.get_text_config()
        limit = int(getattr(text_config, "max_position_embeddings", None) or LONGEST_ASSUMED)
        retrofit: Any = add_meta_attention(base, self.tokenizer, layers=[])
        self.heads = [
            (block, head)
            for block, count in enumerate(key_value_heads(retrofit))
            for head in range(count)
        ]
        # Refuses what cannot forget, and heads that are not there.
        full_heads = recipe.cache.full_heads
        apply_text_window(
            retrofit, 1, full_heads=self.heads[:1] if full_heads is None else full_heads
        )
        self.cost_lengths = {
            length
            for length in recipe.tests.cost_lengths
            if reaches(retrofit.config, length + CONTINUATION)
        }
        rule = recipe.cache.landmarks
        self.landmarks = None if rule is None else Landmarks(self.tokenizer, rule)
        density = (
            0.0 if self.landmarks is None else float(self.landmarks(self.text.train.ids).mean())
        )
        self.sizes = Sizes.of(recipe, len(self.heads), limit, density)
        self.text.check_holds(max([self.sizes.longest, *self.sizes.tested_texts]))
        lookups = self.lookups["train"]
        room_in_text = self.sizes.training_lengths[-1] - len(lookups.beginning)
        room_in_chat = self.sizes.distance + ROOM_IN_CHAT
        lookups.check_that_facts_fit(min(room_in_text, room_in_chat))
        records = [] if questions is None else self._records_of(questions, limit)
        self.records_to_train_on, self.records_to_measure_on = split_apart(records)
        self.settings = {
            "verb": "shrink",
            "recipe": recipe.model_dump(
                mode="json", exclude=WITHOUT_EFFECT | {"tests": {"cost_lengths"}}
            ),
            "model_sha256": weights_sha256(fetch_model(model)),
            "tokenizer_sha256": sha256_of(
                f"{backend_of(self.tokenizer).to_str()}{self.tokenizer.chat_template}".encode()
            ),
            "text_sha256": self.text.sha256,
            "forms": [form.model_dump() for purpose in self.forms.values() for form in purpose],
            "questions_sha256": None if questions is None else records_sha256(records),
        }

    def plan(self, *, controls: bool) -> str:
        """Lines that tell the user what the run will do."""
        precision = "bfloat16" if self.recipe.training.bf16 else "float32"
        tested_lengths = ", ".join(f"{length:,}" for length in self.sizes.tested_texts)
        lines = [
            f"{self.sizes.number_of_full_heads} of {len(self.heads)} key-value heads will keep all text, the others "
            f"the last {self.sizes.window:,} tokens.",
            f"Steps: choose the heads, train (in {precision}), test in texts of {tested_lengths} tokens, write the "
            "page.",
        ]
        if controls:
            lines.append(
                "Then two controls are trained and tested too; --no-controls leaves them out."
            )
        if self.text.is_cut:
            lines.append(
                f"The text is longer than {MOST_CHARACTERS:,} characters: what comes after them is not read."
            )
        longest_record = max(
            (len(record.input_ids) for record in self.records_to_train_on), default=0
        )
        if longest_record > self.sizes.longest:
            lines.append(
                f"A record of --questions has {longest_record:,} tokens, and other texts of the training at most "
                f"{self.sizes.longest:,}: its step needs more memory."
            )
        return "\n".join(lines)

    def _records_of(self, questions: Path, limit: int) -> list[Example]:
        """The user's own records: enough to hold some out, and short enough for the model."""
        if self.landmarks is not None:
            # They go into a text and into a question about it, and a record does not say where its text ends.
            raise UserError("cache.landmarks and --questions do not go together: leave one out.")
        # None is both trained on and measured on, and their order, which may have a period, decides nothing.
        by_hash = {
            records_sha256([record]): record for record in read_examples(questions, self.tokenizer)
        }
        records = [by_hash[checksum] for checksum in sorted(by_hash)]
        if len(records) < HELD_OUT_EVERY:
            raise UserError(
                f"{questions} has {len(records)} different records, and every tenth is held out: give at least "
                f"{HELD_OUT_EVERY}."
            )
        if any(record.answer_start < 2 for record in records):
            raise UserError(
                f"{questions} has a prompt of a single token: there is no text to be asked about."
            )
        longest = max(len(record.input_ids) for record in records)
        if longest > limit:
            raise UserError(
                f"{questions} has a record of {longest:,} tokens, and the model reads at most {limit:,}."
            )
        return records

    def _base(self, dtype: str | None = None) -> Any:
        """The base with a meta-token."""
        base, _ = load_base_and_tokenizer(self.model, dtype)
        model: Any = add_meta_attention(base, self.tokenizer, layers=[])
        # PEFT would look for a configuration under that name.
        model.name_or_path = model.config.name_or_path = ""
        return model

    @cached_property
    def text(self) -> UserText:
        """The user's text."""
        return UserText(self.tokenizer, self.corpora)

    @cached_property
    def lookups(self) -> dict[str, Lookups]:
        """What draws look-ups of `train` and of `test`, with their forms, names and words."""
        turns = Turns.of(self.tokenizer)
        prose = {"train": self.text.train, "test": self.text.held_out}
        return {
            split: Lookups(
                self.tokenizer, prose[split], self.text.entities[split], self.forms[split], turns
            )
            for split in prose
        }

    def choose(self, watch: Watch) -> Choice:
        """Choose the heads that keep everything: those of the recipe, or those that need it most by measurement."""
        full_heads = self.recipe.cache.full_heads
        if full_heads is not None:
            return Choice(full_heads)
        if self.sizes.number_of_full_heads == 0:
            return Choice([])
        losses = self.head_losses(watch)
        return Choice(most_needed(losses, self.sizes.number_of_full_heads), losses)

    def ask_base(self, watch: Watch) -> None:
        """Write what the base answers in a chat; nothing if it has no chat template."""
        if self._replies_file.exists():
            return
        self._check_that_no_training_had(self._replies_file)
        written: dict[str, list[Any]] = {"train": [], "test": []}
        turns = self.lookups["train"].turns
        if turns is not None and turns.ending:
            model = self._base_to_measure()
            written["train"] = self._replies_of(
                model, "train", self.recipe.mixture.replies, about_texts=0.5, seed=0, watch=watch
            )
            # About what a model forgets, so about texts, which are longer than the window.
            written["test"] = self._replies_of(
                model, "test", self.recipe.tests.replies, about_texts=1.0, seed=1, watch=watch
            )
        write_whole(self._replies_file, json.dumps(written).encode())

    def _replies_of(
        self, model: Any, split: str, count: int, *, about_texts: float, seed: int, watch: Watch
    ) -> list[Any]:
        """Requests of a split with their replies, as ids, and where each reply begins."""
        shortest = self.sizes.distance
        replies = draw_replies(
            model,
            self.lookups[split],
            count,
            lengths=(shortest, max(shortest, self.sizes.longest // 2)),
            about_texts=about_texts,
            seed=seed,
        )
        written = []
        with watch(f"ask the base: {split}") as progress:
            for reply in replies:
                written.append([list(reply.input_ids), reply.answer_start])
                progress(len(written), count, {})
        return written

    def _check_that_no_training_had(self, file: Path) -> None:
        """Refuse to make a file anew that a training of this run has used: the next one would have another."""
        if (self.out / "model").exists():
            raise UserError(
                f"{file} is missing, incomplete or damaged, and the model in this run was trained with it: begin again "
                "with --overwrite."
            )

    def replies(self, split: str) -> list[Encoded]:
        """What the base answered to requests of `train` or `test`."""
        try:
            written = json.loads(self._replies_file.read_text(encoding="utf-8"))
            return [Encoded(input_ids=ids, answer_start=start) for ids, start in written[split]]
        except DAMAGED as error:
            self._check_that_no_training_had(self._replies_file)
            raise _damaged(self._replies_file) from error

    def arms(self, full_heads: Sequence[Head], *, controls: bool) -> list[Arm]:
        """The models to measure, the shrunk one first."""
        arms = [Arm(SHRUNK, "model", self.sizes.window, full_heads), Arm(BASE)]
        if controls:
            arms.append(Arm(TRAINED_FULL, "full"))
            arms.append(Arm(TRAINED_WINDOW, "window", self.sizes.window_alone))
        return arms

    def head_losses(self, watch: Watch) -> list[HeadLoss]:
        """The loss of answers if one head after another forgets the text, each measured once."""
        file = self.out / "heads.json"
        try:
            losses = _read_list(file, HeadLoss)
        except DAMAGED as error:
            self._check_that_no_training_had(file)
            raise _damaged(file) from error
        cases = [None, *self.heads]  # None: no head forgets
        if len(losses) == len(cases):
            return losses
        self._check_that_no_training_had(file)
        texts = [
            _text_to_choose_by(self.lookups["train"], number, min(512, self.sizes.longest))
            for number in range(self.recipe.tests.choosing)
        ]
        model = self._base_to_measure()
        with watch("choose heads") as progress:
            for head in cases[len(losses) :]:
                losses.append(loss_without(head, model, self.heads, texts, WINDOW_TO_CHOOSE_BY))
                _write_list(file, losses)
                progress(len(losses) - 1, len(self.heads), {})
        return losses

    def train(self, arm: Arm, watch: Watch) -> None:
        """Train a model with what its cache keeps."""
        if arm.folder is None or is_finished(self.out / arm.folder):
            return
        folder = self.out / arm.folder
        settings = self.recipe.training.model_copy(
            update={"text_window": arm.window, "text_full_heads": arm.full_heads or None}
        )
        mixture = Mixture(
            self.lookups["train"],
            steps=settings.max_steps,
            tokens=self.recipe.mixture.tokens,
            lengths=self.sizes.training_lengths,
            distance=self.sizes.distance,
            prose_share=self.recipe.mixture.prose_share,
            seed=settings.seed,
            replies=self.replies("train"),
            user_records=self.records_to_train_on,
            landmarks=self.landmarks,
        )
        # After its replies were read: a folder means that a training has used them.
        folder.mkdir(parents=True, exist_ok=True)
        set_seed(settings.seed)
        # With bfloat16 the weights stay as their files have them: autocast converts what it computes with.
        model = self._base(None if settings.bf16 else "float32")
        with watch(f"train: {arm.name}") as report:

            def progress(done: int, total: int, figures: Figures) -> None:
                return_freed_memory()  # batches have ever other lengths
                report(done, total, figures)

            train(
                model,
                mixture,
                self.tokenizer,
                settings,
                folder,
                collator=itemgetter(0),  # the mixture's items are whole batches
                progress=progress,
            )

    def draw_tests(self) -> Tests:
        """What all models are measured on."""
        return draw_tests(
            self.lookups["test"],
            self.forms["train"],
            self.sizes.tested_texts,
            distance=self.sizes.distance_by_length,
            user_questions=[_asked(record) for record in self.records_to_measure_on],
            excerpts=self.recipe.tests.excerpts,
            excerpt_length=self.sizes.longest,
        )

    def measure(self, arm: Arm, tests: Tests, watch: Watch) -> None:
        """Write what a model finds and predicts."""
        file = self._results_file(arm.name)
        if file.exists():
            return
        file.parent.mkdir(exist_ok=True)
        measuring = Measuring(
            self._model_of(arm),
            arm.name,
            seed=self.recipe.training.seed,
            # The base's meta-token is not trained.
            landmarks=None if arm.folder is None else self.landmarks,
        )
        replies = self.replies("test")
        total = tests.number_of_results + len(replies)
        results: list[Result] = []
        with watch(f"measure: {arm.name}") as progress:
            for result in measuring.results(tests, replies):
                results.append(result)
                progress(len(results), total, {})
        lines = "".join(f"{result.line()}\n" for result in stamped(results))
        write_whole(file, lines.encode())

    def measure_costs(self, arm: Arm, watch: Watch) -> None:
        """Write what the cache of the shrunk model costs, next to the full one."""
        measured = self.measured_costs()
        lengths = sorted(self.cost_lengths - {cost.length for cost in measured})
        if not lengths:
            return
        model = self._model_of(arm)
        with watch("memory and speed") as progress:
            for done, length in enumerate(lengths, start=1):
                text = with_landmarks(self.landmarks, self.text.held_out.ids[:length].tolist())
                measured += costs(model, text, length)
                measured.sort(key=lambda cost: cost.length)
                _write_list(self._costs_file, measured)  # a long text takes minutes
                progress(done, len(lengths), {})

    def measured_costs(self) -> list[Cost]:
        """The costs that have been measured so far."""
        try:
            return _read_list(self._costs_file, Cost)
        except DAMAGED as error:
            raise _damaged(self._costs_file) from error

    def findings(self, choice: Choice) -> Findings:
        """What the page shows, as far as it has been measured."""
        results = [
            result
            for name in MODELS
            if self._results_file(name).exists()
            for result in read_lines(self._results_file(name), Result)
        ]
        return Findings(
            results=results,
            losses=choice.losses,
            costs=self.measured_costs(),
            window=self.sizes.window,
            full_heads=choice.heads,
            landmarks=self.recipe.cache.landmarks,
            out=self.out,
            base=str(self.model),
            length=self.sizes.length,
            steps=self.recipe.training.max_steps,
        )

    @property
    def _replies_file(self) -> Path:
        return self.out / "replies.json"

    @property
    def _costs_file(self) -> Path:
        return self.out / "costs.json"

    def _results_file(self, name: str) -> Path:
        return self.out / "results" / f"{name.replace(', ', '-').replace(' ', '-')}.jsonl"

    def _model_of(self, arm: Arm) -> Any:
        if arm.folder is None:
            return self._base_to_measure()
        return load_model(self.out / arm.folder, dtype=self._dtype)

    def _base_to_measure(self) -> Any:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return self._base(self._dtype).to(device).eval()

    @property
    def _dtype(self) -> str:
        # Chosen when a model is loaded: converting it later would round the frequencies of its rotary positions.
        return "bfloat16" if self.recipe.training.bf16 else "float32"


def _write_list(file: Path, lines: Sequence[BaseModel]) -> None:
    write_whole(file, json.dumps([line.model_dump() for line in lines], indent=1).encode())


def _read_list(file: Path, kind: type[Line]) -> list[Line]:
    """What was written so far; nothing if there is no file."""
    if not file.exists():
        return []
    return [kind(**line) for line in json.loads(file.read_text(encoding="utf-8"))]


def _damaged(file: Path) -> UserError:
    return UserError(f"{file} is damaged: remove it, and give the same command again.")


def _text_to_choose_by(lookups: Lookups, number: int, length: int) -> Asked:
    """A text with look-ups of several forms, for which a head has to remember."""
    generator = np.random.default_rng(number)
    return lookups.draw(
        generator,
        length=length,
        distance=WINDOW_TO_CHOOSE_BY + MARGIN_BEHIND_WINDOW,
        forms=lookups.some_forms(generator, MOST_FORMS),
        facts=FACTS_TO_CHOOSE_BY,
        keeps_distance=True,
    )


def _asked(record: Encoded) -> Asked:
    """A user's record as a text with one question, which is the last token of its prompt.

    The end of the text belongs to the answer, as `metatokens evaluate` has it: "New York" is no answer "New".
    """
    *text, last_of_prompt = record.input_ids[: record.answer_start]
    answer = list(record.input_ids[record.answer_start :])
    return Asked(text, [Question(USERS, [last_of_prompt], answer)])
