"""What a retrofitted model's configuration keeps of its meta-attention."""

from dataclasses import dataclass
from typing import Any

from metatokens.errors import UserError


@dataclass(slots=True)
class MetaSettings:
    """Sizes and places of meta-attention, kept as `meta_attention` in the base's configuration.

    Attributes:
        hidden_size: width of the base's residual stream.
        num_attention_heads: heads of each module.
        head_size: width of one of them.
        layers: the blocks that have a module.
        sites: of each of these blocks the submodule whose output joins the residual stream, and is added to.
        site_has_residual: whether that output is the residual stream already, as in BLOOM.
        base: the base's name, for the reader.
        base_settings: what the base's configuration sets, from before meta-attention was added (`settings_of`).
        base_weights: checksums of some of the base's weights, from before too (`weight_checksums`).
    """

    hidden_size: int
    num_attention_heads: int
    head_size: int
    layers: tuple[int, ...]
    sites: tuple[str, ...]
    site_has_residual: bool
    base: str
    base_settings: dict[str, Any]
    base_weights: dict[str, str]

    # What `Attention` asks for beside them. The paper's code base has no biases.
    bias = False
    attention_scale = "constant"
    rope_theta = 10_000.0
    layer_norm_epsilon = 1e-5

    def __post_init__(self) -> None:
        """Refuse what cannot be, in any model."""
        sums = self.base_weights
        if not isinstance(self.base_settings, dict) or not isinstance(sums, dict):
            raise UserError("base_settings and base_weights must be mappings.")
        names = {"float32", "bfloat16", "float16"}
        is_text = all(type(one) is str for one in sums.values())
        if sums and not (sums.keys() == {*names, "dtype", "size"} and is_text and sums["dtype"] in names):
            raise UserError("base_weights must be empty, or checksums in three precisions, with dtype and size.")
        sizes = self.hidden_size, self.num_attention_heads, self.head_size
        if type(self.site_has_residual) is not bool:
            raise UserError(f"site_has_residual is {self.site_has_residual!r}; it must be true or false.")
        if not all(type(size) is int for size in sizes) or min(sizes) < 1 or self.head_size % 2:
            raise UserError(
                f"{self.num_attention_heads} heads of {self.head_size} in a model of width {self.hidden_size}: give at "
                "least one, of an even positive size."
            )
        layers = list(self.layers)
        if (
            not all(type(layer) is int for layer in layers)
            or layers != sorted(set(layers))
            or min(layers, default=0) < 0
        ):
            raise UserError(f"layers are {layers}; give numbers of blocks, ascending.")
        if len(self.sites) != len(layers) or not all(type(site) is str and site for site in self.sites):
            raise UserError(f"{len(layers)} blocks have {len(self.sites)} sites; give the name of one for each.")
