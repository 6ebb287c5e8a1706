# SPDX-License-Identifier: Apache-2.0
"""The tail call of backends that have a kernel of their own for long keys only."""

from __future__ import annotations

from torch import Tensor


class PortableTail:
    """The few keys of a tail go to the kernel that runs on any CUDA GPU."""

    def attend_tail(self, *operands: Tensor | float) -> tuple[Tensor, Tensor]:
        from ..kernels.mla_rows import mla_tail  # needs Triton

        return mla_tail(*operands)
