"""One release against what was recorded when a release was last reviewed.

A row breaks when its definition is gone; a hook also when its function lacks a parameter, or is no longer bound where
the hook replaces it: the package does not work on that release. A row differs when its parameters, its body or the
modules that bind it by value are others than recorded: somebody has to look.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from drift.sources import Definition, Sources
from megatron_balance.hooking import Hook, hooks_of_release
from megatron_balance.mcore.bridge import BRIDGE_HOOKS
from megatron_balance.mcore.hooks import HOOKS

ROOT = Path(__file__).resolve().parents[2]
FINGERPRINTS = ROOT / "patches" / "fingerprints"
RELIED = Path(__file__).with_name("relied.txt")
_LEFT_OUT = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}


class Relied(NamedTuple):
    """A definition that must stay as it is used, and the releases that have it."""

    target: str
    first: str
    last: str = "999"


Row = Hook | Relied
Recorded = Mapping[str, Mapping[str, Any]]
"""Of each target its parameters, a fingerprint of its body, and of a hook the modules that bind it by value."""


class Finding(NamedTuple):
    """One thing that is not as it was: the package fails on this release, or somebody has to look."""

    target: str
    broken: bool
    says: str


class Package(NamedTuple):
    """A package that is hooked or relied on, its sources known by a module."""

    name: str
    marker: str
    hooks: Sequence[Hook] = ()

    def rows_of(self, version: str) -> list[Row]:
        """What is relied on in a release."""
        return hooks_of_release([*self.hooks, *relied()[self.name]], version)

    def fingerprints(self, version: str) -> Path:
        """The file of what was reviewed in a release."""
        return FINGERPRINTS / f"{self.name}-{version}.json"

    def reviewed_versions(self) -> list[str]:
        """Oldest first."""
        names = (path.stem.removeprefix(f"{self.name}-") for path in FINGERPRINTS.glob(f"{self.name}-*.json"))
        return sorted(names, key=numbers)

    def version_of(self, place: Path, sources: Sources) -> str:
        """Of a wheel or a checkout."""
        if place.is_file():
            return place.name.split("-")[1]
        if self.name == "transformer-engine":
            return (place / "build_tools" / "VERSION.txt").read_text("utf-8").strip().removesuffix(".dev0")
        text = sources.read(sources.path(self.marker) or "")
        entries = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, flags=re.MULTILINE))
        return ".".join(entries[name] for name in ("MAJOR", "MINOR", "PATCH"))


PACKAGES = (
    Package("megatron-core", "megatron.core.package_info", hooks=HOOKS),
    Package("transformer-engine", "transformer_engine.pytorch.attention"),
    Package(
        "megatron-bridge",
        "megatron.bridge.package_info",
        # The other one is a function of Megatron Core, which is compared there.
        hooks=[hook for hook in BRIDGE_HOOKS if hook.target.startswith("megatron.bridge.")],
    ),
)


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison."""
    return tuple(map(int, re.findall(r"\d+", version)))


def relied() -> dict[str, list[Relied]]:
    """Sections of relied.txt: package → rows."""
    sections: dict[str, list[Relied]] = {}
    section: list[Relied] = []
    for line in RELIED.read_text("utf-8").splitlines():
        if heading := re.fullmatch(r"\[([\w-]+)\]", line):
            section = sections.setdefault(heading[1], [])
        elif line and not line.startswith("#"):
            releases, target, *_ = line.split()
            module, _, names = target.partition(":")
            span = [release for release in releases.split("-") if release]
            section += [Relied(f"{module}:{name}", *span) for name in names.split(",")]
    return sections


def record(rows: Sequence[Row], *, sources: Sources) -> Recorded:
    """What a release has by target; missing targets are left out."""
    entries: dict[str, dict[str, Any]] = {}
    for row in rows:
        definition = sources.find(row.target)
        if definition is not None:
            facts = {"parameters": parameters_of(definition), "body": fingerprint(definition)}
            facts["binders"] = sources.binders(row.target) if isinstance(row, Hook) else []
            entries[row.target] = {name: value for name, value in facts.items() if value}
    return entries


