"""The timing core on a fake clock, and every benchmark on tiny models."""

import dataclasses
import gc
import io
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.pytorch_utils import Conv1D

from benchmarks.speed import speed
from benchmarks.speed.__main__ import app
from benchmarks.speed.contestants import HEATS, Entry, Setting, Unit, make_unit, products_unit
from benchmarks.speed.cost import flops
from benchmarks.speed.figures import draw, table
from benchmarks.speed.speed import device_name, peak_memory, race, run, run_lengths
from metatokens.errors import UserError
from metatokens.model.cache import MetaTokenCacheLayer
from metatokens.paper.records import Timing

TINY = Setting(shape="tiny", length=32, batch=2, new_tokens=21, rounds=2, warmup=1, threads=1)
OURS = [
    pytest.param(benchmark, entry, id=f"{benchmark}-{entry.name}")
    for benchmark in ("train", "answers", "prefill")
    for heat in HEATS[benchmark]
    for entry in heat
    if "transformers" not in entry.peer
]


class Machine:
    """A fake clock, and work that advances it, ever more slowly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.slowness, self.log = 0.0, 1.0, []
        monkeypatch.setattr(speed.time, "perf_counter", lambda: self.now)

    def unit(self, name: str, seconds: float) -> Unit:
        def work() -> None:
            self.log.append(name)
            self.now += seconds * self.slowness

        def prepare() -> None:
            self.now += 100.0

        return Unit(work=work, prepare=prepare, text_tokens=1, parameters=1)

    def race(self, seconds: dict[str, float], **setting: int) -> speed.Heat:
        units = {name: self.unit(name, each) for name, each in seconds.items()}

        def tick() -> None:
            self.slowness *= 1.5
            self.log.append("|")

        return race(units, Setting(**setting), tick)


def test_contestants_take_turns_and_their_ratio_is_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    heat = machine.race({"a": 1.0, "b": 3.0}, rounds=9, warmup=2)
    turns = "".join(machine.log).removesuffix("|").split("|")
    assert len(turns) == 11
    assert set(turns) == {"ab", "ba"}
    assert heat.repeats == {"a": 1, "b": 1}
    # Warm-up is left out, preparation is not timed, and a machine that slows down changes no ratio.
    assert heat.seconds["a"] == pytest.approx([1.5**number for number in range(2, 11)])
    assert heat.seconds["b"] / heat.seconds["a"] == pytest.approx(np.full(9, 3.0))


def test_quick_work_is_repeated_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    heat = machine.race({"a": 0.03, "b": 0.5}, rounds=1, warmup=1)
    assert heat.repeats == {"a": 4, "b": 1}  # 0.1 s each
    assert "".join(machine.log).split("|")[1] in ("baaaa", "aaaab")
    assert heat.seconds["a"] == pytest.approx([0.045])


def test_garbage_collection_is_on_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fail() -> None:
        seen.append(gc.isenabled())
        raise ZeroDivisionError

    unit = Unit(work=fail, text_tokens=1, parameters=1)
    with pytest.raises(ZeroDivisionError):
        race({"a": unit}, TINY, lambda: None)
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.parametrize(("benchmark", "entry"), OURS)
def test_the_work_done_is_the_work_counted(benchmark: str, entry: Entry) -> None:
    unit = make_unit(benchmark, entry, TINY)
    unit.prepare()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        unit.work()
    angles = [
        sum(c.values())
        for name, c in counter.get_flop_counts().items()
        if name.endswith("rotary_emb")
    ]
    assert counter.get_total_flops() - sum(angles) == unit.counted_flops
    assert unit.needed < unit.counted_flops


@pytest.mark.parametrize(
    "entry", [entry for heat in HEATS["decode"] for entry in heat], ids=lambda entry: entry.name
)
def test_decoding_starts_behind_the_context_and_writes_text(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, passes = make_unit("decode", entry, TINY), []
    kind = DynamicLayer if entry.peer.startswith("transformers") else MetaTokenCacheLayer
    kind = StaticLayer if entry.static else kind
    update = kind.update

    widths: list[int] = []

    def watch(layer: DynamicLayer, keys: torch.Tensor, *others: Any, **options: Any) -> Any:
        widths.append(keys.shape[3])
        # A further layer of the second attention is of another kind, or has wider keys.
        if type(layer) is kind and keys.shape[3] == widths[0]:
            passes.append((keys.shape[2], int(layer.get_seq_length())))
        return update(layer, keys, *others, **options)

    monkeypatch.setattr(kind, "update", watch)
    read = [1 + (entry.inserts and text in (10, 20)) for text in range(21)]
    for _ in range(2):  # the second time as the first
        unit.prepare()
        assert unit.work().shape == (2, 32 + 21)
        assert (
            passes[::2]
            == passes[1::2]
            == [(new, 31 + sum(read[:text])) for text, new in enumerate(read)]
        )
        passes.clear()


@pytest.mark.parametrize("benchmark", ["train", "prefill", "decode"])
def test_products_are_the_baselines(benchmark: str) -> None:
    unit = make_unit(benchmark, HEATS[benchmark][0][0], TINY)
    floor = products_unit(unit, TINY)
    with FlopCounterMode(display=False) as counter:
        floor.work()
    is_training = benchmark == "train"
    # A product with one row is computed for two, which is faster.
    products = [
        product if is_training else dataclasses.replace(product, rows=max(2, product.rows))
        for product in unit.products
    ]
    assert counter.get_total_flops() == flops(products, training=is_training) * unit.passes
    assert unit.passes == (21 if benchmark == "decode" else 1)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick work is not repeated."""
    monkeypatch.setattr(speed, "_SHORTEST", 0.0)


