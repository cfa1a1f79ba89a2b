"""The prompts of the suites in results/shrink: each question has its answer in the text, and outputs are scored."""

import re
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from metatokens import add_meta_attention
from metatokens.checkpoint import save_model
from metatokens.data.tokenizer import encode_text, load_tokenizer
from metatokens.errors import UserError
from metatokens.records import Result, pack_hits, read_lines
from metatokens.retrofit.text_window import apply_text_window
from metatokens.tasks import TASKS, curriculum
from metatokens.tasks.curriculum import task_texts
from results.shrink import judge, run_suites
from results.shrink.decoding import continue_greedily
from results.shrink.prompts import ROOMS, Prompt, references_found, shares_kept, write_results
from results.shrink.suites import BABILONG_PARTS, NEEDLE_TASKS, Suites, parse_counts

LENGTH = 1200  # tokens
SENTENCES = (
    "He came home after a long day, and ate in silence. Mr. Bell said that she had read a long book about the sea; it "
    "had rained all day in the valley! “Was it as late as they had said?” Mary asked for milk. They slept.\n\n"
)
NEEDLE = r"One of the special magic numbers for (\S+) is: (\d{7})\."
FACT = re.compile(
    r"\b(Mary|John|Daniel|Sandra) (?:(?:went to|went back to|journeyed to|travelled to|moved to) the (?P<room>\w+)"
    r"|(?:took|got|grabbed|picked up) the (?P<taken>\w+)(?: there)?"
    r"|(?:dropped|left|put down|discarded) the (?P<dropped>\w+)(?: there)?)\."
)


@pytest.fixture(scope="module")
def books() -> list[str]:
    return ["".join(f"{title} {day}. {SENTENCES}" for day in range(900)) for title in ("Day", "On")]


@pytest.fixture(scope="module")
def tokenizer(books: list[str]) -> PreTrainedTokenizerBase:
    parts = [text for task in BABILONG_PARTS.values() for text in task.values()]
    tokenizer = load_tokenizer(
        "train:1200", corpus=[books[0][:20_000], *parts], extra_texts=task_texts()
    )
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@pytest.fixture(scope="module")
def suites(tokenizer: PreTrainedTokenizerBase, books: list[str]) -> Suites:
    return Suites(tokenizer, books, seed=0)


@pytest.fixture(scope="module")
def prompts(suites: Suites) -> list[Prompt]:
    """Two prompts of each task of RULER and BABILong; the package's have none of this length."""
    return list(suites.prompts({LENGTH: 2}))


def prompt_of(suite: str, *references: str) -> Prompt:
    return Prompt(
        suite=suite,
        task="task",
        length=64,
        context="The text.",
        question="\nWhat?",
        answer_prefix=" It is",
        references=references,
        new_tokens=4,
    )


def test_a_prompt_with_its_output_fills_its_length(
    prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> None:
    for prompt in prompts:
        asked = prompt.question + prompt.answer_prefix
        context, question, reference = encode_text(
            tokenizer, [prompt.context, asked, " ".join(prompt.references)]
        )
        size = len(context) + len(question) + prompt.new_tokens

        assert prompt.new_tokens >= len(reference)
        assert size <= prompt.length
        assert size > 0.9 * prompt.length


@pytest.mark.parametrize("task", NEEDLE_TASKS)
def test_the_needles_in_a_text_answer_its_question(task: str, prompts: list[Prompt]) -> None:
    of_task = [prompt for prompt in prompts if prompt.task == task]
    assert len(of_task) == 2
    for prompt in of_task:
        needles = re.findall(NEEDLE, prompt.context)
        asked = re.search(r"numbers? for (.*) mentioned", prompt.question)[1]
        keys = re.split(r", and |, ", asked)
        answers = [value for key in keys for of_key, value in needles if of_key == key]

        assert len(needles) == NEEDLE_TASKS[task].keys * NEEDLE_TASKS[task].values
        assert len(keys) == NEEDLE_TASKS[task].asked
        assert sorted(answers) == sorted(prompt.references)
        assert f"for {asked} mentioned" in prompt.answer_prefix


def test_a_prompt_has_the_words_of_ruler(prompts: list[Prompt]) -> None:
    single = next(prompt for prompt in prompts if prompt.task == "niah_single_1")
    several = next(prompt for prompt in prompts if prompt.task == "niah_multivalue")
    [(key, _)] = re.findall(NEEDLE, single.context)
    lines = single.context.split("\n")

    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    assert {line for line in lines[1:] if not re.fullmatch(NEEDLE, line)} == {
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    }
    assert single.question == (
        f"\nWhat is the special magic number for {key} mentioned in the provided text?"
    )
    assert single.answer_prefix == (
        f" The special magic number for {key} mentioned in the provided text is"
    )
    assert several.context.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.\n"
    )
    assert several.question.startswith("\nWhat are all the special magic numbers for ")
    assert several.answer_prefix.endswith(" mentioned in the provided text are")


