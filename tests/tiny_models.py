# SPDX-License-Identifier: Apache-2.0
"""Tiny random models with every structural feature of the real ones, for tests on a CPU.

The weights are drawn so that a wrong gate, mixture or bias shows: see :func:`randomise`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

VOCAB = 128


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw all weights anew so that no feature hides behind its initial value; returns ``model`` in eval mode.

    Projections get a standard deviation of ``fan_in ** -0.5``, mixture queries 0.5, norms are spread around 1,
    selection biases have a standard deviation of 0.1, KDA decays ``A_log`` in [-0.7, 1.3] and ``dt_bias`` in [-3, 3].
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, std: float, mean: float = 0.0) -> None:
        tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))

    def uniform(tensor: torch.Tensor, low: float, high: float) -> None:
        tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator, dtype=torch.float64))

    with torch.no_grad():
        tensors = dict(model.named_parameters())
        tensors.update((n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
        for name, tensor in sorted(tensors.items()):
            if name.endswith("A_log"):
                uniform(tensor, -0.7, 1.3)
            elif name.endswith("dt_bias"):
                uniform(tensor, -3.0, 3.0)
            elif name.endswith("e_score_correction_bias"):
                normal(tensor, 0.1)
            elif name.endswith("res_proj.weight"):
                normal(tensor, 0.5)
            elif tensor.dim() == 1:
                normal(tensor, 0.2, mean=1.0)
            elif "embed_tokens" in name:
                normal(tensor, 1.0)
            else:
                normal(tensor, tensor.shape[-1] ** -0.5)
    return model.eval()


def _build(config: Any, seed: int, dtype: torch.dtype) -> Any:
    if dtype == torch.float64 and config._experts_implementation is None:
        config._experts_implementation = "batched_mm"  # grouped_mm, the default, has no float64 kernel
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # keeps what must stay float32 in a bfloat16 model
    return randomise(model.double() if dtype == torch.float64 else model, seed)


def tiny_kimi_k3_config(layers: int = 9, **settings: Any) -> Any:
    """Kimi-K3 with a dense first layer and experts after it, MLA at every fourth layer and the last, blocks of 4.

    Two layers at least. ``settings`` override single settings; keys of ``linear_attn_config`` are merged into it.
    """
    from dcp_compile.models import KimiK3Config

    full = [i for i in range(1, layers + 1) if i % 4 == 0 or i == layers]
    linear = {
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "full_attn_layers": full,
        "kda_layers": [i for i in range(1, layers + 1) if i not in full],
        **settings.pop("linear_attn_config", {}),
    }
    defaults = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=layers,
        intermediate_size=96,
        num_attention_heads=4,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_experts=8,
        num_experts_per_token=3,
        num_shared_experts=2,
        moe_intermediate_size=32,
        routed_expert_hidden_size=32,
        attn_res_block_size=4,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return KimiK3Config(linear_attn_config=linear, **{**defaults, **settings})


def tiny_kimi_k3(layers: int = 9, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A random ``KimiK3ForCausalLM``; see :func:`tiny_kimi_k3_config`."""
    return _build(tiny_kimi_k3_config(layers, **settings), seed, dtype)


def tiny_kimi_k3_8(**settings: Any) -> Any:
    """The 8-layer variant: MLA at 4 and 8, blocks of 3, so that an MLA layer starts a block and the last is partial."""
    return tiny_kimi_k3(8, **{"attn_res_block_size": 3, **settings})


def tiny_kimi_linear(layers: int = 5, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A random transformers ``KimiLinearForCausalLM``; layers 0, 2, ... are KDA, the others MLA."""
    from transformers import KimiLinearConfig

    defaults = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        num_local_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        linear_head_dim=16,
        linear_num_heads=4,
        layer_types=["full_attention" if i % 2 else "linear_attention" for i in range(layers)],
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _build(KimiLinearConfig(**{**defaults, **settings}), seed, dtype)


def tiny_deepseek_v3(layers: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A random transformers ``DeepseekV3ForCausalLM``; ``q_lora_rank`` and ``rope_interleave`` vary the queries."""
    from transformers import DeepseekV3Config

    defaults = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        rope_interleave=True,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _build(DeepseekV3Config(**{**defaults, **settings}), seed, dtype)
