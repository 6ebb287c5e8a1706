# SPDX-License-Identifier: Apache-2.0
"""What Triton's interpreter lacks: importing this module adds it. For machines without a GPU."""

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_load, _store = (getattr(interpreter.InterpreterBuilder, f"create_masked_{name}") for name in ("load", "store"))

def _patch_tensor_and_index(tensor, scope) -> None:
    # Loop bounds are one-element arrays, which numpy 2.4 no longer takes for ints (triton < 3.9 expects that).
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

def _as_mask(mask):
    # Scalar comparisons arrive as integers where they are broadcast into a mask; triton 3.9 refuses these.
    return interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1)

interpreter._patch_lang_tensor = _patch_tensor_and_index
interpreter.InterpreterBuilder.create_masked_load = lambda self, ptr, mask, *rest: _load(
    self, ptr, _as_mask(mask), *rest
)
interpreter.InterpreterBuilder.create_masked_store = lambda self, ptr, value, mask, *rest: _store(
    self, ptr, value, _as_mask(mask), *rest
)
