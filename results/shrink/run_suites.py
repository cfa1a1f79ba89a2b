"""Run a model over the prompts of the suites, which `suites.py` drew.

    python -m results.shrink.run_suites --prompts runs/suites/prompts.jsonl --out runs/suites/results.jsonl \
        --model runs/shrink/0/model --name shrunk --seed 0

The context is read into the cache before the question is known. The same command goes on where it was cut off.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metatokens.checkpoint import load_model
from metatokens.data.tokenizer import beginning_of, encode_text, load_tokenizer
from metatokens.decoder import measure_cache_share
from metatokens.errors import UserError
from metatokens.machine import has_fast_bfloat16
from metatokens.model.configuration import never_generated
from metatokens.records import read_lines
from metatokens.shrink.answering import read
from results.shrink.decoding import continue_greedily, stop_tokens
from results.shrink.prompts import Prompt, write_results


class Answering:
    """Answers prompts with a model of this package or of transformers.

    Args:
        folder: of the model and its tokenizer.
    """

    def __init__(self, folder: Path):
        self.model: Any = load_model(folder, dtype="bfloat16" if has_fast_bfloat16() else None)
        self.tokenizer = load_tokenizer(str(folder))
        self._stop = stop_tokens(self.model)
        self._never = never_generated(self.model.config)

    def context(self, prompt: Prompt) -> list[int]:
        """The ids of a context."""
        [ids] = encode_text(self.tokenizer, [prompt.context])
        return [*beginning_of(self.tokenizer), *ids]

    @torch.inference_mode()
    def answer(self, prompt: Prompt) -> str:
        """The output of a prompt."""
        cache = read(self.model, self.context(prompt))

        def forward(ids: Sequence[int]) -> Tensor:
            unread = torch.tensor([list(ids)], device=self.model.device)
            output = self.model(unread, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits: Tensor = output.logits[0, -1]
            logits[self._never] = -torch.inf
            return logits

        asked = prompt.question + prompt.answer_prefix
        [question] = encode_text(self.tokenizer, [asked], continues=True)
        output = continue_greedily(forward, question, prompt.new_tokens, self._stop)
        return str(self.tokenizer.decode(output))

    def share(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """What the cache keeps of contexts; nothing is said of a model that forgets no text."""
        return measure_cache_share(self.model, map(self.context, prompts))


def check_lengths(prompts: Sequence[Prompt], config: Any) -> None:
    """Refuse prompts that are longer than the texts that a model can read.

    Raises:
        UserError: if there are such prompts.
    """
    longest = max(prompt.length for prompt in prompts)
    limit = config.max_position_embeddings
    if longest > limit:
        raise UserError(f"the model reads {limit:,} tokens, and there are prompts of {longest:,}.")


def main() -> None:
    """Append the lines of a model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a folder")
    parser.add_argument("--name", required=True, help="of the model, in the lines")
    parser.add_argument("--seed", type=int, default=0, help="of the model's training")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    prompts = read_lines(options.prompts, Prompt)
    answering = Answering(options.model)
    check_lengths(prompts, answering.model.config)
    for result in write_results(
        prompts,
        options.out,
        model=options.name,
        seed=options.seed,
        answer=answering.answer,
        share=answering.share,
    ):
        print(result.line(), flush=True)


if __name__ == "__main__":
    main()
