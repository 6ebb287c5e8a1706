# SPDX-License-Identifier: Apache-2.0
"""What Triton's interpreter lacks: importing this module adds it. For machines without a GPU."""

import numpy as np
import torch
from triton.runtime import interpreter

_convert = interpreter.InterpreterBuilder.create_fp_to_fp
_patch_tensor = interpreter._patch_lang_tensor
_load, _store = (getattr(interpreter.InterpreterBuilder, f"create_masked_{name}") for name in ("load", "store"))

def _patch_tensor_and_index(tensor, scope) -> None:
    # Loop bounds are one-element arrays, which numpy 2.4 no longer takes for ints (triton < 3.9 expects that).
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

def _as_mask(mask):
    # Scalar comparisons arrive as integers where they are broadcast into a mask; triton 3.9 refuses these.
    return interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1)

def _to_float8(self, value, kind, rounding):
    # The interpreter's own conversion drops the carry of rounding, and mistakes numbers near zero.
    if (value.dtype.scalar, kind.scalar) != (interpreter.tl.float32, interpreter.tl.float8e4nv):
        return _convert(self, value, kind, rounding)
    data = torch.from_numpy(np.array(value.data)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return interpreter.TensorHandle(data, kind.scalar)

interpreter._patch_lang_tensor = _patch_tensor_and_index
interpreter.InterpreterBuilder.create_fp_to_fp = _to_float8
interpreter.InterpreterBuilder.create_masked_load = lambda self, ptr, mask, *rest: _load(
    self, ptr, _as_mask(mask), *rest
)
interpreter.InterpreterBuilder.create_masked_store = lambda self, ptr, value, mask, *rest: _store(
    self, ptr, value, _as_mask(mask), *rest
)
