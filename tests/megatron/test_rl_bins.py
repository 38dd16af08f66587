"""The bins of Megatron's RL loop go to ranks by cost, and every optimizer step keeps its sequences.

MEGATRON_CHECKOUT=DIR python -m pytest -m checkout tests/megatron/test_rl_bins.py
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import types
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import BalanceError, CostModel
from megatron_balance.hooking.patches import install
from megatron_balance.mcore import hooks, rl_bins
from megatron_balance.mcore.rl_bins import RL_HOOKS, order_of_bins, with_bins_balanced

COST = CostModel(linear=10, quadratic=1)
PAD = 0


def dealt(order: list[int], *, dp_size: int, in_turns: bool) -> list[list[int]]:
    """The bins of each rank, as Megatron deals them out."""
    if in_turns:
        return [order[rank::dp_size] for rank in range(dp_size)]
    return [part.tolist() for part in np.array_split(np.array(order, dtype=np.int64), dp_size)]


def slots(ranks: list[list[int]]) -> list[list[int]]:
    return [sorted(index for index in slot if index is not None) for slot in zip_longest(*ranks)]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(1, 6), st.booleans())
def test_bins_change_ranks_within_their_slot(costs: list[int], dp_size: int, in_turns: bool) -> None:
    order = order_of_bins(costs, dp_size=dp_size, in_turns=in_turns)
    ours, stock = (dealt(one, dp_size=dp_size, in_turns=in_turns) for one in (order, list(range(len(costs)))))
    assert slots(ours) == slots(stock)
    loads = [max(sum(costs[index] for index in of_rank) for of_rank in ranks) for ranks in (ours, stock)]
    assert loads[0] <= loads[1]


@pytest.mark.parametrize("in_turns", [False, True])
def test_ranks_are_even_where_stock_gives_one_all_long_sequences(in_turns: bool) -> None:
    costs = [COST(4096 // 2 ** (index // 8)) * 2 ** (index // 8) for index in range(32)]
    loads = [
        [sum(costs[index] for index in of_rank) for of_rank in dealt(order, dp_size=4, in_turns=in_turns)]
        for order in (list(range(32)), order_of_bins(costs, dp_size=4, in_turns=in_turns))
    ]
    assert max(loads[1]) <= 1.1 * sum(loads[1]) / 4
    if not in_turns:
        assert max(loads[0]) > 1.5 * sum(loads[0]) / 4


def test_hooks_wait_for_a_run_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import global_vars

    module = types.ModuleType("megatron.rl.sequence_packing_utils")
    stock = module.distribute_packed_bins = lambda packed_trajs, packed_position_ids, packed_loss_mask, packing_info: 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.rl", types.ModuleType("megatron.rl"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    installed = hooks.install()
    try:
        for asks in (False, True):
            args = argparse.Namespace(perform_rl_step=True, rl_use_sequence_packing=asks, balance_data=True)
            monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
            rl_bins.install_where_asked()
            assert (module.distribute_packed_bins is not stock) == asks  # type: ignore[attr-defined]
    finally:
        installed.undo()
    assert module.distribute_packed_bins is stock  # type: ignore[attr-defined]


def test_a_release_whose_bins_have_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import package_info
    from megatron.training import global_vars

    args = argparse.Namespace(perform_rl_step=True, rl_use_sequence_packing=True, balance_data=True)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    monkeypatch.setattr(package_info, "__version__", "0.17.1")
    with pytest.raises(BalanceError, match=r"in megatron-core 0\.17\.1: .*use 0\.18 or newer"):
        rl_bins.install_where_asked()


def test_a_function_that_takes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("megatron.rl.sequence_packing_utils")
    module.distribute_packed_bins = lambda bins: bins  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.rl", types.ModuleType("megatron.rl"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(BalanceError, match=r"cannot hook megatron\.rl.*no longer takes packed_trajs"):
        install(RL_HOOKS, version="of a test")


@pytest.mark.checkout
@pytest.mark.skipif("MEGATRON_CHECKOUT" not in os.environ, reason="MEGATRON_CHECKOUT names no checkout")
@pytest.mark.parametrize("packing_algo", ["fifo", "round-robin"])
@pytest.mark.parametrize("num_sequences", [37, 3])
def test_on_the_functions_of_a_checkout(monkeypatch: pytest.MonkeyPatch, packing_algo: str, num_sequences: int) -> None:
    """Megatron's own packing and dealing out, rank by rank in one process."""
    monkeypatch.setattr(sys, "path", [*sys.path, os.environ["MEGATRON_CHECKOUT"]])
    packing: Any = importlib.import_module("megatron.rl.sequence_packing_utils")
    from megatron.core import parallel_state
    from megatron.training import global_vars, training  # noqa: F401

    dp_size, width = 4, 64
    monkeypatch.setattr(rl_bins, "flops_from_megatron_args", lambda args: COST)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", argparse.Namespace())
    monkeypatch.setattr(packing, "get_tokenizer", lambda: types.SimpleNamespace(pad=PAD, eod=1))
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda *_, **__: dp_size)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3, 0.8, num_sequences).astype(int), 2, width)
    trajs = torch.zeros(num_sequences, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        trajs[row, :length] = row + 1
    packer = packing.SequencePacker(bin_size=width, pad_token=PAD, max_sequences_per_bin=8)

    def of_all_ranks(distribute: Any) -> list[Any]:
        result = []
        for rank in range(dp_size):
            monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda *_, rank=rank, **__: rank)
            packed, positions, mask, info = packer.pack_sequences(trajs, trajs > 0)
            info.packing_algo = packing_algo
            result.append(distribute(packed, positions, mask, info))
        return result

    stock, ours = map(
        of_all_ranks, (packing.distribute_packed_bins, with_bins_balanced(packing.distribute_packed_bins))
    )

    def sequences_of_slots(ranks: list[Any]) -> list[list[int]]:
        return [
            sorted(i for of_bin in slot for i in of_bin)
            for slot in zip(*(info.bin_seq_indices for *_, info in ranks), strict=True)
        ]

    assert sequences_of_slots(ours) == sequences_of_slots(stock)
    loads = [[_load(info, width=width) for *_, info in ranks] for ranks in (stock, ours)]
    assert max(loads[1]) <= max(loads[0])
    if packing_algo == "fifo" and num_sequences > dp_size:
        assert max(loads[1]) < 0.95 * max(loads[0])
    for packed, positions, mask, info in ours:
        for index, of_bin in enumerate(info.bin_seq_indices):
            if of_bin:
                tokens = torch.cat([trajs[i, : lengths[i]] for i in of_bin])
                assert torch.equal(packed[index, : len(tokens)], tokens)
                assert int(mask[index].sum()) == len(tokens)
                assert (positions[index, torch.tensor(info.seq_starts[index][:-1])] == 0).all()


def _sequences_of_slots(ranks: list[Any]) -> list[list[int]]:
    """The sequences that run together, on whatever rank: `[num_slots]`."""
    bins = [info.bin_seq_indices for *_, info in ranks]
    return [sorted(sequence for of_bin in slot for sequence in of_bin) for slot in zip(*bins, strict=True)]


def _load(info: Any, *, width: int) -> int:
    """Cost of a rank's bins, the padding of each included."""
    total = 0
    for index, of_bin in enumerate(info.bin_seq_indices):
        starts = [*info.seq_starts[index], width] if of_bin else []
        total += sum(COST(end - start) for start, end in zip(starts, starts[1:], strict=False))
    return total
