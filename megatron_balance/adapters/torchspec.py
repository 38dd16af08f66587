"""TorchSpec adapter: ranks of a speculative-decoding trainer get batches of similar lengths.

`install(approach="B", window=4)` before the controller starts, or `python -m megatron_balance.adapters.torchspec
--approach B -m torchspec.train_entry ...` in place of `python -m torchspec.train_entry ...`.

TorchSpec's controller collects samples in a pool, and every dispatch gives each rank `per_dp_rank_batch_size` of
them in turn. The trainer pads them to the longest, and all ranks wait for the slowest.

    A  the samples of a dispatch are given to ranks by length (`assign_ranks`)
    B  also, they are chosen among `window` dispatches' worth of the pool (`DispatchWindow`)
    C  also, the data set is sorted into dispatches of similar lengths beforehand (`bucketed_order`)

Each includes the one before it. Samples of C do not come back exactly in its order, since inference runs several
batches at once and may fail on some. With a window the dispatches form again around the oldest sample: those that leave
are brought to the front of the pool, and TorchSpec's own function takes them, with its bytes, queues and logs.

Invariants: every sample goes once, and every rank gets exactly as many, because its data fetcher waits for that many.
A dispatch that the stock controller could make waits for a full window only while more samples may come: the prompts
are not all handed out, inference is not paused by `max_sample_pool_size`, and one came within `MAX_IDLE_CALLS` calls.
At the end of the data all whole dispatches leave.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.adapters.kit import Function, Hook, Installation, check_not_started, even_parts, launch
from megatron_balance.errors import BalanceError, check_integer
from megatron_balance.planner import as_integers

__all__ = ["DispatchWindow", "Settings", "assign_ranks", "bucketed_order", "install", "installation", "is_installed"]

CONTROLLER = "torchspec.controller.training_controller"

WINDOWS = (2, 3, 4)
"""Sizes of the pool, in dispatches: larger ones gain little and keep more hidden states in Mooncake."""

MAX_IDLE_CALLS = 500
"""Calls of `try_dispatch_batch` without a new sample after which the pool is taken as it is. TorchSpec's loop calls
every 10 ms, and considers the data exhausted after the same number."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `install`; BalanceError where one is not allowed."""

    approach: str
    window: int
    cost: str
    bucket_batches: int

    def __post_init__(self) -> None:
        for name, choices in (
            ("approach", ("A", "B", "C")),
            ("cost", ("padded", "tokens") if self.approach == "A" else ("padded",)),
            ("window", WINDOWS),
        ):
            if getattr(self, name) not in choices:
                text = f"{name} is {getattr(self, name)!r} with approach {self.approach}"
                raise BalanceError(f"{text}: it must be one of {', '.join(map(str, choices))}.")
        check_integer("bucket_batches", self.bucket_batches)


_REMEDY = "install it from its git repository (PyPI's is a placeholder), or train without balancing"
installation: Installation[Settings] = Installation("torchspec", versions=("0.1.0",), remedy=_REMEDY)
is_installed = installation.is_installed


def install(
    *, approach: str = "B", window: int = 2, cost: str = "padded", bucket_batches: int = 1
) -> Installation[Settings]:
    """Balance the ranks of TorchSpec's trainer. Call it in the driver, before the controller starts.

    Installing twice installs once.

    Args:
        approach: `A`, `B` or `C`, described in the module's docstring.
        window: dispatches' worth of samples to choose among in `B` and `C`: 2, 3 or 4.
        cost: measure of a rank's time. `padded`: its longest sample, which TorchSpec pads to. `tokens`: its tokens,
            for a trainer that packs, with `A` alone: a window chooses by padding.
        bucket_batches: for `C`, dispatches that a bucket of similar lengths holds. More shuffles more and pads more.

    Raises:
        BalanceError: an argument is not one of these; TorchSpec is missing, of another version, or not as expected; a
            controller has started; other settings are installed. Nothing is changed then.
    """
    settings = Settings(approach=approach, window=window, cost=cost, bucket_batches=bucket_batches)
    return installation.install(settings, lambda: _hooks(settings))


def _hooks(settings: Settings) -> list[Hook]:
    check_not_started(getattr(sys.modules.get(CONTROLLER), "AsyncTrainingController", None))
    reason = "gives the samples of a dispatch to ranks in turn, whatever their lengths"
    rows: list[tuple[Function, str]] = [(_partition_results, reason)]
    if settings.approach != "A":
        rows.append((try_dispatch_batch, "takes the oldest samples of the pool"))
        rows.append((get_status, "reports what the choice delays"))
    if settings.approach == "C":
        rows.append((_prepare_dataset, "orders the prompts of an epoch, at random"))
    controller = f"{CONTROLLER}:AsyncTrainingController"
    return [
        Hook.around(f"{controller}.{balanced.__name__}", balanced, settings, reason=reason) for balanced, reason in rows
    ]