@pytest.fixture(scope="module")
def trained() -> list[Timing]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "_SHORTEST", 0.0)
        return run("train", TINY, memory=False)


def test_timings_are_the_rounds_summarised(trained: list[Timing]) -> None:
    # Of heats.
    starts = [number for number, timing in enumerate(trained) if timing.model == timing.against]
    heats = [
        trained[start:end] for start, end in zip(starts, [*starts[1:], len(trained)], strict=True)
    ]
    for timing, by_name in (
        (line, {other.model: other for other in heat}) for heat in heats for line in heat
    ):
        quartiles = statistics.quantiles(timing.rounds, n=4, method="inclusive")
        assert [timing.low, timing.seconds, timing.high] == pytest.approx(quartiles)
        pairs = zip(timing.rounds, by_name[timing.against].rounds, strict=True)
        ratios = statistics.quantiles(
            [ours / other for ours, other in pairs], n=4, method="inclusive"
        )
        assert [timing.ratio_low, timing.ratio, timing.ratio_high] == pytest.approx(ratios)
        assert timing.n == len(timing.rounds) == 2
        assert timing.over_products > 0  # how much more, no test can say on a busy machine
        assert timing.memory is None
        assert Timing.model_validate(json.loads(timing.model_dump_json())) == timing


def test_what_is_compared_with_what(trained: list[Timing]) -> None:
    limits = {(timing.model, timing.against): timing.limit for timing in trained}
    texts = {timing.model: timing.text_tokens for timing in trained}
    assert limits["gpt2", "gpt2"] == 1
    assert limits["pause", "gpt2"] < 1 < limits["meta", "pause"] < limits["twin", "gpt2"]
    assert limits["meta", "gpt2"] == pytest.approx(
        limits["meta", "pause"] * limits["pause", "gpt2"]
    )
    assert limits["dense", "gpt2"] == pytest.approx(
        limits["dense", "meta"] * limits["meta", "gpt2"]
    )
    assert limits["gpt2-learned", "transformers"] == 1
    assert texts["gpt2"] == texts["transformers"] == 64
    assert texts["meta"] == texts["dense"] == texts["pause"] == 58  # 2 x (32 - 3)
    meta = next(timing for timing in trained if timing.model == "meta" and timing.against == "gpt2")
    assert meta.ratio_per_text_token == pytest.approx(meta.ratio * 64 / 58)
    assert meta.limit_per_text_token == pytest.approx(meta.limit * 64 / 58)
    assert meta.dtype == "float32"
    assert meta.threads == 1
    assert meta.device == device_name("cpu") != ""


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("benchmark", ["answers", "prefill", "decode"])
def test_benchmarks_run(benchmark: str) -> None:
    seen: list[tuple[int, int]] = []
    timings = run(
        benchmark, TINY, memory=False, progress=lambda done, total, _: seen.append((done, total))
    )
    heats = HEATS[benchmark]
    assert seen == [(done, 3 * len(heats)) for done in range(1, 3 * len(heats) + 1)]
    assert {timing.model for timing in timings} == {entry.name for heat in heats for entry in heat}
    for timing in timings:
        assert timing.limit == 1 or timing.model != timing.against
        assert (timing.reads is not None) == (timing.flops is None) == (benchmark == "decode")
        assert timing.text_tokens == (42 if benchmark == "decode" else timing.text_tokens)


