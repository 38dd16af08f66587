"""Writes the results of a benchmark: its figures as JSON, and the page made from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_balance.runtime.environment import environment


def made_by(command: str, **figures: Any) -> dict[str, Any]:
    """The content of a results file: the command that makes it, this machine and its packages, and the figures."""
    return {"command": command, "environment": environment("cpu"), **figures}


def write_results(name: str, result: Mapping[str, Any], *, report: Callable[[Any], str], out: Path) -> str:
    """Writes NAME.json, and NAME.md as `report` makes it from the same content; returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page = report(result)
    (out / f"{name}.md").write_text(page, encoding="utf-8")
    return page


def page_head(title: str, command: str) -> str:
    """The first lines of a page: its title and the command that makes it."""
    return f"# {title}\n\nMade by the command below; do not edit.\n\n    {command}\n"


def versions_of(result: Mapping[str, Any]) -> str:
    """Versions of the packages that a result was made with."""
    return ", ".join(f"{name} {version}" for name, version in result["environment"]["versions"].items())
