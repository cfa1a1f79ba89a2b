"""What a cache of a fixed size and `torch.compile` bring, which a text window refuses: tokens a second.

    python -m results.shrink.static_cache .real/smollm2 runs/shrink/1/model 512 2048 8192

The base writes with a growing cache, with a static one, and with a static one and compiled; then the shrunk model
writes, whose cache grows and forgets.
"""

import argparse
import time
from collections import defaultdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig

import metatokens  # noqa: F401  # the Auto classes then load the shrunk model
from metatokens.evaluation.intervals import student_interval

CONTINUATION = 32  # tokens by which a text is continued
ROUNDS = 3  # of all arms in turn


class Clock:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note the time; the first call has the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""

    @property
    def per_second(self) -> float:
        """Tokens a second after the first new one, which comes with the prompt's."""
        first_new, last = self.times[1], self.times[-1]
        return (len(self.times) - 2) / (last - first_new)


def written_per_second(model: Any, ids: torch.Tensor, settings: dict[str, Any]) -> float:
    """Tokens a second by which a model continues a text."""
    clock = Clock()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=CONTINUATION,
        max_new_tokens=CONTINUATION,
        do_sample=False,
        streamer=clock,
        **settings,
    )
    return clock.per_second


def main() -> None:
    """Print a line for each length and cache."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base")
    parser.add_argument("shrunk")
    parser.add_argument("lengths", type=int, nargs="+")
    options = parser.parse_args()
    base, shrunk = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        for folder in (options.base, options.shrunk)
    )
    compiling = CompileConfig(mode="default")
    compiling._compile_all_devices = True  # transformers compiles on GPUs alone otherwise
    arms: dict[str, tuple[Any, dict[str, Any]]] = {
        "full, growing": (base, {}),
        "full, static": (base, {"cache_implementation": "static", "disable_compile": True}),
        "full, static, compiled": (
            base,
            {"cache_implementation": "static", "compile_config": compiling},
        ),
        "shrunk, growing": (shrunk, {}),
    }
    print("| tokens | cache | written, tokens/s |\n|---:|---|---:|")
    for length in options.lengths:
        ids = torch.randint(1000, 20_000, (1, length), generator=torch.manual_seed(0))
        speeds: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(1 + ROUNDS):
            for name, (model, settings) in arms.items():
                speeds[name].append(written_per_second(model, ids, settings))
        for name, of_arm in speeds.items():
            mean, low, high = student_interval(of_arm[1:])  # the first round compiles
            print(f"| {length:,} | {name} | {mean:.1f} ({low:.1f} to {high:.1f}) |", flush=True)


if __name__ == "__main__":
    main()
