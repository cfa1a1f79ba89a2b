"""Text windows of the commands, and the share of the keys and values that they say is kept."""

import gzip
import json
import re
import shutil
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metatokens import encode_prompt
from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import load_tokenizer
from metatokens.decoder import measure_cache_share
from tests.cli.command_lines import (
    FINETUNE,
    PRETRAIN,
    Models,
    Refuse,
    Succeed,
    column,
    read_lines,
    write_records,
)
from tests.model.text_window import seen
from tests.numbers import ROUNDED_PERPLEXITY

RECORDS = [
    {
        "prompt": f"The cat sat on a mat. _PAUSE_ It slept there for {number} days.",
        "markers": [21],
        "completion": " ok",
    }
    for number in range(3)
]
PROMPT = "The cat sat. _PAUSE_ It slept on the mat for a long time."
WINDOW = "--set training.text_window"


def kept_share(prompts: Sequence[Sequence[int]], meta: int, window: int) -> float:
    """The share of the tokens that the last one sees."""
    sights = [seen(prompt, window, 4, meta)[-1] for prompt in prompts]
    return sum(int(sight.sum()) for sight in sights) / sum(map(len, prompts))


def window_of(folder: str) -> Any:
    config = json.loads(Path(folder, "config.json").read_text())
    return config["text_window"], config["text_sinks"]


@pytest.fixture
def tokens(workplace: Path, small_store: TokenStore) -> None:
    shutil.copytree(small_store.path, workplace / "tokens")


@pytest.mark.usefixtures("tokens")
def test_pretraining_with_a_window(run: Succeed, refused: Refuse) -> None:
    train = f"{PRETRAIN} --set data.placement=every:7 --out base"

    run(f"{train} {WINDOW}=8")
    _, said = run(f"{PRETRAIN} --init base --out next")
    run(f"{PRETRAIN} --init base {WINDOW}=5 --out other")

    assert window_of("base") == window_of("next") == (8, 4)
    assert window_of("other") == (5, 4)
    assert "--set model.* changes nothing" in said
    refused(f"{train} {WINDOW}=9", "training.text_window was 8 and is now 9")


@pytest.mark.usefixtures("tokens")
def test_some_layers_see_everything(run: Succeed) -> None:
    layers = "--set model.num_hidden_layers=4 --set training.text_full_layers=[1]"

    run(f"{PRETRAIN} --set data.placement=every:7 {WINDOW}=8 {layers} --out full")

    model = load_model("full")
    ids = np.arange(32)
    ids[[7, 15, 23, 31]] = model.config.meta_token_id
    measured = measure_cache_share(model, [ids])
    # Layers with a window hold the first 4 tokens, the landmarks at 7, 15 and 23, and the last 8.
    assert measured["kv_kept"] == pytest.approx(1 / 4 + 3 / 4 * 15 / 32, abs=0.0005)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # that PEFT reads
def test_finetuning_with_a_window(workplace: Path, small_model: Models, run: Succeed) -> None:
    write_records("data.jsonl", RECORDS)
    tune = f"{FINETUNE} --model {small_model(second_attention='meta')} --data data.jsonl {WINDOW}=6"

    run(f"{tune} --set task.landmarks=sentence --out tuned")
    run(f"{tune} --set training.text_full_layers=[1] --set training.lora_rank=2 --out adapted")
    output, _ = run("evaluate --model adapted/data --data data.jsonl --json")

    assert window_of("tuned/data") == (6, 4)
    assert window_of("adapted/data") == (6, 4)
    assert read_lines(output)[0]["text_window"] == 6


def test_accuracy_with_a_window(workplace: Path, small_model: Models, run: Succeed) -> None:
    model, windowed = (small_model(text_window=window) for window in (None, 5))
    write_records("data.jsonl", RECORDS)
    tokenizer = load_tokenizer(str(model))
    prompts = [encode_prompt(tokenizer, record["prompt"], record["markers"]) for record in RECORDS]

    plain, _ = run(f"evaluate --model {model} --data data.jsonl --json")
    small, _ = run(f"evaluate --model {windowed} --data data.jsonl --json")

    line = read_lines(small)[0]
    assert line["text"] == "data.jsonl"
    assert read_lines(plain)[0].keys().isdisjoint({"text_window", "kv_kept"})
    assert (line["text_window"], line["kv_kept"]) == (
        5,
        round(kept_share(prompts, tokenizer.meta_token_id, 5), 4),
    )


@pytest.mark.usefixtures("tokens")
def test_perplexity_with_a_window(small_model: Models, run: Succeed) -> None:
    measure = (
        "perplexity --corpus tokens --block-size 32 --fraction 0 --max-tokens 640 --json --model"
    )
    models = [small_model(text_window=window) for window in (None, 32, 4)]

    plain, whole, small = (json.loads(run(f"{measure} {model}")[0]) for model in models)
    landmarks = json.loads(run(f"{measure} {models[-1]} --landmarks every:8")[0])

    assert whole["value"] == pytest.approx(plain["value"], rel=ROUNDED_PERPLEXITY)
    values = {round(value, 6) for value in column([plain, small, landmarks], "value")}
    assert len(values) == 3
    assert "kv_kept" not in plain
    assert (whole["kv_kept"], small["kv_kept"]) == (1, 8 / 32)
    assert landmarks["kv_kept"] == round(11 / 36, 4)  # the fourth landmark is the last key


def test_the_page_shows_what_is_forgotten(
    workplace: Path, small_model: Models, run: Succeed
) -> None:
    model = small_model(text_window=3)
    tokenizer = load_tokenizer(str(model))
    ids = encode_prompt(tokenizer, PROMPT, "_PAUSE_")
    earlier = torch.ones(len(ids), len(ids)).tril().bool()
    forgotten = earlier & ~seen(ids, 3, 4, tokenizer.meta_token_id)

    run(f'look --model {model} "{PROMPT}"')

    page = Path("look.html").read_text(encoding="utf-8")
    packed = re.search(r'id="data">([^<]+)<', page)[1]
    causal, meta = json.loads(gzip.decompress(b64decode(packed)))[0]["modules"]
    assert "Text that it has forgotten is grey" in page
    assert (
        list(b64decode(causal["layers"]["0"]["forgotten"])) == (255 * forgotten).flatten().tolist()
    )
    assert meta["layers"]["0"]["forgotten"] is None  # no meta-token is
