"""Each task against a solver that was written from its description and reads only the prompt's text."""

import re

import pytest

from metatokens.tasks import curriculum, module_of
from metatokens.tasks.phases import Sizes
from tests.tasks.conftest import CASES

MARKER = " _PAUSE_"


def solve_list_recall(prompt: str, condition: str) -> str:
    context, place, category = re.fullmatch(
        r"(.*)\nQ: What is item (\d+) of (\w+)\? _PAUSE_", prompt, re.DOTALL
    ).groups()
    lists = context.split("\n")
    if condition in ("paper", "decoy"):
        first_of = [line.split(":")[0] for line in lists]
        again = [line for line, name in enumerate(first_of) if name in first_of[:line]]
        lists, repeated = lists[: again[0]], lists[again[0] :]
        assert len(repeated) == (1 if condition == "paper" else min(2, len(lists)))
        (asked,) = [line for line in repeated if line.startswith(f"{category}:")]
        words = asked.split()[1:]
        marked = [at - words[:at].count("_PAUSE_") for at, word in enumerate(words) if word == "_PAUSE_"]
        assert int(place) in marked, "a marker follows the item asked for"
    items = {name: rest.split() for name, rest in (line.replace(MARKER, "").split(":") for line in lists)}
    assert len(items) == len(lists), "nothing else is repeated"
    if condition in ("paper", "decoy"):
        assert [word for word in words if word != "_PAUSE_"] == items[category]
        assert not any(line.startswith(f"{category}:") and MARKER in line for line in lists)
        if condition == "paper":
            assert words.count("_PAUSE_") == context.count(MARKER) == 1
    if condition == "landmark" or condition.startswith("facts_"):
        every = 1 if condition == "landmark" else int(condition.removeprefix("facts_"))
        marked = [place % every == 0 or place == len(lists) for place in range(1, len(lists) + 1)]
        assert [line.endswith(MARKER) and line.count(MARKER) == 1 for line in lists] == marked
        assert context.count(MARKER) == sum(marked)
    return " " + items[category][int(place) - 1]


def solve_segment_counting(prompt: str, condition: str) -> str:
    if condition in ("landmark", "none"):
        context, item, first, last, category = re.fullmatch(
            r"(.*)\nQ: How many times does (\w+) appear in items (\d+) to (\d+) of (\w+)\? _PAUSE_", prompt, re.DOTALL
        ).groups()
        (line,) = [line.replace(MARKER, "") for line in context.split("\n") if line.startswith(f"{category}:")]
        bracketed = " ".join(line.split()[int(first) : int(last) + 1])
    else:
        context, item, category = re.fullmatch(
            r"(.*)\nQ: How many times does (\w+) appear between the pauses around (\w+)\? _PAUSE_", prompt, re.DOTALL
        ).groups()
        (line,) = [line for line in context.split("\n") if line.startswith(f"{category}:")]
        _, bracketed, _ = line.split(MARKER)
    assert len(bracketed.split()) < len(line.replace(MARKER, "").split()) - 1, "the whole list is never asked about"
    return f" {bracketed.split().count(item)}"


def solve_parity(prompt: str, condition: str) -> str:
    if condition in ("landmark", "none"):
        bits, marked = re.fullmatch(r"Bits:(.*)\nQ: What is the XOR of the first (\d+) bits\? _PAUSE_", prompt).groups()
        bits = bits.replace(MARKER, "").split()[: int(marked)]
    else:
        form = r"Bits:([ 01]+?) _PAUSE_.*\nQ: What is the XOR of all bits before this pause\? _PAUSE_"
        bits = re.fullmatch(form, prompt).group(1).split()
    result = 0
    for bit in bits:
        result ^= int(bit)
    return f" {result}"


def solve_copying(prompt: str, condition: str) -> str:
    context, question = re.fullmatch(r"(.*)\nQ: Copy the (.*) _PAUSE_", prompt, re.DOTALL).groups()
    if condition in ("paper", "decoy"):
        parts = context.split(MARKER)
        assert question == ("first bracketed text." if condition == "decoy" else "bracketed text.")
        assert len(parts) > 3 if condition == "decoy" else len(parts) == 3
        return parts[1]
    if condition == "landmark":
        pieces = [len(re.findall(r"\w+|[^\w\s]+", part)) for part in context.split(MARKER)[:-1]]
        assert len(set(pieces)) == 1, "a marker follows each line, all of equal length"
    words = re.findall(r"\s*(?:\w+|[^\w\s]+)", context.replace(MARKER, ""))
    if first := re.fullmatch(r"first (\d+) words\.", question):
        return "".join(words[: int(first[1])])
    n, before = re.fullmatch(r"(\d+) words after (.*)", question, re.DOTALL).groups()
    wanted = re.findall(r"\w+|[^\w\s]+", before)
    (start,) = [
        place + len(wanted)
        for place in range(len(words))
        if [word.strip() for word in words[place : place + len(wanted)]] == wanted
        and "".join(words[place : place + len(wanted)]).split() == before.split()
    ]
    return "".join(words[start : start + int(n)])


