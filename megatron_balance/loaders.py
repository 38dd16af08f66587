"""Balanced micro-batches without Megatron, for the loaders of torch, Accelerate, transformers' Trainer and TRL's.

Every rank plans alike from all lengths, and nothing is exchanged.

A step is a global batch of the epoch's order, cut into `num_microbatches` on each rank. Samples change rank and
micro-batch within their step only, so that a loss which is normalised over the global batch stays the same.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from itertools import count, islice
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray
from torch import distributed
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError, check_integer, check_sizes
from megatron_balance.lengths import dataset_lengths
from megatron_balance.model.shape import ModelShape
from megatron_balance.planner import as_integers, balance

__all__ = ["BalancedBatchSampler", "BalancedStream", "balance_trainer", "dataset_lengths"]

Plan = Sequence[Sequence[Sequence[int]]]
"""For every rank, for every micro-batch: positions in the data set."""


@dataclass(repr=False, eq=False)
class BalancedBatchSampler:
    """Yields micro-batches, lists of positions in the data set, so that all ranks take equally long.

    Iterating gives this rank's micro-batches, for `DataLoader(batch_sampler=...)`; `all_ranks()` has every rank's in
    turn, for Accelerate, which deals them out itself. The order of an epoch follows from `seed` and the epoch alone; a
    step whose samples do not fit in `num_microbatches` is mixed with the one that has fewest tokens.

    Args:
        lengths: `[num_samples]` tokens of each sample; where samples are packs of several, lists of theirs.
        global_batch_size: samples of a step, over all ranks.
        num_microbatches: micro-batches of each rank in a step (gradient accumulation); None for as many as each step
            needs: iterating then gives steps, lists of micro-batches.
        max_tokens: tokens that a micro-batch holds at most, with their padding if `padded`; None for no cap.
        max_samples: samples that a micro-batch holds at most; None for no cap.
        model: whose FLOPs are balanced, or a cost model; None to balance tokens.
        padded: a micro-batch is as wide as its longest sample, or pack. Else samples are packed without padding.
        objective: `microbatch` where ranks wait for one another in every micro-batch (FSDP, TRL), `step` where they do
            once a step (DDP).
        num_replicas: data-parallel ranks; None for those of torch.distributed.
        rank: this one; None for that of torch.distributed.
        shuffle: a new order in every epoch.
        seed: of the order, at least 0.
        drop_last: leave out the samples that fill no step; else the last step has fewer.

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

    lengths: Sequence[Any] | NDArray[Any]
    _: KW_ONLY
    global_batch_size: int
    num_microbatches: int | None
    max_tokens: int | None = None
    max_samples: int | None = None
    model: ModelShape | CostModel | None = None
    padded: bool = False
    objective: str = "microbatch"
    num_replicas: int | None = None
    rank: SupportsIndex | None = None
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = True

    def __post_init__(self) -> None:
        if self.num_replicas is None and self.rank is None:
            is_run = distributed.is_available() and distributed.is_initialized()
            self.num_replicas, self.rank = (distributed.get_world_size(), distributed.get_rank()) if is_run else (1, 0)
        check_sizes(self)
        if self.num_replicas is None or self.rank is None or not 0 <= int(self.rank) < self.num_replicas:
            raise BalanceError(
                f"rank is {self.rank} of num_replicas {self.num_replicas}: give both, rank below num_replicas, or none."
            )
        self._num_ranks = self.num_replicas
        self._packs: list[NDArray[np.int64]] | None = None
        if len(self.lengths) and np.ndim(self.lengths[0]):
            self._packs = [as_integers(pack, name="lengths") for pack in self.lengths]
            self.lengths = [int(pack.sum()) for pack in self._packs]
        self.lengths = self._tokens = as_integers(self.lengths, name="lengths")
        longest = int(self._tokens.max(initial=1))
        no_cap = longest * self.global_batch_size
        self._cap = min(self.max_tokens or no_cap, no_cap)
        if longest > self._cap:
            raise BalanceError(
                f"max_tokens is {self._cap}, and {int((self._tokens > self._cap).sum())} samples are longer, up to "
                f"{longest} tokens at position {int(self._tokens.argmax())}: cut or drop them, or raise max_tokens."
            )
        num_full = self._tokens.size // self.global_batch_size
        self.num_steps = num_full if self.drop_last else -(-self._tokens.size // self.global_batch_size)
        required = self._num_ranks * (self.num_microbatches or 1)
        fewest = self._tokens.size - (self.num_steps - 1) * self.global_batch_size
        if not self.num_steps or min(fewest, self.global_batch_size) < required:
            raise BalanceError(
                f"global_batch_size is {self.global_batch_size} of {self._tokens.size} samples, and each step, also "
                f"the last, needs {required} for its micro-batches: change it, num_microbatches or drop_last."
            )
        if isinstance(self.model, ModelShape):
            self.model = CostModel.from_shape(self.model)
        options = [getattr(self, field.name) for field in fields(self) if field.name not in ("lengths", "rank")]
        numbers = np.concatenate([self._tokens, *(self._packs or ())]).astype("<i8")
        self._digest = hashlib.sha256(repr(options).encode() + numbers.tobytes()).hexdigest()[:16]
        self.drop_last = True  # as its micro-batches are complete: Accelerate would repeat the first ones at the end
        self._ranks: Sequence[int] = (int(self.rank),)
        self._epoch = self._given = self._start = 0  # `_given`: micro-batches that the latest iterator gave
        self._steps: tuple[int, list[NDArray[np.int64]]] | None = None
        self._plan: tuple[tuple[int, int], Plan] | None = None
        self.plan(0, 0)

    def __len__(self) -> int:
        """Micro-batches of an epoch, or steps where their number is free."""
        return self.num_steps * (self.num_microbatches or 1) * len(self._ranks)

    @property
    def sampler(self) -> BalancedBatchSampler:
        """Itself: hosts set the epoch of a batch sampler's sampler."""
        return self

    batch_sampler = sampler  # Trainer, after resuming, sets the epoch of the batch sampler's batch sampler

    def set_epoch(self, epoch: int) -> None:
        """The order of this epoch from the next `iter()` on. Call it with the same number on every rank."""
        self._epoch, self._given, self._start = check_integer("epoch", epoch, minimum=0), 0, 0

    def __iter__(self) -> Iterator[list[Any]]:
        self._given, self._start = self._start, 0
        return self._iterate(self._epoch, self._given)

    def _iterate(self, epoch: int, first: int) -> Iterator[list[Any]]:
        for number in range(first, len(self)):
            slots, rank = divmod(number, len(self._ranks))
            step, slot = divmod(slots, self.num_microbatches or 1)
            self._given = number + 1
            batches = [list(batch) for batch in self.plan(epoch, step)[self._ranks[rank]]]
            yield batches if self.num_microbatches is None else batches[slot]

    def all_ranks(self) -> BalancedBatchSampler:
        """A sampler of the same plans that yields every rank's micro-batches, slot by slot and rank by rank."""
        sampler = copy.copy(self)
        sampler._ranks, sampler._digest = range(self._num_ranks), f"{self._digest}, all ranks"
        sampler.set_epoch(self._epoch)
        return sampler

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on after the micro-batches that the latest iterator gave.

        Worker processes draw micro-batches ahead of training: torchdata's StatefulDataLoader saves the state that goes
        with the last one trained on.
        """
        return {"epoch": self._epoch, "microbatches": self._given, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next `iter()` go on where the state was taken.

        Raises:
            BalanceError: the state is of other lengths or options.
        """
        if state.get("digest") != self._digest:
            raise BalanceError(
                "The state is of a sampler with other lengths or options: resume with those of the first run, or start "
                "the epoch anew."
            )
        self.set_epoch(state["epoch"])
        self._given = self._start = check_integer("microbatches", state["microbatches"], minimum=0)

    def plan(self, epoch: int, step: int) -> Plan:
        """`plan[rank][microbatch]` are positions in the data set; the same on every rank."""
        if self._steps is None or self._steps[0] != epoch:
            self._steps = epoch, self._steps_of(epoch)
        if self._plan is None or self._plan[0] != (epoch, step):
            self._plan = (epoch, step), self._planned(self._steps[1][step], number=self.num_microbatches)
        return self._plan[1]

    def _planned(self, ids: NDArray[np.int64], *, number: int | None) -> Plan:
        """The plan of one global batch in so many micro-batches of each rank, or as many as it needs."""
        packs = None if self._packs is None or self.padded else [self._packs[position] for position in ids]
        plan = balance(
            self._tokens[ids] if packs is None else np.concatenate(packs),
            num_segments=None if packs is None else [pack.size for pack in packs],
            num_ranks=self._num_ranks,
            max_tokens=self._cap,
            max_samples=self.max_samples,
            model=self.model,
            padded=self.padded,
            objective=self.objective,
            num_microbatches=number,
            allow_empty=False,
        )
        return [[ids[batch].tolist() for batch in batches] for batches in plan]

    def _steps_of(self, epoch: int) -> list[NDArray[np.int64]]:
        """The samples of every step of an epoch, so that each fits in `num_microbatches`."""
        order, size = np.arange(self._tokens.size), self.global_batch_size
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        steps = [order[first : first + size] for first in range(0, self.num_steps * size, size)]
        for step, ids in enumerate(steps):
            if self.num_microbatches is None or self._fits(ids):
                continue
            full = range(max(self._tokens.size // size, 1))
            shortest = min(full, key=lambda other: int(self._tokens[steps[other]].sum()))
            both = np.concatenate([ids, steps[shortest]])
            both = both[np.argsort(-self._tokens[both], kind="stable")]
            chosen = slice(0, 2 * ids.size, 2)
            mixed = both[chosen], np.delete(both, chosen)
            if not self.shuffle or shortest == step or not all(map(self._fits, mixed)):
                required = len(self._planned(ids, number=None)[0])
                raise BalanceError(
                    f"num_microbatches is {self.num_microbatches}, and step {step} of epoch {epoch} needs {required} "
                    f"on each rank under max_tokens {self._cap}: give that many, or more tokens."
                )
            steps[step], steps[shortest] = mixed
        return steps

    def _fits(self, ids: NDArray[np.int64]) -> bool:
        """True where a step fits in `num_microbatches` of each rank; most are sure to, and not planned to see it."""
        lengths, num_bins = -np.sort(-self._tokens[ids]), self._num_ranks * (self.num_microbatches or 1)
        if self.padded:
            counts, head = (self._cap // lengths.clip(1)).clip(1, self.max_samples).tolist(), 0
            for _ in range(num_bins):
                head += counts[head] if head < ids.size else 0
            return head >= ids.size
        # The longest first: a sample finds room while bins are not, on the mean, too full for it. Packs come by cost.
        before = (lengths.cumsum() if self._packs is None else lengths.sum()) - lengths
        if self.max_samples is None and bool((before < num_bins * (self._cap - lengths + 1)).all()):
            return True
        try:
            self._planned(ids, number=self.num_microbatches)
        except BalanceError:
            return False
        return True


class BalancedStream(IterableDataset[list[Any]]):
    """Yields this rank's micro-batches, lists of rows, for `DataLoader(stream, batch_size=None, collate_fn=...)`.

    The next `global_batch_size` rows are kept, planned and given: order changes within a step only. Every rank reads
    the whole stream, in the same order: do not split it by ranks. Of several workers each gives its share of the
    micro-batches, and their order stays.

    Args:
        rows: read anew in every epoch. A last step that is not full is left out.
        length: tokens of a row.
        global_batch_size: rows of a step, over all ranks.
        num_microbatches: micro-batches of each rank in a step.
        options: `max_tokens`, `max_samples`, `model`, `padded`, `objective`, `num_replicas`, `rank`, as of
            `BalancedBatchSampler`.

    Raises:
        BalanceError: as of the sampler; where a step does not fit, when it is read.

    Example:
        >>> stream = BalancedStream(["aaa", "b", "cc"], length=len, global_batch_size=3, num_microbatches=2)
        >>> list(stream)
        [['aaa'], ['b', 'cc']]
    """

    def __init__(
        self,
        rows: Iterable[Any],
        *,
        length: Callable[[Any], int],
        global_batch_size: int,
        num_microbatches: int,
        **options: Any,
    ) -> None:
        super().__init__()
        self._rows, self._length, self._count, self._start = rows, length, 0, 0
        self._size = check_integer("global_batch_size", global_batch_size)
        self._slots = check_integer("num_microbatches", num_microbatches)
        self._options = {"global_batch_size": self._size, "num_microbatches": self._slots, "shuffle": False, **options}
        sampler = BalancedBatchSampler([1] * self._size, **self._options)  # wrong options show here
        self._options |= {"num_replicas": sampler.num_replicas, "rank": sampler.rank}  # workers are in no process group

    def __iter__(self) -> Iterator[list[Any]]:
        worker = get_worker_info()
        number, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self._count, self._start = self._start, 0
        rows, batches, num_read = iter(self._rows), list[list[Any]](), 0
        for index in count(self._count * num_workers + number, num_workers):
            step, slot = divmod(index, self._slots)
            if num_read <= step:
                skipped = (step - num_read) * self._size
                buffer = list(islice(rows, skipped, skipped + self._size))
                if len(buffer) < self._size:
                    return
                sampler = BalancedBatchSampler([self._length(row) for row in buffer], **self._options)
                batches, num_read = [[buffer[position] for position in batch] for batch in sampler], step + 1
            self._count += 1
            yield batches[slot]

    def state_dict(self) -> dict[str, Any]:
        """Micro-batches given so far; of each worker its own, as StatefulDataLoader saves them."""
        return {"microbatches": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next `iter()` leave out so many micro-batches."""
        self._start = check_integer("microbatches", state["microbatches"], minimum=0)


def balance_trainer(
    trainer: Any,
    *,
    lengths: Sequence[Any] | NDArray[Any] | None = None,
    model: ModelShape | CostModel | None = None,
    padded: bool | None = None,
    **options: Any,
) -> BalancedBatchSampler:
    """Makes a Trainer train on micro-batches of the sampler that it returns; call it before `train()`, on every rank.

    Steps keep their samples: `per_device_train_batch_size` times `gradient_accumulation_steps` times the ranks. A rank
    runs `gradient_accumulation_steps` micro-batches of any number of samples.

    Args:
        trainer: of transformers or TRL, with a data set that has a length.
        lengths: of each row, as of the sampler; None to read them from the data set, see `dataset_lengths`.
        model: as of the sampler; None for the shape in the trainer's model's configuration.
        padded: the collator pads to the longest row; None to see it from the trainer's collator.
        options: others of `BalancedBatchSampler`: `max_tokens`, `max_samples`, `objective`, `seed`, `drop_last`.

    Raises:
        BalanceError: a setting makes the loss depend on which samples share a micro-batch, or cuts batches anew.
    """
    args, dataset, collator = trainer.args, trainer.train_dataset, trainer.data_collator
    _check_settings(trainer)
    joins = getattr(collator, "padding_free", False) or "Flattening" in type(collator).__name__
    seed = args.seed if args.data_seed is None else args.data_seed
    lengths = dataset_lengths(dataset) if lengths is None else lengths
    if len(lengths) != len(dataset):
        raise BalanceError(f"lengths has {len(lengths)} entries, and the data set {len(dataset)} rows: give each one.")
    sampler = BalancedBatchSampler(
        lengths,
        global_batch_size=trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size,
        num_microbatches=args.gradient_accumulation_steps,
        model=ModelShape.from_hf_config(trainer.model.config.to_dict()) if model is None else model,
        padded=not joins if padded is None else padded,
        num_replicas=args.world_size,
        rank=args.process_index,
        **{"drop_last": args.dataloader_drop_last, "seed": seed, **options},
    )
    stock = trainer.get_train_dataloader

    def get_train_dataloader(*args: Any, **keywords: Any) -> DataLoader[Any]:
        loader = stock(*args, **keywords)
        # Not prepared by Accelerate, which would deal this rank's micro-batches out to all ranks again.
        names = "collate_fn num_workers pin_memory persistent_workers prefetch_factor worker_init_fn in_order"
        options = {name: getattr(loader, name) for name in (*names.split(), "multiprocessing_context")}
        return DataLoader(loader.dataset, batch_sampler=sampler, **options)

    trainer.get_train_dataloader = get_train_dataloader
    return sampler


def _check_settings(trainer: Any) -> None:
    """Refuses settings with which a step's loss depends on its micro-batches, as stock's own does with them."""
    args, config = trainer.args, trainer.args.accelerator_config
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    for is_set, words in (
        (config.split_batches, "split_batches=True cuts micro-batches anew: leave it out"),
        (config.dispatch_batches, "dispatch_batches=True deals rows out anew: leave it out"),
        (
            args.world_size > 1 and not getattr(args, "average_tokens_across_devices", False),
            "average_tokens_across_devices=False lets each rank divide by its own tokens, so that losses depend on "
            "which rank runs a sample: set it True",
        ),
        (
            getattr(parallel, "non_data_parallel_size", 1) > 1,
            "ParallelismConfig has tensor, context or sequence parallelism: return from get_train_dataloader the "
            "loader of a BalancedBatchSampler with num_replicas and rank of the data-parallel group",
        ),
    ):
        if is_set:
            raise BalanceError(f"{words}.")
    if not getattr(trainer, "model_accepts_loss_kwargs", True) and trainer.compute_loss_func is None:
        warnings.warn(
            "The model's forward takes no **kwargs, so that Trainer averages the means of micro-batches: the loss "
            "depends on which samples share one, balanced or not.",
            stacklevel=3,
        )
