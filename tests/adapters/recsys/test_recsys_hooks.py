"""Installing is checked, whole and undone; against a double of recsys-examples, on the real torchrec."""

import subprocess
import sys

import pytest
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.batch_shuffler_factory import BatchShufflerFactory
from commons.perf_model.task_estimator import HSTUAttentionTask, SelfAttentionTask

from megatron_balance import BalanceError
from megatron_balance.adapters import recsys

HOOKED = [
    (BaseTaskBalancedBatchShuffler, "shuffle"),
    (BaseTaskBalancedBatchShuffler, "start_shuffle_async"),
    (BaseTaskBalancedBatchShuffler, "finish_shuffle"),
    (HSTUAttentionTask, "get_workloads"),
    (SelfAttentionTask, "get_workloads"),
]


def functions():
    return [vars(owner)[name] for owner, name in HOOKED]


def test_everything_is_hooked_and_given_back():
    """R18, R24: one name in upstream's factory, beside the identity shuffler, which stays what it is."""
    before = functions()
    installed = recsys.install()
    try:
        assert recsys.is_installed()
        assert recsys.install() is installed
        assert not set(before) & set(functions())
        shuffler = BatchShufflerFactory.create("megatron_balance", num_heads=2, head_dim=8, action_interleaved=False)
        assert isinstance(shuffler, BaseTaskBalancedBatchShuffler)
        assert not shuffler.action_interleaved
        assert BatchShufflerFactory.create("identity").shuffle(before) is before
        with pytest.raises(BalanceError, match="model is 'bert': it must be one of hstu, sid_gr"):
            BatchShufflerFactory.create("megatron_balance", model="bert")
    finally:
        installed.undo()
    assert functions() == before
    assert not recsys.is_installed()
    assert not BatchShufflerFactory.is_registered("megatron_balance")


def test_a_taken_name_changes_nothing():
    before = functions()
    BatchShufflerFactory.register("megatron_balance", IdentityBalancedBatchShuffler)
    try:
        with pytest.raises(BalanceError, match="'megatron_balance' is registered already"):
            recsys.install()
    finally:
        BatchShufflerFactory.unregister("megatron_balance")
    assert functions() == before


def test_without_a_checkout_the_message_says_what_is_missing():
    code = "from megatron_balance.adapters import recsys; recsys.install()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "PYTHONPATH must name the examples folder of recsys-examples" in done.stderr
