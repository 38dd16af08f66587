"""Rows of several ranks: packed into equally many micro-batches, and moved by the package's exchange.

Needs torch, which an adapter may be imported without.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.adapters.kit.plans import Ints, even_parts, row_costs
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner import build_data_schedule, mountain_order
from megatron_balance.runtime.exchange import reroute_samples
from megatron_balance.runtime.gather import GatheredLengths, Header, gather_lengths
from megatron_balance.samples.sample import KeySpec, Sample, SampleSchema
from megatron_balance.topology import Limits, Topology

_COUNTS = SampleSchema((KeySpec("micro-batches", dtype=torch.int64),))


def agreed_microbatches(
    lengths: Sequence[int] | Ints,
    *,
    max_tokens: int,
    cost_model: CostModel,
    least: int = 1,
    multiple: int = 1,
    rows_per_unit: int = 1,
    mountain: bool = False,
    flag: str = "max_tokens_per_gpu",
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> list[list[int]]:
    """Packs this rank's rows into the fewest micro-batches under a cap, as many as on every rank of a group.

    Each rank packs its own rows, since ranks that share rows (tensor, context and pipeline parallelism) must cut them
    alike. All ranks then take the largest number, and those that had fewer pack again. There are `least` micro-batches
    or more, a multiple of `multiple`; `rows_per_unit` neighbouring rows stay together. With `mountain` cheap ones are
    at both ends, where a pipeline waits; else the costliest is first. `flag` is the host's name of `max_tokens`, and
    `device` has the buffers of the group's collective.

    Returns for every micro-batch the positions of its rows, ascending; none is empty. Where one rank cannot go on, or
    limits or costs differ, every rank of the group raises a BalanceError.
    """
    rows = np.asarray(lengths, dtype=np.int64)
    header = Header({"limits": repr((max_tokens, least, multiple, rows_per_unit, cost_model))})
    while True:
        slots, problem = [], None
        try:
            slots = _pack(rows, max_tokens, least, multiple, rows_per_unit, cost_model, flag)
        except BalanceError as error:
            if group is None:
                raise
            problem = str(error)
        if group is None:
            break
        counts = gather_lengths(
            [len(slots)], group=group, schema=_COUNTS, problem=problem, header=header, device=device
        ).lengths
        least = int(counts.max())
        if (counts == least).all():
            break
    costs = row_costs(rows, cost_model=cost_model)
    of_slots = np.array([[costs[slot].sum() for slot in slots]])
    order = mountain_order(of_slots)[0] if mountain else np.argsort(-of_slots[0], kind="stable")
    return [slots[index].tolist() for index in order]


def _pack(
    rows: Ints, max_tokens: int, least: int, multiple: int, size: int, cost_model: CostModel, flag: str
) -> list[Ints]:
    """The rows of each micro-batch: as even in cost as the cap lets them be."""
    if not rows.size or rows.size % size:
        raise BalanceError(f"the batch has {rows.size} rows: it must have some, a multiple of {size}.")
    tokens = rows.reshape(-1, size).sum(axis=1)
    longest = int(tokens.max())
    if longest > max_tokens:
        raise BalanceError(
            f"{int((tokens > max_tokens).sum())} rows or groups of rows are over {flag} {max_tokens}, the longest has "
            f"{longest} tokens: raise it to that, or cut the rows."
        )
    costs = row_costs(rows, cost_model=cost_model).reshape(-1, size).sum(axis=1)
    needed = max(least, -(-int(tokens.sum()) // max_tokens), 1)
    needed = -(-needed // multiple) * multiple

    @functools.cache
    def filled() -> list[Ints]:
        topology, limits = Topology(1, microbatch_multiple=multiple), Limits(max_tokens)
        schedule = build_data_schedule(
            tokens, cost_model=CostModel.tokens(), topology=topology, limits=limits, objective="step"
        )
        return [np.array(slot, dtype=np.int64) for slot in schedule.ranks[0]]

    for count in range(needed, tokens.size + 1, multiple):
        # Even costs; even tokens where those do not keep the cap; a plan filled bin by bin, which may still do.
        for values in (costs, tokens, None):
            slots = filled() if values is None else even_parts(values, num_parts=count, equal_count=False)
            if len(slots) == count and all(slot.size and tokens[slot].sum() <= max_tokens for slot in slots):
                return [(np.sort(slot)[:, None] * size + np.arange(size)).reshape(-1) for slot in slots]
    raise BalanceError(
        f"{tokens.size} rows (or groups of them) for {needed} micro-batches under {flag} {max_tokens}, a multiple of "
        f"{multiple} and as many as on every rank: none may be empty. Give each rank more rows or raise {flag}."
    )


def move_rows(
    rows: Sequence[Sample],
    *,
    ranks: Ints,
    gathered: GatheredLengths,
    group: dist.ProcessGroup,
    schema: SampleSchema | None = None,
    device: torch.device | str = "cpu",
) -> list[Sample]:
    """The rows that this rank gets, ascending, after every rank of the group has called it with its own.

    `rows` are made by `moving_row`; `ranks` has the rank of each row of all ranks; `gathered` is of `gather_lengths`
    with the rows' ragged keys, whatever its lengths mean, and `schema` that of the rows where it was not gathered.
    """
    ones = np.ones_like(gathered.home_ranks)
    schema = schema or gathered.schema
    of_rows = dataclasses.replace(gathered, lengths=ones, segment_lengths=ones, num_segments=ones, schema=schema)
    return [*reroute_samples(rows, destinations=ranks, gathered=of_rows, group=group, device=device).values()]


def moving_row(ragged: Mapping[str, torch.Tensor], *, per_sample: Mapping[str, torch.Tensor] | None = None) -> Sample:
    """A row as a sample that can move: entries of each key in `ragged`, and what every row has one of."""
    device = next(iter(ragged.values())).device
    return Sample({"row": torch.zeros(1, dtype=torch.uint8, device=device)}, per_sample=per_sample or {}, ragged=ragged)
