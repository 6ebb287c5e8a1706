# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a compiled model lie: what was compiled reads them there."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from .errors import UnsupportedModelError


class Places:
    """Where the parameters and buffers of ``model`` lie now."""

    def __init__(self, model: nn.Module) -> None:
        self._compiled = _places(model)

    def check(self, model: nn.Module) -> None:
        """Values that were changed in place are seen by what was compiled, other tensors are not.

        Raises:
            UnsupportedModelError: a parameter or buffer of ``model`` lies elsewhere, or is of another dtype.
        """
        now = _places(model)
        replaced = [name for name in self._compiled.keys() | now.keys() if self._compiled.get(name) != now.get(name)]
        if replaced:
            raise UnsupportedModelError(
                f"{type(model).__name__}: {min(replaced)} and perhaps more was moved, converted or replaced after it was "
                "compiled, and what was there before is what runs; call dcp_compile.unoptimize(model) and optimize it again"
            )


def _places(model: nn.Module) -> dict[str, tuple[int, torch.dtype]]:
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in tensors}
