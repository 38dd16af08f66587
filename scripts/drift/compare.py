"""One release against what was recorded when a release was last reviewed.

A row breaks when its function is gone, lacks a parameter or a name that is relied on, or is no longer bound where the
hook replaces it: the package does not work on that release. A row differs when its parameters, what it does, or the
modules that bind it by value are others than recorded: somebody has to look.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from drift.fingerprint import fingerprint, names_in, parameter_names, parameters_of
from drift.relied import Relied
from drift.sources import Definition, Sources
from megatron_balance.hooking.patches import Hook

Row = Hook | Relied
MAX_LISTED = 6


@dataclass(frozen=True)
class Recorded:
    """The record of one row of one release.

    Attributes:
        parameters: as parameters_of lists them; none where only names are relied on.
        body: fingerprint, or empty where the body does not count.
        binders: modules that bind it by value, of a hook's target.
    """

    parameters: list[str] = field(default_factory=list)
    body: str = ""
    binders: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it was.

    Attributes:
        target: of the row.
        broken: whether the package fails on this release; else somebody has to look.
        says: what it is.
    """

    target: str
    broken: bool
    says: str


def record(rows: Sequence[Row], *, sources: Sources) -> dict[str, Recorded]:
    """The records of a release by target; missing targets are left out."""
    found = {row.target: (row, sources.find(row.target)) for row in rows}
    return {
        target: _recorded(row, definition, sources=sources)
        for target, (row, definition) in found.items()
        if definition is not None
    }


def broken(rows: Sequence[Row], *, sources: Sources) -> list[Finding]:
    """Targets that the package cannot work with, in the order of the rows."""
    return [Finding(row.target, True, says) for row in rows for says in _broken(row, sources=sources)]


def differences(now: Mapping[str, Recorded], *, reviewed: Mapping[str, Recorded]) -> list[Finding]:
    """Differences from the review, for existing targets."""
    result: list[Finding] = []
    for target, seen in now.items():
        if target not in reviewed:
            result.append(Finding(target, False, "is relied on and not recorded"))
            continue
        before = reviewed[target]
        if seen.parameters != before.parameters:
            result.append(Finding(target, False, f"takes {_changed(before.parameters, seen.parameters)}"))
        if seen.body != before.body:
            result.append(Finding(target, False, f"does something else: its body is {seen.body}, not {before.body}"))
        if seen.binders != before.binders:
            says = f"is bound by value in {_changed(before.binders, seen.binders)}"
            result.append(Finding(target, False, says))
    return result


def load(path: Path) -> dict[str, Recorded]:
    """A file of fingerprints.

    Raises:
        FileNotFoundError: nothing was recorded under that name.
    """
    return {target: Recorded(**row) for target, row in json.loads(path.read_text("utf-8")).items()}


def save(rows: Mapping[str, Recorded], *, path: Path) -> None:
    """Write a file of fingerprints; what a row does not have is left out."""
    kept = {target: {name: value for name, value in asdict(row).items() if value} for target, row in rows.items()}
    path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def _recorded(row: Row, definition: Definition, *, sources: Sources) -> Recorded:
    if isinstance(row, Hook):
        return Recorded(parameters_of(definition), fingerprint(definition), sources.binders(row.target))
    return Recorded(parameters_of(definition), fingerprint(definition)) if row.body else Recorded()


def _broken(row: Row, *, sources: Sources) -> list[str]:
    module, _, qualified_name = row.target.partition(":")
    definition = sources.find(row.target)
    if definition is None:
        return ["is not there" if sources.path(module) else f"there is no module {module}"]
    result: list[str] = []
    if isinstance(row, Hook) and isinstance(definition, ast.ClassDef):
        result.append("is a class now, not a function")
    missing = [name for name in row.parameters if name not in parameter_names(definition)]
    if missing:
        result.append(f"no longer takes {', '.join(missing)}")
    unnamed = [name for name in getattr(row, "names", ()) if name not in names_in(definition)]
    if unnamed:
        result.append(f"no longer has to do with {', '.join(unnamed)}")
    name = qualified_name.rpartition(".")[2]
    for owner in row.bound_in:
        if sources.origin(owner, name) != (module, qualified_name):
            result.append(f"{owner}.{name} is not that function (gone, or imported otherwise)")
    return result


def _changed(before: Sequence[str], now: Sequence[str]) -> str:
    added = [name for name in now if name not in before]
    gone = [name for name in before if name not in now]
    parts = [f"{', '.join(added[:MAX_LISTED])} as well"] if added else []
    parts += [f"{', '.join(gone[:MAX_LISTED])} no longer"] if gone else []
    parts += [] if added or gone else ["the same in another order"]
    more = max(0, len(added) - MAX_LISTED) + max(0, len(gone) - MAX_LISTED)
    return "; ".join(parts) + (f" (and {more} more)" if more else "")
