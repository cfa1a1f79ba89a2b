"""Each task against a solver that was written from its description and reads only the prompt's text."""

import re

import pytest

from metatokens.tasks.curriculum import TaskData
from tests.tasks.conftest import CASES

MARKER = " _PAUSE_"
MARKED = ("paper", "decoy")  # conditions in which a marker shows what is asked about


def solve_list_recall(prompt, condition):
    form = r"(.*)\nQ: What is item (\d+) of (\w+)\? _PAUSE_"
    context, number, category = re.fullmatch(form, prompt, re.DOTALL).groups()
    lists, repeated = first_and_repeated(context.split("\n"))
    items = {}
    for line in lists:
        name, words = line.replace(MARKER, "").split(":")
        items[name] = words.split()
    if condition in MARKED:
        assert len(repeated) == (1 if condition == "paper" else min(2, len(lists)))
        check_the_repeated_list(lists, repeated, category, items[category], int(number))
        assert condition == "decoy" or context.count(MARKER) == 1
    else:
        assert repeated == []
    if condition == "landmark" or condition.startswith("facts_"):
        every = 1 if condition == "landmark" else int(condition.removeprefix("facts_"))
        check_landmarks(lists, every)
    return " " + items[category][int(number) - 1]


def first_and_repeated(lines):
    """The lists up to the first that repeats a category, and the others."""
    categories = set()
    for number, line in enumerate(lines):
        category, _, _ = line.partition(":")
        if category in categories:
            return lines[:number], lines[number:]
        categories.add(category)
    return lines, []


def check_the_repeated_list(lists, repeated, category, items, number):
    [asked] = (line for line in repeated if line.startswith(f"{category}:"))
    assert asked.replace(MARKER, "").split()[1:] == items
    before_markers = [len(before.split()) for before in prefixes(asked)]
    assert number in before_markers, "a marker follows the item asked for"
    [first] = (line for line in lists if line.startswith(f"{category}:"))
    assert MARKER not in first


def prefixes(line):
    """The items of a list before each of its markers."""
    segments = line.partition(":")[2].split(MARKER)
    return ["".join(segments[:count]) for count in range(1, len(segments))]


def check_landmarks(lists, every):
    """A marker is behind every so many lists, and behind the last."""
    for number, line in enumerate(lists, start=1):
        is_marked = number % every == 0 or number == len(lists)
        assert line.count(MARKER) == is_marked
        assert line.endswith(MARKER) == is_marked


def solve_segment_counting(prompt, condition):
    if condition in MARKED:
        form = (
            r"(.*)\nQ: How many times does (\w+) appear between the pauses around (\w+)\? _PAUSE_"
        )
        context, item, category = re.fullmatch(form, prompt, re.DOTALL).groups()
        line = line_of(context, category)
        _, segment, _ = line.split(MARKER)
    else:
        form = (
            r"(.*)\nQ: How many times does (\w+) appear in items (\d+) to (\d+) of (\w+)\? _PAUSE_"
        )
        context, item, first, last, category = re.fullmatch(form, prompt, re.DOTALL).groups()
        line = line_of(context, category).replace(MARKER, "")
        segment = " ".join(line.split()[int(first) : int(last) + 1])
    items = line.replace(MARKER, "").split()[1:]
    assert len(segment.split()) < len(items), "the whole list is never asked about"
    return f" {segment.split().count(item)}"


def line_of(context, category):
    [line] = (line for line in context.split("\n") if line.startswith(f"{category}:"))
    return line


def solve_parity(prompt, condition):
    if condition in MARKED:
        form = (
            r"Bits:([ 01]+?) _PAUSE_.*\nQ: What is the XOR of all bits before this pause\? _PAUSE_"
        )
        bits = re.fullmatch(form, prompt)[1].split()
    else:
        form = r"Bits:(.*)\nQ: What is the XOR of the first (\d+) bits\? _PAUSE_"
        bits, marked = re.fullmatch(form, prompt).groups()
        bits = bits.replace(MARKER, "").split()[: int(marked)]
    return f" {bits.count('1') % 2}"


def solve_copying(prompt, condition):
    context, question = re.fullmatch(r"(.*)\nQ: Copy the (.*) _PAUSE_", prompt, re.DOTALL).groups()
    segments = context.split(MARKER)
    if condition == "paper":
        assert question == "bracketed text."
        _, bracketed, _ = segments
        return bracketed
    if condition == "decoy":
        assert question == "first bracketed text."
        assert len(segments) > 3
        return segments[1]
    if condition == "landmark":
        lengths = {len(re.findall(r"\w+|[^\w\s]+", segment)) for segment in segments[:-1]}
        assert len(lengths) == 1, "a marker follows each line, all of equal length"
    return words_asked_for("".join(segments), question)


