"""One rank of the benchmark of payloads: moves the samples of a planned step, phase by phase."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance import CostModel, Limits, Topology
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.runtime.gather import gather_sample_lengths
from megatron_balance.runtime.host_buffers import HostBuffers
from megatron_balance.runtime.prepared_exchange import prepare_exchange
from megatron_balance.samples.packing import pack_microbatch
from megatron_balance.samples.sample import Sample

CAP = 8192
NUM_ROUNDS = 4
"""Steps, the first of which is not counted: it touches memory for the first time and connects the ranks."""

_MEDIAN, _SIGMA = 400, 1.2  # lognormal lengths, tokens
_IDS_NBYTES = 24


def main() -> None:
    """Arguments: RECORD_DIR, bytes of a token, tokens that a rank loads, `fresh` or `kept` buffers."""
    folder, token_nbytes, num_tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    buffers = HostBuffers() if sys.argv[4] == "kept" else None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    rounds = []
    for index in range(NUM_ROUNDS):
        samples = _samples(np.random.default_rng([index, rank]), token_nbytes=token_nbytes, num_tokens=num_tokens)
        loaded = sum(sample.length for sample in samples) * token_nbytes
        rounds.append({"loaded": loaded} | _step(samples, group=group, buffers=buffers))
    (folder / f"rank{rank}.json").write_text(json.dumps(rounds[1:]))
    dist.destroy_process_group()


def _step(samples: list[Sample], *, group: dist.ProcessGroup, buffers: HostBuffers | None) -> dict[str, Any]:
    """Plan and move one step's samples; bytes sent and packed, the phases, and the memory."""
    gathered = gather_sample_lengths(samples, group=group)
    schedule = build_data_schedule(
        gathered.lengths,
        cost_model=CostModel(linear=4096, quadratic=1),
        topology=Topology(group.size()),
        limits=Limits(CAP),
        home_ranks=gathered.home_ranks,
    )
    destinations = schedule.destinations()
    dist.barrier()
    watch = _Watch()
    with watch.phase("write"):
        prepared = prepare_exchange(
            samples,
            sample_ids=np.arange(destinations.size),
            destinations=destinations,
            gathered=gathered,
            group=group,
            buffers=buffers,
        )
    with watch.phase("exchange"):
        mine = prepared.run(group=group)
    sent = sum(prepared.send_nbytes.values())
    del prepared
    slots = [[mine[sample] for sample in slot] for slot in schedule.ranks[group.rank()] if slot]
    with watch.phase("pack"):
        packs = [pack_microbatch(slot) for slot in slots]
    packed = sum(tensor.nbytes for pack in packs for tensor in pack.values())
    return {"sent": sent, "packed": packed, "peak": watch.peak_nbytes, "phases": watch.phases}


def _samples(rng: np.random.Generator, *, token_nbytes: int, num_tokens: int) -> list[Sample]:
    """Samples of about `num_tokens` tokens in all."""
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(min(max(round(rng.lognormal(np.log(_MEDIAN), _SIGMA)), 8), CAP))
    width = (token_nbytes - _IDS_NBYTES) // 2
    samples: list[Sample] = []
    for length in lengths:
        ids = torch.arange(length)
        keys = {"tokens": ids, "labels": ids + 1, "loss_mask": torch.ones(length), "segment_ids": ids.int()}
        if width:
            keys["features"] = torch.zeros(length, width, dtype=torch.bfloat16).fill_(1.0)
        samples.append(Sample(keys))
    return samples


class _Watch:
    """Wall and CPU seconds of each phase, and the most memory beyond that at the start."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here (proc(5))
        self._before = _status_nbytes("VmRSS")
        self.phases: dict[str, dict[str, float]] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase. CPU seconds are those of all threads of this rank, gloo's among them."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.phases[name] = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}

    @property
    def peak_nbytes(self) -> int:
        """Most resident memory since the start, less that of the start."""
        return _status_nbytes("VmHWM") - self._before


def _status_nbytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