def room_by_facts(context: str, question: str) -> str:
    """The answer, by following the facts one by one."""
    text = context.partition("<context>\n")[2]
    rooms: dict[str, str] = {}
    holders: dict[str, str] = {}
    for fact in FACT.finditer(text):
        person = fact[1]
        if fact["room"]:
            rooms[person] = fact["room"]
        elif fact["taken"]:
            holders[fact["taken"]] = person
        else:
            item = fact["dropped"]
            assert holders.pop(item) == person
            rooms[item] = rooms[person]
    subject = re.fullmatch(r"\nQuestion: Where is (?:the )?(\w+)\?", question)[1]
    return rooms[holders.get(subject, subject)]


@pytest.mark.parametrize("task", BABILONG_PARTS)
def test_the_facts_in_a_text_answer_the_question_of_babilong(task: str, suites: Suites) -> None:
    rooms = set()
    for seed in range(60):
        drawn = suites.babilong(task, np.random.default_rng(seed))
        [room] = drawn.references
        rooms.add(room)

        assert room_by_facts(drawn.context(40), drawn.question) == room
    assert rooms == set(ROOMS)


def test_the_background_names_nobody_and_nothing_of_the_facts(suites: Suites) -> None:
    background = "\n".join(suites.books.background)

    assert "Mr. Bell said" in background
    assert "Mary" not in background
    assert "They slept" not in background  # too short


@pytest.mark.parametrize("task", TASKS)
def test_the_package_s_prompts_are_plain_text_that_answers_them(task: str, suites: Suites) -> None:
    for prompt in islice(suites.of_package(task, 256), 4):
        [reference] = prompt.references

        assert reference == ANSWERS[task](prompt.context, prompt.question)
        assert prompt.answer_prefix == "\nA:"
        assert "_PAUSE_" not in prompt.context + prompt.question


def recalled_item(context: str, question: str) -> str:
    number, category = re.search(r"item (\d+) of (\w+)", question).groups()
    return f" {items_of(category, context)[int(number) - 1]}"


def counted_items(context: str, question: str) -> str:
    asked = re.search(r"does (\w+) appear in items (\d+) to (\d+) of (\w+)", question)
    items = items_of(asked[4], context)[int(asked[2]) - 1 : int(asked[3])]
    return f" {items.count(asked[1])}"


def parity_of_bits(context: str, question: str) -> str:
    number = int(re.search(r"first (\d+) bits", question)[1])
    return f" {items_of('Bits', context)[:number].count('1') % 2}"


def copied_words(context: str, question: str) -> str:
    number, before = re.search(
        r"Copy the (?:first )?(\d+) words(?: after (.*))?", question
    ).groups()
    start = context.replace("\n", " ").index(before) + len(before) if before else 0
    pieces = re.compile(rf"(?:\s*(?:\w+|[^\w\s]+)){{{number}}}")
    return pieces.match(context, start)[0]


def items_of(category: str, context: str) -> list[str]:
    return re.search(rf"^{category}: (.*)$", context, re.MULTILINE)[1].split()


ANSWERS = {
    "list_recall": recalled_item,
    "segment_counting": counted_items,
    "parity": parity_of_bits,
    "copying": copied_words,
}


def test_a_length_without_prompts_is_left_out_aloud(
    suites: Suites, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curriculum, "ATTEMPTS", 5)  # too few

    tasks = {prompt.task for prompt in suites.prompts({LENGTH: 1})}

    assert tasks == {*NEEDLE_TASKS, *BABILONG_PARTS}
    assert f"left out, parity of {LENGTH} tokens: no parity prompt" in capsys.readouterr().err


