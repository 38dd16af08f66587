"""One gloo rank without a model: the real prefetcher, planner and exchange, and a sleep in place of the step.

It makes the package's process groups as training does (`mcore/setup/layout.py`), trains nothing, and writes what every
step and the start cost it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.scale.samples import SAMPLES_PER_RANK, Samples, item_of, planner_settings
from benchmarks.scale.stages import StageTimes
from megatron_balance.mcore.prepare import StepBuilder
from megatron_balance.mcore.setup.layout import make_groups
from megatron_balance.mcore.step import StepPrefetcher

TIMEOUT = timedelta(seconds=300)
WARM_UP_STEPS = 3
"""Until the iterator has come twice, no step is prepared ahead."""


@dataclass(frozen=True)
class RankRun:
    num_ranks: int
    replica_size: int
    num_steps: int
    step_seconds: float
    lengths_folder: Path | None
    out: Path

    def main(self, rank: int) -> None:
        """Run as this rank; the rendezvous is in the environment."""
        torch.set_num_threads(1)
        samples = Samples(self.num_ranks // self.replica_size, WARM_UP_STEPS + self.num_steps, self.lengths_folder)
        dist.init_process_group("gloo", rank=rank, world_size=self.num_ranks, timeout=TIMEOUT)
        before, started = resources(), (time.perf_counter(), time.process_time())
        size, everyone = self.replica_size, range(self.num_ranks)
        dp_group = make_groups([everyone[first::size] for first in range(size)], timeout=TIMEOUT)
        replica_group = None
        if size > 1:
            replicas = [everyone[first : first + size] for first in everyone[::size]]
            replica_group = make_groups(replicas, timeout=TIMEOUT)
        seconds, cpu_seconds = time.perf_counter() - started[0], time.process_time() - started[1]
        assert dp_group is not None, "this rank is in one"
        settings = planner_settings(dp_group.size())
        builder = StepBuilder(settings, dp_group=dp_group)
        prefetcher = StepPrefetcher(builder, replica=replica_group)
        source = None
        if rank % self.replica_size == 0:
            source = iter([item_of(length) for length in samples.lengths()[:, dp_group.rank()].ravel().tolist()])
        stages = StageTimes()
        with stages.installed():
            steps = list(self._steps(prefetcher, source))
        after = resources()
        result = {
            "groups_seconds": seconds,
            "groups_cpu_seconds": cpu_seconds,
            "more": {name: after[name] - before[name] for name in before},
            "held": after,
            "steps": steps[WARM_UP_STEPS:],
            "stages": stages.steps[WARM_UP_STEPS : len(steps)],
            "sent_nbytes": stages.sent_nbytes[WARM_UP_STEPS : len(steps)],
            "num_peers": stages.num_peers[WARM_UP_STEPS : len(steps)],
        }
        (self.out / f"rank{rank}.json").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()

    def _steps(self, prefetcher: StepPrefetcher, source: Iterator[Any] | None) -> Iterator[dict[str, float]]:
        num_steps = WARM_UP_STEPS + self.num_steps
        for step in range(num_steps):
            dist.barrier()  # gradients are reduced here: ranks begin a step together
            cpu, own_cpu = time.process_time(), time.thread_time()
            made = prefetcher.balance(source, num_microbatches=SAMPLES_PER_RANK)
            own_cpu = time.thread_time() - own_cpu
            if step + 1 < num_steps:
                prefetcher.prepare(num_microbatches=SAMPLES_PER_RANK, name=f"step {step + 1}")
            time.sleep(self.step_seconds)
            yield {
                "exposed_seconds": made.exposed_seconds,
                "exposed_cpu_seconds": own_cpu,
                "cpu_seconds": time.process_time() - cpu,
            }


def resources() -> dict[str, int]:
    """Open files, sockets among them, threads and anonymous bytes of this process.

    Private bytes would also count what a fork shares with the others until a reference count is written.
    """
    files = [os.readlink(entry) for entry in _links(Path("/proc/self/fd"))]
    memory = Path("/proc/self/smaps_rollup").read_text()
    [anonymous] = re.findall(r"^Anonymous: +(\d+) kB", memory, flags=re.MULTILINE)
    return {
        "num_files": len(files),
        "num_sockets": sum(file.startswith("socket:") for file in files),
        "num_threads": len(os.listdir("/proc/self/task")),
        "anonymous_bytes": 1024 * int(anonymous),
    }


def _links(folder: Path) -> Iterator[Path]:
    """Entries that still exist: the listing's own is gone."""
    return (entry for entry in list(folder.iterdir()) if entry.is_symlink())