def save(rows: Recorded, *, path: Path) -> None:
    """A line each."""
    lines = [f" {json.dumps(target)}: {json.dumps(row)}" for target, row in rows.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def broken(rows: Sequence[Row], *, sources: Sources) -> list[Finding]:
    """What the package cannot work with, in the order of the rows."""
    return [Finding(row.target, True, says) for row in rows for says in _broken(row, sources=sources)]


def _broken(row: Row, *, sources: Sources) -> Iterator[str]:
    module, _, qualified_name = row.target.partition(":")
    definition = sources.find(row.target)
    if definition is None:
        yield "is not there" if sources.path(module) else f"there is no module {module}"
        return
    if not isinstance(row, Hook):
        return
    if isinstance(definition, ast.ClassDef):
        yield "is a class now, not a function"
    parameter_names = {parameter.partition("=")[0].lstrip("*") for parameter in parameters_of(definition)}
    if missing := [name for name in row.parameters if name not in parameter_names]:
        yield f"no longer takes {', '.join(missing)}"
    name = qualified_name.rpartition(".")[2]
    for owner in row.places:
        if sources.origin(owner, name) != (module, qualified_name):
            yield f"{owner}.{name} is not that function (gone, or imported otherwise)"


def differences(now: Recorded, *, reviewed: Recorded) -> Iterator[Finding]:
    """Differences from the review, for existing targets."""
    for target, seen in now.items():
        before = reviewed.get(target)
        if before is None:
            yield Finding(target, False, "is relied on and not recorded")
            continue
        for name, verb in (("parameters", "takes"), ("binders", "is bound by value in")):
            if seen.get(name, []) != before.get(name, []):
                yield Finding(target, False, f"{verb} {_changed(before.get(name, []), seen.get(name, []))}")
        if seen["body"] != before["body"]:
            yield Finding(target, False, f"does something else: its body is {seen['body']}, not {before['body']}")


def _changed(before: Sequence[str], now: Sequence[str]) -> str:
    added, removed = ([name for name in ours if name not in theirs] for ours, theirs in ((now, before), (before, now)))
    parts = [f"{', '.join(added)} as well"] if added else []
    parts += [f"{', '.join(removed)} no longer"] if removed else []
    return "; ".join(parts or ["the same in another order"])


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
    result = [_parameter(*pair) for pair in zip(positional, defaults, strict=True)]
    if arguments.vararg or arguments.kwonlyargs:
        result.append("*" + (arguments.vararg.arg if arguments.vararg else ""))
    result += [_parameter(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return result + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def _parameter(name: ast.arg, default: ast.expr | None) -> str:
    return name.arg if default is None else f"{name.arg}={ast.unparse(default)}"


def fingerprint(definition: Definition) -> str:
    """Sixteen digits that change when what it does changes, on every Python that parses the source.

    Comments, docstrings, annotations and layout do not count; decorators and defaults do.
    """
    return hashlib.sha256("\n".join(_plain(definition)).encode()).hexdigest()[:16]


def _plain(node: ast.AST) -> Iterator[str]:
    # Not ast.dump: what it leaves out has changed between Python versions.
    yield f"({type(node).__name__}"
    for field, value in ast.iter_fields(node):
        if field in _LEFT_OUT:
            continue
        if isinstance(node, ast.Constant):
            yield repr(value)
            continue
        if field == "body" and isinstance(value, list):  # without docstrings
            value = [element for element in value if not _is_text(element)]
        if value is None or value == []:
            continue
        yield field
        for part in value if isinstance(value, list) else [value]:
            yield from _plain(part) if isinstance(part, ast.AST) else [repr(part)]
    yield ")"


def _is_text(statement: ast.AST) -> bool:
    constant = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(constant, ast.Constant) and isinstance(constant.value, str)
