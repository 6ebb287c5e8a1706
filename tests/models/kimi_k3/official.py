# SPDX-License-Identifier: Apache-2.0
"""The released checkpoint's config.json and tensor list, written out independently of the model."""

from __future__ import annotations

from typing import Any

import torch

PREFIX = "language_model."


def released_config() -> dict[str, Any]:
    """config.json of the multimodal model, the parts that matter here."""
    text = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "intermediate_size": 33792,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "rms_norm_eps": 1e-5,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "topk_method": "noaux_tc",
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "attn_res_block_size": 12,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 1048576,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "dtype": "bfloat16",
        "head_dim": 74,
        "linear_attn_config": {
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": [*range(4, 93, 4), 93],
            "kda_layers": [i for i in range(1, 93) if i % 4],
        },
        "quantization_config": quantization_config(),
    }
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        },
        "dtype": "bfloat16",
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "media_placeholder_token_id": 163605,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"model_type": "moonvit", "hidden_size": 1024, "num_hidden_layers": 27},
    }


def quantization_config() -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "mxfp4-pack-quantized",
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                    "observer": "minmax",
                    "scale_dtype": "torch.uint8",
                    "actorder": None,
                    "block_structure": None,
                    "zp_dtype": None,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*", "re:.*vision_tower.*"],
        "kv_cache_scheme": None,
    }


def tensor_list(text: dict[str, Any], experts: str = "mxfp4", a_log: int | None = None) -> dict[str, tuple]:
    """``{name: (dtype, shape)}`` of the language model in a checkpoint with the text settings ``text``."""
    bf16, f32, u8 = torch.bfloat16, torch.float32, torch.uint8
    hidden, heads, linear = text["hidden_size"], text["num_attention_heads"], text["linear_attn_config"]
    inner = linear["num_heads"] * linear["head_dim"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    latent, inter = text["routed_expert_hidden_size"], text["moe_intermediate_size"]
    shared = inter * text["num_shared_experts"]
    tensors: dict[str, tuple] = {
        "model.embed_tokens.weight": (bf16, [text["vocab_size"], hidden]),
        "model.norm.weight": (bf16, [hidden]),
        "model.output_attn_res_norm.weight": (bf16, [hidden]),
        "model.output_attn_res_proj.weight": (bf16, [1, hidden]),
        "lm_head.weight": (bf16, [text["vocab_size"], hidden]),
    }
    for i in range(text["num_hidden_layers"]):
        layer: dict[str, tuple] = {}
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            layer[f"{name}.weight"] = (bf16, [hidden])
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            layer[f"{name}.weight"] = (bf16, [1, hidden])
        if i + 1 in linear["full_attn_layers"]:
            shapes = {
                "q_a_proj": [text["q_lora_rank"], hidden],
                "q_a_layernorm": [text["q_lora_rank"]],
                "q_b_proj": [heads * (nope + rope), text["q_lora_rank"]],
                "kv_a_proj_with_mqa": [text["kv_lora_rank"] + rope, hidden],
                "kv_a_layernorm": [text["kv_lora_rank"]],
                "kv_b_proj": [heads * (nope + value), text["kv_lora_rank"]],
                "g_proj": [heads * value, hidden],
                "o_proj": [hidden, heads * value],
            }
            layer.update({f"self_attn.{name}.weight": (bf16, shape) for name, shape in shapes.items()})
        else:
            for name in "qkv":
                layer[f"self_attn.{name}_proj.weight"] = (bf16, [inner, hidden])
                layer[f"self_attn.{name}_conv1d.weight"] = (f32, [inner, 1, linear["short_conv_kernel_size"]])
            layer["self_attn.A_log"] = (f32, [a_log or linear["num_heads"]])
            layer["self_attn.dt_bias"] = (f32, [inner])
            layer["self_attn.o_norm.weight"] = (f32, [linear["head_dim"]])
            layer["self_attn.f_a_proj.weight"] = (bf16, [linear["head_dim"], hidden])
            layer["self_attn.f_b_proj.weight"] = (bf16, [inner, linear["head_dim"]])
            layer["self_attn.b_proj.weight"] = (bf16, [linear["num_heads"], hidden])
            layer["self_attn.g_proj.weight"] = (bf16, [inner, hidden])
            layer["self_attn.o_proj.weight"] = (bf16, [hidden, inner])
        if i < text["first_k_dense_replace"]:
            layer["mlp.gate_proj.weight"] = layer["mlp.up_proj.weight"] = (bf16, [text["intermediate_size"], hidden])
            layer["mlp.down_proj.weight"] = (bf16, [hidden, text["intermediate_size"]])
        else:
            m = "block_sparse_moe."
            layer[f"{m}gate.weight"] = (bf16, [text["num_experts"], hidden])
            layer[f"{m}gate.e_score_correction_bias"] = (f32, [text["num_experts"]])
            layer[f"{m}routed_expert_down_proj.weight"] = (bf16, [latent, hidden])
            layer[f"{m}routed_expert_norm.weight"] = (bf16, [latent])
            layer[f"{m}routed_expert_up_proj.weight"] = (bf16, [hidden, latent])
            layer[f"{m}shared_experts.gate_proj.weight"] = (bf16, [shared, hidden])
            layer[f"{m}shared_experts.up_proj.weight"] = (bf16, [shared, hidden])
            layer[f"{m}shared_experts.down_proj.weight"] = (bf16, [hidden, shared])
            for e in range(text["num_experts"]):
                for matrix, rows, columns in [("w1", inter, latent), ("w2", latent, inter), ("w3", inter, latent)]:
                    name = f"{m}experts.{e}.{matrix}.weight"
                    if experts == "mxfp4":
                        layer[f"{name}_packed"] = (u8, [rows, columns // 2])
                        layer[f"{name}_scale"] = (u8, [rows, columns // 32])
                    else:
                        layer[name] = (bf16, [rows, columns])
        tensors.update({f"model.layers.{i}.{name}": entry for name, entry in layer.items()})
    return {PREFIX + name: entry for name, entry in tensors.items()}


def random_tensors(listing: dict[str, tuple], seed: int) -> dict[str, torch.Tensor]:
    """Tensors for a (small) listing; scales around 1, everything else normal."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (dtype, shape) in listing.items():
        if name.endswith("_scale"):
            tensors[name] = torch.randint(120, 128, shape, generator=generator, dtype=torch.uint8)
        elif dtype == torch.uint8:
            tensors[name] = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        else:
            tensors[name] = torch.randn(shape, generator=generator).to(dtype)
    return tensors
