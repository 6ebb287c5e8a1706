# SPDX-License-Identifier: Apache-2.0
"""What compiling a model relies on and leaves alone: where its tensors lie, and what its modules hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Modules hold afterwards what they held before: what a forward() keeps of a trace would break every later one.

    Lists and dicts that they hold, such as their buffers, are put back with what was in them.
    """
    before = [(module, {name: (value, _content(value)) for name, value in vars(module).items()}) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            for name, (value, content) in attributes.items():
                vars(module)[name] = value
                if content is not None:
                    value.clear()
                    (value.update if isinstance(value, dict) else value.extend)(content)


def _content(value: object) -> dict | list | None:
    return type(value)(value) if type(value) in (dict, list) else None
