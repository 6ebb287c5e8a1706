# SPDX-License-Identifier: Apache-2.0
"""Reading and writing Kimi-K3 checkpoints under their official tensor names.

A checkpoint has the parameter names of this model under the prefix ``language_model.``, with each expert stored apart:
``experts.{e}.w1`` (gate), ``w3`` (up) and ``w2`` (down), either as ``.weight`` or, in MXFP4, as ``.weight_packed`` and
``.weight_scale``. In memory the experts of a layer are two fused parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcp_compile.errors import CheckpointError

from . import mxfp4

PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
# Fused parameter -> the expert matrices it is stacked of, in row order.
FUSED_EXPERTS = {"experts.gate_up_proj": ("w1", "w3"), "experts.down_proj": ("w2",)}
LISTED_NAMES = 20


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that ``read`` makes when it is indexed, as the loader of transformers does with entries of a file."""

    read: Callable[[], Tensor]

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]


@dataclass(frozen=True)
class FusedExperts:
    """Experts of a layer as one tensor ``[experts, matrices * rows, columns]``, of which what is indexed is read.

    Attributes:
        sources: entries by expert and matrix, ``(weight,)`` or ``(packed, scale)``.
        shape: of the fused tensor. dtype: of what is read.
    """

    sources: list[list[tuple[Any, ...]]]
    shape: tuple[int, int, int]
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> Tensor:
        """``index``: an ellipsis, or up to three slices of step 1."""
        given = () if index is Ellipsis else index
        slices = (*given, *[slice(None)] * (3 - len(given)))
        experts, wanted, columns = (range(*part.indices(size)) for part, size in zip(slices, self.shape, strict=True))
        rows = self.shape[1] // len(self.sources[0])
        out = torch.empty(len(experts), len(wanted), len(columns), dtype=self.dtype)
        for filled, expert in zip(out, experts, strict=True):
            done = 0
            for first, source in zip(range(0, self.shape[1], rows), self.sources[expert], strict=True):
                start, stop = max(wanted.start - first, 0), min(wanted.stop - first, rows)
                if start < stop:
                    part = filled[done : done + stop - start]
                    part.copy_(_read_matrix(source, slice(start, stop), columns, self.dtype))
                    done += stop - start
        return out


def _read_matrix(source: tuple[Any, ...], rows: slice, columns: range, dtype: torch.dtype) -> Tensor:
    """Some rows and columns of a matrix; of an MXFP4 one all groups that the columns lie in are read."""
    if len(source) == 1:
        return source[0][rows, columns.start : columns.stop]
    packed, scale = source
    first, last = columns.start // mxfp4.GROUP, -(-columns.stop // mxfp4.GROUP)
    groups = mxfp4.decode(
        packed[rows, first * mxfp4.GROUP // 2 : last * mxfp4.GROUP // 2], scale[rows, first:last], dtype
    )
    skipped = first * mxfp4.GROUP
    return groups[:, columns.start - skipped : columns.stop - skipped]


def fused_matrices(name: str) -> tuple[str, tuple[str, ...]] | None:
    """``(".../experts", matrices)`` if ``name`` is a fused expert parameter, else None."""
    for suffix, matrices in FUSED_EXPERTS.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix) + "experts", matrices
    return None


