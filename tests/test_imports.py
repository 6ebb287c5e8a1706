# SPDX-License-Identifier: Apache-2.0
"""Rules that every source file keeps: what it may import, how long it is, what it starts with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPAT = "dcp_compile/_compat.py"
LIBRARIES = ("torch", "transformers", "triton", "accelerate", "safetensors", "tokenizers")

# Private names that are safe to use anywhere: operators as they stand in a graph.
PUBLIC_BY_USE = ("torch.ops._c10d_functional",)

MOST_LINES = 420

# What transformers documents for models that live outside of it, and for their generate().
TRANSFORMERS_MODULES = {
    "transformers",
    "transformers.cache_utils",
    "transformers.generation",
    "transformers.modeling_layers",
    "transformers.modeling_outputs",
    "transformers.modeling_utils",
    "transformers.utils",
    "transformers.utils.logging",
}


def sources(*folders: str) -> list[str]:
    """Python files under the folders, as paths from the root; a link to a folder is not followed."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)
    return sorted({path.relative_to(ROOT).as_posix() for path in found})


PACKAGE = sources("dcp_compile", "passes", "kernels", "models")
EVERYTHING = sources("dcp_compile", "passes", "kernels", "models", "tests", "examples", "benchmarks")


def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(), file)


def absolute_imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, imported dotted name, and the local name it gets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                local = name.asname or name.name.partition(".")[0]
                yield node.lineno, name.name, local
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for name in node.names:
                yield node.lineno, f"{node.module}.{name.name}", name.asname or name.name


def dotted(node: ast.expr) -> str | None:
    """``a.b.c`` for such an expression, else None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        front = dotted(node.value)
        return front and f"{front}.{node.attr}"
    return None


def used_names(tree: ast.Module) -> set[tuple[int, str]]:
    """Every dotted name of a library that a file imports or reaches through an import, with its line."""
    local, found = {}, set()
    for line, name, alias in absolute_imports(tree):
        if name.partition(".")[0] in LIBRARIES:
            found.add((line, name))
            local[alias] = name if alias != name.partition(".")[0] else alias
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inherited = {  # a method that calls the one it overrides
        node for function in functions for node in ast.walk(function) if getattr(node, "attr", None) == function.name
    }
    for node in ast.walk(tree):
        chain = dotted(node) if isinstance(node, ast.Attribute) and node not in inherited else None
        root, _, rest = (chain or "").partition(".")
        if root in local:
            found.add((node.lineno, f"{local[root]}.{rest}"))
    return found


def is_private(name: str) -> bool:
    if name.startswith(PUBLIC_BY_USE):
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def private_names(tree: ast.Module) -> list[str]:
    return sorted(f"line {line}: {name}" for line, name in used_names(tree) if is_private(name))


@pytest.mark.parametrize("file", [file for file in PACKAGE if file != COMPAT])
def test_private_names_only_in_compat(file):
    assert not private_names(tree_of(file)), f"{file}: move these to {COMPAT}"


def test_private_names_are_found():
    code = "import torch\nfrom torch import _dynamo as d, nn\nimport torch.a._b\nd.reset(); torch._C.x; nn.Module().__dict__"
    names = " ".join(private_names(ast.parse(code)))
    assert all(name in names for name in ("torch._dynamo.reset", "torch.a._b", "torch._C.x"))
    assert "nn" not in names
    assert not private_names(ast.parse("import torch\ntorch.ops._c10d_functional.wait_tensor, torch.__version__"))


@pytest.mark.parametrize("file", [file for file in PACKAGE if file != COMPAT])
def test_transformers_internals_only_in_compat(file):
    modules = {
        node.module
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers" and not node.level
    }
    assert modules <= TRANSFORMERS_MODULES, f"{file}: move these to {COMPAT}"


@pytest.mark.parametrize("file", EVERYTHING)
def test_linked_folders_have_one_name(file):
    """passes, kernels and models are reached through dcp_compile: another name would be another copy of each module."""
    names = [name for _, name, _ in absolute_imports(tree_of(file)) if name.partition(".")[0] in ("passes", "kernels", "models")]
    assert not names, f"{file} imports {names}"


@pytest.mark.parametrize("file", EVERYTHING)
def test_file_form(file):
    text = (ROOT / file).read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert text.count("\n") < MOST_LINES, "split the file: it should do one thing"
    ast.parse(text, file, feature_version=(3, 10))


def test_no_paths_of_one_machine():
    texts = [*EVERYTHING, "README.md", "CONTRIBUTING.md", "Makefile", ".ci/run", "pyproject.toml", "requirements-cpu.txt"]
    texts += [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home|Users|opt|mnt)/\w")
    found = [file for file in texts if pattern.search((ROOT / file).read_text())]
    assert not found


def test_tables_of_documents_have_a_line_per_row():
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "models").rglob("*.md")]
    for path in documents:
        for line in path.read_text().splitlines():
            assert "|---" not in line or re.fullmatch(r" *\|(---\|)+", line), f"{path.name}: {line[:80]}"
