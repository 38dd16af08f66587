"""Lower bounds are never above the best plan, which brute force finds over all assignments of a few samples."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_judge import Batch, makespan

from megatron_balance import BalanceError, CostModel, Limits, Topology, build_data_schedule
from megatron_balance.cost.model import StageCosts

TOKENS = CostModel.tokens()
COST_MODELS = [
    TOKENS,
    CostModel(linear=5, quadratic=1),
    CostModel(linear=2, quadratic=1, per_microbatch=20),
    CostModel(linear=3, expert_linear=9, per_microbatch=4),
    CostModel(linear=2, quadratic=1, per_microbatch=7, gather=60),
    CostModel(linear=3, expert_linear=9, gather=40),
]
TOPOLOGIES = {
    "step": [Topology(2), Topology(3), Topology(2, ep_size=2)],
    "microbatch": [
        Topology(2),
        Topology(3, fully_sharded=True),
        Topology(4, ep_size=2),
        Topology(2, ep_size=2),
        Topology(2, ep_size=2, pp_size=2),
    ],
    "pipeline": [
        Topology(2, pp_size=2),
        Topology(2, pp_size=3, vpp_size=2, microbatch_multiple=3),
        Topology(2, ep_size=2, pp_size=3),
    ],
}

BOTH = Limits(10, micro_batch_size=2)


def plan(lengths, *, cost_model=TOKENS, topology, limits, objective="auto"):
    return build_data_schedule(
        lengths, cost_model=cost_model, topology=topology, limits=limits, objective=objective
    ).check()


def best_by_brute_force(batch, num_microbatches):
    """The least time with this number of micro-batches, over every assignment; None where none keeps the cap."""
    cap = batch.limits.max_tokens_per_microbatch(batch.topology)
    num_ranks, best = batch.topology.dp_size, None
    for slots in product(range(num_ranks * num_microbatches), repeat=len(batch.lengths)):
        ranks = [[[] for _ in range(num_microbatches)] for _ in range(num_ranks)]
        for sample, slot in enumerate(slots):
            ranks[slot // num_microbatches][slot % num_microbatches].append(sample)
        held = [(len(ids), sum(batch.tokens[i] for i in ids)) for of_rank in ranks for ids in of_rank]
        fits = cap is None or all(count < 2 or tokens <= cap for count, tokens in held)
        fits = fits and max(count for count, _ in held) <= (batch.limits.micro_batch_size or len(slots))
        if fits:
            time = batch.time(ranks)
            best = time if best is None else min(best, time)
    return best


@pytest.mark.parametrize("objective", ["step", "microbatch", "pipeline"])
@settings(max_examples=20)
@given(data=st.data())
def test_no_assignment_beats_the_bound_and_no_plan_beats_brute_force(objective, data):
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    topology = data.draw(st.sampled_from(TOPOLOGIES[objective]))
    limits = data.draw(st.sampled_from([Limits(8), Limits(10), Limits(16), Limits(micro_batch_size=2), BOTH]))
    model = data.draw(st.sampled_from(COST_MODELS))
    schedule = plan(lengths, cost_model=model, topology=topology, limits=limits, objective=objective)
    batch = Batch.of(schedule)
    # More micro-batches than samples only add dummies.
    step = topology.microbatch_multiple
    for num_microbatches in range(step, max(5 // topology.dp_size, step) + 1, step):
        best = best_by_brute_force(batch, num_microbatches)
        if best is not None:
            assert schedule.lower_bound <= best
            assert batch.least_time() <= best
            if num_microbatches == schedule.num_microbatches:
                assert best <= schedule.predicted_cost


def test_the_pigeonhole_bound_sees_three_equal_samples_on_two_ranks():
    assert plan([6, 6, 6], topology=Topology(2), limits=Limits(99), objective="step").lower_bound == 12


@pytest.mark.parametrize(
    ("lengths", "limits", "multiple", "fewest"),
    [
        ([], Limits(10), 1, 1),
        ([5] * 8, Limits(10), 1, 2),
        ([6] * 8, Limits(10), 1, 4),
        ([99] * 3, Limits(10), 1, 2),
        ([5] * 8, Limits(10), 3, 3),
        ([5] * 9, Limits(micro_batch_size=2), 1, 3),
    ],
)
def test_as_few_micro_batches_as_the_cap_allows(lengths, limits, multiple, fewest):
    schedule = plan(lengths, topology=Topology(2, microbatch_multiple=multiple), limits=limits)
    assert schedule.num_microbatches == fewest


def test_waiting_ranks_may_do_the_shared_work_of_another_expert_group():
    model = CostModel(linear=10, quadratic=1, expert_linear=7, per_microbatch=50)
    topology = Topology(4, ep_size=2, fully_sharded=True)
    assert plan([0, 0, 5, 13, 15, 15, 16], cost_model=model, topology=topology, limits=Limits(64)).predicted_cost == 575


@pytest.mark.parametrize(
    ("count", "dp_size", "pp_size", "vpp_size"), [(15, 8, 4, 1), (63, 8, 4, 2), (63, 4, 8, 2), (7, 4, 8, 1)]
)
def test_one_sample_fewer_makes_no_step_slower(count, dp_size, pp_size, vpp_size):
    group = pp_size if vpp_size > 1 else 1
    options = {
        "cost_model": CostModel(linear=49_000, quadratic=1, per_microbatch=128 * 49_000),
        "topology": Topology(dp_size, pp_size=pp_size, vpp_size=vpp_size, microbatch_multiple=group),
        "limits": Limits(16384),
    }
    fewer, all_samples = (plan([8192] * number, **options) for number in (count, count + 1))
    assert fewer.predicted_cost <= all_samples.predicted_cost
    assert fewer.num_microbatches == all_samples.num_microbatches


@pytest.mark.parametrize(
    ("vpp_size", "ranks"), [(1, {}), (2, {}), (1, {"ep_size": 4}), (2, {"fully_sharded": True, "dynamic_cp": True})]
)
def test_stages_take_the_time_of_their_chunks(vpp_size, ranks):
    """Fault: every stage cost the same, though the output layer makes the last one up to 1.6 times the mean."""
    lengths = np.random.default_rng(7).lognormal(7, 1, 60).astype(np.int64).clip(16, 8192) // 16 * 16
    chunks = [[0] * vpp_size for _ in range(4)]
    chunks[3][-1] = 1
    kinds = (CostModel(linear=1, quadratic=1), CostModel(linear=1 + 3 * vpp_size, quadratic=1))
    even = CostModel(linear=14_000 * vpp_size, quadratic=1, per_microbatch=10**6)
    staged = replace(even, stages=StageCosts(tuple(map(tuple, chunks)), kinds))
    topology = Topology(4, pp_size=4, vpp_size=vpp_size, microbatch_multiple=4 if vpp_size > 1 else 1, **ranks)
    options = {"topology": topology, "limits": Limits(8192)}
    schedule = build_data_schedule(lengths, cost_model=staged, **options).check()
    shares = 4 * vpp_size + 3 * vpp_size
    linear = [even.linear * kind.linear * 4 * vpp_size // shares for kind in kinds]
    times = []
    for slots, sizes in zip(schedule.ranks, schedule.cp_sizes, strict=True):
        costs = [
            [
                even.per_microbatch + sum((each * int(lengths[i]) + int(lengths[i]) ** 2) // size for i in ids)
                for ids, size in zip(slots, sizes, strict=True)
            ]
            for each in linear
        ]
        times.append(costs)
    if schedule.objective == "microbatch":  # all ranks wait for the slowest in every slot
        slowest = [[max(costs[kind][slot] for costs in times) for slot in range(len(times[0][0]))] for kind in (0, 1)]
        times = [slowest]
    pipeline = {"stages": 4, "chunks": vpp_size, "group": topology.microbatch_multiple, "kinds": staged.stages.kinds}
    expected = max(makespan(costs, **pipeline) for costs in times)
    assert schedule.predicted_cost == pytest.approx(expected, rel=1e-5)
    blind = build_data_schedule(lengths, cost_model=even, **options)
    assert schedule.predicted_cost < 0.99 * blind.metrics(cost_model=staged).predicted_cost
    with pytest.raises(BalanceError, match=r"CostModel.stages has 4 stages of \d chunks: Topology.pp_size is 2"):
        build_data_schedule(lengths, cost_model=staged, topology=Topology(4, pp_size=2), limits=Limits(8192))


def test_weights_that_every_micro_batch_gathers_make_fewer_and_fuller_ones():
    lengths = np.random.default_rng(3).lognormal(6.5, 1.2, 64).astype(np.int64).clip(16, 8000)
    free = CostModel(linear=44_000, quadratic=1)
    gathered, topology = replace(free, gather=2 * 10**9), Topology(4, fully_sharded=True)
    plans = [plan(lengths, cost_model=model, topology=topology, limits=Limits(8192)) for model in (free, gathered)]
    assert [schedule.num_microbatches for schedule in plans] == [4, 3]
    assert plans[1].predicted_cost == plans[1].lower_bound == 3 * gathered.gather
