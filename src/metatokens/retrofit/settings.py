"""The settings of meta-attention in a retrofitted model's configuration."""

from itertools import pairwise
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, ValidationError

from metatokens.errors import UserError, broken_rule
from metatokens.model.configuration import TEXT_SINKS, check_layers

Size = Annotated[int, Field(ge=1, strict=True)]


class MetaSettings(BaseModel):
    """Sizes and positions of meta-attention in a base, saved as `meta_attention` in the base's configuration.

    Attributes:
        hidden_size: width of the base's residual stream.
        num_attention_heads: heads of each module.
        head_size: width of one head.
        layers: indices of the blocks that have a module.
        injection_points: for each of these blocks, the submodule to whose output meta-attention is added.
        point_has_residual: whether that output already contains the residual stream, as in BLOOM.
        base: the base's name.
        base_settings: the settings of the base's configuration (`settings_of`).
        base_weights: the checksum of the base (`weights_checksum`); None if its weights could not be read.
        base_rows: the rows of the base's table of embeddings, which may have grown since.
        text_window, text_sinks, text_full_layers: what a query sees of the text, as in `MetaGPT2Config`.
        text_full_heads: the key-value heads of other blocks that see all text: pairs of a block and a head.
    """

    # Read by `Attention`. The paper's code base has no biases.
    bias: ClassVar = False
    attention_scale: ClassVar = "constant"
    rope_theta: ClassVar = 10_000.0
    layer_norm_epsilon: ClassVar = 1e-5

    hidden_size: Size
    num_attention_heads: Size
    head_size: Annotated[Size, Field(multiple_of=2)]
    layers: list[int]
    injection_points: list[Annotated[str, Field(min_length=1)]]
    point_has_residual: bool
    base: str
    base_settings: dict[str, Any]
    base_weights: str | None
    base_rows: int
    text_window: Size | None = None
    text_sinks: Annotated[int, Field(ge=0)] = TEXT_SINKS
    text_full_layers: list[int] | None = None
    text_full_heads: list[list[int]] | None = None

    @classmethod
    def checked(cls, **fields: Any) -> "MetaSettings":
        """Settings from a configuration or a call, which may be wrong."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise UserError(f"in the settings of meta-attention, {broken_rule(error)}.") from error

    def check_blocks(self, count: int) -> None:
        """Refuse settings that do not fit a model with `count` blocks that have keys and values of their own."""
        check_layers("layers", self.layers, count)
        check_layers("text_full_layers", self.text_full_layers or [], count)
        check_heads(self.text_full_heads or [], count)
        if len(self.injection_points) != len(self.layers):
            raise UserError("each of the layers needs one of the injection_points.")


def check_heads(heads: list[list[int]], count: int) -> None:
    """Refuse what are not ascending pairs of one of `count` blocks and one of its heads."""
    are_pairs = all(len(pair) == 2 and 0 <= pair[0] < count and pair[1] >= 0 for pair in heads)
    if not are_pairs or any(pair >= following for pair, following in pairwise(heads)):
        raise UserError(
            f"text_full_heads is {heads}; give different pairs of a block, 0 to {count - 1}, and a head."
        )


def check_entries(meta_token_id: Any, used: Any, rows: int) -> None:
    """Refuse a meta-token that is not among the vocabulary's `used` entries, or more of these than the table's rows."""
    if not (type(meta_token_id) is type(used) is int and 0 <= meta_token_id < used <= rows):
        raise UserError(
            f"meta_token_id is {meta_token_id} and unpadded_vocab_size {used}: the first must be below the second, and "
            f"that at most {rows}, the rows of the table."
        )
