"""Positions: a learned table, rotary angles, or none (paper, section 2)."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from metatokens.errors import UserError

Rotary = tuple[Tensor, Tensor]  # cosines and sines, each (batch, length, head size)


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Positions that count the real tokens of each row, so that padding on either side has no effect.

    Args:
        attention_mask: (batch, length), 1 at real tokens.

    Returns:
        (batch, length) int64; 0 at padding on the left.
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def learned_positions(config: PreTrainedConfig) -> int:
    """The number of positions in a model's learned table."""
    text = config.get_text_config()  # differs from `config` in models that also take images
    names = ("max_position_embeddings", "max_target_positions")
    return next(getattr(text, name) for name in names if hasattr(text, name))


def are_packed(attention_mask: Tensor | None, position_ids: Tensor | None) -> bool:
    """Whether sequences are packed into a row: positions (batch, length) restart, and no mask separates the sequences.

    Inside a compiled graph, which cannot look at values, the answer is no.
    """
    if attention_mask is not None or position_ids is None or torch.compiler.is_compiling():
        return False
    return bool((position_ids.diff(dim=-1) <= 0).any())


def reaches(config: PreTrainedConfig, length: int) -> bool:
    """Whether the model has positions for `length` tokens; a learned table limits them."""
    return config.position_embedding != "learned" or length <= learned_positions(config)


def check_length(config: PreTrainedConfig, length: int) -> None:
    """Refuse a sequence that is longer than a learned table."""
    if not reaches(config, length):
        raise UserError(
            f"a sequence of {length} tokens is longer than the {learned_positions(config)} learned positions of "
            "this model; use a shorter one, or a model with position_embedding 'rope' or 'none'."
        )


def check_positions(config: PreTrainedConfig, length: int, position_ids: Tensor) -> None:
    """Refuse positions beyond a learned table; padding, which has no positions, may exceed it.

    Args:
        config: the model's.
        length: the length of the sequence with padding. Only if it exceeds the table are the positions read.
        position_ids: of the tokens that are not cached.
    """
    if not reaches(config, length):
        check_length(config, int(position_ids.max()) + 1)


def rotary_tables(positions: Tensor, head_size: int, theta: float) -> Rotary:
    """Cosines and sines of the angles t / theta^(2i / head size), for positions t (batch, length), in float32."""
    pairs = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * theta ** (-pairs / head_size)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate each half-split pair of features by the angle of its position (Su et al., 2021).

    Args:
        x: queries or keys, (batch, heads, length, head size).
        rotary: cosines and sines, each (batch or 1, length, head size).
    """
    cos, sin = (table.unsqueeze(1) for table in rotary)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
