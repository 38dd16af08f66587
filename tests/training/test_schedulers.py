"""The schedule as one of Megatron's own packing schedulers: on a checkout that has them, and the seam by itself.

Below the public names, since only Megatron calls these classes, through its own registry.

MEGATRON_CHECKOUT=DIR python -m pytest -m checkout tests/training/test_schedulers.py
"""

from __future__ import annotations

import argparse
import enum
import os
import sys
import types
from collections import Counter
from types import SimpleNamespace
from typing import Any

import cpu_shim
import numpy as np
import pytest
import torch
from gloo_ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import CostModel, Limits, ModelShape, Topology, build_data_schedule
from megatron_balance.cost import ATTENTION_RATES
from megatron_balance.mcore import packing_scheduler
from megatron_balance.mcore.packing_scheduler import RankLists, plan_rank_lists, register, scheduler_class

CHECKOUT = os.environ.get("MEGATRON_CHECKOUT")
NUM_RANKS = 2
CAP = 256
COST = CostModel(linear=1000, quadratic=1, cp_exchange=30, per_microbatch=500)


class Names(enum.Enum):
    DP_BALANCED = "dp_balanced"
    DEFAULT_DYNAMIC_CP = "default_dynamic_cp"


class Stock:
    """Megatron's DpBalancedScheduler, as far as ours relies on it."""

    def __init__(self, *positional: Any, max_num_seqs: int | None = None) -> None:
        names = ("max_seqlen_per_dp_cp_rank", "cp_size", "dp_size", "microbatch_group_size_per_vp_stage")
        vars(self).update(zip(names, positional, strict=True), max_num_seqs=max_num_seqs)

    def get_groups_and_subsamples(self, sample_id_seqlens: Any) -> Any:
        return ["Megatron's own plan of", sample_id_seqlens]


class StockDynamic(Stock):
    """Megatron's DefaultDynamicCPScheduler, as far as ours relies on it."""

    def __init__(self, *positional: Any, min_cp_size: int = 1) -> None:
        super().__init__(*positional)
        self.min_cp_size = min_cp_size


def run_args(*, balance_data: bool = True, **changed: Any) -> argparse.Namespace:
    """Megatron's arguments of a small model on two data-parallel ranks."""
    model = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "padded_vocab_size": 64, "num_experts": None}
    sizes = dict.fromkeys(("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"), 1)
    ranks = {f"{kind}_parallel_size": size for kind, size in sizes.items()} | {"data_parallel_size": 2}
    unset = ("sequence_parallel", "use_megatron_fsdp", "use_torch_fsdp2", "microbatch_group_size_per_vp_stage")
    return argparse.Namespace(
        **model | ranks | dict.fromkeys([*unset, "recompute_granularity"]) | changed, balance_data=balance_data
    )


