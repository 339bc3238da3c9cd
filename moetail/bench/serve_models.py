"""The models of `bench serve`: published shapes as a local config.json; vLLM makes the weights up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON = {
    "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_cache": True, "attention_bias": False,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        **_COMMON, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1,
        "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64,
        "vocab_size": 102400, "max_position_embeddings": 163840, "rope_theta": 10000, "seq_aux": True,
        "bos_token_id": 100000, "eos_token_id": 100001,
        "rope_scaling": {
            "rope_type": "yarn", "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
        },
    },
    "qwen1.5-moe": {
        **_COMMON, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 2048,
        "intermediate_size": 5632, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "num_hidden_layers": 24, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 60,
        "num_experts_per_tok": 4, "norm_topk_prob": False, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "max_window_layers": 21,
        "sliding_window": None, "use_sliding_window": False, "bos_token_id": 151643, "eos_token_id": 151643,
    },
    "glm4-moe": {
        **_COMMON, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 4096,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46, "first_k_dense_replace": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "partial_rotary_factor": 0.5, "use_qk_norm": False, "vocab_size": 151552,
        "max_position_embeddings": 131072, "rope_theta": 1000000, "num_nextn_predict_layers": 0,
        "bos_token_id": 151329, "eos_token_id": 151329,
    },
}  # fmt: skip
# As DeepSeek-V3 is published. The dense layers' width must then be a multiple of the block.
FP8_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def folder(name: str, root: Path, layers: int | None = None, quant: str | None = None) -> Path:
    """A folder with the model's config.json; a folder that has one is returned as it is.

    Raises: ValueError for an unknown name, number of layers or quantization.
    """
    if (Path(name) / "config.json").exists():
        return Path(name)
    if name not in SHAPES:
        raise ValueError(f"model must be {', '.join(SHAPES)} or a folder with config.json, got {name!r}")
    if quant not in (None, "fp8-block"):
        raise ValueError(f"quant must be fp8-block or nothing, got {quant!r}")
    if layers is not None and layers < 2:
        raise ValueError(f"layers must be 2 or more, one dense and one MoE, got {layers}")
    config = dict(SHAPES[name])
    if layers is not None:
        config["num_hidden_layers"] = layers
    if quant is not None:
        config["quantization_config"] = FP8_BLOCK
        config["intermediate_size"] = config["intermediate_size"] // 128 * 128
    target = root / "-".join(filter(None, (name, f"{config['num_hidden_layers']}layers", quant)))
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return target
