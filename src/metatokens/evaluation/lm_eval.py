"""Models with meta-tokens in lm-evaluation-harness: `--model metatokens`.

`python -m metatokens.evaluation.lm_eval ...` is `lm_eval ...` for releases that ignore this package's entry point, as
0.4.13 does.
"""

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from metatokens.checkpoint import fetch_model, load_model
from metatokens.data.landmarks import Landmarks
from metatokens.data.prompts import encode_chat, encode_prompt, without_control
from metatokens.data.tokenizer import (
    UNLIMITED,
    beginning_of,
    check_meta_token,
    load_tokenizer,
)
from metatokens.decoder import left_padded
from metatokens.errors import UserError

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    print(
        "metatokens: lm-evaluation-harness is missing: pip install lm-eval.",
        file=sys.stderr,
    )
    sys.exit(2)

# The options of `HFLM` that do here what they do there.
_SUPPORTED = {
    "tokenizer",
    "logits_cache",
    "max_length",
    "softmax_dtype",
    "mixed_precision_dtype",
    "batch_size",
    "max_batch_size",
    "add_bos_token",
    "prefix_token_id",
    "think_end_token",
    "enable_thinking",
    "chat_template_args",
    "trust_remote_code",  # a permission, which is not needed: no code in a folder is run
}


