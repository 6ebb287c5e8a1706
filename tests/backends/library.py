# SPDX-License-Identifier: Apache-2.0
"""Parts of an installed library that cannot be imported without a GPU, taken out of its source."""

from __future__ import annotations

import ast
import dataclasses
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest


def flashinfer_source(path: str) -> ast.Module:
    """A source file of the installed FlashInfer; skips the test where there is none."""
    found = PathFinder.find_spec("flashinfer")  # whatever stands in its place in sys.modules
    if found is None or found.origin is None:
        pytest.skip("flashinfer-python is not installed")
    return ast.parse((Path(found.origin).parent / path).read_text())


def parameters(source: ast.Module, name: str, of: str | None = None) -> tuple[set[str], set[str]]:
    """Names of all parameters of a function or a method ``of`` a class, and of those without a default."""
    scope = source if of is None else _named(source, of)
    # The last definition counts: those before it are overloads.
    arguments = [node for node in scope.body if isinstance(node, ast.FunctionDef) and node.name == name][-1].args
    names = [argument.arg for argument in arguments.args if argument.arg != "self"]
    return {*names, *(a.arg for a in arguments.kwonlyargs)}, set(names[: len(names) - len(arguments.defaults)])


def functions(
    source: ast.Module, name: str, uses: dict[str, Any] | None = None, also: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The namespace after a function or method ``name`` and the definitions ``also`` were run, on top of ``uses``."""
    namespace: dict[str, Any] = {"torch": Anything(), "dataclass": dataclasses.dataclass, **(uses or {})}
    wanted = [node for node in source.body if _name(node) in also]
    wanted += [node for node in ast.walk(source) if isinstance(node, ast.FunctionDef) and node.name == name][-1:]
    for node in wanted:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    body = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *wanted], [])
    exec(compile(ast.fix_missing_locations(body), name, "exec"), namespace)
    return namespace


class Anything:
    """Stands for a module: every attribute is itself, and so is every element; equal to itself alone."""

    def __getattr__(self, name: str) -> Anything:
        return self


def _name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", None)


def _named(source: ast.Module, name: str) -> Any:
    return next(node for node in source.body if _name(node) == name)
