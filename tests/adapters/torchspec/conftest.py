"""TorchSpec's double on the path, hooks taken out after every test."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_balance.adapters import torchspec


class Host:
    """TorchSpec with its controller, and the adapter's one line."""

    def __init__(self, module):
        self.module = module

    def install(self, approach="B", **options):
        return torchspec.install(approach=approach, **options)

    @property
    def hooked_class(self):
        return self.module.AsyncTrainingController.__ray_metadata__.modified_class

    def controller(self, *, dp_size=4, micro_batch_size=2, max_sample_pool_size=0):
        """A controller that starts; install before."""
        args = SimpleNamespace(per_dp_rank_batch_size=micro_batch_size, max_sample_pool_size=max_sample_pool_size)
        return self.module.AsyncTrainingController.remote(args, dp_size)

    def held_back(self, lengths, *, max_sample_pool_size=0):
        """A controller of two ranks that has samples of these lengths, and waits for four dispatches of four."""
        self.install("B", window=4)
        controller = self.controller(dp_size=2, max_sample_pool_size=max_sample_pool_size)
        controller.prompt_buffer.append("more")
        controller.push_inference_results(self.results(lengths))
        assert not controller.try_dispatch_batch()
        return controller

    def results(self, lengths, *, start=0):
        """Results of inference for samples of these lengths."""
        return [
            self.module.InferenceOutput(f"d{start + i}", f"key{start + i}", {"input_ids": (1, int(length))})
            for i, length in enumerate(lengths)
        ]

    def ranks(self, lengths, *, dp_size, turn=0):
        """Positions of the samples that each rank gets of a dispatch of these lengths."""
        controller = self.controller(dp_size=dp_size, micro_batch_size=len(lengths) // dp_size)
        controller.batch_id = turn
        ranks = controller._partition_results(self.results(lengths))
        return [[int(result.data_id[1:]) for result in rank] for rank in ranks]


@pytest.fixture
def host(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "double"))
    yield Host(importlib.import_module("torchspec.controller.training_controller"))
    torchspec.installation.undo()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchspec"]:
        del sys.modules[name]
