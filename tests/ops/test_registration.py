# SPDX-License-Identifier: Apache-2.0
"""Every operator against torch.library's own checks: schema, declared writes, shape rules, tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dcp_compile.errors import InvariantError
from dcp_compile.ops import markers, metadata
from tests.cases import normal, strided

dcp = torch.ops.dcp
BATCH, ROWS = 2, 3


def _step() -> tuple[Tensor, Tensor, Tensor]:
    """Positions with a padded row, block table, prefix lengths."""
    positions = torch.tensor([[4, 5, 6], [0, 1, -1]])
    return positions, torch.tensor([[2, 1], [3, 0]], dtype=torch.int32), torch.tensor([4, 0])


def _attention(kind: str) -> tuple:
    generator = torch.Generator().manual_seed(0)
    positions, table, _ = _step()
    q_latent = normal(generator, BATCH * ROWS, 2, 3, dtype=torch.float32)
    q_rope = normal(generator, BATCH * ROWS, 2, 1, dtype=torch.float32)
    cache = normal(generator, 4, 4, 4, dtype=torch.float32)
    requests, bounds = dcp.row_requests(positions), dcp.row_bounds(positions, 0, 1, 1)
    prefix = torch.tensor([3, 0], dtype=torch.int32)
    lengths = {"mla_rows": (requests, bounds), "mla_prefix": (prefix,), "mla_tail": (requests, prefix, bounds)}[kind]
    return (q_latent, q_rope, cache, table, *lengths, 0.5, "torch")


def _recurrent(verify: bool) -> tuple:
    generator = torch.Generator().manual_seed(1)
    positions, slots = _step()[0], torch.tensor([1, 0], dtype=torch.int32)

    def draw(*shape: int) -> Tensor:
        return normal(generator, *shape, dtype=torch.float32)

    rows = BATCH * ROWS
    q, k, v, g = draw(rows, 1, 2, 3), draw(rows, 1, 2, 3), draw(rows, 1, 2, 4), -draw(rows, 1, 2, 3).abs()
    pools = [draw(2, 2, 3, 4)]
    if verify:
        pools += [
            draw(2, ROWS, 2, 3),
            draw(2, ROWS, 2, 4),
            -draw(2, ROWS, 2, 3).abs(),
            torch.tensor([2, 0], dtype=torch.int32),
        ]
    return (q, k, v, g, draw(rows, 1, 2).sigmoid(), *pools, slots, positions, 0.5, True)


def _conv(verify: bool) -> tuple:
    generator = torch.Generator().manual_seed(2)
    positions, slots = _step()[0], torch.tensor([1, 0], dtype=torch.int32)
    x, state = normal(generator, BATCH * ROWS, 2, 1, dtype=torch.float32), torch.ones(2, 2, 3)
    records = (torch.ones(2, 2, ROWS), torch.tensor([1, 3], dtype=torch.int32)) if verify else ()
    return (x, state, *records, slots, positions)


def _merge() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return normal(generator, 2, 6, 3, 4, dtype=torch.float32), normal(generator, 2, 6, 3, dtype=torch.float32)


def _alone() -> str:
    """Name of the group of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD.group_name


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


CALLS: dict[str, Callable[[], tuple]] = {
    "row_bounds": lambda: (_step()[0], 1, 2, 1),
    "block_bounds": lambda: (_step()[0], 1, 2, 1),
    "row_requests": lambda: (_step()[0],),
    "cp_local_slot": lambda: (*_step()[:2], 4, 1, 2, 1),
    "prefix_bounds": lambda: (_step()[2], 1, 2, 1),
    "step_metadata": lambda: (*_step(), 4, 1, 2, 1),
    "block_metadata": lambda: (*_step(), 4, 1, 2, 1),
    "kv_write": lambda: (torch.ones(3, 2), torch.ones(3, 1), torch.zeros(2, 2, 3), torch.tensor([2, -1, 3])),
    "mla_rows": lambda: _attention("mla_rows"),
    "mla_prefix": lambda: _attention("mla_prefix"),
    "mla_tail": lambda: _attention("mla_tail"),
    "merge_partials": _merge,
    "merge_packed": lambda: (torch.randn(2, 6, 3, 5), 4),
    "gather_heads": lambda: (torch.randn(6, 3, 4), 1, _alone()),
    "merge_ranks": lambda: (*(part[0] for part in _merge()), 3, 1, _alone()),
    "own_heads": lambda: (torch.randn(2, 3, 6, 4), torch.tensor(2), 3),
    "conv_window": lambda: _conv(verify=False),
    "conv_window_verify": lambda: _conv(verify=True),
    "kda": lambda: _recurrent(verify=False),
    "kda_verify": lambda: _recurrent(verify=True),
}


