"""Other systems' ways to plan a global batch, each written from its description, and this package's own.

A way takes `[num_samples]` original lengths and a setup, and returns for every rank its micro-batches. Ways of others
use this package's first fit and Karmarkar-Karp, which are as good as the originals' and faster; `wheels.py` has the
originals, where they are installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.setups import Setup
from benchmarks.planner.wheels import LINEAR, areal_wheel, verl_wheel
from megatron_balance import build_data_schedule
from megatron_balance.planner import karmarkar_karp

Ranks = Sequence[Sequence[Sequence[int]]]
"""For every rank, for every slot: sample ids."""

Baseline = Callable[[NDArray[np.int64], Setup], Ranks]


def first_fit(tokens: Sequence[int], *, capacity: int, decreasing: bool = False) -> list[list[int]]:
    """Each item into the first bin that has room for it, in arrival or by descending size; a larger one fills a bin."""
    order = sorted(range(len(tokens)), key=lambda item: -tokens[item]) if decreasing else range(len(tokens))
    bins: list[list[int]] = []
    room: list[int] = []
    for item in order:
        bin_index = next((index for index, free in enumerate(room) if free >= tokens[item]), len(bins))
        if bin_index == len(bins):
            bins.append([])
            room.append(capacity)
        bins[bin_index].append(item)
        room[bin_index] -= tokens[item]
    return bins


def greedy(costs: Sequence[int], *, num_parts: int) -> list[list[int]]:
    """The costliest first to the part with the least cost so far."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, part) for part in range(num_parts)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, part = heap[0]
        parts[part].append(item)
        heapreplace(heap, (load + costs[item], part))
    return [sorted(items) for items in parts]


