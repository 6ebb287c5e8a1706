# SPDX-License-Identifier: Apache-2.0
"""Models that ship with dcp_compile; importing this package registers them with the Auto classes of transformers."""

from .k3_dspark import K3DSparkConfig, K3DSparkModel
from .kimi_k3 import KimiK3Config, KimiK3ForCausalLM, KimiK3Model

__all__ = ["K3DSparkConfig", "K3DSparkModel", "KimiK3Config", "KimiK3ForCausalLM", "KimiK3Model"]
