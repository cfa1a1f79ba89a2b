"""Retrofits of SmolLM2-135M-Instruct behind `transformers serve`, asked by the OpenAI client, and in a pipeline."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest
import torch
from openai import OpenAI
from real import FOLDER
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, pipeline

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


class Answering:
    """A model and its tokenizer, which answer the questions by `generate`."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any):
        self.model, self.tokenizer = model, tokenizer
        self.prompts = [self._prompt(question) for question in QUESTIONS]

    def _prompt(self, question: str) -> list[int]:
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )["input_ids"]
        assert (self.tokenizer.meta_token_id in ids) == ("<|meta|>" in question)
        return ids

    def __call__(self) -> list[str]:
        return [self._answer(prompt) for prompt in self.prompts]

    def _answer(self, prompt: list[int]) -> str:
        row = self.model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0]
        return self.tokenizer.decode(row[len(prompt) :], skip_special_tokens=True)

    def save(self, path: Path, without: list[str]) -> Folder:
        """Save the model, whose answers are other ones than those `without` what the test is about."""
        answers = self()
        assert answers != without
        self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        return Folder(path, answers)


@pytest.fixture(scope="module")
def with_meta_attention(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A landmark follows every fourth token."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    model = metatokens.add_meta_attention(model, tokenizer, heads=3, head_size=64).eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():  # as if it had been trained
        if "meta_attention.attention.out_proj" in name:
            weight.data.normal_(std=0.02, generator=generator)
    answering = Answering(model, tokenizer)
    without_landmarks = answering()
    model.generation_config.meta_every = 4
    return answering.save(tmp_path_factory.mktemp("serve") / "whole", without_landmarks)


@pytest.fixture(scope="module")
def with_text_window(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The window is shorter than the questions; two heads keep all text."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    model = metatokens.add_meta_attention(model, tokenizer, layers=[]).eval()
    answering = Answering(model, tokenizer)
    without_window = answering()
    metatokens.set_text_window(model, 16, full_heads=[(18, 2), (23, 0)])
    return answering.save(tmp_path_factory.mktemp("serve") / "shrunk", without_window)


def test_a_pipeline_of_a_folder_with_a_text_window_answers_as_generate(
    with_text_window: Folder,
) -> None:
    chat = pipeline("text-generation", str(with_text_window.path))
    for question, expected in zip(QUESTIONS, with_text_window.answers, strict=True):
        conversation = [{"role": "user", "content": question}]
        [answer] = chat(conversation, max_new_tokens=TOKENS, do_sample=False)
        assert answer["generated_text"][-1]["content"] == expected


SERVED = {
    "meta-attention": ("with_meta_attention", ""),
    "meta-attention, continuous batching": (
        "with_meta_attention",
        "--continuous-batching --cb-block-size 32 --cb-num-blocks 128",
    ),
    "a text window": ("with_text_window", ""),
}


class Served(NamedTuple):
    """A model that a server answers from."""

    folder: Folder
    client: OpenAI


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    fixture, options = SERVED[request.param]
    folder: Folder = request.getfixturevalue(fixture)
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
    command += ["--device", "cpu", "--port", port, *options.split()]
    with (
        (folder.path / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as server,
    ):
        try:
            while not is_up(port):
                assert server.poll() is None, (folder.path / "log").read_text()
                time.sleep(0.5)
            print(f"\n$ transformers serve {folder.path.name} --trust-remote-code {options}")
            client = OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", timeout=600)
            yield Served(folder, client)
        finally:
            server.terminate()


def is_up(port: str) -> bool:
    try:
        with urlopen(f"http://localhost:{port}/health"):
            return True
    except OSError:
        return False


def ask(served: Served, question: str, stream: bool) -> str:
    message = {"role": "user", "content": question}
    answer = served.client.chat.completions.create(
        model=str(served.folder.path),
        messages=[message],
        max_tokens=TOKENS,
        temperature=0,
        stream=stream,
    )
    if not stream:
        return answer.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer)


def test_requests_at_once_get_the_answers_of_generate(served: Served) -> None:
    ask(served, QUESTIONS[0], stream=False)  # makes the engine
    rates = {}
    for at_once in (1, 4, 8):
        start = time.monotonic()
        with ThreadPoolExecutor(at_once) as pool:
            streamed = [True, False] * (len(QUESTIONS) // 2)
            answers = list(pool.map(partial(ask, served), QUESTIONS, streamed))
        rates[at_once] = len(QUESTIONS) / (time.monotonic() - start)
        assert answers == served.folder.answers
        ratio = rates[at_once] / rates[1]
        print(f"{at_once} at once: {rates[at_once]:.2f} requests a second, {ratio:.2f} of one")
