"""Balanced micro-batches of a stream: rows that come one after the other, without a length and without positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from megatron_balance.errors import check_integer
from megatron_balance.loaders.sampler import BalancedBatchSampler, ranks_of_run


class BalancedStream(IterableDataset[list[Any]]):
    """Yields this rank's micro-batches, lists of rows, for `DataLoader(stream, batch_size=None, collate_fn=...)`.

    The next `global_batch_size` rows are kept, planned and given, so that a step has the rows that it has without
    balancing; order changes within a step only. Every rank reads the whole stream, in the same order: do not split it
    by ranks. With workers each gives its share of the micro-batches, and their order stays.

    Args:
        rows: read anew in every epoch. A last step that is not full is left out.
        length: tokens of a row.
        global_batch_size: rows of a step, over all ranks.
        num_microbatches: micro-batches of each rank in a step.
        options: others of `BalancedBatchSampler`: `max_tokens`, `max_samples`, `model`, `padded`, `objective`,
            `num_replicas`, `rank`.

    Raises:
        BalanceError: as of the sampler, when the step that does not fit is read.

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
        replicas, rank = ranks_of_run(options.pop("num_replicas", None), options.pop("rank", None))
        self._options = {
            **options,
            "global_batch_size": check_integer("global_batch_size", global_batch_size),
            "num_microbatches": check_integer("num_microbatches", num_microbatches),
            "num_replicas": replicas,
            "rank": rank,
            "shuffle": False,
        }
        self._rows, self._length = rows, length
        self._count = self._start = 0

    def __iter__(self) -> Iterator[list[Any]]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        start, self._start = self._start, 0
        self._count = start
        for index, batch in enumerate(self._microbatches(skip=start * count), start=start * count):
            if index % count == number:
                self._count += 1
                yield batch

    def _microbatches(self, *, skip: int) -> Iterator[list[Any]]:
        """All of this rank's from the step on in which a micro-batch of this number lies."""
        size, slots = self._options["global_batch_size"], self._options["num_microbatches"]
        rows = iter(self._rows)
        steps, skipped = divmod(skip, slots)
        for _ in islice(rows, steps * size):
            pass
        while len(step := list(islice(rows, size))) == size:
            sampler = BalancedBatchSampler([self._length(row) for row in step], **self._options)
            for positions in islice(sampler, skipped, None):
                yield [step[position] for position in positions]
            skipped = 0

    def state_dict(self) -> dict[str, Any]:
        """Micro-batches given so far; of each worker its own, as StatefulDataLoader saves them."""
        return {"microbatches": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next `iter()` leave out so many micro-batches: it reads their rows, and plans none of them."""
        self._start = check_integer("microbatches", state["microbatches"], minimum=0)