@register_model("metatokens")
class MetaTokensLM(HFLM):
    """`HFLM` for every model that `metatokens` loads, including retrofitted models and those that `save_meta` wrote.

    Contexts are plain text: the marker and the meta-token's text have no meaning in them unless you pass `marker`.

    Args:
        pretrained: a model's folder with its tokenizer, or `hf:NAME` for the Hugging Face Hub.
        meta_every: insert a meta-token after every so many tokens of text. For likelihoods the whole sequence gets
            them, as context and never as targets; in generation they are counted from the end of the context.
        marker: the text that marks a meta-token in contexts, together with a space before it, such as `_PAUSE_`
            in the tasks of `examples/lm_eval`.
        device: `cpu` or `cuda`; default: a GPU if there is one, and the CPU if not.
        dtype: of the base's weights, `float32` or `bfloat16`; default: as saved.
        kwargs: of `HFLM`. Those for its other ways to load a model or a tokenizer are refused. The tokenizer decides
            what a context begins with, unless `add_bos_token` is False. A text whose rolling likelihood is asked for
            begins with `prefix_token_id` alone, which is not scored.

    Raises:
        UserError: if there is no such model, it has no meta-token to insert, both kinds of insertion are asked for, or
            an option cannot be followed.
    """

    def __init__(
        self,
        pretrained: str,
        meta_every: int | None = None,
        marker: str | None = None,
        device: str | None = None,
        dtype: str | None = "auto",
        **kwargs: Any,
    ):
        if meta_every is not None and marker is not None:
            raise UserError(
                "give meta_every or marker: meta-tokens are put after every so many tokens, or at markers."
            )
        self._dtype = None if dtype == "auto" else dtype
        _check_options(kwargs)
        self.meta_every, self.marker = meta_every, marker
        self._is_chat = False
        self._max_length: int | None  # set by `HFLM`
        # For a device that is not there, `HFLM` takes a GPU if there is one, else the CPU.
        super().__init__(pretrained, device=device or "any", **kwargs)
        self._beginning = [] if self.add_bos_token is False else beginning_of(self.tokenizer)
        if (meta_every, marker) != (None, None):
            check_meta_token(self.config, self.tokenizer, Path(pretrained))
        if meta_every is not None:
            self._landmarks = Landmarks(self.tokenizer, f"every:{meta_every}")

    @property
    def max_length(self) -> int:
        """Tokens of text that fit into the model; only learned positions have a limit, so contexts stay whole."""
        if self._max_length:
            return self._max_length
        limit = super().max_length if self.config.position_embedding == "learned" else UNLIMITED
        return self._text_in(limit)

    def _text_in(self, tokens: int) -> int:
        return (
            tokens if self.meta_every is None else tokens * self.meta_every // (self.meta_every + 1)
        )

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts, in windows of the length that the model was trained for."""
        # The harness puts its own prefix there.
        with (
            self._trained_length(),
            patch.object(self, "_beginning", []),
        ):
            return super().loglikelihood_rolling(requests, disable_tqdm)

    def _detect_batch_size(self, *args: Any, **kwargs: Any) -> int:
        with self._trained_length():  # without requests, the harness tries batches of this length
            return super()._detect_batch_size(*args, **kwargs)

    def _trained_length(self) -> AbstractContextManager[Any]:
        """Have a maximum length, by default that of the texts that the model was trained on."""
        return patch.object(
            self, "_max_length", self._max_length or self._text_in(super().max_length)
        )

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        self._model = load_model(fetch_model(Path(pretrained)), dtype=self._dtype)
        self._config = self._model.config

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        spec = pretrained if tokenizer is None else tokenizer
        self.tokenizer = (
            load_tokenizer(str(fetch_model(Path(spec)))) if isinstance(spec, str) else spec
        )

    def _create_model(self, pretrained: str, **kwargs: Any) -> None:
        """Nothing: `_get_config` has loaded the model."""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], *args: Any, **kwargs: Any
    ) -> str:
        """Apply the template as the harness does; from then on, special tokens of the template are recognised."""
        self._is_chat = True
        return super().apply_chat_template(
            without_control(self.tokenizer, chat_history), *args, **kwargs
        )

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of a text, with meta-tokens only at markers.

        The ids that the tokenizer puts before a text come first, unless `add_bos_token` or `add_special_tokens` is
        False. A chat template writes them itself.
        """
        ids = self._encode_whole(string, add_special_tokens)
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def _encode_whole(self, text: str, add_special_tokens: bool | None) -> list[int]:
        """The same without truncation."""
        if self._is_chat:
            return encode_chat(self.tokenizer, text, self.marker)
        ids = encode_prompt(self.tokenizer, text, () if self.marker is None else self.marker)
        usual = beginning_of(self.tokenizer)
        if add_special_tokens is None:
            return [*self._beginning, *ids[len(usual) :]]
        return ids if add_special_tokens else ids[len(usual) :]

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
            rows = list(map(self._landmarks.insert_into, rows))
        rows = [row[-left_truncate_len:] if left_truncate_len else row for row in rows]
        return left_padded(rows, self.tokenizer.pad_token_id)

    def _model_call(
        self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Logits for the text token that follows each of `inps`, (rows, tokens, vocabulary)."""
        if self.meta_every is None:
            return super()._model_call(inps)
        text = torch.arange(inps.shape[1] + 1, device=inps.device)
        positions = text + text // self.meta_every  # of the text tokens, and of the next one
        whole = inps.new_full((len(inps), int(positions[-1])), self.config.meta_token_id)
        whole[:, positions[:-1]] = inps
        return super()._model_call(whole)[:, positions[1:] - 1]

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any
    ) -> Tensor:
        if self.meta_every is not None:
            kwargs["meta_every"] = self.meta_every
        return super()._model_generate(context, max_length, stop, **kwargs)


def _check_options(options: dict[str, Any]) -> None:
    """Refuse options of `HFLM` that `MetaTokensLM` cannot follow."""
    unknown = options.keys() - _SUPPORTED
    if unknown:
        name = min(unknown)
        raise UserError(
            f"--model metatokens does not take {name}={options[name]!r}: it loads a model as metatokens does. It takes "
            "pretrained, meta_every, marker, device and dtype, and of the harness's own options "
            f"{', '.join(sorted(_SUPPORTED))}."
        )
    if options.get("add_bos_token") not in (None, False):
        raise UserError(
            "the tokenizer decides what a context begins with; add_bos_token may be False."
        )


def _main() -> None:
    """Run lm-evaluation-harness; a mistake of the user's is one sentence and exit status 2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        print(f"metatokens: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    _main()
