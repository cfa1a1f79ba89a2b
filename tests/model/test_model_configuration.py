"""Contradictory settings are refused in one sentence."""

from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError

from metatokens import MetaGPT2Config
from tests.model.tiny_models import tiny_config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 30}, "hidden_size has to be a multiple of num_attention_heads"),
        ({"hidden_size": 12}, "even head size"),
        ({"num_attention_heads": 0}, "a multiple of num_attention_heads"),
        ({"meta_token_id": None}, "'meta' needs a meta_token_id"),
        ({"meta_token_id": 64}, "meta_token_id must be below unpadded_vocab_size"),
        ({"meta_token_id": 30, "unpadded_vocab_size": 30}, "meta_token_id must be below"),
        ({"meta_token_id": -1, "second_attention": "none"}, "meta_token_id must be below"),
        *(
            ({"rope_layers": layers}, "rope_layers is .* of 0 to 1")
            for layers in ([2], [-1], [1, 0], [0, 0])
        ),
        ({"text_full_layers": [2]}, "text_full_layers is .* of 0 to 1"),
        ({"rope_layers": []}, "rope_layers is .*; without positions"),
        ({"text_full_layers": [0]}, "text_full_layers needs a text_window"),
        ({"text_full_heads": [[0, 0]]}, "text_full_heads is for pretrained models"),
        ({"text_window": 0}, "text_window must be at least 1"),
        ({"text_window": 8, "text_sinks": -1}, "and text_sinks at least 0"),
        (
            {"text_window": 8, "meta_token_id": None, "second_attention": "none"},
            "text_window needs a meta_token_id",
        ),
        ({"rope_layers": [0], "position_embedding": "learned"}, "needs position_embedding 'rope'"),
    ],
)
def test_contradictions_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        tiny_config(**overrides)


def test_defaults_follow_from_other_fields() -> None:
    config = tiny_config()
    assert (config.intermediate_size, config.head_size) == (128, 8)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    # An odd head size is for rotary positions alone.
    tiny_config(hidden_size=12, position_embedding="learned")
    tiny_config(meta_token_id=None, second_attention="causal")
    assert MetaGPT2Config.paper().to_dict() == MetaGPT2Config(unpadded_vocab_size=50258).to_dict()