def _partition_results(settings: Settings, stock: Function, self: Any, results: list[Any]) -> list[list[Any]]:
    """By length; TorchSpec's own at micro_batch_size 1, where there is nothing to choose."""
    count, remainder = divmod(len(results), self.dp_size)
    if min(count, getattr(self.args, "micro_batch_size", count)) <= 1 or remainder or self.dp_size == 1:
        return stock(self, results)
    lengths = [_result_length(result) for result in results]
    ranks = assign_ranks(lengths, dp_size=self.dp_size, cost=settings.cost, turn=self.batch_id)
    return [[results[position] for position in positions] for positions in ranks]


def _prepare_dataset(settings: Settings, stock: Function, self: Any, skip: int = 0) -> list[Any]:
    """Samples sorted into buckets of similar lengths; called before the first step."""
    if not getattr(self, "_shuffle_dataset", True):
        raise BalanceError(
            "shuffle_dataset is false, and approach C orders the prompts by length: set it to true, or use approach B."
        )
    # The whole epoch: skipping applies to the order made here.
    samples = stock(self, skip=0)
    order = bucketed_order(
        _data_lengths(samples),
        batch_size=self.dispatch_batch_size,
        bucket_batches=settings.bucket_batches,
        seed=self._dataset_seed,
        epoch=self._dataset_epoch,
    )
    return [samples[index] for index in order[max(skip, 0) :].tolist()]


def try_dispatch_batch(settings: Settings, stock: Function, self: Any) -> bool:
    """A dispatch chosen among several dispatches' worth of samples."""
    window = _window_of(self, settings)
    # The controller raises a failed inference at once.
    if self._inference_error is None:
        if window.holds_back(self):
            return False
        with self._pool_lock:
            pool = self.sample_pool
            # TorchSpec's own function would return the same; no sample may come in between.
            if len(pool) < self.dispatch_batch_size:
                return False
            window.arrange(pool, lengths=[_result_length(result) for result in pool])
    # Samples pushed from here on go to the end of the pool, behind those that leave.
    return stock(self)


def get_status(settings: Settings, stock: Function, self: Any) -> dict[str, Any]:
    """The delay that choosing causes as well; `get_full_status` asks for it."""
    return {**stock(self), "balance_max_delay_dispatches": _window_of(self, settings).max_delay}


def _window_of(controller: Any, settings: Settings) -> DispatchWindow:
    """The controller's window, made on first use: the class is hooked before a controller exists."""
    window = DispatchWindow(settings.window, dispatch_batch_size=controller.dispatch_batch_size)
    return vars(controller).setdefault("_balance_window", window)


def _result_length(result: Any) -> int:
    """Tokens of one `InferenceOutput`; 0 where inference gave no shape."""
    shape = (result.tensor_shapes or {}).get("input_ids")
    return int(shape[-1]) if shape else 0


def _data_lengths(samples: Sequence[Any]) -> list[int]:
    """Lengths of a data set: tokens where every sample has them, characters where tokenization is deferred."""
    for name in ("input_ids", "seq_len", "formatted_prompt"):
        if all(isinstance(sample, Mapping) and sample.get(name) is not None for sample in samples):
            values = [sample[name] for sample in samples]
            return [
                value if isinstance(value, int) else int(getattr(value, "shape", [len(value)])[-1]) for value in values
            ]
    raise BalanceError(
        "approach C needs the lengths of the data set, and its samples have neither input_ids, nor seq_len, nor "
        "formatted_prompt: load it with load_conversation_dataset, or use approach B."
    )


def assign_ranks(lengths: Sequence[int], *, dp_size: int, cost: str, turn: int = 0) -> list[list[int]]:
    """Positions of the samples that each rank gets, as many each, in order of arrival: `[dp_size]` lists.

    By `tokens` ranks get nearly the same number. `padded` sorts by length and cuts runs, which pad the least possible;
    the rank with the longest run changes from turn to turn, so that none is the slowest of all micro-batches of a step.
    """
    if cost == "padded":
        runs = np.argsort(lengths, kind="stable").reshape(dp_size, -1)
        return [sorted(run) for run in np.roll(runs, turn, axis=0).tolist()]
    return [part.tolist() for part in even_parts(lengths, num_parts=dp_size, equal_count=True)]


