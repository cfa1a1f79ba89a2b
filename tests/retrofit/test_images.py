"""Meta-tokens that are inserted after a prompt with an image, in models whose positions have several axes."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.model.generating import greedy_text
from tests.retrofit.architectures import META, retrofitted


def prompt_with_image(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Ids (1, length) with an image of four tokens and two meta-tokens, and the image."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    vision = config.vision_config
    side, size = (
        2 * vision.spatial_merge_size,
        3 * vision.temporal_patch_size * vision.patch_size**2,
    )
    text = torch.randint(20, 120, (13,), generator=generator).tolist()
    image = [config.vision_start_token_id, *[config.image_token_id] * 4]
    ids = [*text[:2], META, *text[2:4], *image, *text[4:9], META, *text[9:]]
    pixels = torch.randn(side * side, size, generator=generator)
    return torch.tensor([ids]), {
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, side, side]]),
    }


def kinds(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Which ids are the image's, for the models that want it."""
    wants = "mm_token_type_ids" in inspect.signature(model.forward).parameters
    return {"mm_token_type_ids": (ids == model.config.image_token_id).long()} if wants else {}


def never(model: PreTrainedModel) -> list[int]:
    """The end of a text, and the tokens of images."""
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return [
        2,
        *(
            getattr(model.config, name)
            for name in names
            if getattr(model.config, name, None) is not None
        ),
    ]


def inputs_of(model: PreTrainedModel, ids: Tensor, image: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model reads for ids with an image; it forgets the positions of an earlier one."""
    model.model.rope_deltas = None
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **image, **kinds(model, ids)}


def read_anew(
    model: PreTrainedModel, ids: Tensor, image: dict[str, Tensor], every: int
) -> list[int]:
    """Eight tokens of a loop that reads everything at each step, and computes the positions of all of it."""

    def score(read: list[int]) -> Tensor:
        logits = model(**inputs_of(model, torch.tensor([read]), image), use_cache=False).logits[
            0, -1
        ]
        return logits.index_fill(0, torch.tensor([META, *never(model)]), -torch.inf)

    return greedy_text(score, ids[0].tolist(), 8, every, META)


@pytest.mark.quick(name=["qwen2_vl", "qwen3_vl"], every=[2])
@pytest.mark.parametrize("every", [2, 1000])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_meta_tokens_after_an_image_have_the_positions_of_a_whole_pass(
    name: str, every: int
) -> None:
    model = retrofitted(f"{name}:multimodal")
    for parameter in model.parameters():  # so that positions matter
        if parameter.ndim > 1:
            parameter.normal_(std=0.2)
    ids, image = prompt_with_image(model)
    options: Any = {
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "suppress_tokens": never(model),
    }
    expected = read_anew(model, ids, image, every)
    for use_cache in (True, False):
        new = model.generate(
            **inputs_of(model, ids, image), **options, use_cache=use_cache, meta_every=every
        )
        assert new[0, ids.shape[1] :].tolist() == expected


@torch.no_grad()
def test_a_prompt_with_an_image_is_read_at_once() -> None:
    model = retrofitted("qwen2_vl:multimodal")
    ids, image = prompt_with_image(model)
    options: Any = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}

    whole, in_chunks = (
        model.generate(**inputs_of(model, ids, image), **options, prefill_chunk_size=size)
        for size in (None, 8)
    )

    assert torch.equal(whole, in_chunks)
