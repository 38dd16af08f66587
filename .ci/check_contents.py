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
    problems = [
        f"{name} has no place there" for name in sizes if not any(re.fullmatch(p, name) for p in (*patterns, DATA))
    ]
    problems += [f"nothing fits {entry}" for entry in patterns if not any(re.fullmatch(entry, name) for name in sizes)]
    problems += [f"{name} has {size} bytes" for name, size in sizes.items() if size > MAX_FILE_BYTES]
    return problems + [f"{name} is missing" for name in sorted(modules - set(sizes))]


def files_of_wheel(path: Path) -> dict[str, int]:
    """Sizes by name."""
    with zipfile.ZipFile(path) as archive:
        return {entry.filename: entry.file_size for entry in archive.infolist() if not entry.is_dir()}


def files_of_sdist(path: Path) -> dict[str, int]:
    """Sizes by name, without the folder that all are in."""
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    strange = [entry.name for entry in members if not (entry.isfile() or entry.isdir())]
    assert not strange, f"the sdist holds links or devices: {strange}"
    return {entry.name.split("/", 1)[1]: entry.size for entry in members if entry.isfile()}


def metadata_faults(path: Path) -> list[str]:
    """Metadata of the wheel."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(archive.read(name))
    problems = [f"{key} is {fields[key]!r}, not {value!r}" for key, value in METADATA.items() if fields[key] != value]
    requirements = [entry for entry in fields.get_all("Requires-Dist", []) if "extra ==" not in entry]
    if requirements != ["numpy>=1.24"]:
        problems.append(f"it needs {requirements}, not numpy alone")
    missing = {"Typing :: Typed", *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15))}
    problems += [
        f"the classifier {entry} is missing" for entry in sorted(missing - set(fields.get_all("Classifier", [])))
    ]
    readme = str(fields.get_payload())
    problems += [f"a registry cannot follow {link}" for link in re.findall(r"\]\((?!https?://)[^)]*\)", readme)]
    if "## Compared with" not in readme:
        problems.append("it lacks the README")
    return problems


def main() -> None:
    """Check both; what is wrong is said, and the status is 1."""
    sdist, wheel = Path(sys.argv[1]), Path(sys.argv[2])
    modules: set[str] = set()
    for root in map(Path, sys.argv[3:]):
        modules |= {str(path.relative_to(root)) for path in (root / "megatron_balance").rglob("*.py")}
    problems = [f"sdist: {entry}" for entry in faults(files_of_sdist(sdist), patterns=SDIST, modules=modules)]
    problems += [f"wheel: {entry}" for entry in faults(files_of_wheel(wheel), patterns=WHEEL, modules=modules)]
    problems += [f"wheel: {entry}" for entry in metadata_faults(wheel)]
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
