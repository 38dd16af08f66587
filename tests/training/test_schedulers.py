"""The schedule as one of Megatron's own packing schedulers: on a checkout that has them, and the seam by itself.

Below the public names, since only Megatron calls these classes, through its own registry.

MEGATRON_CHECKOUT=DIR python -m pytest -m checkout tests/training/test_schedulers.py
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_judge import check_contract

from megatron_balance import BalanceError, CostModel, ModelShape, build_data_schedule
from megatron_balance.cost import default_attention_rate
from megatron_balance.mcore import packing_scheduler
from megatron_balance.mcore.packing_scheduler import (
    NAME,
    REPLACED,
    register,
    scheduler_class,
)

CHECKOUT = os.environ.get("MEGATRON_CHECKOUT")
NUM_RANKS = 2


class Names(enum.Enum):
    DP_BALANCED = "dp_balanced"


class Stock:
    """Megatron's DpBalancedScheduler, as far as ours relies on it."""

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None,
        max_num_seqs: int | None = None,
    ) -> None:
        self.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
        self.cp_size = cp_size
        self.dp_size = dp_size
        self.microbatch_group_size_per_vp_stage = microbatch_group_size_per_vp_stage
        self.max_num_seqs = max_num_seqs


class StockDynamic(Stock):
    """Megatron's DefaultDynamicCPScheduler, as far as ours relies on it."""

    def __init__(self, *positional: Any, min_cp_size: int = 1) -> None:
        super().__init__(*positional)
        self.min_cp_size = min_cp_size

    def get_groups_and_subsamples(self, sample_id_seqlens: Any) -> Any:
        return ["Megatron's own plan of", sample_id_seqlens]

    def run(
        self,
        data_iterator: Any,
        num_microbatches: int,
        dp_group: Any,
        tp_group: Any,
        pp_group: Any,
        dp_cp_group: Any,
        dev: Any,
        config: Any,
    ) -> Any:
        return self.get_groups_and_subsamples(data_iterator)


