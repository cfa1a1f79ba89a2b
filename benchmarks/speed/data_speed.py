"""The speed of making data (task examples, token ids, training batches), and of the command's start.

Rates of one core are in CPU seconds, which other load on the machine affects less than wall time. Rates of several
cores are in wall time.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from metatokens.data.corpus import read_corpus
from metatokens.data.tokenizer import load_tokenizer, meta_token_id, padded_vocab_size
from metatokens.data.writing import write_token_store
from metatokens.machine import worker_context
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.recipe import FinetuneRecipe, load_recipe
from metatokens.records import Measured
from metatokens.tasks import TASKS
from metatokens.tasks.curriculum import TaskData, documents_for, task_texts
from metatokens.training.examples import Collator, grouped_by_length, train_source

PAPER_EXAMPLES = {"train": 90_000, "test": 10_000}  # per task


class Rate(Measured):
    """One measured rate or share."""

    measured: str
    unit: str
    value: float  # the median of the rounds
    low: float
    high: float
    n: int = Field(ge=1)  # rounds
    target: str


def _rate(measured: str, unit: str, values: Sequence[float], target: str) -> Rate:
    low, middle, high = np.quantile(values, (0.0, 0.5, 1.0)).tolist()
    return Rate(
        measured=measured, unit=unit, value=middle, low=low, high=high, n=len(values), target=target
    )


def example_rates(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], *, rounds: int = 5
) -> Iterator[Rate]:
    """Examples per second that one core draws and encodes, in phase 2 of each task."""
    for task in TASKS:
        source = TaskData(task, tokenizer=tokenizer, documents=documents)
        rates = []
        for number in range(rounds):
            began = time.process_time()
            for index in range(number * 1000, (number + 1) * 1000):
                source.sample(index, 2, "train")
            rates.append(1000 / (time.process_time() - began))
        yield _rate(
            f"{task}, phase 2",
            "examples/s, one core",
            rates,
            ">= 5,000" if task == "list_recall" else "-",
        )


def paper_examples(tokenizer: Path, corpus: str, *, processes: int) -> Rate:
    """The wall time of drawing all examples of the paper: 90,000 + 10,000 per task, of up to 512 tokens."""
    chunk = 5_000
    jobs = [
        (task, split, start, min(chunk, count - start))
        for task in TASKS
        for split, count in PAPER_EXAMPLES.items()
        for start in range(0, count, chunk)
    ]
    began = time.monotonic()
    with ProcessPoolExecutor(
        processes, worker_context(__name__), _open_sources, (tokenizer, corpus)
    ) as pool:
        drawn = sum(pool.map(_draw, jobs))
    assert drawn == len(TASKS) * sum(PAPER_EXAMPLES.values())
    return _rate(
        f"{drawn:,} examples, {processes} processes", "s", [time.monotonic() - began], "<= 300"
    )


_sources: dict[str, TaskData] = {}  # of a worker


def _open_sources(tokenizer: Path, corpus: str) -> None:
    loaded, documents = load_tokenizer(str(tokenizer)), documents_for("copying", corpus)
    for task in TASKS:
        _sources[task] = TaskData(task, tokenizer=loaded, documents=documents)


def _draw(job: tuple[str, str, int, int]) -> int:
    task, split, start, count = job
    source = _sources[task]
    draw = source.train if split == "train" else source.test
    return len([draw(index, 512) for index in range(start, start + count)])


def tokenizing(
    corpus: str, tokenizer: PreTrainedTokenizerBase, folder: Path, *, rounds: int = 5
) -> Rate:
    """Wall time of writing a token store, over that of the tokenizers library's batch call on the same texts."""
    texts = list(read_corpus(corpus))
    tokenizer.save_pretrained(folder / "tokenizer")
    ratios = []
    for number in range(rounds + 1):
        began = time.monotonic()
        tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        between = time.monotonic()
        write_token_store(folder / f"store{number}", corpus, str(folder / "tokenizer"))
        ratios.append((time.monotonic() - between) / (between - began))
    return _rate("writing a token store over encode_batch_fast", "ratio", ratios[1:], "<= 1.10")


def waiting_share(tokenizer: PreTrainedTokenizerBase, *, steps: int = 100, rounds: int = 5) -> Rate:
    """The share of a fine-tuning loop that is spent on batches, at the demo's model size, with one thread."""
    recipe = load_recipe(FinetuneRecipe, "demo_finetune", [f"training.max_steps={steps}"])
    batch = recipe.training.per_device_train_batch_size
    source = train_source(recipe, "list_recall", tokenizer, ())
    drawn = [source.train(index, 128).without_text() for index in range(steps * batch)]
    config = MetaGPT2Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=padded_vocab_size(tokenizer),
        meta_token_id=meta_token_id(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
    )
    model = MetaGPT2ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    collator = Collator(pad_token_id=tokenizer.eos_token_id)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shares = []
    for _ in range(rounds):
        dataset: Any = grouped_by_length(drawn, batch=batch, seed=0)
        waited, began = 0.0, time.process_time()
        batches = iter(DataLoader(dataset, batch_size=batch, collate_fn=collator))
        for _ in range(steps):
            asked = time.process_time()
            inputs = next(batches)
            waited += time.process_time() - asked
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        shares.append(waited / (time.process_time() - began))
    torch.set_num_threads(threads)
    return _rate(
        "waiting for batches, list recall at 128 tokens", "share of the loop", shares, "< 0.02"
    )


def start_times(*, rounds: int = 10) -> Iterator[Rate]:
    """Wall time of `metatokens --help` and of `import metatokens`, each in a new process."""
    commands = {
        "metatokens --help": (
            "from metatokens.cli import main; import sys; sys.argv[1:] = ['--help']; main()",
            "< 0.5",
        ),
        "import metatokens": ("import metatokens", "< 0.2"),
    }
    for name, (script, target) in commands.items():
        run = partial(
            subprocess.run, [sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL
        )
        yield _rate(name, "s", [_seconds(run) for _ in range(rounds)], target)


def _seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def data_speed(corpus: str, spec: str, *, processes: int) -> Iterator[Rate]:
    """Yield every rate of this module as soon as it is measured.

    Args:
        corpus: see `read_corpus`.
        spec: the tokenizer, see `load_tokenizer`.
        processes: the number that draws the paper's examples.
    """
    tokenizer = load_tokenizer(spec, corpus=read_corpus(corpus), extra_texts=task_texts())
    documents = documents_for("copying", corpus)
    yield from start_times()
    yield from example_rates(tokenizer, documents)
    with TemporaryDirectory() as name:
        folder = Path(name)
        yield waiting_share(tokenizer)
        yield tokenizing(corpus, tokenizer, folder)
        yield paper_examples(folder / "tokenizer", corpus, processes=processes)
