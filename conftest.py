"""Settings of every test process, and fixtures that several test files share."""

import atexit
import gc
import os
import random
import shlex
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from hypothesis import settings

from metatokens import cli
from tests.forked import PATIENCE, QUIET, Forked, Run, Start, start_server
from tests.quick import left_out

# The number of drawn cases, unless a test sets its own; tests/hostile scales its numbers by these.
# The same each time.
settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=2000, deadline=None)

# torch and transformers read these when they are imported, here and in subprocesses: one thread unless the environment
# says otherwise, since test processes run side by side, and no notices, as in the command. multiprocessing would warn
# at exit about the semaphores of processes that a test killed.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
os.environ |= {"PYTHONWARNINGS": "ignore:resource_tracker"}

# No test asks the Hub, or finds what the user has fetched from it. All processes of a run share one cache.
os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="metatokens-tests-")
    atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)

pytest_plugins = ["pytester"]

if TYPE_CHECKING:
    from metatokens.data.store import TokenStore


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-case", action="store_true", help="all cases of every test (make test-all)"
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="also more kills, faults and draws (make test-thorough)",
    )


def pytest_configure(config: pytest.Config) -> None:
    for mark in (
        "quick(parameter=values): the values of a parameter that make test runs; make test-all runs all",
        "slow: make test leaves it out, since a quicker test covers the same behaviour; make test-all runs it",
        "thorough: a repetition, which make test-thorough alone runs",
    ):
        config.addinivalue_line("markers", mark)
    settings.load_profile("thorough" if config.getoption("thorough") else "quick")


# Before a plugin changes the order, so that the choice is the same each time.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_case_named = any("[" in argument for argument in config.args)
    gone: set[pytest.Item] = set()
    if not config.getoption("thorough"):
        gone |= {item for item in items if item.get_closest_marker("thorough")}
        if not config.getoption("every_case") and not is_case_named:
            gone |= left_out([item for item in items if item not in gone])
    config.hook.pytest_deselected(items=[item for item in items if item in gone])
    items[:] = [item for item in items if item not in gone]


def pytest_collection_finish(session: pytest.Session) -> None:
    # Each training collects garbage (accelerate's `free_memory`), which took half its time before modules were frozen.
    gc.freeze()
    if any(
        "forked" in item.fixturenames for item in session.items if isinstance(item, pytest.Function)
    ):
        start_server()  # it imports while other tests run


@pytest.fixture(scope="module", autouse=True)
def closes_its_sockets() -> Iterator[None]:
    """Fail a module that leaves a socket open, as servers and event loops do.

    The garbage collector would otherwise warn of it later, in a test of another module, which then fails.
    """
    before = _open_sockets()
    yield
    end = time.monotonic() + 20
    while (left := _open_sockets() - before) and time.monotonic() < end:
        time.sleep(0.05)  # a connection may still be closing in another thread
    assert left == set(), f"sockets left open (file descriptor, inode): {left}"


