# SPDX-License-Identifier: Apache-2.0
"""The K3 DSpark draft model. Importing registers it with the Auto classes."""

from transformers import AutoConfig, AutoModel

from .configuration import K3DSparkConfig
from .drafting import DraftBlock
from .modeling import K3DSparkModel

AutoConfig.register(K3DSparkConfig.model_type, K3DSparkConfig, exist_ok=True)
AutoModel.register(K3DSparkConfig, K3DSparkModel, exist_ok=True)

__all__ = ["DraftBlock", "K3DSparkConfig", "K3DSparkModel"]
