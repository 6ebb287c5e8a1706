# SPDX-License-Identifier: Apache-2.0
"""Backends that make every row a request of its own: what they ask of their library, and make of its answer."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from dcp_compile.backends import flashinfer_blackwell, get_backend, tokenspeed
from dcp_compile.ops import mla
from tests.backends import library

LATENT, ROPE, HEADS, PAGE = 512, 64, 3, 64
SCALE = 0.07


def problem(batch: int, rows: int, longest: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """Operands of ``attend_rows`` up to the requests, and ragged bounds with empty rows; what no row sees is NaN."""
    generator = torch.Generator().manual_seed(seed)
    columns = -(-longest // PAGE)
    cache = torch.randn(1 + batch * columns, PAGE, LATENT + ROPE, generator=generator)
    table = torch.randperm(batch * columns, generator=generator).view(batch, columns).int() + 1
    bounds = torch.randint(0, longest + 1, (batch, rows), generator=generator).int()
    bounds[0, 0], bounds[-1, -1] = 0, longest
    query = torch.randn(batch * rows, HEADS, LATENT + ROPE, generator=generator)
    requests = torch.arange(batch, dtype=torch.int32).repeat_interleave(rows)
    return [query[..., :LATENT], query[..., LATENT:], cache, table, requests], bounds.flatten()


def dense(query: Tensor, cache: Tensor, pages: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What such a library computes: NaN and whatever it likes for rows without keys."""
    rows = query[:, 0, :, :LATENT], query[:, 0, :, LATENT:]
    out, lse = mla.attend_rows(*rows, cache, pages, torch.arange(len(query)), bounds, scale)
    empty = bounds == 0
    return out.masked_fill(empty[:, None, None], math.nan)[:, None], lse.masked_fill(empty[:, None], math.inf)


def flashinfer_call(asked: list[dict]) -> Callable:
    def trtllm_batch_decode_with_kv_cache_mla(**given):
        asked.append(given)
        operands = given["query"], given["kv_cache"], given["block_tables"], given["seq_lens"], given["bmm1_scale"]
        return dense(*operands)

    return trtllm_batch_decode_with_kv_cache_mla


def tokenspeed_call(asked: list[dict]) -> Callable:
    def tokenspeed_mla_decode(*, local_visible_lens, **given):
        asked.append({**given, "local_visible_lens": local_visible_lens})
        assert torch.equal(local_visible_lens[:, 0], given["seq_lens"])
        operands = given["query"], given["kv_cache"], given["block_tables"], given["seq_lens"], given["softmax_scale"]
        out, lse = dense(*operands)
        return out, (lse / math.log(2))[:, None]

    return tokenspeed_mla_decode


LIBRARIES = {
    "flashinfer_blackwell": (("flashinfer", "flashinfer.mla"), flashinfer_call, flashinfer_blackwell),
    "tokenspeed": (("tokenspeed_mla",), tokenspeed_call, tokenspeed),
}


@pytest.fixture(params=LIBRARIES)
def backend(request, monkeypatch: pytest.MonkeyPatch):
    """The backend with its library replaced, and the list of what that is asked."""
    modules, make, module = LIBRARIES[request.param]
    asked: list[dict] = []
    for name in modules:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    call = make(asked)
    setattr(sys.modules[modules[-1]], call.__name__, call)
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 64)
    return get_backend(request.param), asked


@pytest.mark.parametrize("batch, rows, longest", [(1, 1, 1), (3, 4, 200), (2, 7, 64)])
def test_rows_equal_the_reference(backend, batch: int, rows: int, longest: int, fresh_seed: int) -> None:
    served, asked = backend
    operands, bounds = problem(batch, rows, longest, fresh_seed)
    out, lse = served.attend_rows(*operands, bounds, SCALE)
    wanted = mla.attend_rows(*operands, bounds, SCALE)
    torch.testing.assert_close(out, wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, wanted[1], rtol=1e-5, atol=1e-5)
    assert lse[0].eq(-math.inf).all() or batch * rows == 1
    assert out.shape == operands[0].shape and lse.shape == out.shape[:2]
    assert asked[0]["block_tables"].shape[1] % 2 == 0, "two pages of 64 make a tile of keys"


