"""`sample` and `generate`."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import torch

from metatokens import encode_prompt
from metatokens.data.store import TokenStore
from metatokens.model.checkpoint import load_model
from metatokens.tasks.example import read_examples
from tests.cli.command_lines import Run


def test_samples_are_records(workplace: Path, small_store: TokenStore, metatokens: Run) -> None:
    common = f"-n 3 --tokenizer {small_store.path / 'tokenizer'}"
    for task, corpus in (("parity", ""), ("copying", "--corpus text.txt")):
        status, output, error = metatokens(
            f"sample --task {task} {common} {corpus} --split train --condition decoy --seed 4"
        )
        assert (status, error) == (0, "")
        (workplace / f"{task}.jsonl").write_text(output)
        examples = read_examples(workplace / f"{task}.jsonl", small_store.tokenizer)
        assert [(e.task, e.split, e.condition, e.seed, e.index) for e in examples] == [
            (task, "train", "decoy", 4, index) for index in range(3)
        ]
    assert metatokens(f"sample --task parity {common} --phase 2 --out own.jsonl") == (0, "", "")
    assert metatokens(f"sample --task parity {common} --phase 3 --out own.jsonl") == (0, "", "")
    phases = [example.phase for example in read_examples(workplace / "own.jsonl", small_store.tokenizer)]
    assert phases == [2, 2, 2, 3, 3, 3]
    status, output, _ = metatokens("sample --task parity --tokenizer train:768 --corpus text.txt")
    assert (status, json.loads(output)["task"]) == (0, "parity")


def test_generation_continues_the_prompt(small_model: Callable[..., Path], metatokens: Run) -> None:
    model = small_model()
    prompt = "the cat _PAUSE_ sat <|endoftext|>"
    generate = f"generate --model {model} {shlex.quote(prompt)} --max-new-tokens 20"
    status, greedy, error = metatokens(generate)
    assert (status, error) == (0, "")
    assert greedy.startswith(prompt)
    assert len(greedy) > len(prompt) + 20
    assert metatokens(generate)[1] == greedy
    assert metatokens(f"{generate} --meta-every 2")[1] != greedy
    sampled = [metatokens(f"{generate} --temperature 1 --seed {seed}")[1] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_prompt_with_meta_tokens(
    workplace: Path, small_model: Callable[..., Path], small_store: TokenStore, metatokens: Run
) -> None:
    model, tokenizer = load_model(small_model()).eval(), small_store.tokenizer
    folder = small_model()
    text = "the cat _PAUSE_ sat _PAUSE_"
    ids = torch.tensor([encode_prompt(tokenizer, text, markers="_PAUSE_")])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    new = model.generate(ids, **options)[0, ids.shape[1] :]
    expected = tokenizer.decode(new, skip_special_tokens=True)
    generate = f"generate --model {folder} --max-new-tokens 6"
    assert metatokens(f"{generate} --marker _PAUSE_ '{text}'") == (0, f"{text}{expected}\n", "")
    assert metatokens(f"{generate} '{text}'")[1] != f"{text}{expected}\n"  # there it stays text
    shown = f"the cat<|meta|> sat<|meta|>{tokenizer.decode(new)}\n"
    assert metatokens(f"{generate} --marker _PAUSE_ --show-meta '{text}'") == (0, shown, "")

    whole = metatokens(f"{generate} --marker _PAUSE_ --show-meta --meta-every 2 '{text}'")[1]
    assert whole.count("<|meta|>") == 4  # two of the prompt, behind the second and the fourth token

    told = metatokens(f"{generate} --marker _PAUSE_ --show-meta --landmarks every:1 '{text}'")[1]
    assert told.startswith("".join(f"{tokenizer.decode(one)}<|meta|>" for one in ids[0] if one != ids.max()))
    status, output, error = metatokens(f"{generate} --show-meta --landmarks line 'the cat\nsat'")
    assert (status, output.startswith("the cat\n<|meta|>sat"), error) == (0, True, "")
    assert (
        metatokens(f"{generate} --landmarks line 'the cat'")[2] == "landmarks by line have no place in this prompt.\n"
    )

    lines = [{"prompt": text, "markers": [7, 19]}, {"prompt": text}, {"prompt": "the", "completion": " cat"}]
    Path("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, output, error = metatokens(f"{generate} --data prompts.jsonl")
    answers = [json.loads(line) for line in output.splitlines()]
    assert (status, error) == (0, "")
    assert answers[0] == {"prompt": text, "markers": [7, 19], "continuation": expected}
    assert [answer["prompt"] for answer in answers] == [text, text, "the"]
    assert text + answers[1]["continuation"] + "\n" == metatokens(f"{generate} '{text}'")[1]
    Path("lines.jsonl").write_text(json.dumps({"prompt": "the cat\nsat _PAUSE_\nthe", "markers": [11]}))
    with_lines = json.loads(metatokens(f"{generate} --data lines.jsonl --show-meta --landmarks line")[1])["with_meta"]
    assert with_lines.startswith("the cat\n<|meta|>sat<|meta|>\n<|meta|>the")
    (first, *_) = metatokens(f"{generate} --data prompts.jsonl --show-meta")[1].splitlines()
    assert json.loads(first)["with_meta"] == shown.strip()