@pytest.mark.usefixtures("once")
def test_only_chosen_contestants_take_part_and_their_baseline() -> None:
    timings = run("decode", TINY, models=["gpt2-learned"], memory=False)
    assert [(timing.model, timing.against) for timing in timings] == [
        ("transformers", "transformers"),
        ("gpt2-learned", "transformers"),
    ]
    with pytest.raises(
        UserError, match="'bert' takes no part in the benchmark answers; these do: full logits; "
    ):
        run("answers", TINY, models=["bert"])


@pytest.mark.usefixtures("once")
def test_cost_against_length(tmp_path: Path) -> None:
    timings = run_lengths(TINY, (16, 32), memory=False)
    assert [(timing.length, timing.model) for timing in timings] == [
        (length, model) for length in (16, 32) for model in ("gpt2", "meta", "dense", "dense")
    ]
    draw(timings, tmp_path / "seconds.png")
    draw(
        [timing.model_copy(update={"memory": 1_000_000}) for timing in timings],
        tmp_path / "both.png",
    )
    seconds, both = imread(tmp_path / "seconds.png"), imread(tmp_path / "both.png")
    assert seconds.std() > 0 < both.std()
    assert both.shape[1] > seconds.shape[1]  # a panel more


def test_the_command_prints_timings_and_draws_them(
    metatokens: Callable[..., Any], tmp_path: Path
) -> None:
    line = "train --shape tiny --lengths 32 --rounds 2 --warmup 1 --threads 1 --no-memory --contestant meta"
    status, output, error = metatokens(f"{line} --figure {tmp_path}/ratios.png --json", app)
    assert status == 0
    timings = [Timing.model_validate_json(line) for line in output.splitlines()]
    assert [(line.model, line.against) for line in timings] == [
        ("pause", "pause"),
        ("meta", "pause"),
        ("gpt2", "gpt2"),
        ("meta", "gpt2"),
    ]
    assert all(len(line.rounds) == line.n == 2 and line.seconds > 0 for line in timings)
    assert "meta / gpt2" in error
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "speed",
            "'speed' is not one of 'train', 'answers', 'prefill', 'decode', 'length', 'compile', 'data'",
        ),
        ("train --shape huge", "'huge' is not one of 'tiny', 'demo'"),
        ("train --lengths 32,64", "the benchmark train takes one length"),
        ("train --contestant bert", "'bert' takes no part in the benchmark train"),
    ],
)
def test_a_mistake_is_named(line: str, sentence: str, metatokens: Callable[..., Any]) -> None:
    status, output, error = metatokens(line, app)
    assert (status, output) == (2, "")
    assert sentence in " ".join(error.replace("│", "").split())


