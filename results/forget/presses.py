"""The presses of kvpress on the plain base, with the texts and questions that `results.forget.run` left in OUT.

    python -m venv kvpress-env && kvpress-env/bin/pip install torch==2.13.0 kvpress==0.5.5 wrapt scipy
    PYTHONPATH=src kvpress-env/bin/python -m results.forget.presses --base .real/smollm2 --out runs/forget

An environment of its own: kvpress 0.5.5 needs transformers < 5.3, and metatokens 5.19 or newer. Of metatokens only what
needs no transformers is used. KVzap does not run: it needs a model trained for each base (nvidia/KVzap-mlp-NAME), and
there is none for SmolLM2.

A press reads a text with all of it in sight, and then drops entries, so what it keeps has seen what it drops; the arms
of `run.py` never have. For prose, the text before each 16 tokens is read anew and pressed, so that on average an
arm's share of the train length is held. A press keeps that share of longer texts too, where landmarks keep less.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from metatokens.evaluation.intervals import wilson_interval
from metatokens.files import write_whole
from metatokens.records import Result, pack_hits

STEP = 16  # tokens of prose between two pressings
PRESSES = {
    "streaming": lambda ratio: kvpress.StreamingLLMPress(ratio, n_sink=4),
    "knorm": kvpress.KnormPress,
    "snapkv": lambda ratio: kvpress.SnapKVPress(ratio, window_size=8),
    "expected": kvpress.ExpectedAttentionPress,
}


def pressed(model: Any, make: Any, ids: list[int], kept: int) -> DynamicCache:
    """The cache of a text, of which so many entries are kept."""
    cache = DynamicCache()
    with make(max(0.0, 1 - (kept + 0.5) / len(ids)))(model):  # the half, since a press rounds down
        model(
            torch.tensor([ids], device=model.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    return cache


def following(model: Any, cache: DynamicCache, ids: list[int], before: int) -> torch.Tensor:
    """The logits of ids that follow a text of `before` tokens, (ids, vocabulary)."""
    place = torch.arange(before, before + len(ids), device=model.device)[None]
    own = {"position_ids": place, "past_key_values": copy.deepcopy(cache), "use_cache": True}
    return model(torch.tensor([ids], device=model.device), **own).logits[0].float()


def measured(
    model: Any, name: str, share: int, texts: dict[str, Any], excerpts: int
) -> list[Result]:
    """Perplexity of each excerpt's second half, and the share of facts that are found, as `run.py` has them."""
    about, lines = (
        {"model": name, "recipe": f"forget/press-1-{share}", "seed": 0, "kv_kept": 1 / share},
        [],
    )
    files = enumerate(texts["prose"].items())
    named = (
        (f"{text} {file * len(one) + i}", ids)
        for file, (text, one) in files
        for i, ids in enumerate(one[:excerpts])
    )
    for text, ids in named:
        length, loss = len(ids), []
        for start in range(length // 2, length, STEP):
            cache = pressed(model, PRESSES[name], ids[: start - 1], length // share - STEP // 2)
            logits = following(
                model, cache, ids[start - 1 : start + STEP - 1], start - 1
            ).log_softmax(dim=-1)
            loss += (-logits[range(STEP), ids[start : start + STEP]]).tolist()
        value = float(np.exp(np.mean(loss)))
        own = {"metric": "perplexity", "text": text, "n": len(loss), "value": value}
        lines.append(Result(**about, **own, length=length))
    for length, asked in texts["asked"].items():
        hits = []
        for ids, questions in asked:
            cache = pressed(model, PRESSES[name], ids, len(ids) // share)
            for question, answer in questions:
                logits = following(model, cache, [*question, *answer][:-1], len(ids))[
                    -len(answer) :
                ]
                hits.append(logits.argmax(dim=-1).tolist() == answer)
        low, high = wilson_interval(sum(hits), len(hits))
        own = {
            "metric": "exact_match",
            "n": len(hits),
            "value": float(np.mean(hits)),
            "low": low,
            "high": high,
        }
        lines.append(Result(**about, **own, task="facts", length=int(length), hits=pack_hits(hits)))
    return lines


def main() -> None:
    """Write the lines of each press and share, unless they are there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shares", default="8,4,16")
    parser.add_argument(
        "--excerpts",
        type=int,
        default=8,
        help="of each held-out file, at most as many as there are",
    )
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(given.base, dtype=torch.bfloat16).to(device).eval()
    texts = json.loads((given.out / "texts.json").read_bytes())
    for share, name in (
        (int(share), name) for share in given.shares.split(",") for name in PRESSES
    ):
        file = given.out / f"press-{name}-1-{share}" / "results.jsonl"
        if not file.exists():
            with torch.inference_mode():
                lines = measured(model, name, share, texts, given.excerpts)
            file.parent.mkdir(exist_ok=True)
            write_whole(file, "".join(f"{one.line()}\n" for one in lines).encode())


if __name__ == "__main__":
    main()
