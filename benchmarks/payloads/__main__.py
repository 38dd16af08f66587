"""Cost of moving samples by bytes of a token: CPU time and memory measured over gloo, time at stated bandwidths.

scripts/bench_payloads.sh                              two minutes
scripts/bench_payloads.sh --out benchmarks/results     what is committed
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from forked import fork_rank, free_port, rank_environment
from training_run import ROOT

from benchmarks.markdown import table
from benchmarks.payloads import rank as of_rank
from benchmarks.results_file import made_by, page_head, versions_of, write_results

COMMAND = "scripts/bench_payloads.sh"
LOADED = {24: 1_000_000, 10_000: 8_000}
"""Bytes of a token → tokens that a rank loads: token ids, and a patch of an image or a hidden state beside them."""
NUM_RANKS = (2, 4, 8)
MEMORY = ("fresh", "kept")
"""Send and receive buffers: allocated in every step, or those of the step before."""
PHASES = ("write", "exchange", "pack")

STEP_TOKENS = (16_384, 131_072)
"""Tokens that a rank loads for a step, in the table of bandwidths."""
NODE_RANKS = 8
NIC = (3.0, 12.5, 50.0)
"""GB/s of a node, each way: 25, 100 and 400 Gbit/s."""
NVLINK = 450.0
"""GB/s of a GPU, each way: NVLink 4 of an H100 has 900 both ways together (NVIDIA H100 data sheet)."""
PCIE = 50.0
"""GB/s from pinned memory to a GPU: PCIe 5.0 x16 has 63 less its headers (PCI-SIG)."""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the results")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(NUM_RANKS), help="numbers of ranks")
    args = parser.parse_args()
    folder = ROOT / "build" / "bench" / "runs" / "payloads"
    shutil.rmtree(folder, ignore_errors=True)
    runs = [
        _measured(folder, token_nbytes=nbytes, num_tokens=tokens, num_ranks=num_ranks, memory=memory)
        for nbytes, tokens in LOADED.items()
        for num_ranks in args.ranks
        for memory in MEMORY
    ]
    sys.stdout.write(
        write_results("payloads", made_by(COMMAND, cores=os.cpu_count(), runs=runs), report=_report, out=args.out)
    )
    return 0


def _measured(folder: Path, *, token_nbytes: int, num_tokens: int, num_ranks: int, memory: str) -> dict[str, Any]:
    """Medians over steps and ranks of one run, each by bytes that the rank sent or packed."""
    record = folder / f"{token_nbytes}-{num_ranks}-{memory}"
    record.mkdir(parents=True)
    port = free_port()
    arguments = ["rank.py", str(record), str(token_nbytes), str(num_tokens), memory]
    pids = [
        fork_rank(
            of_rank.main,
            arguments=arguments,
            environment=rank_environment(index, num_ranks=num_ranks, port=port),
            log=record / f"rank{index}.log",
        )
        for index in range(num_ranks)
    ]
    failed = [index for index, pid in enumerate(pids) if os.waitpid(pid, 0)[1]]
    if failed:
        raise RuntimeError((record / f"rank{failed[0]}.log").read_text())
    steps = [step for index in range(num_ranks) for step in json.loads((record / f"rank{index}.json").read_text())]
    moved = {"write": "sent", "exchange": "sent", "pack": "packed"}
    return {
        "token_nbytes": token_nbytes,
        "num_ranks": num_ranks,
        "memory": memory,
        "loaded_nbytes": median(step["loaded"] for step in steps),
        "sent_share": sum(step["sent"] for step in steps) / sum(step["loaded"] for step in steps),
        "peak_per_loaded": median(step["peak"] / step["loaded"] for step in steps),
        "cpu_ms_per_gb": {
            phase: 1e12 * sum(step["phases"][phase]["cpu_seconds"] for step in steps) / sum(step[of] for step in steps)
            for phase, of in moved.items()
        },
    }


def _report(result: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{run['token_nbytes']:,} B",
            run["num_ranks"],
            run["memory"],
            f"{run['loaded_nbytes'] / 1e6:.0f} MB",
            f"{100 * run['sent_share']:.0f} %",
            *(f"{run['cpu_ms_per_gb'][phase]:.0f}" for phase in PHASES),
            f"{1e3 / run['cpu_ms_per_gb']['write']:.1f}",
            f"{run['peak_per_loaded']:.2f}",
        )
        for run in result["runs"]
    ]
    measured = table(
        "a token | ranks | buffers | loaded by a rank | of it sent | write, CPU ms/GB | exchange | pack | "
        "written, GB/s | peak memory / loaded",
        rows,
        align="lrlrrrrrrr",
    )
    columns = ["a token", "tokens of a rank", "sent by a rank", "CPU", *(f"NIC {nic:g} GB/s" for nic in NIC), "NVLink"]
    return f"""{page_head("Payloads", f"{result['command']} --out benchmarks/results")}
Samples of a step (lognormal lengths, median 400 tokens), planned and moved between ranks over gloo on one machine with
{result["cores"]} cores. {versions_of(result)}.

CPU time is that of all threads of a rank, for a GB that it sends (write, exchange; the latter holds its receiving as
well) or packs. Buffers are allocated in every step (fresh), or those of the step before (kept), as in training. Memory
is the most that a step needs beyond what the rank held before it; small blocks are the allocator's own.

{measured}

Milliseconds of a step at stated bandwidths, from the bytes above and these formulas; `sent` and
CPU time are those of the largest run with kept buffers.

- gloo: sent × (write + exchange) + packed × pack, all CPU time of one thread, + {NODE_RANKS} × sent / NIC: while the
  step before runs.
- nccl: sent / PCIe ({PCIE:g} GB/s) + {NODE_RANKS} × sent / NIC, or sent / NVLink ({NVLINK:g} GB/s) within a node: when
  the step begins, so that training waits.

{table(" | ".join(columns), _bandwidth_rows(result["runs"]))}

A cell is `gloo hidden / nccl exposed`, with all samples crossing the NIC, or none.
"""


def _bandwidth_rows(runs: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """For each payload and size of a step the milliseconds on each link."""
    for nbytes in LOADED:
        kept = (run for run in runs if run["token_nbytes"] == nbytes and run["memory"] == "kept")
        run = max(kept, key=lambda run: run["num_ranks"])
        cpu = run["cpu_ms_per_gb"]
        for tokens in STEP_TOKENS:
            loaded = tokens * nbytes / 1e9
            sent = loaded * run["sent_share"]
            cpu_ms = sent * (cpu["write"] + cpu["exchange"]) + loaded * cpu["pack"]
            to_gpu_ms = 1e3 * sent / PCIE
            links = [1e3 * NODE_RANKS * sent / nic for nic in NIC]
            cells = [f"{cpu_ms + link:,.0f} / {to_gpu_ms + link:,.0f}" for link in links]
            cells.append(f"{cpu_ms:,.0f} / {to_gpu_ms + 1e3 * sent / NVLINK:,.1f}")
            yield [f"{nbytes:,} B", f"{tokens:,}", f"{1e3 * sent:,.1f} MB", f"{cpu_ms:,.0f} ms", *cells]


if __name__ == "__main__":
    sys.exit(main())