def test_table_and_figure(trained: list[Timing], tmp_path: Path) -> None:
    text = io.StringIO()
    Console(width=250, file=text).print(table(trained, 250))
    lines = [line for line in text.getvalue().splitlines() if line.split()[:1] == ["dense"]]
    dense = [timing for timing in trained if timing.model == "dense"]
    assert len(lines) == len(dense) == 2
    for line, timing in zip(lines, dense, strict=True):
        cells = line.split()
        assert cells[:3] == ["dense", "/", timing.against]
        assert cells[4] == f"{timing.ratio:.3f}"
        assert cells[7] == f"{timing.limit:.3f}"
    narrow = io.StringIO()
    Console(width=80, file=narrow).print(table(trained, 80))
    for timing in dense:
        assert (
            f"{timing.ratio:.3f} [{timing.ratio_low:.3f}, {timing.ratio_high:.3f}]"
            in narrow.getvalue()
        )
    assert "dense / " in narrow.getvalue()
    assert "…" not in narrow.getvalue()
    draw(trained, tmp_path / "train.png")
    assert imread(tmp_path / "train.png").std() > 0
    with pytest.raises(UserError, match=r"cannot write the figure to .*nowhere"):
        draw(trained, tmp_path / "nowhere" / "train.png")


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured on Linux alone"
)
def test_peak_memory_is_that_of_what_backward_needs() -> None:
    setting = Setting(shape="demo", length=1024, batch=2, threads=1)
    entry = HEATS["train"][0][0]
    saved: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    unit = make_unit("train", entry, setting)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        unit.work()
    peak = peak_memory("train", entry, setting)
    assert peak is not None
    assert sum(saved.values()) < peak < 3 * sum(saved.values())


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"length": 8}, "a length of at least 16"),
        ({"rounds": 0}, "at least 1 of everything else"),
    ],
)
def test_a_setting_that_cannot_be_run(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Setting(**fields)


@pytest.mark.parametrize("benchmark", ["train", "prefill"])
def test_models_are_compiled_where_the_setting_says_so(
    benchmark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(
        torch, "compile", lambda function, *_, **__: compiled.append(function) or function
    )
    entry = HEATS[benchmark][0][1]
    make_unit(benchmark, entry, TINY).work()
    assert compiled == []
    make_unit(benchmark, entry, dataclasses.replace(TINY, compiled=True)).work()
    assert len(compiled) == 1


@pytest.mark.usefixtures("once")
def test_compiled_models_race_those_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(
        torch, "compile", lambda function, *_, **__: compiled.append(function) or function
    )
    timings = run(
        "compile",
        TINY,
        models=["meta, compiled", "transformers", "transformers, compiled"],
        memory=False,
    )
    assert [(timing.model, timing.against, timing.compiled) for timing in timings] == [
        ("meta", "meta", False),
        ("meta, compiled", "meta", True),
        ("gpt2-learned", "gpt2-learned", False),
        ("transformers", "gpt2-learned", False),
        ("transformers, compiled", "transformers", True),
    ]
    assert len(compiled) == 2


@pytest.mark.parametrize(("ratio", "words"), [(0.5, "120"), (1.25, "never")])
def test_steps_after_which_a_slow_first_one_has_paid(
    trained: list[Timing], ratio: float, words: str
) -> None:
    as_it_is = trained[0].model_copy(
        update={"benchmark": "compile", "model": "a", "against": "a", "first": 10.0}
    )
    # At 0.5, 60 s are made up for by 0.5 s a step.
    times = {
        "first": 70.0,
        "seconds": 0.5,
        "ratio": ratio,
    }
    compiled = as_it_is.model_copy(update=times | {"model": "b"})
    text = io.StringIO()
    Console(width=250, file=text).print(table([as_it_is, compiled], 250))
    [row] = [line.split() for line in text.getvalue().splitlines() if line.startswith(" b / a")]
    assert row[row.index("70") + 1] == words


@pytest.mark.parametrize("benchmark", ["train", "prefill"])
@pytest.mark.parametrize("peer", ["meta", "dense", "transformers"])
def test_bfloat16(benchmark: str, peer: str) -> None:
    unit = make_unit(benchmark, Entry(peer, peer), dataclasses.replace(TINY, dtype="bfloat16"))
    dtypes: set[torch.dtype] = set()

    def watch(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if isinstance(module, torch.nn.Linear | Conv1D):
            dtypes.add(output.dtype)

    handle = torch.nn.modules.module.register_module_forward_hook(watch)
    unit.work()
    handle.remove()
    assert dtypes == {torch.bfloat16}
