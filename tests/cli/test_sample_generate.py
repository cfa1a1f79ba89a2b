"""`sample` and `generate`."""

import json
import shlex
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from metatokens import encode_prompt
from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.tasks.example import read_examples
from tests.cli.command_lines import Models, Refuse, Succeed, read_lines, write_records

MARKED = "the cat _PAUSE_ sat _PAUSE_"
Change = Callable[..., None]


@pytest.mark.parametrize(("task", "corpus"), [("parity", ""), ("copying", "--corpus text.txt")])
def test_samples_are_records(
    task: str, corpus: str, workplace: Path, small_store: TokenStore, run: Succeed
) -> None:
    tokenizer = small_store.path / "tokenizer"
    output, _ = run(
        f"sample --task {task} -n 3 --tokenizer {tokenizer} {corpus} --split train --condition decoy"
    )

    Path("records.jsonl").write_text(output)
    examples = read_examples(Path("records.jsonl"), small_store.tokenizer)
    origins = [
        (example.task, example.split, example.condition, example.index) for example in examples
    ]
    assert origins == list(product([task], ["train"], ["decoy"], [0, 1, 2]))


def test_generation_continues_the_prompt(small_model: Models, run: Succeed) -> None:
    prompt = "the cat _PAUSE_ sat <|endoftext|>"
    generate = f"generate --model {small_model()} {shlex.quote(prompt)} --max-new-tokens 20"

    greedy, again = run(generate), run(generate)
    with_metas, _ = run(f"{generate} --meta-every 2")
    sampled = [run(f"{generate} --temperature 1 --seed {seed}")[0] for seed in (1, 1, 2)]

    assert greedy == again
    assert greedy[0].startswith(prompt)
    assert len(greedy[0]) > len(prompt) + 20
    assert with_metas != greedy[0]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.fixture
def continued(small_model: Models, small_store: TokenStore) -> list[int]:
    """The ids that the model adds to the marked prompt."""
    ids = torch.tensor([encode_prompt(small_store.tokenizer, MARKED, markers="_PAUSE_")])
    model = load_model(small_model())
    return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[
        0, ids.shape[1] :
    ].tolist()


def test_a_prompt_with_meta_tokens(
    small_model: Models, small_store: TokenStore, continued: list[int], run: Succeed
) -> None:
    tokenizer = small_store.tokenizer
    text = tokenizer.decode(continued, skip_special_tokens=True)
    generate = f"generate --model {small_model()} --max-new-tokens 6 '{MARKED}'"

    plain, _ = run(generate)
    marked, _ = run(f"{generate} --marker _PAUSE_")
    shown, _ = run(f"{generate} --marker _PAUSE_ --show-meta")
    inserted, _ = run(f"{generate} --marker _PAUSE_ --show-meta --meta-every 2")

    assert marked == f"{MARKED}{text}\n"
    assert plain != marked  # there the marker stays text
    assert shown == f"the cat<|meta|> sat<|meta|>{tokenizer.decode(continued)}\n"
    # Two of the prompt, behind the second and the fourth token.
    assert inserted.count("<|meta|>") == 4


def test_a_prompt_with_landmarks(small_model: Models, run: Succeed) -> None:
    generate = f"generate --model {small_model()} --max-new-tokens 6 --landmarks line"

    shown, silent = run(f"{generate} --show-meta 'the cat\nsat'")
    _, warning = run(f"{generate} 'the cat'")

    assert shown.startswith("the cat\n<|meta|>sat")
    assert silent == ""
    assert warning == "the rule line puts no landmark into this prompt.\n"


def test_the_prompts_of_a_file(
    workplace: Path,
    small_model: Models,
    small_store: TokenStore,
    continued: list[int],
    run: Succeed,
) -> None:
    marked, plain = {"prompt": MARKED, "markers": [7, 19]}, {"prompt": MARKED, "markers": []}
    write_records("prompts.jsonl", [marked, plain, {"prompt": "the", "completion": " cat"}])
    generate = f"generate --model {small_model()} --max-new-tokens 6"

    output, error = run(f"{generate} --data prompts.jsonl --show-meta --json")
    of_plain, _ = run(f"{generate} '{MARKED}'")

    lines = read_lines(output)
    assert error == ""
    assert lines[0] == marked | {
        "continuation": small_store.tokenizer.decode(continued, skip_special_tokens=True),
        "with_meta": f"the cat<|meta|> sat<|meta|>{small_store.tokenizer.decode(continued)}",
    }
    assert f"{MARKED}{lines[1]['continuation']}\n" == of_plain
    assert lines[2]["prompt"] == "the"


def test_text_is_streamed_as_it_is_generated(
    small_model: Models, run: Succeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("transformers.TextStreamer.put", lambda self, value: calls.append(value))
    generate = f"generate --model {small_model()} 'the cat' --max-new-tokens 8 --meta-every 2"

    run(f"{generate} --json")
    run(f"{generate} --show-meta")
    assert calls == []

    run(generate)
    assert len(calls) == 1 + 8  # the prompt, and each token by itself


@pytest.fixture
def model(workplace: Path, small_model: Models) -> Path:
    """A model that a test may change."""
    copied = Path(shutil.copytree(small_model(), "model"))
    (copied / "manifest.json").unlink()
    return copied


@pytest.fixture
def configure(model: Path) -> Change:
    """Changes the model's settings of generation."""

    def change(**settings: Any) -> None:
        file = model / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return change


def test_prompts_of_a_batch_are_continued_like_single_ones_each_to_its_own_end_of_text(
    model: Path, configure: Change, run: Succeed
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([encode_prompt(tokenizer, "the cat")])
    second = int(load_model(model).generate(ids, max_new_tokens=2, do_sample=False)[0, -1])
    configure(eos_token_id=[second])
    records = [
        {"prompt": "the cat"},
        {"prompt": "two _PAUSE_ dogs ran over", "markers": [3]},
        {"prompt": "a"},
    ]
    write_records("prompts.jsonl", records)
    line = "generate --model model --data prompts.jsonl --max-new-tokens 8 --meta-every 3 --show-meta --json"

    alone, _ = run(line)
    in_pairs, _ = run(f"{line} --batch-size 2")
    together, _ = run(f"{line} --batch-size 3 --device cpu --dtype float32")

    lengths = {len(record["with_meta"]) for record in read_lines(alone)}
    assert alone == in_pairs == together
    assert len(lengths) > 1


def test_beams_are_not_streamed(model: Path, configure: Change, run: Succeed) -> None:
    configure(num_beams=2, num_return_sequences=2)
    generate = "generate --model model 'the cat' --max-new-tokens 4"
    output, _ = run(generate)
    as_json, _ = run(f"{generate} --json")
    assert output == f"the cat{json.loads(as_json)['continuation']}\n"


def test_a_gpu_that_is_not_there_is_refused(
    small_model: Models, refused: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(
        f"generate the --model {small_model()} --device cuda",
        "there is no GPU that PyTorch can use",
    )


def test_the_type_of_numbers_is_one_of_two(small_model: Models) -> None:
    assert load_model(small_model(), dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(UserError, match=r"unknown 'int4'; choose float32 or bfloat16\."):
        load_model(small_model(), dtype="int4")
