"""Compares definitions that are hooked or relied on with what was reviewed.

From wheels or checkouts of Megatron Core, Transformer Engine or Megatron-Bridge; nothing of them is imported. Without
arguments, from the wheels of the releases that were reviewed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from drift import compare
from drift.compare import PACKAGES, ROOT
from drift.sources import open_sources

WHEELS = ROOT / "build" / "wheels"


def main() -> int:
    """Compare, print, and return the exit status: 1 where something broke or differs."""
    parser = argparse.ArgumentParser(prog="scripts/check drift", description=__doc__)
    parser.add_argument("releases", nargs="*", metavar="NAME==VERSION", help="releases, from their wheels")
    parser.add_argument("--checkout", action="append", default=[], type=Path, help="the folder of a checkout")
    parser.add_argument("--accept", action="store_true", help="record what is there as reviewed")
    options = parser.parse_args()
    reviewed = [f"{package.name}=={version}" for package in PACKAGES for version in package.reviewed_versions()]
    releases = options.releases or ([] if options.checkout else reviewed)
    places = [*options.checkout, *map(_wheel, releases)]
    return max(_check(place, accept=options.accept) for place in places)


def _wheel(release: str) -> Path:
    name, equals, version = release.partition("==")
    if not equals:
        sys.exit(f"drift: {release} is no release: write megatron-core=={release}")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(WHEELS.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(WHEELS), release]
        subprocess.run(pip, check=True)
    return next(WHEELS.glob(pattern))


def _check(place: Path, *, accept: bool) -> int:
    with open_sources(place) as sources:
        package = next((one for one in PACKAGES if sources.path(one.marker) is not None), None)
        if package is None:
            sys.exit(f"drift: {place} is none of {', '.join(one.name for one in PACKAGES)}")
        version = package.version_of(place, sources)
        findings = compare.broken(package.rows_of(version), sources=sources)
        now = compare.record(package.rows_of(version), sources=sources)
    path = package.fingerprints(version)
    if accept:
        compare.save(now, path=path)
        print(f"{package.name} {version}: {len(now)} targets recorded in {path.relative_to(ROOT)}")
    reviewed = version if path.exists() else package.reviewed_versions()[-1]
    findings += compare.differences(now, reviewed=json.loads(package.fingerprints(reviewed).read_text("utf-8")))
    if not findings:
        print(f"{package.name} {version}: {len(now)} targets as they were reviewed")
        return 0
    print(f"{package.name} {version}, compared with {reviewed}:")
    for finding in findings:
        print(f"  {'BROKEN' if finding.broken else 'differs'}  {finding.target} {finding.says}")
    print(
        "Read these in both releases; mend what relies on them, or .ci/drift/relied.txt; run scripts/check "
        "versions; then record them: scripts/check drift --accept"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
