"""Accuracy against greedy generation, token by token, and the fixed test set."""

import base64
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from metatokens.checkpoint import EXAMPLE, load_model
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import load_tokenizer
from metatokens.evaluation import accuracy
from metatokens.evaluation.accuracy import (
    draw_test_examples,
    evaluate,
    score,
    shortcut_rates,
)
from metatokens.evaluation.intervals import clustered_interval
from metatokens.files import sha256_of
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.records import About, Result
from metatokens.tasks.curriculum import TASKS
from metatokens.tasks.example import Example
from metatokens.tasks.landmarks_alone import LandmarksAlone
from tests.paper.report.made_lines import wilson

Models = Callable[..., Path]
Draw = Callable[..., list[Example]]

MODELS = {
    "meta, rope": {},
    "twin, learned": {"second_attention": "causal", "position_embedding": "learned"},
    "pause, no positions": {"second_attention": "none", "position_embedding": "none"},
}


@pytest.fixture(scope="module")
def draw(small_corpus: Path, small_store: TokenStore) -> Draw:
    """Draws the first test examples of a task and a length."""
    text = small_corpus.read_text()
    documents = [text, *text.split("\n\n")]

    def draw(task: str, length: int, n: int, condition: str = "paper") -> list[Example]:
        tokenizer = small_store.tokenizer
        return accuracy.draw_test_examples(
            task, length, n, tokenizer, condition=condition, documents=documents
        )

    return draw


def prompt_of(example: Example) -> tuple[int, ...]:
    return tuple(example.input_ids[: example.answer_start])