def bucketed_order(
    lengths: Sequence[int] | NDArray[Any], *, batch_size: int, bucket_batches: int, seed: int = 0, epoch: int = 0
) -> NDArray[np.int64]:
    """An order `[num_samples]` of all samples in which batches hold samples of similar lengths.

    Samples are sorted by length and cut into buckets of whole batches; each bucket is shuffled and cut into batches,
    which are shuffled. Those that no whole batch needs are drawn at random and come last. A run that has consumed n
    samples resumes at `order[n:]`.

    Bias: a batch is no longer a fair draw. Its mean length drifts from that of the data, and with it the tokens of a
    step, the kind of text and the gradient's scale. A bucket of more batches drifts less and pads more.
    """
    tokens = as_integers(lengths, name="lengths")
    num_batches = tokens.size // batch_size
    random = np.random.default_rng([seed, epoch])
    shuffled = random.permutation(tokens.size)
    batched, remainder = np.split(shuffled, [num_batches * batch_size])
    by_length = batched[np.argsort(tokens[batched], kind="stable")]
    bucket_samples = bucket_batches * batch_size
    starts = range(0, by_length.size, bucket_samples)
    buckets = [random.permutation(by_length[start : start + bucket_samples]) for start in starts]
    batches = np.concatenate([*buckets, batched[:0]]).reshape(num_batches, batch_size)
    return np.concatenate([batches[random.permutation(num_batches)].reshape(-1), remainder]).astype(np.int64)


class DispatchWindow:
    """Chooses what leaves the controller's pool: with the oldest sample the neighbours in length that pad the least.

    Invariants: every sample leaves exactly once, at most as many dispatches after its turn as `window + 1` dispatches
    have samples, since the oldest leaves in each; what leaves depends on lengths and order of arrival alone. The pool
    is always in order of arrival: samples come in at its end, and those that stay keep their order.
    """

    def __init__(self, window: int, *, dispatch_batch_size: int) -> None:
        self.capacity = window * dispatch_batch_size
        self.max_delay = 0
        """Dispatches, of all samples that left."""
        self._batch_size = dispatch_batch_size
        self._arrivals: list[int] = []  # of the samples in the pool, counted from the first that ever came
        self._num_dispatches = 0
        self._idle_calls = self._last_pool_size = 0

    def holds_back(self, controller: Any) -> bool:
        """True if more samples must arrive first."""
        pool_size = len(controller.sample_pool)
        self._idle_calls = self._idle_calls + 1 if pool_size == self._last_pool_size else 0
        self._last_pool_size = pool_size
        max_size = getattr(controller.args, "max_sample_pool_size", 0) or 0
        return (
            controller.dispatch_batch_size <= pool_size < self.capacity
            and controller.get_prompt_buffer_size() > 0
            # The inference manager compares this size: samples for evaluation count as well.
            and not 0 < max_size <= controller.get_pool_size()
            and self._idle_calls < MAX_IDLE_CALLS
        )

    def arrange(self, pool: deque[Any], *, lengths: Sequence[int]) -> None:
        """Bring the samples that leave now to the front of the pool, oldest first."""
        num_dispatched = self._num_dispatches * self._batch_size
        self._arrivals += range(num_dispatched + len(self._arrivals), num_dispatched + len(pool))
        leaving: list[Any] = []
        for position in reversed(self._choose(lengths[: self.capacity])):
            leaving.append(pool[position])
            delay = self._num_dispatches - self._arrivals.pop(position) // self._batch_size
            self.max_delay = max(self.max_delay, delay)
            del pool[position]
        pool.extendleft(leaving)
        self._num_dispatches += 1
        # A dispatch does not count as an arrival: the wait for the next sample starts again.
        self._idle_calls, self._last_pool_size = 0, -1

    def _choose(self, lengths: Sequence[int]) -> list[int]:
        """Positions in the pool of the samples that leave, ascending; `lengths` are those to choose among."""
        order = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
        sums = [0, *accumulate(lengths[position] for position in order)]
        oldest, size = order.index(0), self._batch_size
        starts = range(max(oldest - size + 1, 0), min(oldest, len(order) - size) + 1)
        start = min(starts, key=lambda first: Fraction(lengths[order[first]], max(sums[first + size] - sums[first], 1)))
        return sorted(order[start : start + size])


if __name__ == "__main__":
    launch("megatron_balance.adapters.torchspec")
