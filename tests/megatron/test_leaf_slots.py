"""Micro-batches of each rank where they have context-parallel sizes of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dynamic_plans import random_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import CostModel, Limits, Topology
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.dynamic_cp import engine_attention, microbatch_context
from megatron_balance.mcore.dynamic_cp.groups import ContextGroups
from megatron_balance.mcore.dynamic_cp.microbatch_context import MicrobatchContext
from megatron_balance.mcore.microbatch.pipeline_shapes import PipelineShapes
from megatron_balance.mcore.step.leaf_slots import LeafSlots, copies_of_lane, leaf_slots, tokens_of_leaves
from megatron_balance.planner.dynamic_cp_schedule import DynamicCpSchedule
from megatron_balance.runtime.gathered import GatheredLengths

CAP = 64


@st.composite
def schedules(draw: Any) -> DynamicCpSchedule:
    sp = draw(st.booleans())
    topology = Topology(
        draw(st.integers(1, 4)),
        cp_size=draw(st.integers(1, 3)),
        tp_size=2 if sp else 1,
        sequence_parallel=sp,
        dynamic_cp=True,
    )
    return random_schedule(
        draw(st.lists(st.integers(0, 300), min_size=1, max_size=20)),
        topology=topology,
        limits=Limits(CAP),
        cost_model=CostModel.tokens(),
        rows=draw(st.sampled_from((0, 1, 2))),
        seed=draw(st.integers(0, 1000)),
    )


def gathered_for(schedule: DynamicCpSchedule) -> GatheredLengths:
    count = schedule.lengths.size
    return GatheredLengths(
        lengths=schedule.lengths,
        home_ranks=np.zeros(count, dtype=np.int64),
        num_samples_per_rank=np.array([count]),
        offset=0,
        schema=None,
        num_segments=np.ones(count, dtype=np.int64),
        segment_lengths=schedule.lengths,
    )


@given(schedule=schedules(), shape_bucket=st.sampled_from((1, 16)))
@settings(deadline=None)
def test_tokens_hold_the_samples_and_the_members_of_a_group_agree(
    schedule: DynamicCpSchedule, shape_bucket: int
) -> None:
    tokens = tokens_of_leaves(schedule, shape_bucket=shape_bucket)
    oversized = set(schedule.oversized)
    agreed: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for leaf, (slots, sizes) in enumerate(zip(schedule.ranks, schedule.cp_sizes, strict=True)):
        for slot, (ids, size, held) in enumerate(zip(slots, sizes, tokens[leaf], strict=True)):
            topology = schedule.topology.at_cp_size(size)
            needed = int(topology.padded_seq_len(schedule.lengths[list(ids)]).sum())
            assert held >= max(needed, 1)
            assert held % topology.pack_multiple == 0
            assert held <= CAP * size or oversized & set(ids)
            assert agreed.setdefault((leaf // size, slot, ids), held) == held


@given(schedule=schedules())
@settings(deadline=None)
def test_every_leaf_gets_what_it_runs_and_nothing_else(schedule: DynamicCpSchedule) -> None:
    topology = schedule.topology
    for cp_rank in range(topology.cp_size):
        ids, ranks = copies_of_lane(schedule, cp_rank=cp_rank)
        assert ids.tolist() == sorted(ids.tolist())
        for dp_rank in range(topology.dp_size):
            runs = schedule.ranks[dp_rank * topology.cp_size + cp_rank]
            assert ids[ranks == dp_rank].tolist() == sorted(sample for slot in runs for sample in slot)


@given(schedule=schedules())
@settings(deadline=None)
def test_ranks_that_read_no_data_learn_every_leaf(schedule: DynamicCpSchedule) -> None:
    tokens = tokens_of_leaves(schedule, shape_bucket=1)
    leaves = [
        leaf_slots(schedule, leaf=leaf, num_tokens=tokens[leaf], gathered=gathered_for(schedule))
        for leaf in range(schedule.topology.num_leaves)
    ]
    numbers = iter([number for leaf in leaves for number in leaf.to_numbers()])
    assert [LeafSlots.from_numbers(numbers) for _ in leaves] == leaves
    assert not list(numbers)
    for leaf, slots in zip(leaves, schedule.ranks, strict=True):
        assert leaf.sequence_lengths == [[n for n in schedule.lengths[list(ids)].tolist() if n] for ids in slots]


def test_pipeline_messages_are_shared_by_the_ranks_of_each_micro_batch() -> None:
    shapes = PipelineShapes(
        [64, 16],
        order=[(0, 0), (1, 0)],
        topology=Topology(2, cp_size=2, pp_size=2, tp_size=2, sequence_parallel=True, dynamic_cp=True),
        stage=0,
        hidden_size=8,
        cp_sizes=[4, 1],
    )
    for rows in (8, 8):
        shapes.exchange(torch.empty(rows, 1, 8), None, receives_activation=False, receives_gradient=False)


class Group:
    """Stands for a process group."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class Model(torch.nn.Module):
    def forward(self, packed_seq_params: Any = None) -> Any:
        return packed_seq_params


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> MicrobatchContext:
    from megatron.core import parallel_state

    groups: Any = {1: Group(1), 2: Group(2), 4: Group(4)}
    monkeypatch.setattr(microbatch_context.dist, "get_process_group_ranks", lambda group: list(range(group.size())))
    monkeypatch.setattr(parallel_state, "_CONTEXT_PARALLEL_GROUP", groups[2])
    monkeypatch.setattr(parallel_state, "_CONTEXT_PARALLEL_GLOBAL_RANKS", [0, 1])
    return MicrobatchContext(ContextGroups(groups, static_size=2))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_forward_step_and_its_loss_see_the_group_of_the_micro_batch(context: MicrobatchContext, size: int) -> None:
    from megatron.core import parallel_state

    params, model = SimpleNamespace(cp_group=None, local_cp_size=None), Model()

    def forward_step(iterator: Any, model: Any) -> Any:
        model(packed_seq_params=params)
        return parallel_state.get_context_parallel_group().size(), lambda output: (
            output,
            parallel_state.get_context_parallel_global_ranks(),
        )

    seen, loss_func = context.forward_step(forward_step, None, model, size=size)
    assert seen == size
    assert params.local_cp_size == size
    assert params.cp_group is (None if size == 1 else context.groups.of_size(size))
    assert parallel_state.get_context_parallel_group().size() == 2
    assert loss_func("out") == ("out", list(range(size)))
    assert parallel_state.get_context_parallel_global_ranks() == [0, 1]
    later = SimpleNamespace(cp_group=None, local_cp_size=None)
    assert model(packed_seq_params=later).local_cp_size is None  # evaluation


