"""Accuracy against greedy generation, token by token, and the fixed test set."""

import base64
import dataclasses
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from metatokens.checkpoint import load_model
from metatokens.data.prompts import encode_prompt
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import load_tokenizer
from metatokens.errors import UserError
from metatokens.evaluation import accuracy
from metatokens.evaluation.accuracy import TEST_SEED, evaluate, score, shortcut_rates
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.records import About
from metatokens.tasks.curriculum import TASKS
from metatokens.tasks.example import Example
from metatokens.tasks.landmarks_alone import LandmarksAlone

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
    documents = [small_corpus.read_text(), *small_corpus.read_text().split("\n\n")]

    def draw(task: str, length: int, n: int, condition: str = "paper") -> list[Example]:
        tokenizer = small_store.tokenizer
        return accuracy.draw_test_examples(task, length, n, tokenizer, condition=condition, documents=documents)

    return draw


def greedy(model: MetaGPT2ForCausalLM, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The answer of `generate`."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return tuple(output[0, len(prompt) :].tolist())


@torch.inference_mode()
def correct_tokens(model: MetaGPT2ForCausalLM, example: Example) -> list[bool]:
    """Whether each answer token is the likeliest one except the meta-token, with a forward pass for each."""
    hits = []
    for place in range(example.answer_start, len(example.input_ids)):
        logits = model(torch.tensor([example.input_ids[:place]])).logits[0, -1]
        ranked = [token for token in logits.argsort(descending=True).tolist() if token != model.config.meta_token_id]
        hits.append(ranked[0] == example.input_ids[place])
    return hits


def one_by_one(model: MetaGPT2ForCausalLM, examples: list[Example]) -> tuple[list[bool], list[int]]:
    """What `score` gives: whether the greedy answer is exact, and the number of correct tokens."""
    parts = [(row.input_ids[: row.answer_start], row.input_ids[row.answer_start :]) for row in examples]
    exact = [greedy(model, prompt, len(answer)) == answer for prompt, answer in parts]
    return exact, [sum(correct_tokens(model, row)) for row in examples]


def some_answered_right(model: MetaGPT2ForCausalLM, examples: list[Example]) -> list[Example]:
    """Keep every third example; give the next the model's own answer, and the third that answer with a wrong end."""
    changed = []
    for number, example in enumerate(examples):
        prompt = example.input_ids[: example.answer_start]
        answer = greedy(model, prompt, 3)
        if number % 3 == 2:
            answer = (*answer[:-1], (answer[-1] + 1) % 700)
        ids = example.input_ids if number % 3 == 0 else (*prompt, *answer)
        changed.append(dataclasses.replace(example, input_ids=ids))
    return changed


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("task", TASKS)
def test_scores_are_those_of_greedy_generation(
    task: str, changes: dict[str, str], small_model: Models, draw: Draw
) -> None:
    model = load_model(small_model(**changes)).eval()
    examples = draw(task, 64, 12)
    examples = some_answered_right(model, examples)
    exact, tokens = score(model, examples)
    assert (exact, tokens) == one_by_one(model, examples)
    assert 4 <= sum(exact) < 12


def test_a_row_that_pads_the_vocabulary_is_no_answer_as_in_generation(small_model: Models, draw: Draw) -> None:
    model = load_model(small_model(unpadded_vocab_size=769)).eval()
    with torch.no_grad():  # make its row the likeliest one everywhere
        model.model.norm.weight.mul_(0.01)
        model.lm_head.weight[800] = 0.0
        model.register_buffer("unused", torch.zeros(()))
        bias = model.model.norm(model.model.embed_tokens.weight[:769]).mean(dim=0)
        model.lm_head.weight[800] = 1e4 * bias
    (example,) = draw("parity", 64, 1)
    prompt = example.input_ids[: example.answer_start]
    answered = dataclasses.replace(example, input_ids=(*prompt, *greedy(model, prompt, 2)))
    assert score(model, [answered]) == ([True], [2])


def test_the_meta_token_is_no_answer_as_in_generation(small_model: Models, draw: Draw) -> None:
    model = load_model(small_model()).eval()
    meta = model.config.meta_token_id
    with torch.no_grad():
        model.model.embed_tokens.weight[meta] *= 30  # so that it is the likeliest token wherever it is not the last
    examples = draw("parity", 64, 12)
    examples = some_answered_right(model, examples)
    exact, tokens = score(model, examples)
    assert (exact, tokens) == one_by_one(model, examples)
    likeliest = [model(torch.tensor([row.input_ids[: row.answer_start]])).logits[0, -1].argmax() for row in examples]
    assert meta in likeliest
    assert sum(exact) >= 4


def test_what_is_measured_through_landmarks_says_so_and_what_is_kept(small_model: Models, draw: Draw) -> None:
    model, examples = load_model(small_model()), draw("list_recall", 128, 5, "landmark")
    tokenizer = load_tokenizer(str(small_model()))
    documents = [example.prompt.rpartition("\nQ: ")[0] for example in examples]
    metas = [document.count(" _PAUSE_") for document in documents]
    sizes = [len(encode_prompt(tokenizer, document, "_PAUSE_")) for document in documents]
    found = evaluate(
        model, {128: examples}, About(model="x", task="list_recall"), alone=LandmarksAlone(model, tokenizer)
    )
    for one in found:
        assert one.intervention == "landmarks_alone"
        assert (one.kv_kept, one.text_window) == (round(sum(metas) / sum(sizes), 4), None)
        config = model.config  # keys and values of each layer, in float32, of both attentions
        assert one.kv_bytes == round(2 * 2 * 4 * config.num_hidden_layers * config.hidden_size * sum(metas) / 5)
    plain, _ = evaluate(model, {128: examples}, About(model="x", task="list_recall"))
    assert (plain.intervention, plain.kv_kept) == (None, None)


def test_batches_do_not_change_the_scores(small_model: Models, draw: Draw) -> None:
    model = load_model(small_model())
    examples = some_answered_right(model.eval(), [*draw("copying", 64, 9), *draw("copying", 128, 9)])
    assert len({len(example.input_ids) for example in examples}) > 5
    alone = score(model, examples, batch=1)
    assert score(model, examples, batch=4) == alone
    assert score(model.train(), examples) == alone
    backwards = score(model, examples[::-1])
    assert (backwards[0][::-1], backwards[1][::-1]) == alone


# --- the test set


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [64, 128])
def test_a_bin_holds_prompts_of_its_lengths_from_the_test_split(task: str, length: int, draw: Draw) -> None:
    examples = draw(task, length, 8)
    assert all(length / 2 < example.n_tokens <= length for example in examples)
    assert {(example.split, example.seed) for example in examples} == {("test", TEST_SEED)}
    again = draw(task, length, 12)
    assert again[:8] == examples


