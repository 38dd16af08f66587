"""Stages take the shapes of their messages from the plan: the very shapes that Megatron would exchange."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import train
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from training_run import Recorded, RunFailed

from benchmarks.messages.counted import WAY
from megatron_balance import BalanceError, Topology
from megatron_balance.mcore import hooks
from megatron_balance.mcore.microbatch.pipeline_shapes import PipelineShapes, planned_shapes

NUM_STEPS = 2
FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --seq-length 256 "
    f"--max-position-embeddings 256 --global-batch-size 24 --train-iters {NUM_STEPS} "
    "--use-dynamic-batch-size --max-tokens-per-gpu 256 --balance-data --balance-by-flops"
)
PP2 = "--num-layers 2 --pipeline-model-parallel-size 2"
PP2_VPP2 = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
PP4_VPP2 = "--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"


def counted(folder: Path, parallel: str, *, num_ranks: int, way: str) -> Recorded:
    return train(
        folder,
        f"{FLAGS} {parallel}".split(),
        num_ranks=num_ranks,
        module="benchmarks.messages.counted",
        environment={WAY: way},
    )


@pytest.mark.parametrize(
    ("parallel", "num_ranks"),
    [
        pytest.param(PP2, 2, id="PP2"),
        pytest.param("--num-layers 4 --pipeline-model-parallel-size 4", 4, id="PP4"),
        pytest.param(PP2_VPP2, 2, id="PP2-VPP2"),
        pytest.param(f"{PP2_VPP2} --microbatch-group-size-per-virtual-pipeline-stage 3", 2, id="groups-of-three"),
        pytest.param(f"{PP2_VPP2} --overlap-p2p-communication-warmup-flush", 2, id="PP2-VPP2-warmup-flush"),
        pytest.param(f"{PP4_VPP2} --no-overlap-p2p-communication", 4, id="PP4-VPP2-without-overlap"),
        pytest.param(f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel", 4, id="TP2-PP2-SP"),
        pytest.param(f"{PP2} --context-parallel-size 2", 4, id="CP2-PP2"),
        pytest.param(
            "--num-layers 3 --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1", 2, id="uneven"
        ),
        pytest.param(
            "--num-layers 3 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|L", 2, id="layout"
        ),
    ],
)
def test_every_shape_is_the_one_that_megatron_exchanges(tmp_path: Path, parallel: str, num_ranks: int) -> None:
    run = counted(tmp_path, parallel, num_ranks=num_ranks, way="compared")
    for steps in run.ranks:
        assert len(steps) == NUM_STEPS
        for step in steps:
            assert len(set(step["microbatch_tokens"])) > 1
            assert step["compared"] > 0
    messages, shapes = _sum(run.ranks, "messages"), _sum(run.ranks, "shape_messages")
    assert _sum(run.ranks, "compared") == shapes == messages - shapes


@pytest.mark.parametrize("parallel", [pytest.param(PP2, id="PP2"), pytest.param(PP2_VPP2, id="PP2-VPP2")])
def test_half_the_messages_are_left_and_no_shape_is_exchanged(tmp_path: Path, parallel: str) -> None:
    exchanged, planned = (counted(tmp_path / way, parallel, num_ranks=2, way=way) for way in ("exchanged", "planned"))
    num_microbatches = sum(len(step["microbatch_tokens"]) for step in planned.ranks[0])
    num_links = 3 if parallel == PP2_VPP2 else 1
    messages = _sum(planned.ranks, "messages")
    assert messages == 2 * num_links * num_microbatches  # an activation and a gradient
    assert _sum(exchanged.ranks, "messages") == 2 * messages
    assert _sum(exchanged.ranks, "reads_by_host") == messages  # each by its receiver
    assert _sum(planned.ranks, "shape_messages") == _sum(planned.ranks, "reads_by_host") == 0
    assert _sum(planned.ranks, "device_waits") < _sum(exchanged.ranks, "device_waits")
    if parallel == PP2_VPP2:
        assert _sum(planned.ranks, "device_waits") == 0


def test_a_tensor_of_another_shape_is_named_before_it_is_sent(tmp_path: Path) -> None:
    with pytest.raises(RunFailed):
        train(tmp_path, f"{FLAGS} {PP2}".split(), num_ranks=2, module="misplanned_shapes")
    said = (tmp_path / "rank0.log").read_text()
    assert re.search(
        r"BalanceError: Pipeline stage 0 would send an activation of shape \[\d+, 1, 32\] where the plan says "
        r"\[\d+, 1, 32\]\. .*--pipeline-model-parallel-size 1",
        said,
    )


def _sum(ranks: list[list[dict[str, Any]]], figure: str) -> int:
    return sum(step[figure] for steps in ranks for step in steps)


@given(
    num_groups=st.integers(1, 4), num_rest=st.integers(0, 3), group_size=st.integers(1, 5), num_chunks=st.integers(1, 4)
)
def test_the_last_stage_and_the_first_pass_the_same_microbatches_in_the_same_order(
    num_groups: int, num_rest: int, group_size: int, num_chunks: int
) -> None:
    order = get_schedule_table(num_groups * group_size + num_rest, num_chunks, group_size)
    sent = [microbatch for microbatch, chunk in order if chunk < num_chunks - 1]
    received = [microbatch for microbatch, chunk in order if chunk > 0]
    assert sent == received


TOKENS = [40, 80, 120, 160]
SPLIT_FOUR_WAYS = Topology(
    1, pp_size=2, vpp_size=2, microbatch_multiple=2, tp_size=2, cp_size=2, sequence_parallel=True
)


def _shapes(stage: int, *, topology: Topology = SPLIT_FOUR_WAYS) -> PipelineShapes:
    order = get_schedule_table(len(TOKENS), topology.vpp_size, topology.microbatch_multiple)
    return PipelineShapes(TOKENS, order=order, topology=topology, stage=stage, hidden_size=8)


def test_a_rank_has_its_share_of_the_tokens_and_the_first_stage_receives_later_chunks_only() -> None:
    first, last = _shapes(0), _shapes(1)
    receive = {"receives_activation": True, "receives_gradient": False}
    assert [first.exchange(None, None, **receive)[0] for _ in TOKENS] == [[n // 4, 1, 8] for n in TOKENS]
    every = [40, 80, 40, 80, 120, 160, 120, 160]
    assert [last.exchange(None, None, **receive)[0] for _ in every] == [[n // 4, 1, 8] for n in every]
    with pytest.raises(BalanceError, match="Pipeline stage 0 has more messages in this step"):
        first.exchange(None, None, **receive)


def test_what_is_sent_is_checked_and_counted_apart_from_what_is_received() -> None:
    shapes = _shapes(1, topology=Topology(1, pp_size=3))
    nothing = {"receives_activation": False, "receives_gradient": False}
    assert shapes.exchange(torch.empty(40, 1, 8), None, **nothing) == ([0, 0, 0], [0, 0, 0])
    both = {"receives_activation": True, "receives_gradient": True}
    assert shapes.exchange(torch.empty(80, 1, 8), torch.empty(40, 1, 8), **both) == ([40, 1, 8], [40, 1, 8])
    with pytest.raises(BalanceError, match=r"stage 1 would send a gradient of shape \[80, 1, 16\] .* \[80, 1, 8\]"):
        shapes.exchange(None, torch.empty(80, 1, 16), **nothing)


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({"mtp_standalone": True}, {}),
        ({"mtp_standalone": False, "enable_hyper_connections": True}, {}),
        ({"mtp_standalone": False}, {"p2p_communicator": object()}),
        ({"mtp_standalone": False}, {"adjust_tensor_shapes_fn": lambda *shapes: shapes}),
    ],
)
def test_stages_exchange_shapes_where_messages_are_not_one_activation(config: Any, arguments: Any) -> None:
    model = types.SimpleNamespace(config=types.SimpleNamespace(**config))
    assert planned_shapes(TOKENS, topology=Topology(1, pp_size=2), arguments={"model": [model], **arguments}) is None


def test_a_run_that_does_not_balance_exchanges_shapes() -> None:
    row = next(row for row in hooks.HOOKS if row.target.endswith("._communicate_shapes"))
    assert hooks.current() is None
    hooked = row.wrap(lambda communicator, *message: (communicator, message))
    assert hooked("stages", None, None, recv_prev=True, recv_next=False) == ("stages", (None, None, True, False))
