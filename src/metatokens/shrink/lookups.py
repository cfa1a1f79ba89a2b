"""Look-ups: a text with facts in it, and questions after its end that ask for them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import chain
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, get_args

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from transformers import PreTrainedTokenizerBase

from metatokens.data.prompts import TEMPLATE_ERRORS
from metatokens.data.tokenizer import (
    backend_of,
    beginning_of,
    control_texts,
    encode_text,
)
from metatokens.errors import UserError, broken_rule, one_line
from metatokens.recipe import parse_yaml
from metatokens.shrink.texts import Entities, Prose

Kind = Literal["statement", "question", "keys", "several"]
KINDS = get_args(Kind)
PASSAGE = "passage"  # the kind of look-up that repeats a passage of the text
CHAT = "chat"  # and that of questions which are asked in the model's own form of a conversation
TRAINED = "trained form"  # that of look-ups whose form was trained, about other names and words
USERS = "own"  # and that of a user's questions
CUE, PASSAGE_SIZE = 12, 20  # tokens of a passage that are given, and of the whole passage
_PLACEHOLDER = re.compile("(name|word|number)[0-9]*")
_LABEL = re.compile(r"^\w+: +(?=\S)")  # at the beginning of a question
_TURN = "\ufdd1"  # stands for a message in a chat template
# In place of what chat templates call for today's date: a run that resumes tomorrow has the same chats.
_ONE_DAY = "{% macro strftime_now(form) %}1 January 2026{% endmacro %}"


class Form(BaseModel):
    """How something is stated, and how it is asked for; forms.yaml explains the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    state: Annotated[tuple[str, ...], Field(min_length=1)]
    ask: str
    answer: str

    @field_validator("state", mode="before")
    @classmethod
    def _as_several(cls, state: Any) -> Any:
        return (state,) if isinstance(state, str) else state

    @model_validator(mode="after")
    def _states_what_it_asks(self) -> "Form":
        stated = _placeholders("".join(self.state))
        for name in self.placeholders:
            if not _PLACEHOLDER.fullmatch(name):
                raise ValueError(
                    f"it has the placeholder {{{name}}}; there are name, word and number"
                )
            if name not in stated:
                raise ValueError(f"{{{name}}} is asked for, and not stated")
        if not _placeholders(self.answer):
            raise ValueError("its answer has no placeholder, so each text would have the same one")
        for text in (*self.state, self.ask, self.answer):
            if not text[:1].isspace():
                raise ValueError(
                    f"{text!r} has to begin with a space or a line feed: it follows other text without one"
                )
        return self

    @property
    def placeholders(self) -> list[str]:
        """The names of all placeholders, each once."""
        return _placeholders("".join([*self.state, self.ask, self.answer]))


def _placeholders(text: str) -> list[str]:
    """What stands in braces, each text once. A form may have names alone, without a conversion or a format."""
    inside: dict[str, None] = {}
    for _, name, format_behind, conversion in Formatter().parse(text):
        if name is not None:
            conversion_behind = f"!{conversion}" if conversion else ""
            colon = ":" if format_behind else ""
            inside[f"{name}{conversion_behind}{colon}{format_behind}"] = None
    return [*inside]


Forms = dict[str, tuple[Form, ...]]  # by purpose, `train` and `test`


def read_forms(file: Path | None = None) -> Forms:
    """The forms of the package, and those of a user's file of the same shape.

    Raises:
        UserError: if the file cannot be read, or a form is not as forms.yaml explains.
    """
    packaged = (files("metatokens.shrink") / "forms.yaml").read_text(encoding="utf-8")
    forms = _parsed(packaged)
    if file is None:
        return forms
    try:
        further = _parsed(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError, TypeError) as error:
        raise UserError(f"{file} holds no forms of look-ups: {one_line(error)}.") from error
    # A user's own come first: a test with few texts takes the first forms.
    together = {purpose: further.get(purpose, ()) + forms[purpose] for purpose in forms}
    trained = {_wording(text) for form in together["train"] for text in (*form.state, form.ask)}
    for form in together["test"]:
        for text in (*form.state, form.ask):
            if _wording(text) in trained:
                raise UserError(f"with {file} the wording {text!r} is trained and tested.")
    return together


