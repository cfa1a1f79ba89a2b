"""Configuration of the GPT-2 family with meta-tokens (paper, Appendix A and B)."""

import math
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from metatokens.errors import UserError
from metatokens.machine import physical_memory

PositionEmbedding = Literal["learned", "rope", "none"]
SecondAttention = Literal["meta", "causal", "none"]
AttentionScale = Literal["constant", "log_length"]

MAX_LAYERS = 10_000  # a layer takes some 50 kB of Python objects, however narrow it is

# What a saved configuration says to a program that has not imported this package: the file beside it, which needs the
# package installed and `trust_remote_code=True`, has the classes.
REMOTE_CODE_FILE = "metatokens_classes.py"
_AUTO_MAP = {
    "AutoConfig": "metatokens_classes.MetaGPT2Config",
    "AutoModel": "metatokens_classes.MetaGPT2Model",
    "AutoModelForCausalLM": "metatokens_classes.MetaGPT2ForCausalLM",
}


@strict
class MetaGPT2Config(PreTrainedConfig):
    """Sizes and choices of a `MetaGPT2ForCausalLM`; the defaults are the paper's 152M model (`paper()`).

    Attributes:
        vocab_size: rows of the embedding table, which is tied to the head. GPT-2's 50,257 entries padded to a
            multiple of 64; the meta-token is one of the padding rows.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of transformer blocks.
        num_attention_heads: heads of every attention module; must divide `hidden_size`.
        intermediate_size: width of the feed-forward layer; `None` means four times `hidden_size`.
        max_position_embeddings: positions trained on, and rows of the table if positions are learned.
        position_embedding: `learned` (a table added to the embeddings), `rope` (queries and keys rotated), `none`.
        rope_layers: with `rope`, the layers, counted from 0, that rotate queries and keys, in both attentions; the
            others have no positions (Yang et al., 2025). `None`: all of them.
        second_attention: the module between causal attention and the feed-forward layer: `meta` (meta-tokens attend
            causally to meta-tokens), `causal` (all positions: the parameter-matched control), `none` (GPT-2).
        attention_scale: what multiplies attention logits beside 1 / sqrt(head size): `constant` (nothing), or
            `log_length`, a learned number of each head times the logarithm of how many keys the query sees (scalable
            softmax), so that attention stays as sharp in longer sequences.
        meta_token_id: the vocabulary entry of the meta-token; `None` for a model that has none.
        unpadded_vocab_size: entries in use; the rows behind them pad the table, and are never generated. `None`: all.
        bias: whether linear layers and LayerNorms have biases.
        activation: name of the feed-forward activation in `transformers.activations`.
        layer_norm_epsilon: added to the variance in LayerNorm.
        initializer_range: standard deviation of the initial weights.
        rope_parameters: rotary settings as in transformers (`rope_type`, `rope_theta`, YaRN's fields, ...).

    Raises:
        UserError: if fields contradict each other.
    """

    model_type = "meta_gpt2"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (Trainer adds lists to it)

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
        """Fill in what follows from other fields and refuse contradictions."""
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.position_embedding == "rope" and self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        sizes = (self.vocab_size, self.hidden_size, self.num_hidden_layers, self.num_attention_heads)
        if min(*sizes, self.max_position_embeddings) < 1:
            raise UserError("sizes in a model configuration must be positive.")
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}."
            )
        if self.position_embedding == "rope" and (self.hidden_size // self.num_attention_heads) % 2:
            raise UserError("rotary positions need an even head size (hidden_size / num_attention_heads).")
        if self.rope_layers is not None:
            self._check_rope_layers(self.rope_layers)
        if not self.initializer_range >= 0:
            raise UserError(f"initializer_range is {self.initializer_range}, a standard deviation below 0.")
        if self.second_attention == "meta" and self.meta_token_id is None:
            raise UserError("second_attention 'meta' needs a meta_token_id.")
        if self.activation not in ACT2FN:
            raise UserError(f"activation {self.activation!r} is unknown; allowed are {', '.join(ACT2FN)}.")
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            allowed = ", ".join(("default", *ROPE_INIT_FUNCTIONS))
            raise UserError(f"rope_type {rope_type!r} is unknown; allowed are {allowed}.")
        if self.meta_token_id is not None and not 0 <= self.meta_token_id < self.vocab_size:
            raise UserError(f"meta_token_id {self.meta_token_id} is outside the vocabulary of {self.vocab_size}.")
        if self.unpadded_vocab_size is None:
            self.unpadded_vocab_size = self.vocab_size
        if not (self.meta_token_id or 0) < self.unpadded_vocab_size <= self.vocab_size:
            raise UserError(
                f"unpadded_vocab_size is {self.unpadded_vocab_size}; it must be above the meta_token_id "
                f"{self.meta_token_id} and at most the vocab_size {self.vocab_size}."
            )
        self.base_model_tp_plan = _tensor_parallel_plan(self.second_attention)
        super().__post_init__(**{"auto_map": dict(_AUTO_MAP)} | kwargs)

    def _check_rope_layers(self, layers: list[int]) -> None:
        if self.position_embedding != "rope":
            raise UserError(
                f"rope_layers is for position_embedding 'rope'; this model has {self.position_embedding!r}."
            )
        if not layers or sorted(set(layers)) != layers or not 0 <= layers[0] <= layers[-1] < self.num_hidden_layers:
            raise UserError(
                f"rope_layers is {layers}; give the numbers of one layer or more, ascending, from 0 to "
                f"{self.num_hidden_layers - 1}."
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "MetaGPT2Config":
        """As transformers'. A configuration from before `unpadded_vocab_size` is of a table that was padded."""
        padded = {
            "unpadded_vocab_size": unpadded_before(config_dict.get("vocab_size"), config_dict.get("meta_token_id"))
        }
        return super().from_dict(padded | config_dict, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: `auto_map` names the package's own class, and no copy of its file is to be saved with a model."""

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        """As transformers', with the file that `auto_map` names beside `config.json`."""
        write_remote_code(save_directory, _AUTO_MAP)
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


def write_remote_code(folder: str | PathLike, auto_map: dict[str, str]) -> None:
    """Write the file that the `auto_map` of a configuration in `folder` names."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    classes = ", ".join(sorted(name.partition(".")[2] for name in auto_map.values()))
    line = f"from metatokens import {classes}  # pip install metatokens\n"
    (Path(folder) / REMOTE_CODE_FILE).write_text(line, encoding="utf-8")


def _tensor_parallel_plan(second_attention: SecondAttention) -> dict[str, str]:
    """How transformers spreads a block's layers over GPUs; queries, keys and values, of one product, are gathered."""
    plan = {"layers.*.mlp.in_proj": "colwise", "layers.*.mlp.out_proj": "rowwise"}
    for module in ("attention",) if second_attention == "none" else ("attention", "second_attention"):
        plan[f"layers.*.{module}.qkv_proj"] = "colwise_gather_output"
        plan[f"layers.*.{module}.out_proj"] = "rowwise_split_input"
    return plan


def unpadded_before(rows: int | None, meta_token_id: int | None) -> int | None:
    """The entries in use of a model that was saved before its configuration said so.

    Such a model's meta-token is the last of them, where the table was padded to a multiple of 64 for it.
    """
    used = None if meta_token_id is None else meta_token_id + 1
    return used if used is not None and rows == math.ceil(used / 64) * 64 else None


def never_generated(config: PreTrainedConfig) -> list[int]:
    """The ids that no text has: the meta-token's, and those of rows that pad the vocabulary.

    Args:
        config: of one of this package's models.
    """
    rows = config.get_text_config().vocab_size
    meta, used = config.meta_token_id, getattr(config, "unpadded_vocab_size", None) or rows
    return [*([] if meta is None else [meta]), *range(used, rows)]


def parameters_at_least(config: PreTrainedConfig) -> int:
    """The parameters of a model's tables, causal attention and feed-forward layers, which are most of it.

    Of a base of another architecture, whose layers are of other shapes, only what any has: queries and outputs.

    Args:
        config: of any causal language model.
    """
    width, layers = config.hidden_size, config.num_hidden_layers
    if config.model_type not in ("meta_gpt2", "gpt2", "gpt_neo"):
        return config.vocab_size * width + layers * width * width
    inner = getattr(config, "n_inner", None) or getattr(config, "intermediate_size", None)
    has_table = getattr(config, "position_embedding", "learned") == "learned"
    rows = config.vocab_size + has_table * config.max_position_embeddings
    return rows * width + layers * 2 * width * (2 * width + (inner or 4 * width))


def check_memory(config: PreTrainedConfig, *, has_masks: bool = False) -> None:
    """Refuse a model that this machine cannot hold, before anything is allocated for it.

    Args:
        config: see `parameters_at_least`.
        has_masks: whether each layer has a causal mask of its own, as a GPT-Neo's do.

    Raises:
        UserError: if a size is not positive, there are too many layers, or the model, with parameters of two bytes,
            is larger than the machine's memory.
    """
    layers, positions = config.num_hidden_layers, getattr(config, "max_position_embeddings", 1)
    inner = getattr(config, "n_inner", None) or getattr(config, "intermediate_size", None) or 1
    if min(config.vocab_size, config.hidden_size, layers, config.num_attention_heads, positions, inner) < 1:
        raise UserError("sizes in a model configuration must be positive.")
    if layers > MAX_LAYERS:
        raise UserError(f"the model has {layers:,} layers; allowed are {MAX_LAYERS:,}.")
    needed = 2 * parameters_at_least(config) + has_masks * layers * positions**2
    memory = physical_memory()
    if memory is not None and needed > memory:
        raise UserError(f"the model takes {needed:,} bytes at least, and this machine's memory has {memory:,}.")
