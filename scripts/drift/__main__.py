"""Compares the functions that are hooked in Megatron with what was reviewed, from wheels or a checkout; see
scripts/check_drift.sh, which downloads the wheels.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from drift import compare, relied
from drift.sources import Sources, open_sources
from megatron_balance.mcore.hooks import HOOKS

ROOT = Path(__file__).resolve().parent.parent.parent
FINGERPRINTS = ROOT / "patches" / "fingerprints"
PACKAGE = "megatron-core"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit status: 1 where something broke or differs."""
    parser = argparse.ArgumentParser(prog="check_drift", description=__doc__)
    parser.add_argument("places", nargs="*", type=Path, metavar="PLACE", help="wheels, and folders of checkouts")
    parser.add_argument("--accept", action="store_true", help="record what is there as reviewed")
    parser.add_argument("--versions", action="store_true", help="print the versions that were reviewed, and end")
    options = parser.parse_args(arguments)
    if options.versions:
        print("\n".join(reviewed_versions()))
        return 0
    return max([_check(place, accept=options.accept) for place in options.places], default=0)


def reviewed_versions() -> list[str]:
    """Versions of Megatron Core that have fingerprints, oldest first."""
    names = (path.stem.removeprefix(f"{PACKAGE}-") for path in FINGERPRINTS.glob(f"{PACKAGE}-*.json"))
    return sorted(names, key=_numbers)


def _check(place: Path, *, accept: bool) -> int:
    with open_sources(place) as sources:
        version = version_of(sources)
        rows = rows_of(version)
        findings = compare.broken(rows, sources=sources)
        now = compare.record(rows, sources=sources)
    path = FINGERPRINTS / f"{PACKAGE}-{version}.json"
    if accept:
        compare.save(now, path=path)
        print(f"{PACKAGE} {version}: {len(now)} targets recorded in {path.relative_to(ROOT)}")
    reviewed = version if path.exists() else reviewed_versions()[-1]
    beside = FINGERPRINTS / f"{PACKAGE}-{reviewed}.json"
    findings += compare.differences(now, reviewed=compare.load(beside))
    if not findings:
        print(f"{PACKAGE} {version}: {len(rows)} targets as they were reviewed")
        return 0
    print(f"{PACKAGE} {version}, compared with {reviewed}:")
    for finding in findings:
        print(f"  {'BROKEN' if finding.broken else 'differs'}  {finding.target} {finding.says}")
    print(
        f"Read these in both releases, mend or widen what relies on them (megatron_balance/mcore, "
        f"scripts/drift/relied.py), run scripts/test_versions.sh, then record them: "
        f"scripts/check_drift.sh --accept {place}"
    )
    return 1


def version_of(sources: Sources) -> str:
    """The version that the sources say they are.

    Raises:
        SystemExit: they are not of Megatron Core.
    """
    file = sources.path("megatron.core.package_info")
    if file is None:
        sys.exit(
            "check_drift: there is no megatron/core/package_info.py there: give a wheel or a checkout of Megatron."
        )
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", sources.read(file), flags=re.MULTILINE))
    return ".".join(numbers[name] for name in ("MAJOR", "MINOR", "PATCH"))


def rows_of(version: str) -> list[compare.Row]:
    """What is relied on in a release."""
    major, minor, *_ = _numbers(version)
    return [*HOOKS, *(row for row in relied.MEGATRON if row.is_in((major, minor)))]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


if __name__ == "__main__":
    sys.exit(main())
