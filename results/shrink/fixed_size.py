"""Would a cache of a fixed size, which `torch.compile` needs, make a model with a text window faster?

    python -m results.shrink.fixed_size --model .real/smollm2 --out results/shrink/fixed_size.jsonl

A text window refuses such caches. This decodes with the full cache, as it grows and of a fixed size, with and without
`torch.compile`, and with the growing cache of blocks 18 and 23 full and a window of 252, in turns.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, StaticCache

from metatokens import add_meta_attention, set_text_window

LENGTHS = (2048, 8192)
ROUNDS = 3  # after one that warms up and compiles
WARM, TIMED = 3, 30  # tokens that are written
AT_ONCE = 512  # tokens of a text that are read in a forward pass


@torch.inference_mode()
def tokens_per_second(model: Any, forward: Callable[..., Any], cache: Any, text: Tensor) -> float:
    """The speed of writing after a text, (1, tokens)."""
    length = text.shape[1]
    for start in range(0, length, AT_ONCE):
        chunk = text[:, start : start + AT_ONCE]
        cache = model(
            chunk, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).past_key_values
    for position in range(length, length + WARM + TIMED):
        if position == length + WARM:
            start_time = time.perf_counter()
        positions = torch.tensor([position])
        forward(
            text[:, :1],
            past_key_values=cache,
            use_cache=True,
            cache_position=positions,
            position_ids=positions[None],
        )
    return TIMED / (time.perf_counter() - start_time)


def main() -> None:
    """Measure, print, and write a line for each length and cache."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    full, base = (
        AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        for _ in range(2)
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    shrunk = add_meta_attention(base, tokenizer, layers=[]).to(torch.bfloat16).eval()
    set_text_window(shrunk, 252, full_layers=[18, 23])
    compiled = torch.compile(full.forward, dynamic=False)
    lines = []
    for length in LENGTHS:
        text = torch.randint(5, 40_000, (1, length), generator=torch.Generator().manual_seed(0))
        size = length + WARM + TIMED

        def fixed(size: int = size) -> StaticCache:
            return StaticCache(config=full.config, max_cache_len=size)

        contestants: dict[str, tuple[Any, Callable[..., Any], Callable[[], Any]]] = {
            "full, grows": (full, full.forward, lambda: DynamicCache(config=full.config)),
            "full, fixed size": (full, full.forward, fixed),
            "full, fixed size, compiled": (full, compiled, fixed),
            "shrunk, grows": (shrunk, shrunk.forward, lambda: None),
        }
        speeds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(1 + ROUNDS):
            for name, (model, forward, make_cache) in contestants.items():
                speeds[name].append(tokens_per_second(model, forward, make_cache(), text))
        for name, measured in speeds.items():
            low, middle, high = (
                round(value, 2) for value in np.quantile(measured[1:], (0, 0.5, 1))
            )
            line = {
                "length": length,
                "cache": name,
                "new_per_second": middle,
                "low": low,
                "high": high,
            }
            lines.append(line | {"n": ROUNDS, "threads": torch.get_num_threads()})
            print(f"{length:,} tokens, {name}: {middle:.1f} tokens/s ({low:.1f} to {high:.1f})")
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