def test_a_script_that_passes_no_packed_parameters_is_told(context: MicrobatchContext) -> None:
    from megatron.core import parallel_state

    with pytest.raises(BalanceError, match="Model was called without packed_seq_params"):
        context.forward_step(lambda iterator, model: (model(), None), None, Model(), size=4)
    assert parallel_state.get_context_parallel_group().size() == 2


def test_rotary_groups_are_those_of_a_view(context: MicrobatchContext) -> None:
    shared = SimpleNamespace(cp=context.groups.of_size(2), tp="tensor")
    attention = SimpleNamespace(pg_collection=shared)
    with context.rotary_group(attention, SimpleNamespace(local_cp_size=4)):
        assert attention.pg_collection.cp.size() == 4
        assert attention.pg_collection.tp == "tensor"
        assert shared.cp.size() == 2
    assert attention.pg_collection is shared
    for params in (None, SimpleNamespace(local_cp_size=None)):
        with context.rotary_group(attention, params):
            assert attention.pg_collection is shared


@pytest.mark.parametrize("static_size", [1, 2])
def test_transformer_engines_attention_goes_back_to_the_static_group(
    monkeypatch: pytest.MonkeyPatch, static_size: int
) -> None:
    class EngineAttention(torch.nn.Module):
        cp_stream = "stream"
        cp_comm_type = "p2p"
        now: Any = "of a micro-batch"

        def set_context_parallel_group(self, *group: Any) -> None:
            self.now = group

    monkeypatch.setattr(engine_attention, "_engine_class", lambda: EngineAttention)
    monkeypatch.setattr(engine_attention.dist, "get_process_group_ranks", lambda group: [4, 5])
    groups: Any = {1: Group(1), 2: Group(2)}
    model = torch.nn.Sequential(EngineAttention(), torch.nn.Linear(1, 1))
    engine_attention.restore_engine_attention([model], groups=ContextGroups(groups, static_size=static_size))
    expected = (None, None, None, "p2p") if static_size == 1 else (groups[2], [4, 5], "stream", "p2p")
    assert model[0].now == expected
