# SPDX-License-Identifier: Apache-2.0
"""Choosing a rank's heads among those of several ranks."""

from __future__ import annotations

import pytest
import torch

from tests.cases import normal, strided

own_heads = torch.ops.dcp.own_heads


@pytest.mark.parametrize("batch, rows", [(2, 3), (1, 1), (0, 3), (2, 0)])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_make_up_the_whole(batch: int, rows: int, parts: int) -> None:
    whole = strided(normal(torch.Generator().manual_seed(rows), batch, rows, 6, 4))
    found = [own_heads(whole, torch.tensor(part), parts) for part in range(parts)]
    assert all(part.shape == (batch, rows, 6 // parts, 4) and part.is_contiguous() for part in found)
    assert torch.cat(found, dim=2).equal(whole)
