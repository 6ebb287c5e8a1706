# SPDX-License-Identifier: Apache-2.0
"""The tail call of backends that have a kernel of their own for whole prefixes only."""

from __future__ import annotations

from torch import Tensor


class PortableTail:
    """Tails go to the kernel that runs on any CUDA GPU."""

    def attend_tail(self, *operands: Tensor | float, keys: int = 0) -> tuple[Tensor, Tensor]:
        from ..kernels.mla_tail import mla_tail  # needs Triton

        return mla_tail(*operands, keys=keys)
