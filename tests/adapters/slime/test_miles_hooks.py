"""miles, a fork of slime: the schedule is made by the adapter in the process of the actor.

On a double of its modules, and with MILES_CHECKOUT (marked `checkout`) on its own schedule and its own cut.
"""

import importlib
import importlib.metadata
import os
import pickle
import sys
import types
from pathlib import Path

import pytest
from slime_double import FIVE_LONG, build_dp_schedule, data_of, parallel_config, qwen3_4b

from megatron_balance.adapters import miles

CONVERSION, MANAGER = "miles.ray.rollout.train_data_conversion", "miles.ray.rollout.rollout_manager"
DOUBLE = """
from miles.utils.dp_schedule import build_dp_schedule

def split_train_data_by_dp(args, data, train_parallel_config):
    data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
    found = build_dp_schedule(args, train_parallel_config, data["total_lengths"],
        global_batch_size=args.global_batch_size, rollout_indices=data["rollout_ids"])
    shards = _package_shards(args, data, found[0])
    for rank, shard in enumerate(shards):
        shard["micro_batch_indices"] = found[1][rank]
    return shards

def _package_shards(args, data, partitions):
    return [{"partition": one} | {key: [data[key][j] for j in one] for key in ("tokens", "loss_masks")}
        for one in partitions]
"""


@pytest.fixture(params=["double", pytest.param("checkout", marks=pytest.mark.checkout)])
def manager(request, monkeypatch):
    """The module in which the actor's class lies, which has bound `split_train_data_by_dp` by value."""

    def place(name, **content):
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
    for name in [name for name in sys.modules if name.partition(".")[0] == "miles"]:
        monkeypatch.delitem(sys.modules, name)
    packages = ("miles", "miles.utils", "miles.ray", "miles.ray.rollout")
    if request.param == "double":
        for name in packages:
            place(name)
        place("miles.utils.dp_schedule", build_dp_schedule=build_dp_schedule)
        exec(DOUBLE, vars(place(CONVERSION)))
    else:
        for name in packages:  # without what their __init__ imports: engines and Ray
            place(name, __path__=[str(Path(os.environ["MILES_CHECKOUT"], *name.split(".")))])
        store = types.SimpleNamespace(put=lambda value, value_spec: value)
        place("miles.utils.object_store", get_instance=lambda: store, ValueSpec=lambda **_: None)
        vars(sys.modules["miles.utils"])["object_store"] = sys.modules["miles.utils.object_store"]
        place("miles.utils.multi_lora", is_multi_lora_enabled=lambda args: False)
        place("miles.utils.types", Sample=None)
        place("miles.utils.timer", Timer=None)
        importlib.import_module(CONVERSION)
    conversion = sys.modules[CONVERSION]
    yield place(MANAGER, split_train_data_by_dp=conversion.split_train_data_by_dp)
    miles.driver.undo()
    miles.actor.undo()


def test_the_actor_hooks_itself_and_a_step_of_too_few_samples_is_mileses_own(manager, caplog):
    before = sys.modules[CONVERSION].build_dp_schedule
    miles.install()
    # As Ray sends it: by value, into a process where nothing is hooked.
    split = pickle.loads(pickle.dumps(manager.split_train_data_by_dp))
    assert sys.modules[CONVERSION].build_dp_schedule is before
    args = qwen3_4b(global_batch_size=5, calculate_per_token_loss=False)
    shards = split(args, data_of(FIVE_LONG), parallel_config())
    assert sorted(sample for shard in shards for sample in shard["partition"]) == [0, 1, 2, 3, 4]
    assert [len(shard["micro_batch_indices"]) for shard in shards] == [1] * 4
    assert all(all(mask) for shard in shards for mask in shard["loss_masks"])
    assert "all ranks take its plan of a run without balancing" in caplog.text


def test_a_part_step_is_kept_where_miles_keeps_it(manager):
    miles.install()
    lengths = [100 * (1 + index) for index in range(14)]
    for keeps, steps in ((True, 2), (False, 1)):
        args = qwen3_4b(global_batch_size=8, allow_partial_train_step=keeps)
        shards = manager.split_train_data_by_dp(args, data_of(lengths), parallel_config())
        ids = sorted(sample for shard in shards for sample in shard["partition"])
        assert ids == list(range(14 if keeps else 8))
        assert {len(shard["micro_batch_indices"]) for shard in shards} == {steps}
