"""Reads a corpus that needs no download: the top-level functions and classes of Python's standard library.

Prompt = signature and docstring, response = the rest, as bytes. About 6,000 samples whose lengths are as
uneven as those of an SFT set (median about 400 bytes, 99th percentile about 18 kB). The samples
depend on the version of Python, and are the same in every process of one version.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Folders that hold other people's packages, or tests: they are not always installed."""


@dataclass(frozen=True)
class PromptResponse:
    """One sample of supervised fine-tuning, as UTF-8 bytes."""

    prompt: bytes
    response: bytes


def stdlib_samples() -> list[PromptResponse]:
    """Every top-level function and class of the standard library, files in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    return [sample for path in files for sample in _samples_of(path)]


def _samples_of(path: Path) -> Iterator[PromptResponse]:
    source = path.read_bytes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules hold invalid escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a file kept for another version of Python
        return
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = _first_line(node) - 1
        assert node.end_lineno is not None
        cut = _end_of_head(node)
        prompt, response = b"".join(lines[first:cut]), b"".join(lines[cut : node.end_lineno])
        if response:
            yield PromptResponse(prompt, response)


def _end_of_head(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """The line after the signature and, where there is one, the docstring."""
    body = node.body[0]
    is_docstring = (
        isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant) and isinstance(body.value.value, str)
    )
    if is_docstring:
        assert body.end_lineno is not None
        return body.end_lineno
    return max(_first_line(body) - 1, node.lineno)


def _first_line(node: ast.stmt) -> int:
    """The first line of a statement, decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