def _wording(text: str) -> str:
    """A text of a form, in which {name1} and {name} are the same."""
    return re.sub("[0-9]+}", "}", text)


def _parsed(text: str) -> Forms:
    forms: Forms = {}
    for purpose, by_kind in parse_yaml(text).items():
        if purpose not in ("train", "test"):
            raise UserError(f"forms are for train or test, not for {purpose!r}.")
        of_purpose = [_form(kind, fields) for kind, listed in by_kind.items() for fields in listed]
        forms[purpose] = tuple(of_purpose)
    return forms


def _form(kind: Any, fields: dict[str, Any]) -> Form:
    try:
        return Form(kind=kind, **fields)
    except ValidationError as error:
        raise UserError(f"the form {fields} cannot be used: {broken_rule(error)}.") from error


@dataclass(frozen=True)
class Question:
    """A question about a text.

    Attributes:
        kind: of its form.
        ids: of the question, which follow the text or an earlier question and its answer.
        answer: its ids; in a chat also those that end the turn.
        closing: further ids before another question.
    """

    kind: str
    ids: list[int]
    answer: list[int]
    closing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Asked:
    """A text and questions about it."""

    text: list[int]
    questions: list[Question]


@dataclass(frozen=True)
class Turns:
    """The ids that a chat template puts around messages.

    Attributes:
        opening: before a conversation's first message.
        answering: before an answer.
        leading: white space with which an answer begins.
        ending: after an answer, up to the first control token; empty if there is none.
        closing: after that, before the next message.
    """

    opening: list[int]
    answering: list[int]
    leading: str
    ending: list[int]
    closing: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Turns | None":
        """Those of a tokenizer.

        None if it has no template, the template fails, or it puts other things around other messages, as the template
        of a model does that thinks before it answers.
        """
        if tokenizer.chat_template is None:
            return None
        messages = [{"role": role, "content": _TURN} for role in ("user", "assistant", "user")]
        try:
            template = _ONE_DAY + tokenizer.get_chat_template()
            rendered = str(
                tokenizer.apply_chat_template(
                    messages, chat_template=template, tokenize=False, add_generation_prompt=True
                )
            )
            first_turns = str(
                tokenizer.apply_chat_template(messages[:2], chat_template=template, tokenize=False)
            )
        except TEMPLATE_ERRORS:
            return None
        parts = rendered.split(_TURN)
        if len(parts) != len(messages) + 1:
            return None
        # A model that thinks has its thoughts in the last answer, and none in earlier ones.
        if not rendered.startswith(first_turns.rstrip()):
            return None
        _, before_answer, _, before_new_answer = parts
        if before_new_answer.strip() != before_answer.strip():
            return None
        leading = before_answer.removeprefix(before_new_answer)
        opening, _, after_answer, answering = (
            encode_text(tokenizer, [part], continues=bool(number), with_control=True)[0]
            for number, part in enumerate(parts)
        )
        control = control_texts(backend_of(tokenizer))
        size = next((end for end, token in enumerate(after_answer, start=1) if token in control), 0)
        return cls(
            opening=opening,
            answering=answering,
            leading=leading if leading.isspace() else "",
            ending=after_answer[:size],
            closing=after_answer[size:],
        )


