"""Balanced micro-batches for the loaders of torch: every rank plans alike from all lengths, and nothing is exchanged.

A step is a global batch of the epoch's order, cut into `num_microbatches` on each rank. Samples change rank and
micro-batch within their step only, so that a loss which is normalised over the global batch stays the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import distributed

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError, check_integer
from megatron_balance.model.shape import ModelShape
from megatron_balance.planner import as_integers, balance, build_data_schedule
from megatron_balance.topology import Limits, Topology

MAX_ORDERS = 8
"""Orders of an epoch that are tried until each of its steps fits in `num_microbatches`."""

Plan = Sequence[Sequence[Sequence[int]]]
"""For every rank, for every micro-batch: positions in the data set."""


class BalancedBatchSampler:
    """Yields micro-batches, lists of positions in the data set, so that all ranks take equally long.

    Iterating gives this rank's micro-batches, for `DataLoader(batch_sampler=...)`. `all_ranks()` gives every rank's in
    turn, for Accelerate, which deals them out itself. `steps()` gives the micro-batches of one step as a list, also
    with a free number of them. Each step has the samples that it has without balancing.

    Args:
        lengths: `[num_samples]` tokens of each sample. With `num_segments` those of each segment, sample by sample.
        global_batch_size: samples of a step, over all ranks.
        num_microbatches: micro-batches of each rank in a step (gradient accumulation); None for as many as each step
            needs, which only `steps()` can give.
        max_tokens: tokens that a micro-batch holds at most, with their padding if `padded`; None for no cap.
        max_samples: samples that a micro-batch holds at most; None for no cap.
        model: whose FLOPs are balanced, or a cost model; None to balance tokens.
        padded: a micro-batch is as wide as its longest sample. Else samples are packed without padding.
        objective: `microbatch` where ranks wait for one another in every micro-batch (FSDP, TRL), `step` where they do
            once a step (DDP).
        num_replicas: data-parallel ranks; None for those of torch.distributed.
        rank: this one; None for that of torch.distributed.
        shuffle: a new order in every epoch, from `seed` and the epoch alone.
        seed: of the order, at least 0.
        drop_last: leave out the samples that fill no step; else the last step has fewer.
        num_segments: `[num_samples]` segments of each sample, where a sample is a pack of several.

    Raises:
        BalanceError: an argument is wrong, a sample is over the cap, or samples are too few or too long for
            `num_microbatches`; says which step, and the number that fits.

    Example:
        >>> sampler = BalancedBatchSampler(
        ...     [7, 5, 4, 4], global_batch_size=4, num_microbatches=1, num_replicas=2, rank=0, shuffle=False
        ... )
        >>> list(sampler), list(sampler.all_ranks())
        ([[0, 3]], [[0, 3], [1, 2]])
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[Any],
        *,
        global_batch_size: int,
        num_microbatches: int | None,
        max_tokens: int | None = None,
        max_samples: int | None = None,
        model: ModelShape | CostModel | None = None,
        padded: bool = False,
        objective: str = "microbatch",
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        num_segments: Sequence[int] | NDArray[Any] | None = None,
    ) -> None:
        self.num_replicas, self.rank = ranks_of_run(num_replicas, rank)
        self.global_batch_size = check_integer("global_batch_size", global_batch_size)
        self.num_microbatches = num_microbatches and check_integer("num_microbatches", num_microbatches)
        self.seed, self.shuffle, self.drop_last = check_integer("seed", seed, minimum=0), shuffle, drop_last
        self._segments = self.lengths = as_integers(lengths, name="lengths")
        self._num_segments = None if num_segments is None else as_integers(num_segments, name="num_segments")
        if self._num_segments is not None:
            if padded or int(self._num_segments.sum()) != self._segments.size:
                raise BalanceError(
                    f"num_segments counts {int(self._num_segments.sum())} segments of {self._segments.size} lengths, "
                    f"with padded={padded}: give a length for each, and pack them without padding."
                )
            self._ends = self._num_segments.cumsum()
            totals = np.concatenate([[0], self._segments.cumsum()])
            self.lengths = totals[self._ends] - totals[self._ends - self._num_segments]
        self._is_capped = max_tokens is not None or max_samples is not None
        longest = int(self.lengths.max(initial=1))
        cap = longest * self.global_batch_size if max_tokens is None else check_integer("max_tokens", max_tokens)
        self._options: dict[str, Any] = {
            "num_ranks": self.num_replicas,
            "max_tokens": cap,
            "max_samples": max_samples,
            "model": CostModel.from_shape(model) if isinstance(model, ModelShape) else model or CostModel.tokens(),
            "padded": padded,
            "objective": objective,
        }
        if longest > cap:
            raise BalanceError(
                f"max_tokens is {cap}, and {int((self.lengths > cap).sum())} samples are longer, up to "
                f"{longest} tokens at position {int(self.lengths.argmax())}: cut or drop them, or raise max_tokens."
            )
        required = self.num_replicas * (self.num_microbatches or 1)
        fewest = self.lengths.size - (self.num_steps - 1) * self.global_batch_size
        if not self.num_steps or min(fewest, self.global_batch_size) < required:
            raise BalanceError(
                f"global_batch_size is {self.global_batch_size} of {self.lengths.size} samples, and each step, also "
                f"the last, needs {required} for its micro-batches: change it, num_microbatches or drop_last."
            )
        self._latest = MicrobatchIterator(self, epoch=0)
        self._state: Mapping[str, Any] | None = None
        self._order: tuple[int, NDArray[np.int64]] | None = None
        self._plan: tuple[tuple[int, int], Plan] | None = None
        self.plan(0, 0)

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        spare = 0 if self.drop_last else self.global_batch_size - 1
        return (self.lengths.size + spare) // self.global_batch_size

    def __len__(self) -> int:
        """Micro-batches of this rank in an epoch.

        Raises:
            TypeError: `num_microbatches` is None, so that their number follows from each plan.
        """
        if self.num_microbatches is None:
            raise TypeError("num_microbatches is None: how many micro-batches an epoch has, only its plans say.")
        return self.num_steps * self.num_microbatches

    @property
    def sampler(self) -> BalancedBatchSampler:
        """Itself: hosts set the epoch of a batch sampler's sampler."""
        return self

    batch_sampler = sampler  # Trainer, after resuming, sets the epoch of the batch sampler's batch sampler

    def set_epoch(self, epoch: int) -> None:
        """The order of this epoch from the next `iter()` on. Call it with the same number on every rank."""
        self._latest, self._state = MicrobatchIterator(self, epoch=check_integer("epoch", epoch, minimum=0)), None

    def __iter__(self) -> MicrobatchIterator:
        return self.iterate(self.rank)

    def iterate(self, *ranks: int) -> MicrobatchIterator:
        """The micro-batches of these ranks in turn, from where a loaded state says, else from the epoch's start."""
        if self.num_microbatches is None:
            raise BalanceError("num_microbatches is None: iterate over sampler.steps(), or set a number.")
        self._latest = MicrobatchIterator(self, *ranks, epoch=self._latest.epoch)
        if self._state is not None:
            self._latest.load_state_dict(self._state)
        self._state = None
        return self._latest

    def all_ranks(self) -> AllRanks:
        """Every rank's micro-batches, slot by slot and rank by rank."""
        return AllRanks(self)

    def steps(self) -> Iterator[list[list[int]]]:
        """This rank's micro-batches, a list for every step."""
        epoch = self._latest.epoch
        for step in range(self.num_steps):
            yield [list(batch) for batch in self.plan(epoch, step)[self.rank]]

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on after the micro-batches that the latest iterator gave.

        Worker processes draw micro-batches ahead of training: torchdata's StatefulDataLoader saves the state that goes
        with the last one trained on.
        """
        return self._latest.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next `iter()` go on where the state was taken.

        Raises:
            BalanceError: the state is of other lengths or options.
        """
        self._latest.load_state_dict(state)
        self._state = state

    def digest(self) -> str:
        """A hash of all that plans depend on; the same on every rank."""
        shape = (self.global_batch_size, self.num_microbatches, self.seed, self.shuffle, self.drop_last)
        arrays = [self._segments, self._segments[:0] if self._num_segments is None else self._num_segments]
        text = repr((shape, self._options)).encode() + b"".join(array.astype("<i8").tobytes() for array in arrays)
        return hashlib.sha256(text).hexdigest()[:16]

    def plan(self, epoch: int, step: int) -> Plan:
        """`plan[rank][microbatch]` are positions in the data set; the same on every rank."""
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._order_that_fits(epoch)
        if self._plan is None or self._plan[0] != (epoch, step):
            ids = self._order[1][step * self.global_batch_size :][: self.global_batch_size]
            self._plan = (epoch, step), self._planned(ids, number=self.num_microbatches)
        return self._plan[1]

    def _planned(self, ids: NDArray[np.int64], *, number: int | None) -> Plan:
        """The plan of one global batch in so many micro-batches of each rank, or as many as it needs."""
        if self._num_segments is None:
            plan: Plan = balance(self.lengths[ids], num_microbatches=number, allow_empty=False, **self._options)
        else:
            counts = self._num_segments[ids]
            firsts = np.repeat(self._ends[ids] - counts.cumsum(), counts)
            plan = build_data_schedule(
                self._segments[firsts + np.arange(firsts.size)],
                num_segments=counts,
                cost_model=self._options["model"],
                topology=Topology(self.num_replicas),
                limits=Limits(self._options["max_tokens"], micro_batch_size=self._options["max_samples"]),
                objective=self._options["objective"],
                num_microbatches=number,
            ).ranks
        return [[ids[list(batch)].tolist() for batch in batches] for batches in plan]

    def _order_that_fits(self, epoch: int) -> NDArray[np.int64]:
        """The order of an epoch: the first of a few in which every step fits in `num_microbatches`."""
        step, order = 0, np.arange(self.lengths.size)
        for attempt in range(MAX_ORDERS if self.shuffle else 1):
            if self.shuffle:
                order = np.random.default_rng([self.seed, epoch, attempt]).permutation(self.lengths.size)
            self._plan = None  # of another order
            for step in self._steps_in_doubt(order):
                ids = order[step * self.global_batch_size :][: self.global_batch_size]
                try:
                    self._plan = (epoch, step), self._planned(ids, number=self.num_microbatches)
                except BalanceError:
                    break
            else:
                return order
        ids = order[step * self.global_batch_size :][: self.global_batch_size]
        required = len(self._planned(ids, number=None)[0])
        raise BalanceError(
            f"num_microbatches is {self.num_microbatches}, and step {step} of epoch {epoch} needs {required} on each "
            f"rank under max_tokens {self._options['max_tokens']}: set num_microbatches to that, or raise max_tokens."
        )

    def _steps_in_doubt(self, order: NDArray[np.int64]) -> list[int]:
        """Steps that may not fit. Most fit in any order, by their tokens and their longest sample."""
        if self.num_microbatches is None or not self._is_capped:
            return []
        starts = np.arange(self.num_steps) * self.global_batch_size
        lengths = self.lengths[order[: self.num_steps * self.global_batch_size]]
        num_bins = self.num_replicas * self.num_microbatches
        # Longest first into the emptiest micro-batch ends at most this full.
        fullest = np.add.reduceat(lengths, starts) + (num_bins - 1) * np.maximum.reduceat(lengths, starts)
        is_sure = fullest <= num_bins * self._options["max_tokens"]
        if self._options["padded"] or self._options["max_samples"] is not None:
            is_sure[:] = False
        return np.flatnonzero(~is_sure).tolist()


