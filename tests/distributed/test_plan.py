# SPDX-License-Identifier: Apache-2.0
"""Cutting tensors: in memory, from files, from experts that are stored apart and in four bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dcp_compile.errors import ConfigError, UnsupportedModelError
from dcp_compile.models.kimi_k3 import mxfp4
from dcp_compile.models.kimi_k3.weights import FusedExperts
from dcp_compile.parallel.parts import sum_output
from dcp_compile.parallel import ParallelLayout
from dcp_compile.parallel.loading import CheckpointFiles
from dcp_compile.parallel.plan import TRANSFORMERS_HEADS, Split, find_plan, plan_splits
from dcp_compile.parallel.shard import ModelShard, count_query_ranks, take_part
from tests.models.k3_dspark.tiny_draft import tiny_draft
from tests.tiny_models import tiny_deepseek_v3


@pytest.mark.parametrize("split", [Split(0), Split(1), Split(2), Split(1, parts=2)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_make_up_the_whole(split: Split, size: int) -> None:
    whole = torch.randn(8, 24, 4).transpose(0, 2).contiguous().transpose(0, 2)  # not contiguous
    parts = [split.cut(whole, whole.shape, rank, size) for rank in range(size)]
    assert all(part.is_contiguous() and part.numel() * size == whole.numel() for part in parts)
    stacks = zip(*(part.chunk(split.parts, split.dim) for part in parts))
    assert torch.cat([torch.cat(stack, split.dim) for stack in stacks], split.dim).equal(whole)


@pytest.mark.parametrize("split", [Split(0, sharers=2), Split(1, sharers=4), Split(1, parts=2, sharers=2)])
def test_neighbours_share_what_their_parts_make_up(split: Split) -> None:
    whole = torch.randn(8, 16, 4)
    for rank in range(4):
        group = dataclasses.replace(split, sharers=1)
        wanted = group.cut(whole, whole.shape, rank // split.sharers, 4 // split.sharers)
        assert split.cut(whole, whole.shape, rank, 4).equal(wanted)


def test_nothing_to_cut() -> None:
    assert Split(0).cut(torch.empty(0, 3), (0, 3), 1, 2).shape == (0, 3)
    assert Split(1, parts=2).cut(torch.empty(0, 8, 3), (0, 8, 3), 1, 2).shape == (0, 4, 3)


@pytest.mark.parametrize("stored", ["dense", "mxfp4"])
@pytest.mark.parametrize("split", [Split(0), Split(1, parts=2), Split(2)])
def test_experts_that_are_stored_apart(stored: str, split: Split) -> None:
    """Columns of a rank begin and end within a group of 32 that shares a scale."""
    experts, rows, columns, size = 4, 8, 96, 4
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(experts, 2, rows, columns, generator=generator)
    sources = [[(matrix,) for matrix in expert] for expert in matrices]
    if stored == "mxfp4":
        sources = [[mxfp4.encode(matrix) for matrix in expert] for expert in matrices]
        matrices = torch.stack([torch.stack([mxfp4.decode(*matrix) for matrix in expert]) for expert in sources])
    shape = (experts, 2 * rows, columns)
    fused, whole = FusedExperts(sources, shape, torch.float32), matrices.reshape(shape)
    assert fused[...].equal(whole)
    for rank in range(size):
        assert split.cut(fused, shape, rank, size).equal(split.cut(whole, shape, rank, size))


def test_files_are_mapped_one_at_a_time_and_what_is_read_is_counted(tmp_path: Path) -> None:
    tensors = {name: torch.randn(4, 6) for name in "abc"}
    paths = [tmp_path / f"{name}.safetensors" for name in tensors]
    for path, (name, tensor) in zip(paths, tensors.items()):
        save_file({name: tensor}, path)
    files = CheckpointFiles(paths)
    entries = files.entries()

    def mapped() -> int:
        return len({line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()
                    if line.endswith(".safetensors") and str(tmp_path) in line})  # fmt: skip

    assert mapped() == 0 and files.bytes_read == 0
    kept = []
    for name in "abca":
        kept.append(entries[name][:, 2:4])
        assert kept[-1].equal(tensors[name][:, 2:4]) and kept[-1].is_contiguous() and mapped() == 1
    assert files.bytes_read == 4 * 4 * 2 * 4
    files.close()
    assert mapped() == 0


@pytest.mark.parametrize("change", ["value", "name", "shape"])
def test_the_fingerprint_of_files_sees_other_files(tmp_path: Path, change: str) -> None:
    tensor = torch.randn(16, 8)
    other = {"value": tensor + 1, "name": tensor, "shape": tensor.view(8, 16)}[change]
    for folder, content in (("one", {"a": tensor}), ("two", {"b" if change == "name" else "a": other})):
        (tmp_path / folder).mkdir()
        save_file(content, tmp_path / folder / "model.safetensors")
    one, two = (CheckpointFiles([tmp_path / folder / "model.safetensors"]).fingerprint() for folder in ("one", "two"))
    assert one != two and len(one) == 16


def test_a_bias_is_added_once_to_the_sum() -> None:
    """Two ranks whose partial sums are equal."""
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    shard = ModelShard(2, 0, None, False, 1, {})
    shard.all_reduce = lambda part: 2 * part
    wanted = 2 * x @ layer.weight.T + layer.bias
    sum_output(shard, layer)
    torch.testing.assert_close(layer(x), wanted)
    shard.restore()
    torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias)


@pytest.mark.parametrize("part, place, message", [
    ((2, 1), (1, 2), "tp_size=1, but K3DSparkModel was loaded with tp_size=2"),
    ((4, 1), (2, 2), "tp_size=2, but K3DSparkModel was loaded with tp_size=4"),
    ((4, 4), (4, 2), 'dcp_size=2, but K3DSparkModel was loaded with query_projection="replicated" and dcp_size=4'),
])  # fmt: skip
def test_a_draft_that_was_loaded_for_other_ranks_than_its_target(part: tuple, place: tuple, message: str) -> None:
    draft = tiny_draft(0)
    shard = ModelShard(part[0], 0, None, False, part[1], {})
    vars(draft)["_dcp_shard"] = shard
    with pytest.raises(ConfigError, match=message):
        take_part(draft, ParallelLayout(tp_size=place[0], dcp_size=place[1], tp_group="its own"), False, "sharded")
    assert shard.group is None


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)])
def test_queries_are_replicated_where_they_would_be_gathered(sizes: tuple[int, int]) -> None:
    assert count_query_ranks("sharded", *sizes) == 1 and count_query_ranks("replicated", 4, 2) == 2
    message = f'query_projection="replicated" with tp_size={sizes[0]}, dcp_size={sizes[1]}: .* leave it "sharded"'
    with pytest.raises(ConfigError, match=message):
        count_query_ranks("replicated", *sizes)


def test_queries_of_models_without_a_plan_of_their_own_are_not_replicated() -> None:
    model = tiny_deepseek_v3(1)
    assert find_plan(model, expert_parallel=False, query_ranks=1) == TRANSFORMERS_HEADS
    with pytest.raises(UnsupportedModelError, match='"replicated", but the plan for DeepseekV3ForCausalLM'):
        find_plan(model, expert_parallel=False, query_ranks=2)


def test_biases_that_the_plan_does_not_split_are_refused() -> None:
    model = tiny_deepseek_v3(1)
    model.model.layers[0].self_attn.q_b_proj.bias = nn.Parameter(torch.zeros(4 * 24))
    with pytest.raises(UnsupportedModelError, match=r"layers.0.self_attn.q_b_proj.bias belongs to .* tp_size=2 splits"):
        plan_splits(model, TRANSFORMERS_HEADS, 2)


def test_a_model_that_cannot_be_split_to_the_end_is_whole_again(monkeypatch) -> None:
    """The last of its parts finds no memory."""
    model = tiny_deepseek_v3(2)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    cut, parts = Split.cut, iter(range(2 * 2))

    def last_fails(self: Split, *arguments: object) -> torch.Tensor:
        if next(parts, None) is None:
            raise torch.OutOfMemoryError("no memory")
        return cut(self, *arguments)

    monkeypatch.setattr(Split, "cut", last_fails)
    with pytest.raises(torch.OutOfMemoryError):
        take_part(model, ParallelLayout(tp_size=2, dcp_size=2), False, "sharded")
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert all(parameter.shape == wanted.shape for parameter, wanted in zip(model.parameters(), tiny_deepseek_v3(2).parameters()))