@dataclass
class Lookups:
    """Draws texts with facts, and questions about them.

    Attributes:
        tokenizer: the model's.
        prose: what the facts are put into.
        entities: what they are about.
        forms: how they are stated and asked for.
        turns: the model's form of a conversation, if it has one.
    """

    tokenizer: PreTrainedTokenizerBase
    prose: Prose
    entities: Entities
    forms: Sequence[Form]
    turns: Turns | None

    @cached_property
    def beginning(self) -> list[int]:
        """The ids at the beginning of a text that is no chat."""
        return beginning_of(self.tokenizer)

    def check_that_facts_fit(self, room: int) -> None:
        """Refuse forms whose facts may be too long.

        Args:
            room: tokens for a fact.

        Raises:
            UserError: if there is such a form.
        """
        longest_values = {}
        for kind, of_kind in self._values.items():
            sizes = [len(ids) for ids in self._encoded([f" {value}" for value in of_kind])]
            longest_values[kind] = of_kind[int(np.argmax(sizes))]
        for form in self.forms:
            values = {name: longest_values[_kind_of(name)] for name in form.placeholders}
            stated = self._encoded([sentence.format_map(values) for sentence in form.state])
            # In a sentence another value may have a token more than after a space.
            size = sum(map(len, stated)) + len(values)
            if size > room:
                raise UserError(
                    f"a fact of the form {form.state[0]!r} may take {size:,} tokens, and the shortest texts of the "
                    f"training have room for {room:,}: leave that form out, or keep more."
                )

    def some_forms(self, generator: np.random.Generator, count: int) -> list[Form]:
        """So many forms, at random."""
        chosen = generator.choice(len(self.forms), count, replace=False)
        return [self.forms[number] for number in chosen]

    def draw(
        self,
        generator: np.random.Generator,
        *,
        length: int,
        distance: int,
        forms: Sequence[Form],
        facts: int,
        chat: bool = False,
        passage: bool = False,
        keeps_distance: bool = False,
    ) -> Asked:
        """A text with facts, and a question for each, in random order.

        Args:
            generator: of everything that is drawn.
            length: tokens of the text.
            distance: the fewest tokens between the last fact and the end of the text. If the text has no room for that,
                the facts come first.
            forms: the facts take them in turn.
            facts: how many; fewer, or none, if they do not fit in the text, or if names, words or numbers run out.
            chat: the text is the beginning of a user's message, and each question ends one.
            passage: ask for a passage of the text too, unless the prose before `distance` has no room for one between
                facts.
            keeps_distance: leave out facts that would leave fewer tokens than `distance` after them.
        """
        opening = self.turns.opening if self.turns and chat else self.beginning
        room = length - len(opening)
        room_for_facts = room - distance if keeps_distance else room
        stated, questions = self._facts(generator, forms, facts, chat, room_for_facts)
        size = room - sum(map(len, stated))
        start = self._start(generator, size)
        text = self.prose.ids[start : start + size]
        cuts = self._cuts(generator, start, size - distance, len(stated))
        pieces = [piece.tolist() for piece in np.split(text, cuts)]
        with_facts = chain.from_iterable(zip(pieces, [*stated, []], strict=True))
        whole = [*opening, *chain.from_iterable(with_facts)]
        starts = _passage_starts(size - distance, cuts)
        if passage and len(starts):
            questions.append(self._passage(text, int(generator.choice(starts))))
        order = generator.permutation(len(questions))
        return Asked(whole, [questions[number] for number in order])

    def _passage(self, text: np.ndarray, start: int) -> Question:
        """Ask how a passage goes on, whose beginning is given."""
        (line_end,) = self._encoded(["\n"])
        cue = text[start : start + CUE].tolist()
        answer = text[start + CUE : start + PASSAGE_SIZE].tolist()
        return Question(PASSAGE, [*line_end, *cue], answer)

    def _start(self, generator: np.random.Generator, size: int) -> int:
        """Where prose of so many tokens may begin: after a sentence."""
        starts = self.prose.ends[self.prose.ends < len(self.prose.ids) - size - 1]
        return int(generator.choice(starts)) + 1 if len(starts) else 0

    def _cuts(self, generator: np.random.Generator, start: int, end: int, count: int) -> np.ndarray:
        """Where facts go in the prose from `start`, ascending: after sentences up to its token `end`, or before all."""
        after_sentences = self.prose.ends - start + 1
        after_sentences = after_sentences[(after_sentences > 0) & (after_sentences <= end)]
        return np.sort(generator.choice(np.append(after_sentences, 0), count))

    def _facts(
        self,
        generator: np.random.Generator,
        forms: Sequence[Form],
        count: int,
        chat: bool,
        room: int,
    ) -> tuple[list[list[int]], list[Question]]:
        """The ids of all sentences that state something, at most `room`, and the questions."""
        drawn = self._drawn(generator)
        questions: list[Question] = []
        facts: list[list[list[int]]] = []  # the sentences of each
        for number in range(count):
            form = forms[number % len(forms)]
            values = {name: next(drawn[_kind_of(name)], None) for name in form.placeholders}
            if None in values.values():  # all are in this text
                break
            stated = self._encoded([sentence.format_map(values) for sentence in form.state])
            room -= sum(map(len, stated))
            if room < 0:
                break
            ask, answer = form.ask.format_map(values), form.answer.format_map(values)
            facts.append(stated)
            questions.append(
                self._chat_question(ask, answer) if chat else self._question(form.kind, ask, answer)
            )
        return _interleaved(generator, facts), questions

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        return encode_text(self.tokenizer, texts, continues=True)

    def _question(self, kind: str, ask: str, answer: str) -> Question:
        question_ids, answer_ids = self._encoded([ask, answer])
        return Question(kind, question_ids, answer_ids)

    def _chat_question(self, ask: str, answer: str) -> Question:
        """The question as the end of a user's message."""
        assert self.turns is not None
        question_ids, answer_ids = self._encoded(
            [f"\n{_bare_question(ask)}", f"{self.turns.leading}{answer.lstrip()}"]
        )
        return Question(
            CHAT,
            [*question_ids, *self.turns.answering],
            [*answer_ids, *self.turns.ending],
            closing=tuple(self.turns.closing),
        )

    def _drawn(self, generator: np.random.Generator) -> dict[str, Iterator[Any]]:
        """What placeholders stand for, without repetition."""
        return {
            kind: iter(generator.permutation(values).tolist())
            for kind, values in self._values.items()
        }

    @property
    def _values(self) -> dict[str, Sequence[str]]:
        """The names, words and numbers, by the kind of placeholder that stands for them."""
        return {
            "name": self.entities.names,
            "word": self.entities.words,
            "number": self.entities.numbers,
        }


