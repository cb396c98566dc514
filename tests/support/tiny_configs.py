"""Tiny configurations of transformers' model classes: narrow, few layers, few tokens, no
dropout.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 99
# tokens from here on stand for images, audio and so on; rows have only lower ones
FIRST_SPECIAL = 80
LABELS = 3
# (pattern of a name, its value); the first match counts; None: unchanged; values never grow
_WHOLE = (
    (r"^(num_labels)$", LABELS),
    (r"vocab_size", VOCABULARY),
    (r"^(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num)$", 2),
    (
        r"kernel|stride|^(padding|pool_size|num_channels|in_chans|num_stages|num_beams|temporal_patch_size)$",
        None,
    ),
    (r"(^|_)(num|n)_.*(heads?)(_.*)?$|attention_heads$|^(n_head|n_heads|num_heads|nhead)$", 4),
    (
        r"index_topk|layer.*(offset|period)|every|first_k_dense|num_mem_blocks|ngram|num_hash|buckets|^(conv_depth)$",
        None,
    ),
    (
        r"max_source_positions|max_target_positions|max_speech_positions|max_position|num_frames$|max_length$",
        None,
    ),
    (r"extract_layers|conv_layers", None),
    (r"^(num|n)_.*layers?$|_layers$|^(n_layer|depth|n_layers|num_layers|num_blocks)$", 2),
    (r"rotary_dim", 4),
    (r"experts_per_tok|top_?k$|num_selected_experts|moe_k", 2),
    (r"n_group|topk_group", 1),
    (r"experts", 4),
    (r"^(qk_head_dim)$", 16),
    (
        r"(head_dim|d_head|head_size|d_kv|lora_rank|kv_channels|rope_head_dim|headdim|attention_head_size)$",
        8,
    ),
    (r"^patch_size$", 8),
    (r"^(image_size|input_size|img_size)$", 32),
    (r"conv_pos_embeddings$", 4),
    (r"groups$", 2),
    (r"num_mel_bins|input_feat_per_channel|feature_size|^n_mels$", 16),
    (r"state_size|^(ssm_state_size|mamba_d_state|d_state)$", 4),
    (r"chunk_size|chunk_length|block_size|window", None),
    (r"queries|query_tokens|detection_tokens|num_latents|prompts?$|codebooks$", 5),
    (
        r"intermediate|ffn|feed_forward|^(mlp_dim|d_ff|inner_dim|d_inner|n_inner|mlp_hidden_size)$",
        32,
    ),
    (r"position_embeddings$", 64),
    (r"hidden|d_model|embed|dim$|width|channels|filters|dim_|_size$|^(n_embd|scale|d_.*)$", 32),
)
_NONE = {
    "layer_types",
    "mlp_layer_types",
    "stage_names",
    "out_features",
    "out_indices",
    "id2label",
    "label2id",
}
_ZERO = re.compile(r"drop|mask_time_prob|mask_feature_prob|jitter|layerdrop|pdrop|noise_std")
_MORE = {
    "apply_spec_augment": False,
    "use_kernels": False,
    "use_pretrained_backbone": False,
    "use_timm_backbone": False,
    "problem_type": None,
    "ctc_zero_infinity": True,
}


_MISSING = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "prediction_length": 4,
}  # used if the value is None
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_OWN: dict[str, dict[str, Any]] = {
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "ReformerConfig": {
        "axial_pos_shape": (8, 8),
        "axial_pos_embds_dim": (16, 16),
        "attn_layers": ("local", "local"),
    },
    "ZambaConfig": {"layers_block_type": ["linear_attention", "hybrid"]},
    "Zamba2Config": {"layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1]},
    **{
        f"{name}TextConfig": {"rope_parameters": _SECTIONS}
        for name in ("Glm4v", "GlmOcr", "GlmImage", "Glm46V")
    },
    "EsmConfig": {"pad_token_id": 0, "mask_token_id": 4},
}


def tiny_config(kind: type[Any], labels: int = LABELS) -> Any:
    """Return a configuration of this class that is as small as possible."""
    made = _make(kind)
    for each in (made, getattr(made, "text_config", None) or made):
        each.num_labels = labels
        for name, word in (("pad_token_id", 0), ("decoder_start_token_id", 1)):
            if getattr(each, name, None) is None:
                setattr(each, name, word)
    return made


def _make(kind: type[Any]) -> Any:
    """Return a configuration whose heads share keys, or whose heads don't if that fails."""
    small = shrink(kind())
    try:
        return kind(**small)
    except Exception:  # raised by a validator
        return kind(**{**small, "num_key_value_heads": 4})


