"""Configuration of the GPT-2 family with meta-tokens (paper, Appendix A and B)."""

from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from metatokens.errors import UserError
from metatokens.model.choices import AttentionScale, PositionEmbedding, SecondAttention
from metatokens.model.releases import CACHE_NAMES

TEXT_SINKS = 4  # unless a model is given another number
# The name of a model that no folder holds as it is. Libraries that load a model by its name show it in their error.
UNSAVED = "this model was not saved as it is: call model.save_pretrained(folder) first"

# For programs that have not imported this package: a saved configuration names this file, which imports the classes.
# They need `trust_remote_code=True`, and the package installed.
REMOTE_CODE_FILE = "metatokens_classes.py"
_REMOTE_CODE = """# needs the package metatokens
from metatokens import MetaGPT2Config, MetaGPT2ForCausalLM, MetaGPT2Model, MetaTokensConfig
"""
_AUTO_MAP = {
    "AutoConfig": "metatokens_classes.MetaGPT2Config",
    "AutoModel": "metatokens_classes.MetaGPT2Model",
    "AutoModelForCausalLM": "metatokens_classes.MetaGPT2ForCausalLM",
}


@strict
class MetaGPT2Config(PreTrainedConfig):
    """Sizes and choices of a `MetaGPT2ForCausalLM`.

    The defaults are those of the paper's 152M model; `paper()` also leaves the padding rows unused.

    Attributes:
        vocab_size: rows of the embedding table, which is tied to the head. By default GPT-2's 50,257 entries, padded
            to a multiple of 64; the first padding row is the meta-token's.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of transformer blocks.
        num_attention_heads: heads of each attention module; must divide `hidden_size`.
        intermediate_size: width of the feed-forward layer; `None` means four times `hidden_size`.
        max_position_embeddings: positions trained on, and rows of the table if positions are learned.
        position_embedding: `learned` (a table added to the embeddings), `rope` (rotated queries and keys) or `none`.
        rope_layers: with `rope`, the layers, counted from 0, that rotate queries and keys in both attentions; the
            others have no positions (Yang et al., 2025). `None` means all layers.
        second_attention: the module between causal attention and the feed-forward layer: `meta` (meta-tokens attend
            causally to meta-tokens), `causal` (over all positions: the parameter-matched control) or `none` (GPT-2).
        attention_scale: a factor of attention logits in addition to 1 / sqrt(head size): `constant` (none), or
            `log_length`, a number that each head learns times the logarithm of how many keys the query sees (scalable
            softmax), which keeps attention sharp in longer sequences.
        text_window: a query sees the last `text_window` positions, its own included, the first `text_sinks`, and all
            earlier meta-tokens. `None` means that it sees everything before it.
        text_sinks: with `text_window`, positions from 0 on that later queries see as well.
        text_full_layers: with `text_window`, the layers, counted from 0, whose queries see all text.
        meta_token_id: the meta-token's id; `None` for a model that has none.
        unpadded_vocab_size: entries in use; later rows pad the table and are never generated. `None` means all.
        bias: whether linear layers and LayerNorms have biases.
        activation: name of the feed-forward activation in `transformers.activations`.
        layer_norm_epsilon: added to the variance in LayerNorm.
        initializer_range: standard deviation of the initial weights.
        rope_parameters: rotary settings as in transformers (`rope_type`, `rope_theta`, YaRN's fields, ...).

    Raises:
        StrictDataclassError: if the value of a field is not allowed, or fields contradict each other; of
            `huggingface_hub`, as transformers' configurations raise it.
    """

    model_type = "meta_gpt2"
    keys_to_ignore_at_inference = [*CACHE_NAMES]  # noqa: RUF012  (Trainer adds lists to it)

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    max_position_embeddings: int = 1024
    position_embedding: PositionEmbedding = "rope"
    rope_layers: list[int] | None = None
    second_attention: SecondAttention = "meta"
    attention_scale: AttentionScale = "constant"
    text_window: int | None = None
    text_sinks: int = TEXT_SINKS
    text_full_layers: list[int] | None = None
    meta_token_id: int | None = 50257
    unpadded_vocab_size: int | None = None
    bias: bool = False
    activation: str = "gelu"
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    rope_parameters: RopeParameters | dict | None = None
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what follows from other fields."""
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.unpadded_vocab_size is None:
            self.unpadded_vocab_size = self.vocab_size
        if self.position_embedding == "rope" and self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**{"auto_map": dict(_AUTO_MAP)} | kwargs)

    def validate_heads(self) -> None:
        """Refuse heads that do not share the width evenly."""
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size has to be a multiple of num_attention_heads")
        if self.position_embedding == "rope" and self.head_size % 2:
            raise ValueError(
                "rotary positions need an even head size (hidden_size / num_attention_heads)"
            )

    def validate_layers(self) -> None:
        """Refuse lists of layers that the model does not have, or that need another choice."""
        if self.rope_layers == []:
            raise ValueError("rope_layers is []; without positions, position_embedding is 'none'")
        check_layers("rope_layers", self.rope_layers or [], self.num_hidden_layers)
        check_layers("text_full_layers", self.text_full_layers or [], self.num_hidden_layers)
        if self.rope_layers is not None and self.position_embedding != "rope":
            raise ValueError("rope_layers needs position_embedding 'rope'")
        if self.text_full_layers is not None and self.text_window is None:
            raise ValueError(
                "text_full_layers needs a text_window: without one all layers see all text"
            )

    def validate_text_window(self) -> None:
        """Refuse a window without a query's own position, one without meta-tokens, and full heads."""
        if getattr(self, "text_full_heads", None) is not None:
            raise ValueError("text_full_heads is for pretrained models: give text_full_layers")
        if self.text_window is None:
            return
        if self.text_window < 1 or self.text_sinks < 0:
            raise ValueError("text_window must be at least 1, and text_sinks at least 0")
        if self.meta_token_id is None:
            raise ValueError(
                "text_window needs a meta_token_id: meta-tokens are what stays of the text"
            )

    def validate_vocabulary(self) -> None:
        """Refuse a meta-token, or entries in use, that the table has no row for."""
        if self.second_attention == "meta" and self.meta_token_id is None:
            raise ValueError("second_attention 'meta' needs a meta_token_id")
        in_use = self.unpadded_vocab_size or self.vocab_size
        if not 0 <= (self.meta_token_id or 0) < in_use <= self.vocab_size:
            raise ValueError(
                "meta_token_id must be below unpadded_vocab_size, and that at most vocab_size"
            )

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: `auto_map` names the package's class, so that no copy of its file is saved with a model."""

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, with the file that `auto_map` names."""
        write_remote_code(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def paper(cls, **overrides: Any) -> "MetaGPT2Config":
        """The paper's 152M model: 12 layers, 12 heads, width 768, RoPE, meta-attention (Appendix B)."""
        padding = {} if "vocab_size" in overrides else {"unpadded_vocab_size": 50258}
        return cls(**padding | overrides)


def check_layers(name: str, layers: Any, count: int) -> None:
    """Refuse layers that are not ascending indices of some of a model's `count` blocks."""
    is_sequence = isinstance(layers, range | list | tuple)
    are_indices = is_sequence and all(type(layer) is int and 0 <= layer < count for layer in layers)
    if not are_indices or sorted({*layers}) != list(layers):
        raise UserError(f"{name} is {layers}; give a list of some of 0 to {count - 1}, ascending.")


def write_remote_code(folder: str | PathLike) -> None:
    """Write the file that the `auto_map` of a configuration in `folder` names."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / REMOTE_CODE_FILE).write_text(_REMOTE_CODE, encoding="utf-8")


def never_generated(config: PreTrainedConfig) -> list[int]:
    """The ids that no text has: the meta-token's, and those of rows that pad the vocabulary."""
    rows = config.get_text_config().vocab_size
    in_use = getattr(config, "unpadded_vocab_size", None) or rows
    padding = range(in_use, rows)
    meta = getattr(config, "meta_token_id", None)  # a base of transformers has none
    return [*padding] if meta is None else [meta, *padding]
