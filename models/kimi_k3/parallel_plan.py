# SPDX-License-Identifier: Apache-2.0
"""How Kimi-K3 is split over the ranks of a tensor-parallel group.

Router, norms, mixtures, the low-rank projections in front of the heads and the two projections around the latent space
of the experts are whole on every rank.
"""

from dcp_compile.parallel.parts import complete_sums, gather_output, look_up, own_experts, own_heads, sum_output
from dcp_compile.parallel.plan import ShardingPlan, Split

_MLA_HEADS = Split(0, groups="num_attention_heads")
_KDA_HEADS = Split(0, groups="linear_num_heads")
_ROWS, _COLUMNS = Split(0), Split(1)

_SPLITS = {
    # MLA
    "self_attn.q_b_proj.weight": _MLA_HEADS,
    "self_attn.kv_b_proj.weight": _MLA_HEADS,
    # KDA
    "self_attn.q_proj.weight": _KDA_HEADS,
    "self_attn.k_proj.weight": _KDA_HEADS,
    "self_attn.v_proj.weight": _KDA_HEADS,
    "self_attn.q_conv1d.weight": _KDA_HEADS,
    "self_attn.k_conv1d.weight": _KDA_HEADS,
    "self_attn.v_conv1d.weight": _KDA_HEADS,
    "self_attn.f_b_proj.weight": _KDA_HEADS,
    "self_attn.A_log": _KDA_HEADS,
    "self_attn.dt_bias": _KDA_HEADS,
    "self_attn.b_proj.weight": _KDA_HEADS,
    # both, by whichever heads the layer has
    "self_attn.g_proj.weight": _ROWS,
    "self_attn.o_proj.weight": _COLUMNS,
    # dense MLP and shared experts
    **{
        f"{mlp}.{name}.weight": split
        for mlp in ("mlp", "shared_experts")
        for name, split in (("gate_proj", _ROWS), ("up_proj", _ROWS), ("down_proj", _COLUMNS))
    },
    # vocabulary
    "embed_tokens.weight": _ROWS,
    "lm_head.weight": _ROWS,
}
_QUERIES = frozenset({"self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight"})
_EXCHANGES = {
    "self_attn.own_heads": own_heads,
    "self_attn.o_proj": sum_output,
    "mlp.down_proj": sum_output,
    "block_sparse_moe": complete_sums,  # routed and shared experts in one message
    "embed_tokens": look_up,
    "lm_head": gather_output,
}

SHARDING_PLAN = ShardingPlan(
    # every rank has a slice of each expert: of gate and up, stacked in rows, and of the columns of down
    splits={**_SPLITS, "experts.gate_up_proj": Split(1, parts=2), "experts.down_proj": Split(2)},
    exchanges=_EXCHANGES,
    queries=_QUERIES,
    expert_parallel=ShardingPlan(
        splits={**_SPLITS, "experts.gate_up_proj": Split(0), "experts.down_proj": Split(0)},
        exchanges={**_EXCHANGES, "block_sparse_moe.experts": own_experts},
        queries=_QUERIES,
    ),
)
