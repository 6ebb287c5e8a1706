# SPDX-License-Identifier: Apache-2.0
"""From a captured step to an engine: backend, layout, programs, pools, and errors before anything changes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dcp_compile import DCPConfig
from dcp_compile.capture import StateRef, StepGraph, capture
from dcp_compile.compiler import compile_graph, compile_model
from dcp_compile.errors import BackendError, MatchError, UnsupportedModelError
from dcp_compile.parallel import ParallelLayout
from dcp_compile.passes import PASSES
from dcp_compile.passes.fingerprint import graph_fingerprint
from dcp_compile.passes.graph_tools import census
from dcp_compile.runtime.engine import table_columns
from tests import mla_variants
from tests.mla_variants import vary
from tests.model_state import changes, state_of
from tests.tiny_models import VOCAB, tiny_kimi_linear

CONFIG = DCPConfig(block_size=4, max_batch_size=3, max_seq_len=21, prefill_chunk=6, num_speculative_tokens=2)
ALONE = ParallelLayout()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_kimi_linear(2)


@pytest.fixture(scope="module")
def captured(model: nn.Module) -> StepGraph:
    return capture(model)


def layout(dcp_rank: int = 0, dcp_size: int = 2, tp_size: int = 1) -> ParallelLayout:
    """A rank's place without processes: enough to compile, not to run."""
    group = SimpleNamespace(group_name="ranks")
    return ParallelLayout(tp_size=tp_size, tp_rank=dcp_rank, dcp_size=dcp_size, dcp_rank=dcp_rank, dcp_group=group)


def test_an_engine_has_what_its_settings_ask_for(captured: StepGraph) -> None:
    engine, report = compile_graph(captured, CONFIG, ALONE)
    assert engine.vocab_size == VOCAB and engine.device == torch.device("cpu")
    assert engine.step is not None and engine.verify is not None and engine.max_query_rows == 3
    columns = table_columns(CONFIG, 1)
    assert columns == 6  # 21 tokens and 2 more to look ahead, in pages of 4
    assert engine.pages.total == 3 * columns and engine.slots.total == 3
    shapes = {(ref.layer, ref.kind): tuple(tensor.shape) for ref, tensor in engine.states.items()}
    assert shapes[1, "kv_cache"] == (1 + 3 * columns, 4, 40)
    assert shapes[0, "state"] == (3, 4, 16, 16) and shapes[0, "pending_u"] == (3, 3, 4, 16)
    assert shapes[0, "conv_state"] == (3, 192, 3) and shapes[0, "conv_pending"] == (3, 192, 3)
    assert all((tensor == 0).all() for tensor in engine.states.values())


def test_the_report_has_every_pass_once_in_order(captured: StepGraph) -> None:
    _, report = compile_graph(captured, CONFIG, ALONE)
    assert [result.name for result in report.passes] == [module.__name__.rpartition(".")[2] for module in PASSES]
    assert report.choice.name == "torch" and report.layout == "split"
    assert report.graph.prologue is not None


def test_what_a_backend_is_asked_for_comes_from_the_graph(captured: StepGraph) -> None:
    _, report = compile_graph(captured, CONFIG, ALONE)
    need = report.requirements
    assert (need.latent, need.rope, need.heads, need.page_size) == (32, 8, 4, 4)
    assert (need.device_type, need.query_dtype, need.kv_dtype) == ("cpu", torch.float32, torch.float32)
    assert need.causal and need.ragged and not need.cuda_graphs and need.compute_capability is None
    _, sharded = compile_graph(captured, CONFIG, layout(tp_size=2))
    assert (sharded.requirements.heads, sharded.requirements.dcp_size) == (8, 2)
    _, replicated = compile_graph(captured, CONFIG, layout())
    assert (replicated.requirements.heads, replicated.requirements.dcp_size) == (4, 2)


@pytest.mark.parametrize("chunk, tokens, rows", [(6, 2, 6), (1, 2, 3), (1, 0, 1)])
def test_a_backend_must_take_the_rows_of_a_prompt_chunk_and_of_a_verify_step(
    captured: StepGraph, chunk: int, tokens: int, rows: int
) -> None:
    _, report = compile_graph(captured, CONFIG.replace(prefill_chunk=chunk, num_speculative_tokens=tokens), ALONE)
    assert report.requirements.query_rows == rows
    assert report.requirements.ragged == (rows > 1)