def round_robin(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """Sample i of a step goes to rank `i % dp_size`, one sample a micro-batch.

    Where ranks meet in every micro-batch, the k-th samples of all ranks meet in slot k. Source: Megatron-LM's
    data samplers, which every system here starts from (and TorchSpec's dispatch, `i % dp_size`).
    """
    dp_size = setup.topology.dp_size
    return [[[sample] for sample in range(rank, lengths.size, dp_size)] for rank in range(dp_size)]


def next_fit(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """Next-fit up to the cap; micro-batch k goes to rank `k % dp_size`, slot `k // dp_size`.

    The number of micro-batches is brought to a multiple of the ranks: from the last one backwards, samples
    leave micro-batches that hold several and run alone at the end. Source: Megatron-LM main,
    `megatron/core/datasets/data_schedule.py`, class DpBalancedScheduler.
    """
    dp_size = setup.topology.dp_size
    bins: list[list[int]] = []
    room = 0
    for sample, tokens in enumerate(setup.padded(lengths)):
        if not bins or tokens > room:
            bins.append([])
            room = setup.cap
        bins[-1].append(sample)
        room -= tokens

    last = len(bins) - 1
    while len(bins) % dp_size:
        if last < 0:
            raise ValueError(f"{lengths.size} samples do not fill a micro-batch on each of {dp_size} ranks")
        if len(bins[last]) > 1:
            bins.append([bins[last].pop()])
        else:
            last -= 1
    return [bins[rank::dp_size] for rank in range(dp_size)]


def first_fit_only(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """First-fit in order of arrival; micro-batch k goes to rank `k % dp_size`. No flag of slime's is set."""
    tokens = setup.padded(lengths)
    bins = _divisible(first_fit(tokens, capacity=setup.cap), tokens=tokens, setup=setup)
    dp_size = setup.topology.dp_size
    return [bins[rank::dp_size] for rank in range(dp_size)]


def first_fit_then_kk(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """First-fit in order of arrival; equal-size Karmarkar-Karp on tokens deals micro-batches to ranks.

    slime's `--balance-data`, the base line of its published figures.
    """
    tokens = setup.padded(lengths)
    bins = _divisible(first_fit(tokens, capacity=setup.cap), tokens=tokens, setup=setup)
    return _round_robin(bins, costs=tokens, setup=setup)


def kk_by_flops(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """Free Karmarkar-Karp on FLOPs into `ceil(tokens / cap)` micro-batches, whatever they then hold.

    Equal-size Karmarkar-Karp on FLOPs deals them to ranks. slime's `--balance-data --balance-by-flops`. Here it
    gets this package's FLOPs, which are closer to the truth than slime's own.
    """
    tokens, flops = setup.padded(lengths), setup.flops(lengths)
    num_bins = min(-(-sum(tokens) // setup.cap), lengths.size)
    bins = [held for held in karmarkar_karp(flops, num_parts=num_bins) if held]
    return _round_robin(_divisible(bins, tokens=tokens, setup=setup), costs=flops, setup=setup)


def _divisible(bins: list[list[int]], *, tokens: list[int], setup: Setup) -> list[list[int]]:
    dp_size = setup.topology.dp_size
    return split_bins(bins, tokens=tokens, num_bins=-(-len(bins) // dp_size) * dp_size)


def _round_robin(bins: list[list[int]], *, costs: list[int], setup: Setup) -> list[list[list[int]]]:
    weights = [sum(costs[sample] for sample in held) for held in bins]
    parts = karmarkar_karp(weights, num_parts=setup.topology.dp_size, equal_size=True)
    return [[bins[index] for index in part] for part in parts]


def equal_size_kk(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """Equal-size Karmarkar-Karp over ranks, then free Karmarkar-Karp into micro-batches on each rank.

    Every rank makes as many micro-batches as the one with most tokens needs; nothing holds them to the cap
    (verl before 0.9.1; the row of its wheel shows what a strict cap changes). Micro-batches meet by descending
    cost, which is the best order for this row. recsys-examples' shuffler is the first half alone. Source:
    verl, `verl/utils/seqlen_balancing.py`; recsys-examples, `karmarkar_karp(..., equal_size=True)`.
    """
    tokens = setup.padded(lengths)
    workloads = [length**2 + LINEAR * length for length in tokens]
    parts = karmarkar_karp(workloads, num_parts=setup.topology.dp_size, equal_size=True)
    most_tokens = max(sum(tokens[sample] for sample in part) for part in parts)
    num_microbatches = max(min(-(-most_tokens // setup.cap), min(map(len, parts))), 1)
    ranks: list[list[list[int]]] = []
    for part in parts:
        slots = karmarkar_karp([workloads[sample] for sample in part], num_parts=num_microbatches)
        ranks.append([[part[position] for position in slot] for slot in slots])
    return ranks


def lpt(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """Samples by descending FLOPs to the rank with least; first-fit decreasing under the cap on each rank.

    Ranks with fewer micro-batches than others split their fullest, as far as they have samples. Micro-batches meet by
    descending FLOPs. Source: R. L. Graham 1969; TorchSpec's approach A, without its count cap.
    """
    tokens, flops = setup.padded(lengths), setup.flops(lengths)
    parts = greedy(flops, num_parts=setup.topology.dp_size)
    packed = [first_fit([tokens[sample] for sample in part], capacity=setup.cap, decreasing=True) for part in parts]
    num_microbatches = max(map(len, packed))
    ranks: list[list[list[int]]] = []
    for part, bins in zip(parts, packed, strict=True):
        slots = [[part[position] for position in held] for held in bins]
        slots = split_bins(slots, tokens=tokens, num_bins=min(num_microbatches, len(part)))
        slots.sort(key=lambda held: -sum(flops[sample] for sample in held))
        ranks.append(slots)
    return ranks


def ours(lengths: NDArray[np.int64], setup: Setup, *, algorithm: str = "auto") -> Ranks:
    """`build_data_schedule` as a training run calls it; its time includes costs, bound and schedule object."""
    schedule = build_data_schedule(
        lengths, cost_model=setup.cost_model, topology=setup.topology, limits=setup.limits, algorithm=algorithm
    )
    return schedule.ranks


def split_bins(bins: list[list[int]], *, tokens: Sequence[int], num_bins: int) -> list[list[int]]:
    """Halves the fullest of the bins that hold several samples, by tokens, longest sample first.

    Source: slime, `expand_bins_by_splitting` in `slime/utils/seqlen_balancing.py`.
    """
    bins = [list(held) for held in bins]
    splittable = [(-sum(tokens[sample] for sample in held), index) for index, held in enumerate(bins) if len(held) > 1]
    heapify(splittable)
    while len(bins) < num_bins:
        if not splittable:
            raise ValueError(f"there are {len(bins)} bins of one sample: {num_bins} cannot be made")
        _, index = heappop(splittable)
        whole = bins[index]
        halves = greedy([tokens[sample] for sample in whole], num_parts=2)
        for place, half in zip((index, len(bins)), halves, strict=True):
            held = [whole[position] for position in half]
            if place == index:
                bins[index] = held
            else:
                bins.append(held)
            if len(held) > 1:
                heappush(splittable, (-sum(tokens[sample] for sample in held), place))
    return bins


BASELINES: dict[str, Baseline] = {
    "round-robin (Megatron's sampler)": round_robin,
    "next-fit (Megatron main, dp_balanced)": next_fit,
    "first-fit (slime)": first_fit_only,
    "first-fit + KK on tokens (slime --balance-data)": first_fit_then_kk,
    "KK by FLOPs, no cap (slime --balance-by-flops)": kk_by_flops,
    "equal-size KK (verl's way, recsys)": equal_size_kk,
    "LPT by FLOPs + first-fit": lpt,
    "verl 0.9.1, its own functions": verl_wheel,
    "AReaL 1.0.4, its own functions": areal_wheel,
    "ours, --balance-algorithm karmarkar_karp": functools.partial(ours, algorithm="karmarkar_karp"),
    "ours": ours,
}
