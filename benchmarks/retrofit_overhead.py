"""What meta-attention costs a decoder that it was added to: the same model with and without it, side by side.

    python -m benchmarks.retrofit_overhead --out benchmarks/results/retrofit.jsonl

A Llama with random weights takes turns with itself after `add_meta_attention` (8 heads of 64 in every layer): on text,
on as many positions, every eighth a meta-token, and generating, where a meta-token is one more position.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.speed.contestants import Setting, Unit
from benchmarks.speed.speed import device_name, race
from metatokens import add_meta_attention

META, VOCABULARY = 0, 4096
EVERY = 8
PROMPT = 512  # tokens before what is generated
AIMS = {"reading text": 1.02, "reading, 1/8 meta-tokens": 1.10}


def main(
    out: Annotated[Path | None, typer.Option(help="File to write JSON lines to.")] = None,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 512,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    length: Annotated[int, typer.Option(help="Positions that are read at once.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Tokens that are generated.")] = 64,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 15,
    threads: Annotated[int, typer.Option(help="Of PyTorch.")] = 1,
    device: Annotated[str, typer.Option(help="Where the models run: cpu or cuda.")] = "cpu",
) -> None:
    """Print the table of ratios."""
    torch.set_num_threads(threads)
    setting = Setting(rounds=rounds, warmup=3, threads=threads, device=device)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
    )
    base: Any = LlamaForCausalLM(config).to(device).eval()
    model: Any = add_meta_attention(
        copy.deepcopy(base), meta_token_id=META, heads=8, head_size=64
    ).eval()
    text = torch.randint(1, VOCABULARY, (1, length), device=device)
    mixed = text.clone()
    mixed[:, EVERY - 1 :: EVERY] = META
    prompt = text[:, :PROMPT]

    def reading(tested: Any, ids: torch.Tensor) -> Callable[[], object]:
        return lambda: tested(input_ids=ids, use_cache=False)

    def generating(tested: Any, **options: Any) -> Callable[[], object]:
        fixed = {
            "do_sample": False,
            "min_new_tokens": new_tokens,
            "max_new_tokens": new_tokens,
            "pad_token_id": 1,
        }
        return lambda: tested.generate(
            prompt, attention_mask=torch.ones_like(prompt), **fixed, **options
        )

    work: dict[str, tuple[Callable[[], object], str]] = {
        "base, reading": (reading(base, text), ""),
        "reading text": (reading(model, text), "base, reading"),
        "reading, 1/8 meta-tokens": (reading(model, mixed), "base, reading"),
        "base, generating": (generating(base), ""),
        "generating": (generating(model), "base, generating"),
        "generating, meta_every=8": (generating(model, meta_every=EVERY), "base, generating"),
    }
    sizes = {
        tested: sum(parameter.numel() for parameter in tested.parameters())
        for tested in (base, model)
    }
    units = {
        name: Unit(work=call, text_tokens=length, parameters=sizes[model])
        for name, (call, _) in work.items()
    }
    progress = iter(
        track(range(setting.warmup + setting.rounds), "rounds", console=Console(stderr=True))
    )
    with torch.inference_mode():
        heat = race(units, setting, lambda: next(progress, None))
    table = Table(
        title=f"A Llama of {sizes[base] / 1e6:.1f}M and {(sizes[model] - sizes[base]) / 1e6:.1f}M added"
    )
    for heading in ("", "time against the base's", "quartiles", "aim"):
        table.add_column(heading, justify="left" if not heading else "right")
    lines = []
    for name, (_, against) in work.items():
        if against:
            low, ratio, high = np.quantile(
                heat.seconds[name] / heat.seconds[against], (0.25, 0.5, 0.75)
            ).tolist()
            table.add_row(
                name,
                f"{ratio:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{AIMS[name]:.2f}" if name in AIMS else "",
            )
            ratios = {
                "measured": name,
                "against": against,
                "ratio": ratio,
                "low": low,
                "high": high,
                "n": rounds,
            }
            sizes_of_run = {
                "parameters": sizes[model],
                "base_parameters": sizes[base],
                "length": length,
                "threads": threads,
            }
            seconds = float(np.median(heat.seconds[name]))
            lines.append(
                ratios
                | sizes_of_run
                | {"seconds": seconds, "device": device_name(device), "torch": torch.__version__}
            )
    Console().print(table)
    if out is not None:
        out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
