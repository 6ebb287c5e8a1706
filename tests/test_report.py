# SPDX-License-Identifier: Apache-2.0
"""explain() states facts that can be recomputed from the model."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

import dcp_compile
from dcp_compile import DCPConfig, UnsupportedModelError, backends
from dcp_compile.api import Optimized
from dcp_compile.capture import StepGraph, capture
from dcp_compile.compiler import compile_draft, compile_graph
from dcp_compile.parallel import ParallelLayout
from dcp_compile.parallel.shard import shard_of
from dcp_compile.passes import PASSES
from dcp_compile.passes.graph_tools import census
from tests.models.k3_dspark.tiny_draft import target_heads, tiny_draft
from tests.passes.models import captured_part
from tests.tiny_models import tiny_deepseek_v3, tiny_kimi_linear

CONFIG = DCPConfig(block_size=4, max_batch_size=3, max_seq_len=21, num_speculative_tokens=2)


class Model:
    """Stands for a model that was optimised for a rank which does not run here."""

    def __init__(self, captured: StepGraph, config: DCPConfig, parallel: ParallelLayout):
        engine, report = compile_graph(captured, config, parallel)
        self.__dict__["_dcp"] = Optimized(config, parallel, report, lambda: None)
        self._dcp_engine = engine


@pytest.fixture(scope="module")
def hybrid() -> StepGraph:
    return capture(tiny_kimi_linear(3, num_local_experts=2))


def test_one_rank(hybrid: StepGraph) -> None:
    model = Model(hybrid, CONFIG, ParallelLayout())
    text = dcp_compile.explain(model)
    assert text.startswith("Model: 1 MLA layers absorbed (4 heads, latent 32 + rope 8), 2 recurrent layers")
    assert "ranks: dcp 1 (this is 0), tp 1 (this is 0), heads replicated, interleave 1, block 4" in text
    assert "attention: backend torch, layout split" in text
    assert text.endswith("collectives per step: none")
    assert "KV cache: 160 bytes per token, 160 per token and rank; 18 pages, 0.0 MiB on this rank; float32\n" in text
    state = 2 * 4 * (4 * 16 * 16 + 3 * 3 * 4 * 16 + 192 * (3 + 3))  # states, records, windows, their records
    assert f"recurrent state: {state} bytes ({state / 2**20:.2f} MiB) per sequence on this rank" in text
    weights = sum(tensor.numel() * tensor.element_size() for tensor in hybrid.constants.values())
    assert f"weights: {weights} bytes ({weights / 2**20:.1f} MiB) on this rank, the whole model" in text


def test_every_backend_that_was_passed_over_has_its_reason(hybrid: StepGraph) -> None:
    text = dcp_compile.explain(Model(hybrid, CONFIG, ParallelLayout()))
    others = set(backends.registry._BACKENDS) - {"torch"}
    assert others
    for name in others:
        assert re.search(rf"^  not {name}: .*device type cpu not supported", text, re.MULTILINE)
    named = dcp_compile.explain(Model(hybrid, CONFIG.replace(backend="torch"), ParallelLayout()))
    assert "  not " not in named


def test_a_float8_cache_halves_the_bytes_and_rules_out_backends(hybrid: StepGraph) -> None:
    """Half of 16 bits: 80 bytes become 40. What cannot read it says so."""
    sixteen = dcp_compile.explain(Model(hybrid, CONFIG.replace(kv_cache_dtype="bfloat16"), ParallelLayout()))
    assert "KV cache: 80 bytes per token, 80 per token and rank; 18 pages, 0.0 MiB on this rank; bfloat16\n" in sixteen
    config = CONFIG.replace(kv_cache_dtype="float8_e4m3fn", kv_cache_scale=0.5)
    text = dcp_compile.explain(Model(hybrid, config, ParallelLayout()))
    assert "KV cache: 40 bytes per token, 40 per token and rank; 18 pages" in text
    assert "; float8_e4m3fn times 0.5\n" in text
    for name in set(backends.registry._BACKENDS) - {"torch"}:
        (line,) = re.findall(rf"^  not {name}: .*", text, re.MULTILINE)
        assert ("kv cache dtype torch.float8_e4m3fn not supported" in line) == (name != "triton")


def test_calls_before_and_after_every_pass(hybrid: StepGraph) -> None:
    model = Model(hybrid, CONFIG, ParallelLayout())
    text, graph = dcp_compile.explain(model), model._dcp.report.graph
    rows = {}
    for module in PASSES:
        name = module.__name__.rpartition(".")[2]
        (row,) = re.findall(rf"^{name} +(\d+) +(\d+) -> (\d+) +(.*)$", text, re.MULTILINE)
        rows[name] = (int(row[0]), int(row[1]), int(row[2]), row[3])
    counts = list(rows.values())
    assert all(one[2] == other[1] for one, other in zip(counts, counts[1:]))
    sites = {"match_mla": 1, "absorb_mla": 1, "insert_kv_write": 1, "shard_dcp": 0, "lower_kda": 4}
    assert {name: rows[name][0] for name in sites} == sites
    assert rows["match_mla"][3] == rows["shard_dcp"][3] == "-"
    assert "kv_write 0->1" in rows["insert_kv_write"][3] and "mark_attention 1->0" in rows["absorb_mla"][3]
    assert "kda 0->2" in rows["lower_kda"][3] and "mark_recurrence 2->0" in rows["lower_kda"][3]
    assert "step_metadata 0->1" in rows["hoist_metadata"][3]
    prologue, body = sum(census(graph.prologue.graph).values()), sum(census(graph.graph).values())
    assert f"one step: 1 prologue of {prologue} calls, body of {body} calls" in text
    assert prologue + body == counts[-1][2]


def test_a_draft_its_window_and_the_times_that_lengths_depend_on(hybrid: StepGraph) -> None:
    config = CONFIG.replace(verify="adaptive", draft_window=7)
    model = Model(hybrid, config, ParallelLayout())
    text = dcp_compile.explain(model)
    assert "draft" not in text.split("verify lengths")[0]
    assert text.endswith("  chances: the running acceptance rate of each position")
    heads = target_heads(draft := tiny_draft(0), 0)
    target = SimpleNamespace(get_input_embeddings=lambda: heads[0], get_output_embeddings=lambda: heads[1])
    model._dcp.draft, model._dcp.draft_report = compile_draft(draft, target, model._dcp_engine)
    text = dcp_compile.explain(model)
    assert (
        "draft K3DSparkModel: blocks of up to 2 tokens that see the latest 7 tokens of its context; 2 MLA layers, backend "
        "torch, layout tail" in text
    )
    times = re.findall(r"^  up to (\d) requests  (.*); draft block [\d.e-]+$", text, re.MULTILINE)
    rows = [[int(entry.split(":")[0]) for entry in entries.split(", ")] for _, entries in times]
    assert [requests for requests, _ in times] == ["1", "2", "3"] and rows == [[1, 2, 3], [2, 4, 6], [3, 6, 9]]
    assert "  chances: the DSpark draft's confidence head; for other drafts the running acceptance rate" in text


@pytest.fixture(scope="module")
def attention_only() -> StepGraph:
    return capture(tiny_deepseek_v3(2, first_k_dense_replace=2))


# A partial of one head is 32 values and its log-sum-exp, a query 32 + 8 values; the graph has all 4 heads on every rank.
@pytest.mark.parametrize("tp_size, heads, collectives, values", [
    (1, "replicated", "2 merge_ranks", 4 * 33),
    (2, "sharded", "2 gather_heads, 2 merge_ranks", 4 * 40 + 8 * 33),
])  # fmt: skip
def test_two_ranks(attention_only: StepGraph, tp_size: int, heads: str, collectives: str, values: int) -> None:
    group = SimpleNamespace(group_name="ranks")
    parallel = ParallelLayout(
        tp_size=tp_size, tp_rank=tp_size - 1, dcp_size=2, dcp_rank=1, dcp_group=group, transport="gloo"
    )
    text = dcp_compile.explain(Model(attention_only, CONFIG.replace(kv_interleave=2, tp_size=tp_size), parallel))
    assert "Model: 2 MLA layers absorbed" in text and "0 recurrent layers" in text
    assert f"dcp 2 (this is 1), tp {tp_size} (this is {tp_size - 1}), heads {heads}, interleave 2, block 4" in text
    assert "KV cache: 320 bytes per token, 160 per token and rank; 9 pages" in text
    handed_in = 2 * 4 * values  # two layers, four bytes
    assert f"collectives per step: {collectives}; {handed_in} bytes handed in by this rank for one row\n" in text
    reason = "tensors are on cpu; peer memory is a matter of CUDA devices"
    assert f"exchange of attention: collectives ({reason}); other collectives: torch.distributed with gloo" in text
    assert ("the whole model" if tp_size == 1 else "one of 2 parts, experts sliced") in text
    assert "recurrent state" not in text


def test_queries_that_every_rank_makes() -> None:
    """Two heads of each rank; half of the weights that queries are made with are those of the other rank."""
    part = captured_part(1)
    group = SimpleNamespace(group_name="ranks")
    places = {"tp_size": 2, "tp_rank": 1, "dcp_size": 2, "dcp_rank": 1}
    parallel = ParallelLayout(**places, dcp_group=group, tp_group=group, transport="gloo")
    config = CONFIG.replace(tp_size=2, query_projection="replicated")
    model = Model(part.original, config, parallel)
    vars(model)["_dcp_shard"] = shard_of(part.model)
    model.get_parameter = part.model.get_parameter
    text = dcp_compile.explain(model)
    assert "1 MLA layers absorbed (2 heads, " in text
    assert "heads sharded with the queries of 4 made here, interleave 1" in text
    attention = part.model.model.layers[1].self_attn
    more = (attention.q_b_proj.weight.nbytes + attention.kv_b_proj.weight.nbytes) // 2
    held = sum(tensor.nbytes for tensor in part.original.constants.values())
    assert f"weights: {held} bytes " in text and f"has any, {more} of them to make queries of other ranks" in text
    assert "gather_heads" not in text and "1 merge_ranks; " in text


def test_a_model_that_is_not_optimised() -> None:
    with pytest.raises(UnsupportedModelError, match="DeepseekV3ForCausalLM is not optimised; call dcp_compile"):
        dcp_compile.explain(tiny_deepseek_v3(1))
