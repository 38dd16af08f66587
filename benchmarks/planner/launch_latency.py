"""Launches of small kernels while the next step is planned beside them: their latency, by where the planner runs.

    python -m benchmarks.planner.launch_latency --out benchmarks/results     # two minutes

The main thread calls a torch operator of a few microseconds, again and again, as a training thread launches kernels.
Every such call gives up the interpreter's lock and takes it back. Meanwhile batches are planned one after another:
not at all, in a thread, in a thread with a shorter switch interval, or in a process of its own for which a thread
waits. The ways take turns in one run, so that what else the machine does falls on all; where Linux counts it
(`schedstat`), the time for which the main thread could run and no core was free is taken off, so that what is left
are waits for the lock.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.markdown import table
from benchmarks.planner.options import add_options, lengths_folder
from benchmarks.planner.setups import Setup, global_batches
from benchmarks.results_file import made_by, page_head, page_of, write_results
from megatron_balance import Topology, build_data_schedule
from megatron_balance.mcore.step.plan_process import PlanProcess

NUMBERS = 20_000
"""That the operator works on: 4 microseconds, as a launch takes."""

SECONDS = 2.0
"""Of one turn."""

NUM_TURNS = 4
SLOW_NS = 30_000
"""Launches that take longer are looked at: looking takes a few microseconds."""

STALL_US = 1000
"""A launch that takes this long counts as a stall, microseconds."""

Plan = Callable[..., Any]


def _setup(name: str, *, dp_size: int, num_samples: int, ep_size: int = 1) -> Setup:
    return Setup(
        name,
        model="Qwen3-30B-A3B",
        topology=Topology(dp_size, ep_size=ep_size),
        max_tokens_per_gpu=16384,
        global_batch_size=num_samples,
        length_names=("servegen_mlarge",),
        num_batches=1,
    )


SETUPS = (
    _setup("DP16 EP8, 1,024 samples", dp_size=16, num_samples=1024, ep_size=8),
    _setup("DP64, 8,192 samples", dp_size=64, num_samples=8192),
    _setup("DP256 EP64, 16,384 samples", dp_size=256, num_samples=16384, ep_size=64),
    _setup("DP1024, 65,536 samples", dp_size=1024, num_samples=65536),
)


@dataclass(frozen=True)
class Row:
    """Launches in one way of planning.

    Attributes:
        setup: the batch that is planned beside them; empty without planning.
        way: where it is planned.
        p50_us: median latency of a launch, microseconds.
        p99_us: 99th percentile.
        p999_us: 99.9th percentile.
        max_us: the longest.
        launches_per_second: of the main thread, in the time that it did not wait for a core.
        lost_ms_per_plan: time in launches of more than `SLOW_NS` for each plan that was made, milliseconds.
        stalls_per_plan: launches of `STALL_US` or more for each plan that was made.
        plan_ms: median time that a plan took, milliseconds; None without planning.
    """

    setup: str
    way: str
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float
    launches_per_second: float
    lost_ms_per_plan: float | None = None
    stalls_per_plan: float | None = None
    plan_ms: float | None = None


def main() -> int:
    """Measures all ways, and writes launch_latency.json and .md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=NUM_TURNS, help="turns of each way")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="seconds of a turn")
    add_options(parser, command="python -m benchmarks.planner.launch_latency --out benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for setup in SETUPS:
        lengths = next(global_batches(setup, lengths_folder=lengths_folder(args)))
        rows += measure(setup, lengths=lengths, num_turns=args.turns, seconds=args.seconds)
        sys.stderr.write(table(_COLUMNS, [_cells(row) for row in rows[-len(WAYS) - 1 :]]) + "\n")
    result = made_by(args.command, rows=[asdict(row) for row in rows])
    result["environment"] |= {
        "real_lengths": lengths_folder(args) is not None,
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    write_results("launch_latency", result, report=_report, out=args.out)
    return 0


WAYS: dict[str, float | None] = {
    "a thread": 0.005,
    "a thread, switch interval 0.5 ms": 0.0005,
    "a thread, switch interval 0.05 ms": 0.00005,
    "a process of its own": None,
}
"""Switch interval of the interpreter, seconds, of each way in a thread."""


def measure(setup: Setup, *, lengths: NDArray[np.int64], num_turns: int, seconds: float) -> list[Row]:
    """The rows of one setup: alone, and beside each way."""
    dp_size = setup.topology.dp_size
    arguments = {
        "lengths": lengths,
        "cost_model": setup.cost_model,
        "topology": setup.topology,
        "limits": setup.limits,
        "home_ranks": np.repeat(np.arange(dp_size), lengths.size // dp_size),
    }
    process = PlanProcess(timeout=timedelta(minutes=5))
    process.plan(num_samples=lengths.size, **arguments)  # imports and caches are not what is measured
    build_data_schedule(**arguments)
    gc.collect()
    gc.freeze()
    latencies: dict[str, list[NDArray[np.int64]]] = {way: [] for way in ("alone", *WAYS)}
    plans: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(num_turns):
        latencies["alone"].append(launches(seconds))
        for way, interval in WAYS.items():
            plan = build_data_schedule if interval is not None else partial(process.plan, num_samples=lengths.size)
            with _switch_interval(interval), _planning(plan, arguments, into=plans[way]):
                latencies[way].append(launches(seconds))
    process.close()
    gc.unfreeze()
    rows: list[Row] = []
    for way, turns in latencies.items():
        made = plans.get(way, [])
        every = np.concatenate(turns) / 1e3
        middle, high, highest = np.percentile(every, (50, 99, 99.9)).tolist()
        rows.append(
            Row(
                setup.name,
                way,
                p50_us=middle,
                p99_us=high,
                p999_us=highest,
                max_us=float(every.max()),
                launches_per_second=every.size / float(every.sum()) * 1e6,
                lost_ms_per_plan=float(every[every > SLOW_NS / 1e3].sum()) / 1e3 / len(made) if made else None,
                stalls_per_plan=int((every >= STALL_US).sum()) / len(made) if made else None,
                plan_ms=float(np.median(made)) * 1e3 if made else None,
            )
        )
    return rows


def launches(seconds: float) -> NDArray[np.int64]:
    """Latency of every launch in this time without waits for a core, nanoseconds, `[num_launches]`."""
    numbers, clock = torch.zeros(NUMBERS), time.perf_counter_ns
    latencies: list[int] = []
    waited = _waited_for_core()
    end = clock() + int(seconds * 1e9)
    before = clock()
    while before < end:
        numbers.add_(1)
        after = clock()
        latency, before = after - before, after
        if latency > SLOW_NS:
            now = _waited_for_core()
            latency, waited = max(latency - (now - waited), SLOW_NS), now
            before = clock()
        latencies.append(latency)
    return np.array(latencies, dtype=np.int64)


def _waited_for_core() -> int:
    """Nanoseconds for which this thread could run and no core was free; 0 where the system does not count it."""
    try:
        text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    except OSError:
        return 0
    return int(text.split()[1])


@contextmanager
def _planning(plan: Plan, arguments: dict[str, Any], *, into: list[float]) -> Iterator[None]:
    """Plans the batch again and again in a thread; the seconds of each plan go to `into`."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            started = time.perf_counter()
            plan(**arguments)
            into.append(time.perf_counter() - started)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _switch_interval(seconds: float | None) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds or before)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


_COLUMNS = (
    "batch | planned in | p50 µs | p99 µs | p99.9 µs | max ms | launches/s | lost ms a plan | stalls a plan | plan ms"
)


def _cells(row: Row) -> list[str]:
    return [
        row.setup,
        "– (no planning)" if row.plan_ms is None else row.way,
        f"{row.p50_us:.1f}",
        f"{row.p99_us:.1f}",
        f"{row.p999_us:.0f}",
        f"{row.max_us / 1e3:.1f}",
        f"{row.launches_per_second:,.0f}",
        "" if row.lost_ms_per_plan is None else f"{row.lost_ms_per_plan:.1f}",
        "" if row.stalls_per_plan is None else f"{row.stalls_per_plan:.1f}",
        "" if row.plan_ms is None else f"{row.plan_ms:.0f}",
    ]


def _report(result: dict[str, Any]) -> str:
    environment = result["environment"]
    rows = [Row(**row) for row in result["rows"]]
    lengths = "real, from files" if environment["real_lengths"] else "drawn from the built-in fits"
    return page_of(
        [
            page_head("Launch latency beside planning", result["command"]),
            f"Latency of a torch operator on {NUMBERS:,} numbers on the main thread, while batches are planned without",
            "a pause. Waits for a core are taken off; the machine's other work falls on all ways in turns (load",
            f"average {environment['load_average']:.0f} on {environment['cores']} cores). *Lost*: time in",
            f"launches of more than {SLOW_NS // 1000} µs. A stall is one of {STALL_US} µs or more. Lengths: {lengths}.",
            "",
            table(_COLUMNS, [_cells(row) for row in rows], align="llrrrrrrrr"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
