"""`transformers serve` on a retrofitted SmolLM2-135M-Instruct, which the OpenAI client asks over HTTP."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import pytest
import torch
from openai import OpenAI
from real import FOLDER
from transformers import AutoModelForCausalLM, AutoTokenizer

import metatokens

pytestmark = [
    pytest.mark.skipif(
        not FOLDER.exists(), reason="there is no pretrained model here: make real fetches one"
    ),
    pytest.mark.filterwarnings("ignore"),  # the client's own
]
QUESTIONS = [
    "What is the capital of France?",
    "Numbers: 3, 7, 9.<|meta|> Which is the second?",
    "Name a colour.",
    "Who wrote Hamlet?<|meta|>",
    "Write a sentence about the sea.",
    "Is water wet? Answer in one word.",
    "How many days has a week?",
    "Repeat this sentence: the sun rises in the east, and it sets in the west.",
]
TOKENS = 12


class Folder(NamedTuple):
    """A saved model, and what `generate` answers to each question."""

    path: Path
    answers: list[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path, tokenizer = (
        tmp_path_factory.mktemp("serve") / "whole",
        AutoTokenizer.from_pretrained(FOLDER),
    )
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    model = metatokens.add_meta_attention(model, tokenizer, heads=3, head_size=64).eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():  # as if it had been trained
        if "meta_attention.attention.out_proj" in name:
            weight.data.normal_(std=0.02, generator=generator)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )["input_ids"]
        for question in QUESTIONS
    ]
    assert [tokenizer.meta_token_id in prompt for prompt in prompts] == [
        "<|meta|>" in question for question in QUESTIONS
    ]
    options = {"max_new_tokens": TOKENS, "do_sample": False}
    answers, others = (
        [
            tokenizer.decode(
                model.generate(torch.tensor([prompt]), meta_every=every, **options)[
                    0, len(prompt) :
                ],
                skip_special_tokens=True,
            )
            for prompt in prompts
        ]
        for every in (4, 0)
    )
    assert answers != others
    model.generation_config.meta_every = 4
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Folder(path, answers)


@pytest.fixture(
    scope="module", params=["", "--continuous-batching --cb-block-size 32 --cb-num-blocks 128"]
)
def client(folder: Folder, request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "transformers.cli.transformers",
        "serve",
        str(folder.path),
        "--trust-remote-code",
    ]
    command += ["--device", "cpu", "--port", port, *request.param.split()]
    with (
        (folder.path / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as server,
    ):
        try:
            while not is_up(port):
                assert server.poll() is None, (folder.path / "log").read_text()
                time.sleep(0.5)
            print(f"\n$ transformers serve {folder.path.name} --trust-remote-code {request.param}")
            yield OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", timeout=600)
        finally:
            server.terminate()


def is_up(port: str) -> bool:
    try:
        with urlopen(f"http://localhost:{port}/health"):
            return True
    except OSError:
        return False


def ask(client: OpenAI, folder: Folder, question: str, stream: bool) -> str:
    message = {"role": "user", "content": question}
    answer = client.chat.completions.create(
        model=str(folder.path), messages=[message], max_tokens=TOKENS, temperature=0, stream=stream
    )
    if not stream:
        return answer.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer)


def test_requests_at_once_get_the_answers_of_generate(client: OpenAI, folder: Folder) -> None:
    ask(client, folder, QUESTIONS[0], stream=False)  # makes the engine
    rates = {}
    for at_once in (1, 4, 8):
        start = time.monotonic()
        with ThreadPoolExecutor(at_once) as pool:
            streamed = [True, False] * (len(QUESTIONS) // 2)
            answers = list(pool.map(partial(ask, client, folder), QUESTIONS, streamed))
        rates[at_once] = len(QUESTIONS) / (time.monotonic() - start)
        assert answers == folder.answers
        ratio = rates[at_once] / rates[1]
        print(f"{at_once} at once: {rates[at_once]:.2f} requests a second, {ratio:.2f} of one")
