"""Balancing changes no loss and no gradient norm: real `pretrain()` runs, compared step by step with stock ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import training_run
from forked_runs import train
from rounding import assert_equal
from training_run import Recorded

NUM_STEPS = 8
GLOBAL_BATCH_SIZE = 16
SEQ_LENGTH = 1024

FLAGS = (
    f"--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --seq-length {SEQ_LENGTH} "
    f"--max-position-embeddings {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH_SIZE} --train-iters {NUM_STEPS}"
)
LAYERS = "--num-layers 2"
PACKED = f"--use-dynamic-batch-size --max-tokens-per-gpu {SEQ_LENGTH}"
BY_FLOPS = f"{PACKED} --balance-data --balance-by-flops"


def run(folder: Path, *flags: str, num_ranks: int = 2) -> Recorded:
    return train(folder, " ".join((FLAGS, *flags)).split(), num_ranks=num_ranks)


def assert_planned(ours: Recorded, *, cap: int | None) -> None:
    """Every step was balanced: all samples placed once, no micro-batch of several samples over the cap."""
    for step in planned_steps(ours):
        slots = [slot for slots in step["ranks"] for slot in slots]
        assert sorted(sample for slot in slots for sample in slot) == list(range(len(step["lengths"])))
        assert {len(slots) for slots in step["ranks"]} == {step["num_microbatches"]}
        if cap is not None:
            tokens = [sum(step["lengths"][sample] for sample in slot) for slot in slots if len(slot) > 1]
            assert max(tokens, default=0) <= cap


def planned_steps(ours: Recorded) -> list[dict[str, Any]]:
    steps = next(steps for steps in ours.ranks if "ranks" in steps[0])
    assert len(steps) == NUM_STEPS
    return steps


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return run(tmp_path_factory.mktemp("stock"), LAYERS)


class TestTwoDataParallelRanks:
    @pytest.mark.parametrize(
        ("flags", "cap"),
        [
            pytest.param(PACKED, SEQ_LENGTH, id="packed-where-loaded"),
            pytest.param("--balance-data", None, id="moved-one-a-microbatch"),
            pytest.param(f"{PACKED} --balance-data", SEQ_LENGTH, id="moved-by-tokens"),
            pytest.param(BY_FLOPS, SEQ_LENGTH, id="moved-by-flops"),
            pytest.param(f"{PACKED} --balance-by-flops", SEQ_LENGTH, id="packed-by-flops-where-loaded"),
            pytest.param(f"{BY_FLOPS} --balance-calibrate-online", SEQ_LENGTH, id="moved-by-measured-seconds"),
        ],
    )
    def test_each_policy(self, tmp_path: Path, stock: Recorded, flags: str, cap: int | None) -> None:
        ours = run(tmp_path, LAYERS, flags)
        assert_equal(ours, reference=stock)
        assert_planned(ours, cap=cap)

    def test_samples_longer_than_the_cap_run_alone_and_are_said_once(self, tmp_path: Path, stock: Recorded) -> None:
        cap = SEQ_LENGTH // 4
        flags = BY_FLOPS.replace(f"--max-tokens-per-gpu {SEQ_LENGTH}", f"--max-tokens-per-gpu {cap}")
        ours = run(tmp_path, LAYERS, flags)
        assert any(length > cap for step in planned_steps(ours) for length in step["lengths"])
        assert_equal(ours, reference=stock)
        assert_planned(ours, cap=cap)
        assert ours.output.count("longer than a micro-batch may be") == 1

    @pytest.mark.slow
    def test_ranks_that_torchrun_starts_train_as_forks_do(self, tmp_path: Path) -> None:
        flags = " ".join((FLAGS, LAYERS, BY_FLOPS)).split()
        forked = train(tmp_path / "forked", flags, num_ranks=2)
        started = training_run.train(tmp_path / "started", flags, num_ranks=2)
        for key in ("lm_loss", "grad_norm", "ranks"):
            assert [step[key] for step in forked.steps] == [step[key] for step in started.steps]

    def test_without_a_flag_nothing_is_balanced(self, stock: Recorded) -> None:
        assert "megatron_balance:" not in stock.output
        assert not any("ranks" in step for steps in stock.ranks for step in steps)
        assert {step["num_microbatches"] for step in stock.steps} == {GLOBAL_BATCH_SIZE // 2}


MODEL_PARALLEL = [
    pytest.param(f"{LAYERS} --pipeline-model-parallel-size 2", 4, id="PP2"),
    pytest.param(f"{LAYERS} --tensor-model-parallel-size 2", 4, id="TP2"),
    pytest.param(f"{LAYERS} --tensor-model-parallel-size 2 --sequence-parallel", 4, id="TP2-SP"),
    pytest.param(f"{LAYERS} --context-parallel-size 2", 4, id="CP2"),
    # Scripts then ask for rows that are split as a whole; those of a stock run hold one document each.
    pytest.param(f"{LAYERS} --context-parallel-size 2 --dataloader-inter-document-masking", 4, id="CP2-documents"),
    pytest.param(
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        4,
        id="PP2-VPP2",
    ),
    pytest.param(
        f"{LAYERS} --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 "
        "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none",
        2,
        id="EP2",
    ),
]
"""Flags and number of ranks."""


@pytest.mark.parametrize(
    ("parallel", "num_ranks"),
    [
        *MODEL_PARALLEL,
        pytest.param("--num-layers 4 --pipeline-model-parallel-size 4", 4, marks=pytest.mark.slow, id="PP4"),
        pytest.param(f"{LAYERS} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4, id="TP2-PP2"),
        pytest.param(
            f"{LAYERS} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            8,
            marks=pytest.mark.slow,
            id="TP2-PP2-DP2",
        ),
    ],
)
def test_model_parallel(tmp_path: Path, parallel: str, num_ranks: int) -> None:
    stock = run(tmp_path / "stock", parallel, num_ranks=num_ranks)
    ours = run(tmp_path / "ours", parallel, BY_FLOPS, num_ranks=num_ranks)
    assert_equal(ours, reference=stock)
    context_parallel_size = 2 if "--context-parallel-size 2" in parallel else 1
    assert_planned(ours, cap=SEQ_LENGTH * context_parallel_size)


def test_bf16_with_the_distributed_optimizer_and_overlap(tmp_path: Path) -> None:
    flags = f"{LAYERS} --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    stock = run(tmp_path / "stock", flags)
    ours = run(tmp_path / "ours", flags, BY_FLOPS)
    assert_equal(ours, reference=stock, precision="bf16")
    assert_planned(ours, cap=SEQ_LENGTH)
