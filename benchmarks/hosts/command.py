"""Trains over two hosts made of network namespaces, harms the link between them, and compares with one host.

Every run is Megatron's own training loop with balancing, two ranks on each host. Where the run must go on, its losses
are those of the same run on one host; where it cannot, every rank ends with an error that says what it waited for, not
long after the timeout of its process groups. Needs Linux with iproute2 and util-linux, and root or user namespaces;
hosts and links live in namespaces that the kernel removes when this ends.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training_run import ALLOWANCES, train

from benchmarks.hosts.cases import AFTER_STEP, CASES, Case
from benchmarks.hosts.network import two_hosts
from benchmarks.hosts.two_host_run import NUM_RANKS, RankEnd, TwoHostRun, run_on
from benchmarks.publish import RAW, Measured, fresh, say, table
from megatron_balance.runtime.comm import named_ranks

TITLE = "Two hosts"
UNAVAILABLE = 69
"""Exit status where this machine has no namespaces or tools."""

_INSIDE = "BENCHMARK_IN_NAMESPACES"
NUM_STEPS = 12
ENDLESS = 100_000
"""Steps of a run that an error must end."""

GRACE_SECONDS = 40.0
"""From the timeout to the end of the process, on a machine that others use."""

TIMEOUT_SECONDS = 900
"""Of a whole run, after which a rank counts as hanging; a quiet machine needs a tenth."""

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    "--seq-length 512 --max-position-embeddings 512 --global-batch-size 16 --use-dynamic-batch-size "
    "--max-tokens-per-gpu 512 --balance-data --balance-by-flops"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))


def measure(args: argparse.Namespace) -> Measured:
    """Runs the cases, in namespaces of their own."""
    if _INSIDE not in os.environ:
        _begin_again_in_namespaces()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    folder = fresh(RAW / "hosts")
    references: dict[str, list[dict[str, Any]]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in args.cases:
        case = CASES[name]
        if case.parallel not in references:
            references[case.parallel] = _on_one_host(case, folder=folder / f"one-host-{case.layout}")
        run = _on_two_hosts(case, folder=folder / name)
        rows[name] = _judged(case, run=run, reference=references[case.parallel])
        say(f"{name}: {rows[name]['fault'] or 'as it must be'} ({run.seconds:.0f} s)")
    figures = {name: {key: value for key, value in row.items() if key != "ends"} for name, row in rows.items()}
    problems = [f"{name}: {row['fault']}" for name, row in rows.items() if row["fault"]]
    return Measured({"cases": figures}, raw=rows, problems=problems)


def _begin_again_in_namespaces() -> None:
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    namespace = ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
    namespace += [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    if missing or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        needs = f"{', '.join(missing)} (iproute2, util-linux)" if missing else "root, or user namespaces"
        say(f"hosts: needs {needs}")
        raise SystemExit(UNAVAILABLE)
    os.environ[_INSIDE] = "1"
    os.execvp(namespace[0], [*namespace, sys.executable, "-m", "benchmarks", *sys.argv[1:]])  # noqa: S606


def _flags(case: Case, *, num_steps: int) -> list[str]:
    return f"{MODEL} {case.parallel} {case.timeout_flags} --train-iters {num_steps}".split()


def _on_one_host(case: Case, *, folder: Path) -> list[dict[str, Any]]:
    flags = _flags(case, num_steps=NUM_STEPS)
    return train(folder, flags, num_ranks=NUM_RANKS, timeout_seconds=TIMEOUT_SECONDS).steps


def _on_two_hosts(case: Case, *, folder: Path) -> TwoHostRun:
    goes_on = case.timeout_seconds is None
    change = case.change
    with two_hosts() as network:
        return run_on(
            network,
            folder=folder,
            flags=_flags(case, num_steps=NUM_STEPS if goes_on else ENDLESS),
            trouble=None if change is None else lambda: change(network),
            after_step=AFTER_STEP,
            timeout_seconds=TIMEOUT_SECONDS,
        )


def _judged(case: Case, *, run: TwoHostRun, reference: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the results; `fault` has its problems."""
    pairs = list(zip(run.steps, reference, strict=False))
    difference = max((abs(a["lm_loss"] - b["lm_loss"]) / b["lm_loss"] for a, b in pairs), default=float("inf"))
    last = max(end.seconds for end in run.ends)
    faults = [] if difference <= ALLOWANCES["fp32"].loss else [f"a loss differs by {difference:.1e} from one host's"]
    if case.timeout_seconds is None:
        if len(run.steps) != NUM_STEPS:
            faults.append(f"{len(run.steps)} of {NUM_STEPS} steps were done")
        faults += [f"rank {rank} ended with {end.exit_code}" for rank, end in enumerate(run.ends) if end.exit_code != 0]
    else:
        faults += [f"rank {rank} {_end_text(end)}" for rank, end in enumerate(run.ends) if not _ended_with_a_word(end)]
        if last > case.timeout_seconds + GRACE_SECONDS:
            faults.append(
                f"the last rank ended {last:.0f} s after the link, {case.timeout_seconds} s being the timeout"
            )
    return {
        "link": case.link,
        "layout": case.layout,
        "timeout_seconds": case.timeout_seconds,
        "num_steps": len(run.steps),
        "largest_loss_difference": difference,
        "longest_step_seconds": max((step["seconds"] for step in run.steps), default=None),
        "last_rank_ended_after_seconds": None if case.timeout_seconds is None else last,
        "ends": [asdict(end) for end in run.ends],
        "ended_by": _ended_by([asdict(end) for end in run.ends]),
        "fault": "; ".join(faults),
    }


def _ended_with_a_word(end: RankEnd) -> bool:
    return bool(end.exit_code and end.exit_code > 0 and end.message)


def _end_text(end: RankEnd) -> str:
    return "still ran" if end.exit_code is None else f"ended with {end.exit_code} and said {end.message!r}"


def _ended_by(ends: list[dict[str, Any]]) -> str:
    """Ranks by the error that ended them, with what they waited for, or where."""
    kinds: dict[str, list[int]] = {}
    for rank, end in enumerate(ends):
        if end["error"]:
            message = re.search("waited for (.*?) among", end["message"])
            place = f", waiting for {message[1]}" if message else f" in `{end['waited_in']}`"
            kinds.setdefault(f"{end['error']}{place}", []).append(rank)
    return "; ".join(f"{named_ranks(ranks)}: {kind}" for kind, ranks in kinds.items())


def section(figures: Mapping[str, Any]) -> str:
    rows: list[tuple[object, ...]] = []
    for row in figures["cases"].values():
        ended = row["last_rank_ended_after_seconds"]
        outcome = row["fault"] or ("the run goes on" if ended is None else "every rank ends with an error")
        after = "" if ended is None else f"{ended:.0f} s after, timeout {row['timeout_seconds']} s"
        far = f"{row['largest_loss_difference']:.1e}"
        rows.append((row["layout"], row["link"], outcome, row["num_steps"], far, after, row["ended_by"]))
    columns = "layout | link | outcome | steps | losses against one host | last rank ended | ended by"
    return f"""Two hosts of two ranks each, made of network namespaces, gloo; where the run must go on, {NUM_STEPS}
steps.

{table(columns, rows, align="lllrrrl")}"""