def test_the_seed_decides_the_prompts(
    tokenizer: PreTrainedTokenizerBase, books: list[str], suites: Suites
) -> None:
    task = NEEDLE_TASKS["niah_multikey_1"]

    def drawn(of_suites: Suites) -> str:
        generator = of_suites._generator("niah_multikey_1", 512, 0)
        return of_suites.needles(task, generator).context(20)

    assert drawn(Suites(tokenizer, books, seed=0)) == drawn(suites)
    assert drawn(Suites(tokenizer, books, seed=1)) != drawn(suites)


@pytest.mark.parametrize(
    ("suite", "references", "output", "hits"),
    [
        ("ruler", ("1234567",), " 1234567.", [True]),
        ("ruler", ("1234567",), " 123456", [False]),
        ("ruler", ("11", "22", "33"), " 33, and 11", [True, False, True]),
        ("ruler", ("Ab-cd",), " aB-Cd", [True]),
        ("babilong", ("kitchen",), "\nAnswer: Mary is in the Kitchen. Or the garden.", [True]),
        ("babilong", ("kitchen",), " the kitchen or the garden", [False]),
        ("babilong", ("kitchen",), " Nobody knows. The kitchen", [False]),
        ("babilong", ("kitchen",), "", [False]),
        ("metatokens", (" plum",), " plum\nQ:", [True]),
        ("metatokens", (" plum",), " plumber", [False]),
        ("metatokens", (" 1",), " 12", [False]),
        ("metatokens", (" a clue,\nto",), " a clue, to be", [True]),
        ("metatokens", (" a clue.",), " a clue. And", [True]),
        ("metatokens", (" clue",), " a clue", [False]),
    ],
)
def test_an_output_is_scored_as_its_suite_does(
    suite: str, references: tuple[str, ...], output: str, hits: list[bool]
) -> None:
    assert references_found(prompt_of(suite, *references), output) == hits


def test_lines_count_references_and_are_written_once(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    prompts = [prompt_of("ruler", "11", "22"), prompt_of("ruler", "33", "44")]

    def written(model: str) -> list[Result]:
        return list(
            write_results(
                prompts,
                out,
                model=model,
                seed=0,
                answer=lambda prompt: "11, 33, 44",
                share=lambda group: {"kv_kept": len(group) / 8},
            )
        )

    [line] = written("shrunk")
    assert (line.task, line.condition, line.length, line.n, line.value) == (
        "task",
        "ruler",
        64,
        4,
        0.75,
    )
    assert 0.3 < line.low < line.value < line.high < 1
    assert written("shrunk") == []
    assert len(written("full")) == 1
    assert [line.model for line in read_lines(out, Result)] == ["shrunk", "full"]
    assert shares_kept(read_lines(out, Result), "shrunk", 0) == {("task", 64): 0.25}
    with pytest.raises(UserError, match="no line says what 'shrunk' of seed 1 keeps"):
        shares_kept(read_lines(out, Result), "shrunk", 1)


def test_greedy_decoding_stops_at_a_stop_token_or_the_limit() -> None:
    read: list[list[int]] = []

    def forward(ids: list[int]) -> torch.Tensor:
        read.append(list(ids))
        return torch.nn.functional.one_hot(torch.tensor(ids[-1] + 1), 10)

    assert continue_greedily(forward, [1, 2], 9, stop=[6]) == [3, 4, 5]
    assert read == [[1, 2], [3], [4], [5]]
    assert continue_greedily(forward, [1, 2], 2, stop=[6]) == [3, 4]


@pytest.mark.parametrize("text", ["512", "512:0", "512:4,", "a:4", "512:4 1024:2"])
def test_counts_that_are_written_otherwise_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="tokens:prompts"):
        parse_counts(text)
    assert parse_counts("512:4,1024:2") == {512: 4, 1024: 2}


