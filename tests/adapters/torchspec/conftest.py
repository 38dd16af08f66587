"""TorchSpec's double on the path, hooks taken out after every test."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_balance.adapters import torchspec

DOUBLE = Path(__file__).parent / "double"


@pytest.fixture
def upstream(monkeypatch):
    """The module of the double that holds the controller, freshly imported."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    _forget_torchspec()
    yield importlib.import_module("torchspec.controller.training_controller")
    _forget_torchspec()


@pytest.fixture
def install(upstream):
    """`torchspec.install`, undone after the test."""
    made = []

    def install(*positional, **options):
        made.append(torchspec.install(*positional, **options))
        return made[-1]

    yield install
    for installed in made:
        installed.undo()
    assert not torchspec.is_installed()


@pytest.fixture
def make_controller(upstream):
    """Starts a controller after `install`."""

    def make(*, dp_size=4, micro_batch_size=2, max_sample_pool_size=0):
        args = SimpleNamespace(per_dp_rank_batch_size=micro_batch_size, max_sample_pool_size=max_sample_pool_size)
        return upstream.AsyncTrainingController.remote(args, dp_size)

    return make


@pytest.fixture
def results_of(upstream):
    """Results of inference for samples of these lengths."""

    def make(lengths, *, start=0):
        return [
            upstream.InferenceOutput(f"d{start + i}", f"key{start + i}", {"input_ids": (1, int(length))})
            for i, length in enumerate(lengths)
        ]

    return make


@pytest.fixture
def ranks_of(make_controller, results_of):
    """Positions of the samples that each rank gets of a dispatch of these lengths."""

    def ranks(lengths, *, dp_size, turn=0):
        controller = make_controller(dp_size=dp_size, micro_batch_size=len(lengths) // dp_size)
        controller.batch_id = turn
        return [
            [int(result.data_id[1:]) for result in rank] for rank in controller._partition_results(results_of(lengths))
        ]

    return ranks


def _forget_torchspec():
    for name in [name for name in sys.modules if name == "torchspec" or name.startswith("torchspec.")]:
        del sys.modules[name]
