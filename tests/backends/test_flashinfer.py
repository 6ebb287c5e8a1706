# SPDX-License-Identifier: Apache-2.0
"""The flashinfer backend: its call against the library's signature, and on a GPU its results against the reference."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math

import pytest
import torch
from torch import Tensor

import dcp_compile
from dcp_compile.backends import FlashInferBackend, get_backend, select_backend
from dcp_compile.backends.flashinfer_backend import installed_version_problem
from dcp_compile.errors import BackendError, InvariantError
from dcp_compile.ops import mla
from tests.backends import library
from tests.backends.capabilities import NEED
from tests.backends.fake_flashinfer import BatchMLAPagedAttentionWrapper, install
from tests.tiny_models import tiny_kimi_k3

KIMI = dataclasses.replace(NEED, latent=512, rope=64, heads=96, page_size=64, layout="auto")
SCALE = 192**-0.5

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
    pytest.mark.skipif(installed_version_problem() is not None, reason=str(installed_version_problem())),
]


@pytest.mark.parametrize("version, problem", [
    ("0.6.13", None), ("0.7.2.post1", None), ("1.0", None),
    ("0.6.12", "flashinfer-python 0.6.12 is installed; 0.6.13 or later is needed"),
    (None, "flashinfer-python is not installed"),
])  # fmt: skip
def test_what_is_installed_must_be_new_enough(monkeypatch, version: str | None, problem: str | None) -> None:
    def installed(name: str) -> str:
        assert name == "flashinfer-python"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert installed_version_problem() == problem


def test_it_comes_after_hopper_and_before_triton(monkeypatch) -> None:
    for name in ("flashinfer", "triton", "hopper"):
        monkeypatch.setattr(type(get_backend(name)), "unavailable", lambda self: None)
    assert select_backend(KIMI).name == "hopper"
    assert select_backend(KIMI, "flashinfer").name == "flashinfer"
    monkeypatch.setattr(type(get_backend("hopper")), "unavailable", lambda self: "triton 3.7 is installed")
    choice = select_backend(KIMI)
    assert choice.name == "flashinfer" and choice.rejected == {"hopper": ["triton 3.7 is installed"]}
    flattened = select_backend(dataclasses.replace(KIMI, layout="flattened"))
    assert flattened.name == "triton"
    assert flattened.rejected["flashinfer"] == ["decode layout flattened not supported (supported: split)"]


@pytest.mark.parametrize("name", ["flashinfer_blackwell", "tokenspeed"])
def test_blackwell_backends_are_refused_on_hopper_with_the_reason(name: str) -> None:
    reason = r"compute capability \(9, 0\) not supported \(supported: \(10, 0\), \(10, 3\)\)"
    with pytest.raises(BackendError, match=reason):
        select_backend(KIMI, name)


@pytest.mark.parametrize("name", ["flashinfer_blackwell", "tokenspeed"])
def test_blackwell_backends_name_the_library_that_is_missing(monkeypatch, name: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda wanted: None)
    missing = get_backend(name).unavailable()
    assert missing.endswith("is not installed")
    need = dataclasses.replace(KIMI, compute_capability=(10, 0))
    with pytest.raises(BackendError, match=f"{name}: {missing};"):
        select_backend(need, name)


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_the_call_and_the_stand_in_have_flashinfers_signature(method: str) -> None:
    source = library.flashinfer_source("mla/_core.py")
    names, required = library.parameters(source, method, of="BatchMLAPagedAttentionWrapper")
    own = getattr(BatchMLAPagedAttentionWrapper, method).__code__
    assert names == {*own.co_varnames[1 : own.co_argcount]}
    defaults = getattr(BatchMLAPagedAttentionWrapper, method).__defaults__
    assert required == {*own.co_varnames[1 : own.co_argcount - len(defaults)]}


def test_calls_outside_of_their_plan_are_defects(monkeypatch) -> None:
    install(monkeypatch)
    backend = FlashInferBackend()
    query, cache = torch.zeros(2, 96, 576), torch.zeros(2, 64, 576)
    given = query[..., :512], query[..., 512:], cache, torch.ones(1, 1).int(), torch.tensor([5])
    with pytest.raises(InvariantError, match="outside of a plan"):
        backend.attend_prefix(*given, SCALE)
    with pytest.raises(BackendError, match='use decode_layout="split"'):
        backend.attend_rows(*given[:4], torch.zeros(2), torch.tensor([5, 5]), SCALE)
    plan = backend.plan(KIMI, SCALE, torch.device("cpu"), None)
    plan.update(torch.ones(1, 1).int(), torch.tensor([5]), 1)
    with plan, pytest.raises(InvariantError, match="2 rows with scale .* planned for 1"):
        backend.attend_prefix(*given, SCALE)
    plan.update(torch.ones(1, 1).int(), torch.tensor([5]), 2)
    with plan:
        with pytest.raises(InvariantError, match="with scale 0.5, planned for 2"):
            backend.attend_prefix(*given, 0.5)
        out, lse = backend.attend_prefix(*given, SCALE)
    torch.testing.assert_close(lse, torch.full((2, 96), math.log(5)))
    assert backend.plan_in_force is None


class Problem:
    """Fresh queries and a cache whose unseen pages are NaN; lengths may be drawn again."""

    def __init__(self, batch: int, rows: int, columns: int, seed: int, heads: int = 96, page: int = 64) -> None:
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.batch, self.rows, self.page, self.columns = batch, rows, page, columns
        self.cache = torch.empty(1 + batch * columns, page, 576, device="cuda", dtype=torch.bfloat16)
        self.query = torch.empty(batch * rows, heads, 576, device="cuda", dtype=torch.bfloat16)
        self.need = dataclasses.replace(KIMI, heads=heads, page_size=page)

    def draw(self, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """New queries, keys and pages; host tensors of block table and bounds."""
        self.query.normal_(generator=self.generator)
        self.cache.normal_(generator=self.generator)
        order = torch.randperm(self.batch * self.columns, generator=self.generator, device="cuda").cpu().int() + 1
        table, bounds = order.view(self.batch, self.columns), torch.tensor(lengths)
        for row, bound in enumerate(lengths):
            self.cache[table[row, -(-bound // self.page) :].long()] = torch.nan
        return table, bounds

    def operands(self, table: Tensor, bounds: Tensor) -> tuple:
        halves = self.query[..., :512], self.query[..., 512:]
        return *halves, self.cache, table.cuda(), bounds.int().cuda(), SCALE


def assert_like_the_reference(found: tuple[Tensor, Tensor], operands: tuple) -> None:
    """bfloat16 results within the rounding of weights and outputs; rows without keys exactly."""
    exact = [part.double() if part.is_floating_point() else part for part in operands[:-1]]
    out, lse = mla.attend_prefix(*exact, operands[-1])
    empty = lse == -math.inf
    assert torch.equal(found[1] == -math.inf, empty)
    assert found[0][empty].eq(0).all() and found[0].isfinite().all()
    torch.testing.assert_close(found[1][~empty].double(), lse[~empty].double(), rtol=0, atol=2e-4)
    error = (found[0].double() - out).norm() / out.norm().clamp_min(1e-30)
    assert error < 5e-3, f"relative error {error:.1e}"


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("batch, rows, columns, heads, page", [
        (1, 1, 9, 96, 64), (4, 8, 20, 96, 64), (3, 2, 300, 48, 64), (2, 5, 40, 7, 16), (2, 256, 6, 96, 64),
    ])  # fmt: skip
    def test_prefixes_equal_the_reference(self, batch, rows, columns, heads, page, fresh_seed: int) -> None:
        problem = Problem(batch, rows, columns, fresh_seed, heads, page)
        backend = get_backend("flashinfer")
        plan = backend.plan(problem.need, SCALE, torch.device("cuda"), None)
        most = columns * page
        for lengths in ([most] * batch, [0] * batch, [1, 0, page, most - 1][-batch:], [most // 2 + 1] * batch):
            table, bounds = problem.draw(lengths)
            plan.update(table, bounds, rows)
            operands = problem.operands(table, bounds)
            with plan:
                found = backend.attend_prefix(*operands)
            assert_like_the_reference(found, operands)
            assert found[0].is_contiguous() and found[1].dtype == torch.float32

    def test_a_captured_call_follows_its_plan(self, fresh_seed: int) -> None:
        """Replays with other lengths, pages, queries and keys equal calls that are planned anew, bit for bit."""
        problem = Problem(4, 8, 80, fresh_seed)
        backend = get_backend("flashinfer")
        captured = backend.plan(problem.need, SCALE, torch.device("cuda"), (4, 80))
        fresh = backend.plan(problem.need, SCALE, torch.device("cuda"), None)
        table, bounds = problem.draw([0] * 4)
        captured.update(table, bounds, 8)
        operands = problem.operands(table, bounds)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), captured:
            for _ in range(3):
                backend.attend_prefix(*operands)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), captured:
            found = backend.attend_prefix(*operands)
        for lengths in ([5000, 1, 64, 0], [0, 0, 0, 0], [5120] * 4, [63, 65, 4999, 1], [1, 0, 0, 5120]):
            table, bounds = problem.draw(lengths)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                captured.update(table, bounds, 8)
                graph.replay()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            operands = problem.operands(table, bounds)
            assert_like_the_reference(found, operands)
            fresh.update(table, bounds, 8)
            with fresh:
                again = backend.attend_prefix(*operands)
            assert all(map(torch.equal, found, again))

    def test_plans_that_follow_one_another_at_once_do_not_mix(self, fresh_seed: int) -> None:
        """Each replay is enqueued behind the last one's work; its plan must not reach into that."""
        problem = Problem(2, 8, 400, fresh_seed)
        backend = get_backend("flashinfer")
        plan = backend.plan(problem.need, SCALE, torch.device("cuda"), (2, 400))
        table, _ = problem.draw([25600] * 2)
        plan.update(table, torch.tensor([25600, 25600]), 8)
        operands = problem.operands(table, torch.tensor([25600, 25600]))
        with plan:
            backend.attend_prefix(*operands)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), plan:
            out, lse = backend.attend_prefix(*operands)
        rounds, found = [[25600 - 97 * i, 1 + 1000 * i] for i in range(20)], []
        for lengths in rounds:
            plan.update(table, torch.tensor(lengths), 8)
            graph.replay()
            found.append((out.clone(), lse.clone()))
        for lengths, result in zip(rounds, found):
            assert_like_the_reference(result, problem.operands(table, torch.tensor(lengths)))

    @pytest.mark.parametrize("cuda_graphs", [True, False])
    def test_logits_are_those_of_the_triton_backend(self, cuda_graphs: bool, fresh_seed: int) -> None:
        """A bfloat16 Kimi-K3 with real attention sizes along fixed tokens, across several plans."""
        model = wide_model(fresh_seed)
        limits = {"max_batch_size": 3, "max_seq_len": 512, "num_speculative_tokens": 3}
        config = dcp_compile.DCPConfig(cuda_graphs=cuda_graphs, **limits)
        prompts = [torch.randint(3, 100, (length,)) for length in (150, 1, 70)]
        logits = {}
        for name in ("flashinfer", "triton"):
            dcp_compile.optimize(model, backend=name, config=config)
            assert model._dcp.report.choice.name == name
            logits[name] = walk(model._dcp_engine, prompts)
            dcp_compile.unoptimize(model)
        error = (logits["flashinfer"] - logits["triton"]).norm() / logits["triton"].norm()
        assert error < 3e-2, f"relative error {error:.1e}"


def wide_model(seed: int) -> torch.nn.Module:
    """Two layers, the second with attention over a latent of 512 and a rope key of 64; dense, as routing may flip."""
    return tiny_kimi_k3(
        2, seed, dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        first_k_dense_replace=2,
    ).cuda()  # fmt: skip


def walk(engine, prompts: list[Tensor]) -> Tensor:
    """Logits along fixed tokens: prompts, then verify and decode steps past the longest tail."""
    generator = torch.Generator().manual_seed(5)
    found = []
    with engine.open(len(prompts), 400) as session:
        found.append(session.prefill(prompts))
        for _ in range(30):
            tokens = torch.randint(3, 100, (len(prompts), 4), generator=generator)
            found.append(session.verify(tokens, [4, 4, 2])[:, :2].flatten(0, 1))
            session.commit([4, 3, 2])
            found.append(session.decode(tokens[:, 0], [True] * len(prompts)))
    return torch.cat(found)
