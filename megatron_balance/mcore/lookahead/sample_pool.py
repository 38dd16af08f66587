"""Keeps loaded samples until their step, under `--balance-lookahead`.

Every rank knows the lengths and homes of all samples that wait, and chooses the same next batch
(`planner/selection/lookahead.py`); the samples themselves stay with the rank that loaded them. A checkpoint holds the
pool, each rank its share, in a file that any number of ranks can read again (`pool_files.py`).

Invariants: a sample leaves once; the choice of samples depends on the order of the data set and on gathered lengths
alone, not on the ranks that loaded them; a restored run continues as if it had not been interrupted, also with another
data-parallel size, whose ranks divide the waiting samples again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.lookahead import pool_files
from megatron_balance.planner.selection.lookahead import LookAhead
from megatron_balance.runtime.gathered import GatheredLengths
from megatron_balance.samples.sample import Sample, SampleSchema
from megatron_balance.topology import Topology


@dataclass(frozen=True)
class _Waiting:
    """A waiting sample: its home rank and the tokens of its sequences, and on its home rank the sample itself."""

    home_rank: int
    segment_lengths: tuple[int, ...]
    sample: Sample | None


class SamplePool:
    """One rank's view of the pool.

    Args:
        window: global batches to choose from.
        global_batch_size: samples that leave each step.
        topology: the ranks.
        cost_model: cost of a sample.
        rank: this rank in the data-parallel group.
        micro_batch_size: rows of an item; the loader gives each rank in turn one item.
    """

    def __init__(
        self,
        window: int,
        *,
        global_batch_size: int,
        topology: Topology,
        cost_model: CostModel,
        rank: int,
        micro_batch_size: int = 1,
    ) -> None:
        self._look = LookAhead(window, batch_size=global_batch_size, dp_size=topology.dp_size)
        self._topology = topology
        self._cost_model = cost_model
        self._rank = rank
        self._micro_batch_size = micro_batch_size
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
        """A copy of the pool. Samples never change, so both pools share them."""
        other = copy.copy(self)
        other._look = LookAhead.from_state(self._look.state())
        other._waiting = dict(self._waiting)
        return other

    def add(self, gathered: GatheredLengths, samples: Sequence[Sample]) -> None:
        """Add the samples that all ranks loaded.

        Args:
            gathered: lengths and home ranks; fewer samples than were missing mean that the data has ended.
            samples: this rank's, in the order of `gathered`.

        Raises:
            BalanceError: the number of samples is not a multiple of the global batch size, or they have ragged keys.
        """
        if gathered.ragged_lengths is not None:
            raise BalanceError(
                f"--balance-lookahead {self._look.window} keeps samples of tokens alone, and these have ragged keys "
                "(NAME beside NAME_lengths): set --balance-lookahead 1."
            )
        batch_size = self._look.batch_size
        if len(gathered.lengths) % batch_size:
            raise BalanceError(
                f"--balance-lookahead {self._look.window}: {len(gathered.lengths)} rows with tokens were loaded, which "
                f"is no multiple of --global-batch-size {batch_size}. Drop empty rows, or set --balance-lookahead 1."
            )
        ids = np.arange(len(gathered.lengths))
        segments = gathered.segments_of(ids) or [(int(length),) for length in gathered.lengths]
        in_order = self._in_order_of_data(gathered)
        arrivals = self._look.push([self._cost(segments[sample_id]) for sample_id in in_order])
        for sample_id, arrival in zip(in_order, arrivals, strict=True):
            home = int(gathered.home_ranks[sample_id])
            mine = samples[sample_id - gathered.offset] if home == self._rank else None
            self._waiting[arrival] = _Waiting(home, segments[sample_id], mine)
        self._schema = self._schema or gathered.schema
        if self._look.num_missing:
            self._look.drain()

    def take(self) -> tuple[GatheredLengths, list[Sample]]:
        """Choose the next step's samples.

        Returns:
            Their lengths, as if just gathered, and this rank's samples.

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

    def save(self, folder: Path) -> None:
        """Write this rank's share into a folder."""
        pool_files.write_share(
            folder,
            rank=self._rank,
            num_shares=self._topology.dp_size,
            look_ahead=self._look.state(),
            schema=self._schema,
            samples={arrival: entry.sample for arrival, entry in self._waiting.items() if entry.sample is not None},
        )

    def restore(self, folder: Path) -> None:
        """Read the shares of all ranks; each rank keeps the samples whose home rank it is now.

        While samples wait, look-ahead keeps the number of ranks that it began with, so that the batches equal those of
        a run without interruption, on any number of ranks.

        Raises:
            BalanceError: a share is missing or damaged, or the run has another window or global batch size.
        """
        index = pool_files.read_index(folder)
        for name, ours in (("window", self._look.window), ("batch_size", self._look.batch_size)):
            if index.look_ahead[name] != ours:
                raise BalanceError(
                    f"{folder} was saved with a {name.replace('_', ' ')} of {index.look_ahead[name]}, and this run has "
                    f"{ours}: keep --balance-lookahead and --global-batch-size while samples wait."
                )
        dp_size = self._topology.dp_size
        homes = index.share_of
        if index.num_shares != dp_size:
            homes = {arrival: place % dp_size for place, arrival in enumerate(sorted(index.segment_lengths))}
        mine = {arrival for arrival, home in homes.items() if home == self._rank}
        found: dict[int, Sample] = {}
        if index.schema is not None:
            for share in sorted({index.share_of[arrival] for arrival in mine}):
                found |= pool_files.read_samples(folder, rank=share, schema=index.schema)
        self._schema = index.schema
        self._waiting = {
            arrival: _Waiting(
                homes[arrival], index.segment_lengths[arrival], found[arrival] if arrival in mine else None
            )
            for arrival in sorted(homes)
        }
        # Costs are recomputed with this run's cost model. The data may have ended for the run that saved and not for
        # this one, which may train more steps.
        state = {**index.look_ahead, "drained": False}
        state["costs"] = [self._cost(self._waiting[arrival].segment_lengths) for arrival in state["arrivals"]]
        self._look = LookAhead.from_state(state if homes else state | {"dp_size": dp_size})

    def _in_order_of_data(self, gathered: GatheredLengths) -> list[int]:
        """Sample ids in the order in which one rank alone would have loaded them."""
        homes, counts = gathered.home_ranks, gathered.num_samples_per_rank
        place = np.arange(len(homes)) - np.repeat(np.cumsum(counts) - counts, counts)
        item, row = np.divmod(place, self._micro_batch_size)
        return np.lexsort((row, homes, item)).tolist()

    def _cost(self, segment_lengths: Sequence[int]) -> int:
        padded = self._topology.padded_seq_len(np.array(segment_lengths, dtype=np.int64))
        return sum(self._cost_model(length) for length in padded.tolist())
