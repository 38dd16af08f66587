"""The adapter kit: what every adapter needs, so that an adapter is its host's names, its settings and its plan.

`Installation` installs a checked table of hooks once and undoes it; `launch` runs an unedited script with it in place.
`split_rollout` and `even_parts` plan the steps of a rollout batch and samples on ranks; `agreed_microbatches` packs
samples alike on all ranks, and needs torch only there. docs/write-an-adapter.md has an adapter to copy. Provisional.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError, check_integer
from megatron_balance.hooking import Function, Hook, Installation, check_not_started, launch
from megatron_balance.planner import as_integers, build_data_schedule, number_groups, organ_pipe_order, partition_items
from megatron_balance.topology import Limits, Topology

if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_balance.runtime.comm import Device

__all__ = [
    "Function",
    "Hook",
    "Installation",
    "agreed_microbatches",
    "check_not_started",
    "even_parts",
    "launch",
    "sample_costs",
    "split_rollout",
]

Ints = NDArray[np.int64]


def split_rollout(groups: Sequence[Hashable] | NDArray[Any], *, global_batch_size: int) -> list[Ints]:
    """Cuts a rollout batch into steps of whole groups, taken in the order of their first samples.

    Args:
        groups: `[num_samples]` id of the group of each sample, its prompt or rollout; a group need not stand together.
        global_batch_size: groups of a step; the last step may have fewer.

    Returns:
        For every step `[num_samples_of_step]` int64 positions in the rollout batch, ascending.

    Raises:
        BalanceError: `global_batch_size` is not a positive integer.

    Examples:
        >>> [step.tolist() for step in split_rollout(["a", "b", "a", "c", "d"], global_batch_size=2)]
        [[0, 1, 2], [3, 4]]
    """
    step_of = number_groups(groups) // check_integer("global_batch_size", global_batch_size)
    return [np.flatnonzero(step_of == step) for step in range(int(step_of.max(initial=-1)) + 1)]


def sample_costs(lengths: Ints, *, cost_model: CostModel) -> Ints:
    """Cost of samples, int64 of the lengths' shape.

    The unit is the cost of one squared token (of one token where there is no attention) and depends on the model alone,
    so that numbers of two calls can be added and compared. A sample that costs anything costs at least 1.
    """
    unit = cost_model.quadratic or sum(coefficient for _, coefficient in cost_model.windows) or cost_model.linear or 1
    costs = cost_model(lengths.reshape(-1).astype(np.int64)).reshape(lengths.shape)
    return np.maximum((costs + unit // 2) // unit, costs > 0)


def even_parts(costs: Sequence[int] | Ints, *, num_parts: int, equal_count: bool) -> list[Ints]:
    """Cuts items into parts of nearly equal cost.

    Args:
        costs: `[num_items]` integers from 0 to 2**50.
        num_parts: parts to make, 1 to `num_items`.
        equal_count: every part holds the same number of items, or the quotient rounded up at most.

    Returns:
        `[num_parts]` ascending int64 indices, none empty; with `equal_count` larger parts first.

    Raises:
        BalanceError: there are fewer items than parts.
    """
    values = as_integers(costs, name="costs", bits=50)
    if not 1 <= num_parts <= values.size:
        raise BalanceError(
            f"{values.size} items (or groups of them) for {num_parts} parts, such as ranks: every part gets one. Give "
            "more items, by a larger batch, or fewer parts."
        )
    part_of = partition_items(values, num_parts=num_parts, equal_count=equal_count)
    parts = [np.flatnonzero(part_of == part) for part in range(num_parts)]
    return sorted(parts, key=lambda items: -items.size) if equal_count else parts


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
    device: Device = "cpu",
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
    costs = sample_costs(samples, cost_model=cost_model)

    def pack(least: int) -> list[Ints]:
        return _pack(samples, costs, max_tokens, least, multiple, samples_per_unit, flag)

    settings = {"limits": repr((max_tokens, min_count, multiple, samples_per_unit, cost_model))}
    slots = pack(min_count) if group is None else _pack_alike(pack, min_count, settings, group=group, device=device)
    slot_costs = np.array([[costs[slot].sum() for slot in slots]])
    order = organ_pipe_order(slot_costs)[0] if mountain else np.argsort(-slot_costs[0], kind="stable")
    return [slots[index].tolist() for index in order]


def _pack_alike(
    pack: Callable[[int], list[Ints]],
    min_count: int,
    settings: Mapping[str, str],
    *,
    group: dist.ProcessGroup,
    device: Device,
) -> list[Ints]:
    """The micro-batches that `pack` makes, in the least number that all ranks can make."""
    from megatron_balance.runtime.failure import Failure, attempt
    from megatron_balance.runtime.gather import gather_lengths
    from megatron_balance.samples.sample import Samples

    while True:
        slots = attempt(pack, min_count)
        samples, count = (slots, 0) if isinstance(slots, Failure) else (Samples.joined([]), len(slots))
        counts = gather_lengths(samples, group=group, settings=settings, reported=[count], device=device).reported
        assert not isinstance(slots, Failure), "every rank has raised it"
        min_count = int(counts.max())
        if (counts == min_count).all():
            return slots


def _pack(
    samples: Ints, costs: Ints, max_tokens: int, min_count: int, multiple: int, size: int, flag: str
) -> list[Ints]:
    """The samples of each micro-batch: as even in cost as the cap lets them be."""
    if not samples.size or samples.size % size:
        raise BalanceError(f"the batch has {samples.size} samples: it must have some, a multiple of {size}.")
    tokens, costs = (values.reshape(-1, size).sum(axis=1) for values in (samples, costs))
    longest = int(tokens.max())
    if longest > max_tokens:
        raise BalanceError(
            f"{int((tokens > max_tokens).sum())} samples or groups of samples are over {flag} {max_tokens}, the "
            f"longest has {longest} tokens: raise it to that, or cut the samples."
        )
    limits = Limits(max_tokens)
    full = build_data_schedule(tokens, cost_model=CostModel.tokens(), topology=Topology(1), limits=limits).ranks[0]
    min_count = -(-max(min_count, -(-int(tokens.sum()) // max_tokens)) // multiple) * multiple
    for count in range(min_count, tokens.size + 1, multiple):
        # Even costs; even tokens where those do not keep the cap; full slots, which may still do.
        for values in (costs, tokens, None):
            slots = full if values is None else even_parts(values, num_parts=count, equal_count=False)
            slots = [np.array(slot, dtype=np.int64) for slot in slots]
            if len(slots) == count and all(tokens[slot].sum() <= max_tokens for slot in slots):
                return [(np.sort(slot)[:, None] * size + np.arange(size)).reshape(-1) for slot in slots]
    raise BalanceError(
        f"{tokens.size} samples (or groups of them) for {min_count} micro-batches under {flag} {max_tokens}, a "
        f"multiple of {multiple} and as many as on every rank: none may be empty. Give each rank more samples or raise "
        f"{flag}."
    )
