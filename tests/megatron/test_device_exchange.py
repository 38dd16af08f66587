"""Samples that move between GPUs (`--balance-exchange nccl`), on the toy device, whose default backend stands in."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from prefetcher_setup import group_of_one
from rounding import assert_equal
from test_device_training import BALANCED, run
from toy_transfers import Kind, Phase, per_step

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.step.device_exchange import DeviceExchange

LAYOUTS = [
    pytest.param("", 2, id="DP2"),
    pytest.param("--pipeline-model-parallel-size 2 --num-layers 2", 4, id="PP2"),
    pytest.param("--balance-context-parallel", 2, id="sizes of context parallelism"),
]
OVER_NCCL = "--distributed-backend nccl --balance-exchange nccl"
EXCHANGE = "megatron_balance/mcore/step/device_exchange.py:run"


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
def test_the_training_thread_exchanges_once_a_step(tmp_path: Path, layout: str, num_ranks: int) -> None:
    gloo = run(tmp_path / "gloo", layout, BALANCED, num_ranks=num_ranks)
    ours = run(tmp_path / "ours", layout, BALANCED, OVER_NCCL, num_ranks=num_ranks)
    assert_equal(ours.recorded, reference=gloo.recorded)
    for rank, transfers in enumerate(ours.transfers):
        waits = per_step(transfers, kinds=(Kind.WAIT,))
        assert waits[Phase.STEP, Kind.WAIT, EXCHANGE] == [2] * len(ours.recorded.ranks[rank])
        assert not any(phase is Phase.THREAD for phase, _, _ in per_step(transfers, kinds=Kind))
        # All that a micro-batch needs is on the device when it begins.
        assert not any(phase is Phase.MICROBATCH for phase, _, _ in per_step(transfers, kinds=(Kind.PINNED,)))
        sent = per_step(transfers, kinds=(Kind.PINNED,))
        assert {site for _, _, site in sent} == {"megatron_balance/runtime/prepared_exchange.py:run"}


def test_another_thread_may_not_exchange() -> None:
    errors: list[str] = []

    def exchange(of_training: DeviceExchange) -> None:
        nothing: Any = None  # it is refused before it is looked at
        try:
            of_training.run(nothing)
        except BalanceError as error:
            errors.append(str(error))

    with group_of_one() as group:
        thread = threading.Thread(
            target=exchange, args=(DeviceExchange(group, device=torch.device("cpu")),), name="beside"
        )
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "thread beside exchanges samples beside training" in errors[0]
