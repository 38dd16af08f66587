"""Plans with dynamic context-parallel sizes in the form that Megatron's dev branch executes.

A plan holds a list of sample ids for every rank in every micro-batch. Ranks with the same list share it by context
parallelism. The executor relies on:

    every sample    is in the lists of one group of ranks, in one micro-batch
    groups          ranks with the same list are neighbours and a power of two, or all ranks; a group starts at a
                    multiple of its size, and all its ranks have the list in the same order
    no dummies      every rank has a sample in every micro-batch, and their number is a multiple of microbatch_multiple
    cap             a rank of a group holds at most the cap; a sample that is longer on all ranks runs alone

If DP×CP is not a power of two, it supports sizes below half of it, and all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, compress, islice

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner import DataSchedule, build_data_schedule
from megatron_balance.topology import Limits, Topology

RankLists = list[list[list[int]]]
"""`[num_microbatches][num_ranks]` lists of sample ids."""


def plan_rank_lists(
    sample_id_seqlens: Sequence[tuple[int, int]],
    *,
    cost_model: CostModel,
    topology: Topology,
    max_tokens_per_gpu: int,
    min_cp_size: int = 1,
) -> RankLists:
    """Plans one global batch of pairs of id and length, tokens; with `min_cp_size` above 1 lengths must be padded.

    `min_cp_size` ranks at least share a micro-batch, and a rank holds `max_tokens_per_gpu` tokens of it at most. The
    lists of a micro-batch are of ranks `dp_rank * cp_size + cp_rank`.

    Raises:
        BalanceError: there are too few samples for `microbatch_multiple`, or `min_cp_size` is not a power of two
            that divides the ranks.
    """
    num_ranks = topology.num_leaves
    if num_ranks % min_cp_size or min_cp_size & (min_cp_size - 1):
        raise BalanceError(
            f"min_dynamic_context_parallel_size is {min_cp_size}: it must be a power of two that divides DP×CP, "
            f"which is {num_ranks}."
        )
    # Blocks of `min_cp_size` ranks are leaves, with the sizes for which every rank has a group in executors.
    uneven = num_ranks & (num_ranks - 1)
    most = max((1 << num_ranks.bit_length() - 2) // min_cp_size, 1) if uneven else None
    blocks = replace(topology, dp_size=num_ranks // min_cp_size, cp_size=1, max_cp_size=most)
    # The cost of a sample on blocks of m ranks, times m: c blocks receive `cp_exchange*(c*m - 1)` a token.
    cost_model = replace(cost_model.at_cp_size(min_cp_size), cp_exchange=cost_model.cp_exchange * min_cp_size)
    capacity, multiple = max_tokens_per_gpu * num_ranks, topology.microbatch_multiple
    largest = min_cp_size * blocks.dynamic_cp_sizes[-1]
    # Samples that fit on all ranks only; if all ranks are a regular size, they are planned like others.
    is_long = [largest < num_ranks and length > max_tokens_per_gpu * largest for _, length in sample_id_seqlens]
    on_all = _first_fit(list(compress(sample_id_seqlens, is_long)), capacity=capacity)
    rest = [pair for pair, long in zip(sample_id_seqlens, is_long, strict=True) if not long]
    slots: RankLists = []
    if rest:
        for objective in ("auto", "microbatch"):
            schedule = build_data_schedule(
                [length for _, length in rest],
                cost_model=cost_model,
                topology=blocks,
                limits=Limits(max_tokens_per_gpu * min_cp_size),
                objective=objective,
            )
            filled = _filled(schedule, other_slots=len(on_all))
            if all(map(all, filled)):
                break  # else rows of all ranks, which have few empty places, are filled
        slots = _lists(filled, ids=[sample for sample, _ in rest], min_cp_size=min_cp_size)
    if not all(ranks[0] for ranks in slots) or (len(on_all) + len(slots)) % multiple:
        # There are fewer samples than a good plan has micro-batches.
        slots, on_all = [], _split(_first_fit(sample_id_seqlens, capacity=capacity), multiple=multiple)
    return [[ids] * num_ranks for ids in on_all] + slots


def _filled(schedule: DataSchedule, *, other_slots: int) -> RankLists:
    """Slots of the plan, with single samples in place of dummies as far as there are any: executors have no dummies.

    The shortest samples that share a micro-batch, of the same leaf if it has one, so that its work stays the same.
    `other_slots` come beside; the total is a multiple of `microbatch_multiple`.
    """
    multiple, num_leaves = schedule.topology.microbatch_multiple, len(schedule.cp_size_grid)
    num_slots = -(-(schedule.num_microbatches + other_slots) // multiple) * multiple - other_slots
    # Leaves of a group have the same list.
    held = [list[int]() for _ in range(schedule.cp_size_grid.size)]
    places: list[list[int]] = schedule.places().tolist()
    slots: RankLists = [[held[place] for place in of_slot] for of_slot in zip(*places, strict=True)]
    slots += [[list[int]() for _ in range(num_leaves)] for _ in range(num_slots - len(slots))]
    home: list[int] = schedule.slot_of.tolist()
    for sample, place in enumerate(home):
        held[place].append(sample)
    order: list[int] = np.argsort(schedule.lengths, kind="stable").tolist()
    fits = schedule.topology.at_cp_size(1).padded_seq_len(schedule.lengths) <= (schedule.limits.max_tokens_per_gpu or 0)
    short = [sample for sample in order if fits[sample]]

    def donors(samples: Iterable[int]) -> Iterator[int]:
        return (sample for sample in samples if sample in held[home[sample]] and len(held[home[sample]]) > 1)

    of_leaves: list[list[int]] = [[] for _ in range(num_leaves)]
    for sample in short:
        if schedule.cp_size_grid.reshape(-1)[home[sample]] == 1:
            of_leaves[home[sample] // schedule.num_microbatches].append(sample)
    any_donors, own_donors = donors(short), [donors(samples) for samples in of_leaves]
    for slot in slots:
        for leaf, ids in enumerate(slot):
            for sample in islice(chain(own_donors[leaf], any_donors), 0 if ids else 1):
                held[home[sample]].remove(sample)
                slot[leaf] = [sample]
    return slots


def _lists(slots: RankLists, *, ids: Sequence[int], min_cp_size: int) -> RankLists:
    """Rank lists of slots over blocks. In a slot that still has dummies all ranks share all samples."""
    lists: RankLists = []
    for of_leaves in slots:
        if not all(of_leaves):
            everyone = sorted({sample for samples in of_leaves for sample in samples})
            of_leaves = [everyone] * len(of_leaves)
        lists.append([[ids[sample] for sample in samples] for samples in of_leaves for _ in range(min_cp_size)])
    return lists


def _first_fit(sample_id_seqlens: Sequence[tuple[int, int]], *, capacity: int) -> list[list[int]]:
    """Packs of at most `capacity` tokens, first fit by falling length; a longer sample is packed alone."""
    packs: list[list[int]] = []
    room: list[int] = []
    for sample, length in sorted(sample_id_seqlens, key=lambda pair: -pair[1]):
        pack = next((pack for pack, left in enumerate(room) if left >= length), len(packs))
        if pack == len(packs):
            packs.append([])
            room.append(capacity)
        packs[pack].append(sample)
        room[pack] -= length
    return packs


def _split(packs: list[list[int]], *, multiple: int) -> list[list[int]]:
    """Splits packs until their number is a multiple of `multiple`; where there are too few samples, BalanceError."""
    while len(packs) % multiple:
        largest = max(packs, key=len)
        if len(largest) < 2:
            raise BalanceError(
                f"{len(packs)} samples cannot fill a multiple of {multiple} micro-batches: raise --global-batch-size."
            )
        packs.remove(largest)
        packs += [largest[::2], largest[1::2]]
    return packs
