"""Look-ups: each fact is in its text, whole and early enough, and its question reads as the form says."""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest

from metatokens.errors import UserError
from metatokens.shrink.lookups import Form, Turns
from tests.shrink.small import TEMPLATE

LENGTH, DISTANCE, FACTS = 400, 100, 3
PLACEHOLDER = re.compile(r"\\{(\w+)\\}")
ANSWERING = "\n<|endoftext|>assistant\n"
CLOSING = "\n<|endoftext|>user\n"


def pattern_of(template, values):
    """What matches a text of a form, in which the values of some placeholders are known."""
    groups = set()

    def of_placeholder(match):
        name = match[1]
        if name in values:
            return re.escape(values[name])
        if name in groups:
            return f"(?P={name})"
        groups.add(name)
        return rf"(?P<{name}>\w+)"

    return re.compile(PLACEHOLDER.sub(of_placeholder, re.escape(template)))


def asked_of_form(lookups, number, *, chat):
    """Facts of the form with this number."""
    return lookups.draw(
        np.random.default_rng(number),
        length=LENGTH,
        distance=DISTANCE,
        forms=[lookups.forms[number]],
        facts=FACTS,
        chat=chat,
    )


def in_chat(ask):
    """What of a packaged form is asked in a chat: its first line without a label, up to the question mark."""
    line = ask.strip().splitlines()[0]
    for label in ("Question: ", "Q: ", "User: "):
        line = line.removeprefix(label)
    end = line.find("?") + 1
    return line[:end] if end else line


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("chat", [False, True])
def test_each_fact_is_whole_and_far_from_the_end(split, chat, lookups, tokenizer):
    entities = lookups[split].entities
    drawn = {*entities.names, *entities.words, *map(str, range(100, 10_000))}
    for form_number, form in enumerate(lookups[split].forms):
        ask, answer = form.ask, form.answer
        if chat:
            ask, answer = f"\n{in_chat(ask)}{ANSWERING}", f"{answer.lstrip()}\n<|endoftext|>"

        asked = asked_of_form(lookups[split], form_number, chat=chat)

        assert len(asked.text) == LENGTH
        early_text = tokenizer.decode(asked.text[:-DISTANCE])
        answers = set()
        for question in asked.questions:
            both = tokenizer.decode(question.ids + question.answer)
            match = pattern_of(ask + answer, {}).fullmatch(both)
            assert match, (both, form)
            values = match.groupdict()
            assert drawn.issuperset(values.values())
            assert tokenizer.decode(question.answer) == answer.format_map(values)
            end = 0
            for sentence in form.state:
                statement = pattern_of(sentence, values).search(early_text, end)
                assert statement, (sentence, values, early_text)
                end = statement.end()
            answers.add(tuple(question.answer))
        assert len(answers) == len(asked.questions) == FACTS


@pytest.mark.parametrize("length", [160, 200, 260])
def test_facts_that_would_be_near_the_end_are_left_out(length, lookups, tokenizer):
    counts = set()
    for number, form in enumerate(lookups["test"].forms):
        asked = lookups["test"].draw(
            np.random.default_rng(number),
            length=length,
            distance=DISTANCE,
            forms=[form],
            facts=12,
            keeps_distance=True,
        )

        late_text = tokenizer.decode(asked.text[-DISTANCE:])
        for question in asked.questions:
            assert tokenizer.decode(question.answer).strip() not in late_text.split()
        counts.add(len(asked.questions))
    assert min(counts) >= 1
    assert min(counts) < 12


def test_the_text_around_facts_is_prose(lookups, tokenizer):
    asked = asked_of_form(lookups["train"], 0, chat=False)
    beginning = len(tokenizer("")["input_ids"])
    assert asked.text[:beginning] == tokenizer("")["input_ids"]

    sentence = re.compile(r" The code word for \w+ is \w+\.")
    text = tokenizer.decode(asked.text[beginning:])
    assert len(sentence.findall(text)) == FACTS
    assert sentence.sub("", text) in tokenizer.decode(lookups["train"].prose.ids.tolist())


def test_a_conversation_is_the_templates(lookups, plain):
    roles = ["user", "assistant"] * FACTS + ["user"]
    for number in range(len(lookups["test"].forms)):
        asked = asked_of_form(lookups["test"], number, chat=True)
        ids = list(asked.text)
        for question in asked.questions:
            ids += [*question.ids, *question.answer, *question.closing]
        contents = re.split(re.escape(ANSWERING) + "|" + re.escape(CLOSING), plain.decode(ids))
        contents[0] = contents[0].removeprefix("<|endoftext|>user\n")
        messages = [
            {"role": role, "content": content}
            for role, content in zip(roles, contents, strict=True)
        ]

        expected = plain.apply_chat_template(messages)["input_ids"]

        assert contents[-1] == ""
        assert plain.decode(expected[len(ids) :]) == "\n"
        assert expected[: len(ids)] == ids


@pytest.mark.parametrize(
    "template",
    [
        None,
        TEMPLATE.replace("{% if add_generation_prompt %}<", "{% if add_generation_prompt %}A: <"),
        TEMPLATE.replace("message.content", "message.content ~ message.content"),
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages + 1 }}",  # a TypeError
        {"tool_use": TEMPLATE},  # none is the default: a ValueError
        TEMPLATE.replace("assistant\n", "assistant\n<think>\n"),
        # Of models that think, the last answer alone has thoughts.
        TEMPLATE.replace(
            "{{ message.content }}",
            "{{ '<think></think>' if loop.last and message.role == 'assistant' }}{{ message.content }}",
        ),
    ],
)
def test_a_template_that_does_not_repeat_itself_is_not_used(template, tokenizer):
    assert Turns.of(with_template(tokenizer, template)) is None


