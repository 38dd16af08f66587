"""One release against what was recorded when a release was last reviewed.

A row breaks when its definition is gone; a hook also when its function lacks a parameter, or is no longer bound where
the hook replaces it: the package does not work on that release. A row differs when its parameters, its body or the
modules that bind it by value are others than recorded: somebody has to look.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from drift.fingerprint import fingerprint, parameters_of
from drift.packages import Row
from drift.sources import Sources
from megatron_balance.hooking import Hook

MAX_LISTED = 6


@dataclass(frozen=True)
class Recorded:
    """The record of one row of one release; `binders` are the modules that bind a hook's target by value."""

    parameters: list[str] = field(default_factory=list)
    body: str = ""
    binders: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it was: the package fails on this release, or somebody has to look."""

    target: str
    broken: bool
    says: str


def record(rows: Sequence[Row], *, sources: Sources) -> dict[str, Recorded]:
    """The records of a release by target; missing targets are left out."""
    found = {row.target: (row, definition) for row in rows if (definition := sources.find(row.target)) is not None}
    return {
        target: Recorded(
            parameters_of(definition),
            fingerprint(definition),
            sources.binders(target) if isinstance(row, Hook) else [],
        )
        for target, (row, definition) in found.items()
    }


def broken(rows: Sequence[Row], *, sources: Sources) -> list[Finding]:
    """Targets that the package cannot work with, in the order of the rows."""
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
    taken = {parameter.partition("=")[0].lstrip("*") for parameter in parameters_of(definition)}
    if missing := [name for name in row.parameters if name not in taken]:
        yield f"no longer takes {', '.join(missing)}"
    name = qualified_name.rpartition(".")[2]
    for owner in row.bound_in:
        if sources.origin(owner, name) != (module, qualified_name):
            yield f"{owner}.{name} is not that function (gone, or imported otherwise)"


def differences(now: Mapping[str, Recorded], *, reviewed: Mapping[str, Recorded]) -> Iterator[Finding]:
    """Differences from the review, for existing targets."""
    for target, seen in now.items():
        before = reviewed.get(target)
        if before is None:
            yield Finding(target, False, "is relied on and not recorded")
            continue
        if seen.parameters != before.parameters:
            yield Finding(target, False, f"takes {_changed(before.parameters, seen.parameters)}")
        if seen.body != before.body:
            yield Finding(target, False, f"does something else: its body is {seen.body}, not {before.body}")
        if seen.binders != before.binders:
            yield Finding(target, False, f"is bound by value in {_changed(before.binders, seen.binders)}")


def _changed(before: Sequence[str], now: Sequence[str]) -> str:
    added = [name for name in now if name not in before]
    gone = [name for name in before if name not in now]
    parts = [f"{', '.join(added[:MAX_LISTED])} as well"] if added else []
    parts += [f"{', '.join(gone[:MAX_LISTED])} no longer"] if gone else []
    return "; ".join(parts or ["the same in another order"])


def load(path: Path) -> dict[str, Recorded]:
    """A file of fingerprints."""
    return {target: Recorded(**row) for target, row in json.loads(path.read_text("utf-8")).items()}


def save(rows: Mapping[str, Recorded], *, path: Path) -> None:
    """Write a file of fingerprints, a line each; what a row does not have is left out."""
    kept = {target: {name: value for name, value in asdict(row).items() if value} for target, row in rows.items()}
    lines = [f" {json.dumps(target)}: {json.dumps(row)}" for target, row in kept.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
