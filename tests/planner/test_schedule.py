"""Examples of whole schedules: what is refused, what the invariants catch, known hard cases, quality."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.topology import Limits, Topology

TOKENS = CostModel.tokens()
FLOPS = CostModel(linear=23000, quadratic=1)
ALGORITHM_NAMES = ["level_packing", "karmarkar_karp", "greedy", "first_fit"]
REAL_LENGTHS = Path(__file__).parents[3] / "shared" / "data" / "lengths"


def plan(lengths, *, dp_size=2, cap=100, cost_model=TOKENS, **options):
    limits = options.pop("limits", None) or Limits(cap)
    topology = options.pop("topology", None) or Topology(dp_size)
    return build_data_schedule(lengths, cost_model=cost_model, topology=topology, limits=limits, **options).check()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, -1], r"lengths\[1\] is -1: it must be an integer from 0"),
        ([3, 4, 2.5], r"lengths\[2\] is 2.5: it must be an integer"),
        (np.array([3.0, 4.0]), r"lengths\[0\] is np.float64\(3.0\)|lengths\[0\] is 3.0"),
        ([3, True, 2.0], r"lengths\[1\] is True"),
        (["7"], r"lengths\[0\] is '7'"),
        ([2**41], r"lengths\[0\] is 2199023255552: it must be an integer from 0 to 2\*\*40"),
        ([2**70], r"lengths\[0\] is 1180591620717411303424"),
        ([[1, 2]], r"lengths has shape \(1, 2\)"),
    ],
)
def test_wrong_lengths_are_named(lengths, message):
    with pytest.raises(BalanceError, match=message):
        plan(lengths)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "fast"}, "objective is 'fast': it must be one of auto, step, microbatch, pipeline"),
        ({"algorithm": "magic"}, "algorithm is 'magic': it must be one of auto, level_packing"),
        ({"move_samples": False}, "move_samples is False: home_ranks must say"),
        ({"home_ranks": [0]}, "home_ranks has 1 entries: it must have one for each of 2 lengths"),
        ({"home_ranks": [0, 2]}, r"home_ranks\[1\] is 2: it must be below dp_size 2"),
        ({"home_ranks": [0, -1]}, r"home_ranks\[1\] is -1"),
        ({"topology": Topology(6, ep_size=4)}, "ep_size is 4: .* do not divide dp_size 6"),
        (
            {
                "cost_model": CostModel(linear=1, per_microbatch=2**60),
                "topology": Topology(2, microbatch_multiple=64),
            },
            "CostModel.per_microbatch is .* with 128 micro-batches",
        ),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(BalanceError, match=message):
        plan([3, 4], **options)


def test_the_objective_follows_the_topology():
    def objective(**topology):
        return plan([3, 4, 5], topology=Topology(2, **topology)).objective

    assert objective() == "step"
    assert objective(pp_size=2) == "pipeline"
    assert objective(ep_size=2) == "microbatch"
    assert objective(ep_size=2, tp_size=2) == "step"
    assert objective(pp_size=2, fully_sharded=True) == "microbatch"


def test_the_type_of_the_lengths_does_not_matter():
    lengths = [7, 5, 4, 4, 0]
    digests = {
        plan(values).digest()
        for values in (lengths, tuple(lengths), np.array(lengths, dtype=np.int32), np.array(lengths, dtype=np.uint16))
    }
    assert len(digests) == 1


def test_the_digest_is_pinned():
    # The same number on every platform: ranks of one job compare it.
    schedule = plan([7, 5, 4, 4])
    assert schedule.ranks == (((0, 3),), ((1, 2),))
    assert schedule.digest() == 7441720189474015516
    assert 0 <= schedule.digest() < 2**63
    assert plan([7, 5, 4, 4], topology=Topology(2, tp_size=2)).digest() != 7441720189474015516
    assert plan([5, 7, 4, 4]).digest() != 7441720189474015516


def test_an_empty_global_batch_is_all_dummies():
    schedule = plan([], topology=Topology(3, microbatch_multiple=2))
    assert schedule.ranks == (((), ()),) * 3
    assert schedule.predicted_cost == schedule.lower_bound == 0


def test_empty_samples_are_placed_on_every_rank():
    schedule = plan([0] * 8, dp_size=4)
    assert [len(slots[0]) for slots in schedule.ranks] == [2] * 4


def test_fewer_samples_than_slots_leave_dummies():
    schedule = plan([5, 6, 7], topology=Topology(2, microbatch_multiple=2))
    assert schedule.num_microbatches == 2
    assert sum(not ids for slots in schedule.ranks for ids in slots) == 1


@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_over_long_samples_run_alone(algorithm):
    # Five samples of 9000 on four ranks with a cap of 8192 stop slime.
    schedule = plan([9000] * 5 + [0, 10, 20], dp_size=4, cap=8192, algorithm=algorithm)
    assert schedule.oversized == (0, 1, 2, 3, 4)
    assert schedule.num_microbatches == 2


def test_bins_are_not_split_by_tokens_after_packing():
    # 72 samples of 4096 tokens, cap 32k, 8 ranks: slime gives ranks 12, 12, 8, 8, ... samples.
    schedule = plan([4096] * 72, dp_size=8, cap=32768, cost_model=FLOPS)
    assert {sum(map(len, slots)) for slots in schedule.ranks} == {9}


@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_micro_batches_by_count(algorithm):
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 5000, 96)
    schedule = plan(lengths, dp_size=4, limits=Limits(micro_batch_size=3), cost_model=FLOPS, algorithm=algorithm)
    assert schedule.num_microbatches == 8
    assert {len(ids) for slots in schedule.ranks for ids in slots} == {3}
    assert schedule.predicted_cost <= 1.02 * schedule.lower_bound


@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_samples_stay_home_when_told_to(algorithm):
    lengths, homes = [30, 30, 40, 50, 60, 10, 10], [0, 0, 0, 0, 0, 1, 1]
    schedule = plan(lengths, home_ranks=homes, move_samples=False, algorithm=algorithm)
    assert [sorted(sum(slots, ())) for slots in schedule.ranks] == [[0, 1, 2, 3, 4], [5, 6]]
    assert schedule.num_microbatches == 3


def test_expert_work_is_shared_by_its_group():
    model = CostModel(linear=1, expert_linear=10)
    schedule = plan([8, 8, 4, 4], topology=Topology(4, ep_size=2), cost_model=model)
    assert schedule.objective == "microbatch"
    # Each group runs 12 tokens; the experts' 120 are shared by two ranks.
    assert sorted(schedule.cost_grid[:, 0].tolist()) == [64, 64, 68, 68]


def test_a_per_microbatch_cost_counts_in_every_slot():
    schedule = plan([5, 5, 5], cost_model=CostModel(linear=1, per_microbatch=100), cap=5)
    assert schedule.num_microbatches == 2
    assert sorted(schedule.cost_grid.reshape(-1).tolist()) == [100, 105, 105, 105]


def test_huge_costs_are_scaled_and_not_overflowed():
    schedule = plan([4096] * 64, dp_size=4, cap=8192, cost_model=CostModel(quadratic=10**13))
    assert schedule.cost_shift > 0
    assert (schedule.cost_grid > 0).all()


def test_awkward_lengths_need_many_more_micro_batches_than_their_tokens_say():
    # Three of these would fill a cap of 1000 but for two tokens, so that a third is wasted.
    schedule = plan([334] * 600, dp_size=2, cap=1000, cost_model=FLOPS)
    assert 150 <= schedule.num_microbatches <= 200


class TestCheck:
    """Every invariant, broken on purpose."""

    schedule = plan([7, 5, 4, 4, 120], cap=20)

    def broken(self, invariant, **changes):
        with pytest.raises(AssertionError, match=f"'{invariant}'"):
            replace(self.schedule, **changes).check()

    def test_placed_once(self):
        slot_of = self.schedule.slot_of
        self.broken("placed once", slot_of=slot_of[:-1])
        self.broken("placed once", slot_of=slot_of + 100)
        self.broken("placed once", slot_of=slot_of - 1)

    def test_even_slots(self):
        self.broken("even slots", topology=Topology(2, microbatch_multiple=7))
        self.broken("even slots", num_microbatches=0)
        self.broken("even slots", cost_grid=self.schedule.cost_grid[:1])

    def test_cap(self):
        self.broken("cap", limits=Limits(5))
        self.broken("cap", limits=Limits(micro_batch_size=1))

        self.broken("cap", slot_of=np.zeros(5, dtype=np.int64), limits=Limits(1000))

    def test_no_empty_slot(self):
        schedule = plan([5, 5, 5, 5], cap=5)
        with pytest.raises(AssertionError, match="'no empty slot'"):
            replace(schedule, slot_of=np.array([0, 0, 2, 3]), limits=Limits(10)).check()

    def test_home(self):
        self.broken("home", move_samples=False, home_ranks=np.zeros(5, dtype=np.int64))

    def test_honest_costs(self):
        self.broken("honest costs", predicted_cost=1)
        self.broken("honest costs", cost_model=FLOPS)
        self.broken("honest costs", lower_bound=10**9)
        # Two samples of different cost in one another's place.
        schedule = plan([7, 5, 4, 4])
        with pytest.raises(AssertionError, match="'honest costs'"):
            replace(schedule, slot_of=schedule.slot_of[[1, 0, 2, 3]]).check()


def batches(name, num_samples):
    """Three batches of real lengths where they are at hand, else of a lognormal that is like them."""
    path = REAL_LENGTHS / f"{name}.npz"
    for seed in range(3):
        rng = np.random.default_rng(seed)
        if path.exists():
            yield rng.choice(np.load(path)["length"], num_samples)
        else:
            yield np.clip(np.exp(rng.normal(6.4, 1.1, num_samples)).astype(np.int64), 16, 25000)


@pytest.mark.parametrize("name", ["servegen_mlarge", "reasoning_gym", "lognormal"])
@pytest.mark.parametrize(("num_samples", "dp_size"), [(128, 4), (2048, 32)])
@pytest.mark.parametrize(("objective", "most"), [("step", 1.004), ("microbatch", 1.012)])
def test_plans_are_close_to_the_bound(name, num_samples, dp_size, objective, most):
    for lengths in batches(name, num_samples):
        schedule = plan(lengths, dp_size=dp_size, cap=9216, cost_model=FLOPS, objective=objective)
        assert schedule.predicted_cost <= most * schedule.lower_bound


@pytest.mark.parametrize("algorithm", ["karmarkar_karp", "greedy", "first_fit"])
def test_algorithms_by_name_are_close_where_the_cap_leaves_room(algorithm):
    for lengths in batches("lognormal", 512):
        schedule = plan(lengths, dp_size=8, cap=32768, cost_model=FLOPS, algorithm=algorithm)
        assert schedule.predicted_cost <= 1.02 * schedule.lower_bound


def test_sorted_slots_make_a_step_plan_fair_in_every_micro_batch():
    (lengths, *_) = batches("lognormal", 512)
    grid = plan(lengths, dp_size=8, cap=9216, cost_model=FLOPS, objective="step").cost_grid
    assert (np.diff(grid, axis=1) <= 0).all()
    assert grid.max(axis=0).sum() <= 1.3 * grid.mean(axis=0).sum()
