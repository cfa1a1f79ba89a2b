"""Positions: a learned table, rotary angles, or none (paper, section 2)."""

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, PreTrainedConfig

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


def packed_sequences(
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    lengths: Tensor | None,
    *,
    at_jumps: bool = False,
) -> Tensor | None:
    """The number of each token's sequence, (batch or 1, length) from 0, where rows hold several; otherwise None.

    A sequence begins where positions (batch or 1, length) do not grow. With a mask, which decides instead, the result
    is None. A compiled graph cannot look at values. Without a cache, it treats all positions as those of several
    sequences.

    Args:
        attention_mask, position_ids, cache: as a model is given them.
        lengths: the `cu_seq_lens_q` of transformers' collators, where sequences begin and where the last one ends.
        at_jumps: whether a sequence also begins where positions grow by more than one, as it does for transformers.

    Raises:
        UserError: if several sequences have a cache, or `lengths` without positions that begin again.
    """
    begins = None
    if attention_mask is None and position_ids is not None:
        steps = position_ids.diff(dim=-1)
        begins = pad(steps != 1 if at_jumps else steps <= 0, (1, 0))
    if begins is None or not _may_be_packed(begins, cache):
        if lengths is not None and len(lengths) > 2:
            raise UserError(
                "packed sequences need position_ids that start again with each, not cu_seq_lens_q alone."
            )
        return None
    if cache is not None:
        raise UserError(
            "sequences packed into one row cannot have a cache; give each its own row, padded."
        )
    return begins.cumsum(dim=-1)


def _may_be_packed(begins: Tensor, cache: Cache | None) -> bool:
    if torch.compiler.is_compiling():
        return cache is None
    # A decoding step, of one token, is spared a device sync.
    return begins.shape[-1] > 1 and bool(begins.any())


def counts_within(sequences: Tensor) -> Tensor:
    """How many tokens of its own sequence each token sees, itself included; both (batch, length), numbers ascending."""
    index = torch.arange(sequences.shape[-1], device=sequences.device)
    return index + 1 - torch.searchsorted(sequences, sequences)


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


def rotates_by_length(config: PreTrainedConfig) -> bool:
    """Whether each position of a longer text has other rotary frequencies.

    So it is by the `rope_type`s `dynamic` and `longrope` of transformers (`dynamic_rope_update`). A configuration may
    have one set of parameters, or one for each type of layer.
    """
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    sets = [rope for rope in (parameters, *parameters.values()) if isinstance(rope, dict)]
    return any(rope.get("rope_type") in ("dynamic", "longrope") for rope in sets)


def rotary_tables(positions: Tensor, head_size: int, theta: float) -> Rotary:
    """Cosines and sines of the angles t / theta^(2i / head size), for positions t (batch, length), in float32."""
    pairs = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * theta ** (-pairs / head_size)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()