@pytest.fixture
def args_are(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes these the arguments of the run."""
    from megatron.training import global_vars

    return lambda **changed: monkeypatch.setattr(global_vars, "get_args", lambda: run_args(**changed))


@pytest.mark.parametrize("of_key", [lambda name: name, lambda name: name.name.lower()], ids=["main", "dev"])
def test_put_in_the_place_of_megatrons_own_and_taken_out_again(monkeypatch: pytest.MonkeyPatch, of_key: Any) -> None:
    """Main keys its map by members of an enumeration, dev by names."""
    module: Any = types.ModuleType(packing_scheduler.SEAM)
    before = {of_key(Names.DP_BALANCED): Stock, of_key(Names.DEFAULT_DYNAMIC_CP): StockDynamic, "another": Stock}
    module.scheduler_map = dict(before)
    monkeypatch.setitem(sys.modules, packing_scheduler.SEAM, module)
    registration = register()
    assert registration is not None
    ours = dict(module.scheduler_map)
    assert list(ours) == list(before)
    assert [issubclass(ours[key], stock) and ours[key] is not stock for key, stock in before.items()] == [1, 1, 0]
    registration.undo()
    assert module.scheduler_map == before


@pytest.mark.parametrize("schedulers", [{}, None, {1: Stock}])
def test_a_map_of_another_form_is_left_alone(monkeypatch: pytest.MonkeyPatch, schedulers: Any) -> None:
    module: Any = types.ModuleType(packing_scheduler.SEAM)
    module.scheduler_map = schedulers
    monkeypatch.setitem(sys.modules, packing_scheduler.SEAM, module)
    assert register() is None
    assert module.scheduler_map is schedulers


def plan(lengths: list[int], topology: Topology, *, least: int = 1) -> RankLists | None:
    """The lists of samples numbered from 7, checked."""
    samples = [(7 + index, length) for index, length in enumerate(lengths)]
    lists = plan_rank_lists(samples, cost_model=COST, topology=topology, max_tokens_per_gpu=CAP, min_cp_size=least)
    if lists is not None:
        check_contract(lists, lengths=dict(samples), topology=topology, least=least)
    return lists


def check_contract(lists: RankLists, *, lengths: dict[int, int], topology: Topology, least: int = 1) -> None:
    """Asserts what Megatron's executors and verl rely on.

    Dev counts the ranks that hold a micro-batch's first sample and takes this rank's process group of that size, of at
    least `least`; those groups are aligned blocks. verl checks that ranks with equal lists are neighbours and aligned.
    """
    num_ranks = topology.num_leaves
    assert len(lists) % topology.microbatch_multiple == 0
    places: Counter[int] = Counter()
    for of_ranks in lists:
        assert len(of_ranks) == num_ranks
        assert all(of_ranks), "no rank is empty"
        first = 0
        while first < num_ranks:
            ids = of_ranks[first]
            holders = [rank for rank, other in enumerate(of_ranks) if ids[0] in other]
            assert holders == [rank for rank, other in enumerate(of_ranks) if other == ids], "one order on all ranks"
            size = len(holders)
            assert holders == list(range(first, first + size)), "members are neighbours"
            assert first % size == 0, "a group starts at a multiple of its size"
            if topology.dynamic_cp:
                assert size == num_ranks or (size & (size - 1) == 0 and size >= least), "a power of two, or all"
            else:
                assert size == topology.cp_size
            alone = len(ids) == 1 and (size == num_ranks or not topology.dynamic_cp)
            assert sum(lengths[sample] for sample in ids) <= CAP * size or alone, "the cap of a rank"
            places.update(ids)
            first += size
    assert places == Counter(lengths.keys()), "every sample once"


def padded(lengths: list[int], num_ranks: int) -> list[int]:
    """As Megatron pads its samples: for every size."""
    return [length + -length % (2 * num_ranks) for length in lengths]


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 2 * CAP), min_size=12, max_size=60),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3]),
)
def test_the_contract_at_one_size(lengths: list[int], dp_size: int, cp_size: int, multiple: int) -> None:
    topology = Topology(dp_size, cp_size=cp_size, microbatch_multiple=multiple)
    if plan(padded(lengths, cp_size), topology, least=cp_size) is None:
        assert len(lengths) % (dp_size * multiple)  # long samples alone, and too few of them for the last micro-batches


LAYOUTS = {"step": {}, "microbatch": {"ep_size": 2}, "pipeline": {"pp_size": 2}, "both": {"ep_size": 2, "pp_size": 2}}


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 6 * CAP), min_size=1, max_size=48),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (8, 1), (2, 8), (3, 2), (5, 2), (3, 4), (7, 2)]),
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 1, 2, 4]),
)
def test_the_contract_of_sizes(
    lengths: list[int], sizes: tuple[int, int], layout: str, multiple: int, least: int
) -> None:
    num_ranks = sizes[0] * sizes[1]
    topology = Topology(sizes[0], cp_size=sizes[1], dynamic_cp=True, microbatch_multiple=multiple, **LAYOUTS[layout])
    if plan(padded(lengths, num_ranks), topology, least=least) is None:
        too_long = any(2 * length > num_ranks * CAP for length in padded(lengths, num_ranks))
        odd = num_ranks & (num_ranks - 1) and (too_long or least > 1)
        assert len(lengths) < num_ranks * multiple or odd or least > num_ranks


@pytest.mark.parametrize(
    ("lengths", "topology", "least"),
    [
        ([400] * 3, Topology(2), 1),
        ([100] * 3, Topology(2, dynamic_cp=True, microbatch_multiple=4, pp_size=2), 1),
        ([100], Topology(8, dynamic_cp=True), 3),
        ([100], Topology(8, dynamic_cp=True), 16),
        ([5 * CAP, *[16] * 6], Topology(6, dynamic_cp=True), 1),
    ],
)
def test_what_no_plan_can_keep_to_is_left_to_megatron(lengths: list[int], topology: Topology, least: int) -> None:
    assert plan(lengths, topology, least=least) is None


def test_no_dummies_cost_nothing_where_each_rank_has_several_samples() -> None:
    lengths = [4 * CAP - 32, *(16 + 7 * sample for sample in range(40))]
    topology = Topology(8, dynamic_cp=True)
    schedule = build_data_schedule(lengths, cost_model=COST, topology=topology, limits=Limits(CAP))
    assert (schedule.slot_counts() == 0).any()
    lists = plan(lengths, topology)
    assert lists is not None
    work = [0] * 8
    for of_ranks in lists:
        for rank, ids in enumerate(of_ranks):
            work[rank] += sum(COST(lengths[sample - 7]) // of_ranks.count(ids) for sample in ids)
    assert max(work) <= schedule.predicted_cost


def test_flops_are_weighed_as_in_a_run_by_flops(args_are: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args_are()
    seen: list[CostModel] = []

    def build(lengths: Any, *, cost_model: CostModel, **rest: Any) -> Any:
        seen.append(cost_model)
        return build_data_schedule(lengths, cost_model=cost_model, **rest)

    monkeypatch.setattr(packing_scheduler, "build_data_schedule", build)
    assert scheduler_class(Stock)(400, 1, 2, None).get_groups_and_subsamples([(0, 300), (1, 100)]) == [[[0], [1]]]
    shape = ModelShape.from_megatron_args(run_args())
    weighed = {"attention_tflops": ATTENTION_RATES["dense", "bf16"]}
    assert seen == [CostModel.from_shape(shape, **weighed)]


def test_what_ours_cannot_plan_is_left_to_megatron(args_are: Any) -> None:
    args_are(data_parallel_size=1)
    scheduler = scheduler_class(Stock)(400, 1, 1, None, max_num_seqs=3)
    assert scheduler.get_groups_and_subsamples([(i, 100) for i in range(3)]) == [[[0, 1, 2]]]
    many, few = [(i, 100) for i in range(4)], [(i, 400) for i in range(3)]
    with pytest.warns(UserWarning, match="too many for a micro-batch: Megatron plans this batch"):
        assert scheduler.get_groups_and_subsamples(many)[1] is many
    args_are()
    with pytest.warns(UserWarning, match="samples are too few"):
        assert scheduler_class(Stock)(400, 1, 2, None).get_groups_and_subsamples(few)[1] is few
    args_are(balance_data=False)
    assert scheduler_class(Stock)(400, 1, 1, None).get_groups_and_subsamples(many)[1] is many


def test_stages_and_experts_are_those_of_the_run(args_are: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"data_parallel_size": 4, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3}
    args_are(**sizes, expert_model_parallel_size=2, microbatch_group_size_per_vp_stage=2)
    seen: list[Topology] = []

    def planned(*given: Any, topology: Topology, **rest: Any) -> Any:
        seen.append(topology)
        return plan_rank_lists(*given, topology=topology, **rest)

    monkeypatch.setattr(packing_scheduler, "plan_rank_lists", planned)
    lengths = dict.fromkeys(range(24), 64)
    groups = scheduler_class(StockDynamic, dynamic_cp=True)(CAP, 1, 4, 2).get_groups_and_subsamples([*lengths.items()])
    [topology] = seen
    assert (topology.pp_size, topology.vpp_size, topology.ep_size, topology.microbatch_multiple) == (2, 3, 2, 2)
    check_contract(groups, lengths=lengths, topology=topology)


LONGEST = (500, 60)
"""Of each rank's samples: what the first rank loads is far longer than what the second does."""


def schedule(samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """What a rank trains on by `dp_balanced` of the Megatron on the path."""
    from megatron.core.datasets import data_schedule
    from megatron.core.rerun_state_machine import RerunDataIterator

    unset = ("virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage", "mtp_num_layers")
    config = SimpleNamespace(
        **dict.fromkeys([*unset, "mtp_standalone", "pipeline_model_parallel_layout"]),
        max_seqlen_per_dp_cp_rank=2 * CAP,
        sequence_packing_scheduler="dp_balanced",
        pipeline_model_parallel_size=1,
    )
    # Megatron's own takes the batch dimension off in place.
    items = RerunDataIterator(iter([dict(sample) for sample in samples]))
    iterator, num_microbatches, *sums = data_schedule.wrap_data_iterator(items, config, len(samples))
    kept: list[list[int]] = []
    tokens_of: list[int] = []
    for _ in range(num_microbatches):
        batch = data_schedule.get_batch_on_this_rank_for_sequence_packing(iterator)
        tokens, labels, loss_mask, _, position_ids, packed, _ = batch
        starts = packed.cu_seqlens_q.tolist()
        tokens_of.append(starts[-1])
        for start, end in zip(starts[:-1], starts[1:], strict=True):
            if loss_mask[0, start:end].any():
                kept.append(tokens[0, start:end].tolist())
                assert torch.equal(labels[0, start:end], tokens[0, start:end] + 1)
                assert position_ids[0, start:end].tolist() == list(range(end - start))
    return {"num_microbatches": num_microbatches, "samples": kept, "tokens": tokens_of, "sums": sums}


def both_schedulers(*, prepacked: bool) -> dict[str, Any]:
    """What this rank loaded, and what it trains on by Megatron's scheduler and by ours."""
    cpu_shim.enable_cpu()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    rank = parallel_state.get_data_parallel_rank()
    samples: list[dict[str, torch.Tensor]] = []
    for number, length in enumerate(np.random.default_rng(rank).integers(8, LONGEST[rank], 12).tolist()):
        row = {"tokens": 1000 * (1 + number + 12 * rank) + torch.arange(length)}
        row |= {"labels": row["tokens"] + 1, "loss_mask": torch.ones(length), "position_ids": torch.arange(length)}
        given = ("cu_seqlens",) if prepacked else ("original_seq_len", "padded_seq_len")
        samples.append(row | dict.fromkeys(given, torch.tensor([0] * prepacked + [length], dtype=torch.int32)))
    result: dict[str, Any] = {"loaded": [sample["tokens"].tolist() for sample in samples], "stock": schedule(samples)}
    registration = register()
    assert registration is not None, "this Megatron has no scheduler_map"
    assert schedule(samples) == result["stock"], "without --balance-data"
    from megatron.training import global_vars

    global_vars._GLOBAL_ARGS = run_args()
    result["ours"] = schedule(samples)
    registration.undo()
    assert schedule(samples) == result["stock"]
    return result


@pytest.mark.checkout
@pytest.mark.parametrize("prepacked", [True, False], ids=["rows", "samples-with-lengths"])
def test_on_a_checkout(monkeypatch: pytest.MonkeyPatch, prepacked: bool) -> None:
    """Megatron's wrap_data_iterator and get_batch of a checkout, on two ranks."""
    monkeypatch.syspath_prepend(CHECKOUT)
    ranks = run_ranks(NUM_RANKS, "test_schedulers:both_schedulers", prepacked=prepacked)
    for name in ("stock", "ours"):
        results = [rank[name] for rank in ranks]
        assert len({result["num_microbatches"] for result in results}) == 1
        kept = sorted(sample for result in results for sample in result["samples"])
        assert kept == sorted(sample for rank in ranks for sample in rank["loaded"])  # every sample once, unchanged
        assert all(tokens <= 2 * CAP for result in results for tokens in result["tokens"])
    loads = {name: [sum(rank[name]["tokens"]) for rank in ranks] for name in ("stock", "ours")}
    assert max(loads["ours"]) < max(loads["stock"])
    sums = [rank["ours"]["sums"] for rank in ranks]
    lengths = [len(sample) for rank in ranks for sample in rank["loaded"]]
    assert sums == [[sum(lengths), sum(length**2 for length in lengths)]] * NUM_RANKS
