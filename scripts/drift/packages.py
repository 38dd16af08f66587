"""The packages that are compared: their hooks, the definitions of relied.txt, and the releases that were reviewed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drift.sources import Sources
from megatron_balance.hooking import Hook
from megatron_balance.mcore.bridge import BRIDGE_HOOKS
from megatron_balance.mcore.hooks import HOOKS

ROOT = Path(__file__).resolve().parents[2]
FINGERPRINTS = ROOT / "patches" / "fingerprints"
RELIED = Path(__file__).with_name("relied.txt")


@dataclass(frozen=True)
class Relied:
    """A definition that must stay as it is used, and the releases that have it."""

    target: str
    first: tuple[int, int]
    last: tuple[int, int] = (999, 0)

    def is_in(self, release: tuple[int, int]) -> bool:
        """True if a release should have it."""
        return self.first <= release <= self.last


Row = Hook | Relied


@dataclass(frozen=True)
class Package:
    """One package that is hooked or relied on.

    Attributes:
        name: under which the registry has it.
        marker: module by which its sources are known.
        hooks: functions that are replaced, in every release.
    """

    name: str
    marker: str
    hooks: Sequence[Hook] = ()

    def rows_of(self, version: str) -> list[Row]:
        """Definitions that are relied on in a release."""
        return [row for row in (*self.hooks, *relied()[self.name, ""]) if row.is_in(release_of(version))]

    def branch_rows_of(self, sources: Sources) -> list[Row]:
        """Definitions that are relied on beside those, in sources that have what names their section."""
        rows: list[Row] = []
        for (name, condition), section in relied().items():
            if name == self.name and condition and sources.find(condition) is not None:
                rows += section
        return rows

    def fingerprints(self, version: str) -> Path:
        """The file that holds what was reviewed in a release."""
        return FINGERPRINTS / f"{self.name}-{version}.json"

    def reviewed_versions(self) -> list[str]:
        """Versions that have fingerprints, oldest first."""
        names = (path.stem.removeprefix(f"{self.name}-") for path in FINGERPRINTS.glob(f"{self.name}-*.json"))
        return sorted(names, key=numbers)

    def version_of(self, place: Path, sources: Sources) -> str:
        """Version of a wheel or a checkout."""
        if place.is_file():
            return place.name.split("-")[1]
        if self.name == "transformer-engine":
            return (place / "build_tools" / "VERSION.txt").read_text("utf-8").strip().removesuffix(".dev0")
        text = sources.read(sources.path(self.marker) or "")
        found = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, flags=re.MULTILINE))
        return ".".join(found[name] for name in ("MAJOR", "MINOR", "PATCH"))


def relied() -> dict[tuple[str, str], list[Relied]]:
    """Sections of relied.txt: package and the definition that it holds for, or nothing → rows."""
    sections: dict[tuple[str, str], list[Relied]] = {}
    section: list[Relied] = []
    for line in RELIED.read_text("utf-8").splitlines():
        if heading := re.fullmatch(r"\[([\w-]+) ?(\S*)\]", line):
            section = sections.setdefault((heading[1], heading[2]), [])
        elif line and not line.startswith("#"):
            releases, target, *_ = line.split()
            first, _, last = releases.partition("-")
            section.append(Relied(target, release_of(first), release_of(last) if last else (999, 0)))
    return sections


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def release_of(version: str) -> tuple[int, int]:
    """`0.19.2` → `(0, 19)`."""
    major, minor, *_ = numbers(version)
    return major, minor


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
