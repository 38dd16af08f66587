"""Traffic between host and device in a run on the toy device, counted by step, phase, kind and call site.

Every rank writes RECORD_DIR/rankN.transfers.json; `read_transfers` reads them, `excess` compares two runs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType

import torch


class Kind(StrEnum):
    """Kinds of traffic between host and device. A copy that makes the host wait is recorded as two kinds."""

    READ = "value read"  # item(), tolist(), bool(), torch.equal()
    SHAPE = "shape that depends on data"  # nonzero(), x[mask], unique(), repeat_interleave() by a tensor
    TO_HOST = "copy to the host"  # cpu(), to("cpu"); not those into pinned memory that are not waited for
    BLOCKING = "blocking copy to the device"  # cuda() without non_blocking, torch.tensor(…, device="cuda")
    WAIT = "explicit wait"  # synchronize() of the device, a stream or an event; a barrier
    PAGEABLE = "copy to the device from pageable memory"
    PINNED = "copy to the device from pinned memory"


SYNCHRONISATIONS = (Kind.READ, Kind.SHAPE, Kind.TO_HOST, Kind.BLOCKING, Kind.WAIT)
"""Kinds after which the device has nothing left to do."""


class Phase(StrEnum):
    """The part of a run in which something happened."""

    MICROBATCH = "micro-batch"  # below forward_step or backward_step of Megatron's schedules
    STEP = "step"  # below train_step, but not in a micro-batch
    THREAD = "thread"  # in another thread than that which trains
    OUTSIDE = "outside"  # set-up, logging, checkpoints, the recording of a test


@dataclass(frozen=True, order=True)
class Place:
    """Place in a run where something happened.

    Attributes:
        iteration: Megatron's count of finished steps.
        phase: part of the run.
        kind: what happened.
        site: `file:function`.
    """

    iteration: int
    phase: Phase
    kind: Kind
    site: str


class Recorder:
    """Counts the traffic of one process."""

    def __init__(self) -> None:
        self._counts: Counter[Place] = Counter()
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def count(self, *kinds: Kind) -> None:
        """Something happened just now, in the caller."""
        if getattr(self._of_thread, "in_kernel", False):
            return
        site, phase = _where(sys._getframe(1))
        with self._lock:
            for kind in kinds:
                self._counts[Place(_iteration(), phase, kind, site)] += 1

    @contextlib.contextmanager
    def kernel(self) -> Iterator[None]:
        """Stands in for one kernel of a GPU library: its inside is not counted."""
        outer = self.in_kernel
        self._of_thread.in_kernel = True
        try:
            yield
        finally:
            self._of_thread.in_kernel = outer

    @property
    def in_kernel(self) -> bool:
        """True if this thread is in a stand-in for a kernel."""
        return getattr(self._of_thread, "in_kernel", False)

    @property
    def counts(self) -> Mapping[Place, int]:
        """All that was counted."""
        return dict(self._counts)

    def write(self, path: Path) -> None:
        """Write all that was counted."""
        rows = [[place.iteration, place.phase, place.kind, place.site, n] for place, n in sorted(self._counts.items())]
        path.write_text(json.dumps(rows))


def read_transfers(record: Path, *, num_ranks: int) -> list[dict[Place, int]]:
    """The counts of each rank."""
    ranks = []
    for rank in range(num_ranks):
        rows = json.loads((record / f"rank{rank}.transfers.json").read_text())
        ranks.append({Place(at, Phase(phase), Kind(kind), site): n for at, phase, kind, site, n in rows})
    return ranks


def per_step(transfers: Mapping[Place, int], *, kinds: Collection[Kind]) -> dict[tuple[Phase, Kind, str], list[int]]:
    """One rank's traffic by phase, kind and site: a count for each step, of those that have traffic."""
    found: dict[tuple[Phase, Kind, str], list[int]] = defaultdict(list)
    for place, count in sorted(transfers.items()):
        if place.kind in kinds:
            found[place.phase, place.kind, place.site].append(count)
    return dict(found)


def excess(
    ours: Mapping[Place, int], stock: Mapping[Place, int], *, microbatches: Sequence[int], stock_microbatches: int
) -> list[str]:
    """Waits of one rank, and its copies from pageable memory, beyond those of a stock run.

    What the stock run does in micro-batches, in multiples of their number, may be done as often in each micro-batch;
    the rest (a reduction of gradients starts in a backward pass, once a step) as often in each step. The first step,
    which sets up, is left out.

    Args:
        ours: counts of the rank.
        stock: of the rank in the stock run.
        microbatches: `[num_steps]` of the rank.
        stock_microbatches: of each step of the stock run.

    Returns:
        A line for each call site that is passed more often than it may be.
    """
    kinds = (*SYNCHRONISATIONS, Kind.PAGEABLE)
    allowed = per_step({place: n for place, n in stock.items() if place.iteration}, kinds=kinds)
    lines = []
    for place, count in sorted(ours.items()):
        if not place.iteration or place.kind not in kinds:
            continue
        counts = allowed.get((place.phase, place.kind, place.site), [0])
        limit = max(counts)
        if place.phase is Phase.MICROBATCH and not any(n % stock_microbatches for n in counts):
            limit = limit // stock_microbatches * microbatches[min(place.iteration, len(microbatches) - 1)]
        if count > limit:
            lines.append(
                f"step {place.iteration + 1}, {place.phase}: {place.kind} {count} times, not {limit}, {place.site}"
            )
    return lines


_ROOTS = (str(Path(torch.__file__).parent.parent), str(Path(__file__).parent.parent.parent))
_SKIPPED = (
    *(f"{_ROOTS[0]}/torch/", contextlib.__file__, functools.__file__),
    *(f"{_ROOTS[1]}/tests/megatron/toy_", f"{_ROOTS[1]}/megatron_balance/devkit/cpu.py"),
)


def _where(frame: FrameType | None) -> tuple[str, Phase]:
    """The innermost function that is neither torch's nor of the toy device, and the part of the run."""
    in_main = threading.current_thread() is threading.main_thread()
    site, phase = "", Phase.OUTSIDE if in_main else Phase.THREAD
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if not site and not path.startswith(_SKIPPED):
            root = next((root for root in _ROOTS if path.startswith(root)), "")
            site = f"{path.removeprefix(root).lstrip('/')}:{name}"
        if name in ("forward_step", "backward_step") and path.endswith("pipeline_parallel/schedules.py"):
            return site, Phase.MICROBATCH
        if name == "train_step" and path.endswith("training/training.py"):
            phase = Phase.STEP
        frame = frame.f_back
    return site, phase


def _iteration() -> int:
    from megatron.training import global_vars

    return getattr(global_vars._GLOBAL_ARGS, "curr_iteration", 0)
