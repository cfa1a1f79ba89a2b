"""The lengths of texts, and the window, by what a cache may keep: figures worked out by hand."""

import pytest

from metatokens.errors import UserError
from metatokens.recipe import ShrinkRecipe, load_recipe
from metatokens.shrink.sizes import Sizes

RECIPE = load_recipe(ShrinkRecipe, "shrink", [])


def test_sizes_of_an_eighth_in_smollm2():
    sizes = Sizes.of(RECIPE, heads=90, limit=8192)
    # An eighth of 4,096 tokens: nine full heads, and (1/8 - 9/90) / (81/90) * 4,096 - 4 tokens in the others.
    assert (sizes.number_of_full_heads, sizes.window, sizes.window_alone) == (9, 109, 508)
    assert (sizes.distance, sizes.shortest) == (117, 175)
    assert sizes.training_lengths == [2048, 1024, 512, 256]
    # Where the text is long enough, the control with a window alone does not reach what has to be found.
    assert sizes.distance_by_length == {512: 256, 2048: 516, 4096: 516, 8192: 516}


def test_a_window_in_place_of_the_share():
    heads = {"cache.number_of_full_heads": 9, "cache.window": 109}
    overrides = [f"{name}={value}" for name, value in heads.items()]
    sizes = Sizes.of(load_recipe(ShrinkRecipe, "shrink", overrides), heads=90, limit=8192)
    assert (sizes.number_of_full_heads, sizes.window) == (9, 109)
    # A window alone keeps as much: 0.1 + 0.9 * 113 / 4,096 of 4,096 tokens, 4 sinks among them.
    assert sizes.window_alone == 507


def test_one_head_has_to_forget():
    overrides = ["cache.window=100", "cache.number_of_full_heads=90"]
    with pytest.raises(UserError, match="90 heads are to be full, and the model has 90"):
        Sizes.of(load_recipe(ShrinkRecipe, "shrink", overrides), heads=90, limit=8192)


def test_landmarks_take_room_in_the_cache_and_below_the_limit():
    sizes = Sizes.of(RECIPE, heads=90, limit=8192, landmarks=0.02)
    share = sizes.number_of_full_heads / 90
    share_kept = share + (1 - share) * (sizes.window + 4) / 4096 + 0.02
    assert 1 / 8 - 1 / 4096 < share_kept <= 1 / 8
    assert [*sizes.tested_texts] == [512, 2048, 4096]  # 8,192 tokens would have 164 landmarks