def words_asked_for(context, question):
    """The first so many words, or so many after some others."""
    words = re.findall(r"\s*(?:\w+|[^\w\s]+)", context)
    if first := re.fullmatch(r"first (\d+) words\.", question):
        return "".join(words[: int(first[1])])
    count, before = re.fullmatch(r"(\d+) words after (.*)", question, re.DOTALL).groups()
    length = len(re.findall(r"\w+|[^\w\s]+", before))
    starts = []
    for start in range(length, len(words)):
        if "".join(words[start - length : start]).split() == before.split():
            starts.append(start)
    [start] = starts
    return "".join(words[start : start + int(count)])


SOLVERS = {
    "list_recall": solve_list_recall,
    "segment_counting": solve_segment_counting,
    "parity": solve_parity,
    "copying": solve_copying,
}


def solve(task, prompt, condition):
    """The completion, by the prompt's text; prompts of `long_prompt` have the form of those of `paper`."""
    return SOLVERS[task](prompt, "paper" if condition == "long_prompt" else condition)


@pytest.mark.parametrize("phase", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("task", "condition"), CASES)
def test_solver_agrees(task, condition, phase, tokenizer, documents, is_thorough):
    data = TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
    for index in range(1000 if is_thorough else 60):
        example = data.sample(index, phase, "test" if index % 50 == 0 else "train")
        assert solve(task, example.prompt, condition) == example.completion, (
            index,
            example.prompt,
        )


PAPER_EXAMPLES = {  # the prompts of the paper's appendix, the text to copy shortened
    "list_recall": (
        "Fruits: orange peach banana plum\nTools: hammer wrench level pliers\n"
        "Sports: boxing baseball boxing golf\nSpices: turmeric cardamom cumin cinnamon\n"
        "Animals: cat tiger wolf fox\nProfessions: teacher nurse lawyer architect\n"
        "Vegetables: onion cucumber broccoli cucumber\nInstruments: piano clarinet violin piano\n"
        "Professions: teacher nurse lawyer _PAUSE_ architect\n"
        "Q: What is item 3 of Professions? _PAUSE_"
    ),
    "segment_counting": (
        "Fruits: orange peach banana plum\nTools: _PAUSE_ hammer wrench level pliers _PAUSE_\n"
        "Sports: boxing baseball boxing golf\nSpices: turmeric cardamom cumin cinnamon\n"
        "Q: How many times does wrench appear between the pauses around Tools? _PAUSE_"
    ),
    "parity": "Bits: 0 _PAUSE_ 1 0 0\nQ: What is the XOR of all bits before this pause? _PAUSE_",
    "copying": (
        "...as ever Mr _PAUSE_. Darcy had been, was much\nrelieved _PAUSE_ by it.\nQ: Copy the bracketed text. _PAUSE_"
    ),
}

_LIST = r"[A-Z][a-z]+:(?: [a-z]+)+"
FORMATS = {
    "list_recall": rf"({_LIST}\n)+{_LIST} _PAUSE_(?: [a-z]+)*\nQ: What is item \d+ of [A-Z][a-z]+\? _PAUSE_",
    "segment_counting": (
        rf"({_LIST}\n)*[A-Z][a-z]+:(?: [a-z]+)* _PAUSE_(?: [a-z]+)+ _PAUSE_(?: [a-z]+)*\n({_LIST}\n)*"
        r"Q: How many times does [a-z]+ appear between the pauses around [A-Z][a-z]+\? _PAUSE_"
    ),
    "parity": r"Bits:( [01])+ _PAUSE_( [01])+\nQ: What is the XOR of all bits before this pause\? _PAUSE_",
    "copying": r"(?s:.*) _PAUSE_(?s:.+) _PAUSE_(?s:.*)\nQ: Copy the bracketed text\. _PAUSE_",
}


@pytest.mark.parametrize("task", FORMATS)
def test_prompts_have_the_form_of_the_papers_example(task, tokenizer, documents):
    data = TaskData(task, tokenizer=tokenizer, documents=documents)

    assert re.fullmatch(FORMATS[task], PAPER_EXAMPLES[task])
    for index in range(60):
        assert re.fullmatch(FORMATS[task], data.sample(index, 1 + index % 3, "train").prompt)


@pytest.mark.parametrize("task", SOLVERS)
def test_conditions_show_the_same_content(task, tokenizer, documents):
    sources = [
        TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
        for condition in ("paper", "landmark", "decoy")
    ]
    compared = 0
    for index in range(60):
        examples = [source.sample(index, 1, "train") for source in sources]
        if len({example.completion for example in examples}) > 1:
            continue  # without room for a decoy, or a way to ask, another content is drawn
        compared += 1
        paper, landmark, decoy = examples
        lists = context_of(landmark)
        assert context_of(paper).startswith(lists)
        assert task == "list_recall" or context_of(paper) == lists
        assert set(context_of(decoy).split("\n")) == set(lists.split("\n"))
        assert len(decoy.markers) > len(paper.markers)
    assert compared > 25


def context_of(example):
    """What is before the question, without markers."""
    return example.prompt.replace(MARKER, "").rpartition("\nQ: ")[0]