class MicrobatchIterator(Iterator[list[int]]):
    """The micro-batches of some ranks in turn, each a list of its own, with the state of where it stands."""

    def __init__(self, sampler: BalancedBatchSampler, *ranks: int, epoch: int) -> None:
        self._sampler, self._ranks, self.epoch, self._count = sampler, ranks, epoch, 0

    def __next__(self) -> list[int]:
        number, rank = divmod(self._count, len(self._ranks))
        step, slot = divmod(number, self._sampler.num_microbatches or 1)
        if step >= self._sampler.num_steps:
            raise StopIteration
        self._count += 1
        return list(self._sampler.plan(self.epoch, step)[self._ranks[rank]][slot])

    def state_dict(self) -> dict[str, Any]:
        """As the sampler's."""
        return {"epoch": self.epoch, "microbatches": self._count, "digest": self._sampler.digest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the sampler's."""
        if state.get("digest") != self._sampler.digest():
            raise BalanceError(
                "The state is of a sampler with other lengths or options: resume with those of the first run, or start "
                "the epoch anew."
            )
        self.epoch, self._count = int(state["epoch"]), int(state["microbatches"])


class AllRanks:
    """Every rank's micro-batches in turn, as Accelerate's `prepare` deals batches out.

    It has no `batch_size`, since Accelerate leaves out rounds whose batches differ in it, and no last round to fill up.
    """

    drop_last = True

    def __init__(self, sampler: BalancedBatchSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> MicrobatchIterator:
        return self.sampler.iterate(*range(self.sampler.num_replicas))

    def __len__(self) -> int:
        return len(self.sampler) * self.sampler.num_replicas


def ranks_of_run(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Data-parallel ranks and this one's number: those given, else those of torch.distributed, else one rank."""
    if num_replicas is None and rank is None:
        is_run = distributed.is_available() and distributed.is_initialized()
        return (distributed.get_world_size(), distributed.get_rank()) if is_run else (1, 0)
    if num_replicas is None or rank is None or not 0 <= rank < num_replicas:
        raise BalanceError(
            f"rank is {rank} of num_replicas {num_replicas}: give both, rank below num_replicas, or none."
        )
    return check_integer("num_replicas", num_replicas), check_integer("rank", rank, minimum=0)
