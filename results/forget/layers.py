"""Which blocks need the text: what answers cost if one block sees sinks and a window, and all others everything.

    python -m results.forget.layers --out runs/forget --train great_expectations.txt.gz > runs/forget/layers.jsonl

The model is the retrofitted base, untrained, and the facts are those of training. A line has the number of the block,
the mean loss (nats) of an answer, and how many of the answers are found.
"""

import argparse
import copy
import json
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from metatokens.checkpoint import load_model
from metatokens.data.tokenizer import load_tokenizer
from metatokens.retrofit.text_window import set_text_window
from results.forget.run import SINKS, read
from results.forget.texts import Texts


def main() -> None:
    """Print a line for the whole model, and one for each block."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of the run")
    parser.add_argument("--train", required=True)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of a text")
    parser.add_argument(
        "--beyond", type=int, default=160, help="least tokens from a fact to the questions"
    )
    parser.add_argument("--window", type=int, default=28)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    model = load_model(given.out / "base-tokens", device=given.device, dtype="bfloat16").eval()
    texts = Texts(load_tokenizer(str(given.out / "base-tokens")), [given.train])
    generators = map(np.random.default_rng, range(given.texts))
    tests = [
        texts.asked(generator, given.length, "train", given.beyond) for generator in generators
    ]
    blocks = range(model.config.num_hidden_layers)
    for without in (None, *blocks):
        set_text_window(model, given.window, SINKS, [block for block in blocks if block != without])
        losses, hits = [], []
        for text, questions in tests:
            with torch.inference_mode():
                cache = read(model, text)
            for question, answer in questions:
                asked = torch.tensor([question + answer[:-1]], device=model.device)
                past = {"past_key_values": copy.deepcopy(cache), "use_cache": True}
                with torch.inference_mode():
                    logits = model(asked, **past, logits_to_keep=len(answer)).logits[0].float()
                losses.append(
                    cross_entropy(logits.cpu(), torch.tensor(answer), reduction="sum").item()
                )
                hits.append(logits.argmax(dim=-1).tolist() == answer)
        line = {
            "block": without,
            "loss": round(float(np.mean(losses)), 3),
            "found": sum(hits),
            "n": len(hits),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
