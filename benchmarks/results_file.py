"""Writes the results of a benchmark: its figures as JSON, and the page made from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def made_by(command: str, **figures: Any) -> dict[str, Any]:
    """The content of a results file: the command that makes it, this machine and its packages, and the figures."""
    from megatron_balance.runtime.environment import environment

    return {"command": command, "environment": environment("cpu"), **figures}


def write_results(name: str, result: Any, *, report: Callable[[Any], str], out: Path) -> str:
    """Writes NAME.json, and NAME.md as `report` makes it from the same content; returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page = report(result)
    (out / f"{name}.md").write_text(page, encoding="utf-8")
    return page


def add_checkout(
    name: str, result: Mapping[str, Any], *, checkout: str, report: Callable[[Mapping[str, Any]], str], out: Path
) -> None:
    """Puts the result of a checkout of Megatron beside those of others in NAME.json, and writes NAME.md of all.

    Args:
        name: of the files.
        result: of the checkout; its `environment` is added here, without the release of Megatron that is installed.
        checkout: its name.
        report: makes the page from all results, by checkout.
        out: folder of the results.
    """
    from megatron_balance.runtime.environment import environment

    made_with = environment("cpu")
    made_with["versions"].pop("megatron-core", None)
    known = checkouts(name, out=out) | {checkout: {"environment": made_with, **result}}
    known = dict(sorted(known.items()))
    (out / f"{name}.json").write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(report(known), encoding="utf-8")


def checkouts(name: str, *, out: Path) -> dict[str, Any]:
    """The results that `add_checkout` has written, by checkout."""
    path = out / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def page_of(lines: Iterable[str]) -> str:
    """A page of these lines."""
    return "\n".join(lines) + "\n"


def page_head(title: str, command: str) -> str:
    """The first lines of a page: its title and the command that makes it."""
    return f"# {title}\n\nMade by the command below; do not edit.\n\n    {command}\n"


def versions_of(result: Mapping[str, Any]) -> str:
    """Versions of the packages that a result was made with."""
    return ", ".join(f"{name} {version}" for name, version in result["environment"]["versions"].items())
