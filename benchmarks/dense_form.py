"""What the two forms of meta-attention cost, gathered and dense, next to the plain base, in one run.

    python -m benchmarks.dense_form --out benchmarks/results/dense_form.jsonl

Models with random weights read a prompt, decode, and take a training step. Every eighth position is a meta-token; the
base reads as many positions. The dense form decodes with a cache of a fixed size, and is compared with a base that has
one too; the other two have caches that grow.
"""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from benchmarks.speed.contestants import Setting, Unit
from benchmarks.speed.speed import device_name, race
from metatokens import MetaGPT2Config, MetaGPT2ForCausalLM, add_meta_attention, freeze_base
from metatokens.model.positions import rotary_tables
from metatokens.model.releases import cache_among
from metatokens.model.rows import DenseRows
from metatokens.retrofit import context

EVERY = 8
TASKS = ("prefill", "decode", "training step")
Pair = tuple[PreTrainedModel, PreTrainedModel]  # the base, and the model with meta-attention


def retrofit(**sizes: Any) -> Pair:
    """A Llama, and a copy with meta-attention of 8 heads of 64, in training as a whole."""
    base = LlamaForCausalLM(LlamaConfig(**sizes))
    model = add_meta_attention(copy.deepcopy(base), meta_token_id=0)
    freeze_base(model, trained=True)
    return base, model


def own_model(**sizes: Any) -> Pair:
    """The paper's model without its second attention, and with it."""
    plain, paper = (
        MetaGPT2Config.paper(second_attention=second, **sizes) for second in ("none", "meta")
    )
    return MetaGPT2ForCausalLM(plain), MetaGPT2ForCausalLM(paper)


def llama(
    width: int, blocks: int, heads: int, groups: int, inner: int, vocabulary: int, *, tied: bool
) -> Pair:
    """A retrofit of a Llama of these sizes."""
    return retrofit(
        hidden_size=width, num_hidden_layers=blocks, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=inner, vocab_size=vocabulary, tie_word_embeddings=tied,
    )  # fmt: skip