@pytest.fixture
def seam(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with Megatron's map and enumeration, where Megatron's own would be."""
    module = types.ModuleType(packing_scheduler.SEAM)
    module.PackingSchedulerEnum = Names  # type: ignore[attr-defined]
    module.scheduler_map = {Names.DP_BALANCED: Stock}  # type: ignore[attr-defined]
    module.DpBalancedScheduler = Stock  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, packing_scheduler.SEAM, module)
    monkeypatch.setattr(packing_scheduler.importlib.util, "find_spec", lambda name: name)
    return module


@pytest.fixture
def named_seam(seam: Any) -> Any:
    """A map that has names in place of the enumeration, as on dev."""
    del seam.PackingSchedulerEnum
    seam.scheduler_map = {"dp_balanced": Stock, REPLACED: StockDynamic}
    return seam


def chosen(module: Any, name: str) -> type:
    """As wrap_data_iterator chooses."""
    return module.scheduler_map[module.PackingSchedulerEnum[name.upper()]]


def test_registered_beside_megatrons_own_and_taken_out_again(seam: Any) -> None:
    registration = register()
    assert registration is not None
    assert issubclass(chosen(seam, NAME), Stock)
    assert chosen(seam, "dp_balanced") is Stock
    assert seam.scheduler_map[Names.DP_BALANCED] is Stock  # for those who imported the enumeration before
    registration.undo()
    assert seam.PackingSchedulerEnum is Names
    assert seam.scheduler_map == {Names.DP_BALANCED: Stock}


def test_registered_by_name_where_the_map_has_names(named_seam: Any) -> None:
    before = dict(named_seam.scheduler_map)
    registration = register()
    assert registration is not None
    assert set(named_seam.scheduler_map) == {*before, NAME}
    registration.undo()
    assert named_seam.scheduler_map == before


@pytest.mark.parametrize("schedulers", [{"dp_balanced": Stock}, {}, None, {1: Stock}])
def test_a_map_of_another_form_is_left_alone(seam: Any, schedulers: Any) -> None:
    seam.scheduler_map = schedulers
    assert register() is None
    assert seam.PackingSchedulerEnum is Names
    assert seam.scheduler_map is schedulers


def planned(scheduler: Any, lengths: list[int]) -> list[list[list[int]]] | None:
    try:
        return scheduler.get_groups_and_subsamples([(7 + index, length) for index, length in enumerate(lengths)])
    except BalanceError:
        return None


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(BalanceError, match="3 samples cannot fill 4 micro-batches, 2 on each of 2 data-parallel ranks"):
        scheduler_class(Stock)(400, 1, 2, None).get_groups_and_subsamples([(i, 400) for i in range(3)])


@given(
    st.lists(st.integers(1, 700), min_size=12, max_size=60),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3]),
)
def test_the_contract_of_get_groups_and_subsamples(
    lengths: list[int], dp_size: int, cp_size: int, multiple: int
) -> None:
    padded = [length + -length % (2 * cp_size) for length in lengths]
    scheduler = scheduler_class(Stock)(400, cp_size, dp_size, multiple)
    groups = planned(scheduler, padded)
    if groups is None:  # long samples alone in their micro-batches, and too few of them for the last ones
        assert len(lengths) % (dp_size * multiple)
        return
    assert len(groups) % multiple == 0
    for group in groups:
        assert len(group) == dp_size * cp_size
        assert all(group), "a rank without samples"
        assert all(group[rank] == group[rank - rank % cp_size] for rank in range(len(group)))
        assert all(len(slot) == 1 or sum(padded[i - 7] for i in slot) <= 400 * cp_size for slot in group)
    ids = [sample for group in groups for rank in range(0, dp_size * cp_size, cp_size) for sample in group[rank]]
    assert sorted(ids) == list(range(7, 7 + len(lengths)))


def test_flops_are_weighed_as_in_a_run_by_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import global_vars

    sizes = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "padded_vocab_size": 64}
    ranks = {"expert_model_parallel_size": 1, "context_parallel_size": 1, "recompute_granularity": None}
    args = argparse.Namespace(**sizes, **ranks, num_experts=None)
    monkeypatch.setattr(global_vars, "get_args", lambda: args)
    seen: list[CostModel] = []

    def plan(lengths: Any, *, cost_model: CostModel, **rest: Any) -> Any:
        seen.append(cost_model)
        return build_data_schedule(lengths, cost_model=cost_model, **rest)

    monkeypatch.setattr(packing_scheduler, "build_data_schedule", plan)
    planned(scheduler_class(Stock)(400, 1, 2, None), [300, 100])
    shape = ModelShape.from_megatron_args(args)
    weighed = {"attention_tflops": default_attention_rate(has_experts=False, fp8=False), "microbatch_tokens": 128}
    assert seen == [CostModel.from_shape(shape, **weighed)]


def test_more_samples_than_megatron_allows_are_refused() -> None:
    scheduler = scheduler_class(Stock)(400, 1, 1, None, max_num_seqs=3)
    assert scheduler.get_groups_and_subsamples([(i, 100) for i in range(3)]) == [[[0, 1, 2]]]
    with pytest.raises(BalanceError, match="holds 4 samples and --thd-max-packed-sequences allows 3"):
        scheduler.get_groups_and_subsamples([(i, 100) for i in range(4)])


def test_undo_refuses_when_someone_else_has_added_one_since(seam: Any) -> None:
    registration = register()
    assert registration is not None
    seam.PackingSchedulerEnum = Names
    with pytest.raises(BalanceError, match="were replaced after"):
        registration.undo()


@pytest.mark.skipif(CHECKOUT is not None, reason="the checkout may have one")
def test_a_megatron_without_the_map_is_left_alone() -> None:
    assert register() is None


@pytest.mark.checkout
@pytest.mark.parametrize("prepacked", [True, False], ids=["rows", "samples-with-lengths"])
def test_on_a_checkout(tmp_path: Path, prepacked: bool) -> None:
    """Megatron's wrap_data_iterator and get_batch of a checkout, on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    command += [str(Path(__file__).parent / "packing_rank.py"), str(tmp_path), "rows" if prepacked else "samples"]
    paths = [CHECKOUT or "", os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    for name in ("dp_balanced", NAME):
        results = [rank[name] for rank in ranks]
        assert len({result["num_microbatches"] for result in results}) == 1
        kept = sorted(sample for result in results for sample in result["samples"])
        assert kept == sorted(sample for rank in ranks for sample in rank["loaded"])  # every sample once, unchanged
        assert all(tokens <= 512 for result in results for tokens in result["tokens"])
    loads = {name: [sum(rank[name]["tokens"]) for rank in ranks] for name in ("dp_balanced", NAME)}
    assert max(loads[NAME]) < max(loads["dp_balanced"])
    sums = [rank[NAME]["sums"] for rank in ranks]
    lengths = [len(sample) for rank in ranks for sample in rank["loaded"]]
    assert sums == [[sum(lengths), sum(length**2 for length in lengths)]] * NUM_RANKS


DYNAMIC_CAP = 256
COST = CostModel(linear=1000, quadratic=1, cp_exchange=30)


def test_takes_the_place_of_megatrons_own_and_gives_it_back(named_seam: Any) -> None:
    replacement = register()
    assert replacement is not None
    ours = named_seam.scheduler_map[REPLACED]
    assert issubclass(ours, StockDynamic)
    assert ours is not StockDynamic
    named_seam.scheduler_map[REPLACED] = StockDynamic
    with pytest.raises(BalanceError, match="were replaced after"):
        replacement.undo()
    named_seam.scheduler_map[REPLACED] = ours
    replacement.undo()
    assert named_seam.scheduler_map == {"dp_balanced": Stock, REPLACED: StockDynamic}


def test_without_a_cost_model_the_plan_is_megatrons() -> None:
    scheduler = scheduler_class(StockDynamic, dynamic_cost=lambda: None)(DYNAMIC_CAP, 1, 2, None)
    assert scheduler.get_groups_and_subsamples([(0, 16)]) == ["Megatron's own plan of", [(0, 16)]]


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=48),
    st.sampled_from([(2, 1), (1, 2), (2, 2), (4, 2)]),
    st.sampled_from([1, 2]),
)
def test_the_contract_of_the_dynamic_one(lengths: list[int], sizes: tuple[int, int], least: int) -> None:
    num_ranks = sizes[0] * sizes[1]
    padded = [length + -length % (2 * num_ranks) for length in lengths]
    scheduler = scheduler_class(StockDynamic, dynamic_cost=lambda: COST)(
        DYNAMIC_CAP, sizes[1], sizes[0], None, min_cp_size=least
    )
    groups = scheduler.get_groups_and_subsamples(list(enumerate(padded)))
    check_contract(groups, lengths=dict(enumerate(padded)), num_ranks=num_ranks, cap=DYNAMIC_CAP, least=least)


def test_stages_and_experts_are_those_of_the_run() -> None:
    scheduler = scheduler_class(StockDynamic, dynamic_cost=lambda: COST)(DYNAMIC_CAP, 1, 4, 2)
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=3, expert_model_parallel_size=2)
    stages = SimpleNamespace(size=lambda: 2)
    lengths = [64] * 24
    groups = scheduler.run(list(enumerate(lengths)), 24, None, None, stages, None, None, config)
    topology = scheduler.topology
    assert (topology.pp_size, topology.vpp_size, topology.ep_size, topology.microbatch_multiple) == (2, 3, 2, 2)
    check_contract(groups, lengths=dict(enumerate(lengths)), num_ranks=4, cap=DYNAMIC_CAP, multiple=2)
