"""Every type of decoder in transformers, built small from what its configuration class declares.

The name `llama` is for what `AutoModelForCausalLM` makes of the type. A name such as `llava:multimodal` is for what
`AutoModelForImageTextToText` makes of it, or else `AutoModelForMultimodalLM`, where that is another class.
"""

import re
from dataclasses import fields
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from metatokens.model.configuration import MetaGPT2Config

ROWS, WIDTH, LAYERS, HEADS, HEAD = 320, 64, 3, 4, 16
MULTIMODAL = ":multimodal"
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")

# Sizes by the names of fields that configuration classes declare.
_SIZES = {
    r"vocab_size|vocab_size_per_layer_input|decoder_vocab_size|tgt_vocab_size|src_vocab_size": ROWS,
    r"hidden_size|d_model|n_embd|embed_dim|dim|embedding_size|word_embed_proj_dim|out_hidden_size|text_hidden_size|"
    r"projection_dim|encoder_hidden_size|(in|out)put_embedding_size|embedding_dim|hidden_dim|lru_width|emb_dim|"
    r"attention_hidden_size|projector_(in|out)put_dim|hidden_size_global|text_embed_dim|d_embed|decoder_hidden_size|"
    r"image_text_hidden_size|output_dim_proj|vision_hidden_size": WIDTH,
    r"num_hidden_layers|n_layers?|num_layers|depth|(en|de)coder_layers|num_(en|de)coder_layers|n_layer": LAYERS,
    r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|attention_heads|"
    r"num_(en|de)coder_attention_heads|num_sliding_attention_heads|swa_num_attention_heads": HEADS,
    r"num_key_value_heads|num_kv_heads|swa_num_key_value_heads|kv_n_heads|num_query_groups|"
    r"num_global_key_value_heads": 2,
    r"head_dim|global_head_dim|v_head_dim|d_kv|d_head|attention_head_size|attention_head_dim|swa_head_dim|dim_head|"
    r"index_head_dim|kv_channels|linear_(key|value)_head_dim|linear_head_dim|swa_v_head_dim": HEAD,
    r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim": 8,
    r"qk_head_dim": 16,
    r"kv_lora_rank|q_lora_rank|o_lora_rank": 16,
    r"intermediate_size|.*ffn_dim|ffn_hidden_size|.*_intermediate_size|n_inner|d_ff|dff|dim_ff|d_inner|mlp_dim|"
    r"intermediate_size_mlp|feed_forward_size|ff_dim|moe_hidden_size|share_expert_dim": 96,
    r"num_experts|num_local_experts|n_routed_experts|moe_num_experts": 4,
    r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts": 2,
    r"n_group|topk_group|num_expert_group|n_shared_experts|num_shared_experts|moe_num_shared_experts|"
    r"first_k_dense_replace|num_dense_layers": 1,
    r"max_position_embeddings|n_positions|max_seq_len|n_ctx|context_length|max_target_positions|model_max_length": 256,
    r"sliding_window(_size)?|attention_window_size|local_attention": 8,
    r"linear_num_value_heads|linear_num_heads": 4,
    r"linear_num_key_heads|index_n_heads": 2,
    r"index_topk|(mamba_)?chunk_size|patch_size|hidden_size_per_layer_input": 8,
    r"image_size|img_size": 32,
    r"num_kv_shared_layers|num_nextn_predict_layers": 0,
}
# Further settings that a type needs.
FURTHER: dict[str, dict[str, Any]] = {
    "blenderbot": {"encoder_layers": LAYERS},
    "blenderbot-small": {"encoder_layers": LAYERS},
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [3, 3, 2]}}
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 4},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 4},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "xmod": {"default_language": "en_XX"},
}

# Fields that are None by default but that the model needs.
_NEEDED = r"head_dim|num_key_value_heads|num_experts_per_tok|n_routed_experts|n_shared_experts"


def smaller(name: str, value: Any, length: int | None) -> Any:
    """The value of a field in a small model; the given value if it can stay."""
    if value is None and re.fullmatch(_NEEDED, name):
        value = ROWS
    # Read by some models only.
    if name == "rope_parameters" and isinstance(value, dict) and "rope_type" in value:
        half = int(HEAD // 2 * value.get("partial_rotary_factor", 1))
        return value | {"mrope_section": [half - half // 3 * 2, half // 3, half // 3]}
    if isinstance(value, bool) or value is None:
        return value
    for pattern, size in _SIZES.items():
        if isinstance(value, int) and re.fullmatch(pattern, name):
            return min(size, value) if value > 0 else value
    if name in _TOKENS:
        return _TOKENS.index(name)
    if name == "forced_eos_token_id":
        return None
    if (
        isinstance(value, int)
        and re.fullmatch(r".*(_token_id|_token_index|_id|_index)", name)
        and value >= ROWS
    ):
        return 3 + sum(name.encode()) % 300
    if isinstance(value, list | tuple) and length and len(value) == length and len(value) > LAYERS:
        kinds = list(dict.fromkeys(map(str, value)))
        texts = list(map(str, value))
        first_of_each = [value[texts.index(kind)] for kind in kinds[:LAYERS]]
        return type(value)([*first_of_each, *value[: LAYERS - len(first_of_each)]])
    return value


def shrunk(config_class: type[PreTrainedConfig], further: dict[str, Any]) -> PreTrainedConfig:
    """A small configuration of a class, with `further` settings."""
    usual = vars(config_class())
    names = (config_class.attribute_map.get("num_hidden_layers"), "num_hidden_layers", "num_layers")
    length = next((usual[name] for name in names if name in usual), None)
    declared = {field.name for field in fields(config_class)} - {
        field.name for field in fields(PreTrainedConfig)
    }
    settings: dict[str, Any] = {}
    for name in declared | config_class.sub_configs.keys() | (usual.keys() & set(_TOKENS)):
        value = usual.get(name)
        if isinstance(value, PreTrainedConfig):
            settings[name] = shrunk(type(value), further.get(name, {}))
            continue
        small_value = smaller(name, value, length)
        if small_value is not value:
            settings[name] = small_value
    if "kv_lora_rank" in declared:  # keys and values are computed per head
        settings["num_key_value_heads"] = HEADS
    settings |= {
        name: value for name, value in further.items() if name not in config_class.sub_configs
    }
    return config_class(**settings)


def small(name: str) -> PreTrainedConfig:
    """A small configuration by name."""
    model_type = name.removesuffix(MULTIMODAL)
    return shrunk(CONFIG_MAPPING[model_type], FURTHER.get(model_type, {}))


def auto_class(name: str) -> Any:
    """The Auto class that builds a model from a configuration."""
    if not name.endswith(MULTIMODAL):
        return AutoModelForCausalLM
    is_known = name.removesuffix(MULTIMODAL) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if is_known else AutoModelForMultimodalLM


def every_name() -> list[str]:
    """All types, each class once."""
    with_images = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    further = with_images.items() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - {MetaGPT2Config.model_type}
    return sorted([*causal, *(f"{name}{MULTIMODAL}" for name, _ in further)])
