# SPDX-License-Identifier: Apache-2.0
"""Building blocks: SiTU, norms, mixtures, routing, experts, and attention layers that hold a slice of the heads."""

import math

import pytest
import torch
from torch.testing import assert_close

from dcp_compile.models.kimi_k3.attention import KimiK3Attention
from dcp_compile.models.kimi_k3.delta_attention import KimiK3DeltaAttention
from dcp_compile.models.kimi_k3.layers import KimiK3GatedRMSNorm, KimiK3RMSNorm, SituGate
from dcp_compile.models.kimi_k3.modeling import KimiK3ForCausalLM
from dcp_compile.models.kimi_k3.moe import KimiK3Experts, KimiK3Router, KimiK3SparseMoeBlock
from dcp_compile.models.kimi_k3.parallel_plan import SHARDING_PLAN
from dcp_compile.models.kimi_k3.residual import MixQuery, Residual, mix, restart
from tests.tiny_models import randomise, tiny_kimi_k3_config


def scalar_situ(gate, up, beta, cap):
    capped = up if cap is None else cap * math.tanh(up / cap)
    return beta * math.tanh(gate / beta) / (1 + math.exp(-gate)) * capped


@pytest.mark.parametrize(
    "beta, cap, effective", [(4.0, 25.0, 4.0), (2.0, None, 2.0), (None, 25.0, 1.0), (0, 3.0, 1.0)]
)
def test_situ(beta, cap, effective):
    act = SituGate(tiny_kimi_k3_config(activation_situ_beta=beta, activation_situ_linear_beta=cap))
    values = [-30.0, -5.0, -0.5, 0.0, 0.5, 5.0, 30.0, 200.0]
    gate, up = (t.double() for t in torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).T)
    wanted = [scalar_situ(g, u, effective, cap) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
    assert_close(act(gate, up), torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_situ_is_computed_in_float32():
    act = SituGate(tiny_kimi_k3_config())
    gate, up = torch.randn(2, 1000, dtype=torch.bfloat16)
    assert_close(act(gate, up), act(gate.float(), up.float()).bfloat16(), rtol=0, atol=0)


def test_rms_norm_rounds_before_the_weight():
    norm = KimiK3RMSNorm(64, 1e-5).bfloat16()
    x = torch.randn(50, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(64) + 0.5)
    wide = x.float()
    wanted = (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()).bfloat16() * norm.weight
    assert_close(norm(x), wanted, rtol=0, atol=2**-7)
    assert (norm(x) == wanted).float().mean() > 0.99
    late = (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.float()).bfloat16()
    assert (norm(x) != late).any()


def test_gated_norm_keeps_its_weight_wide():
    norm = KimiK3GatedRMSNorm(8, 1e-5)
    x, gate = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    wanted = norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gate.sigmoid()
    assert_close(norm(x, gate), wanted)
    assert norm(x.bfloat16(), gate.bfloat16()).dtype == torch.bfloat16


def mixture(seed, snapshots):
    torch.manual_seed(seed)
    norm, query = KimiK3RMSNorm(6, 1e-5).double(), MixQuery(6).double()
    with torch.no_grad():
        norm.weight.normal_(), query.weight.normal_()
    residual = Residual(torch.randn(2, 3, 6, dtype=torch.float64))
    for _ in range(snapshots):
        residual = restart(residual, torch.randn(2, 3, 6, dtype=torch.float64))
    return norm, query, residual


@pytest.mark.parametrize("snapshots", [0, 1, 4])
def test_mixture(snapshots, seed):
    norm, query, residual = mixture(seed, snapshots)
    sources = [residual.prefix] if snapshots == 0 else [*residual.snapshots, residual.prefix]
    assert len(sources) == snapshots + 1
    scores = []
    for source in sources:
        unit = source / (source.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        scores.append((unit * norm.weight * query.weight[0]).sum(-1))
    shares = torch.stack(scores).softmax(0)
    wanted = sum(share[..., None] * source for share, source in zip(shares, sources, strict=True))
    assert_close(mix(residual, norm, query), wanted, rtol=1e-12, atol=1e-12)


def test_mixture_is_the_mean_for_a_zero_query(seed):
    norm, query, residual = mixture(seed, 3)
    torch.nn.init.zeros_(query.weight)
    wanted = torch.stack([*residual.snapshots, residual.prefix]).mean(0)
    assert_close(mix(residual, norm, query), wanted)


def test_restart_banks_the_prefix_as_it_is(seed):
    _, _, residual = mixture(seed, 2)
    after = restart(residual, residual.prefix + 1)
    assert_close(after.snapshots[-1], residual.prefix, rtol=0, atol=0)
    assert_close(after.snapshots[:-1], residual.snapshots, rtol=0, atol=0)
    assert after.scales.shape == (3, 2, 3, 1)


def router(seed, **settings):
    config = tiny_kimi_k3_config(**settings)
    torch.manual_seed(seed)
    module = KimiK3Router(config)
    torch.nn.init.normal_(module.weight), torch.nn.init.normal_(module.e_score_correction_bias, std=0.3)
    return module, torch.randn(40, config.hidden_size)


@pytest.mark.parametrize("groups, top_groups", [(1, 1), (4, 2), (2, 1)])
def test_router(groups, top_groups, seed):
    module, x = router(seed, num_expert_group=groups, topk_group=top_groups, routed_scaling_factor=1.7)
    experts, weights = module(x)
    scores = torch.sigmoid(x @ module.weight.T)
    biased = scores + module.e_score_correction_bias
    for row in range(x.shape[0]):
        per_group = 8 // groups
        sums = [biased[row, n * per_group : (n + 1) * per_group].topk(2).values.sum().item() for n in range(groups)]
        best = sorted(range(groups), key=lambda n: -sums[n])[:top_groups]
        allowed = [e for e in range(8) if e // per_group in best]
        wanted = sorted(allowed, key=lambda e: -biased[row, e].item())[:3]
        assert sorted(experts[row].tolist()) == sorted(wanted)
        chosen = scores[row, experts[row]]
        assert_close(weights[row], 1.7 * chosen / chosen.sum())


def test_router_is_float32_in_a_bfloat16_model(seed):
    module, x = router(seed)
    module.weight.data = module.weight.data.bfloat16()
    experts, weights = module(x.bfloat16())
    wide, wide_weights = module.__class__.forward(module.float(), x.bfloat16().float())
    assert weights.dtype == torch.float32
    assert_close(experts, wide), assert_close(weights, wide_weights)


def test_experts_with_idle_and_single_tokens(seed):
    config = tiny_kimi_k3_config()
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    experts = KimiK3Experts(config).double()
    torch.nn.init.normal_(experts.gate_up_proj), torch.nn.init.normal_(experts.down_proj)
    for tokens in (0, 1, 5):
        x = torch.randn(tokens, config.routed_expert_hidden_size, dtype=torch.float64)
        index = torch.tensor([[7, 2, 0]]).repeat(tokens, 1)
        weights = torch.rand(tokens, 3, dtype=torch.float64)
        wanted = torch.zeros_like(x)
        for t in range(tokens):
            for e, weight in zip(index[t].tolist(), weights[t], strict=True):
                gate, up = (experts.gate_up_proj[e] @ x[t]).chunk(2)
                wanted[t] += weight * (experts.down_proj[e] @ experts.act_fn(gate, up))
        assert_close(experts(x, index, weights), wanted)
        if tokens:
            config._experts_implementation = "batched_mm"
            assert_close(experts(x, index, weights), wanted)
            config._experts_implementation = "eager"


def test_moe_block_does_not_depend_on_the_other_tokens(seed):
    config = tiny_kimi_k3_config()
    config._experts_implementation = "batched_mm"
    torch.manual_seed(seed)
    block = randomise(KimiK3SparseMoeBlock(config).double(), seed)
    x = torch.randn(2, 5, config.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        assert_close(block(x)[1, 3], block(x[1:, 3:4])[0, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [KimiK3Attention, KimiK3DeltaAttention])
@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_of_the_heads_add_up(kind, ranks, seed):
    """Layers that hold a slice of every head-sharded parameter return partial sums of the whole layer's output."""
    config = tiny_kimi_k3_config(5)
    config._attn_implementation = "eager"
    whole = randomise(kind(config, 0).double(), seed)
    torch.manual_seed(seed)
    x = torch.randn(2, 7, config.hidden_size, dtype=torch.float64)
    mask = torch.full((7, 7), float("-inf"), dtype=torch.float64).triu(1) if kind is KimiK3Attention else None

    def run(layer):
        out = layer(x, mask, None)
        return out[0] if kind is KimiK3Attention else out

    total = torch.zeros_like(x)
    with torch.no_grad():
        for rank in range(ranks):
            part = kind(config, 0).double()
            for name, parameter in part.named_parameters():
                tensor, split = whole.get_parameter(name), SHARDING_PLAN.splits.get(f"self_attn.{name}")
                parameter.data = (tensor if split is None else tensor.chunk(ranks, split.dim)[rank]).clone()
            total += run(part)
        assert_close(total, run(whole), rtol=0, atol=1e-11)


def test_the_plan_names_existing_parameters_and_modules():
    with torch.device("meta"):
        model = KimiK3ForCausalLM(tiny_kimi_k3_config(5))
    for plan in (SHARDING_PLAN, SHARDING_PLAN.expert_parallel):
        for table, paths in ((plan.splits, model.named_parameters()), (plan.exchanges, model.named_modules())):
            paths = [path for path, _ in paths]
            assert all(any(path.endswith(f".{name}") or path == name for path in paths) for name in table)
    assert KimiK3ForCausalLM.sharding_plan is SHARDING_PLAN
