"""`sample` and `generate`."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from metatokens import encode_prompt
from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.tasks.example import read_examples
from tests.cli.command_lines import Models, Refuse, Run, Succeed, write_records


def test_samples_are_records(workplace: Path, small_store: TokenStore, metatokens: Run, run: Succeed) -> None:
    common = f"-n 3 --tokenizer {small_store.path / 'tokenizer'}"
    for task, corpus in (("parity", ""), ("copying", "--corpus text.txt")):
        output, _ = run(f"sample --task {task} {common} {corpus} --split train --condition decoy --seed 4")
        (workplace / f"{task}.jsonl").write_text(output)
        examples = read_examples(workplace / f"{task}.jsonl", small_store.tokenizer)
        assert [(e.task, e.split, e.condition, e.seed, e.index) for e in examples] == [
            (task, "train", "decoy", 4, index) for index in range(3)
        ]
    assert metatokens(f"sample --task parity {common} --phase 2 --out own.jsonl") == (0, "", "")
    assert metatokens(f"sample --task parity {common} --phase 3 --out own.jsonl") == (0, "", "")
    phases = [example.phase for example in read_examples(workplace / "own.jsonl", small_store.tokenizer)]
    assert phases == [2, 2, 2, 3, 3, 3]
    output, _ = run("sample --task parity --tokenizer train:768 --corpus text.txt")
    assert json.loads(output)["task"] == "parity"


def test_generation_continues_the_prompt(small_model: Models, metatokens: Run) -> None:
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
    workplace: Path, small_model: Models, small_store: TokenStore, metatokens: Run, run: Succeed
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
    _, error = run(f"{generate} --landmarks line 'the cat'")
    assert error == "the rule line puts no landmark into this prompt.\n"

    marked, plain = {"prompt": text, "markers": [7, 19]}, {"prompt": text, "markers": []}
    write_records("prompts.jsonl", [marked, plain, {"prompt": "the", "completion": " cat"}])
    output, error = run(f"{generate} --data prompts.jsonl --json")
    answers = [json.loads(line) for line in output.splitlines()]
    assert error == ""
    assert answers[0] == marked | {"continuation": expected}
    assert [answer["prompt"] for answer in answers] == [text, text, "the"]
    assert text + answers[1]["continuation"] + "\n" == metatokens(f"{generate} '{text}'")[1]
    Path("lines.jsonl").write_text(json.dumps({"prompt": "the cat\nsat _PAUSE_\nthe", "markers": [11]}))
    output, _ = run(f"{generate} --data lines.jsonl --show-meta --landmarks line --json")
    with_lines = json.loads(output)["with_meta"]
    assert with_lines.startswith("the cat\n<|meta|>sat<|meta|>\n<|meta|>the")
    (first, *_) = metatokens(f"{generate} --data prompts.jsonl --show-meta --json")[1].splitlines()
    assert json.loads(first)["with_meta"] == shown.strip()


def test_text_is_streamed_as_it_is_generated(
    small_model: Models, metatokens: Run, run: Succeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("transformers.TextStreamer.put", lambda self, value: shown.append("put"))
    generate = f"generate --model {small_model()} 'the cat' --max-new-tokens 8 --meta-every 2"
    run(generate)
    assert len(shown) == 1 + 8  # the prompt, and each token by itself
    shown.clear()
    assert metatokens(f"{generate} --json")[0] == metatokens(f"{generate} --show-meta")[0] == 0
    assert shown == []


def test_prompts_of_a_batch_are_continued_like_single_ones_each_to_its_own_end_of_text(
    workplace: Path, small_model: Models, metatokens: Run, run: Succeed
) -> None:
    model = Path(shutil.copytree(small_model(), "model"))
    records = [{"prompt": "the cat"}, {"prompt": "two _PAUSE_ dogs ran over", "markers": [3]}, {"prompt": "a"}]
    write_records("prompts.jsonl", records)
    line = f"generate --model {model} --data prompts.jsonl --max-new-tokens 8 --meta-every 3 --show-meta --json"
    alone, _ = run(line)
    assert metatokens(f"{line} --batch-size 2")[1] == alone
    assert metatokens(f"{line} --batch-size 3 --device cpu --dtype float32")[1] == alone

    loaded, tokenizer = load_model(model).eval(), AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([encode_prompt(tokenizer, "the cat")])
    end = int(loaded.generate(ids, max_new_tokens=2, do_sample=False)[0, -1])
    settings = json.loads((model / "generation_config.json").read_text()) | {"eos_token_id": [end]}
    (model / "generation_config.json").write_text(json.dumps(settings))
    (model / "manifest.json").unlink()
    alone, _ = run(line)
    assert len({len(json.loads(one)["with_meta"]) for one in alone.splitlines()}) > 1
    assert metatokens(f"{line} --batch-size 3")[1] == alone


def test_beams_are_not_streamed(workplace: Path, small_model: Models, metatokens: Run, run: Succeed) -> None:
    model = Path(shutil.copytree(small_model(), "model"))
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(settings | {"num_beams": 2, "num_return_sequences": 2}))
    (model / "manifest.json").unlink()
    generate = f"generate --model {model} 'the cat' --max-new-tokens 4"
    output, _ = run(generate)
    assert output == f"the cat{json.loads(metatokens(f'{generate} --json')[1])['continuation']}\n"


def test_a_chat_of_several_messages_comes_from_a_file(
    workplace: Path, small_model: Models, metatokens: Run, run: Succeed, refused: Refuse
) -> None:
    model = Path(shutil.copytree(small_model(), "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    tokenizer.save_pretrained(model)
    (model / "manifest.json").unlink()
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    Path("chat.json").write_text(json.dumps(chat, indent=1))
    line = f"generate --model {model} --max-new-tokens 4"
    output, _ = run(f"{line} --messages chat.json 'two dogs' --show-meta")
    assert output.startswith("user: the cat\nassistant: sat\nuser: two dogs\n")
    status, output, _ = metatokens(f"{line} --messages chat.json --json")
    assert (status, json.loads(output)["messages"]) == (0, chat)
    for content, sentence in (
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a list of messages"),
        ('[{"role": "user"}]', "must hold a list of messages"),
        ('[{"role": "robot", "content": "x"}]', "the chat template does not take these messages: no robots."),
    ):
        Path("chat.json").write_text(content)
        refused(f"{line} --messages chat.json", sentence)


def test_a_gpu_that_is_not_there_is_refused(
    workplace: Path, small_model: Models, refused: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    assert load_model(model, dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(UserError, match=r"unknown 'int4'; choose float32 or bfloat16\."):
        load_model(model, dtype="int4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for verb in (f"generate the --model {model}", f"finetune --task parity --out tuned --model {model}"):
        refused(f"{verb} --device cuda", "there is no GPU that PyTorch can use")