def shrink(config: Any) -> dict[str, Any]:
    """Return the arguments for a small configuration of the same class."""
    made: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name in _NONE or name in ("transformers_version", "model_type"):
            continue
        if isinstance(value, PreTrainedConfig):
            made[name] = _nested(value)
        elif value is None and name in _MISSING:
            made[name] = _MISSING[name]
        elif (small := _shrink_value(name, value)) != value:
            made[name] = small
    own = vars(config)
    if (
        made.get("num_key_value_heads")
        and own.get("num_attention_heads") == own["num_key_value_heads"]
    ):
        made["num_key_value_heads"] = made["num_attention_heads"]
    more = {name: value for name, value in _MORE.items() if hasattr(config, name)}
    return {**made, **_special_tokens(config), **more, **_OWN.get(type(config).__name__, {})}


def _nested(config: Any) -> Any:
    return type(config)(**shrink(config))


def _shrink_value(name: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, float):
        return 0.0 if _ZERO.search(name) else value
    if isinstance(value, int):
        return shrink_whole(name, value)
    if isinstance(value, dict):
        return _shrink_rope(value)
    if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
        return type(value)(_shrink_list(name, list(value)))
    return value


def shrink_whole(name: str, value: int) -> int:
    """Return a small integer for this name."""
    if _ZERO.search(name):
        return 0
    for pattern, small in _WHOLE:
        if re.search(pattern, name):
            return value if small is None else min(value, small)
    return value


def _shrink_list(name: str, values: list[int]) -> list[int]:
    """Shrink depths to 1, and sizes by a common factor."""
    if (
        re.search(r"depths|num_blocks|layers|blocks_per_stage|numb_of_layers", name)
        and max(values) < 64
    ):
        return [min(each, 1) for each in values]
    if re.search(r"kernel|stride|index|indices|indexes|ratio|scale|shape|token", name):
        return values
    if re.search(r"^(image_size|input_size|img_size)$", name):
        return [min(each, 32) for each in values]
    if re.search(r"heads", name):
        return [min(each, 2) for each in values]
    factor = 1
    while max(values) // factor > 64 and min(values) // factor >= 8:
        factor *= 2
    return [each // factor for each in values]


def _shrink_rope(values: dict[str, Any]) -> dict[str, Any]:
    """Shrink sections and factors of rotary positions to fit heads of 8."""
    made = {
        name: _shrink_rope(each) if isinstance(each, dict) else each
        for name, each in values.items()
    }
    count = int(4 * values.get("partial_rotary_factor", 1.0))
    if values.get("mrope_section"):
        made["mrope_section"] = [count - 2 * (count // 3), count // 3, count // 3]
    for name in ("long_factor", "short_factor"):
        if values.get(name):
            made[name] = values[name][:count]
    return made


def _special_tokens(config: Any) -> dict[str, int]:
    """Return a token of its own for each special token beyond the vocabulary."""
    small = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "cls_token_id": 3,
    }
    small |= {"sep_token_id": 4, "unk_token_id": 3, "mask_token_id": 4}
    made, free = {}, FIRST_SPECIAL
    for name, value in vars(config).items():
        if not re.search(r"token_(id|index)$|_id$", name) or name.startswith("_"):
            continue
        if name in small:
            made[name] = small[name]
        elif type(value) is int and value >= FIRST_SPECIAL:
            made[name] = free
            free += 1
    return made
