"""Samples that were loaded and wait for their step, under `--balance-lookahead`.

Every rank knows the lengths and homes of all samples that wait, and chooses the next batch alike
(`planner/lookahead.py`); the samples themselves stay with the rank that loaded them. A checkpoint holds the
pool, each rank its share, in a file that any number of ranks can read again.

Invariants: a sample leaves once; what leaves depends on gathered lengths alone; `restore(save())` goes on as if
nothing had happened, also with another data-parallel size (then the shares are dealt out anew).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner.cost import CostModel
from megatron_balance.planner.lookahead import LookAhead
from megatron_balance.planner.topology import Topology
from megatron_balance.runtime.gather import GatheredLengths
from megatron_balance.runtime.sample import Sample, SampleSchema
from megatron_balance.runtime.wire import block_nbytes, read_block, write_block


@dataclass(frozen=True)
class _Waiting:
    """What every rank knows of a sample: its home and the tokens of its sequences; on its home, the sample."""

    home_rank: int
    segment_lengths: tuple[int, ...]
    sample: Sample | None


class SamplePool:
    """One rank's view of the pool.

    Args:
        window: global batches to choose from.
        global_batch_size: samples that leave each step.
        topology: the ranks.
        cost_model: what a sample costs.
        rank: this rank in the data-parallel group.
    """

    def __init__(
        self, window: int, *, global_batch_size: int, topology: Topology, cost_model: CostModel, rank: int
    ) -> None:
        self._look = LookAhead(window, batch_size=global_batch_size, dp_size=topology.dp_size)
        self._topology = topology
        self._cost_model = cost_model
        self._rank = rank
        self._waiting: dict[int, _Waiting] = {}
        self._schema: SampleSchema | None = None

    @property
    def num_missing_batches(self) -> int:
        """Global batches to load before the next step can be chosen; 0 once the data has ended."""
        return -(-self._look.num_missing // self._look.batch_size)

    @property
    def num_batches_ahead(self) -> int:
        """Global batches that were loaded beyond the steps that left: a resumed loader must skip them."""
        state = self._look.state()
        return -(-state["num_arrived"] // self._look.batch_size) - state["num_steps"]

    def copy(self) -> SamplePool:
        """The pool as it is now; samples are shared, they never change."""
        other = copy.copy(self)
        other._look = LookAhead.from_state(self._look.state())
        other._waiting = dict(self._waiting)
        return other

    def add(self, gathered: GatheredLengths, samples: Sequence[Sample]) -> None:
        """Take in what all ranks loaded.

        Args:
            gathered: lengths and homes; fewer samples than were missing mean that the data has ended.
            samples: this rank's, in the order of `gathered`.

        Raises:
            BalanceError: the samples are no whole number of global batches.
        """
        batch_size = self._look.batch_size
        if len(gathered.lengths) % batch_size:
            raise BalanceError(
                f"--balance-lookahead {self._look.window}: {len(gathered.lengths)} rows with tokens were loaded, which "
                f"is no multiple of --global-batch-size {batch_size}. Drop empty rows, or set --balance-lookahead 1."
            )
        ids = np.arange(len(gathered.lengths))
        segments = gathered.segments_of(ids) or [(int(length),) for length in gathered.lengths]
        arrivals = self._look.push([self._cost(of_sample) for of_sample in segments])
        for sample_id, arrival in enumerate(arrivals):
            home = int(gathered.home_ranks[sample_id])
            mine = samples[sample_id - gathered.offset] if home == self._rank else None
            self._waiting[arrival] = _Waiting(home, segments[sample_id], mine)
        self._schema = self._schema or gathered.schema
        if self._look.num_missing:
            self._look.drain()

    def take(self) -> tuple[GatheredLengths, list[Sample]]:
        """Choose the next step's samples.

        Returns:
            Their lengths as if they had just been gathered, and this rank's.

        Raises:
            BalanceError: none are left.
        """
        if not self._waiting:
            raise BalanceError("the data of all ranks has ended, and no sample waits: there is no further step.")
        chosen = [(self._waiting[arrival].home_rank, arrival) for arrival in self._look.pop().tolist()]
        # In order of home ranks, as lengths are gathered; of one rank, in order of arrival.
        waiting = [self._waiting.pop(arrival) for _, arrival in sorted(chosen)]
        homes = np.array([entry.home_rank for entry in waiting], dtype=np.int64)
        per_rank = np.bincount(homes, minlength=self._topology.dp_size)
        gathered = GatheredLengths(
            lengths=np.array([sum(entry.segment_lengths) for entry in waiting], dtype=np.int64),
            home_ranks=homes,
            num_samples_per_rank=per_rank,
            offset=int(per_rank[: self._rank].sum()),
            schema=self._schema,
            num_segments=np.array([len(entry.segment_lengths) for entry in waiting], dtype=np.int64),
            segment_lengths=np.array([n for entry in waiting for n in entry.segment_lengths], dtype=np.int64),
        )
        return gathered, [entry.sample for entry in waiting if entry.sample is not None]

    @property
    def drift(self) -> float:
        """Mean cost of a sample in the newest step over that of all samples so far."""
        return self._look.metrics().drift

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a pool was saved there."""
        return _share(folder, 0).exists()

    def save(self, folder: Path) -> None:
        """Write this rank's share into a folder."""
        mine = {arrival: entry.sample for arrival, entry in self._waiting.items() if entry.sample is not None}
        samples = list(mine.values())
        block = torch.empty(0, dtype=torch.uint8)
        if self._schema is not None and samples:
            block = torch.empty(
                block_nbytes(self._schema, lengths=[sample.length for sample in samples]), dtype=torch.uint8
            )
            write_block(block, samples=samples, schema=self._schema)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(
            _share(folder, self._rank),
            look_ahead=_as_bytes(json.dumps(self._look.state()).encode()),
            schema=_as_bytes(b"" if self._schema is None else self._schema.to_bytes()),
            arrivals=np.array(list(mine), dtype=np.int64),
            num_segments=np.array([len(sample.segment_lengths) for sample in samples], dtype=np.int64),
            segment_lengths=np.array([n for sample in samples for n in sample.segment_lengths], dtype=np.int64),
            block=block.numpy(),
        )

    def restore(self, folder: Path) -> None:
        """Read back what all ranks wrote.

        Raises:
            BalanceError: a share is missing, or the run has another window or global batch size.
        """
        paths = sorted(folder.glob("pool_rank*.npz"))
        if not paths or paths != [_share(folder, rank) for rank in range(len(paths))]:
            raise BalanceError(f"{folder} lacks shares of the samples that wait: it has {[p.name for p in paths]}.")
        found: dict[int, tuple[int, Sample]] = {}
        state = None
        for rank, path in enumerate(paths):
            with np.load(path, allow_pickle=False) as share:
                state = json.loads(share["look_ahead"].tobytes())
                if share["schema"].size:
                    self._schema = SampleSchema.from_bytes(share["schema"].tobytes())
                found |= {
                    arrival: (rank, sample)
                    for arrival, sample in zip(share["arrivals"].tolist(), self._read(share), strict=True)
                }
        assert state is not None
        for name, ours in (("window", self._look.window), ("batch_size", self._look.batch_size)):
            if state[name] != ours:
                raise BalanceError(
                    f"{folder} was saved with a {name.replace('_', ' ')} of {state[name]}, and this run has {ours}: "
                    "keep --balance-lookahead and --global-batch-size while samples wait."
                )
        dp_size = self._topology.dp_size
        self._look = LookAhead.from_state(state | {"dp_size": dp_size})
        self._waiting = {}
        for index, arrival in enumerate(sorted(found)):
            rank, sample = found[arrival]
            home = rank if len(paths) == dp_size else index % dp_size
            self._waiting[arrival] = _Waiting(home, sample.segment_lengths, sample if home == self._rank else None)

    def _cost(self, segment_lengths: Sequence[int]) -> int:
        padded = self._topology.padded_seq_len(np.array(segment_lengths, dtype=np.int64))
        return sum(self._cost_model(length) for length in padded.tolist())

    def _read(self, share: np.lib.npyio.NpzFile) -> list[Sample]:
        ends = np.cumsum(share["num_segments"]).tolist()
        flat = share["segment_lengths"].tolist()
        segments = [tuple(flat[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        if not segments or self._schema is None:
            return []
        block = torch.from_numpy(share["block"])
        return read_block(block, lengths=[sum(n) for n in segments], schema=self._schema, segment_lengths=segments)


def _share(folder: Path, rank: int) -> Path:
    return folder / f"pool_rank{rank:05d}.npz"


def _as_bytes(text: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(text, dtype=np.uint8)
