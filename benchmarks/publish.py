"""Results: raw figures go to build/bench; published ones to results.json, and to a section of RESULTS.md.

A benchmark is a module with a `TITLE`, `add_options(parser)`, `measure(args)` and `section(figures)`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
RAW = ROOT / "build" / "bench"
"""Folder of raw figures and of the runs; git ignores it."""

PAGE = ROOT / "benchmarks" / "RESULTS.md"
FIGURES = ROOT / "benchmarks" / "results.json"


@dataclass(frozen=True)
class Measured:
    figures: Mapping[str, Any]
    raw: Any = None
    problems: Sequence[str] = ()


class Benchmark(Protocol):
    TITLE: str

    def add_options(self, parser: Any) -> None:
        """Adds the benchmark's own options."""

    def measure(self, args: Any) -> Measured: ...

    def section(self, figures: Mapping[str, Any]) -> str:
        """Markdown of the figures, without a heading."""
        ...


def say(line: str) -> None:
    """How far a measurement is."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def fresh(folder: Path) -> Path:
    """The folder, without what an earlier run left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def num_gpus() -> int:
    import torch

    if not torch.cuda.device_count():
        raise SystemExit("No GPU is seen: on CPU ranks it is --device cpu, of `cluster` with --ranks 2.")
    return torch.cuda.device_count()


def made_by(command: str, *, device: str = "cpu") -> dict[str, Any]:
    """What a result was made with: command, day, revision of the package, hardware, versions."""
    from megatron_balance.runtime.process import environment

    with_ = environment("cuda" if device == "cuda" else "cpu")
    return {
        "command": command,
        "date": date.today().isoformat(),
        "revision": _revision(),
        "device": with_["device"],
        "versions": with_["versions"],
    }


def _revision() -> str:
    """The commit that last changed the package, with a mark where the checkout differs from it."""
    commit = _git("log", "-1", "--format=%h", "--abbrev=9", "--", "megatron_balance")
    return f"{commit or 'unknown'}{'-dirty' if _git('status', '--porcelain', '--', 'megatron_balance') else ''}"


def _git(*arguments: str) -> str:
    output = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return output.stdout.strip()


def write_raw(name: str, measured: Measured, *, made: Mapping[str, Any]) -> Path:
    """Writes figures and raw figures into build/bench; returns the file."""
    RAW.mkdir(parents=True, exist_ok=True)
    file = RAW / f"{name}.json"
    content = {"made": made, "figures": measured.figures, "raw": measured.raw}
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def publish(name: str, benchmark: Benchmark, *, figures: Mapping[str, Any]) -> None:
    """Puts figures into results.json under their name, and replaces their section of RESULTS.md."""
    known = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    known[name] = rounded(figures)
    lines = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in sorted(known.items())]
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    section = re.compile(rf"^## {re.escape(benchmark.TITLE)}\n.*?(?=^## |\Z)", flags=re.DOTALL | re.MULTILINE)
    if not section.search(page):
        raise ValueError(f"{PAGE} has no section {benchmark.TITLE!r}: add its heading")
    parts = [f"## {benchmark.TITLE}", _made(known[name]["made"]), filled(benchmark.section(known[name]))]
    text = re.sub(r"^(#.*\n)\n", r"\1", "\n\n".join(parts), flags=re.MULTILINE) + "\n\n"
    PAGE.write_text(section.sub(lambda _: text, page).rstrip() + "\n", encoding="utf-8")


def published(name: str) -> dict[str, Any]:
    """Figures of a benchmark as they are in results.json; empty where they are not."""
    return json.loads(FIGURES.read_text(encoding="utf-8")).get(name, {}) if FIGURES.exists() else {}


def _made(made: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in made["versions"].items())
    text = f"`{made['command']}`, {made['date']}, revision {made['revision']}, {made['device']}; {versions}."
    return textwrap.fill(text, 160, break_on_hyphens=False)


def filled(text: str) -> str:
    """Markdown with its paragraphs filled to the width of pages; headings, lists and tables stay."""
    parts = [part.strip() for part in text.strip().split("\n\n")]
    return "\n\n".join(
        part if part[:1] in "#|-" else textwrap.fill(" ".join(part.split()), 160, break_on_hyphens=False)
        for part in parts
    )


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(element) for element in value]
    return value


def table(columns: str, rows: Iterable[Sequence[object] | str], *, align: str | None = None) -> str:
    """A Markdown table, without a newline at its end; a row is its cells, or their text with ` | ` between them."""
    sides = align or "l" + "r" * columns.count(" | ")
    ruler = "|" + "".join("---:|" if side == "r" else "---|" for side in sides)
    texts = (cells if isinstance(cells, str) else " | ".join(map(str, cells)) for cells in rows)
    return "\n".join([f"| {columns} |", ruler, *(f"| {text} |" for text in texts)])
