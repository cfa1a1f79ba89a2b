"""No rule that is simpler than the task answers its prompts, except the named shortcuts."""

import re
from collections import Counter, defaultdict

import pytest

from metatokens.tasks import curriculum, module_of
from metatokens.tasks.example import Example
from metatokens.tasks.shortcuts import answers

CONDITIONS = ("paper", "landmark", "decoy")


def context_of(example):
    return example.prompt.rpartition("\nQ: ")[0]


def question_of(example):
    return example.prompt.rpartition("\nQ: ")[2]


def segments_of(example):
    """The text between markers."""
    return example.prompt.split(" _PAUSE_")


def numbers_of(example):
    """The numbers in the question."""
    return tuple(int(number) for number in re.findall(r"\d+", question_of(example)))


def item_or_none(words, position):
    return words[position] if -len(words) <= position < len(words) else None


def rules_of_words_near_markers():
    """The word so many positions from the marker of that number."""
    rules = {}
    for marker in (0, 1, 2, -4, -3, -2):  # the last of all ends the question
        for distance in (-2, -1, 1, 2):

            def word(example, marker=marker, distance=distance):
                words = example.prompt.split()
                markers = [position for position, word in enumerate(words) if word == "_PAUSE_"]
                position = item_or_none(markers, marker)
                return None if position is None else item_or_none(words, position + distance)

            rules[f"the word {distance} from marker {marker}"] = word
    return rules


def rules_of_words_of_lines():
    """The word of a line at a fixed position, or at the position that the question names."""
    rules = {}
    for line in (0, 1, -2, -1):
        for position in (1, 2, 3, -1, None):

            def word(example, line=line, position=position):
                lines = context_of(example).replace(" _PAUSE_", "").split("\n")
                words = (item_or_none(lines, line) or "").split()
                asked_for = (*numbers_of(example), 0)[0]
                return item_or_none(words, asked_for if position is None else position)

            rules[f"word {position} of line {line}"] = word
    return rules


def its_list(example):
    """The list that the question names."""
    category = re.findall(r"\w+", question_of(example).removesuffix(" _PAUSE_"))[-1]
    for line in context_of(example).split("\n"):
        if line.startswith(f"{category}:"):
            return line
    return ""


SPANS = {
    "the prompt": context_of,
    "its list": its_list,
    "before the first marker": lambda example: segments_of(example)[0],
    "before the second marker": lambda example: "".join(segments_of(example)[:2]),
    "after the first marker": lambda example: "".join(context_of(example).split(" _PAUSE_")[1:]),
    "after the second marker": lambda example: "".join(context_of(example).split(" _PAUSE_")[2:]),
}


def rules_of_counts():
    """How often the item of the question occurs in a span, plus or minus a little, and whether ones are odd."""
    rules = {}
    for name, span in SPANS.items():
        for more in (-2, -1, 0, 1):

            def count(example, span=span, more=more):
                item = re.match(r"How many times does (\w+)", question_of(example))
                return str(span(example).split().count(item[1]) + more) if item else None

            rules[f"count in {name}, {more:+}"] = count
        for more in (0, 1):

            def odd(example, span=span, more=more):
                return str((span(example).split().count("1") + more) % 2)

            rules[f"odd in {name}, {more:+}"] = odd
    return rules


# Keys by which the answer is looked up.
TABLES = {
    "nothing": lambda example: None,
    "the question": question_of,
    "the numbers of the question": numbers_of,
    "all before the first marker": lambda example: segments_of(example)[0],
    "the two words before the first marker": lambda example: tuple(
        segments_of(example)[0].split()[-2:]
    ),
    "the two words after the first marker": lambda example: tuple(
        segments_of(example)[1].split()[:2]
    ),
    "the first three words": lambda example: tuple(example.prompt.split()[:3]),
    "the number of markers": lambda example: len(example.markers),
    "the number of tokens": lambda example: example.n_tokens,
}


def score_of_rule(rule, test):
    return sum(rule(example) == example.completion.strip() for example in test) / len(test)


