"""Compares definitions that are hooked or relied on with what was reviewed, from wheels or checkouts of Megatron Core,
Transformer Engine or Apex; see scripts/check drift, which downloads the wheels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from drift import compare
from drift.classified import classified
from drift.packages import FINGERPRINTS, PACKAGES, package_of, release_of
from drift.sources import open_sources

ROOT = FINGERPRINTS.parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit status: 1 where something broke or differs."""
    parser = argparse.ArgumentParser(prog="check_drift", description=__doc__)
    parser.add_argument("places", nargs="*", type=Path, metavar="PLACE", help="wheels, and folders of checkouts")
    parser.add_argument("--accept", action="store_true", help="record what is there as reviewed")
    parser.add_argument("--versions", action="store_true", help="print reviewed releases as NAME==VERSION, and end")
    options = parser.parse_args(arguments)
    if options.versions:
        for package in PACKAGES:
            if package.in_registry:
                print("\n".join(f"{package.name}=={version}" for version in package.reviewed_versions()))
        return 0
    return max([_check(place, accept=options.accept) for place in options.places], default=0)


def _check(place: Path, *, accept: bool) -> int:
    with open_sources(place) as sources:
        package = package_of(place, sources)
        version = package.version_of(place, sources)
        rows = package.rows_of(version)
        branch_rows = package.branch_rows_of(sources)
        findings = compare.broken([*rows, *branch_rows], sources=sources)
        now = compare.record(rows, sources=sources)
        if package.option_rows:
            # A branch may say that it is a release and have other options.
            release = release_of(version) if place.is_file() else None
            options = classified(package.option_rows, sources=sources, release=release)
            counts = ", ".join(f"{count} {kind}" for kind, count in options.counts.items())
            print(f"{package.name} {version}: {len(options.options)} options of its parser: {counts}")
            findings += options.findings
    path = package.fingerprints(version)
    if accept:
        compare.save(now, path=path)
        print(f"{package.name} {version}: {len(now)} targets recorded in {path.relative_to(ROOT)}")
    reviewed = version if path.exists() else package.reviewed_versions()[-1]
    findings += compare.differences(now, reviewed=compare.load(package.fingerprints(reviewed)))
    if not findings:
        print(f"{package.name} {version}: {len(rows)} targets as they were reviewed")
        return 0
    print(f"{package.name} {version}, compared with {reviewed}:")
    for finding in findings:
        print(f"  {'BROKEN' if finding.broken else 'differs'}  {finding.target} {finding.says}")
    print(f"Read these in both releases, {package.remedy}, then record them: scripts/check drift --accept {place}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
