"""Plans of a forest: samples in micro-batches that compute what their samples share once.

In the forest's order a run of neighbours costs the path to where its first branches off, plus what each adds: cutting a
tree repeats the path that both sides share.

    1. Runs are trees, or the subtrees of their roots, and so on: each depth is a candidate.
    2. Runs are poured into bins up to a target, the costliest first, or that with the costliest sample. A run goes
       whole into the fullest bin with room, of those that hold most of its path; else the bin with most room gets its
       longest head, and the tail comes back. Halving finds the least target.
    3. Where ranks meet at the end of a step they are the bins. Else bins are about micro-batches, for several numbers
       of them. What a bin gets is a piece, and the planners of samples put pieces into micro-batches.
    4. The plan of samples that share nothing is a candidate as well, so that sharing never loses.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import product

import numpy as np

from megatron_balance.planner.batch import ForestBatch
from megatron_balance.planner.home_ranks import plan_on_ranks
from megatron_balance.planner.level_packing import GOOD_ENOUGH, Batch, Plan, plan_slots
from megatron_balance.planner.pipeline_packing import plan_pipeline
from megatron_balance.planner.problem import INT_MAX, Ints, sums

_HALVINGS = 10
"""Targets that are tried after the first that is met."""

_GRAINS = (4, 5, 6, 8, 12)
_PIPELINE_GRAINS = (4, 8, 12, 20, 32, 48)
"""Bins that runs are poured into, over a fourth of the micro-batches that are needed at least."""

_NEAR_BOUND = 256
"""A plan within 1/256 of the bound ends the search."""

_Run = tuple[int, int]
"""The position of the first sample in the forest's order, and of the end."""


def plan_pieces(batch: ForestBatch, *, num_slots: int | None = None) -> Plan:
    """The fastest of the candidates, the first of equals; in `num_slots` micro-batches of every rank where given."""
    best, least, bound, alone = None, INT_MAX, batch.lower_bound(), batch.alone
    for plan in _poured_plans(batch, num_slots):
        time = batch.time(plan.microbatch_of, plan.cp_sizes)
        if time < least:
            best, least = plan, time
        if least <= bound + bound // _NEAR_BOUND:
            break
    if best is not None and least <= alone.lower_bound():
        return best
    unshared = _planner(alone)(alone, num_slots=num_slots)
    if best is None or batch.time(unshared.microbatch_of, unshared.cp_sizes) < least:
        return unshared
    return best


def _planner(batch: Batch) -> Callable[..., Plan]:
    return plan_pipeline if batch.waiting.is_makespan else plan_slots


