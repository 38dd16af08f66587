"""Plans with a context-parallel size for each micro-batch: every invariant, executed step by step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_judge import Batch, per_gpu

from megatron_balance import BalanceError, CostModel, Limits, Topology, build_data_schedule
from megatron_balance.planner import batch_of

COST_MODELS = [
    CostModel.tokens(),
    CostModel(linear=1000, quadratic=1, cp_exchange=80),
    CostModel(linear=1000, quadratic=1, per_microbatch=50_000, cp_exchange=10),
    CostModel(linear=7, quadratic=1, expert_linear=50, windows=((16, 3),), cp_exchange=7),
    CostModel(per_microbatch=5),
    CostModel(linear=10, quadratic=1, per_microbatch=50, gather=3000, cp_exchange=5),
    # More to receive than to compute: a larger size never pays.
    CostModel(linear=1, cp_exchange=5),
    # Costs beyond int64 before they are scaled.
    CostModel(linear=10**15, quadratic=10**14, per_microbatch=10**13, cp_exchange=10**15),
]


LAYOUTS = [
    {},
    {"fully_sharded": True},
    {"ep_size": 2},
    {"pp_size": 3},
    {"pp_size": 2, "vpp_size": 2, "microbatch_multiple": 2},
    {"ep_size": 2, "pp_size": 2},
    {"tp_size": 2, "sequence_parallel": True},
]


def plan(lengths, *, topology, cost_model=COST_MODELS[1], cap=512, **options):
    return build_data_schedule(lengths, cost_model=cost_model, topology=topology, limits=Limits(cap), **options)


def cost_on_a_rank(schedule, sample, size):
    """Cost of a sample of one segment for each of the ranks that share it, in the schedule's units."""
    cost = Batch.of(schedule).cost_on(int(schedule.lengths[sample]), size)
    return max(-(-cost // size) >> batch_of(schedule).shift, 1) if cost else 0


def fixed_cost(schedule):
    cost = schedule.cost_model.per_microbatch
    return max(cost >> batch_of(schedule).shift, 1) if cost else 0


def expert_shares(schedule):
    """`[slot][dp_cp_rank]` even share of the work of a DP×CP rank's expert-parallel group, in the schedule's units."""
    batch, dp_cp_size = Batch.of(schedule), len(schedule.ranks)

    def work(dp_cp_rank, slot):
        if batch.expert_span == 1 or slot >= len(schedule.ranks[dp_cp_rank]):
            return 0
        size = schedule.cp_sizes[dp_cp_rank][slot]
        tokens = (batch.padded(int(schedule.lengths[sample]), size) for sample in schedule.ranks[dp_cp_rank][slot])
        costs = (schedule.cost_model.expert_linear * padded for padded in tokens)
        return -(-sum(max(cost >> batch_of(schedule).shift, 1) if cost else 0 for cost in costs) // size)

    shares = [[0] * dp_cp_size for _ in range(schedule.num_microbatches)]
    for slot, of_slot in enumerate(shares):
        for first in range(0, dp_cp_size, batch.expert_span):
            group = range(first, min(first + batch.expert_span, dp_cp_size))
            share = -(-sum(work(dp_cp_rank, slot) for dp_cp_rank in group) // len(group))
            of_slot[group.start : group.stop] = [share] * len(group)
    return shares


def execute(schedule, *, all_meet):
    """Runs the slots of every DP×CP rank in order: a group starts when all its ranks have come to it. Returns the time.

    `ranks` and `cp_sizes` alone are read of the plan; `all_meet`: all ranks meet before every slot.
    """
    ranks, sizes, shares = schedule.ranks, schedule.cp_sizes, expert_shares(schedule)
    clock, position = [0] * len(ranks), [0] * len(ranks)
    remaining = sum(map(len, ranks))
    while remaining:
        if all_meet:
            assert len(set(position)) == 1
            clock = [max(clock)] * len(ranks)
        started = []
        for dp_cp_rank in range(len(ranks)):
            slot = position[dp_cp_rank]
            if slot == len(ranks[dp_cp_rank]) or dp_cp_rank % sizes[dp_cp_rank][slot]:
                continue
            members = range(dp_cp_rank, dp_cp_rank + sizes[dp_cp_rank][slot])
            ready = [position[member] < len(ranks[member]) for member in members]
            if not all(ready):
                continue
            coming = {(ranks[member][position[member]], sizes[member][position[member]]) for member in members}
            if coming == {(ranks[dp_cp_rank][slot], sizes[dp_cp_rank][slot])}:
                started.append(members)
        assert started, "ranks wait for one another in a circle"
        for members in started:
            slot = position[members[0]]
            ids = ranks[members[0]][slot]
            ends = max(clock[member] for member in members) + fixed_cost(schedule)
            ends += sum(cost_on_a_rank(schedule, sample, len(members)) for sample in ids)
            for member in members:
                clock[member] = ends + shares[slot][member]
                position[member] += 1
                remaining -= 1
    return max(clock)


@st.composite
def planning_inputs(draw):
    dp_size, cp_size = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    cap = draw(st.sampled_from([8, 64, 512]))
    longest = draw(st.sampled_from([1, cap // 4, cap, 4 * cap, 40 * cap]))
    # Few ranks have more than one micro-batch of fewer samples.
    lengths = draw(st.lists(st.integers(0, longest), min_size=draw(st.sampled_from([0, 20, 30])), max_size=60))
    if draw(st.booleans()):
        lengths = [*lengths, *draw(st.lists(st.integers(cap, 9 * cap), max_size=3))]
    ranks = draw(st.sampled_from(LAYOUTS))
    largest = draw(st.sampled_from([None, 1, 2, 3, 100]))
    topology = Topology(dp_size, cp_size=cp_size, dynamic_cp=True, max_cp_size=largest, **ranks)
    return lengths, topology, cap


@pytest.mark.parametrize("objective", ["auto", "step", "microbatch", "pipeline"])
@pytest.mark.parametrize("ranks", LAYOUTS, ids=lambda ranks: " ".join(ranks))
def test_every_layout_keeps_every_invariant(ranks, objective):
    lengths = [*np.random.default_rng(5).integers(0, 300, 40).tolist(), 700, 2001]
    topology = Topology(3, cp_size=2, dynamic_cp=True, **ranks)
    for cost_model in COST_MODELS[2:4]:
        check_plan(lengths, topology, 512, cost_model=cost_model, objective=objective)


def test_every_plan_keeps_every_invariant_and_runs_in_the_time_predicted():
    several = []

    @settings(max_examples=30)
    @given(
        planning_inputs(),
        st.sampled_from(COST_MODELS),
        st.sampled_from(["auto", "auto", "step", "microbatch", "pipeline"]),
    )
    def check(inputs, cost_model, objective):
        several.append(check_plan(*inputs, cost_model=cost_model, objective=objective).num_microbatches > 1)

    check()
    assert sum(several) > len(several) / 2


def check_plan(lengths, topology, cap, *, cost_model, objective):
    """Plans, and asserts that the plan is valid, takes the time predicted, and is the same when made again."""
    schedule = plan(lengths, topology=topology, cost_model=cost_model, cap=cap, objective=objective).check()
    units, unit = execute(schedule, all_meet=schedule.objective == "microbatch"), 1 << batch_of(schedule).shift
    time = per_gpu(units * unit, topology)
    if schedule.objective == "pipeline" or topology.pp_size > 1:
        # The stages together do the work of all slots, and a pipeline is not slower than one stage after another.
        together = (units + schedule.num_microbatches) * unit
        assert schedule.predicted_cost <= per_gpu(together, topology, is_makespan=True)
        assert schedule.predicted_cost >= per_gpu((units - 1) * unit, topology) or schedule.objective != "step"
    elif schedule.objective == "step" and topology.ep_dp_size > 1:
        # Ranks of different expert-parallel groups reach a micro-batch that they share at different times.
        assert schedule.predicted_cost <= time
    else:
        assert schedule.predicted_cost == time
    again = plan(lengths, topology=topology, cost_model=cost_model, cap=cap, objective=objective)
    assert again.digest() == schedule.digest()
    return schedule


def test_nobody_runs_more_slots_than_it_must_unless_ranks_meet_in_all():
    lengths = [511] * 3 + [25] * 30
    ragged = plan(lengths, topology=Topology(2, cp_size=2, dynamic_cp=True), objective="step").check()
    assert len({len(slots) for slots in ragged.ranks}) > 1
    for ranks in ({"ep_size": 2}, {"fully_sharded": True}):
        even = plan(lengths, topology=Topology(2, cp_size=2, dynamic_cp=True, **ranks), objective="step").check()
        assert {len(slots) for slots in even.ranks} == {even.num_microbatches}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"algorithm": "karmarkar_karp"}, "algorithm"),
        ({"home_ranks": [0, 1], "move_samples": False}, "move_samples"),
        ({"groups": [0, 0]}, "groups"),
        ({"image_patches": [[5], []]}, r"image_patches does not go with Topology\.dynamic_cp"),
        ({"limits": Limits(micro_batch_size=2)}, "max_tokens_per_gpu"),
        ({"limits": Limits(8, micro_batch_size=2)}, "max_tokens_per_gpu alone"),
        ({"num_microbatches": 2}, "num_microbatches"),
    ],
)
def test_options_that_bind_samples_to_ranks_are_refused_by_name(options, named):
    given_options = {"limits": Limits(64), **options}
    with pytest.raises(BalanceError, match=named):
        build_data_schedule(
            [5, 6], cost_model=CostModel.tokens(), topology=Topology(2, dynamic_cp=True), **given_options
        )


def test_a_sample_is_sent_to_all_ranks_that_share_it():
    schedule = plan([512, 6, 5], topology=Topology(2, cp_size=2, dynamic_cp=True), cap=128)
    for cp_rank in range(2):
        dp_slots = schedule.ranks[cp_rank::2]
        wanted = sorted((sample, rank) for rank, slots in enumerate(dp_slots) for ids in slots for sample in ids)
        assert list(zip(*map(list, schedule.copies(cp_rank=cp_rank)), strict=True)) == wanted
    assert schedule.destinations()[0] == 0


def sizes_with(schedule, dp_cp_rank, slot, size):
    grid = schedule.cp_size_grid.copy()
    grid[dp_cp_rank, slot] = size
    return {"cp_size_grid": grid}


def test_broken_plans_are_named():
    lengths = [900, 900, 400, 400, 300, 200, 200, 100]
    schedule = plan(lengths, topology=Topology(2, cp_size=2, dynamic_cp=True), objective="step").check()
    predicted = schedule.predicted_cost
    # DP×CP ranks 0 and 1 share both of their slots, 2 and 3 their first two.
    assert schedule.cp_sizes == ((2, 2), (2, 2), (2, 2, 1), (2, 2, 1))
    on_another_leaf = np.where(schedule.microbatch_of == 0, schedule.num_microbatches, schedule.microbatch_of)
    for invariant, changes in (
        ("placed once", {"lengths": np.array([*lengths, 5])}),
        ("placed once", {"microbatch_of": on_another_leaf}),
        ("aligned", sizes_with(schedule, 0, 0, 4)),
        ("aligned", sizes_with(schedule, 1, 0, 1)),
        ("even slots", sizes_with(schedule, 3, 0, 0)),
        ("last slot", sizes_with(schedule, 1, 2, 1)),
        ("cap", {"limits": Limits(16)}),
        ("honest costs", {"predicted_cost": predicted - 1}),
        ("honest costs", {"cost_grid": schedule.cost_grid + 1}),
        ("honest costs", {"lower_bound": predicted + 1}),
    ):
        with pytest.raises(AssertionError, match=invariant):
            replace(schedule, **changes).check()


def test_attention_hides_the_exchange_of_long_samples():
    model = CostModel(linear=100, quadratic=1, cp_exchange=50)
    for length, size, waited in ((40, 2, 50 * 40 - 40**2), (400, 2, 0), (400, 8, 0), (288, 8, 7 * 50 * 288 - 288**2)):
        topology = Topology(1, cp_size=size, dynamic_cp=True)
        schedule = plan([length], topology=topology, cap=length // size, cost_model=model).check()
        assert schedule.cp_sizes == ((size,),) * size
        assert schedule.predicted_cost == schedule.lower_bound == (100 * length + length**2 + waited) // size


@pytest.mark.parametrize("ranks", [{}, {"fully_sharded": True}, {"pp_size": 4}])
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_slower_than_one_size_for_all(ranks, seed):
    lengths = np.random.default_rng(seed).integers(2000, 4000, 24)
    topology = Topology(2, cp_size=4, dynamic_cp=True, **ranks)
    model = CostModel(linear=44_000, quadratic=1, cp_exchange=3_500, per_microbatch=128 * 44_000)
    schedule = build_data_schedule(lengths, cost_model=model, topology=topology, limits=Limits(4096)).check()
    batch = batch_of(schedule)
    for level, size in enumerate(topology.dynamic_cp_sizes):
        # Round-robin over the groups of one size, two samples a micro-batch where they fit.
        groups, held = 8 // size, max(4096 * size // 4000, 1)
        slots = -(-24 // (groups * held))
        group, slot = np.arange(24) % groups, np.arange(24) // groups // held
        sizes = np.full((8, slots), size)
        assert level < batch.num_levels
        assert schedule.predicted_cost <= batch.time(group * size * slots + slot, sizes)