def _kind_of(placeholder: str) -> str:
    """`word` for `word1`."""
    return placeholder.rstrip("0123456789")


def _interleaved(
    generator: np.random.Generator, facts: Sequence[Sequence[list[int]]]
) -> list[list[int]]:
    """The sentences of all facts in random order, those of one fact in their own."""
    fact_of_sentence = np.repeat(np.arange(len(facts)), [len(fact) for fact in facts])
    sentences_left = [iter(fact) for fact in facts]
    return [next(sentences_left[number]) for number in generator.permutation(fact_of_sentence)]


def _bare_question(ask: str) -> str:
    """A question without a label such as `Question:`, and without what would begin the answer.

    It is the first line with a question mark, up to the mark; without any mark, the first line.
    """
    lines = ask.strip().split("\n")
    asking = next((line for line in lines if "?" in line), lines[0])
    if "?" in asking or len(lines) > 1:
        asking = _LABEL.sub("", asking, count=1)
    question, mark, _ = asking.partition("?")
    return question + mark


def _passage_starts(end: int, cuts: np.ndarray) -> np.ndarray:
    """Where a passage can start, so that it ends before `end` and no fact stands within it, at one of the cuts."""
    is_start = np.ones(max(0, end - PASSAGE_SIZE), bool)
    for cut in cuts:
        is_start[max(0, cut - PASSAGE_SIZE + 1) : cut] = False
    return np.flatnonzero(is_start)
