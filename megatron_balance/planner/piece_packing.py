"""Plans of a forest: samples in micro-batches that compute what their samples share once.

In the forest's order a run of neighbours costs the path to where its first branches off, plus what each adds: cutting a
tree repeats the path that both sides share.

    1. Runs are trees, or the subtrees of their roots, and so on: each depth is a candidate.
    2. Runs are poured into bins up to a target, the costliest first. A run goes whole into the fullest bin with room,
       of those that hold most of its path; else the bin with most room gets its longest head, and the tail comes back.
       Halving finds the least target.
    3. Bins are about micro-batches, for several numbers of them. What a bin gets is a piece, and the planners of
       samples put pieces into micro-batches.
    4. The plan of samples that share nothing is a candidate as well, so that sharing never loses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import product

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.batch import ForestBatch
from megatron_balance.planner.level_packing import Batch, Plan, plan_slots
from megatron_balance.planner.pipeline_packing import plan_pipeline
from megatron_balance.planner.problem import Ints, sums

_PRECISION = 1024
"""The search for a target ends within 1/1024 of it."""

_GRAINS = (4, 5, 6, 8, 12)
_PIPELINE_GRAINS = (4, 8, 12, 20, 32, 48)
"""Bins that runs are poured into, over a fourth of the micro-batches that are needed at least."""

_NEAR_BOUND = 256
"""A plan within 1/256 of the bound ends the search."""


def plan_pieces(batch: ForestBatch, *, num_slots: int | None = None) -> Plan:
    """The fastest of the candidates, the first of equals; in `num_slots` micro-batches of every rank where given."""
    planner = plan_pipeline if batch.waiting.is_makespan else plan_slots
    best: tuple[int, Plan] | None = None
    # The plan that shares nothing is at least as long as its own bound.
    enough = min(batch.lower_bound() * (_NEAR_BOUND + 1) // _NEAR_BOUND, batch.alone.lower_bound())
    for piece_of in _candidates(batch):
        plan = planner(_merged(batch.computed(piece_of), piece_of), num_slots=num_slots)
        plan = replace(plan, microbatch_of=plan.microbatch_of[piece_of])
        time = batch.time(plan.microbatch_of, plan.cp_sizes)
        if best is None or time < best[0]:
            best = time, plan
        if best[0] <= enough:
            break
    assert best is not None, "samples that share nothing are a candidate"
    return best[1]


def _candidates(batch: ForestBatch) -> Iterator[Ints]:
    """Pieces of samples, `[num_samples]` the piece of each."""
    runs, alone = _Runs(batch), batch.alone
    needed = -(-int(runs.tokens_before[-1]) // (alone.cap * alone.num_ranks))
    grains = _PIPELINE_GRAINS if batch.waiting.is_makespan else _GRAINS
    numbers = sorted({max(needed * grain // 4, 1) for grain in grains})
    for number, depth in product(numbers, range(max(len(batch.forest.levels) - 1, 1))):
        bin_of = runs.pour(runs.at_depth(depth), alone.num_ranks * number)
        if bin_of is not None:
            yield np.unique(bin_of, return_inverse=True)[1]
    yield np.arange(alone.num_samples)


def _merged(batch: Batch, piece_of: Ints) -> Batch:
    """A batch of pieces, each as if it were a sample."""
    count = int(piece_of.max(initial=-1)) + 1
    return replace(
        batch,
        costs=np.stack([sums(phase, piece_of, count) for phase in batch.costs]),
        expert_cost=sums(batch.expert_cost, piece_of, count),
        weights=sums(batch.weights, piece_of, count),
        kinds=tuple(_merged(kind, piece_of) for kind in batch.kinds),
    )


_Run = tuple[int, int]
"""The position of the first sample in the forest's order, and of the end."""