@pytest.fixture
def folders(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> dict[str, Path]:
    """A tiny model with the full cache, and one that forgets in two of three blocks."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=LENGTH,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = add_meta_attention(LlamaForCausalLM(config), tokenizer, layers=[])
    folders = {name: tmp_path / name for name in ("full", "window")}
    for name, folder in folders.items():
        apply_text_window(model, 60 if name == "window" else None, full_layers=[1])
        folder.mkdir()
        save_model(model, tokenizer, folder)
    return folders


def test_a_model_is_run_over_the_prompts(
    folders: dict[str, Path],
    prompts: list[Prompt],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_suites, "has_fast_bfloat16", lambda: False)
    few = [prompt for prompt in prompts if prompt.task == "niah_single_2"]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{prompt.line()}\n" for prompt in few))
    out = tmp_path / "results.jsonl"
    for name, folder in folders.items():
        options = ["--model", str(folder), "--name", name, "--out", str(out)]
        arguments = ["run_suites", "--prompts", str(tmp_path / "prompts.jsonl"), *options]
        monkeypatch.setattr(sys, "argv", arguments)
        run_suites.main()

    full, window = read_lines(out, Result)
    assert full.kv_kept is None
    answering = run_suites.Answering(folders["window"])
    lengths = [len(answering.context(prompt)) for prompt in few]
    assert window.kv_kept == pytest.approx(1 / 3 + 2 / 3 * 2 * 64 / sum(lengths), abs=1e-4)


def test_an_answer_is_what_generate_gives(
    folders: dict[str, Path], prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_suites, "has_fast_bfloat16", lambda: False)
    prompt = next(prompt for prompt in prompts if prompt.task == "qa1")
    for folder in folders.values():
        answering = run_suites.Answering(folder)
        [question] = encode_text(answering.tokenizer, [prompt.question], continues=True)
        ids = torch.tensor([[*answering.context(prompt), *question]])

        generated = answering.model.generate(
            ids, max_new_tokens=prompt.new_tokens, do_sample=False
        )[0, ids.shape[1] :]

        assert answering.answer(prompt) == answering.tokenizer.decode(generated)


def test_prompts_beyond_a_model_s_limit_are_refused() -> None:
    with pytest.raises(UserError, match="reads 32 tokens, and there are prompts of 64"):
        run_suites.check_lengths(
            [prompt_of("ruler", "11")], LlamaConfig(max_position_embeddings=32)
        )


def lines_of(model: str, length: int, answered: int, **fields: float) -> list[Result]:
    """Lines of the needles in 20 prompts, of which the first ones are answered in each task."""
    lines = []
    for task, needles in NEEDLE_TASKS.items():
        references = needles.values * needles.asked
        hits = [prompt < answered for prompt in range(20) for _ in range(references)]
        line = Result(
            model=model,
            task=task,
            length=length,
            metric="exact_match",
            value=answered / 20,
            n=len(hits),
            hits=pack_hits(hits),
            seed=0,
            **fields,
        )
        lines.append(line)
    return lines


@pytest.mark.parametrize(
    ("length", "shrunk", "full", "expected"),
    [
        (2048, 18, 20, "met: 90%"),
        (2048, 17, 20, "missed: 85%"),
        (8192, 10, 20, "met: 50%"),
        (8192, 9, 20, "missed: 45%"),
        (8192, 4, 4, "cannot be judged: full finds 20%"),
    ],
)
def test_the_goals_of_the_rule(length: int, shrunk: int, full: int, expected: str) -> None:
    lines = lines_of("shrunk", length, shrunk) + lines_of("full", length, full)

    assert judge.verdict(judge.Findings(lines), length).startswith(expected)


@pytest.mark.parametrize(
    ("answered", "expected"), [(2, "more: +40"), (18, "less: -40"), (10, "cannot be told: +0")]
)
def test_the_comparison_with_a_press(answered: int, expected: str) -> None:
    lines = lines_of("shrunk", 512, 10) + lines_of("base, knorm", 512, answered)

    assert judge.comparison(judge.Findings(lines), "base, knorm", 512).startswith(expected)


def test_the_report_has_all_models_and_what_was_not_run() -> None:
    other = lines_of("shrunk", 512, 10)[0].model_copy(update={"task": "qa1", "low": 0, "high": 1})
    lines = [
        *lines_of("shrunk", 512, 10, kv_kept=0.125),
        *lines_of("shrunk", 2048, 10, kv_kept=0.1),
        *lines_of("full", 512, 20),
        *lines_of("base, duo", 512, 5, kv_kept=0.125),
        other,
    ]

    report = judge.report(lines)

    assert re.search(r"^\| shrunk \| 50 \(\d+ to \d+\) \| 50 \(", report, re.MULTILINE)
    assert re.search(r"^\| full \| 100 \(100 to 100\) \| not run \|$", report, re.MULTILINE)
    assert re.search(r"^\| base, duo \| more: \+25 .* \| not run \|$", report, re.MULTILINE)
    assert "| shrunk | missed: 50%" in report
    assert "| base, duo | 12.5 | not run |" in report
    assert "| qa1: shrunk, seed 0 | 50 (0 to 100) | not run |" in report