SOLVERS = {
    "list_recall": solve_list_recall,
    "segment_counting": solve_segment_counting,
    "parity": solve_parity,
    "copying": solve_copying,
}


def solve(task: str, prompt: str, condition: str) -> str:
    """The completion, by the prompt's text; prompts of `long_prompt` have the form of those of `paper`."""
    return SOLVERS[task](prompt, "paper" if condition == "long_prompt" else condition)


@pytest.mark.parametrize("phase", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("task", "condition"), CASES)
def test_solver_agrees(task, condition, phase, tokenizer, documents, is_thorough):
    data = curriculum.TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
    for index in range(1000 if is_thorough else 60):
        example = data.sample(index, phase, "test" if index % 50 == 0 else "train")
        assert solve(task, example.prompt, condition) == example.completion, (index, example.prompt)


@pytest.mark.parametrize(
    ("task", "condition"),
    [
        case
        for case in CASES
        if case[0] in ("list_recall", "parity")
        or (
            case[0] == "segment_counting" and case[1] in ("paper", "landmark", "none")
        )  # whose decoys are in other lists
    ],
)
def test_one_list_is_enough(task, condition, tokenizer):
    data = curriculum.TaskData(task, tokenizer=tokenizer, condition=condition)
    for index in range(40):
        example = data.train(index, 128, Sizes((1, 1), ((3, 6),)))
        assert solve(task, example.prompt, condition) == example.completion, (index, example.prompt)


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


@pytest.mark.parametrize("task", FORMATS)
def test_the_example_that_a_task_draws_is_right(task):
    docstring = module_of(task).__doc__
    drawn = re.search(r"^ *prompt    (.*?)\n *answer   ( .*?)$", docstring, re.DOTALL | re.MULTILINE)
    prompt, answer = re.sub(r"\n +", "\n", drawn[1]), drawn[2]
    assert re.fullmatch(FORMATS[task], prompt)
    assert solve(task, prompt, "paper") == answer


@pytest.mark.parametrize("task", PAPER_EXAMPLES)
def test_prompts_have_the_form_of_the_papers_example(task, tokenizer, documents):
    prompt, completion = PAPER_EXAMPLES[task]
    assert re.fullmatch(FORMATS[task], prompt)
    assert task == "segment_counting" or solve(task, prompt, "paper") == completion  # whose example is a whole list
    data = curriculum.TaskData(task, tokenizer=tokenizer, documents=documents)
    for index in range(60):
        assert re.fullmatch(FORMATS[task], data.sample(index, 1 + index % 3, "train").prompt)


@pytest.mark.parametrize("task", SOLVERS)
def test_conditions_show_the_same_content(task, tokenizer, documents):
    shown = {
        condition: curriculum.TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
        for condition in ("paper", "landmark", "none", "decoy")
    }
    compared = 0
    for index in range(60):
        paper, landmark, none, decoy = (data.sample(index, 1, "train") for data in shown.values())
        if len({one.completion for one in (paper, landmark, none, decoy)}) > 1:
            continue  # without room for a decoy, or a way to ask, another content is drawn
        contexts = [one.prompt.replace(MARKER, "").rpartition("\nQ: ")[0] for one in (paper, landmark, none, decoy)]
        lists = contexts[0].rpartition("\n")[0] if task == "list_recall" else contexts[0]
        assert contexts[2] == contexts[1] == lists
        assert set(contexts[3].split("\n")) == set(lists.split("\n"))
        assert landmark.prompt.replace(MARKER, "") == none.prompt.replace(MARKER, "")
        assert len(none.markers) == 1
        assert "pause" not in none.prompt
        assert len(paper.markers) == (2 if task in ("list_recall", "parity") else 3)
        assert len(decoy.markers) > len(paper.markers)
        compared += 1
    assert compared > 25