def greedy(model: MetaGPT2ForCausalLM, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The answer of `generate`."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return tuple(output[0, len(prompt) :].tolist())


@torch.inference_mode()
def correct_tokens(model: MetaGPT2ForCausalLM, example: Example) -> list[bool]:
    """Whether each answer token is the likeliest one except the meta-token, with a forward pass for each."""
    is_correct = []
    for end in range(example.answer_start, len(example.input_ids)):
        logits = model(torch.tensor([example.input_ids[:end]])).logits[0, -1]
        logits[model.config.meta_token_id] = -torch.inf
        is_correct.append(int(logits.argmax()) == example.input_ids[end])
    return is_correct


def one_by_one(model: MetaGPT2ForCausalLM, examples: list[Example]) -> tuple[list[bool], list[int]]:
    """What `score` gives: whether the greedy answer is exact, and the number of correct tokens."""
    exact, tokens = [], []
    for example in examples:
        answer = example.input_ids[example.answer_start :]
        exact.append(greedy(model, prompt_of(example), len(answer)) == answer)
        tokens.append(sum(correct_tokens(model, example)))
    return exact, tokens


def some_answered_right(model: MetaGPT2ForCausalLM, examples: list[Example]) -> list[Example]:
    """Keep every third example; give the next the model's own answer, and the third that answer with a wrong end."""
    changed = []
    for number, example in enumerate(examples):
        *answer, last = greedy(model, prompt_of(example), 3)
        variants = [
            example.input_ids,
            (*prompt_of(example), *answer, last),
            (*prompt_of(example), *answer, (last + 1) % 700),
        ]
        changed.append(dataclasses.replace(example, input_ids=variants[number % 3]))
    return changed


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("task", TASKS)
def test_scores_are_those_of_greedy_generation(
    task: str, changes: dict[str, str], small_model: Models, draw: Draw
) -> None:
    model = load_model(small_model(**changes))
    examples = some_answered_right(model, draw(task, 64, 9))
    exact, tokens = score(model, examples)
    assert (exact, tokens) == one_by_one(model, examples)
    assert 3 <= sum(exact) < 9


def test_what_is_measured_through_landmarks_says_so_and_what_is_kept(
    small_model: Models, draw: Draw
) -> None:
    model, tokenizer = load_model(small_model()), load_tokenizer(str(small_model()))
    examples = draw("list_recall", 128, 5, "landmark")
    alone = LandmarksAlone(model, tokenizer)
    documents = [example.input_ids[: alone.start(example)] for example in examples]
    metas = sum(document.count(model.config.meta_token_id) for document in documents)

    exact, tokens = evaluate(
        model, {128: examples}, About(model="x", task="list_recall"), alone=alone
    )
    plain, _ = evaluate(model, {128: examples}, About(model="x", task="list_recall"))

    assert exact.intervention == tokens.intervention == "landmarks_alone"
    assert (exact.kv_kept, exact.text_window) == (round(metas / sum(map(len, documents)), 4), None)
    assert (plain.intervention, plain.kv_kept) == (None, None)


def bits(values: list[bool]) -> bytes:
    """The first prompt in the highest bit of the first byte, the last byte filled with zeros."""
    digits = "".join(str(int(value)) for value in values)
    padded = digits + "0" * (-len(digits) % 8)
    return int(padded, 2).to_bytes(len(padded) // 8, "big")


def test_results_count_examples_and_answer_tokens(small_model: Models, draw: Draw) -> None:
    model = load_model(small_model())
    fields = {"model": "meta", "task": "copying", "condition": "landmark", "recipe": "demo"}
    fields |= {"seed": 5, "train_length": 64, "train_condition": "paper"}
    examples = some_answered_right(model, draw("copying", 64, 10, "landmark"))
    is_correct = [correct_tokens(model, example) for example in examples]
    is_exact = [all(tokens) for tokens in is_correct]
    answer_tokens = sum(map(len, is_correct))
    as_if_independent = wilson(sum(map(sum, is_correct)) / answer_tokens, answer_tokens)

    exact, tokens = evaluate(model, {64: examples}, About(**fields))

    assert (exact.metric, exact.value, exact.n, exact.chance) == ("exact_match", 0.3, 10, 0)
    assert is_exact != is_exact[::-1]
    assert (tokens.metric, tokens.n, tokens.chance) == ("token_accuracy", answer_tokens, None)
    assert tokens.value == sum(map(sum, is_correct)) / answer_tokens
    assert base64.b64decode(exact.hits) == bits(is_exact)
    assert tokens.hits is None
    assert (exact.low, exact.high) == pytest.approx(wilson(0.3, 10))
    assert (tokens.low, tokens.high) == pytest.approx(clustered_interval(is_correct))
    assert (tokens.low, tokens.high) != pytest.approx(as_if_independent, rel=0.01)
    for result in (exact, tokens):
        assert result.model_dump(include={*fields}) == fields
        assert (result.length, result.position_embedding, result.intervention) == (64, "rope", None)


def test_beyond_learned_positions_there_is_no_figure(small_model: Models, draw: Draw) -> None:
    examples = draw("copying", 64, 40)
    # The last token of an answer is not read, so the longest sequence needs one position less than it has tokens.
    needed = max(len(example.input_ids) for example in examples) - 1

    def measured(positions: int) -> list[Result]:
        model = load_model(
            small_model(position_embedding="learned", max_position_embeddings=positions)
        )
        return evaluate(model, {64: examples}, About(model="x", task="copying"))

    enough, _ = measured(needed)
    exact, tokens = measured(needed - 1)

    assert enough.n == 40
    assert (exact.value, exact.n) == (tokens.value, tokens.n) == (None, 0)


def counts_in_the_whole_list(example: Example) -> bool:
    """Whether the number of the item in its category's list is the answer."""
    item, category = re.findall(r"does (\w+) .* (\w+)\?", example.prompt)[0]
    items = example.prompt.split(f"{category}:")[1].split("\n")[0].split()
    return items.count(item) == int(example.completion)


def test_shortcut_rates(
    draw: Draw, small_store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "SHORTCUT_PROMPTS", 20)
    examples = draw("segment_counting", 64, 30)
    rate = sum(map(counts_in_the_whole_list, examples)) / 30

    results = shortcut_rates(
        "segment_counting", "paper", {64: examples}, small_store.tokenizer, (), recipe="demo"
    )

    by_name = {result.model: result for result in results}
    result = by_name["the count in the whole list"]
    assert len(by_name) > 1
    assert (result.metric, result.condition, result.length) == ("shortcut", "paper", 64)
    assert (result.value, result.n) == (pytest.approx(rate), 30)
    assert result.low <= rate < result.high


# The first digits of the checksum of ten prompts.
DRAWN = {
    "list_recall": "c985ce1d",
    "segment_counting": "f9009a29",
    "parity": "b6bffb2d",
    "copying": "65335082",
}


@pytest.mark.parametrize("task", TASKS)
def test_the_test_prompts_of_all_results_stay_the_same(task: str) -> None:
    documents = [" ".join(f"word{number}-{index}" for index in range(90)) for number in range(60)]
    tokenizer = load_tokenizer(str(EXAMPLE))
    examples = draw_test_examples(task, 128, 10, tokenizer, condition="paper", documents=documents)
    assert sha256_of("".join(example.prompt for example in examples).encode())[:8] == DRAWN[task]