SIZES: dict[str, Callable[[], Pair]] = {
    "tiny": lambda: llama(32, 1, 2, 1, 64, 64, tied=True),
    "tiny GPT-2": lambda: own_model(hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
    "Llama 5M": lambda: llama(256, 4, 4, 2, 688, 4096, tied=False),
    "SmolLM2 135M": lambda: llama(576, 30, 9, 3, 1536, 49152, tied=True),
    "MetaGPT2 152M": own_model,
}


class Switch:
    """Makes a model without a cache attend in the dense form while `is_dense`, as it does in a graph."""

    is_dense = False

    def __init__(self, model: Any):
        if isinstance(model, MetaGPT2ForCausalLM):
            usual_form = model.model._meta_attention_form
            model.model._meta_attention_form = lambda *inputs: (
                "dense" if self.is_dense else usual_form(*inputs)
            )
        else:
            model.model.register_forward_pre_hook(self._replace, with_kwargs=True)

    def _replace(self, decoder: Any, args: tuple, inputs: dict[str, Any]) -> None:
        if self.is_dense and cache_among(inputs) is None:
            settings, ids = decoder.meta_settings, inputs["input_ids"]
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            rotary = rotary_tables(positions, settings.head_size, settings.rope_theta)
            rows = DenseRows(ids == decoder.meta_config.meta_token_id)
            context.thread.forward_pass.context = context.ForwardContext(
                rows, rotary, mask=None, attend=None, engine={}
            )


def units(base: Any, model: Any, length: int, new_tokens: int, device: str) -> dict[str, Unit]:
    """The work, named "task, form"; "base" has a cache that grows, "static base" one of a fixed size."""
    switch, meta = Switch(model), model.config.meta_token_id
    text = torch.randint(
        1, min(meta or 1 << 30, base.config.vocab_size), (1, length), device=device
    )
    mixed = text.clone()
    mixed[:, EVERY - 1 :: EVERY] = meta
    units_by_name: dict[str, Unit] = {}

    def add(
        name: str,
        tested: Any,
        work: Callable[[], object],
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        def ready() -> None:
            tested.train("training" in name)
            switch.is_dense = "dense" in name
            prepare()

        units_by_name[name] = Unit(
            work=work,
            prepare=ready,
            text_tokens=length,
            parameters=sum(p.numel() for p in tested.parameters()),
        )

    for form, tested, ids in (
        ("base", base, text),
        ("gathered", model, mixed),
        ("dense", model, mixed),
    ):
        add(f"prefill, {form}", tested, reading(tested, ids))
        add(f"training step, {form}", tested, training(tested, ids))
    for form, tested, ids in (
        ("base", base, text),
        ("gathered", model, mixed),
        ("static base", base, text),
        ("dense", model, mixed),
    ):
        size = (
            length + new_tokens + new_tokens // EVERY + 1
            if form in ("static base", "dense")
            else None
        )
        add(
            f"decode, {form}",
            tested,
            *decoding(
                tested, ids, new_tokens, size, {} if tested is base else {"meta_every": EVERY}
            ),
        )
    return units_by_name


def reading(model: Any, ids: Tensor) -> Callable[[], object]:
    """Read a prompt, without a cache."""
    return torch.inference_mode()(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1))


def training(model: Any, ids: Tensor) -> Callable[[], object]:
    """Forward, backward, update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def decoding(
    model: Any, ids: Tensor, new_tokens: int, size: int | None, inserts: dict[str, int]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Generate text after a prompt whose tokens, except the last, are cached; in a cache of `size`, or one that grows.

    Returns:
        The work, and what makes it repeatable.
    """
    empty = None if size is None else StaticCache(model.config, max_cache_len=size)
    with torch.inference_mode():
        context = model.eval()(
            ids[:, :-1], past_key_values=empty, use_cache=True, logits_to_keep=1
        ).past_key_values
    options = {
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "do_sample": False,
        "pad_token_id": 1,
    }

    def prepare() -> None:
        options["past_key_values"] = copy.deepcopy(context)

    return lambda: model.generate(
        ids, attention_mask=torch.ones_like(ids), **options, **inserts
    ), prepare


def main(
    out: Annotated[Path | None, typer.Option(help="File to write JSON lines to.")] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(SIZES)}; by default the last three."),
    ] = None,
    length: Annotated[
        int, typer.Option(help="Positions of the prompt and of the training step.")
    ] = 896,
    new_tokens: Annotated[int, typer.Option(help="Text tokens that are generated.")] = 24,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 7,
    threads: Annotated[int, typer.Option(help="Of PyTorch.")] = 2,
    device: Annotated[str, typer.Option(help="Where the models run: cpu or cuda.")] = "cpu",
) -> None:
    """Print a table of ratios."""
    torch.set_num_threads(threads)
    setting = Setting(rounds=rounds, warmup=1, threads=threads, device=device)
    table = Table(
        title=f"{length} positions, 1/{EVERY} meta-tokens: median time (quartiles), {threads} threads"
    )
    for heading in ("model", "", "base, s", "gathered / base", "dense / base", "dense / gathered"):
        table.add_column(
            heading, justify="right" if "s" in heading[-4:] or "/" in heading else "left"
        )
    lines = []
    for name in size or list(SIZES)[2:]:
        torch.manual_seed(0)
        work = units(*(tested.to(device) for tested in SIZES[name]()), length, new_tokens, device)
        progress = iter(track(range(1 + rounds), name, console=Console(stderr=True)))
        seconds = race(work, setting, partial(next, progress, None)).seconds
        for task in TASKS:
            row, same = [], "static base" if task == "decode" else "base"
            for form, other in (("gathered", "base"), ("dense", same), ("dense", "gathered")):
                ratios = seconds[f"{task}, {form}"] / seconds[f"{task}, {other}"]
                low, ratio, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
                row.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
                fields = {
                    "model": name,
                    "task": task,
                    "measured": form,
                    "against": other,
                    "ratio": ratio,
                    "low": low,
                }
                own_seconds = float(np.median(seconds[f"{task}, {form}"]))
                fields |= {
                    "high": high,
                    "n": rounds,
                    "seconds": own_seconds,
                    "length": length,
                    "threads": threads,
                }
                lines.append(fields | {"device": device_name(device), "torch": torch.__version__})
            table.add_row(name, task, f"{np.median(seconds[f'{task}, base']):.3g}", *row)
    Console(width=130).print(table)
    if out is not None:
        out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
