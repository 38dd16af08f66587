"""Fingerprints a definition, to compare releases: its parameters and a hash of its body.

Comments, docstrings, annotations and layout do not count; decorators and defaults do. The fingerprint is the same on
every Python that parses the source.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator

from drift.sources import Definition

_FINGERPRINT_DIGITS = 16
_LEFT_OUT = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx"})


def parameters_of(definition: Definition) -> list[str]:
    """`name`, `name=default`, `*rest`, `**keywords`, in order; of a class, those of its constructor.

    A bare `*` stands where keyword-only parameters begin.
    """
    if isinstance(definition, ast.ClassDef):
        body = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        return parameters_of(body[0]) if body else []
    arguments = definition.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    result = [_parameter(name, default) for name, default in zip(positional, defaults, strict=True)]
    if arguments.vararg or arguments.kwonlyargs:
        result.append("*" + (arguments.vararg.arg if arguments.vararg else ""))
    result += [_parameter(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        result.append(f"**{arguments.kwarg.arg}")
    return result


def fingerprint(definition: Definition) -> str:
    """Sixteen digits that change when what it does changes."""
    text = "\n".join(_plain(definition))
    return hashlib.sha256(text.encode()).hexdigest()[:_FINGERPRINT_DIGITS]


def _parameter(name: ast.arg, default: ast.expr | None) -> str:
    return name.arg if default is None else f"{name.arg}={ast.unparse(default)}"


def _plain(node: ast.AST) -> Iterator[str]:
    # Not ast.dump: what it leaves out has changed between Python versions.
    yield f"({type(node).__name__}"
    for field, value in ast.iter_fields(node):
        if field in _LEFT_OUT:
            continue
        if isinstance(node, ast.Constant):
            yield repr(value)
            continue
        if field == "body" and isinstance(value, list):
            value = [statement for statement in value if not _says_nothing(statement)]
        if value is None or value == []:
            continue
        yield field
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _plain(part)
            else:
                yield repr(part)
    yield ")"


def _says_nothing(statement: ast.AST) -> bool:
    """A docstring, or a string that stands alone."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case _:
            return False
