"""The time of a plan and the least time of any plan, each computed from its definition and with public names only.

Nothing but `makespan` and `figures_of_ranks` shares code with the planner. `docs/planner.md` and the docstring of
`DataSchedule` are the definitions.
Costs are Python integers in the units of the cost model, over all GPUs of a rank; `per_gpu` gives those of a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_balance import CostModel, Limits, Topology
from megatron_balance.planner import Assignment, Pipeline, Problem, makespans

Slots = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Batch:
    """One global batch: what a plan is made from."""

    lengths: Sequence[int]
    cost_model: CostModel
    topology: Topology
    limits: Limits
    objective: str
    patches: Sequence[Sequence[int]] | None = None  # of the images of each sample

    @classmethod
    def of(cls, schedule, *, patches=None):
        """The batch of a schedule."""
        return cls(
            schedule.lengths.tolist(),
            schedule.cost_model,
            schedule.topology,
            schedule.limits,
            schedule.objective,
            patches,
        )

    @cached_property
    def tokens(self):
        """Padded to the multiple that context and sequence parallelism need."""
        return [self.padded(length, self.topology.cp_size) for length in self.lengths]

    def padded(self, length, size):
        """Tokens of a sample that `size` context-parallel ranks share, two chunks a rank for causal balance."""
        multiple = 2 * size if size > 1 else 1
        multiple *= self.topology.tp_size if self.topology.sequence_parallel else 1
        return -(-length // multiple) * multiple

    @property
    def expert_span(self):
        """Neighbouring data-parallel ranks, DP×CP ranks with dynamic sizes, of one expert-parallel group."""
        ranks = self.topology
        cp_size, num_ranks = (1, ranks.dp_size * ranks.cp_size) if ranks.dynamic_cp else (ranks.cp_size, ranks.dp_size)
        span = -(-ranks.etp_size * ranks.ep_size // (ranks.tp_size * cp_size))
        return 1 if ranks.ep_size == 1 else min(max(span, 1), num_ranks)

    @cached_property
    def images(self):
        """Cost of each sample's images."""
        model, patches = self.cost_model, self.patches or [()] * len(self.lengths)
        return [sum(model.image_linear * p + model.image_quadratic * p * p for p in one) for one in patches]

    @cached_property
    def shared(self):
        """Cost of each sample that its expert-parallel group computes together."""
        return [self.cost_model.expert_linear * tokens * (self.expert_span > 1) for tokens in self.tokens]

    @cached_property
    def own(self):
        """Cost of each sample on its own rank, images included."""
        experts = self.cost_model.expert_linear * (self.expert_span == 1)
        return [
            self.cost_model.local_cost(tokens) + experts * tokens + of_images
            for tokens, of_images in zip(self.tokens, self.images, strict=True)
        ]

    @property
    def is_makespan(self):
        """The time is that of a pipeline."""
        waits = self.topology.sync_size > 1 and self.topology.pp_size > 1
        return self.objective == "pipeline" or (self.objective == "microbatch" and waits)

    @property
    def span(self):
        """Neighbouring ranks that wait for one another in every micro-batch."""
        if self.objective == "step":
            return 1
        if self.objective == "pipeline":
            return self.expert_span if any(self.shared) else 1
        return self.topology.dp_size if self.topology.fully_sharded or self.expert_span == 1 else self.expert_span

    def per_gpu(self, time):
        """A time as schedules give it."""
        return per_gpu(time, self.topology, is_makespan=self.is_makespan)

    def grid(self, ranks):
        """Cost of each micro-batch: launch, samples, and an even share of what the expert-parallel group shares."""
        grid = [[self.cost_model.per_microbatch + sum(self.own[i] for i in ids) for ids in slots] for slots in ranks]
        span = self.expert_span
        for first in range(0, len(grid), span) if span > 1 else ():
            for slot in range(len(grid[first])):
                ids = [i for rank in range(first, first + span) for i in ranks[rank][slot]]
                share = -(-sum(self.shared[i] for i in ids) // span)
                for rank in range(first, first + span):
                    grid[rank][slot] += share
        # Weights are gathered meanwhile, and images run before.
        gather, has_phases = self.cost_model.gather, bool(self.patches)
        assert not (gather and has_phases), "the judge has no gather behind images"
        return [[max(cost, gather) for cost in slots] for slots in grid]

    def time(self, ranks):
        """Time of the slowest ranks, for samples on `ranks[dp_rank][slot]`."""
        grid, span, num_ranks = self.grid(ranks), self.span, range(len(ranks))
        encoder = [[sum(self.images[i] for i in ids) for ids in slots] for slots in ranks]
        if not (self.patches and self.objective == "microbatch" and span > 1 and not self.is_makespan):
            encoder = [[0] * len(slots) for slots in ranks]
        times = []
        for first in range(0, len(grid), span):
            group, slots = num_ranks[first : first + span], range(len(grid[first]))
            loads = [
                max(encoder[rank][slot] for rank in group)
                + max(grid[rank][slot] - encoder[rank][slot] for rank in group)
                for slot in slots
            ]
            stages = self.topology.pp_size if self.is_makespan else 1
            chunks, group = self.topology.vpp_size, self.topology.microbatch_multiple
            times.append(makespan(loads, stages=stages, chunks=chunks, group=group))
        return max(times)

    def least_time(self):
        """A time that no plan beats: even shares, the largest sample, pigeonholes, and rows that must be high."""
        ranks, launch = self.topology.dp_size, self.cost_model.per_microbatch
        cap = self.limits.max_tokens_per_microbatch(self.topology)
        weights = self.tokens if cap is not None else [1] * len(self.lengths)
        room = cap if cap is not None else self.limits.micro_batch_size
        assert room is not None
        rows = least_rows(weights, room=room, bins=ranks, multiple=self.topology.microbatch_multiple)
        costs = sorted(self.own, reverse=True)
        work = -(-(sum(self.own) + sum(self.shared)) // ranks)
        # One rank holds at least m + 1 of the costliest m * ranks + 1 samples.
        for most in range(1, (len(costs) - 1) // ranks + 1):
            work = max(work, sum(costs[most * ranks - most : most * ranks + 1]))
        if self.span > 1 and not any(self.images):
            # Samples of more than half the room are one to a bin: the r highest rows of all groups hold r * span.
            alone = sorted((c for c, w in zip(self.own, weights, strict=True) if 2 * w > room), reverse=True)
            groups = ranks // self.span
            work = max(work, -(-sum(alone[:: self.span]) // groups))
            if not any(self.shared):
                work = max(work, self._least_work_beside_the_largest(weights, room=room))
        work += rows * launch
        if not self.is_makespan:
            return max(work, max(costs, default=0) + rows * launch)
        stages, chunks = self.topology.pp_size, self.topology.vpp_size
        idle = (stages - 1) * launch
        return max(-(-(work * chunks + idle) // (stages * chunks)), max(costs, default=0) + launch)

    def _least_work_beside_the_largest(self, weights, *, room):
        """Even shares and what the row of the costliest sample loses: no other bin there can cost as much."""
        order = sorted(range(len(self.own)), key=lambda i: -self.own[i])
        others = sorted(order[1:], key=lambda i: -self.own[i] / max(weights[i], 1))
        fullest, left = 0, room
        for i in others:
            if weights[i] > room:
                return 0
            # The last one is cut: a bin cannot cost more.
            part = min(weights[i], left)
            fullest += -(-self.own[i] * part // weights[i]) if weights[i] else self.own[i]
            left -= part
        lost = (self.span - 1) * max(self.own[order[0]] - fullest, 0) if order else 0
        return -(-(sum(self.own) + lost) // self.topology.dp_size)

    def least_time_of_sizes(self):
        """The same with dynamic context-parallel sizes: the least time in which the work of all samples fits."""
        model, ranks, cap = self.cost_model, self.topology.dp_cp_size, self.limits.max_tokens_per_gpu
        assert cap is not None
        sizes = self.topology.dynamic_cp_sizes
        work = []
        for length in self.lengths:
            fitting = [size for size in sizes if self.padded(length, size) <= cap * size] or [sizes[-1]]
            work.append([(-(-self.cost_on(length, size) // size), size) for size in fitting])
        launch, tokens = model.per_microbatch, sum(min(length, cap * sizes[-1]) for length in self.lengths)
        # Micro-batches, each counted on all its ranks.
        fixed = max(ranks, -(-tokens // cap)) * launch
        if self.expert_span > 1:  # whoever shares it, and whenever
            fixed += model.expert_linear * sum(self.padded(length, 1) for length in self.lengths)
        low, high = 0, sum(of_sample[-1][0] * of_sample[-1][1] for of_sample in work) + fixed
        while low < high:
            time = (low + high) // 2
            fits = [[cost * size for cost, size in of_sample if cost <= time - launch] for of_sample in work]
            if all(fits) and sum(map(min, fits)) + fixed <= time * ranks:
                high = time
            else:
                low = time + 1
        return -(-low // self.topology.pp_size) if self.is_makespan else low

    def cost_on(self, length, size):
        """Cost of a sample, summed over the `size` ranks that share it, without what expert-parallel groups share."""
        model, tokens = self.cost_model, self.padded(length, size)
        per_token = (model.linear + model.expert_linear * (self.expert_span == 1)) * tokens
        attention = model.local_cost(tokens) - model.linear * tokens
        received = model.cp_exchange * (size - 1) * tokens
        moved = -(-model.cp_all_to_all * (size - 1) // size) + model.cp_all_gather * (size - 1)
        return per_token + moved * tokens + max(attention, received)


def per_gpu(cost, topology, *, is_makespan=False):
    """Cost of one GPU, rounded up, of one over all GPUs of a rank; the stages of a makespan have shared it already."""
    gpus = topology.tp_size * (1 if topology.dynamic_cp else topology.cp_size)
    return -(-cost // (gpus if is_makespan else gpus * topology.pp_size))


def least_rows(weights, *, room, bins, multiple):
    """Rows of `bins` bins that hold the weights at least: by their sum, and as m of more than 1/(m + 1) fill a bin."""
    held = sum(min(weight, room) for weight in weights)
    rows = max(1, -(-held // (room * bins)))
    for most in range(1, 9):
        heavy = sum((most + 1) * weight > room for weight in weights)
        rows = max(rows, -(-heavy // (most * bins)))
    return -(-rows // multiple) * multiple


def makespan(costs, *, stages, chunks=1, group=1, kinds=()):
    """Time of one-forward-one-backward (D. Narayanan et al., 2021); a row of costs for each kind of chunk.

    The planner's own, which tests/megatron/test_pipeline_order.py holds against events in Megatron's order.
    """
    table = np.array(costs, dtype=np.int64).reshape(1, -1, len(costs[0]) if kinds else len(costs))
    return int(makespans(table, Pipeline(stages, chunks, group, kinds))[0])


def figures_of_ranks(ranks, lengths, **options):
    """The planner's figures of any assignment of all samples, `ranks[rank][slot]` their ids; `options` of `Problem.of`.

    A rank with fewer slots than others idles through dummies at its end.
    """
    problem = Problem.of(lengths, **options)
    num_slots = max(1, *map(len, ranks))
    held = [(rank * num_slots + slot, list(ids)) for rank, slots in enumerate(ranks) for slot, ids in enumerate(slots)]
    assert sorted(sample for _, ids in held for sample in ids) == list(range(len(problem.lengths))), "each sample once"
    microbatch_of = np.zeros(len(problem.lengths), dtype=np.int64)
    for place, ids in held:
        microbatch_of[ids] = place
    sizes = np.full((problem.topology.dp_size, num_slots), problem.topology.cp_size)
    return Assignment(**vars(problem), microbatch_of=microbatch_of, cp_size_grid=sizes).metrics()
