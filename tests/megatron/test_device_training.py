"""Training on the toy device: nothing is misplaced, and balancing waits for the device no more than stock Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from forked_runs import train
from rounding import assert_equal
from toy_transfers import Kind, Phase, Place, excess, per_step, read_transfers
from training_run import Recorded, RunFailed

GLOBAL_BATCH_SIZE = 8
SEQ_LENGTH = 512
FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH_SIZE} "
    "--train-iters 3"
)
BALANCED = f"--use-dynamic-batch-size --max-tokens-per-gpu {SEQ_LENGTH} --balance-data --balance-by-flops"
STOCK_MICROBATCHES = GLOBAL_BATCH_SIZE // 2
LAYOUTS = [
    pytest.param("", 2, id="DP2"),
    pytest.param("--context-parallel-size 2", 4, id="CP2"),
    pytest.param("--pipeline-model-parallel-size 2 --num-layers 2", 4, id="PP2"),
    pytest.param(
        "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
        "--moe-router-load-balancing-type none --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        2,
        id="EP2",
    ),
]


@dataclass(frozen=True)
class ToyRun:
    """A run and, for each rank, its traffic."""

    recorded: Recorded
    transfers: list[dict[Place, int]]

    def excess(self, *, stock: ToyRun) -> list[str]:
        return [
            f"rank {rank}, {line}"
            for rank, (ours, theirs) in enumerate(zip(self.transfers, stock.transfers, strict=True))
            for line in excess(
                ours,
                theirs,
                microbatches=[step["num_microbatches"] for step in self.recorded.ranks[rank]],
                stock_microbatches=STOCK_MICROBATCHES,
            )
        ]


def run(folder: Path, *flags: str, num_ranks: int = 2, fault: str | None = None) -> ToyRun:
    recorded = train(
        folder,
        " ".join((FLAGS, *flags)).split(),
        num_ranks=num_ranks,
        module="toy_device" if fault is None else "device_faults",
        environment={} if fault is None else {"FAULT": fault},
    )
    return ToyRun(recorded, read_transfers(folder, num_ranks=num_ranks))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return run(tmp_path_factory.mktemp("stock"))


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
def test_balanced_steps_equal_stock_ones_and_wait_no_more(
    tmp_path: Path, stock: ToyRun, layout: str, num_ranks: int
) -> None:
    if layout:
        stock = run(tmp_path / "stock", layout, num_ranks=num_ranks)
    ours = run(tmp_path / "ours", layout, BALANCED, num_ranks=num_ranks)
    assert_equal(ours.recorded, reference=stock.recorded)
    assert all("ranks" in step for step in ours.recorded.ranks[0])
    assert ours.excess(stock=stock) == []


def test_data_comes_from_pinned_memory(tmp_path: Path, stock: ToyRun) -> None:
    for of_run in (stock, run(tmp_path, BALANCED)):
        for rank, transfers in enumerate(of_run.transfers):
            copies = per_step(transfers, kinds=(Kind.PINNED,))
            [((phase, _, site), counts)] = copies.items()
            assert (phase, site) == (Phase.MICROBATCH, "megatron_balance/devkit/sft_batch.py:get_batch")
            num_keys = 6  # tokens, labels, loss_mask, position_ids, cu_seqlens, max_seqlen
            assert counts == [num_keys * step["num_microbatches"] for step in of_run.recorded.ranks[rank]]


def test_numbers_are_those_of_a_run_without_it(tmp_path: Path, stock: ToyRun) -> None:
    plain = train(tmp_path, FLAGS.split(), num_ranks=2)
    for key in ("lm_loss", "grad_norm"):
        assert [step[key] for step in plain.steps] == [step[key] for step in stock.recorded.steps]


def test_a_value_read_for_each_micro_batch_is_found(tmp_path: Path, stock: ToyRun) -> None:
    ours = run(tmp_path, BALANCED, fault="read_a_value")
    lines = ours.excess(stock=stock)
    assert len(lines) == 2 * 2  # ranks, and steps but the first
    assert all(line.endswith("tests/megatron/device_faults.py:read_a_value") for line in lines)
    assert all(f"micro-batch: {Kind.READ}" in line for line in lines)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("leave_a_tensor_on_the_host", "the model got a tensor of the host"),
        ("mix_host_and_device", "aten.mul.Tensor of tensors on host and device"),
    ],
)
def test_a_misplaced_tensor_ends_the_run(tmp_path: Path, fault: str, message: str) -> None:
    with pytest.raises(RunFailed, match=message):
        run(tmp_path, BALANCED, fault=fault)
