"""Each task against a solver that was written from its description and reads only the prompt's text."""

import re

import pytest

from metatokens.tasks import curriculum

MARKER = r" (?:_PAUSE_|\|)"


def solve_list_recall(prompt: str) -> str:
    context, place, category = re.fullmatch(
        r"(.*)\nQ: What is item (\d+) of (\w+)\? _PAUSE_", prompt, re.DOTALL
    ).groups()
    *lists, repeated = context.split("\n")
    items = {name: rest.split() for name, rest in (re.sub(MARKER, "", line).split(":") for line in lists)}
    assert not any(re.search(rf"{category}:.*{MARKER}", line) for line in lists), "decoys are in other lists"
    heading, *words = repeated.split()
    assert heading == f"{category}:"
    marker = next(i for i, word in enumerate(words) if word in ("_PAUSE_", "|"))
    assert marker == int(place), "the marker stands right after the item asked for"
    assert [word for word in words if word not in ("_PAUSE_", "|")] == items[category]
    return " " + items[category][int(place) - 1]


def solve_segment_counting(prompt: str) -> str:
    context, item, category = re.fullmatch(
        r"(.*)\nQ: How many times does (\w+) appear between the (?:pauses|bars) around (\w+)\? _PAUSE_",
        prompt,
        re.DOTALL,
    ).groups()
    (line,) = [line for line in context.split("\n") if line.startswith(f"{category}:")]
    _, bracketed, _ = re.split(MARKER, line)
    return f" {bracketed.split().count(item)}"


def solve_parity(prompt: str) -> str:
    bits = re.fullmatch(
        rf"Bits:([ 01]+?){MARKER}.*\nQ: What is the XOR of all bits before this (?:pause|bar)\? _PAUSE_",
        prompt,
    ).group(1)
    result = 0
    for bit in bits.split():
        result ^= int(bit)
    return f" {result}"


def solve_copying(prompt: str) -> str:
    context, first = re.fullmatch(r"(.*)\nQ: Copy the (first )?bracketed text\. _PAUSE_", prompt, re.DOTALL).groups()
    parts = re.split(MARKER, context)
    assert len(parts) > 3 if first else len(parts) == 3
    return parts[1]


SOLVERS = {
    "list_recall": solve_list_recall,
    "segment_counting": solve_segment_counting,
    "parity": solve_parity,
    "copying": solve_copying,
}


@pytest.mark.parametrize("phase", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("condition", ["paper", "none", "decoy"])
@pytest.mark.parametrize("task", SOLVERS)
def test_solver_agrees(task, condition, phase, tokenizer, documents, is_thorough):
    data = curriculum.TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
    for index in range(1000 if is_thorough else 60):
        example = data.sample(index, phase, "test" if index % 50 == 0 else "train")
        assert SOLVERS[task](example.prompt) == example.completion, (index, example.prompt)


PAPER_EXAMPLES = {  # the prompts of the paper's appendix, the text to copy shortened
    "list_recall": (
        "Fruits: orange peach banana plum\nTools: hammer wrench level pliers\n"
        "Sports: boxing baseball boxing golf\nSpices: turmeric cardamom cumin cinnamon\n"
        "Animals: cat tiger wolf fox\nProfessions: teacher nurse lawyer architect\n"
        "Vegetables: onion cucumber broccoli cucumber\nInstruments: piano clarinet violin piano\n"
        "Professions: teacher nurse lawyer _PAUSE_ architect\n"
        "Q: What is item 3 of Professions? _PAUSE_",
        " lawyer",
    ),
    "segment_counting": (
        "Fruits: orange peach banana plum\nTools: _PAUSE_ hammer wrench level pliers _PAUSE_\n"
        "Sports: boxing baseball boxing golf\nSpices: turmeric cardamom cumin cinnamon\n"
        "Q: How many times does wrench appear between the pauses around Tools? _PAUSE_",
        " 1",
    ),
    "parity": ("Bits: 0 _PAUSE_ 1 0 0\nQ: What is the XOR of all bits before this pause? _PAUSE_", " 0"),
    "copying": (
        "...as ever Mr _PAUSE_. Darcy had been, was much\nrelieved _PAUSE_ by it.\nQ: Copy the bracketed text. _PAUSE_",
        ". Darcy had been, was much\nrelieved",
    ),
}

_LIST = r"[A-Z][a-z]+:(?: [a-z]+)+"
FORMATS = {
    "list_recall": (rf"({_LIST}\n)+{_LIST} _PAUSE_(?: [a-z]+)*\nQ: What is item \d+ of [A-Z][a-z]+\? _PAUSE_"),
    "segment_counting": (
        rf"({_LIST}\n)*[A-Z][a-z]+:(?: [a-z]+)* _PAUSE_(?: [a-z]+)+ _PAUSE_(?: [a-z]+)*\n({_LIST}\n)*"
        r"Q: How many times does [a-z]+ appear between the pauses around [A-Z][a-z]+\? _PAUSE_"
    ),
    "parity": r"Bits:( [01])+ _PAUSE_( [01])+\nQ: What is the XOR of all bits before this pause\? _PAUSE_",
    "copying": r"(?s:.*) _PAUSE_(?s:.+) _PAUSE_(?s:.*)\nQ: Copy the bracketed text\. _PAUSE_",
}


@pytest.mark.parametrize("task", PAPER_EXAMPLES)
def test_prompts_have_the_form_of_the_papers_example(task, tokenizer, documents):
    prompt, completion = PAPER_EXAMPLES[task]
    assert re.fullmatch(FORMATS[task], prompt)
    assert SOLVERS[task](prompt) == completion
    data = curriculum.TaskData(task, tokenizer=tokenizer, documents=documents)
    for index in range(60):
        assert re.fullmatch(FORMATS[task], data.sample(index, 1 + index % 3, "train").prompt)


@pytest.mark.parametrize("task", SOLVERS)
def test_conditions_differ_in_their_markers_only(task, tokenizer, documents):
    paper, none, decoy = (
        curriculum.TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
        for condition in ("paper", "none", "decoy")
    )
    compared = 0
    for index in range(60):
        examples = [data.sample(index, 1, "train") for data in (paper, none, decoy)]
        if task == "copying" and examples[0].completion != examples[2].completion:
            continue  # without room for a decoy another content is drawn
        texts = [re.sub(MARKER, "", example.prompt) for example in examples]
        assert "pause" not in texts[1]
        assert texts[1].replace("this bar?", "this pause?").replace("the bars", "the pauses") == texts[0]
        assert texts[2].replace("the first bracketed", "the bracketed") == texts[0]
        assert [len(example.markers) for example in examples[:2]] == [
            2 if task in ("list_recall", "parity") else 3,
            1,
        ]
        assert len(examples[2].markers) > len(examples[0].markers)
        compared += 1
    assert compared > 45
