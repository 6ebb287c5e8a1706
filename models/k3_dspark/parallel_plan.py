# SPDX-License-Identifier: Apache-2.0
"""How the K3 DSpark draft is split over the ranks of a tensor-parallel group.

Embedding and output head are the target's. The Markov and the confidence head are whole on every rank: they run once per
drafted token, where a message would cost more than it saves.
"""

from dcp_compile.parallel.parts import own_heads, sum_output
from dcp_compile.parallel.plan import ShardingPlan, Split

_HEADS = Split(0, groups="num_attention_heads")

SHARDING_PLAN = ShardingPlan(
    splits={
        "self_attn.q_b_proj.weight": _HEADS,
        "self_attn.kv_b_proj.weight": _HEADS,
        "self_attn.o_proj.weight": Split(1),
        "mlp.gate_proj.weight": Split(0),
        "mlp.up_proj.weight": Split(0),
        "mlp.down_proj.weight": Split(1),
    },
    exchanges={"self_attn.own_heads": own_heads, "self_attn.o_proj": sum_output, "mlp.down_proj": sum_output},
    queries=frozenset({"self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight"}),
)
