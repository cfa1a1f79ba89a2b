"""`--text-window` of the commands, and the share of the keys and values that they say is kept."""

import gzip
import json
import re
import shutil
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from metatokens import encode_prompt
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import load_tokenizer
from tests.cli.command_lines import FINETUNE, PRETRAIN, Models, Refuse, Succeed, write_records
from tests.model.text_window import seen
from tests.numbers import ROUNDED_PERPLEXITY

RECORDS = [
    {"prompt": f"The cat sat on a mat. _PAUSE_ It slept there for {number} days.", "markers": [21], "completion": " ok"}
    for number in range(3)
]
LINE = r"text_window (\d+): a cache keeps ([\d.]+) % of the keys and values, ([\d,]+) bytes for each text"


def kept(prompts: Sequence[Sequence[int]], meta: int, window: int) -> float:
    """The share of the tokens that the last one sees."""
    return sum(int(seen(one, window, 4, meta)[-1].sum()) for one in prompts) / sum(map(len, prompts))


def share(error: str) -> float:
    """The share in the line of a command."""
    _, percent, size = re.search(LINE, error).groups()
    assert int(size.replace(",", "")) > 0
    return float(percent) / 100


@pytest.fixture
def tokens(workplace: Path, small_store: TokenStore) -> None:
    shutil.copytree(small_store.path, workplace / "tokens")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # that PEFT reads
def test_training_with_a_window(tokens: None, run: Succeed, refused: Refuse) -> None:
    def window_of(folder: str) -> Any:
        config = json.loads(Path(folder, "config.json").read_text())
        return config["text_window"], config["text_sinks"]

    train = f"{PRETRAIN} --landmarks every:7 --out base"
    _, error = run(f"{train} --text-window 8")
    assert window_of("base") == (8, 4)
    assert share(error) == pytest.approx(15 / 32, abs=0.0005)  # the first 4, landmarks at 7, 15 and 23, and the last 8
    run(f"{train} --set training.text_window=8")  # the same run
    refused(f"{train} --text-window 9", "training.text_window was 8 and is now 9")
    run(f"{PRETRAIN} --init base --out next")
    assert window_of("next") == (8, 4)
    run(f"{PRETRAIN} --init base --text-window 5 --set training.text_sinks=0 --out other")
    assert window_of("other") == (5, 0)
    layers = "--set model.num_hidden_layers=4 --set training.text_full_layers=[1]"
    _, error = run(f"{train.replace('base', 'full')} --text-window 8 {layers}")
    assert share(error) == pytest.approx(1 / 4 + 3 / 4 * 15 / 32, abs=0.0005)
    size = int(re.search(LINE, error)[3].replace(",", ""))
    # Keys and values of 16 features in float32: three layers hold 15 tokens and one 32, and all hold four landmarks of
    # meta-attention. Two positions of each entry, in int64, are noted for each kind of layer.
    assert size == 2 * 4 * 16 * (3 * 15 + 32 + 4 * 4) + 2 * 8 * (15 + 32)
    _, error = run("generate --model full --text-window 4 --landmarks every:7 'the cat sat on a mat and slept'")
    assert share(error) > 1 / 4
    write_records("data.jsonl", RECORDS)
    _, error = run(f"{FINETUNE} --model next --data data.jsonl --text-window 6 --landmarks sentence --out tuned")
    assert window_of("tuned/data") == (6, 4)
    assert 0 < share(error) < 1
    run(f"{FINETUNE} --model full --data data.jsonl --text-window 6 --lora rank=2 --keep-adapter --out adapter")
    window = json.loads(Path("adapter", "data", "text_window.json").read_text())
    assert window == {"window": 6, "sinks": 4, "full_layers": [1]}
    output, _ = run("evaluate --model adapter/data --data data.jsonl --json")
    assert json.loads(output.splitlines()[0])["text_window"] == 6
    Path("adapter", "data", "manifest.json").unlink()
    for damaged in ('{"window": 0}', '{"windows": 3}', "[1]"):
        Path("adapter", "data", "text_window.json").write_text(damaged)
        refused("evaluate --model adapter/data --data data.jsonl", "")


def test_measuring_with_a_window(tokens: None, small_model: Models, run: Succeed) -> None:
    model = small_model(second_attention="meta")
    tokenizer = load_tokenizer(str(model))
    write_records("data.jsonl", RECORDS)
    evaluate = f"evaluate --model {model} --data data.jsonl --json"
    plain, small = (json.loads(run(f"{evaluate}{end}")[0].splitlines()[0]) for end in ("", " --text-window 5"))
    prompts = [encode_prompt(tokenizer, record["prompt"], record["markers"]) for record in RECORDS]
    assert plain.keys().isdisjoint({"text_window", "kv_kept", "kv_bytes"})
    assert (small["text_window"], small["kv_kept"]) == (5, round(kept(prompts, tokenizer.meta_token_id, 5), 4))

    measure = f"perplexity --model {model} --corpus tokens --block-size 32 --fraction 0 --max-tokens 640 --json"
    lines = [
        json.loads(run(f"{measure} {options}")[0])
        for options in ("", "--text-window 32", "--text-window 4", "--landmarks every:8 --text-window 4")
    ]
    assert lines[0]["value"] == pytest.approx(lines[1]["value"], rel=ROUNDED_PERPLEXITY)
    assert len({round(line["value"], 6) for line in lines}) == 3
    assert [line.get("kv_kept") for line in lines] == [
        None,
        1,
        8 / 32,
        round(11 / 36, 4),
    ]  # the fourth landmark is the last key


def test_generating_and_looking_with_a_window(workplace: Path, small_model: Models, run: Succeed) -> None:
    model, text = small_model(second_attention="meta"), "The cat sat. _PAUSE_ It slept on the mat for a long time."
    tokenizer = load_tokenizer(str(model))
    ids = encode_prompt(tokenizer, text, "_PAUSE_")
    wanted = pytest.approx(kept([ids], tokenizer.meta_token_id, 3), abs=0.0005)
    assert share(run(f'generate --model {model} --text-window 3 --marker _PAUSE_ "{text}"')[1]) == wanted
    assert "text_window" not in run(f'generate --model {model} --marker _PAUSE_ "{text}"')[1]
    assert share(run(f'look --model {model} --text-window 3 "{text}" --png look.png')[1]) == wanted
    assert "Text that it has forgotten is grey" in Path("look.html").read_text(encoding="utf-8")
    packed = re.search(r'id="data">([^<]+)<', Path("look.html").read_text(encoding="utf-8"))[1]
    causal, meta = json.loads(gzip.decompress(b64decode(packed)))[0]["modules"]
    shares = list(b64decode(causal["layers"]["0"]["forgotten"]))
    earlier = torch.ones(len(ids), len(ids)).tril().bool()
    assert shares == (255 * (earlier & ~seen(ids, 3, 4, tokenizer.meta_token_id))).flatten().tolist()
    assert meta["layers"]["0"]["forgotten"] is None  # no meta-token is
    with Image.open("look.png") as picture:
        assert (0xD9, 0xD6, 0xD0) in {color[:3] for _, color in picture.convert("RGB").getcolors(2**24)}
    _, error = run(f'look --model {model} --landmarks every:4 --text-window 3 "{text}"')
    assert share(error) > wanted.expected


def test_a_model_without_meta_tokens_is_refused(workplace: Path, refused: Refuse) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=64, **sizes)).save_pretrained("plain")
    refused('generate --model plain --text-window 8 "the cat"', "a text_window needs meta-tokens, and this model has")
