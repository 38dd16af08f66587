"""Shared prompts: what a plan of a forest costs, that no plan beats its bound, and how near plans come to it.

Costs are computed here from their definition, node by node: none of the planner's neighbours, differences or runs.
"""

import contextlib
from itertools import product

import numpy as np
import pytest
from plan_cells import REAL_LENGTHS

from megatron_balance import BalanceError, CostModel, Forest, Limits, Topology, build_data_schedule

COST = CostModel(linear=26_396, quadratic=1, per_microbatch=128 * 26_396)
"""Qwen3-8B: training FLOPs of a token over those of a squared token."""


def path(forest, node):
    """The nodes from a root to this one."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = int(forest.parent[node])
    return nodes[::-1]


def node_figures(forest, node, cost_model):
    """Cost and tokens of a node, computed once."""
    end = sum(int(forest.node_tokens[above]) for above in path(forest, node))
    start = end - int(forest.node_tokens[node])
    return cost_model(end) - cost_model(start), end - start


def rank_costs(forest, microbatch_of, *, shape, cost_model):
    """`[num_ranks, num_microbatches]` costs, and tokens alike."""
    costs, tokens = np.zeros((2, *shape), dtype=np.int64)
    for rank, slot in product(range(shape[0]), range(shape[1])):
        samples = np.flatnonzero(np.asarray(microbatch_of) == rank * shape[1] + slot)
        nodes = {node for sample in samples for node in path(forest, int(forest.node_of[sample]))}
        figures = [node_figures(forest, node, cost_model) for node in nodes]
        costs[rank, slot] = sum(cost for cost, _ in figures) + cost_model.per_microbatch
        tokens[rank, slot] = sum(count for _, count in figures)
    return costs, tokens


def random_forest(generator, *, num_samples, longest=9):
    """Nodes under earlier nodes; samples end anywhere, some at one node."""
    num_nodes = int(generator.integers(1, num_samples + 3))
    parent = [int(generator.integers(-1, node)) if node else -1 for node in range(num_nodes)]
    tokens = generator.integers(0, longest, num_nodes)
    return Forest.from_nodes(tokens, parent, generator.integers(0, num_nodes, num_samples))


def plan(forest, topology, *, cap, cost_model=COST, **options):
    return build_data_schedule(
        forest.lengths, forest=forest, cost_model=cost_model, topology=topology, limits=Limits(cap), **options
    ).check()


def rollouts(name, *, groups, size, seed, longest=16384):
    """Prompts and whole lengths of groups of responses to prompts of like length, and the groups."""
    generator = np.random.default_rng(seed)
    file = REAL_LENGTHS / f"{name}.npz"
    if file.exists():
        with np.load(file) as data:
            pairs = np.stack([data["prompt"], data["response"]]).astype(np.int64)
    else:
        pairs = np.exp(generator.normal([[6.0], [5.5]], [[0.9], [0.8]], (2, 8192))).astype(np.int64)
    pairs = pairs[:, (pairs > 0).all(axis=0) & (pairs.sum(axis=0) <= longest // 2)]
    pairs = pairs[:, np.argsort(pairs[0], kind="stable")]
    middle = generator.integers(0, pairs.shape[1], groups)
    near = (middle[:, None] + generator.integers(-100, 100, (groups, size))).clip(0, pairs.shape[1] - 1)
    prompts = pairs[0, middle].repeat(size)
    return prompts, prompts + pairs[1, near].reshape(-1), np.arange(groups).repeat(size)


@pytest.mark.parametrize("seed", range(40))
def test_costs_are_those_of_nodes_computed_once(seed):
    generator = np.random.default_rng(seed)
    forest = random_forest(generator, num_samples=int(generator.integers(1, 14)))
    cost_model = CostModel(linear=7, quadratic=2, windows=((4, 3),), per_microbatch=5)
    schedule = plan(forest, Topology(2), cap=24, cost_model=cost_model)
    costs, tokens = rank_costs(forest, schedule.microbatch_of, shape=schedule.cost_grid.shape, cost_model=cost_model)
    assert schedule.cost_grid.tolist() == costs.tolist()
    assert schedule.microbatch_tokens().tolist() == tokens.reshape(-1).tolist()
    assert schedule.predicted_cost == costs.sum(axis=1).max()
    assert schedule.metrics().computed_tokens == tokens.sum()


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_beats_the_bound(seed):
    """Every assignment of up to six samples to two ranks of one or two micro-batches."""
    generator = np.random.default_rng(100 + seed)
    forest = random_forest(generator, num_samples=int(generator.integers(2, 7)))
    cost_model, cap = CostModel(linear=5, quadratic=1, per_microbatch=3), int(generator.integers(8, 40))
    schedule = plan(forest, Topology(2), cap=cap, cost_model=cost_model)
    best = None
    for number in (1, 2):
        for microbatch_of in product(range(2 * number), repeat=forest.node_of.size):
            costs, tokens = rank_costs(forest, microbatch_of, shape=(2, number), cost_model=cost_model)
            counts = np.bincount(microbatch_of, minlength=2 * number).reshape(2, number)
            if ((tokens <= cap) | (counts <= 1)).all():
                time = int(costs.sum(axis=1).max())
                best = time if best is None else min(best, time)
    if best is not None:
        assert schedule.lower_bound <= best
        assert schedule.predicted_cost <= best * 1.2 or schedule.num_microbatches > 2


@pytest.mark.parametrize("objective", ["step", "microbatch"])
@pytest.mark.parametrize(("groups", "ranks"), [(32, 8), (64, 32)])
@pytest.mark.parametrize("name", ["gsm8k_sft", "azure_conv", "servegen_mlarge", "alpaca_eval", "reasoning_gym"])
def test_pieces_are_near_the_bound(name, groups, ranks, objective):
    prompts, lengths, group_of = rollouts(name, groups=groups, size=8, seed=1)
    forest = Forest.from_prompts(lengths, prompt_tokens=prompts, groups=group_of)
    schedule = plan(forest, Topology(ranks), cap=16_384, objective=objective)
    assert schedule.predicted_cost <= 1.05 * schedule.lower_bound
    unshared = build_data_schedule(
        lengths, cost_model=COST, topology=Topology(ranks), limits=Limits(16_384), objective=objective
    )
    assert schedule.predicted_cost <= unshared.predicted_cost


@pytest.mark.parametrize("systems", [1, 4])
def test_three_levels_are_near_the_bound(systems):
    """A system prompt above the groups: its ranks hold it once, and groups are not cut where others are whole."""
    prompts, lengths, group_of = rollouts("azure_conv", groups=64, size=8, seed=2, longest=14_000)
    tokens = np.concatenate([np.full(systems, 1500), prompts[::8], lengths - prompts])
    parent = np.concatenate([np.full(systems, -1), np.arange(64) % systems, systems + group_of])
    forest = Forest.from_nodes(tokens, parent, systems + 64 + np.arange(512))
    schedule = plan(forest, Topology(32), cap=16_384)
    assert schedule.predicted_cost <= 1.1 * schedule.lower_bound
    assert schedule.metrics().computed_tokens < 0.35 * forest.lengths.sum()


@pytest.mark.parametrize(
    "topology",
    [Topology(8, ep_size=4), Topology(8, tp_size=2, sequence_parallel=True), Topology(4, pp_size=2)],
    ids=["experts", "sequence parallel", "pipeline"],
)
def test_sharing_never_loses(topology):
    prompts, lengths, group_of = rollouts("servegen_mlarge", groups=16, size=8, seed=3)
    cost_model = CostModel(linear=26_396, quadratic=1, expert_linear=9_000, per_microbatch=128 * 26_396)
    forest = Forest.from_prompts(lengths, prompt_tokens=prompts, groups=group_of)
    shared = plan(forest, topology, cap=8_192, cost_model=cost_model, home_ranks=np.arange(128) % topology.dp_size)
    alone = build_data_schedule(lengths, cost_model=cost_model, topology=topology, limits=Limits(8_192))
    assert shared.predicted_cost < 0.9 * alone.predicted_cost
    nothing = Forest.from_prompts(lengths, prompt_tokens=np.zeros(128, np.int64), groups=group_of)
    assert plan(nothing, topology, cap=8_192, cost_model=cost_model).predicted_cost <= alone.predicted_cost


def test_pipelines_take_as_many_micro_batches_as_are_best():
    """Sharing leaves few micro-batches, and a pipeline wants many: the number follows from the makespan."""
    prompts, lengths, group_of = rollouts("azure_conv", groups=16, size=8, seed=6)
    forest, topology = Forest.from_prompts(lengths, prompt_tokens=prompts, groups=group_of), Topology(2, pp_size=4)
    free = plan(forest, topology, cap=16_384)
    fixed = {}
    for number in (2, 4, 6, 8, 10, 12, 16, 20):
        with contextlib.suppress(BalanceError):  # too few for the samples
            fixed[number] = plan(forest, topology, cap=16_384, num_microbatches=number).predicted_cost
    assert free.num_microbatches > min(fixed)
    assert free.predicted_cost <= 1.02 * min(fixed.values())


def test_a_large_batch_is_poured_alike_everywhere():
    prompts, lengths, group_of = rollouts("azure_conv", groups=1024, size=8, seed=4)
    schedules = [
        plan(Forest.from_prompts(lengths, prompt_tokens=prompts, groups=ids), Topology(64), cap=16_384)
        for ids in (group_of, [f"prompt {group}" for group in group_of])
    ]
    assert schedules[0].digest() == schedules[1].digest()
    assert schedules[0].predicted_cost <= 1.01 * schedules[0].lower_bound


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [5, 5]}, "forest has other lengths"),
        ({"topology": Topology(2, cp_size=2)}, "Topology.cp_size=2 does not go with forest"),
        ({"topology": Topology(2, dynamic_cp=True)}, "Topology.dynamic_cp does not go with forest"),
        ({"limits": Limits(micro_batch_size=2)}, "Limits.micro_batch_size=2 does not go"),
        ({"groups": [0, 0, 1]}, "groups does not go with forest"),
        ({"algorithm": "karmarkar_karp"}, "algorithm='karmarkar_karp' does not go with forest"),
        ({"num_segments": [1, 1, 1]}, "num_segments does not go with forest"),
    ],
)
def test_what_does_not_go_with_a_forest_is_named(arguments, message):
    forest = Forest.from_prompts([7, 5, 4], prompt_tokens=[3, 3, 0], groups=["a", "a", "b"])
    defaults = {"cost_model": CostModel.tokens(), "topology": Topology(2), "limits": Limits(16), "lengths": [7, 5, 4]}
    with pytest.raises(BalanceError, match=message):
        build_data_schedule(**{**defaults, **arguments}, forest=forest)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (([3, 4], [-1, 1], [1]), r"parent\[1\] is 1"),
        (([3, 4], [-1], [1]), "parent has 1 entries for 2 nodes"),
        (([3, 4], [-1, 0], [2]), r"node_of\[0\] is 2: it must be below 2"),
        (([3, -4], [-1, 0], [1]), r"node_tokens\[1\] is -4"),
    ],
)
def test_a_wrong_forest_is_named(nodes, message):
    with pytest.raises(BalanceError, match=message):
        Forest.from_nodes(*nodes)


def test_an_empty_batch_and_over_long_samples():
    empty = Forest.from_nodes([], [], [])
    assert plan(empty, Topology(2), cap=8).ranks == (((),), ((),))
    forest = Forest.from_prompts([20, 20, 6], prompt_tokens=[5, 5, 5], groups=[0, 0, 0])
    schedule = plan(forest, Topology(2), cap=8)
    assert schedule.oversized == (0, 1)
    assert all(len(slot) <= 1 for slots in schedule.ranks for slot in slots)
