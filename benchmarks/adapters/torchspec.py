"""R8: measures the waiting of TorchSpec's ranks, stock and balanced.

A padded trainer is modelled: a rank's time in a dispatch is `micro_batch_size` times its longest sample, and all
ranks wait for the slowest. Ideal is every token computed once, spread evenly over the ranks. Lengths are lognormal(7.5,
1.0) cut to 16..16384 tokens: TorchSpec's round-robin on 8 ranks then takes 2.9, 3.7 and 4.5 times ideal at
micro_batch_size 1, 2 and 4.

The adapter's own `assign_ranks`, `DispatchWindow` and `bucketed_order` plan; only the controller's loop is modelled,
and the inference that fills its pool.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_balance.adapters.torchspec import DispatchWindow, assign_ranks, bucketed_order

Lengths = NDArray[np.int64]

DP_SIZE = 8
NUM_SAMPLES = 19_200
"""Whole dispatches at micro_batch_size 1, 2 and 4 on 8 ranks."""

NUM_EPOCHS = 2
CONCURRENT_BATCHES = 4
"""Inference batches in flight, any of which may come back next."""

INFERENCE_BATCH_SIZE = 8
"""Prompts."""

FAILED_SHARE = 0.001
"""Of the samples that are inferred."""


class Way(NamedTuple):
    approach: str
    window: int = 1
    cost: str = "padded"


WAYS = {
    "stock: round-robin": Way("stock"),
    "A, tokens": Way("A", cost="tokens"),
    "A, padded": Way("A"),
    "B, padded, window 2": Way("B", window=2),
    "B, padded, window 4": Way("B", window=4),
    "C, padded": Way("C"),
    "C, padded, window 2": Way("C", window=2),
    "C, padded, window 4": Way("C", window=4),
}


def draw_lengths(num_samples: int = NUM_SAMPLES, *, seed: int = 0) -> Lengths:
    """`[num_samples]` tokens."""
    drawn = np.random.default_rng(seed).lognormal(7.5, 1.0, num_samples)
    return np.clip(np.rint(drawn), 16, 16_384).astype(np.int64)


def simulate_inferred(lengths: Lengths, *, way: Way, micro_batch_size: int) -> list[float]:
    """Inference mixes up the order, loses samples and leaves some to the next epoch."""
    random = np.random.default_rng([0, 1])
    epochs: list[list[int]] = []
    for epoch in range(NUM_EPOCHS):
        order = _order(lengths, way=way, batch_size=micro_batch_size * DP_SIZE, epoch=epoch)
        order = order[random.random(order.size) >= FAILED_SHARE]
        waiting = deque(np.array_split(order, np.arange(INFERENCE_BATCH_SIZE, order.size, INFERENCE_BATCH_SIZE)))
        in_flight: list[Lengths] = []
        arrived: list[int] = []
        while waiting or in_flight:
            while waiting and len(in_flight) < CONCURRENT_BATCHES:
                in_flight.append(waiting.popleft())
            arrived += in_flight.pop(int(random.integers(len(in_flight)))).tolist()
        epochs.append(arrived)
    return _dispatch_all(epochs, lengths, way=way, micro_batch_size=micro_batch_size)


def _order(lengths: Lengths, *, way: Way, batch_size: int, epoch: int = 0) -> Lengths:
    if way.approach == "C":
        return bucketed_order(lengths, batch_size=batch_size, bucket_batches=1, epoch=epoch)
    return np.random.default_rng([epoch, 2]).permutation(lengths.size) if epoch else np.arange(lengths.size)


def _dispatch_all(epochs: Sequence[list[int]], lengths: Lengths, *, way: Way, micro_batch_size: int) -> list[float]:
    """Step time over ideal, padded over real tokens, variance of the ranks' times, longest delay."""
    batch_size = micro_batch_size * DP_SIZE
    window = DispatchWindow(way.window, dispatch_batch_size=batch_size)
    times: list[list[int]] = []
    num_tokens = 0
    for turn, batch in enumerate(_dispatches(epochs, lengths, window=window, batch_size=batch_size)):
        tokens = lengths[batch]
        if way.approach == "stock" or micro_batch_size == 1:
            ranks = [list(range(rank, batch_size, DP_SIZE)) for rank in range(DP_SIZE)]
        else:
            ranks = assign_ranks(tokens.tolist(), dp_size=DP_SIZE, cost=way.cost, turn=turn)
        times.append([micro_batch_size * int(tokens[positions].max()) for positions in ranks])
        num_tokens += int(tokens.sum())
    grid = np.array(times)  # [num_dispatches, DP_SIZE]
    ideal = num_tokens / DP_SIZE
    variance = grid.var(axis=1).mean() / (ideal / len(times)) ** 2
    return [float(grid.max(axis=1).sum() / ideal), float(grid.sum() / num_tokens), float(variance), window.max_delay]


def _dispatches(
    epochs: Sequence[list[int]], lengths: Lengths, *, window: DispatchWindow, batch_size: int
) -> Iterator[list[int]]:
    """Sample ids of each dispatch: while data comes the pool holds a window; then whole dispatches leave."""
    pool: deque[int] = deque()
    for arriving in epochs:
        coming = deque(arriving)
        while coming or len(pool) >= batch_size:
            while coming and len(pool) < window.capacity:
                pool.append(coming.popleft())
            if len(pool) < batch_size:
                break
            window.arrange(pool, lengths=[int(lengths[sample]) for sample in pool])
            yield [pool.popleft() for _ in range(batch_size)]


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Way → its figures, in the order of `COLUMNS`; samples twice as inference brings them in the last."""
    lengths = draw_lengths()
    inferred = lengths[: NUM_SAMPLES // 4 + 5]
    step_times: dict[str, list[float]] = {}
    for name, way in WAYS.items():
        results = []
        for size in (1, 2, 4):
            order = _order(lengths, way=way, batch_size=size * DP_SIZE).tolist()
            results.append(_dispatch_all([order], lengths, way=way, micro_batch_size=size))
        last = simulate_inferred(inferred, way=way, micro_batch_size=2)
        step_times[name] = [*(figures[0] for figures in results), *results[1][1:], last[0]]
    return step_times


COLUMNS = ["time, mbs 1", "mbs 2", "mbs 4", "padded/real", "variance", "max delay", "inferred, mbs 2"]
SAYS = (
    "Padded trainer, 8 ranks, 19,200 samples lognormal(7.5, 1.0): step time over ideal at micro_batch_size 1, 2 and 4; "
    "at 2 padded over real tokens, variance of the ranks' times, dispatches that a sample is late at most; inference "
    "in any order."
)
