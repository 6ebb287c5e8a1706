# SPDX-License-Identifier: Apache-2.0
"""DSpark drafts. Importing registers them with the Auto classes: the K3 draft by its model type "k3_dspark", the grouped-query
draft, which calls itself "qwen3", by its architecture."""

from __future__ import annotations

import os
from typing import Any

from transformers import AutoConfig, AutoModel, PreTrainedConfig, Qwen3Config, Qwen3Model

from dcp_compile._compat import register_by_architecture
from dcp_compile.errors import ConfigError

from .backbone import DSparkBackbone
from .configuration import K3DSparkConfig
from .drafting import DraftBlock
from .gqa import ARCHITECTURES, DSparkDraftConfig, DSparkDraftModel, Qwen3DSparkModel
from .modeling import K3DSparkModel

AutoConfig.register(K3DSparkConfig.model_type, K3DSparkConfig, exist_ok=True)
AutoModel.register(K3DSparkConfig, K3DSparkModel, exist_ok=True)
register_by_architecture(Qwen3Config, (Qwen3Model, DSparkDraftModel, Qwen3DSparkModel))

__all__ = ["DraftBlock", "DSparkDraftConfig", "DSparkDraftModel", "K3DSparkConfig", "K3DSparkModel", "load_draft"]


def load_draft(path: str | os.PathLike, **kwargs: Any) -> DSparkBackbone:
    """Load the draft in ``path`` as the model its config names; kwargs go to from_pretrained.

    AutoModel does the same for such a folder, and loads anything else as well. Raises ConfigError if the config names no
    DSpark draft, CheckpointError if the tensors are not its.
    """
    config, _ = PreTrainedConfig.get_config_dict(path)
    architectures, model_type = config.get("architectures") or [], config.get("model_type")
    if model_type == K3DSparkConfig.model_type:
        return K3DSparkModel.from_pretrained(path, **kwargs)
    if model_type == DSparkDraftConfig.model_type and set(architectures) & set(ARCHITECTURES):
        return DSparkDraftModel.from_pretrained(path, **kwargs)
    raise ConfigError(
        f"{path} has model_type {model_type!r} and architectures {architectures}; a DSpark draft is "
        f"{K3DSparkConfig.model_type!r}, or 'qwen3' with one of {ARCHITECTURES}"
    )