def _poured_plans(batch: ForestBatch, num_slots: int | None) -> Iterator[Plan]:
    alone, runs, depths = batch.alone, _Runs(batch), max(len(batch.forest.levels) - 1, 1)
    is_makespan = alone.waiting.is_makespan
    meets_once = alone.sync_size == 1 and not is_makespan
    needed = -(-runs.tokens_before[-1] // (alone.cap * alone.num_ranks))
    numbers = {max(needed * grain // 4, 1) for grain in (_PIPELINE_GRAINS if is_makespan else _GRAINS)}
    keys = (False,) if is_makespan else (False, True)
    for number, depth, by_sample in product((1,) if meets_once else sorted(numbers), range(depths), keys):
        room = INT_MAX if meets_once else alone.cap
        poured = runs.pour(alone.num_ranks * number, room=room, depth=depth, by_sample=by_sample)
        if poured is None:
            continue
        bin_of, run_of = poured
        piece_of = _joined(batch, bin_of, run_of) if meets_once else np.unique(bin_of, return_inverse=True)[1]
        first = np.unique(piece_of, return_index=True)[1]
        pieces = _merged(batch.computed(piece_of), piece_of, first.size)
        if meets_once:
            plan = plan_on_ranks(pieces, bin_of[first], num_slots=num_slots)
        else:
            plan = _planner(pieces)(pieces, num_slots=num_slots)
        yield replace(plan, microbatch_of=plan.microbatch_of[piece_of])


def _joined(batch: ForestBatch, rank_of: Ints, run_of: Ints) -> Ints:
    """The piece of each sample: all that a rank has of a tree where the cap allows it, else a run."""
    roots = batch.forest.paths[0]
    tree_of = np.unique(rank_of * (int(roots.max(initial=0)) + 1) + roots, return_inverse=True)[1]
    tokens = sums(batch.computed(tree_of).weights, tree_of, tree_of.size)
    is_above = tokens[tree_of] > batch.alone.cap
    return np.unique(np.where(is_above, tree_of.size + run_of, tree_of), return_inverse=True)[1]


def _merged(batch: Batch, piece_of: Ints, count: int) -> Batch:
    """A batch of pieces, each as if it were a sample."""
    return replace(
        batch,
        costs=np.stack([sums(phase, piece_of, count) for phase in batch.costs]),
        expert_cost=sums(batch.expert_cost, piece_of, count),
        weights=sums(batch.weights, piece_of, count),
        kinds=tuple(_merged(kind, piece_of, count) for kind in batch.kinds),
    )


class _Runs:
    """Costs and tokens of runs of neighbours in the forest's order. Of node -1, above all roots, both are 0."""

    def __init__(self, batch: ForestBatch) -> None:
        forest, ends = batch.forest, batch.ends
        alone, starts = batch.alone.take(forest.order), batch.ends.take(forest.branches)
        costs = [paths.costs.sum(axis=0) + paths.expert_cost for paths in (ends, alone, starts)]
        self.path_costs: list[int] = costs[0].tolist()  # of the path to the end of each node
        self.path_tokens: list[int] = ends.weights.tolist()
        self.sample_costs: list[int] = costs[1].tolist()
        self.costs_before: list[int] = np.append(0, np.cumsum(costs[1] - costs[2])).tolist()
        self.tokens_before: list[int] = np.append(0, np.cumsum(alone.weights - starts.weights)).tolist()
        self.cap, self.order, self.paths = alone.cap, forest.order, forest.paths[:, forest.order]
        self.branches: list[int] = [*forest.branches.tolist(), -1]
        self.parents: list[int] = [*forest.parent.tolist(), -1]

    def at_depth(self, depth: int) -> list[_Run]:
        """The runs of samples that agree in their first `depth + 1` nodes."""
        differs = (self.paths[: depth + 1, 1:] != self.paths[: depth + 1, :-1]).any(axis=0)
        starts = np.flatnonzero(np.append(self.order.size > 0, differs)).tolist()
        return list(zip(starts, [*starts[1:], self.order.size], strict=False))

    def cost(self, first: int, end: int, *, node: int = -1) -> int:
        """Cost of a run where the path to the end of a node is there already."""
        branch = self.path_costs[self.branches[first]] - self.path_costs[node]
        return branch + self.costs_before[end] - self.costs_before[first]

    def tokens(self, first: int, end: int, *, node: int = -1) -> int:
        """Tokens of a run, as `cost`."""
        branch = self.path_tokens[self.branches[first]] - self.path_tokens[node]
        return branch + self.tokens_before[end] - self.tokens_before[first]

    def above(self, first: int) -> Iterator[int]:
        """The nodes above a run, the nearest first, and -1."""
        node = self.branches[first]
        while node >= 0:
            yield node
            node = self.parents[node]
        yield -1

    def head(self, first: int, end: int, *, node: int, cost: int, tokens: int) -> int:
        """The end of the longest run from `first` within this cost and these tokens, and within the cap by itself."""
        branch = self.branches[first]
        tokens = min(tokens + self.path_tokens[node], self.cap) - self.path_tokens[branch]
        cost += self.path_costs[node] - self.path_costs[branch]
        by_cost = bisect_right(self.costs_before, cost + self.costs_before[first], first, end + 1)
        by_tokens = bisect_right(self.tokens_before, tokens + self.tokens_before[first], first, end + 1)
        return max(min(by_cost, by_tokens) - 1, first)

    def pour(self, num_bins: int, *, room: int, depth: int, by_sample: bool) -> tuple[Ints, Ints] | None:
        """The bin and the run of each sample, by the least target found; None where none is met."""
        runs, total = self.at_depth(depth), self.costs_before[-1]
        least = max(max(self.sample_costs, default=0), -(-total // num_bins))
        target, step, best = least, least // 512 + 1, None
        while best is None and target <= 2 * total:
            step *= 2
            target = least + step
            best = _Pour(self, target, num_bins, room, by_sample).all(runs)
        for _ in range(_HALVINGS if best else 0):
            if target - least <= least // GOOD_ENOUGH:
                break
            middle = (least + target) // 2
            poured = _Pour(self, middle, num_bins, room, by_sample).all(runs)
            least, target, best = (middle, target, best) if poured is None else (least, middle, poured)
        if best is None:
            return None
        bin_of, run_of = np.empty((2, self.order.size), dtype=np.int64)
        for run, (index, first, end) in enumerate(best):
            bin_of[self.order[first:end]], run_of[self.order[first:end]] = index, run
        return bin_of, run_of


class _Pour:
    """Bins that hold runs of a cost of at most `target` and of at most `room` tokens."""

    def __init__(self, runs: _Runs, target: int, num_bins: int, room: int, by_sample: bool) -> None:
        self.runs, self.room, self.by_sample = runs, room, by_sample
        self.slack, self.tokens, self.nodes = [target] * num_bins, [room] * num_bins, [{-1} for _ in range(num_bins)]
        self.bins = {-1: [(target, index) for index in range(num_bins)]}  # those that hold a node, by slack

    def all(self, runs: list[_Run]) -> list[tuple[int, int, int]] | None:
        """The bin, the first and the end of every run that is placed; None where one finds no room."""
        heap = [(-self._key(*run), *run) for run in runs]
        heapify(heap)
        placed: list[tuple[int, int, int]] = []
        while heap:
            _, first, end = heappop(heap)
            index, cut = self._whole(first, end) or self._head(first, end)
            if cut == first:
                return None
            if cut < end:
                heappush(heap, (-self._key(cut, end), cut, end))
            self._place(index, first, cut)
            placed.append((index, first, cut))
        return placed

    def _key(self, first: int, end: int) -> int:
        return self.runs.sample_costs[first] if self.by_sample else self.runs.cost(first, end)

    def _whole(self, first: int, end: int) -> tuple[int, int] | None:
        """The fullest bin that has room for a run, of those that hold most of its path, and the run's end."""
        runs = self.runs
        if runs.tokens(first, end) > runs.cap and end - first > 1:
            return None
        for node in runs.above(first):
            bins, tokens = self.bins.get(node, []), min(runs.tokens(first, end, node=node), self.room)
            for place in range(bisect_left(bins, (runs.cost(first, end, node=node), -1)), len(bins)):
                if self.tokens[bins[place][1]] >= tokens:
                    return bins[place][1], end
        return None

    def _head(self, first: int, end: int) -> tuple[int, int]:
        """The bin with most room behind a run's path, of those that take a sample of it, and where it is cut."""
        best = (0, -1, first)
        for node in self.runs.above(first):
            missing = self.runs.cost(first, first, node=node)
            for slack, index in reversed(self.bins.get(node, [])):
                if slack - missing <= best[0]:
                    break
                cut = self.runs.head(first, end, node=node, cost=slack, tokens=self.tokens[index])
                if cut > first:
                    best = (slack - missing, index, cut)
        return best[1:]

    def _place(self, index: int, first: int, end: int) -> None:
        held = next(node for node in self.runs.above(first) if node in self.nodes[index])
        for node in self.nodes[index]:
            del self.bins[node][bisect_left(self.bins[node], (self.slack[index], index))]
        self.slack[index] -= self.runs.cost(first, end, node=held)
        self.tokens[index] -= min(self.runs.tokens(first, end, node=held), self.room)
        # What the bin shares with samples elsewhere: neighbours of the run in the forest's order.
        self.nodes[index].update(self.runs.above(first), self.runs.above(end))
        for node in self.nodes[index]:
            insort(self.bins.setdefault(node, []), (self.slack[index], index))
