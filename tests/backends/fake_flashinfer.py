# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's planned MLA wrapper in plain torch, and the flashinfer backend on a CPU with it."""

from __future__ import annotations

import dataclasses
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from dcp_compile.backends import FlashInferBackend, registry
from dcp_compile.ops import mla
from dcp_compile.ops._library import compute_dtype
from dcp_compile.runtime import planning


class BatchMLAPagedAttentionWrapper:
    """Plans by copying; runs from what it copied, as a captured kernel does. ``made`` lists all wrappers so far."""

    made: list[BatchMLAPagedAttentionWrapper] = []

    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
        kv_len_arr=None, backend="auto",
    ):  # fmt: skip
        assert backend == "fa3" and float_workspace_buffer.dtype == torch.uint8
        self.captured = use_cuda_graph
        self.buffers = [qo_indptr, kv_indptr, kv_indices, kv_len_arr]
        self.plans: list[dict] = []
        self.made.append(self)

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ):  # fmt: skip
        given = [qo_indptr, kv_indptr, kv_indices, kv_len_arr]
        assert all(tensor.device.type == "cpu" and tensor.dtype == torch.int32 for tensor in given)
        assert not causal and q_data_type == kv_data_type
        if self.captured:
            assert not self.plans or torch.equal(qo_indptr, self.buffers[0]), "a captured grid cannot change"
            for buffer, tensor in zip(self.buffers, given):
                buffer[: len(tensor)].copy_(tensor)
                assert buffer is self.buffers[2] or len(buffer) == len(tensor)
        else:
            self.buffers = [tensor.clone() for tensor in given]
        self.heads, self.page_size, self.scale = num_heads, page_size, sm_scale
        self.plans.append({"lengths": kv_len_arr.tolist(), "rows": int(qo_indptr[1])})

    def run(
        self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None,
        kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None,
    ):  # fmt: skip
        assert return_lse and q_nope.shape[1] == self.heads and ckv_cache.shape[1] == self.page_size
        dtype = compute_dtype(q_nope.dtype)
        out.fill_(math.nan)
        lse = torch.full(q_nope.shape[:2], math.nan, dtype=dtype)
        query = torch.cat([q_nope, q_pe], -1).to(dtype)
        for request, length in enumerate(self.buffers[3].tolist()):
            rows = slice(*self.buffers[0][request : request + 2].tolist())
            pages = self.buffers[2][slice(*self.buffers[1][request : request + 2].tolist())].long()
            keys = torch.cat([ckv_cache[pages], kpe_cache[pages]], -1).flatten(0, 1)[:length].to(dtype)
            scores = torch.einsum("thd,kd->thk", query[rows], keys) * self.scale
            lse[rows] = scores.logsumexp(-1)
            values = torch.einsum("thk,kr->thr", scores.softmax(-1), keys[:, : q_nope.shape[-1]])
            out[rows] = values.to(out.dtype)
        return out, lse if return_lse_base_on_e else lse / math.log(2)

    def reads(self) -> tuple[list[int], list[list[int]]]:
        """Lengths and page lists of the plan."""
        starts = self.buffers[1].tolist()
        pages = [self.buffers[2][first:last].tolist() for first, last in zip(starts, starts[1:])]
        return self.buffers[3].tolist(), pages


class PlannedOnCpu(FlashInferBackend):
    """The backend with what it declares of devices and sizes left out, and the reference for its tail.

    Every prefix call must be for what the prologue made of the step's inputs.
    """

    capabilities = dataclasses.replace(
        FlashInferBackend.capabilities, device_types=frozenset({"cpu"}), compute_capabilities=None, query_dtypes=None,
        kv_dtypes=None, latent_dims=None, rope_dims=None,
    )  # fmt: skip
    attend_tail = staticmethod(mla.attend_tail)

    def unavailable(self) -> None:
        return None

    def attend_prefix(self, q_latent, q_rope, kv_cache, block_table, prefix_bounds, scale) -> tuple[Tensor, Tensor]:
        lengths, pages = self.plan_in_force._wrapper.reads()
        assert lengths == prefix_bounds.tolist()
        counts = [-(-length // kv_cache.shape[1]) for length in lengths]
        assert pages == [row[:count] for row, count in zip(block_table.tolist(), counts)]
        return super().attend_prefix(q_latent, q_rope, kv_cache, block_table, prefix_bounds, scale)


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the wrapper in the place of the library, and the backend in that of the one for GPUs.

    Tails are kept so short that plans are renewed in sequences of some ten tokens.
    """
    patch.setattr(planning, "LONGEST_TAIL", 3)
    library = ModuleType("flashinfer.mla")
    library.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper
    patch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    patch.setitem(sys.modules, "flashinfer.mla", library)
    patch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    patch.setitem(registry._BACKENDS, "flashinfer", PlannedOnCpu())
    patch.setattr(BatchMLAPagedAttentionWrapper, "made", [])