@pytest.mark.parametrize("rows", [1, 5])
def test_a_prefix_is_rows_with_one_bound(backend, rows: int, fresh_seed: int) -> None:
    served, _ = backend
    operands, _ = problem(3, rows, 130, fresh_seed)
    bounds = torch.tensor([0, 130, 65], dtype=torch.int32)
    found = served.attend_prefix(*operands[:4], bounds, SCALE)
    for one, other in zip(found, mla.attend_prefix(*operands[:4], bounds, SCALE)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_the_blackwell_call_passes_flashinfers_own_checks(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Every keyword is in the installed library's signature, and its shape check takes every shape of ours."""
    source = library.flashinfer_source("mla/_core.py")
    asked: list[dict] = []
    fake = ModuleType("flashinfer.mla")
    fake.trtllm_batch_decode_with_kv_cache_mla = flashinfer_call(asked)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", fake)
    monkeypatch.setattr(flashinfer_blackwell, "WORKSPACE_BYTES", 64)
    backend = get_backend("flashinfer_blackwell")
    operands, bounds = problem(2, 3, columns * PAGE, columns)
    backend.attend_rows(*operands, bounds, SCALE)
    (given,) = asked
    names, required = library.parameters(source, "trtllm_batch_decode_with_kv_cache_mla")
    assert required <= set(given) <= names
    check = library.functions(
        source, "_check_trtllm_gen_mla_shape",
        uses=library.functions(library.flashinfer_source("utils.py"), "_check_block_tables_shape"),
        also=(
            "MLAHeadDimensions", "deepseek_mla_dimensions", "smaller_mla_dimensions", "supported_mla_head_dimensions",
        ),
    )["_check_trtllm_gen_mla_shape"]  # fmt: skip
    shapes = given["query"], given["kv_cache"], given["kv_lora_rank"], given["qk_rope_head_dim"]
    checked = check(*shapes, 0, given["block_tables"], given["kv_cache"].shape[1])
    assert checked.shape == (given["kv_cache"].shape[0], 1, PAGE, LATENT + ROPE)
    if columns % 2:
        with pytest.raises(ValueError, match="block_num"):
            check(*shapes, 0, given["block_tables"][:, :columns], PAGE)
    cutlass = library.Anything()
    kernel = library.flashinfer_source("cute_dsl/attention/monolithic/mla_decode_fp16.py")
    can = library.functions(kernel, "can_implement", uses={"cutlass": cutlass})["can_implement"]
    dtypes = [cutlass.BFloat16, cutlass.BFloat16, cutlass.Float32, cutlass.Float32]
    for heads in (1, 96, 128, 129):
        for page in (1, 2, 64, 128, 256):
            sizes = 1, given["query"].shape[1], 1, heads, LATENT, ROPE
            taken = can(*sizes, *dtypes, (128, 128), (128, 256), False, True, False, page)
            have = backend.capabilities
            assert taken == (heads in have.head_counts and page in have.page_sizes), (heads, page)


@pytest.mark.parametrize("blocks", [132, 148, 160])
def test_flashinfers_scratch_memory_does_not_grow_with_gathered_heads(blocks: int) -> None:
    """What the library takes of it, log-sum-exps included, by its own count: partials of at most one tile per block."""
    kernel = library.flashinfer_source("cute_dsl/attention/monolithic/mla_decode_fp16.py")
    splits = library.functions(kernel, "get_split_kv_simplified")["get_split_kv_simplified"]
    size = library.functions(kernel, "get_workspace_size")["get_workspace_size"]
    float32 = SimpleNamespace(width=32)
    largest = [
        max(size(heads, 1, LATENT, rows, splits(rows, 1, blocks), float32) for rows in range(1, 2 * blocks))
        for heads in (1, 12, 96, 128)
    ]
    assert 0 < largest[0] <= flashinfer_blackwell.WORKSPACE_BYTES
    assert len(set(largest)) == 1
