"""Every schedule keeps every invariant: lengths, images, segments, groups, topologies, objectives, modes are drawn.

`DataSchedule.check` asserts them; test_schedule.py and test_dynamic_cp.py break each, and `check` notices.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_judge import Batch, per_gpu

from megatron_balance import CostModel, Limits, Topology, build_data_schedule
from megatron_balance.planner import batch_of

COST_MODELS = [
    CostModel.tokens(),
    CostModel(linear=100, quadratic=1),
    CostModel(per_microbatch=5),
    CostModel(linear=3, quadratic=1, per_microbatch=1000, expert_linear=51),
    # Costs beyond int64 before they are scaled.
    CostModel(quadratic=10**14, per_microbatch=10**13, expert_linear=10**18),
]


@st.composite
def length_lists(draw, cap, dp_size):
    """Lengths of the kinds that break planners: half of the time two samples a rank or more."""
    count = draw(st.sampled_from([0, 1, 3, 8, 13, 2 * dp_size, 3 * dp_size, 5 * dp_size, 40]))
    kind = draw(st.sampled_from(["zero", "equal", "short", "over-long", "dominant", "awkward"]))
    if kind == "zero":
        return [0] * count
    if kind == "equal":
        return [draw(st.integers(1, cap + 1))] * count
    if kind == "dominant":
        return [1] * count + [50 * cap]
    if kind == "awkward":
        one = st.sampled_from([0, 1, cap // 3 + 1, cap // 2, cap // 2 + 1, cap, cap + 1])
    else:
        one = st.integers(0, cap if kind == "short" else 3 * cap)
    return draw(st.lists(one, min_size=count, max_size=count))


@st.composite
def planning_inputs(draw):
    """The layout first: a third has the work of experts, on more than one rank of an expert-parallel group."""
    cap = draw(st.sampled_from([1, 7, 64, 512]))
    ep_size, tp_size = draw(st.sampled_from([1, 1, 4, 2, 1, 4])), draw(st.sampled_from([1, 2]))
    pp_size, vpp_size = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([1, 2]))
    topology = Topology(
        draw(st.sampled_from([4, 8] if ep_size > 1 else [1, 2, 3, 4, 5, 8])),
        cp_size=draw(st.sampled_from([1] if ep_size == 2 else [1, 1, 2])),
        tp_size=tp_size,
        pp_size=pp_size,
        vpp_size=vpp_size,
        ep_size=ep_size,
        etp_size=tp_size,
        microbatch_multiple=draw(st.integers(pp_size if vpp_size > 1 else 1, 4)),
        sequence_parallel=draw(st.booleans()),
        fully_sharded=draw(st.sampled_from([False, False, False, True])),
    )
    lengths = draw(length_lists(cap, topology.dp_size))
    options = {
        "cost_model": draw(st.sampled_from(COST_MODELS[3:] if topology.ep_dp_size > 1 else COST_MODELS)),
        "topology": topology,
        "limits": draw(
            st.sampled_from([Limits(cap), Limits(cap, micro_batch_size=3), Limits(micro_batch_size=1 + cap % 4)])
        ),
        "objective": draw(st.sampled_from(["auto", "step", "microbatch", "pipeline"])),
        "algorithm": draw(st.sampled_from(["auto", "auto", "karmarkar_karp"])),
    }
    if draw(st.booleans()):
        ranks = st.integers(0, topology.dp_size - 1)
        options["home_ranks"] = draw(st.lists(ranks, min_size=len(lengths), max_size=len(lengths)))
        options["move_samples"] = draw(st.booleans())
    if options.get("move_samples", True) and draw(st.sampled_from([False, False, True])):
        options["groups"] = draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    if draw(st.sampled_from([False, False, True])):
        images = st.lists(st.integers(0, 400), max_size=3)
        options["image_patches"] = draw(st.lists(images, min_size=len(lengths), max_size=len(lengths)))
    return lengths, options


def test_every_schedule_keeps_every_invariant():
    spread = []

    @settings(max_examples=150)
    @given(planning_inputs())
    def check(inputs):
        check_plan(*inputs)
        spread.append(inputs[1]["topology"].ep_dp_size > 1 and len(inputs[0]) > 3)

    check()
    assert sum(spread) > len(spread) / 5


@pytest.mark.parametrize("objective", ["auto", "step", "microbatch", "pipeline"])
@pytest.mark.parametrize(
    "ranks",
    [
        {"fully_sharded": True},
        {"ep_size": 4},
        {"ep_size": 4, "fully_sharded": True},
        {"ep_size": 4, "pp_size": 2},
        {"ep_size": 2, "tp_size": 2, "sequence_parallel": True, "cp_size": 2},
        {"pp_size": 4, "vpp_size": 2, "microbatch_multiple": 4},
    ],
    ids=lambda ranks: " ".join(ranks),
)
@pytest.mark.parametrize("with_images", [False, True])
def test_every_layout_keeps_every_invariant(ranks, objective, with_images):
    generator = np.random.default_rng(3)
    lengths = generator.integers(0, 100, 97).tolist()
    options = {"image_patches": [[n] * (n % 3) for n in lengths]} if with_images else {}
    model = CostModel(linear=7, quadratic=1, expert_linear=51, per_microbatch=500, image_linear=11)
    check_plan(
        lengths,
        {
            "cost_model": model,
            "topology": Topology(8, **ranks),
            "limits": Limits(128),
            "objective": objective,
            **options,
        },
    )


def check_plan(lengths, options):
    """Plans, and asserts that the plan is valid, honest, and the same when made again."""
    schedule = build_data_schedule(lengths, **options).check()
    assert build_data_schedule(lengths, **options).digest() == schedule.digest()
    batch = Batch.of(schedule, patches=options.get("image_patches"))
    if not batch_of(schedule).shift:
        grid = [[per_gpu(cost, schedule.topology) for cost in row] for row in batch.grid(schedule.ranks)]
        assert batch.per_gpu(batch.time(schedule.ranks)) == schedule.predicted_cost
        assert grid == schedule.cost_grid.tolist()
        assert batch.per_gpu(batch.least_time()) <= schedule.predicted_cost
    assert schedule.lower_bound <= schedule.predicted_cost
    metrics = schedule.metrics()
    assert metrics.num_over_cap == 0
    assert metrics.predicted_cost == schedule.predicted_cost
    if not schedule.move_samples:
        assert schedule.destinations().tolist() == options["home_ranks"]
    if schedule.groups is not None:
        ranks_of = {}
        for group, rank in zip(options["groups"], schedule.destinations().tolist(), strict=True):
            assert ranks_of.setdefault(group, rank) == rank


@settings(max_examples=60)
@given(st.lists(st.integers(0, 600), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 10**6))
def test_the_order_of_arrival_changes_no_cost(lengths, dp_size, seed):
    options = {"cost_model": COST_MODELS[1], "topology": Topology(dp_size), "limits": Limits(512)}
    rotation = seed % len(lengths)
    one = build_data_schedule(lengths, **options)
    other = build_data_schedule(lengths[rotation:] + lengths[:rotation], **options)
    assert one.lower_bound == other.lower_bound
    assert one.predicted_cost == other.predicted_cost
    assert one.num_microbatches == other.num_microbatches


SEGMENTED = CostModel(linear=10, quadratic=1, expert_linear=5)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 40), max_size=4), max_size=20),
    st.sampled_from([Topology(2), Topology(3, cp_size=2), Topology(4, ep_size=2)]),
    st.sampled_from(["step", "microbatch"]),
)
def test_tokens_and_costs_of_packed_documents_are_sums_over_them(samples, topology, objective):
    flat = [tokens for segments in samples for tokens in segments]
    schedule = build_data_schedule(
        flat,
        num_segments=[len(one) for one in samples],
        cost_model=SEGMENTED,
        topology=topology,
        limits=Limits(100),
        objective=objective,
    ).check()
    assert schedule.lengths.tolist() == [sum(one) for one in samples]
    multiple = topology.token_multiple
    padded = [[-(-tokens // multiple) * multiple for tokens in one] for one in samples]
    assert schedule.padded_lengths.tolist() == [sum(one) for one in padded]
    costs = [sum(map(SEGMENTED, one)) for one in padded]
    assert sorted(sample for rank in schedule.ranks for ids in rank for sample in ids) == list(range(len(samples)))
    if topology.ep_size == 1:
        gpus = topology.gpus_per_rank
        grid = [[-(-sum(costs[sample] for sample in ids) // gpus) for ids in slots] for slots in schedule.ranks]
        assert schedule.cost_grid.tolist() == grid
