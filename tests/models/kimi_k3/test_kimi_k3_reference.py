# SPDX-License-Identifier: Apache-2.0
"""The model against a second, plain implementation in float64, and against the mistakes one can make."""

import pytest
import torch

from dcp_compile.models.kimi_k3.weights import official_state_dict
from tests.models.kimi_k3.reference import SLIPS, Reference
from tests.tiny_models import VOCAB, tiny_kimi_k3, tiny_kimi_k3_8

TOLERANCE = 1e-9


def reference_for(model, slip=None):
    return Reference(model.config.to_dict(), official_state_dict(model.state_dict()), slip)


def draw_tokens(*shape):
    return torch.randint(VOCAB, shape)


VARIANTS = {
    "9 layers": dict(build=tiny_kimi_k3),
    "8 layers, MLA starts a block": dict(build=tiny_kimi_k3_8),
    "no partial block": dict(build=tiny_kimi_k3_8, attn_res_block_size=4),
    "a block per layer": dict(layers=4, attn_res_block_size=1),
    "a single block": dict(layers=4, attn_res_block_size=50),
    "expert groups": dict(layers=4, num_expert_group=4, topk_group=2),
    "routing scaled, not normalised": dict(layers=4, routed_scaling_factor=2.5, moe_renormalize=False),
    "up not capped, gate cap off": dict(layers=4, activation_situ_linear_beta=None, activation_situ_beta=None),
    "dense layers only": dict(layers=4, first_k_dense_replace=4),
    "experts from the first layer": dict(layers=4, first_k_dense_replace=0),
    "KDA of another shape than MLA": dict(
        layers=4, linear_attn_config=dict(num_heads=3, head_dim=8, short_conv_kernel_size=3, gate_lower_bound=-2.0)
    ),
    "KDA only but the first": dict(layers=3, linear_attn_config=dict(full_attn_layers=[1], kda_layers=[2, 3])),
    "value dim apart": dict(layers=4, v_head_dim=12, qk_rope_head_dim=4, kv_lora_rank=20, q_lora_rank=28),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_reference(variant, seed):
    settings = dict(VARIANTS[variant])
    model = settings.pop("build", tiny_kimi_k3)(seed=seed, dtype=torch.float64, **settings)
    torch.manual_seed(seed)
    tokens = draw_tokens(2, 12)
    layers = range(model.config.num_hidden_layers)
    with torch.no_grad():
        found = model(tokens, tap_layers=tuple(layers))
    for row, ids in enumerate(tokens.tolist()):
        reference = reference_for(model)
        wanted = reference.logits(ids)
        assert wanted.std() > 0.3
        torch.testing.assert_close(found.logits[row], wanted, rtol=0, atol=TOLERANCE)
        taps = torch.cat([torch.stack(reference.prefixes[i]) for i in layers], dim=-1)
        torch.testing.assert_close(found.taps[row], taps, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def pair():
    """A model, five tokens and its logits for them."""
    model = tiny_kimi_k3(layers=5, attn_res_block_size=2, seed=3, dtype=torch.float64)
    tokens = torch.randint(VOCAB, (1, 5), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        return model, tokens[0].tolist(), model(tokens).logits[0]


def test_pair_equals_the_reference(pair):
    model, tokens, logits = pair
    torch.testing.assert_close(reference_for(model).logits(tokens), logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("slip", SLIPS)
def test_no_slip_hides(pair, slip):
    model, tokens, logits = pair
    assert (reference_for(model, slip).logits(tokens) - logits).abs().max() > 1e3 * TOLERANCE


def test_first_attention_mixture_is_unused(pair):
    model, tokens, logits = pair
    layer = model.model.layers[0]
    kept = layer.self_attention_res_norm.weight.clone(), layer.self_attention_res_proj.weight.clone()
    with torch.no_grad():
        layer.self_attention_res_norm.weight.fill_(float("nan"))
        layer.self_attention_res_proj.weight.fill_(float("nan"))
        again = model(torch.tensor([tokens])).logits[0]
        layer.self_attention_res_norm.weight.copy_(kept[0])
        layer.self_attention_res_proj.weight.copy_(kept[1])
    torch.testing.assert_close(again, logits, rtol=0, atol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_implementations_agree(pair, attention, experts):
    model, tokens, logits = pair
    before = model.config._attn_implementation, model.config._experts_implementation
    model.set_attn_implementation(attention)
    model.set_experts_implementation(experts)
    try:
        with torch.no_grad():
            found = model(torch.tensor([tokens])).logits[0]
    finally:
        model.config._attn_implementation, model.config._experts_implementation = before
    torch.testing.assert_close(found, logits, rtol=0, atol=TOLERANCE)


def test_float32_stays_near(seed):
    """Dense layers only: a router near a tie may choose otherwise in another precision."""
    model = tiny_kimi_k3(seed=seed, first_k_dense_replace=9)
    torch.manual_seed(seed)
    tokens = draw_tokens(1, 12)
    with torch.no_grad():
        logits = model(tokens).logits[0]
    assert (logits - reference_for(model).logits(tokens[0].tolist())).abs().max() < 1e-2


def test_bfloat16_runs(seed):
    model = tiny_kimi_k3(seed=seed, dtype=torch.bfloat16)
    torch.manual_seed(seed)
    with torch.no_grad():
        out = model(draw_tokens(2, 12), tap_layers=(0, 8))
    assert out.logits.dtype == out.taps.dtype == torch.bfloat16
    assert out.logits.isfinite().all() and out.logits.float().std() > 0.3


def test_grouped_experts_agree_in_float32(seed):
    model = tiny_kimi_k3(layers=2, seed=seed)
    torch.manual_seed(seed)
    tokens = draw_tokens(2, 9)
    results = []
    for experts in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(experts)
        with torch.no_grad():
            results.append(model(tokens).logits)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-4)
