"""TorchSpec: what is hooked, checked and undone."""

import pytest

from megatron_balance import BalanceError
from megatron_balance.adapters import torchspec

IN_WINDOW = {"try_dispatch_batch", "get_status"}


@pytest.mark.parametrize(
    ("approach", "window", "hooked"),
    [("A", 2, set()), ("B", 2, IN_WINDOW), ("C", 2, IN_WINDOW | {"_prepare_dataset"}), ("C", 1, {"_prepare_dataset"})],
)
def test_each_approach_replaces_its_methods_and_undo_restores_the_very_objects(host, approach, window, hooked):
    before = dict(vars(host.hooked_class))
    patches = host.install(approach, window=window)
    after = vars(host.hooked_class)
    assert {name for name in before if after[name] is not before[name]} == hooked | {"_partition_results"}
    patches.undo()
    assert dict(vars(host.hooked_class)) == before


def test_a_class_that_ray_has_not_decorated_is_hooked_itself(host):
    plain = host.module.AsyncTrainingController = host.hooked_class.__ray_actor_class__
    before = plain._partition_results
    patches = host.install("A")
    assert plain._partition_results is not before
    patches.undo()
    assert plain._partition_results is before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"approach": "D"}, "approach is 'D'"),
        ({"approach": "B", "window": 1}, "window is 1"),
        ({"approach": "B", "window": 5}, "window is 5"),
        ({"approach": "A", "cost": "flops"}, "cost is 'flops'"),
        ({"approach": "B", "cost": "tokens"}, "cost is 'tokens' with approach B"),
        ({"approach": "C", "bucket_batches": 0}, "bucket_batches is 0"),
    ],
)
def test_an_argument_that_cannot_be_is_named(host, arguments, named):
    with pytest.raises(BalanceError, match=named):
        host.install(**arguments)


def test_a_missing_torchspec_is_told():
    with pytest.raises(BalanceError, match="torchspec is not installed"):
        torchspec.install("A")


def test_a_controller_that_runs_already_is_no_silent_miss(host):
    host.controller()
    with pytest.raises(BalanceError, match="started already"):
        host.install("A")
