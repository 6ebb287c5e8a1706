# SPDX-License-Identifier: Apache-2.0
"""Loading that accepts exactly the tensors of a draft."""

from __future__ import annotations

from typing import Any

from dcp_compile.errors import CheckpointError


class StrictLoading:
    """Mixed in before PreTrainedModel: from_pretrained raises CheckpointError instead of warning and initialising."""

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As PreTrainedModel.from_pretrained; raises CheckpointError listing all missing, unknown or odd tensors."""
        kwargs["ignore_mismatched_sizes"] = True  # so that they are reported together with the others, below
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        faults = [f"missing {name}" for name in sorted(info["missing_keys"])]
        faults += [f"unknown {name}" for name in sorted(info["unexpected_keys"])]
        faults += [
            f"{name} is {list(found)}, expected {list(expected)}"
            for name, found, expected in sorted(info["mismatched_keys"])
        ]
        if faults:
            raise CheckpointError(
                f"the checkpoint does not hold the tensors of {cls.__name__} ({len(faults)} faults): "
                f"{'; '.join(faults)}. Check that config.json and the weights belong together"
            )
        return (model, info) if output_loading_info else model
