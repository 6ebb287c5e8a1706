# SPDX-License-Identifier: Apache-2.0
"""Weights that a step reads as one: where they lie, that they stay the model's parameters, and what still works with them."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import dcp_compile
from dcp_compile import DCPConfig, _compat, lower
from dcp_compile.capture import Joined, capture
from dcp_compile.compiler import compile_graph
from dcp_compile.errors import InvariantError
from dcp_compile.parallel import ParallelLayout
from dcp_compile.passes import cleanup
from tests.models.k3_dspark.tiny_draft import draft_for
from tests.runtime.reference import calm_kimi_k3
from tests.test_regions import Uncompiled
from tests.tiny_models import VOCAB, randomise, tiny_deepseek_v3, tiny_kimi_k3, tiny_kimi_linear

CONFIG = DCPConfig(block_size=4, max_batch_size=2, max_seq_len=40, prefill_chunk=8, num_speculative_tokens=2)
MODELS: dict[str, Callable] = {
    "kimi_k3": lambda: calm_kimi_k3(2),
    "kimi_linear": lambda: tiny_kimi_linear(2),
    "deepseek_v3": lambda: tiny_deepseek_v3(2),
}  # fmt: skip
SIBLINGS = ("gate_proj", "up_proj")


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return MODELS[request.param]()


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def bytes_of_storages(tensors: Iterable[Tensor]) -> int:
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())


def groups_of(model: nn.Module) -> list[list[str]]:
    """Names of parameters that lie one behind the other in memory, as joined ones do, by the weights joined last."""
    parameters = dict(model.named_parameters())
    wholes = {p.data_ptr(): known() for p, known in lower._wholes.items()}
    groups = []
    for whole in (wholes[p.data_ptr()] for p in parameters.values() if wholes.get(p.data_ptr()) is not None):
        inside = range(whole.data_ptr(), whole.data_ptr() + whole.nbytes)
        own = [(p.data_ptr(), name) for name, p in parameters.items() if p.data_ptr() in inside]
        groups.append([name for _, name in sorted(own)])
    return groups


def greedy(model: nn.Module, tokens: int = 6) -> Tensor:
    ids = torch.randint(3, VOCAB, (1, 7), generator=torch.Generator().manual_seed(1))
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 12)[None], use_cache=False).logits


def test_parameters_keep_what_they_are_in_no_more_memory(model: nn.Module) -> None:
    before = {name: (id(p), p.detach().clone(), p._version) for name, p in model.named_parameters()}
    size, plain = bytes_of_storages(model.parameters()), greedy(model)
    dcp_compile.optimize(model, config=CONFIG)
    assert torch.equal(greedy(model), plain)
    for name, parameter in model.named_parameters():
        same, values, version = before[name]
        assert id(parameter) == same and parameter._version == version and parameter.requires_grad
        assert parameter.is_leaf and parameter.is_contiguous() and torch.equal(parameter, values)
    assert bytes_of_storages(model.parameters()) == size
    groups = groups_of(model)
    assert len(groups) >= model.config.num_hidden_layers
    for names in groups:
        parts = [model.get_parameter(name) for name in names]
        assert len({name.split(".")[2] for name in names}) == 1  # of one layer
        assert all(two.data_ptr() == one.data_ptr() + one.nbytes for one, two in itertools.pairwise(parts))
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
    held = model._dcp.report.graph.constants.values()
    assert not any(isinstance(constant, Joined) for constant in held)
    spans = [range(t.data_ptr(), t.data_ptr() + t.nbytes) for t in held]
    assert all(any(p.data_ptr() in span for span in spans) for p in model.parameters())


def test_one_group_at_a_time_is_held_twice(monkeypatch) -> None:
    """While a group is copied, all groups before it have let go of what they were."""
    model, sizes = calm_kimi_k3(), []
    size = bytes_of_storages(model.parameters())
    captured = capture(model)
    new_empty = Tensor.new_empty

    def counting(self, *arguments, **options):
        out = new_empty(self, *arguments, **options)
        if type(self) is Tensor and type(out) is Tensor:
            held = bytes_of_storages([*model.parameters(), *captured.constants.values()])
            sizes.append((held + out.nbytes - size, out.nbytes))
        return out

    monkeypatch.setattr(Tensor, "new_empty", counting)
    compile_graph(captured, CONFIG.replace(num_speculative_tokens=0), ParallelLayout())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert len(sizes) >= len(groups_of(model)) and max(more - group for more, group in sizes) <= buffers


def test_all_programs_and_engines_of_a_model_read_the_same_memory(model: nn.Module) -> None:
    captured, size = capture(model), bytes_of_storages(model.parameters())
    engine = compile_graph(captured, CONFIG, ParallelLayout())
    first = addresses(model.parameters())
    others = [compile_graph(captured, CONFIG, ParallelLayout()), compile_graph(capture(model), CONFIG, ParallelLayout())]
    dcp_compile.optimize(model, config=CONFIG)
    assert addresses(model.parameters()) == first
    dcp_compile.unoptimize(model)
    dcp_compile.optimize(model, config=CONFIG.replace(num_speculative_tokens=0))
    assert addresses(model.parameters()) == first and bytes_of_storages(model.parameters()) == size
    del engine, others


def test_joined_weights_are_found_again_as_long_as_a_program_reads_them(model: nn.Module) -> None:
    engine, _ = compile_graph(capture(model), CONFIG, ParallelLayout())
    gc.collect()  # the graph and the report are gone
    first = addresses(model.parameters())
    others = compile_graph(capture(model), CONFIG, ParallelLayout())
    assert addresses(model.parameters()) == first
    del engine, others


def test_later_changes_of_parameters_are_seen(model: nn.Module) -> None:
    plain = randomise(copy.deepcopy(model), seed=5)
    dcp_compile.optimize(model, config=CONFIG)
    before = greedy(model, 12)
    model.load_state_dict(plain.state_dict())
    found = greedy(model, 12)
    assert not torch.equal(found, before) and torch.equal(found, greedy(plain, 12))
    name = groups_of(model)[-1][-1]
    with torch.no_grad():
        model.get_parameter(name).mul_(-3)
        plain.get_parameter(name).mul_(-3)
    assert torch.equal(greedy(model, 12), greedy(plain, 12))


def test_a_model_is_saved_copied_and_loaded_as_before(model: nn.Module, tmp_path: Path) -> None:
    wanted = logits(model)
    dcp_compile.optimize(model, config=CONFIG)
    assert groups_of(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    assert torch.equal(logits(loaded), wanted) and groups_of(loaded) == []
    dcp_compile.optimize(loaded, config=CONFIG)
    assert torch.equal(greedy(loaded), greedy(model)) and groups_of(loaded) == groups_of(model)

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < 1.5 * sum(tensor.nbytes for tensor in model.state_dict().values()) + 2**17
    file.seek(0)
    state = torch.load(file, weights_only=True)
    dcp_compile.unoptimize(model)
    twin = copy.deepcopy(model)
    assert groups_of(twin) == [] and torch.equal(logits(twin), wanted)
    for parameter in twin.parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(logits(model), wanted)
    twin.load_state_dict(state)
    assert torch.equal(logits(twin), wanted)
    twin.load_state_dict(state, assign=True)  # with the storages of the file
    dcp_compile.optimize(twin, config=CONFIG)
    assert torch.equal(greedy(twin), greedy(loaded))


def test_what_tells_tensors_by_their_storages_saves_them_all(model: nn.Module, tmp_path: Path) -> None:
    dcp_compile.optimize(model, config=CONFIG)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Accelerator(cpu=True).save_model(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in state)
    save_model(model, str(tmp_path / "all"))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    load_model(model, tmp_path / "all")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    dcp_compile.unoptimize(model)
    pickled = pickle.dumps(model)
    assert len(pickled) < 1.2 * sum(tensor.nbytes for tensor in state.values()) + 2**19
    assert bytes_of_storages(pickle.loads(pickled).parameters()) == bytes_of_storages(model.parameters())


def test_a_model_may_be_converted_and_optimised_again() -> None:
    model = calm_kimi_k3()
    dcp_compile.optimize(model, config=CONFIG)
    dcp_compile.unoptimize(model)
    model.double()
    assert groups_of(model) == []
    model.config._experts_implementation = "batched_mm"  # the default has no float64 kernel
    plain = greedy(model)
    dcp_compile.optimize(model, config=CONFIG)
    assert torch.equal(greedy(model), plain) and groups_of(model)


def test_drafts_are_joined_too() -> None:
    target = calm_kimi_k3()
    draft = draft_for(target)
    size = bytes_of_storages(draft.parameters())
    dcp_compile.optimize(target, config=CONFIG, draft=draft)
    results = {result.name: result.matches for result in target._dcp.draft_report.passes}
    groups = groups_of(draft)
    assert results["join_projections"] == sum(len(names) - 1 for names in groups) > 0
    assert bytes_of_storages(draft.parameters()) == size
    dcp_compile.unoptimize(target)
    dcp_compile.optimize(target, config=CONFIG, draft=draft)
    assert groups_of(draft) == groups and bytes_of_storages(draft.parameters()) == size


def test_tied_weights_stay_tied() -> None:
    model = tiny_deepseek_v3(1, first_k_dense_replace=1, tie_word_embeddings=True)
    model.tie_weights()
    plain = greedy(model)
    dcp_compile.optimize(model, config=CONFIG)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(greedy(model), plain)
    assert not any("embed_tokens" in name for names in groups_of(model) for name in names)


# --- compilation that fails ------------------------------------------------------------------------------------------


def failing_pass(monkeypatch) -> None:
    def check(graph, context) -> None:
        raise InvariantError("on purpose")

    monkeypatch.setattr(cleanup, "check", check)


def failing_compiler(monkeypatch) -> None:
    """At the last region of the verify program."""
    compiled = Uncompiled()
    monkeypatch.setattr(_compat, "compile_graph", compiled)
    compile_graph(capture(tiny_kimi_k3(2)), CONFIG.replace(lowering="inductor"), ParallelLayout())
    remaining = itertools.count(len(compiled.graphs) - 1, -1)

    def compiler(module, inputs):
        if not next(remaining):
            raise InvariantError("on purpose")
        return module

    monkeypatch.setattr(_compat, "compile_graph", compiler)


@pytest.mark.parametrize("failing", [failing_pass, failing_compiler])
def test_nothing_has_moved_when_compilation_fails(monkeypatch, failing: Callable) -> None:
    failing(monkeypatch)
    model = tiny_kimi_k3(2)
    before = addresses(model.parameters())
    with pytest.raises(InvariantError, match="on purpose"):
        dcp_compile.optimize(model, config=CONFIG.replace(lowering="inductor"))
    assert addresses(model.parameters()) == before and groups_of(model) == []


@pytest.mark.slow
def test_inductor_takes_slices_of_products() -> None:
    """Bodies that Inductor compiles, on joined weights, for any number of rows."""
    model = tiny_kimi_linear(2, num_local_experts=2)
    plain = greedy(model, 4)
    dcp_compile.optimize(model, config=CONFIG.replace(num_speculative_tokens=0, lowering="inductor"))
    assert torch.equal(greedy(model, 4), plain)
    assert {name.rpartition(".")[0].rpartition(".")[2] for names in groups_of(model) for name in names} > set(SIBLINGS)
