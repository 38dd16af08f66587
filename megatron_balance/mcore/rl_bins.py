"""Gives the bins of Megatron's RL loop to data-parallel ranks by cost.

With `--rl-use-sequence-packing` Megatron packs all sequences of a rollout, longest first, into bins of `--seq-length`
tokens and deals these out to ranks in their order (`fifo`) or in turns. Bins have the same number of tokens, padding
included, but attention in a bin of one long sequence costs more than in one of many short ones, and one rank may get
all of the former. Under `--balance-data` a hook reorders bins before Megatron deals them out.

Invariants: the bins that run in a slot stay the same, on other ranks, so that every optimizer step trains on the
sequences that it has in stock; all ranks choose the same order, since all have gathered all sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.hooking.installation import Installation
from megatron_balance.hooking.patches import Function, Hook
from megatron_balance.hooking.patches import install as install_hooks
from megatron_balance.mcore.setup.arguments import flops_from_megatron_args


def order_of_bins(costs: Sequence[int], *, dp_size: int, in_turns: bool) -> list[int]:
    """The order in which Megatron is to deal bins out, so that ranks have similar costs.

    Slot after slot, the costliest bin goes to the rank with the least cost so far; ties by index. Slots that only some
    ranks have come first, then those whose bins differ most. Megatron's own order stays where this is no better.

    Args:
        costs: `[num_bins]` of each bin.
        dp_size: data-parallel ranks.
        in_turns: rank r gets the places r, r + dp_size and so on; else consecutive ones, and the first ranks one more.

    Returns:
        `[num_bins]` the bin of each place.

    Example:
        >>> order_of_bins([9, 8, 2, 1], dp_size=2, in_turns=False)
        [0, 3, 2, 1]
    """
    num_bins = len(costs)
    if in_turns:
        places = [list(range(rank, num_bins, dp_size)) for rank in range(dp_size)]
    else:
        many, rest = divmod(num_bins, dp_size)
        firsts = [rank * many + min(rank, rest) for rank in range(dp_size + 1)]
        places = [list(range(first, end)) for first, end in pairwise(firsts)]
    slots = [[of_rank[slot] if slot < len(of_rank) else None for of_rank in places] for slot in range(len(places[0]))]
    stock = list(range(num_bins))
    order, loads = stock.copy(), [0] * dp_size
    for slot in sorted(slots, key=lambda slot: _hardest_first(slot, costs=costs)):
        ranks = sorted(
            (rank for rank in range(dp_size) if slot[rank] is not None), key=lambda rank: (loads[rank], rank)
        )
        bins = sorted((place for place in slot if place is not None), key=lambda index: (-costs[index], index))
        for rank, index in zip(ranks, bins, strict=True):
            place = slot[rank]
            assert place is not None, "these ranks have the slot"
            order[place] = index
            loads[rank] += costs[index]
    in_stock = max(sum(costs[place] for place in of_rank) for of_rank in places)
    return order if max(loads) < in_stock else stock


def _hardest_first(slot: Sequence[int | None], *, costs: Sequence[int]) -> tuple[int, int]:
    of_bins = [costs[place] for place in slot if place is not None]
    return len(of_bins), min(of_bins) - max(of_bins)


def with_bins_balanced(distribute_packed_bins: Function) -> Function:
    """Reorder bins before Megatron deals them out."""

    @functools.wraps(distribute_packed_bins)
    def wrapper(packed_trajs: Any, packed_position_ids: Any, packed_loss_mask: Any, packing_info: Any) -> Any:
        from megatron.core import parallel_state
        from megatron.training import get_args

        cost_model = flops_from_megatron_args(get_args())
        num_bins, bin_size = packed_trajs.shape
        starts = [
            [*packing_info.seq_starts[index], bin_size] for index in range(num_bins)
        ]  # padding runs as a sequence
        costs = [sum(cost_model(end - start) for start, end in pairwise(of_bin) if end > start) for of_bin in starts]
        order = order_of_bins(
            costs,
            dp_size=parallel_state.get_data_parallel_world_size(),
            in_turns=packing_info.packing_algo == "round-robin",
        )
        place_of = {index: place for place, index in enumerate(order)}
        in_order = replace(
            packing_info,
            bin_seq_indices=[packing_info.bin_seq_indices[index] for index in order],
            seq_starts={place: packing_info.seq_starts[index] for place, index in enumerate(order)},
            seq_to_bin_idx=[place_of.get(index) for index in packing_info.seq_to_bin_idx],
        )
        return distribute_packed_bins(
            packed_trajs[order], packed_position_ids[order], packed_loss_mask[order], in_order
        )

    return wrapper


RL_HOOKS = (
    Hook(
        target="megatron.rl.sequence_packing_utils:distribute_packed_bins",
        bound_in=("megatron.rl.sequence_packing_utils",),
        parameters=("packed_trajs", "packed_position_ids", "packed_loss_mask", "packing_info"),
        wrap=with_bins_balanced,
        why="it deals packed bins out to data-parallel ranks in their order, whatever attention in them costs",
        until="Megatron deals bins out by cost",
        first=(0, 18),
    ),
)
"""Hooks in `megatron.rl`, which wheels lack; installed once a run asks for them."""

rl_installation: Installation[str] = Installation("Megatron's RL loop")


def balances_bins(args: Any) -> bool:
    """True if a run is Megatron's RL loop on packed bins, with --balance-data."""
    names = ("perform_rl_step", "rl_use_sequence_packing", "balance_data")
    return all(getattr(args, name, False) for name in names)


def install_where_asked() -> None:
    """Install RL_HOOKS where Megatron's arguments ask for them. Every rank calls it, before the first rollout.

    Raises:
        BalanceError: a release before 0.18; a target is missing or has changed. Nothing is changed then.
    """
    from megatron.core.package_info import __version__
    from megatron.training import get_args

    if not balances_bins(get_args()):
        return
    version = f"megatron-core {__version__}"
    major, minor = (int(number) for number in __version__.split(".")[:2])
    for hook in RL_HOOKS:
        if not hook.is_in((major, minor)):
            raise BalanceError(
                f"--rl-use-sequence-packing with --balance-data in {version}: its bins have attention masks, which are "
                "not dealt out here; use 0.18 or newer, or drop --balance-data."
            )
    rl_installation.install(version, hook=lambda: install_hooks(RL_HOOKS, version=version))