def test_every_operator_is_checked_here() -> None:
    defined = {name.removeprefix("dcp::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("dcp::")}
    assert defined - {*markers.NAMES, *markers.SPANS} - set(CALLS) == set()
    assert set(metadata.NAMES) <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_operator_check(name: str) -> None:
    torch.library.opcheck(getattr(dcp, name).default, CALLS[name]())


def _transposed(tensor: Tensor) -> Tensor:
    """The same values, the first dim the fastest in memory."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("layout", [strided, _transposed])
@pytest.mark.parametrize("name", sorted(set(CALLS) - {"kv_write"}))
def test_shape_rules_hold_for_odd_strides(name: str, layout: Callable[[Tensor], Tensor]) -> None:
    """A compiled graph believes the rule's strides, so that the implementation must not follow its inputs'."""
    call = tuple(layout(x) if isinstance(x, Tensor) else x for x in CALLS[name]())
    torch.library.opcheck(getattr(dcp, name).default, call, test_utils="test_faketensor")


@pytest.mark.parametrize("name", sorted(set(metadata.NAMES) - {"prefix_bounds"}))
@pytest.mark.parametrize("batch, rows", [(1, 1), (1, 3), (2, 1), (2, 0), (0, 3)])
def test_shape_rules_of_metadata_hold_for_sizes_zero_and_one(name: str, batch: int, rows: int) -> None:
    call = list(CALLS[name]())
    call[0] = torch.zeros(batch, rows, dtype=torch.int64)
    for index in range(1, len(call)):
        if isinstance(call[index], Tensor):
            call[index] = call[index][:batch]
    torch.library.opcheck(getattr(dcp, name).default, tuple(call), test_utils="test_faketensor")


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("batch, rows", [(1, 1), (1, 3), (2, 1)])
def test_shape_rules_of_windows_hold_for_one_request_or_one_row(verify: bool, batch: int, rows: int) -> None:
    call = list(_conv(verify))
    call[0], call[-1], call[-2] = call[0][: batch * rows], call[-1][:batch, :rows], call[-2][:batch]
    if verify:
        call[3] = call[3][:batch]
    op = dcp.conv_window_verify if verify else dcp.conv_window
    torch.library.opcheck(op.default, tuple(call), test_utils="test_faketensor")


def test_outputs_never_share_memory_with_inputs() -> None:
    for name, call in CALLS.items():
        operands = call()
        results = getattr(dcp, name)(*operands)
        for result in results if isinstance(results, tuple) else [results]:
            if result is not None:
                taken = {x.untyped_storage().data_ptr() for x in operands if isinstance(x, Tensor)}
                assert result.untyped_storage().data_ptr() not in taken, name


MARKER_CALLS: dict[str, tuple] = {
    "mark_latent": (torch.ones(5, 1, 1, 3), torch.ones(5, 1, 1, 2), torch.ones(1, 1, 1), *_step(), 4),
    "mark_attention": (torch.ones(5, 4, 1, 3), torch.ones(5, 4, 1, 3), torch.ones(5, 4, 1, 2), 4, 0.5),
    "mark_conv": (
        torch.ones(5, 6, 1), *[torch.ones(1, 1, 1)] * 2, *[torch.ones(2, dtype=torch.int32)] * 2, _step()[0], 4, 3,
    ),
    "mark_recurrence": (
        *[torch.ones(5, 1, 2, 3)] * 2, torch.ones(5, 1, 2, 4), torch.ones(5, 1, 2, 3), torch.ones(5, 1, 2),
        *[torch.ones(1, 1, 1, 1)] * 4, *[torch.ones(2, dtype=torch.int32)] * 2, _step()[0], 4, 0.5, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", markers.NAMES)
def test_a_marker_that_is_run_says_so(name: str) -> None:
    with pytest.raises(InvariantError, match=f"dcp::{name} was executed"):
        getattr(dcp, name)(*MARKER_CALLS[name])


@pytest.mark.parametrize("name", markers.NAMES)
def test_markers_are_pure_and_know_their_layer(name: str) -> None:
    assert not getattr(dcp, name).default._schema.is_mutable
    graph = torch.fx.Graph()
    node = graph.call_function(getattr(dcp, name).default, MARKER_CALLS[name])
    assert markers.layer_of(node) == 4


def test_marker_shapes() -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        first, second = dcp.mark_latent(*MARKER_CALLS["mark_latent"])
        assert first.shape == (5, 1, 1, 3) and second.shape == (5, 1, 1, 2)
        out = dcp.mark_attention(*MARKER_CALLS["mark_attention"])
        assert out.shape == (5, 1, 4, 2) and out.is_contiguous()
        assert dcp.mark_conv(*MARKER_CALLS["mark_conv"]).shape == (5, 6, 3)
        assert dcp.mark_recurrence(*MARKER_CALLS["mark_recurrence"]).shape == (5, 1, 2, 4)