def test_prompts_of_one_request_are_never_ragged(captured: StepGraph) -> None:
    _, report = compile_graph(captured, CONFIG.replace(max_batch_size=1), ALONE)
    assert not report.requirements.ragged


def test_without_speculation_there_is_no_verify_program(captured: StepGraph) -> None:
    engine, _ = compile_graph(captured, CONFIG.replace(num_speculative_tokens=0), ALONE)
    assert engine.verify is None and engine.max_query_rows == 1


@pytest.mark.parametrize("asked, used, calls", [
    ("auto", "split", {"dcp::mla_prefix": 1, "dcp::mla_tail": 1, "dcp::mla_rows": 0}),
    ("split", "split", {"dcp::mla_prefix": 1, "dcp::mla_tail": 1, "dcp::mla_rows": 0}),
    ("flattened", "flattened", {"dcp::mla_prefix": 0, "dcp::mla_tail": 0, "dcp::mla_rows": 1}),
])  # fmt: skip
def test_the_layout_is_the_backends_best_unless_named(captured: StepGraph, asked: str, used: str, calls: dict) -> None:
    _, report = compile_graph(captured, CONFIG.replace(decode_layout=asked), ALONE)
    assert report.layout == used
    found = census(report.graph.graph)
    assert {name: found[name] for name in calls} == calls


def test_a_captured_step_can_be_compiled_again(captured: StepGraph) -> None:
    before = [node.format_node() for node in captured.graph.nodes]
    prints = {graph_fingerprint(compile_graph(captured, CONFIG, ALONE)[1].graph) for _ in range(2)}
    assert len(prints) == 1 and [node.format_node() for node in captured.graph.nodes] == before
    assert captured.sites == [] and captured.prologue is None


def test_ranks_compile_graphs_with_one_fingerprint(captured: StepGraph) -> None:
    reports = [compile_graph(captured, CONFIG, layout(rank))[1] for rank in (0, 1)]
    assert graph_fingerprint(reports[0].graph) == graph_fingerprint(reports[1].graph)


def test_engines_share_the_models_weights_and_nothing_else(model: nn.Module, captured: StepGraph) -> None:
    one, other = (compile_graph(captured, CONFIG, ALONE)[0] for _ in range(2))
    ref = StateRef(1, "kv_cache")
    assert one.states[ref].data_ptr() != other.states[ref].data_ptr()
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    assert {tensor.data_ptr() for tensor in captured.constants.values()} >= weights


def test_a_named_backend_that_cannot_serve_is_an_error_with_its_reasons(captured: StepGraph) -> None:
    with pytest.raises(BackendError, match=r"triton: .*device type cpu not supported \(supported: cuda\)"):
        compile_graph(captured, CONFIG.replace(backend="triton"), ALONE)
    with pytest.raises(BackendError, match="unknown attention backend 'cutlass'; known backends: .*torch"):
        compile_graph(captured, CONFIG.replace(backend="cutlass"), ALONE)


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("make, error, message", [
    (llama, UnsupportedModelError, "LlamaForCausalLM: .*not multi-head latent attention"),
    (lambda: tiny_kimi_linear(1), UnsupportedModelError, "KimiLinearForCausalLM has no MLA attention layer"),
    (lambda: vary(mla_variants.ScalesValues), MatchError, "layers.0.self_attn"),
], ids=["llama", "recurrent", "scaled"])  # fmt: skip
def test_a_model_that_cannot_be_compiled_is_left_as_it_was(make, error: type[Exception], message: str) -> None:
    model = make()
    before = state_of(model)
    with pytest.raises(error, match=message):
        compile_model(model, CONFIG, ALONE)
    assert changes(before, state_of(model)) == []


def test_a_report_is_a_fact(captured: StepGraph) -> None:
    _, report = compile_graph(captured, CONFIG, ALONE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.layout = "flattened"