def test_a_template_that_writes_the_date_gives_the_same_chats_each_day(tokenizer):
    dated = with_template(tokenizer, "Today is {{ strftime_now('%d %B %Y') }}. " + TEMPLATE)

    turns = Turns.of(dated)

    assert tokenizer.decode(turns.opening).startswith("Today is 1 January 2026. <")


def test_white_space_before_an_answer_belongs_to_it(lookups, tokenizer):
    template = (
        "{% for message in messages %}"
        "{{ '[INST] ' ~ message.content ~ ' [/INST]' if message.role == 'user' "
        "else ' ' ~ message.content ~ eos_token }}{% endfor %}"
    )
    turns = Turns.of(with_template(tokenizer, template))
    of_llama_2 = replace(lookups["test"], turns=turns)

    question = asked_of_form(of_llama_2, 0, chat=True).questions[0]

    assert tokenizer.decode(question.ids).endswith(" [/INST]")
    assert re.fullmatch(r" \w+<\|endoftext\|>", tokenizer.decode(question.answer))


@pytest.mark.parametrize(
    ("ask", "question"),
    [
        ("\nQuestion:\nWhat is {name}?\nAnswer:", "What is {name}?"),
        ("\nFrom: {name} To:", "From: {name} To:"),
        ("\nQ: What is {name}? It is", "What is {name}?"),
        ("\nUser: Name {name}.\nAssistant:", "Name {name}."),
    ],
)
def test_a_chat_asks_the_question_alone(ask, question, lookups, tokenizer):
    form = Form(kind="question", state=" {name} is {word}.", ask=ask, answer=" {word}")
    draw = replace(lookups["test"], forms=[form])

    asked = asked_of_form(draw, 0, chat=True)

    name = question.replace("{name}", r"\w+").replace("?", r"\?")
    shown = tokenizer.decode(asked.questions[0].ids).removesuffix(ANSWERING)
    assert re.fullmatch(f"\n{name}", shown)


def with_template(tokenizer, template):
    """A copy of the tokenizer with another chat template."""
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


def test_a_passage_is_prose_before_the_window(lookups, tokenizer):
    draw = lookups["train"]
    options = {"length": LENGTH, "distance": DISTANCE, "forms": draw.forms[:4], "facts": 4}
    prose = draw.prose.ids.tolist()
    of_prose = {tuple(prose[start : start + 20]) for start in range(len(prose) - 19)}
    starts = set()
    for seed in range(50):
        asked = draw.draw(np.random.default_rng(seed), passage=True, **options)
        (passage,) = [question for question in asked.questions if question.kind == "passage"]
        line_end, cue = passage.ids[:-12], passage.ids[-12:]
        assert tokenizer.decode(line_end) == "\n"
        whole = [*cue, *passage.answer]
        assert len(whole) == 20
        assert tuple(whole) in of_prose  # so no fact is in it
        rows = [asked.text[start : start + 20] for start in range(LENGTH - DISTANCE - 19)]
        starts.add(rows.index(whole))
    assert max(starts) - min(starts) > len(rows) / 2
    short = draw.draw(np.random.default_rng(0), passage=True, **options | {"distance": LENGTH})
    assert "passage" not in {question.kind for question in short.questions}


def test_facts_end_where_names_do(lookups):
    draw = copy.copy(lookups["train"])
    form = next(form for form in draw.forms if "name" in form.placeholders)
    draw.entities = replace(draw.entities, names=draw.entities.names[:3])
    asked = draw.draw(np.random.default_rng(0), length=1000, distance=8, forms=[form], facts=8)
    assert len(asked.text) == 1000
    assert 1 <= len(asked.questions) <= 3


def test_facts_that_do_not_fit_are_left_out(lookups):
    draw = lookups["train"]
    options = {"distance": 8, "forms": draw.forms, "facts": 8}
    for length in range(30, 130):
        asked = draw.draw(np.random.default_rng(length), length=length, **options)
        assert len(asked.text) == length
        assert min(8, length // 20) - 1 <= len(asked.questions) <= 8
    assert draw.draw(np.random.default_rng(0), length=8, **options).questions == []


def test_a_form_whose_facts_may_not_fit_is_refused(lookups):
    """Facts about each name with one word, and about each word with one name, are at most as long as was checked."""
    form = Form(kind="keys", state=(" {name} = {word}.",), ask="\n{name} =", answer=" {word}")
    draw = replace(lookups["train"], forms=[form])
    names, words = draw.entities.names, draw.entities.words
    pairs = [(name, words[0]) for name in names] + [(names[0], word) for word in words]
    facts = draw.tokenizer([f" {name} = {word}." for name, word in pairs], add_special_tokens=False)
    longest = max(map(len, facts.input_ids))

    draw.check_that_facts_fit(2 * longest)
    with pytest.raises(UserError, match=r"a fact of the form ' {name} = {word}.' may take "):
        draw.check_that_facts_fit(longest - 1)
