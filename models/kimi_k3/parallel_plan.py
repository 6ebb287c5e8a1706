# SPDX-License-Identifier: Apache-2.0
"""Which parameters of Kimi-K3 are split by attention heads, for whoever runs the model on several ranks."""

# Parameter-name suffix -> the dim whose entries are grouped by head, head-major. All other parameters of an attention
# layer are needed whole on every rank. A layer that holds a slice of the heads returns a partial sum over the ranks.
HEAD_SHARDING: dict[str, int] = {
    # MLA
    "self_attn.q_b_proj.weight": 0,
    "self_attn.kv_b_proj.weight": 0,
    # KDA
    "self_attn.q_proj.weight": 0,
    "self_attn.k_proj.weight": 0,
    "self_attn.v_proj.weight": 0,
    "self_attn.q_conv1d.weight": 0,
    "self_attn.k_conv1d.weight": 0,
    "self_attn.v_conv1d.weight": 0,
    "self_attn.f_b_proj.weight": 0,
    "self_attn.A_log": 0,
    "self_attn.dt_bias": 0,
    "self_attn.b_proj.weight": 0,
    # both
    "self_attn.g_proj.weight": 0,
    "self_attn.o_proj.weight": 1,
}
