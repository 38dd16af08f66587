"""Plans against the best possible ones, and against the plans of yesterday.

Small batches are compared with brute force, larger ones with a constraint solver where it is installed. A list
of recorded numbers holds the plans fixed: the same on every Python, platform and numpy.
"""

import hashlib
from itertools import product

import numpy as np
import pytest

from megatron_balance.cost.model import CostModel
from megatron_balance.planner.bounds.bins import min_num_bins
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.topology import Limits, Topology

QUADRATIC = CostModel(linear=1000, quadratic=1)
CAP = 4096


def whole_numbers(count, *, seed, modulus=2**31 - 1):
    """Pseudo-random integers by a multiplicative congruence: the same everywhere."""
    state, numbers = seed * 2654435761 % modulus or 1, []
    for _ in range(count):
        state = state * 48271 % modulus
        numbers.append(state)
    return numbers


def long_tailed(count, *, seed, longest=CAP):
    """Lengths of which most are short: the product of two uniform numbers."""
    numbers = whole_numbers(2 * count, seed=seed)
    return [1 + (a % longest) * (b % longest) // longest for a, b in zip(numbers[::2], numbers[1::2], strict=True)]


def set_partitions(items, capacity):
    """All ways to put weights into bins of the capacity, as lists of lists of items."""

    def extend(index, bins, rooms):
        if index == len(items):
            yield bins
            return
        for number in range(len(bins)):
            if rooms[number] >= items[index]:
                changed = [*bins[:number], [*bins[number], index], *bins[number + 1 :]]
                yield from extend(
                    index + 1, changed, [*rooms[:number], rooms[number] - items[index], *rooms[number + 1 :]]
                )
        yield from extend(index + 1, [*bins, [index]], [*rooms, capacity - items[index]])

    yield from extend(0, [], [])


def test_step_is_within_one_percent_of_brute_force_on_the_mean():
    ratios = []
    for seed in range(40):
        num_samples, dp_size = 8 + seed % 3, 2 + seed % 2
        lengths = long_tailed(num_samples, seed=seed + 1)
        costs = [QUADRATIC(length) for length in lengths]
        best = min(
            max(sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == r) for r in range(dp_size))
            for ranks in product(range(dp_size), repeat=num_samples)
            if ranks[0] == 0
        )
        schedule = build_data_schedule(
            lengths, cost_model=QUADRATIC, topology=Topology(dp_size), limits=Limits(CAP), objective="step"
        ).check()
        assert schedule.lower_bound <= best <= schedule.predicted_cost
        ratios.append(schedule.predicted_cost / best)
    assert sum(ratios) / len(ratios) <= 1.01


def test_microbatch_is_within_two_percent_of_brute_force_on_the_mean():
    ratios = []
    for seed in range(30):
        lengths = long_tailed(8, seed=seed + 101)
        costs = [QUADRATIC(length) for length in lengths]
        # Bins sorted by cost and cut into pairs are the best rows of two ranks.
        best = min(
            sum(sorted((sum(costs[item] for item in items) for items in bins), reverse=True)[::2])
            for bins in set_partitions(lengths, CAP)
        )
        schedule = build_data_schedule(
            lengths, cost_model=QUADRATIC, topology=Topology(2), limits=Limits(CAP), objective="microbatch"
        ).check()
        assert schedule.lower_bound <= best <= schedule.predicted_cost
        ratios.append(schedule.predicted_cost / best)
    assert sum(ratios) / len(ratios) <= 1.02