def plan_loading(
    parameters: Mapping[str, Tensor], entries: Mapping[str, Any], root: str = "", ignored: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Where each parameter comes from: entries of a checkpoint, or tensors made from several of them when read.

    Args:
        parameters: the model's ``state_dict()``, on any device; only names, shapes and dtypes are looked at.
        entries: the checkpoint: tensors, or slices of an open safetensors file, by their official names. The prefix
            ``language_model.`` may be absent; vision tensors are left out.
        root: path of the model inside the checkpoint's language model, ``"model."`` for the model without a head.
        ignored: prefixes of text tensors that this model has no use for.

    Raises:
        CheckpointError: tensors that are missing, unknown, of the wrong shape or type, or given twice; all are named.
    """
    text = _text_entries(entries)
    unused = {name for name in text if not name.startswith(ignored)}
    problems: list[str] = []
    plan: dict[str, Any] = {}

    def take(name: str, shape: list[int], mxfp4_part: bool = False) -> Any:
        """The entry called ``name``, noting what is wrong with it."""
        unused.discard(name)
        if name not in text:
            problems.append(f"missing {PREFIX}{name} {shape}")
        elif _shape(text[name]) != shape:
            problems.append(f"{PREFIX}{name} is {_shape(text[name])}, the model needs {shape}")
        elif mxfp4_part and _dtype(text[name]) != "uint8":
            problems.append(
                f"{PREFIX}{name} is {_dtype(text[name])}, MXFP4 stores codes and scales (exponents of 2, plus 127) as "
                f"uint8; store it so, or the expert unquantised as {name.rpartition('_')[0]}"
            )
        return text.get(name)

    for parameter, tensor in parameters.items():
        name, shape = root + parameter, list(tensor.shape)
        fused = fused_matrices(name)
        if fused is not None:
            plan[parameter] = _plan_experts(*fused, tensor, text, take)
        elif name.endswith("A_log") and name in text and len(_shape(text[name])) == 1:
            # The released checkpoint pads A_log; its first entries are the heads.
            entry, heads = take(name, [max(shape[0], *_shape(text[name]))]), shape[0]
            plan[parameter] = LazyTensor(lambda entry=entry, heads=heads: entry[:heads])
        else:
            plan[parameter] = take(name, shape)

    problems += [f"unknown {PREFIX}{name}" for name in sorted(unused)]
    if problems:
        more = f"\n  and {len(problems) - LISTED_NAMES} more" if len(problems) > LISTED_NAMES else ""
        raise CheckpointError(
            "the checkpoint does not fit the model; compare its config.json with the model's settings:\n  "
            + "\n  ".join(problems[:LISTED_NAMES])
            + more
        )
    return plan


def _plan_experts(
    path: str, matrices: tuple[str, ...], fused: Tensor, text: Mapping[str, Any], take: Callable[..., Any]
) -> FusedExperts:
    experts, rows, columns = fused.shape
    rows //= len(matrices)
    sources: list[list[tuple[Any, ...]]] = [[] for _ in range(experts)]
    for expert in range(experts):
        for matrix in matrices:
            name = f"{path}.{expert}.{matrix}.weight"
            if f"{name}_packed" in text or f"{name}_scale" in text:
                packed = take(f"{name}_packed", [rows, columns // 2], mxfp4_part=True)
                scale = take(f"{name}_scale", [rows, columns // mxfp4.GROUP], mxfp4_part=True)
                sources[expert].append((packed, scale))
            else:
                sources[expert].append((take(name, [rows, columns]),))

    return FusedExperts(sources, tuple(fused.shape), fused.dtype)


def _text_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = {}
    for name, entry in entries.items():
        if name.startswith(VISION_PREFIXES):
            continue
        short = name.removeprefix(PREFIX)
        if short in text:
            raise CheckpointError(f"the checkpoint has {short} twice, with and without {PREFIX}; remove one of them")
        text[short] = entry
    return text


def _shape(entry: Any) -> list[int]:
    return list(entry.shape if isinstance(entry, Tensor) else entry.get_shape())


def _dtype(entry: Any) -> str:
    """Element type by the name torch or the file has for it; that of uint8 is the same."""
    if isinstance(entry, Tensor):
        return str(entry.dtype).removeprefix("torch.")
    name = entry.get_dtype()
    return "uint8" if name == "U8" else name


def official_state_dict(
    parameters: Mapping[str, Tensor], root: str = "", expert_format: str | None = None
) -> dict[str, Tensor]:
    """The inverse of :func:`plan_loading`: ``parameters`` under their official names, experts apart.

    Args:
        expert_format: None keeps the dtype of the experts, ``"mxfp4"`` quantises them.

    Raises:
        CheckpointError: an unknown format, or experts that MXFP4 cannot hold.
    """
    if expert_format not in (None, "mxfp4"):
        raise CheckpointError(f"expert_format={expert_format!r} is unknown; use None or 'mxfp4'")
    out: dict[str, Tensor] = {}
    for parameter, tensor in parameters.items():
        fused = fused_matrices(root + parameter)
        if fused is None:
            out[PREFIX + root + parameter] = tensor
            continue
        path, matrices = fused
        for expert, stacked in enumerate(tensor.detach()):
            for matrix, weight in zip(matrices, stacked.chunk(len(matrices)), strict=True):
                name = f"{PREFIX}{path}.{expert}.{matrix}.weight"
                if expert_format is None:
                    out[name] = weight.clone()  # safetensors refuses tensors that share memory
                    continue
                try:
                    out[f"{name}_packed"], out[f"{name}_scale"] = mxfp4.encode(weight)
                except ValueError as error:
                    raise CheckpointError(f"{name} cannot be stored as MXFP4: {error}") from error
    return out