def _open_sockets() -> set[tuple[int, int]]:
    sockets = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets.add((int(name), status.st_ino))
    return sockets


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a browser."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next(filter(None, map(shutil.which, names)), None)
    return path or pytest.skip("there is no Chromium or Chrome on the path")


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """A browser that waits as long as a loaded machine takes; its pages are the caller's to close."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"], timeout=1000 * PATIENCE
        )
        new_page = opened.new_page

        def patient(**options: Any) -> Any:
            page = new_page(**options)
            page.set_default_timeout(1000 * PATIENCE)
            return page

        opened.new_page = patient
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Forked]]:
    """Starts a call in a process of its own; keywords are environment variables."""
    begun: list[Forked] = []

    def start(call: Callable[..., None], *arguments: Any, **environment: str) -> Forked:
        begun.append(Forked(tmp_path_factory.mktemp("printed"), call, arguments, environment))
        return begun[-1]

    yield start
    for process in begun:
        process.end()


@pytest.fixture(scope="session")
def start_ranks(forked: Callable[..., Forked]) -> Start:
    """Starts a call once for each rank, in the environment that torchrun would set."""

    def begin(processes: int, call: Callable[..., None], *arguments: object) -> list[Forked]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        together = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(processes),
        }
        ranks = [
            {"RANK": str(rank), "LOCAL_RANK": str(rank), **together} for rank in range(processes)
        ]
        return [
            forked(call, *arguments, **QUIET, **(rank if processes > 1 else {})) for rank in ranks
        ]

    return begin


@pytest.fixture(scope="session")
def run_ranks(start_ranks: Start) -> Run:
    """Runs a call on all ranks to its end; returns what they wrote to standard error."""

    def to_end(processes: int, call: Callable[..., None], *arguments: object) -> str:
        ended = [process.wait() for process in start_ranks(processes, call, *arguments)]
        assert {status for status, *_ in ended} == {0}, ended
        return "".join(error for *_, error in ended)

    return to_end


@pytest.fixture(scope="session")
def is_thorough(request: pytest.FixtureRequest) -> bool:
    """Whether repetitions are run."""
    return request.config.getoption("thorough")


@pytest.fixture
def metatokens(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs a command line, of `metatokens` by default, in this process: exit status, standard output and error."""
    import torch

    def run(line: str, app: typer.Typer = cli.app) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["metatokens", *shlex.split(line)])
        # Under `python -m pytest` the program's name would be that of a module in pytest.
        monkeypatch.setattr(sys.modules["__main__"], "__package__", None, raising=False)
        capfd.readouterr()
        status = 0
        try:
            cli.main(app)
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        return status, *capfd.readouterr()

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)  # threads of several test processes would slow each other down


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text (C4, WikiText-2, books, the GPT-2 vocabulary), if there is one next to the project."""
    folder = Path(__file__).parents[1] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real text is not at {folder}")
    return folder


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Reads every file below a folder, by relative path."""
    return lambda folder: {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of a few documents, from which a small model learns a good deal in a few steps."""
    draw = random.Random(0)
    line = "the cat sat on a mat while two dogs ran over green hills and a river in spring"
    words = line.split(" ")
    sentences = [" ".join(draw.choices(words, k=12)) + "." for _ in range(8)]
    paragraphs = [" ".join(draw.choices(sentences, k=20)) for _ in range(60)]
    path = tmp_path_factory.mktemp("corpus") / "small.txt"
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small_store(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> "TokenStore":
    """The corpus as token ids; the tokenizer is trained on the words of the tasks, too."""
    from metatokens.data.writing import write_token_store
    from metatokens.tasks.curriculum import task_texts

    folder = tmp_path_factory.mktemp("store") / "tokens"
    return write_token_store(
        folder, str(small_corpus), "train:768", held_out=0.2, extra_texts=task_texts()
    )


@pytest.fixture(scope="session")
def small_model(
    small_store: "TokenStore", tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Makes a folder with a small untrained model of a given configuration and the store's tokenizer."""
    import torch

    from metatokens.checkpoint import save_model
    from metatokens.data.tokenizer import padded_vocab_size
    from metatokens.model.configuration import MetaGPT2Config
    from metatokens.model.modeling import MetaGPT2ForCausalLM

    def make(**changes: object) -> Path:
        sizes = {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "initializer_range": 0.2,
        }
        eos = small_store.tokenizer.eos_token_id
        ids = {
            "meta_token_id": small_store.tokenizer.meta_token_id,
            "eos_token_id": eos,
            "bos_token_id": eos,
        }
        vocabulary = {"vocab_size": padded_vocab_size(small_store.tokenizer)}
        torch.manual_seed(0)
        model = MetaGPT2ForCausalLM(MetaGPT2Config(**(sizes | ids | vocabulary | changes)))
        folder = tmp_path_factory.mktemp("model")
        save_model(model, small_store.tokenizer, folder)
        return folder

    return make
