"""Samples of several ranks, packed into equally many micro-batches.

Needs torch, which an adapter may be imported without.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.adapters.kit.plans import Ints, even_parts, sample_costs
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner import build_data_schedule, organ_pipe_order
from megatron_balance.runtime.gather import Header, gather_lengths
from megatron_balance.samples.sample import KeySpec, Samples, SampleSchema
from megatron_balance.topology import Limits, Topology

_COUNTS = SampleSchema((KeySpec("micro-batches", dtype=torch.int64),))


def agreed_microbatches(
    lengths: Sequence[int] | Ints,
    *,
    max_tokens: int,
    cost_model: CostModel,
    min_count: int = 1,
    multiple: int = 1,
    samples_per_unit: int = 1,
    mountain: bool = False,
    flag: str = "max_tokens_per_gpu",
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> list[list[int]]:
    """Packs this rank's samples into the fewest micro-batches under a cap, as many as on every rank of a group.

    Each rank packs its own samples, since ranks that share samples (tensor, context and pipeline parallelism) must cut
    them alike. All ranks then take the largest number, and those that had fewer pack again. There are `min_count`
    micro-batches or more, a multiple of `multiple`; `samples_per_unit` neighbouring samples stay together. With
    `mountain` cheap micro-batches are at both ends, where a pipeline waits; else the costliest is first. `flag` is the
    host's name of `max_tokens`, and `device` has the buffers of the group's collective.

    Returns for every micro-batch the positions of its samples, ascending; none is empty. Where one rank fails,
    or limits or costs differ, every rank of the group raises a BalanceError.
    """
    samples = np.asarray(lengths, dtype=np.int64)
    header = Header({"limits": repr((max_tokens, min_count, multiple, samples_per_unit, cost_model))})
    while True:
        slots, problem = [], None
        try:
            slots = _pack(samples, max_tokens, min_count, multiple, samples_per_unit, cost_model, flag)
        except BalanceError as error:
            if group is None:
                raise
            problem = str(error)
        if group is None:
            break
        count = Samples(_COUNTS, {}, np.array([len(slots)]))
        counts = gather_lengths(count, group=group, error=problem, header=header, device=device).lengths
        min_count = int(counts.max())
        if (counts == min_count).all():
            break
    costs = sample_costs(samples, cost_model=cost_model)
    slot_costs = np.array([[costs[slot].sum() for slot in slots]])
    order = organ_pipe_order(slot_costs)[0] if mountain else np.argsort(-slot_costs[0], kind="stable")
    return [slots[index].tolist() for index in order]


def _pack(
    samples: Ints, max_tokens: int, min_count: int, multiple: int, size: int, cost_model: CostModel, flag: str
) -> list[Ints]:
    """The samples of each micro-batch: as even in cost as the cap lets them be."""
    if not samples.size or samples.size % size:
        raise BalanceError(f"the batch has {samples.size} samples: it must have some, a multiple of {size}.")
    tokens = samples.reshape(-1, size).sum(axis=1)
    longest = int(tokens.max())
    if longest > max_tokens:
        raise BalanceError(
            f"{int((tokens > max_tokens).sum())} samples or groups of samples are over {flag} {max_tokens}, the "
            f"longest has {longest} tokens: raise it to that, or cut the samples."
        )
    costs = sample_costs(samples, cost_model=cost_model).reshape(-1, size).sum(axis=1)
    min_count = -(-max(min_count, -(-int(tokens.sum()) // max_tokens), 1) // multiple) * multiple

    @functools.cache
    def full_slots() -> list[Ints]:
        topology, limits = Topology(1, microbatch_multiple=multiple), Limits(max_tokens)
        schedule = build_data_schedule(
            tokens, cost_model=CostModel.tokens(), topology=topology, limits=limits, objective="step"
        )
        return [np.array(slot, dtype=np.int64) for slot in schedule.ranks[0]]

    for count in range(min_count, tokens.size + 1, multiple):
        # Even costs; even tokens where those do not keep the cap; full slots, which may still do.
        for values in (costs, tokens, None):
            slots = full_slots() if values is None else even_parts(values, num_parts=count, equal_count=False)
            if len(slots) == count and all(slot.size and tokens[slot].sum() <= max_tokens for slot in slots):
                return [(np.sort(slot)[:, None] * size + np.arange(size)).reshape(-1) for slot in slots]
    raise BalanceError(
        f"{tokens.size} samples (or groups of them) for {min_count} micro-batches under {flag} {max_tokens}, a "
        f"multiple of {multiple} and as many as on every rank: none may be empty. Give each rank more samples or raise "
        f"{flag}."
    )
