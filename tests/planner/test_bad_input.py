"""Whatever is wrong with an argument is a BalanceError that names it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import BalanceError, CostModel, Limits, ModelShape, Topology, balance, build_data_schedule

GOOD = {"cost_model": CostModel.tokens(), "topology": Topology(2), "limits": Limits(16)}
WRONG = st.one_of(
    st.just(object()),
    st.just(float("nan")),
    st.floats(),
    st.text(max_size=3),
    st.integers(max_value=-1),
    st.dictionaries(st.integers(), st.integers(), min_size=1, max_size=2),
    st.lists(st.one_of(st.none(), st.floats(), st.booleans(), st.integers(max_value=-1)), min_size=3, max_size=3),
    st.just([[1], [2, 3], [], [4]]),
    st.just([2**80, 1, 1]),
)
NAMES = (
    "lengths",
    "num_segments",
    "image_patches",
    "home_ranks",
    "cost_model",
    "topology",
    "limits",
    "objective",
    "algorithm",
    "move_samples",
    "num_microbatches",
)
BALANCE_NAMES = ("max_samples", "num_microbatches", "allow_empty", "padded")


def test_integers_of_numpy_are_sizes_and_booleans_are_none():
    """Fault: `Topology(np.int64(2))` was refused."""
    two = np.int32(2)
    arguments = {"cost_model": CostModel(linear=two, windows=[(two, two)]), "topology": Topology(two, cp_size=two)}
    schedule = build_data_schedule([3, 2, 1], **arguments, limits=Limits(np.uint8(16)))
    assert (schedule.digest(), arguments["topology"]) == (
        build_data_schedule(
            [3, 2, 1],
            cost_model=CostModel(linear=2, windows=((2, 2),)),
            topology=Topology(2, cp_size=2),
            limits=Limits(16),
        ).digest(),
        Topology(2, cp_size=2),
    )
    assert balance([3, 2, 1], num_ranks=two, max_tokens=np.int64(4)) == balance([3, 2, 1], num_ranks=2, max_tokens=4)
    for wrong in (True, np.True_, 2.0, "2"):
        for size in (lambda: Topology(wrong), lambda: Limits(wrong), lambda: CostModel(linear=wrong)):  # noqa: B023
            with pytest.raises(BalanceError, match="it must be an integer of at least"):
                size()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(value=WRONG)
def test_build_data_schedule_names_what_is_wrong(name, value):
    arguments = {"lengths": [1, 2, 3], **GOOD, name: value}
    with pytest.raises(BalanceError, match=name):
        build_data_schedule(arguments.pop("lengths"), **arguments)


@pytest.mark.parametrize("name", ["lengths", "num_ranks", "max_tokens", "model", "objective", *BALANCE_NAMES])
@settings(max_examples=30, deadline=None)
@given(value=WRONG)
def test_balance_names_what_is_wrong(name, value):
    arguments = {"lengths": [1, 2, 3], "num_ranks": 2, "max_tokens": 16, name: value}
    with pytest.raises(BalanceError, match=name):
        balance(arguments.pop("lengths"), **arguments)


def test_sizes_beyond_int64_are_planned_or_refused():
    """Each raised an OverflowError, or was taken for something else."""
    assert balance([5, 4, 3], num_ranks=2, max_tokens=2**63) == balance([5, 4, 3], num_ranks=2, max_tokens=100)
    huge = {"cost_model": CostModel(linear=2**70), "topology": Topology(16, fully_sharded=True)}
    build_data_schedule([0, 0], limits=Limits(10**18), **huge).check()
    build_data_schedule(range(1, 200), limits=Limits(10**18), **huge).check()
    fixed = {
        "cost_model": CostModel(linear=10**12, per_microbatch=6 * 10**14),
        "topology": Topology(2, dynamic_cp=True),
    }
    build_data_schedule([5000] * 48, limits=Limits(1), **fixed).check()  # a sample paid for 5,000 micro-batches
    sized = Topology(4, dynamic_cp=True)
    costs = CostModel(linear=17858035295, quadratic=7780093)  # scaled: the bound stood above the plan
    build_data_schedule([5981984] * 5, cost_model=costs, topology=sized, limits=Limits(8_000_000)).check()
    for wrong in ({"fully_sharded": "no"}, {"dynamic_cp": 1}):
        with pytest.raises(BalanceError, match="must be True or False"):
            Topology(2, **wrong)
    with pytest.raises(BalanceError, match=r"lengths\[0\] is True"):
        build_data_schedule([True, 3], **GOOD)
    with pytest.raises(BalanceError, match="image_patches"):
        build_data_schedule([1, 1], image_patches=[[2**30] * 8, [5]], **GOOD)


def test_balance_takes_the_name_of_a_model():
    shape = ModelShape.preset("Qwen3-8B")
    lengths = [4096, 512, 300, 7000, 128, 2048, 900, 64]
    by_name = balance(lengths, num_ranks=2, max_tokens=8192, model="Qwen3-8B")
    assert by_name == balance(lengths, num_ranks=2, max_tokens=8192, model=shape)
    with pytest.raises(BalanceError, match="no preset"):
        balance([3], num_ranks=1, max_tokens=4, model="Qwen3-9000B")