class _Runs:
    """Costs and tokens of runs of neighbours in the forest's order."""

    def __init__(self, batch: ForestBatch) -> None:
        forest, ends = batch.forest, batch.ends
        alone, starts = batch.alone.take(forest.order), batch.ends.take(forest.branches)
        costs = [paths.costs.sum(axis=0) + paths.expert_cost for paths in (ends, alone, starts)]
        self.path_costs, self.path_tokens = costs[0], ends.weights  # of the path to the end of each node
        self.costs_before: Ints = np.append(0, np.cumsum(costs[1] - costs[2]))
        self.tokens_before: Ints = np.append(0, np.cumsum(alone.weights - starts.weights))
        self.cap, self.order, self.paths = alone.cap, forest.order, forest.paths[:, forest.order]
        self.largest = max(int(costs[1].max(initial=0)), 1)
        self.branches: list[int] = [*forest.branches.tolist(), -1]
        self.parents: list[int] = forest.parent.tolist()

    def at_depth(self, depth: int) -> list[_Run]:
        """The runs of samples that agree in their first `depth + 1` nodes."""
        differs = (self.paths[: depth + 1, 1:] != self.paths[: depth + 1, :-1]).any(axis=0)
        starts = np.flatnonzero(np.append(self.order.size > 0, differs)).tolist()
        return list(zip(starts, [*starts[1:], self.order.size], strict=False))

    def above(self, first: int) -> list[int]:
        """The nodes above a run, a root first."""
        nodes, node = list[int](), self.branches[first]
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def size(self, first: int, end: int) -> tuple[int, int]:
        """Cost and tokens of a run."""
        branch = self.branches[first]
        cost, tokens = self.costs_before[end] - self.costs_before[first], self.tokens_before[end]
        return int(cost + self.path_costs[branch]), int(tokens - self.tokens_before[first] + self.path_tokens[branch])

    def pour(self, runs: list[_Run], num_bins: int) -> Ints | None:
        """The bin of each sample, by the least target found; None where none is met."""
        low = max(self.largest, -(-int(self.costs_before[-1]) // num_bins))
        high = 2 * low
        best = self.pour_within(high, runs, num_bins)
        while best is not None and high - low > max(low // _PRECISION, 1):
            middle = (low + high) // 2
            poured = self.pour_within(middle, runs, num_bins)
            low, high, best = (middle, high, best) if poured is None else (low, middle, poured)
        return best

    def pour_within(self, target: int, runs: list[_Run], num_bins: int) -> Ints | None:
        """The bin of each sample, where no bin costs more than the target or holds more than the cap."""
        slack, room = np.full(num_bins, target), np.full(num_bins, self.cap)
        bin_of = np.empty_like(self.order)
        holders: dict[int, NDArray[np.bool_]] = {}  # of a node, the bins that compute it already
        heap = [(-self.size(*run)[0], *run) for run in runs]
        heapify(heap)
        while heap:
            _, first, end = heappop(heap)
            if self.size(first, first + 1)[1] > self.cap:
                bin_of[self.order[first]], cut = num_bins + first, first + 1  # an over-long sample runs alone
            else:
                shared_cost, shared_tokens = np.zeros((2, num_bins), dtype=np.int64)
                for node in self.above(first):
                    if node in holders:
                        shared_cost[holders[node]] = self.path_costs[node]
                        shared_tokens[holders[node]] = self.path_tokens[node]
                heads = self.heads(first, end, cost=slack + shared_cost, tokens=room + shared_tokens)
                whole = np.flatnonzero(heads == end)
                if whole.size:
                    index = int(whole[np.lexsort((slack[whole], -shared_cost[whole]))[0]])
                else:
                    index = int(np.where(heads > first, slack + shared_cost, -1).argmax())
                cut = int(heads[index])
                if cut == first:
                    return None
                bin_of[self.order[first:cut]] = index
                cost, tokens = self.size(first, cut)
                slack[index] -= cost - shared_cost[index]
                room[index] -= tokens - shared_tokens[index]
                # What the bin shares with samples elsewhere: neighbours of the run in the forest's order.
                for node in (*self.above(first), *self.above(cut)):
                    holders.setdefault(node, np.zeros(num_bins, dtype=np.bool_))[index] = True
            if cut < end:
                heappush(heap, (-self.size(cut, end)[0], cut, end))
        return bin_of

    def heads(self, first: int, end: int, *, cost: Ints, tokens: Ints) -> Ints:
        """Of each bin, the end of the longest run from `first` within this cost and these tokens."""
        above_cost, above_tokens = self.size(first, first)
        spent_cost, spent_tokens = int(self.costs_before[first]), int(self.tokens_before[first])
        by_cost = np.searchsorted(self.costs_before, cost - above_cost + spent_cost, "right")
        by_tokens = np.searchsorted(self.tokens_before, tokens - above_tokens + spent_tokens, "right")
        return (np.minimum(by_cost, by_tokens) - 1).clip(first, end)