# --- results


def bits(right: list[bool]) -> bytes:
    """The first prompt in the highest bit of the first byte, the last byte filled with zeros."""
    digits = "".join(map(str, map(int, right))).ljust(-8 * (-len(right) // 8), "0")
    return bytes(int(digits[start : start + 8], 2) for start in range(0, len(digits), 8))


def test_results_count_examples_and_answer_tokens(small_model: Models, draw: Draw) -> None:
    model = load_model(small_model())
    about = {"model": "meta", "task": "copying", "condition": "none", "recipe": "demo"}
    about |= {"seed": 5, "train_length": 64, "train_condition": "paper"}
    tests = {length: draw("copying", length, n, "none") for length, n in ((64, 6), (128, 5))}
    results = evaluate(model, tests, About(**about))
    assert [(r.length, r.metric) for r in results] == [*product((64, 128), ("exact_match", "token_accuracy"))]
    for exact, by_token in (results[:2], results[2:]):
        hits = [correct_tokens(model.eval(), example) for example in tests[exact.length]]
        assert (exact.value, exact.n) == (sum(map(all, hits)) / len(hits), len(hits))
        assert base64.b64decode(exact.hits) == bits([all(hit) for hit in hits])
        assert by_token.hits is None
        answer_tokens = sum(map(len, hits))
        assert (by_token.value, by_token.n) == (sum(map(sum, hits)) / answer_tokens, answer_tokens)
        assert (exact.chance, by_token.chance) == (0, None)
    for result in results:
        assert result.low <= result.value <= result.high
        assert result.model_dump(include={*about}) == about
        assert (result.position_embedding, result.intervention) == ("rope", None)


def test_beyond_learned_positions_there_is_no_figure(small_model: Models, draw: Draw) -> None:
    tests = {length: draw("copying", length, n) for length, n in ((64, 40), (128, 2), (256, 2))}

    def values(positions: int) -> dict[int, list[tuple[float | None, int]]]:
        model = load_model(small_model(position_embedding="learned", max_position_embeddings=positions))
        results = evaluate(model, tests, About(model="x", task="copying"))
        return {length: [(r.value, r.n) for r in results if r.length == length] for length in (64, 128, 256)}

    enough = values(200)
    assert all(value is not None for length in (64, 128) for value, _ in enough[length])
    assert enough[256] == [(None, 0), (None, 0)]
    # The last token of an answer is not read, so the longest sequence needs one position less than it has tokens.
    longest = max(len(example.input_ids) for example in tests[64])
    assert longest - 2 >= 64
    assert [n for value, n in values(longest - 1)[64] if value is not None] == [n for _, n in enough[64]]
    assert values(longest - 2)[64] == [(None, 0), (None, 0)]


def test_a_prompt_is_never_cut(small_model: Models, draw: Draw) -> None:
    model = load_model(small_model(position_embedding="learned", max_position_embeddings=40))
    examples = draw("parity", 64, 3)
    with pytest.raises(UserError, match="longer than the 40 learned positions"):
        score(model, examples)


def test_shortcut_rates(draw: Draw, small_store: TokenStore) -> None:
    tokenizer, task = small_store.tokenizer, "segment_counting"
    drawn = {length: draw(task, length, n) for length, n in {64: 30, 128: 20}.items()}
    results = shortcut_rates(task, "paper", drawn, tokenizer, (), recipe="demo")
    assert {(one.length, one.n) for one in results} == {(64, 30), (128, 20)}
    assert {(one.metric, one.condition) for one in results} == {("shortcut", "paper")}
    for one in (one for one in results if one.model == "the count in the whole list"):
        assert one.length is not None
        right = 0
        for example in drawn[one.length]:
            item, category = re.findall(r"does (\w+) .* (\w+)\?", example.prompt)[0]
            line = example.prompt.split(f"{category}:")[1].split("\n")[0]
            right += line.split().count(item) == int(example.completion)
        assert one.value == pytest.approx(right / one.n)
        assert one.low is not None
        assert one.low < right / one.n + 1e-9
