"""Contents of a wheel and a source distribution, file by file: `python check_contents.py SDIST WHEEL [ROOT]`.

Every file must fit one of the patterns below, every pattern must fit a file, and with ROOT every module of the package
there must be in both.
"""

from __future__ import annotations

import email
import re
import sys
import tarfile
import zipfile
from pathlib import Path

MAX_FILE_BYTES = 200_000
"""The largest module has a tenth of it; a data set or a build that slipped in has more."""

PACKAGE = (
    r"megatron_balance/(\w+/)*\w+\.py",
    r"megatron_balance/py\.typed",
    r"megatron_balance/report/assets/(page\.html|page\.js|style\.css)",
)
DATA = r"megatron_balance/(?!report/)(\w+/)*\w+\.(json|toml|txt)"
"""Tables that modules read; there may be none."""

WHEEL = (
    *PACKAGE,
    r"megatron_balance-[\w.]+\.dist-info/(METADATA|WHEEL|RECORD|top_level\.txt|entry_points\.txt|licenses/LICENSE)",
)
SDIST = (
    *PACKAGE,
    r"(LICENSE|MANIFEST\.in|README\.md|PKG-INFO|pyproject\.toml|setup\.cfg|setup\.py|constraints\.txt|mkdocs\.yml)",
    r"(CHANGELOG|CONTRIBUTING)\.md",
    r"benchmarks/(RESULTS\.md|results\.json)",
    r"docs/\w+(-\w+)*\.(md|css)",
    r"docs/pictures/\w+\.(py|svg|png)",
    r"megatron_balance\.egg-info/"
    r"(PKG-INFO|SOURCES\.txt|dependency_links\.txt|entry_points\.txt|requires\.txt|top_level\.txt)",
)
METADATA = {
    "Name": "megatron-balance",
    "License-Expression": "Apache-2.0",
    "License-File": "LICENSE",
    "Requires-Python": ">=3.10",
}


def faults(sizes: dict[str, int], *, patterns: tuple[str, ...], modules: set[str]) -> list[str]:
    """Faults in a list of files.

    Args:
        sizes: of each file, bytes.
        patterns: what there may be, each at least once.
        modules: files that must be there.
    """
    found = [
        f"{name} has no place there" for name in sizes if not any(re.fullmatch(p, name) for p in (*patterns, DATA))
    ]
    found += [f"nothing fits {one}" for one in patterns if not any(re.fullmatch(one, name) for name in sizes)]
    found += [f"{name} has {size} bytes" for name, size in sizes.items() if size > MAX_FILE_BYTES]
    return found + [f"{name} is missing" for name in sorted(modules - set(sizes))]


def files_of_wheel(path: Path) -> dict[str, int]:
    """Sizes by name."""
    with zipfile.ZipFile(path) as archive:
        return {one.filename: one.file_size for one in archive.infolist() if not one.is_dir()}


def files_of_sdist(path: Path) -> dict[str, int]:
    """Sizes by name, without the folder that all are in."""
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    strange = [one.name for one in members if not (one.isfile() or one.isdir())]
    assert not strange, f"the sdist holds links or devices: {strange}"
    return {one.name.split("/", 1)[1]: one.size for one in members if one.isfile()}


def metadata_faults(path: Path) -> list[str]:
    """Metadata of the wheel."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(archive.read(name))
    found = [f"{key} is {said[key]!r}, not {value!r}" for key, value in METADATA.items() if said[key] != value]
    needed = [one for one in said.get_all("Requires-Dist", []) if "extra ==" not in one]
    if needed != ["numpy>=1.24"]:
        found.append(f"it needs {needed}, not numpy alone")
    missing = {"Typing :: Typed", *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15))}
    found += [f"the classifier {one} is missing" for one in sorted(missing - set(said.get_all("Classifier", [])))]
    readme = str(said.get_payload())
    found += [f"a registry cannot follow {link}" for link in re.findall(r"\]\((?!https?://)[^)]*\)", readme)]
    if "## Try it" not in readme:
        found.append("it lacks the README")
    return found


def main() -> None:
    """Check both; what is wrong is said, and the status is 1."""
    sdist, wheel = Path(sys.argv[1]), Path(sys.argv[2])
    modules: set[str] = set()
    for root in map(Path, sys.argv[3:]):
        modules |= {str(path.relative_to(root)) for path in (root / "megatron_balance").rglob("*.py")}
    found = [f"sdist: {one}" for one in faults(files_of_sdist(sdist), patterns=SDIST, modules=modules)]
    found += [f"wheel: {one}" for one in faults(files_of_wheel(wheel), patterns=WHEEL, modules=modules)]
    found += [f"wheel: {one}" for one in metadata_faults(wheel)]
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
