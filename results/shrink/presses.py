"""The presses of kvpress on the prompts of the suites, each of which keeps as much as a model of `metatokens shrink`.

    python -m venv kvpress-env && kvpress-env/bin/pip install torch==2.13.0 kvpress==0.5.5 wrapt scipy
    PYTHONPATH=src kvpress-env/bin/python -m results.shrink.presses --prompts runs/suites/prompts.jsonl \
        --model runs/shrink/0/full --name full --like runs/suites/results.jsonl --like-model shrunk \
        --text 'novels/*.txt.gz' --out runs/suites/results.jsonl

An environment of its own: kvpress 0.5.5 needs transformers < 5.3, and metatokens 5.19 or newer. Of metatokens only what
needs no transformers is used.

A press reads a context with all of it in sight, and then drops entries, so what it keeps has seen what it drops; a
model of `metatokens shrink` never has. `streaming`, `knorm`, `snapkv` and `expected` keep the same number of entries in
each head; `adakv` gives heads different numbers. `duo` keeps everything in some heads, and sinks and a window in the
others, as DuoAttention does. Its own trained scores of heads exist for six models of 7 and 8 billion parameters, so
this one takes kvpress's scores without training. They need texts: kvpress downloads BookSum; here they are given.
kvpress masks what the last two drop, and does not free it.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import kvpress
import numpy as np
import pandas
import torch
from kvpress.presses import duo_attention_press
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from metatokens.data.corpus import read_corpus
from metatokens.errors import UserError
from metatokens.machine import has_fast_bfloat16
from metatokens.records import SEPARATOR, Result, read_lines
from results.shrink.decoding import continue_greedily, stop_tokens
from results.shrink.prompts import Prompt, Shares, shares_kept, write_results

SINKS = 4  # as many as `metatokens shrink` keeps (TEXT_SINKS, which needs transformers)
SNAPKV_WINDOW = (
    64  # the last tokens, whose attention chooses what is kept; fewer if fewer than 128 are kept
)
SCORED_TEXTS = 50  # by which `duo` ranks heads, as many as kvpress takes
CHARACTERS = 2_000  # of such a text
# Fields of a retrofitted model's configuration that transformers alone cannot read.
MADE_ELSEWHERE = {"auto_map", "architectures", "model_type"}


PRESSES = ("streaming", "knorm", "snapkv", "expected", "adakv", "duo")


@dataclass
class Duo(kvpress.DuoAttentionPress):
    """DuoAttention whose heads are ranked by given scores, (layers, heads)."""

    scores: np.ndarray | None = None
    window: int = 0

    def load_attention_pattern(self, model: Any) -> tuple[int, int, np.ndarray]:
        """Sinks, window and scores, where kvpress downloads those of a few models."""
        assert self.scores is not None
        return SINKS, self.window, self.scores


class Pressing:
    """Answers prompts with a model of which a press drops entries.

    Args:
        folder: of a plain model, or of one that `metatokens` trained without meta-attention.
        texts: by which `duo` scores heads.
    """

    def __init__(self, folder: Path, texts: Sequence[str]):
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = settings.get("base_model_type", settings["model_type"])
        settings = {name: value for name, value in settings.items() if name not in MADE_ELSEWHERE}
        config = AutoConfig.for_model(kind, **settings)
        dtype = torch.bfloat16 if has_fast_bfloat16() else torch.float32
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
        self.model: Any = model.to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._texts = texts

    @cached_property
    def _scores(self) -> np.ndarray:
        """How much each head attends to what is far away, (layers, heads), by kvpress."""
        books = pandas.DataFrame({"chapter": self._texts})
        dataset = Mock(to_pandas=lambda: books)
        with patch.object(duo_attention_press, "load_dataset", lambda *args, **kwargs: dataset):
            return duo_attention_press.duo_attention_on_the_fly(self.model, num_samples=len(books))

    def _press(self, name: str, share: float, tokens: int) -> Any:
        """The press that keeps a share of so many tokens."""
        dropped = 1 - share
        match name:
            case "streaming":
                return kvpress.StreamingLLMPress(dropped, n_sink=SINKS)
            case "knorm":
                return kvpress.KnormPress(dropped)
            case "snapkv":
                window = min(SNAPKV_WINDOW, int(share * tokens / 2))
                return kvpress.SnapKVPress(dropped, window_size=window)
            case "expected":
                return kvpress.ExpectedAttentionPress(dropped)
            case "adakv":
                return kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(dropped))
            case _:
                return self._duo(share, tokens)

    def _duo(self, share: float, tokens: int) -> Duo:
        """Half of the share in heads that keep everything, the rest in the windows of the others."""
        full_heads = max(1, round(self._scores.size * share / 2))
        full_share = full_heads / self._scores.size
        window = round((share - full_share) / (1 - full_share) * tokens) - SINKS
        if window < 1:
            raise UserError(f"a share of {share} of {tokens} tokens leaves no window for duo.")
        return Duo(head_compression_ratio=1 - full_share, scores=self._scores, window=window)

    @torch.inference_mode()
    def answer(self, prompt: Prompt, name: str, shares: Shares) -> str:
        """The output of a prompt, of whose context a press keeps the share of its task and length."""
        context = self.tokenizer(prompt.context)["input_ids"]
        asked = prompt.question + prompt.answer_prefix
        question = self.tokenizer(asked, add_special_tokens=False)["input_ids"]
        cache = DynamicCache()
        press = self._press(name, shares[prompt.task, prompt.length], len(context))
        with press(self.model):
            self._read(context, cache, 0)
        length = len(context)

        def forward(ids: Sequence[int]) -> Tensor:
            nonlocal length
            logits = self._read(ids, cache, length)
            length += len(ids)
            return logits

        stop = stop_tokens(self.model)
        output = continue_greedily(forward, question, prompt.new_tokens, stop)
        return str(self.tokenizer.decode(output))

    def _read(self, ids: Sequence[int], cache: DynamicCache, start: int) -> Tensor:
        """Read tokens from a position on, and give the last one's logits."""
        positions = torch.arange(start, start + len(ids), device=self.model.device)
        output = self.model(
            torch.tensor([list(ids)], device=self.model.device),
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[0, -1]
        return logits


def main() -> None:
    """Append the lines of the presses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="the folder of a full model")
    parser.add_argument("--name", required=True, help="of the model, in the lines")
    parser.add_argument("--seed", type=int, default=0, help="of the trainings of both models")
    parser.add_argument("--presses", nargs="+", choices=PRESSES, default=PRESSES)
    parser.add_argument("--like", type=Path, required=True, help="lines of `run_suites`")
    parser.add_argument("--like-model", required=True, help="keep as much as this model of them")
    parser.add_argument("--text", required=True, help="a corpus by which duo ranks heads")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    prompts = read_lines(options.prompts, Prompt)
    shares = shares_kept(read_lines(options.like, Result), options.like_model, options.seed)
    asked = [prompt for prompt in prompts if (prompt.task, prompt.length) in shares]
    texts = [text[:CHARACTERS] for text in islice(read_corpus(options.text), SCORED_TEXTS)]
    pressing = Pressing(options.model, texts)
    for name in options.presses:
        for result in write_results(
            asked,
            options.out,
            model=f"{options.name}{SEPARATOR}{name}",
            seed=options.seed,
            answer=partial(pressing.answer, name=name, shares=shares),
            share=lambda group: {"kv_kept": shares[group[0].task, group[0].length]},
        ):
            print(result.line(), flush=True)


if __name__ == "__main__":
    main()
