# SPDX-License-Identifier: Apache-2.0
"""A small Kimi-K3 trained on the Python standard library: every structural part of the large model in about 20 MB."""

from pathlib import Path


def mini_path() -> Path:
    """Folder with the model's weights, configuration and tokenizer, for `from_pretrained`."""
    return Path(__file__).parent / "target"


def draft_path() -> Path:
    """Folder with the weights and configuration of the model's DSpark draft, for `load_draft`."""
    return Path(__file__).parent / "draft"
