"""TorchSpec: what is hooked, checked and undone."""

import sys
from types import SimpleNamespace

import pytest

from megatron_balance import BalanceError
from megatron_balance.adapters import torchspec

IN_WINDOW = {"try_dispatch_batch", "get_status"}


def hooked_class(upstream):
    return upstream.AsyncTrainingController.__ray_metadata__.modified_class


@pytest.mark.parametrize(
    ("approach", "window", "hooked"),
    [("A", 2, set()), ("B", 2, IN_WINDOW), ("C", 2, IN_WINDOW | {"_prepare_dataset"}), ("C", 1, {"_prepare_dataset"})],
)
def test_each_approach_replaces_its_methods_and_undo_restores_the_very_objects(
    install, upstream, approach, window, hooked
):
    before = dict(vars(hooked_class(upstream)))
    patches = install(approach, window=window)
    after = vars(hooked_class(upstream))
    assert {name for name in before if after[name] is not before[name]} == hooked | {"_partition_results"}
    assert torchspec.is_installed()
    patches.undo()
    assert dict(vars(hooked_class(upstream))) == before
    assert not torchspec.is_installed()


def test_a_class_that_ray_has_not_decorated_is_hooked_itself(install, upstream, monkeypatch):
    plain = hooked_class(upstream).__ray_actor_class__
    monkeypatch.setattr(upstream, "AsyncTrainingController", plain)
    before = plain._partition_results
    patches = install("A")
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
def test_an_argument_that_cannot_be_is_named(install, upstream, arguments, named):
    with pytest.raises(BalanceError, match=named):
        install(**arguments)
    assert not torchspec.is_installed()


def test_a_missing_torchspec_is_told(monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "double" not in entry])
    with pytest.raises(BalanceError, match="torchspec is not installed"):
        torchspec.install("A")


def test_a_controller_that_runs_already_is_no_silent_miss(install, upstream):
    upstream.AsyncTrainingController.remote(SimpleNamespace(per_dp_rank_batch_size=1), 1)
    with pytest.raises(BalanceError, match="started already"):
        install("A")
