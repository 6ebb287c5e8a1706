# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are built alike, and whether they run alike whatever their layer number."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import _compat


@dataclass(frozen=True)
class Place:
    """A module that may be repeated: its path in the model, its class, its layer number and how it is built."""

    path: str
    type: type
    layer: int | None
    build: str


class LayerNumber(int):
    """A layer number that notices when what is done with it depends on the layer, indexing apart.

    Comparisons that come out equal for all layers, such as with their count, do not.
    """

    def __new__(cls, number: int, layers: int, used: Callable[[], None]):
        self = super().__new__(cls, number)
        self.layers, self.used = layers, used
        return self


def _watched(name: str) -> Callable:
    plain = getattr(int, name)

    def compare(self: LayerNumber, other: object):
        answers = {plain(layer, other) for layer in range(self.layers)}
        if len(answers) > 1 or NotImplemented in answers:  # then the other operand is asked, a float for instance
            self.used()
        return plain(self, other)

    def compute(self: LayerNumber, *others: object):
        self.used()
        return plain(self, *others)

    return compare if name in _COMPARISONS else compute


_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
for _name in (*_COMPARISONS, "__hash__", "__bool__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__",
              "__mod__", "__rmod__", "__floordiv__", "__rfloordiv__", "__truediv__", "__rtruediv__", "__divmod__",
              "__rdivmod__", "__pow__", "__rpow__", "__and__", "__rand__", "__or__", "__ror__", "__xor__", "__rxor__",
              "__lshift__", "__rlshift__", "__rshift__", "__rrshift__", "__neg__", "__abs__", "__invert__", "__float__",
              "__int__", "__str__", "__repr__", "__format__"):  # fmt: skip
    setattr(LayerNumber, _name, _watched(_name))


def places_of(model: nn.Module) -> dict[nn.Module, Place]:
    """The elements of every module list, and those of their parts that are made of parts, unless somebody changed them."""
    if _compat.has_global_hooks():
        return {}
    config = model.config.get_text_config()
    places: dict[nn.Module, Place] = {}
    inside: set[nn.Module] = set()
    for path, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList) or layers in inside:
            continue
        for number, layer in enumerate(layers):
            inside |= set(layer.modules())
            told = {name: value[number] for name, value in vars(config).items()
                    if isinstance(value, (list, tuple)) and len(value) == len(layers)}  # fmt: skip
            parts = {name: part for name, part in layer.named_children() if next(part.children(), None) is not None}
            for name, module in {"": layer, **parts}.items():
                indices = {vars(part)["layer_idx"] for part in module.modules() if "layer_idx" in vars(part)}
                if len(indices) > 1 or any(map(_is_changed, module.modules())):
                    continue
                try:
                    build = str((sign(told, {}), _build(module)))
                except (RecursionError, ValueError):  # attributes that hold themselves, or cells without a value
                    continue
                where = f"{path}.{number}.{name}".rstrip(".")
                places[module] = Place(where, type(module), next(iter(indices), None), build)
    return places


def _is_changed(part: nn.Module) -> bool:
    """Whether a module has hooks, or functions in place of its class's methods: what foreign code depends on is unknown."""
    if any(_hooks(part)):
        return True
    return any(
        callable(getattr(type(part), name, None)) and not getattr(value, "__module__", "").startswith("dcp_compile.")
        for name, value in vars(part).items()
    )


def _hooks(part: nn.Module) -> list[Callable]:
    """Hooks of a module, without those by which transformers collects outputs."""
    held = (value or {} for name, value in vars(part).items() if name.endswith("_hooks"))
    return [hook for hooks in held for hook in hooks.values() if not _compat.is_output_capturing(hook)]


_OWN_TENSORS = {"_parameters", "_buffers", "_modules"}


def _build(module: nn.Module) -> list:
    """Everything that tells how a module is built, without values of tensors and its layer number."""
    parts = {part: path for path, part in module.named_modules()}
    tensors: dict[int, int] = {}
    found = []
    for part, path in parts.items():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            same = None if tensor is None else tensors.setdefault(id(tensor), len(tensors))
            found.append((path, name, same, describe(tensor)))
        attributes = {
            name: value for name, value in vars(part).items() if name not in _OWN_TENSORS and not name.endswith("_hooks")
        }
        if type(attributes.get("layer_idx")) is int:
            del attributes["layer_idx"]
        found.append((path, f"{type(part).__qualname__} {id(type(part))}", sign(attributes, parts)))
    return found


_CONTAINERS = (list, tuple, set, frozenset, dict, int, float, str, bytes)  # subclasses hold more than their attributes
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}


def sign(value: object, parts: Mapping[nn.Module, str]) -> object:
    """What tells a value from others: plain ones by value, functions by code and what they close over, objects of plain
    attributes by these, parts of the same module by their path, all else by identity."""
    if type(value) in _PLAIN:
        return f"{type(value).__name__} {value!r}"
    if type(value) in (list, tuple, set, frozenset):
        items = [sign(item, parts) for item in value]
        return type(value).__name__, items if isinstance(value, (list, tuple)) else sorted(map(str, items))
    if isinstance(value, dict):
        return type(value).__name__, [(sign(key, parts), sign(item, parts)) for key, item in value.items()]
    if isinstance(value, nn.Module) and value in parts:
        return "part", parts[value]
    if type(value) is functools.partial:
        return "partial", [sign(item, parts) for item in (value.func, value.args, value.keywords)]
    if type(value) is types.MethodType:
        return "method", id(value.__func__), sign(value.__self__, parts)
    if type(value) is types.FunctionType:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return "function", id(value.__code__), [sign(item, parts) for item in (cells, value.__defaults__, value.__kwdefaults__)]
    attributes = getattr(value, "__dict__", None)
    if attributes and not isinstance(value, (type, *_CONTAINERS)) and all(type(item) in _PLAIN for item in attributes.values()):
        return "object", id(type(value)), sign(attributes, parts)
    return type(value).__name__, id(value)


def describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
