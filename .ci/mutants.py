"""Puts one deliberate error at a time into a copy of the package, and expects that its tests fail.

    .venv/bin/python .ci/mutants.py              every error of tests/mutants.toml, two at a time
    .venv/bin/python .ci/mutants.py --only TEXT …  those whose name or file contains one of these

An error is a replacement of a piece of source that stands once in its file, and names the tests that must turn red.
The tests are run without any error first, and must be green. The exit status is 1 where a test misses an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "mutants.toml"
TIMEOUT_SECONDS = 400
_TESTS_FAILED = 1  # pytest's exit status; others say that the tests did not run


class Mutant(NamedTuple):
    """A deliberate error: `old` becomes `new` in `file`, and one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: Sequence[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="in the name or the file of an error")
    parser.add_argument("--jobs", type=int, default=2, help="errors that are tried at the same time")
    options = parser.parse_args()
    mutants = [Mutant(**row) for row in tomllib.loads(TABLE.read_text())["mutant"]]
    mutants = [m for m in mutants if any(text in m.name or text in m.file for text in options.only)]
    if not mutants:
        parser.error(f"--only {' '.join(options.only)}: no error of {TABLE.name} contains it")
    started, missed = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            copies.put(copy_of_tree(Path(folder) / str(job)))
        first = copies.get()
        if run(first, sorted({test for mutant in mutants for test in mutant.tests}), workers=options.jobs):
            print("FAILED: the tests are not green without an error", file=sys.stderr)
            return 1
        copies.put(first)
        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = pool.map(lambda mutant: judge(mutant, copies), mutants)
            for mutant, (problem, seconds) in zip(mutants, verdicts, strict=True):
                missed += [mutant.name] if problem else []
                print(f"{problem or 'red':>12}  {seconds:4.0f} s  {mutant.name}", flush=True)
    for name in missed:
        print(f"FAILED: {name}")
    print(f"{len(mutants) - len(missed)} of {len(mutants)} errors caught in {time.monotonic() - started:.0f} s")
    return 1 if missed else 0


def copy_of_tree(folder: Path) -> Path:
    made_on_the_spot = (".venv*", ".git", ".*_cache", ".hypothesis", "build", "dist", "__pycache__", "*.egg-info")
    return Path(shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*made_on_the_spot)))


def judge(mutant: Mutant, copies: SimpleQueue[Path]) -> tuple[str | None, float]:
    """Why the error was not caught, None where a test failed; and the seconds that it took."""
    copy, started = copies.get(), time.monotonic()
    path = copy / "megatron_balance" / mutant.file
    source = path.read_text() if path.exists() else ""
    if (count := source.count(mutant.old)) != 1:
        problem = "STALE: not there" if count == 0 else f"STALE: {count} times"
    else:
        path.write_text(source.replace(mutant.old, mutant.new))
        status = run(copy, mutant.tests)
        problem = {_TESTS_FAILED: None, 0: "SURVIVED"}.get(status, f"NOT RUN: {status}")
        path.write_text(source)
    copies.put(copy)
    return problem, time.monotonic() - started


def run(copy: Path, tests: Sequence[str], *, workers: int = 0) -> int:
    """Pytest's exit status; all tests run in `workers`. A hang counts as a failed test, as pytest-timeout counts it."""
    flags = ["-q", "-x", "-p", "no:cacheprovider", "-n", str(workers), "--hypothesis-profile", "first"]
    flags += ["-m", "not checkout"]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        result = subprocess.run(
            [sys.executable, "-m", "pytest", *flags, *tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS * (10 if workers else 1),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _TESTS_FAILED
    if result.returncode not in (0, _TESTS_FAILED) or (workers and result.returncode):
        print(result.stdout[-3000:], result.stderr[-2000:], file=sys.stderr)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