def solver_value(schedule, *, span, seconds=3.0):
    """Cost of the best plan that the solver finds with as many micro-batches, rows of `span` ranks meeting."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    lengths = schedule.padded_lengths.tolist()
    costs = [schedule.cost_model(length) for length in lengths]
    dp_size, count = schedule.topology.dp_size, schedule.num_microbatches
    cap = schedule.limits.max_tokens_per_microbatch(schedule.topology)
    inside = [
        [model.new_bool_var(f"sample {sample} in bin {index}") for index in range(dp_size * count)]
        for sample in range(len(lengths))
    ]
    for choices in inside:
        model.add_exactly_one(choices)
    of_bins = []
    for index in range(dp_size * count):
        held = [choices[index] for choices in inside]
        model.add(sum(tokens * here for tokens, here in zip(lengths, held, strict=True)) <= cap)
        of_bins.append(sum(cost * here for cost, here in zip(costs, held, strict=True)))
    if span == 1:
        longest = model.new_int_var(0, sum(costs), "longest")
        for rank in range(dp_size):
            model.add(sum(of_bins[rank * count : (rank + 1) * count]) <= longest)
        model.minimize(longest)
    else:
        heights = [model.new_int_var(0, sum(costs), f"row {row}") for row in range(count)]
        for index, height in enumerate(of_bins):
            model.add(height <= heights[index % count])
        for higher, lower in zip(heights, heights[1:], strict=False):
            model.add(higher >= lower)
        model.minimize(sum(heights))
    for rank, slots in enumerate(schedule.ranks):
        for slot, ids in enumerate(slots):
            for sample in ids:
                for index, here in enumerate(inside[sample]):
                    model.add_hint(here, index == rank * count + slot)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    assert solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return int(solver.objective_value)


@pytest.mark.parametrize(("objective", "most"), [("step", 1.01), ("microbatch", 1.02)])
def test_the_solver_finds_little_that_is_better(objective, most):
    pytest.importorskip("ortools")
    ratios = []
    for case in range(6):
        dp_size, num_samples = 2 + case % 3, 16 + case
        schedule = build_data_schedule(
            long_tailed(num_samples, seed=case + 201),
            cost_model=QUADRATIC,
            topology=Topology(dp_size),
            limits=Limits(CAP),
            objective=objective,
        ).check()
        best = solver_value(schedule, span=1 if objective == "step" else dp_size)
        assert schedule.lower_bound <= best
        ratios.append(schedule.predicted_cost / best)
    assert sum(ratios) / len(ratios) <= most


def pipeline_solver_value(schedule, *, num_microbatches, seconds=4.0):
    """Makespan of the best pipeline that the solver finds with this number of micro-batches a rank, and its bound."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    lengths = schedule.padded_lengths.tolist()
    costs = [schedule.cost_model(length) for length in lengths]
    dp_size, stages = schedule.topology.dp_size, schedule.topology.pp_size
    cap = schedule.limits.max_tokens_per_microbatch(schedule.topology)
    largest = 3 * stages * sum(costs)
    inside = [
        [[model.new_bool_var("") for _ in range(num_microbatches)] for _ in range(dp_size)] for _ in range(len(lengths))
    ]
    for choices in inside:
        model.add_exactly_one(choice for of_rank in choices for choice in of_rank)
    longest = model.new_int_var(0, largest, "longest")
    for rank in range(dp_size):
        held = [[choices[rank][slot] for choices in inside] for slot in range(num_microbatches)]
        for here in held:
            model.add(sum(tokens * is_in for tokens, is_in in zip(lengths, here, strict=True)) <= cap)
        own = [sum(cost * is_in for cost, is_in in zip(costs, here, strict=True)) for here in held]
        ends = {
            (stage, slot, backward): model.new_int_var(0, largest, "")
            for stage, slot, backward in product(range(stages), range(num_microbatches), (False, True))
        }
        for stage in range(stages):
            # A stage's own order; then the neighbour that hands it each pass.
            order = one_forward_one_backward(stage, stages=stages, num_microbatches=num_microbatches)
            for before, (slot, backward) in zip([None, *order], order, strict=False):
                end, cost = ends[stage, slot, backward], own[slot] * (2 if backward else 1)
                model.add(end >= cost + (0 if before is None else ends[(stage, *before)]))
                neighbour = stage + 1 if backward else stage - 1
                if 0 <= neighbour < stages:
                    model.add(end >= cost + ends[neighbour, slot, backward])
            model.add(longest >= ends[(stage, *order[-1])])
    model.minimize(longest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return solver.objective_value / (3 * stages), solver.best_objective_bound / (3 * stages)


def one_forward_one_backward(stage, *, stages, num_microbatches):
    """The passes of a stage in their order, as pairs of slot and whether it is a backward pass."""
    ahead = min(stages - 1 - stage, num_microbatches)
    order = [(slot, False) for slot in range(ahead)]
    for slot in range(num_microbatches - ahead):
        order += [(slot + ahead, False), (slot, True)]
    return order + [(slot, True) for slot in range(num_microbatches - ahead, num_microbatches)]


@pytest.mark.slow
def test_the_solver_finds_little_that_is_better_in_a_pipeline():
    """Distance of plans from the optimum, where they are far from their bound. Every count of micro-batches."""
    pytest.importorskip("ortools")
    over_best, over_bound = [], []
    for case in range(4):
        schedule = build_data_schedule(
            long_tailed(10 + case, seed=case + 401),
            cost_model=QUADRATIC,
            topology=Topology(2, pp_size=2 + case % 2),
            limits=Limits(CAP),
        ).check()
        counts = range(max(1, schedule.num_microbatches - 2), schedule.num_microbatches + 2)
        found = [pipeline_solver_value(schedule, num_microbatches=count) for count in counts]
        best = min(value for value, _ in filter(None, found))
        assert schedule.lower_bound <= best * (1 + 1e-9)
        over_best.append(schedule.predicted_cost / best)
        over_bound.append(schedule.predicted_cost / schedule.lower_bound)
    print(f"over the best found: {over_best}, over the bound: {over_bound}")
    assert sum(over_best) / len(over_best) <= 1.05


def test_least_number_of_bins_is_never_above_the_best_packing():
    num_exact = 0
    for seed in range(60):
        capacity = 10 + seed % 37
        weights = [number % (capacity + 1) for number in whole_numbers(7, seed=seed + 301)]
        best = min(len(bins) for bins in set_partitions(weights, capacity))
        bound = min_num_bins(np.array(weights, dtype=np.int64), capacity=capacity)
        assert bound <= best
        num_exact += bound == best
    assert num_exact >= 54


def test_least_number_of_bins_sees_that_only_two_fit():
    assert min_num_bins(np.full(20_000, 334, dtype=np.int64), capacity=1000) == 10_000
    # Each of the 60s stands alone with one 40; a 41 fits beside none of them.
    assert min_num_bins(np.array([60, 60, 40, 41], dtype=np.int64), capacity=100) == 3
    assert min_num_bins(np.array([2**40] * 8, dtype=np.int64), capacity=2**40) == 8
    assert min_num_bins(np.array([], dtype=np.int64), capacity=5) == 1


GOLDEN_TOPOLOGIES = {
    "step": Topology(4),
    "wide": Topology(128),
    "microbatch": Topology(4, tp_size=2, ep_size=8),
    "groups": Topology(16, ep_size=4, microbatch_multiple=2),
    "sharded": Topology(8, fully_sharded=True, cp_size=2),
    "pipeline": Topology(4, pp_size=4),
    "expert pipeline": Topology(8, ep_size=4, pp_size=2, vpp_size=2),
}
GOLDEN_COSTS = {
    "quadratic": CostModel(linear=71_680, quadratic=9, expert_linear=40_000),
    "windows": CostModel(linear=5, quadratic=1, per_sequence=77, per_microbatch=99_999, windows=((512, 3),)),
}
GOLDEN_LENGTHS = {
    "short": long_tailed(300, seed=1, longest=900),
    "long": long_tailed(700, seed=2, longest=3 * CAP),
    "equal": [1366] * 90,
}
GOLDEN_LIMITS = {"tokens": Limits(CAP), "samples": Limits(micro_batch_size=4)}


def plan_number(schedule):
    """56 bits of the placement itself, whatever else a digest may cover."""
    text = repr((schedule.num_microbatches, schedule.ranks)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")


def golden_plans():
    for (name, topology), costs, lengths, limits in product(
        GOLDEN_TOPOLOGIES.items(), GOLDEN_COSTS, GOLDEN_LENGTHS, GOLDEN_LIMITS
    ):
        if limits == "samples" and costs == "windows":
            continue
        schedule = build_data_schedule(
            GOLDEN_LENGTHS[lengths],
            cost_model=GOLDEN_COSTS[costs],
            topology=topology,
            limits=GOLDEN_LIMITS[limits],
        )
        yield f"{name}, {costs}, {lengths}, {limits}", plan_number(schedule)


def test_plans_are_those_that_were_recorded():
    # A change of the planner that is meant changes these: print `dict(golden_plans())` and look why first.
    assert dict(golden_plans()) == GOLDEN


@pytest.mark.parametrize("topology", GOLDEN_TOPOLOGIES.values(), ids=GOLDEN_TOPOLOGIES)
def test_the_order_of_samples_changes_no_cost(topology):
    lengths = long_tailed(160, seed=7, longest=2 * CAP)
    lengths += lengths[:40]
    shuffled = [length for _, length in sorted(zip(whole_numbers(200, seed=8), lengths, strict=True))]
    options = {"cost_model": GOLDEN_COSTS["quadratic"], "topology": topology, "limits": Limits(CAP)}
    one, other = build_data_schedule(lengths, **options), build_data_schedule(shuffled, **options)
    assert one.predicted_cost == other.predicted_cost
    assert (one.cost_grid == other.cost_grid).all()


def test_totals_beyond_int64_are_scaled_and_planned_alike():
    lengths = long_tailed(64, seed=9)
    options = {"topology": Topology(4, ep_size=2), "limits": Limits(CAP), "objective": "microbatch"}
    large = build_data_schedule(
        lengths, cost_model=CostModel(linear=2**60, quadratic=2**50, expert_linear=2**59), **options
    ).check()
    small = build_data_schedule(
        lengths, cost_model=CostModel(linear=2**20, quadratic=2**10, expert_linear=2**19), **options
    ).check()
    assert large.cost_shift > 0
    assert int(large.cost_grid.sum()) < 2**62
    assert large.predicted_cost == pytest.approx(small.predicted_cost * 2.0 ** (40 - large.cost_shift), rel=1e-2)


@pytest.mark.parametrize("seed", [12, 13])
def test_several_groups_that_meet_are_near_their_bound(seed):
    # Without packing again by lowered targets these are 2.1 and 2.6 percent above it: the groups end uneven.
    schedule = build_data_schedule(
        [max(1, length**2 // CAP) for length in long_tailed(1500, seed=seed)],
        cost_model=CostModel(linear=1000, quadratic=9, expert_linear=4000),
        topology=Topology(32, ep_size=8),
        limits=Limits(CAP),
    ).check()
    assert schedule.predicted_cost <= 1.015 * schedule.lower_bound


GOLDEN: dict[str, int] = {
    "step, quadratic, short, tokens": 10996930639477889,
    "step, quadratic, short, samples": 30602694202038072,
    "step, quadratic, long, tokens": 31566170246121184,
    "step, quadratic, long, samples": 41982405703443149,
    "step, quadratic, equal, tokens": 23157146359748389,
    "step, quadratic, equal, samples": 16329433999560401,
    "step, windows, short, tokens": 59569091763107492,
    "step, windows, long, tokens": 6550960416544163,
    "step, windows, equal, tokens": 23157146359748389,
    "wide, quadratic, short, tokens": 5322426466272393,
    "wide, quadratic, short, samples": 43988285376923982,
    "wide, quadratic, long, tokens": 13019745684876220,
    "wide, quadratic, long, samples": 11706812217450748,
    "wide, quadratic, equal, tokens": 55319921081367037,
    "wide, quadratic, equal, samples": 55319921081367037,
    "wide, windows, short, tokens": 9986939946039244,
    "wide, windows, long, tokens": 67321115366947144,
    "wide, windows, equal, tokens": 55319921081367037,
    "microbatch, quadratic, short, tokens": 64261767612541435,
    "microbatch, quadratic, short, samples": 31786114742298560,
    "microbatch, quadratic, long, tokens": 33935775701611111,
    "microbatch, quadratic, long, samples": 14529778015625613,
    "microbatch, quadratic, equal, tokens": 28239446901245835,
    "microbatch, quadratic, equal, samples": 51181805224997573,
    "microbatch, windows, short, tokens": 29988770021510903,
    "microbatch, windows, long, tokens": 48259672135465766,
    "microbatch, windows, equal, tokens": 28239446901245835,
    "groups, quadratic, short, tokens": 31694933899071486,
    "groups, quadratic, short, samples": 28306896699968881,
    "groups, quadratic, long, tokens": 44033554162875049,
    "groups, quadratic, long, samples": 35146969520932784,
    "groups, quadratic, equal, tokens": 11785888598414776,
    "groups, quadratic, equal, samples": 56068887659683475,
    "groups, windows, short, tokens": 5225637816861242,
    "groups, windows, long, tokens": 7295987843538662,
    "groups, windows, equal, tokens": 63985536842201937,
    "sharded, quadratic, short, tokens": 20407479071721859,
    "sharded, quadratic, short, samples": 1993854874702252,
    "sharded, quadratic, long, tokens": 20671072023023699,
    "sharded, quadratic, long, samples": 54051847142444550,
    "sharded, quadratic, equal, tokens": 46912882262868527,
    "sharded, quadratic, equal, samples": 46912882262868527,
    "sharded, windows, short, tokens": 19120190618604941,
    "sharded, windows, long, tokens": 45744637457522071,
    "sharded, windows, equal, tokens": 46912882262868527,
    "pipeline, quadratic, short, tokens": 11023602900221392,
    "pipeline, quadratic, short, samples": 20814476462505494,
    "pipeline, quadratic, long, tokens": 60658105076968917,
    "pipeline, quadratic, long, samples": 60658105076968917,
    "pipeline, quadratic, equal, tokens": 6896693925707611,
    "pipeline, quadratic, equal, samples": 66316251622335091,
    "pipeline, windows, short, tokens": 26264021940796881,
    "pipeline, windows, long, tokens": 62007554026549536,
    "pipeline, windows, equal, tokens": 6896693925707611,
    "expert pipeline, quadratic, short, tokens": 31344908321982663,
    "expert pipeline, quadratic, short, samples": 46077651384753067,
    "expert pipeline, quadratic, long, tokens": 11681389460477135,
    "expert pipeline, quadratic, long, samples": 50758500934038573,
    "expert pipeline, quadratic, equal, tokens": 34492504883817560,
    "expert pipeline, quadratic, equal, samples": 62500645261260029,
    "expert pipeline, windows, short, tokens": 71493658896030612,
    "expert pipeline, windows, long, tokens": 28314302356171005,
    "expert pipeline, windows, equal, tokens": 6374180961597316,
}


def test_giants_share_rows_where_one_to_a_group_would_waste_too_much():
    # Rows no higher than the bound took 1.128: a giant and next to nothing beside it, and too few rows for the rest.
    lengths = [32768] * 8 + [1 + number % 4000 for number in whole_numbers(900, seed=5)]
    schedule = build_data_schedule(
        lengths,
        cost_model=CostModel(linear=2000, quadratic=1, expert_linear=6000),
        topology=Topology(64, ep_size=8),
        limits=Limits(32768),
    ).check()
    assert schedule.predicted_cost <= 1.03 * schedule.lower_bound


def test_groups_in_a_pipeline_are_levelled_by_their_makespans():
    # By the sums of their rows it was 1.25 on the mean: a high row delays a group by more than it costs.
    ratios = []
    for seed in range(4):
        schedule = build_data_schedule(
            long_tailed(256, seed=seed + 1, longest=16384),
            cost_model=CostModel(linear=2000, quadratic=1, expert_linear=6000),
            topology=Topology(16, ep_size=4, pp_size=2),
            limits=Limits(16384),
        ).check()
        ratios.append(schedule.predicted_cost / schedule.lower_bound)
    assert sum(ratios) / len(ratios) <= 1.21
