"""Models with meta-tokens in lm-evaluation-harness: `--model metatokens`.

`python -m metatokens.evaluation.lm_eval ...` is `lm_eval ...` for releases that ignore this package's entry point, as
0.4.13 does.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metatokens.checkpoint import fetch_model, load_model
from metatokens.data.landmarks import Landmarks
from metatokens.data.prompts import encode_chat, encode_prompt
from metatokens.data.tokenizer import UNLIMITED, beginning_of, load_tokenizer
from metatokens.decoder import left_padded
from metatokens.errors import UserError
from metatokens.recipe import landmark_rule

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils_hf import get_dtype
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    print("metatokens: lm-evaluation-harness is missing: pip install 'metatokens[lm-eval]'.", file=sys.stderr)
    sys.exit(2)

# Options of `HFLM` for ways of loading that `load_model` does not have.
_ELSEWHERE = ("parallelize", "tp_plan", "peft", "delta", "autogptq", "gptqmodel", "gguf_file", "quantization_config")


@register_model("metatokens")
class MetaTokensLM(HFLM):
    """`HFLM` for every model that `metatokens` loads, including retrofitted models and those that `save_meta` wrote.

    Contexts are plain text: the marker and `<|meta|>` have no meaning in them unless you pass `marker`.

    Args:
        pretrained: a model's folder with its tokenizer, `hf:NAME` for the Hugging Face Hub, or a model from
            `load_model`, with its `tokenizer`.
        meta_every: insert a meta-token after every so many tokens of text. For likelihoods the whole sequence gets
            them, as context and never as targets; in generation they are counted from the end of the context.
        marker: the text that marks a meta-token in contexts, together with a space before it, such as `_PAUSE_`
            in the tasks of `examples/lm_eval`.
        device: default: a GPU if there is one.
        dtype: of the base's weights, `float32` or `bfloat16`; default: as saved.
        kwargs: of `HFLM`, except those for its other ways to load a model.

    Raises:
        UserError: if there is no such model, it has no meta-token to insert, or both kinds of insertion are asked for.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        meta_every: int | None = None,
        marker: str | None = None,
        device: str | None = None,
        dtype: str | torch.dtype = "auto",
        **kwargs: Any,
    ):
        if meta_every is not None and marker is not None:
            raise UserError("give meta_every or marker: meta-tokens are put after every so many tokens, or at markers.")
        if marker == "":
            raise UserError("the marker is empty; give the text that marks a meta-token, such as _PAUSE_.")
        if meta_every is not None:
            landmark_rule(f"every:{meta_every}", "the rule that meta_every gives")
        self.meta_every, self.marker = meta_every, marker
        self._dtype = None if dtype == "auto" else str(get_dtype(dtype)).removeprefix("torch.")
        self._is_chat = False
        self._max_length: int | None  # set by `HFLM`
        super().__init__(pretrained, device=device or ("cuda" if torch.cuda.is_available() else "cpu"), **kwargs)
        if meta_every is not None and self.config.meta_token_id is None:
            raise UserError(f"{pretrained} has no meta_token_id, so no meta-tokens can be inserted.")

    @property
    def max_length(self) -> int:
        """Tokens of text that fit into the model; only learned positions have a limit, so contexts stay whole."""
        if self._max_length:
            return self._max_length
        limit = super().max_length if self.config.position_embedding == "learned" else UNLIMITED
        return self._text_in(limit)

    def _text_in(self, tokens: int) -> int:
        return tokens if self.meta_every is None else tokens * self.meta_every // (self.meta_every + 1)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows of the length that the model was trained for."""
        given, self._max_length = self._max_length, self._max_length or self._text_in(super().max_length)
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self._max_length = given

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        self._model = load_model(fetch_model(Path(pretrained)), dtype=self._dtype)
        self._config = self._model.config

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        spec = pretrained if tokenizer is None else tokenizer
        self.tokenizer = load_tokenizer(str(fetch_model(Path(spec)))) if isinstance(spec, str) else spec

    def _create_model(self, pretrained: str, **kwargs: Any) -> None:
        if asked := [name for name in _ELSEWHERE if kwargs.get(name)]:
            raise UserError(f"--model metatokens loads a model from its folder, without {asked[0]}.")

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
        """Apply the template as the harness does; from then on, special tokens in contexts are recognised."""
        self._is_chat = True
        return super().apply_chat_template(*args, **kwargs)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **kwargs: Any
    ) -> list[int]:
        """The ids of a text, with meta-tokens only at markers.

        The ids that the tokenizer puts before a text come first, unless `add_special_tokens` is False or the text comes
        from a chat template.
        """
        if self._is_chat:
            ids = encode_chat(self.tokenizer, string, self.marker)
        else:
            ids = encode_prompt(self.tokenizer, string, () if self.marker is None else self.marker)
            ids = ids[len(beginning_of(self.tokenizer)) :] if add_special_tokens is False else ids
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Ids and attention mask, (contexts, tokens), left-padded, with the meta-tokens of each context."""
        rows = [self.tok_encode(string) for string in strings]
        if self.meta_every is not None:
            rows = list(map(Landmarks(self.tokenizer, f"every:{self.meta_every}").insert_into, rows))
        rows = [row[-left_truncate_len:] if left_truncate_len else row for row in rows]
        return left_padded(rows, self.tokenizer.pad_token_id)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits for the text token that follows each of `inps`, (rows, tokens, vocabulary)."""
        if self.meta_every is None:
            return super()._model_call(inps)
        text = torch.arange(inps.shape[1] + 1, device=inps.device)
        places = text + text // self.meta_every  # of the text tokens, and of the next one
        whole = inps.new_full((len(inps), int(places[-1])), self.config.meta_token_id)
        whole[:, places[:-1]] = inps
        return super()._model_call(whole)[:, places[1:] - 1]

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        if self.meta_every is not None:
            kwargs["meta_every"] = self.meta_every
        return super()._model_generate(context, max_length, stop, **kwargs)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
