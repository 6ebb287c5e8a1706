# SPDX-License-Identifier: Apache-2.0
"""Everything about a model that optimising it must leave, or put back, as it was."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from torch import nn


def state_of(model: nn.Module) -> dict[str, Any]:
    """Class, attributes, hooks, dispatch names, module globals and parameters, to be compared with ==.

    "parameters" are the objects and their values, "storage" is where these lie: lowering may move some of them, for good.
    """
    config = model.config.get_text_config()
    files = sorted({type(module).__module__ for module in model.modules()})
    return {
        "class": type(model),
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": {
            name: (len(module._forward_hooks), len(module._forward_pre_hooks)) for name, module in model.named_modules()
        },
        "config": {name: repr(value) for name, value in vars(config).items()},
        "globals": {file: {name: id(value) for name, value in vars(sys.modules[file]).items()} for file in files},
        "parameters": {
            name: (id(parameter), tuple(parameter.shape), parameter._version, digest(parameter))
            for name, parameter in model.named_parameters()
        },
        "storage": {name: parameter.data_ptr() for name, parameter in model.named_parameters()},
    }


def digest(parameter: nn.Parameter) -> str:
    """Of the bit patterns."""
    return hashlib.sha256(parameter.detach().flatten().view(torch.uint8).cpu().numpy()).hexdigest()


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Which aspects differ; a failing assertion on the dicts themselves would print too much."""
    return [name for name in before if before[name] != after[name]]
