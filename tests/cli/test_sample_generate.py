"""`sample` and `generate`."""

import shlex
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from metatokens import encode_prompt
from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.tasks.example import read_examples
from tests.cli.command_lines import Models, Succeed, column, read_lines

MARKED = "the cat _PAUSE_ sat _PAUSE_"
Change = Callable[..., None]


@pytest.mark.parametrize("task", ["parity", "copying"])
def test_samples_are_records(
    task: str, workplace: Path, small_store: TokenStore, run: Succeed
) -> None:
    tokenizer = small_store.path / "tokenizer"
    output, _ = run(
        f"sample --task {task} -n 3 --tokenizer {tokenizer} --phase 2 --split train --condition decoy"
    )

    Path("records.jsonl").write_text(output)
    examples = read_examples(Path("records.jsonl"), small_store.tokenizer)
    origins = [
        (record["task"], record["phase"], record["split"], record["condition"], record["index"])
        for record in read_lines(output)
    ]
    assert origins == list(product([task], [2], ["train"], ["decoy"], [0, 1, 2]))
    assert [example.prompt for example in examples] == column(read_lines(output), "prompt")


def test_generation_continues_the_prompt(small_model: Models, run: Succeed) -> None:
    prompt = "the cat _PAUSE_ sat <|endoftext|>"
    generate = f"generate --model {small_model()} {shlex.quote(prompt)} --max-new-tokens 20"

    greedy, again = run(generate), run(generate)
    with_metas, _ = run(f"{generate} --meta-every 2")
    sampled = [run(f"{generate} --temperature 1 --seed {seed}")[0] for seed in (1, 1, 2)]

    cold, _ = run(f"{generate} --temperature 1e-40")

    assert greedy == again
    assert cold == greedy[0]
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


def test_the_type_of_numbers_is_one_of_two(small_model: Models) -> None:
    assert load_model(small_model(), dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(UserError, match="int4"):
        load_model(small_model(), dtype="int4")
