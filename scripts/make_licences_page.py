"""Write docs/licences.md: the licence of every package that this one can bring in directly, from what is installed.

    .venv/bin/python scripts/make_licences_page.py [--check]

Reads pyproject.toml and the metadata of installed packages. `--check` writes nothing and fails where the page lacks a
dependency or names one that is gone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "licences.md"

_HEAD = """\
# Licences

megatron_balance is under the Apache License 2.0 (`LICENSE`). It contains no code of others. What it imports is
installed beside it by its users; this is what each extra brings in directly, as the packages say themselves.
`scripts/make_licences_page.py` writes this page.

| package | needed by | licence |
|---|---|---|
"""

# What older metadata calls licences, and what SPDX does. A classifier such as "BSD License" does not tell which.
_SPDX = {"Apache 2.0": "Apache-2.0", "Apache Software License": "Apache-2.0", "BSD 2-Clause License": "BSD-2-Clause"}
_LONGEST_NAME = 60


def dependencies() -> dict[str, list[str]]:
    """Name of each package that pyproject.toml asks for → what needs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed: dict[str, list[str]] = {}
    groups = {"always": project["dependencies"], **project["optional-dependencies"]}
    for group, requirements in groups.items():
        for requirement in requirements:
            name = re.match(r"[\w.-]+", requirement)
            assert name is not None, f"a requirement without a name: {requirement}"
            needed.setdefault(name[0], []).append(group)
    return dict(sorted(needed.items()))


def licence_of(package: str) -> str:
    """As the installed package says, an SPDX expression where it gives one.

    Raises:
        metadata.PackageNotFoundError: it is not installed.
    """
    said = metadata.metadata(package)
    if expression := said.get("License-Expression"):
        return expression
    name = (said.get("License") or "").strip()
    if name and "\n" not in name and len(name) <= _LONGEST_NAME:
        return _SPDX.get(name, name)
    classifiers = [one.split(" :: ")[-1] for one in said.get_all("Classifier") or [] if one.startswith("License ::")]
    classifiers = [one for one in classifiers if one != "OSI Approved"]
    if classifiers:
        return ", ".join(_SPDX.get(one, one) for one in classifiers)
    raise SystemExit(f"make_licences_page.py: {package} states no licence; look at its files and add a row by hand.")


def rows_of(page: str) -> dict[str, str]:
    """Package → licence, from the page."""
    return dict(re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \|$", page, flags=re.MULTILINE))


def _rows(known: dict[str, str]) -> Iterator[str]:
    for package, groups in dependencies().items():
        try:
            licence = licence_of(package)
        except metadata.PackageNotFoundError:
            # What is not installed here keeps the row that an installation wrote.
            if package not in known:
                raise SystemExit(f"make_licences_page.py: install {package} to read its licence.") from None
            licence = known[package]
        yield f"| `{package}` | {', '.join(groups)} | {licence} |\n"


def main() -> None:
    """Write, or check."""
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    page = _HEAD + "".join(_rows(rows_of(old)))
    if "--check" in sys.argv[1:]:
        if page != old:
            raise SystemExit("docs/licences.md is not up to date: run scripts/make_licences_page.py.")
    else:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
