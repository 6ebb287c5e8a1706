# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3, the text model. Importing this package makes the Auto classes of transformers know it."""

from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration import KimiK3Config
from .modeling import KimiK3ForCausalLM, KimiK3Model

if KimiK3Config.model_type not in CONFIG_MAPPING:  # a transformers that knows Kimi-K3 itself keeps its own
    AutoConfig.register(KimiK3Config.model_type, KimiK3Config)
AutoModel.register(KimiK3Config, KimiK3Model, exist_ok=True)
AutoModelForCausalLM.register(KimiK3Config, KimiK3ForCausalLM, exist_ok=True)

__all__ = ["KimiK3Config", "KimiK3ForCausalLM", "KimiK3Model"]
