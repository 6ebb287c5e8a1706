# SPDX-License-Identifier: Apache-2.0
"""The number of key splits follows from shapes only."""

from __future__ import annotations

import pytest

from dcp_compile.kernels.splits import split_count


@pytest.mark.parametrize(
    "tiles,splits",
    [(2, 63), (12, 11), (16, 8), (96, 4), (384, 1), (1, 126), (132, 1)],
)
def test_fills_a_device_of_132(tiles: int, splits: int) -> None:
    assert split_count(tiles, 131072, 132) == splits


@pytest.mark.parametrize("capacity,most", [(0, 1), (64, 1), (256, 2), (4096, 32)])
def test_short_tables_are_split_less(capacity: int, most: int) -> None:
    assert split_count(2, capacity, 132) == most


def test_without_a_gpu_nothing_is_split() -> None:
    assert split_count(3, 131072, 1) == 1
