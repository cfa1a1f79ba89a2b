"""No rule that is simpler than the task answers its prompts, except the named shortcuts."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import pytest

from metatokens.tasks import curriculum
from metatokens.tasks.example import Example
from metatokens.tasks.shortcuts import answers

CONDITIONS = ("paper", "landmark", "none", "decoy")
Rule = Callable[[Example], object]


def context_of(example: Example) -> str:
    return example.prompt.rpartition("\nQ: ")[0]


def question_of(example: Example) -> str:
    return example.prompt.rpartition("\nQ: ")[2]


def number(example: Example, which: int = 0) -> int:
    numbers = re.findall(r"\d+", question_of(example))
    return int(numbers[which]) if len(numbers) > which else 0


def asked(example: Example) -> str:
    """The last word of the question: a category, or the word before the text to copy."""
    return re.findall(r"\w+", question_of(example).removesuffix(" _PAUSE_"))[-1]


def words_near_markers() -> Iterator[tuple[str, Rule]]:
    """The word so many places from the marker of that number."""
    for marker in (0, 1, 2, -4, -3, -2):  # the last of all ends the question
        for distance in (-2, -1, 1, 2):

            def rule(example: Example, marker: int = marker, distance: int = distance) -> object:
                words = example.prompt.split()
                places = [place for place, word in enumerate(words) if word == "_PAUSE_"]
                place = places[marker] + distance if -len(places) <= marker < len(places) else -1
                return words[place] if 0 <= place < len(words) else None

            yield f"the word {distance} from marker {marker}", rule


def words_of_lines() -> Iterator[tuple[str, Rule]]:
    """The word of a line at a fixed place, or at the place that the question names."""
    for line in (0, 1, -2, -1):
        for place in (1, 2, 3, -1, None):

            def rule(example: Example, line: int = line, place: int | None = place) -> object:
                lines = context_of(example).replace(" _PAUSE_", "").split("\n")
                words = lines[line].split() if -len(lines) <= line < len(lines) else []
                at = number(example) if place is None else place
                return words[at] if -len(words) <= at < len(words) else None

            yield f"word {place or 'asked for'} of line {line}", rule


def counts_over_spans() -> Iterator[tuple[str, Rule]]:
    """How often a word of the question occurs in a span, plus or minus a little, and whether the number is odd."""
    spans: dict[str, Callable[[Example], str]] = {
        "the prompt": lambda example: context_of(example),
        "its list": lambda example: next(
            (line for line in context_of(example).split("\n") if line.startswith(f"{asked(example)}:")), ""
        ),
        "before the first marker": lambda example: example.prompt.split(" _PAUSE_")[0],
        "before the second marker": lambda example: "".join(example.prompt.split(" _PAUSE_")[:2]),
        "after the first marker": lambda example: "".join(context_of(example).split(" _PAUSE_")[1:]),
        "after the second marker": lambda example: "".join(context_of(example).split(" _PAUSE_")[2:]),
    }
    for name, span in spans.items():
        for more in (-2, -1, 0, 1):

            def count(
                example: Example, span: Callable[[Example], str] = span, more: int = more
            ) -> object:  # of the item that is asked about
                found = re.match(r"How many times does (\w+)", question_of(example))
                return str(span(example).split().count(found[1]) + more) if found else None

            def odd(example: Example, span: Callable[[Example], str] = span, more: int = more) -> object:
                return str((span(example).split().count("1") + more) % 2)

            def present(example: Example, span: Callable[[Example], str] = span, more: int = more) -> object:
                found = re.match(r"How many times does (\w+)", question_of(example))
                return str(int(found[1] in span(example).split()) + max(more, 0)) if found else None

            yield f"count in {name}, {more:+}", count
            yield f"odd in {name}, {more:+}", odd
            yield f"present in {name}, {more:+}", present


def tables() -> Iterator[tuple[str, Rule]]:
    """Keys by which the answer is looked up."""
    yield "nothing", lambda example: None
    yield "the question", question_of
    yield "all before the first marker", lambda example: example.prompt.split(" _PAUSE_")[0]
    yield "the numbers of the question", lambda example: (number(example), number(example, 1))
    yield (
        "words between the first two markers",
        lambda example: len([*example.prompt.split(" _PAUSE_"), ""][1].split()),
    )
    yield "markers", lambda example: len(example.markers)
    yield "tokens", lambda example: example.n_tokens
    for place in range(1, 4):
        yield (
            f"the last {place} words before the first marker",
            lambda example, place=place: tuple(example.prompt.split(" _PAUSE_")[0].split()[-place:]),
        )
        yield (
            f"the first {place} words after the first marker",
            lambda example, place=place: tuple([*example.prompt.split(" _PAUSE_"), ""][1].split()[:place]),
        )
        yield f"the first {place} words", lambda example, place=place: tuple(example.prompt.split()[: place + 1])


def is_the_task(task: str, condition: str, rule: str) -> bool:
    """Whether a rule of the bag does what the task asks."""
    return (
        task == "parity"
        and condition in ("paper", "decoy")
        and rule in ("odd in before the first marker, +0", "odd in before the first marker, -2")
    )


def score_of(rule: Rule, test: list[Example]) -> float:
    return sum(rule(example) == example.completion.strip() for example in test) / len(test)


def score_of_table(key: Rule, train: list[Example], test: list[Example]) -> float:
    seen: dict[object, Counter[str]] = defaultdict(Counter)
    for example in train:
        seen[key(example)][example.completion] += 1
    usual = Counter(example.completion for example in train).most_common(1)[0][0]
    best = {one: counts.most_common(1)[0][0] for one, counts in seen.items()}
    return sum(best.get(key(example), usual) == example.completion for example in test) / len(test)


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("task", curriculum.TASKS)
def test_no_simple_rule_is_better_than_those_that_are_named(task, condition, tokenizer, documents, is_thorough):
    n = 1000 if is_thorough else 250
    data = curriculum.TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
    train = [data.train(index, 128) for index in range(4 * n)]
    test = [data.test(index, 128) for index in range(n)]
    named = {name: sum(right) / n for name, right in answers(task, condition, train, test).items()}
    floor = max(*named.values(), curriculum.chance(task) or 0.0)
    found = {
        name: score_of(rule, test)
        for bag in (words_near_markers(), words_of_lines(), counts_over_spans())
        for name, rule in bag
        if not is_the_task(task, condition, name)
    }
    found |= {f"table of {name}": score_of_table(key, train, test) for name, key in tables()}
    best = max(found, key=lambda name: found[name])
    print(f"{task}, {condition}: floor {100 * floor:.1f} %; the best of {len(found)} rules, {best}: {found[best]:.1%}")
    # The best of a hundred rules is above its expectation by chance: three standard deviations of a coin.
    assert found[best] <= floor + 1.5 / n**0.5 + 0.01, (best, found[best], named)


def test_scores_of_the_named_shortcuts():
    """On prompts written by hand."""

    def right(task: str, condition: str, seen: Example, asked: Example) -> list[bool]:
        return [found for (found,) in answers(task, condition, [seen], [asked]).values()]

    def example(prompt: str, completion: str) -> Example:
        offsets = [found.start() for found in re.finditer(" _PAUSE_", prompt)]
        return Example(
            prompt=prompt, markers=tuple(offsets), completion=completion, input_ids=(), answer_start=0, n_tokens=0
        )

    recall = example(
        "Fruits: plum plum\nTools: saw axe\nFruits: plum _PAUSE_ plum\nQ: What is item 1 of Fruits? _PAUSE_", " plum"
    )
    assert answers("list_recall", "paper", [recall], [recall]) == {
        "the word before the last marker": [True],
        "the word before the last marker but one": [False],
        "the word of that number in the last line": [True],
        "the word of that number in the first line": [True],
        "the commonest word of the list asked for": [True],
        "the commonest answer": [True],
    }
    other = example("Fruits: plum fig _PAUSE_\nTools: saw axe _PAUSE_\nQ: What is item 2 of Fruits? _PAUSE_", " fig")
    assert right("list_recall", "landmark", recall, other) == [False, True, False, True, False, False]
    count = example(
        "Tools: saw _PAUSE_ saw axe saw _PAUSE_\n"
        "Q: How many times does saw appear between the pauses around Tools? _PAUSE_",
        " 2",
    )
    assert answers("segment_counting", "paper", [count], [count]) == {
        "1 if the item is in the segment, else 0": [False],
        "the count in the list up to the segment's end": [False],
        "the count in the list from the segment's start on": [True],
        "the count in the whole list": [False],
        "the count in the whole list, less one": [True],
        "the commonest answer": [True],
        "a table of the whole list's count and the segment's length": [True],
    }
    items = example(
        "Tools: saw axe saw _PAUSE_\nQ: How many times does saw appear in items 2 to 3 of Tools? _PAUSE_", " 1"
    )
    assert right("segment_counting", "landmark", count, items) == [True, False, True, False, True, False, False]
    bits = example("Bits: 1 0 1 _PAUSE_ 1 1\nQ: What is the XOR of all bits before this pause? _PAUSE_", " 0")
    assert right("parity", "paper", bits, bits) == [False, True, True, True, True]
    first = example("Bits: 1 0 1 _PAUSE_ 1 1 0 _PAUSE_\nQ: What is the XOR of the first 2 bits? _PAUSE_", " 1")
    assert right("parity", "landmark", bits, first) == [False, True, False, False, False, False]
    copied = example("one two _PAUSE_ three four _PAUSE_\nQ: Copy the 2 words after two. _PAUSE_", " three four")
    assert right("copying", "landmark", bits, copied) == [True, False]