def score_of_table(key, train, test):
    counts = defaultdict(Counter)
    for example in train:
        counts[key(example)][example.completion] += 1
    [(usual, _)] = Counter(example.completion for example in train).most_common(1)
    right = 0
    for example in test:
        known = counts.get(key(example), Counter([usual]))
        right += known.most_common(1)[0][0] == example.completion
    return right / len(test)


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("task", curriculum.TASKS)
def test_no_simple_rule_is_better_than_those_that_are_named(
    task, condition, tokenizer, documents, is_thorough
):
    count = 1000 if is_thorough else 250
    data = curriculum.TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
    train = [data.train(index, 128) for index in range(4 * count)]
    test = [data.test(index, 128) for index in range(count)]
    named = {
        name: sum(is_right) / count
        for name, is_right in answers(task, condition, train, test).items()
    }
    if (task, condition) != ("list_recall", "paper"):  # where the paper's prompts give it away
        assert max(named.values()) < 0.9
    floor = max(*named.values(), module_of(task).CHANCE or 0.0)

    rules = rules_of_words_near_markers() | rules_of_words_of_lines() | rules_of_counts()
    if task == "parity" and condition in ("paper", "decoy"):
        del rules["odd in before the first marker, +0"]  # the task itself
    scores = {name: score_of_rule(rule, test) for name, rule in rules.items()}
    for name, key in TABLES.items():
        scores[f"table of {name}"] = score_of_table(key, train, test)

    best = max(scores, key=scores.get)
    # The best of a hundred rules is above its expectation by chance: three standard deviations of a coin.
    assert scores[best] <= floor + 1.5 / count**0.5 + 0.01, (best, scores[best], named)


def example_of(prompt, completion):
    """An example written by hand, which no tokenizer encoded."""
    markers = tuple(marker.start() for marker in re.finditer(" _PAUSE_", prompt))
    return Example(
        prompt=prompt,
        markers=markers,
        completion=completion,
        input_ids=(),
        answer_start=0,
    )


@pytest.mark.parametrize(
    ("task", "condition", "prompt", "completion", "right", "wrong"),
    [
        (
            "list_recall",
            "paper",
            "Fruits: plum plum\nTools: saw axe\nFruits: plum _PAUSE_ plum\nQ: What is item 1 of Fruits? _PAUSE_",
            " plum",
            [
                "the word before the last marker",
                "the word of that number in the last line",
                "the word of that number in the first line",
                "the commonest word of the list asked for",
                "the commonest answer",
            ],
            ["the word before the last marker but one"],
        ),
        (
            "segment_counting",
            "paper",
            "Tools: saw _PAUSE_ saw axe saw _PAUSE_\n"
            "Q: How many times does saw appear between the pauses around Tools? _PAUSE_",
            " 2",
            [
                "the count in the list from the segment's start on",
                "the count in the whole list, less one",
                "the commonest answer",
                "a table of the whole list's count and the segment's length",
            ],
            [
                "1 if the item is in the segment, else 0",
                "the count in the list up to the segment's end",
                "the count in the whole list",
            ],
        ),
        (
            "parity",
            "paper",
            "Bits: 1 0 _PAUSE_ 1 0 0\nQ: What is the XOR of all bits before this pause? _PAUSE_",
            " 1",
            [
                "the opposite of the last bit that is asked about",
                "the commonest answer",
                "a table of the bits that are asked about",
            ],
            ["the last bit that is asked about", "the XOR of all bits"],
        ),
        (
            "parity",
            "landmark",
            "Bits: 1 1 _PAUSE_ 1 1 0 _PAUSE_\nQ: What is the XOR of the first 3 bits? _PAUSE_",
            " 1",
            [
                "the last bit that is asked about",
                "the commonest answer",
                "a table of the bits that are asked about",
            ],
            [
                "the opposite of the last bit that is asked about",
                "the XOR of all bits",
                "the XOR of the bits before the first marker",
            ],
        ),
        (
            "copying",
            "landmark",
            "There was _PAUSE_ hardly a _PAUSE_ clue to\nQ: Copy the 2 words after There was _PAUSE_",
            " hardly a",
            ["the text between the first two markers", "the commonest answer"],
            [],
        ),
    ],
    ids=["list_recall", "segment_counting", "parity", "parity, landmark", "copying, landmark"],
)
def test_the_named_shortcuts_on_a_prompt_written_by_hand(
    task, condition, prompt, completion, right, wrong
):
    example = example_of(prompt, completion)

    answered = answers(task, condition, [example], [example])

    assert answered.keys() == {*right, *wrong}
    for name, [is_right] in answered.items():
        assert is_right == (name in right)
