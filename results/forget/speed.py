"""What a cache that forgets costs, next to the full one: bytes, and tokens a second, side by side.

    python -m results.forget.speed --out runs/forget --text emma.txt.gz --lengths 2048,8192 > runs/forget/speed.jsonl

It takes the retrofitted bases, whose weights are untrained, which does not change the speed. A line has the bytes that
a cache holds at the end, and how fast the text is read and continued: quartiles and median of the rounds.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from metatokens.checkpoint import load_model
from metatokens.data.landmarks import Landmarks
from metatokens.data.tokenizer import load_tokenizer
from metatokens.retrofit.text_window import set_text_window
from results.forget.run import RETRIEVE, SINKS, read
from results.forget.texts import Texts

NEW = 32  # tokens by which a text is continued
# By name: the retrofitted base, its window, the distance of landmarks, and the full blocks. Of 512 tokens an eighth is
# kept.
CONTESTANTS = {
    "full": ("base-tokens", None, None, ()),
    "window": ("base-tokens", 60, None, ()),
    "blocks": ("base-tokens", 28, None, RETRIEVE),
    "tokens": ("base-tokens", 29, 16, ()),
    "meta": ("base-meta", 29, 16, ()),
}


def main() -> None:
    """Print a line for each contestant and length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of the run")
    parser.add_argument("--text", required=True)
    parser.add_argument("--lengths", default="2048,8192", help="tokens of the text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    models, tokenizer = {}, load_tokenizer(str(given.out / "base-tokens"))
    for name, (folder, window, _, full) in CONTESTANTS.items():
        models[name] = load_model(given.out / folder, device=given.device, dtype="bfloat16").eval()
        set_text_window(models[name], window, SINKS, full)
    text = Texts(tokenizer, [given.text]).ids

    def now() -> float:
        if given.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for length in map(int, given.lengths.split(",")):
        seconds, sizes = {name: [] for name in models}, {}
        for name, model in (given.rounds + 1) * [*models.items()]:  # the first round warms up
            every, ids = CONTESTANTS[name][2], text[:length].tolist()
            ids = Landmarks(tokenizer, f"every:{every}").insert_into(ids) if every else ids
            how = {
                "min_new_tokens": NEW,
                "max_new_tokens": NEW,
                "do_sample": False,
                "meta_every": every,
            }
            with torch.inference_mode():
                times = [now()]
                cache = read(model, ids[:-1])
                times.append(now())
                whole = torch.tensor([ids], device=given.device)
                model.generate(
                    whole, past_key_values=cache, pad_token_id=tokenizer.eos_token_id, **how
                )
                stores = (
                    (layer.keys, layer.values, *(getattr(layer, "second", None) or ())[:2])
                    for layer in cache.layers
                )
                sizes[name] = sum(one.nbytes for store in stores for one in store)
            seconds[name].append((times[1] - times[0], now() - times[1]))
        for name, pairs in seconds.items():
            reading, making = (
                np.quantile(one, (0.75, 0.5, 0.25)) for one in zip(*pairs[1:], strict=True)
            )
            line = {
                "model": name,
                "length": length,
                "cache_bytes": sizes[name],
                "rounds": given.rounds,
            }
            line |= {
                "read_per_s": (length / reading).round(1).tolist(),
                "new_per_s": (NEW / making).round(2).tolist(),
            }
            print(
                json.dumps(line | {"device": given.device, "threads": torch.get_num_threads()}),
                flush=True,
            )


if __name__ == "__main__":
    main()
