"""The packages that are compared: which rows, which version, and what to do about a difference."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drift import compare
from drift.apex import APEX
from drift.bridge import BRIDGE
from drift.relied import DYNAMIC_CP, MEGATRON, MEGATRON_DYNAMIC_CP, MEGATRON_RL, RL_PACKING, Relied
from drift.sources import Sources
from drift.transformer_engine import TRANSFORMER_ENGINE
from megatron_balance.hooking.patches import Hook
from megatron_balance.mcore.bridge import BRIDGE_HOOKS
from megatron_balance.mcore.hooks import HOOKS
from megatron_balance.mcore.options.option import Option
from megatron_balance.mcore.options.table import SUBJECTS
from megatron_balance.mcore.rl_bins import RL_HOOKS

FINGERPRINTS = Path(__file__).resolve().parent.parent.parent / "patches" / "fingerprints"


@dataclass(frozen=True)
class Package:
    """One package that is hooked or relied on.

    Attributes:
        name: under which the registry has it.
        marker: module by which its sources are known.
        rows: definitions that are relied on, with the releases that have them.
        hooks: functions that are replaced, in every release.
        version_of: reads the version from a wheel's or a checkout's place and sources.
        remedy: what to read and run after a difference.
        option_rows: what becomes of the options of its parser, where it has one.
        branches: for a definition that only some sources have, whatever version they name, the rows that are relied on
            where it is there.
        in_registry: whether its wheels can be downloaded.
    """

    name: str
    marker: str
    rows: Sequence[Relied]
    version_of: Callable[[Path, Sources], str]
    remedy: str
    hooks: Sequence[Hook] = ()
    option_rows: Sequence[Option] = ()
    branches: Mapping[str, Sequence[compare.Row]] = field(default_factory=dict)
    in_registry: bool = True

    def branch_rows_of(self, sources: Sources) -> list[compare.Row]:
        """Definitions that are relied on beside those of the release, in sources that have them."""
        present = (rows for marker, rows in self.branches.items() if sources.find(marker) is not None)
        return [row for rows in present for row in rows]

    def rows_of(self, version: str) -> list[compare.Row]:
        """Definitions that are relied on in a release."""
        return [row for row in (*self.hooks, *self.rows) if row.is_in(release_of(version))]

    def fingerprints(self, version: str) -> Path:
        """The file that holds what was reviewed in a release."""
        return FINGERPRINTS / f"{self.name}-{version}.json"

    def reviewed_versions(self) -> list[str]:
        """Versions that have fingerprints, oldest first."""
        names = (path.stem.removeprefix(f"{self.name}-") for path in FINGERPRINTS.glob(f"{self.name}-*.json"))
        return sorted(names, key=numbers)


def package_of(place: Path, sources: Sources) -> Package:
    """The package that a wheel or a checkout holds.

    Raises:
        SystemExit: it is none of PACKAGES.
    """
    for package in PACKAGES:
        if sources.path(package.marker) is not None:
            return package
    sys.exit(
        f"check_drift: {place} has no {', '.join(package.marker for package in PACKAGES[:-1])} or "
        f"{PACKAGES[-1].marker}: give a wheel or a checkout of {', '.join(package.name for package in PACKAGES)}."
    )


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def release_of(version: str) -> tuple[int, int]:
    """`0.19.2` → `(0, 19)`."""
    major, minor, *_ = numbers(version)
    return major, minor


def _numbers_in(module: str) -> Callable[[Path, Sources], str]:
    """Reads the version from the numbers that a module holds."""

    def version_of(place: Path, sources: Sources) -> str:
        text = sources.read(sources.path(module) or "")
        found = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, flags=re.MULTILINE))
        return ".".join(found[name] for name in ("MAJOR", "MINOR", "PATCH"))

    return version_of


def _engine_version(place: Path, sources: Sources) -> str:
    """From the wheel's name, or the file that its build reads the version from."""
    if place.is_dir():
        return (place / "build_tools" / "VERSION.txt").read_text("utf-8").strip().removesuffix(".dev0")
    return place.name.split("-")[1]


def _apex_version(place: Path, sources: Sources) -> str:
    """Apex releases have no numbers that say more than this one."""
    return "0.1"


MEGATRON_CORE = Package(
    name="megatron-core",
    marker="megatron.core.package_info",
    rows=MEGATRON,
    hooks=HOOKS,
    branches={DYNAMIC_CP: MEGATRON_DYNAMIC_CP, RL_PACKING: (*RL_HOOKS, *MEGATRON_RL)},
    option_rows=[row for subject in SUBJECTS.values() for row in subject],
    version_of=_numbers_in("megatron.core.package_info"),
    remedy="mend or widen what relies on them (megatron_balance/mcore, scripts/drift/relied.py), classify options "
    "(megatron_balance/mcore/options, scripts/drift/irrelevant_options.txt), run scripts/check versions",
)

PACKAGES = (
    MEGATRON_CORE,
    Package(
        name="transformer-engine",
        marker="transformer_engine.pytorch.attention",
        rows=TRANSFORMER_ENGINE,
        version_of=_engine_version,
        remedy="compare with samples/packing.py and mcore/options, mend scripts/drift/transformer_engine.py",
    ),
    Package(
        name="megatron-bridge",
        marker="megatron.bridge.package_info",
        rows=BRIDGE,
        # The other one is a function of Megatron Core: MEGATRON_CORE compares it.
        hooks=[hook for hook in BRIDGE_HOOKS if hook.target.startswith("megatron.bridge.")],
        version_of=_numbers_in("megatron.bridge.package_info"),
        remedy="mend mcore/bridge.py and samples/attention_keys.py, run scripts/check adapters bridge",
    ),
    Package(
        name="apex",
        marker="apex.multi_tensor_apply",
        rows=APEX,
        version_of=_apex_version,
        remedy="mend scripts/drift/apex.py",
        in_registry=False,
    ),
)
