"""Options of Megatron that are supported: balanced runs with them, against stock ones."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_runs import train
from rounding import assert_equal
from training_run import Recorded, RunFailed, largest_difference

pytestmark = pytest.mark.slow
NUM_STEPS = 3
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 512 "
    f"--max-position-embeddings 512 --train-iters {NUM_STEPS}"
)
BATCH = "--global-batch-size 16"
GROUPED = "--num-query-groups 2"
BALANCED = "--use-dynamic-batch-size --max-tokens-per-gpu 512 --balance-data --balance-by-flops"
EXPERTS = "--num-experts 4 --moe-router-topk 2"
NO_AUXILIARY = "--moe-router-load-balancing-type none"
ALLTOALL = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
SHARDED = "--untie-embeddings-and-output-weights"
SEVERAL_CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""Frameworks of sharded parameters refuse 1, which the other tests set."""


def run(folder: Path, flags: str, **how: Any) -> Recorded:
    return train(folder, f"{MODEL} {flags}".split(), **{"num_ranks": 2} | how)


def stock_and_balanced(
    folder: Path, flags: str, *, base: str = f"{BATCH} {GROUPED}", **how: Any
) -> tuple[Recorded, Recorded]:
    stock = run(folder / "stock", f"{base} {flags}", **how)
    ours = run(folder / "ours", f"{base} {flags} {BALANCED}", **how)
    assert any("ranks" in step for steps in ours.ranks for step in steps), "it was not balanced"
    return stock, ours


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [
        pytest.param(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --window-size 64,0 "
            "--window-attn-skip-freq 2 --position-embedding-type learned_absolute --dataloader-type cyclic "
            "--untie-embeddings-and-output-weights --micro-batch-size 2",
            2,
            id="recomputed-windowed-cyclic",
        ),
        pytest.param(
            "--recompute-granularity selective --recompute-modules core_attn mlp --window-size 64,0",
            2,
            id="recomputed-in-parts",
        ),
        pytest.param(
            "--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1 --distribute-saved-activations",
            4,
            id="TP2-saved-activations-distributed",
        ),
        pytest.param(
            "--pipeline-model-parallel-size 2 --num-layers 3 --decoder-first-pipeline-num-layers 1 "
            "--use-tp-pp-dp-mapping",
            4,
            id="PP2-uneven-in-another-order-of-ranks",
        ),
        pytest.param(
            "--pipeline-model-parallel-size 2 --num-layers 4 --pipeline-model-parallel-layout Et|t|tt|L "
            "--overlap-p2p-communication-warmup-flush",
            4,
            id="PP2-VPP2-by-a-layout-overlapped-at-both-ends",
        ),
        pytest.param(
            f"{EXPERTS} {ALLTOALL} {NO_AUXILIARY} --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
            "--moe-z-loss-coeff 0.1",
            2,
            id="EP2-expert-bias-z-loss",
        ),
    ],
)
def test_options_that_change_no_loss(tmp_path: Path, flags: str, num_ranks: int) -> None:
    stock, ours = stock_and_balanced(tmp_path, flags, num_ranks=num_ranks)
    assert_equal(ours, reference=stock)
    assert "WARNING: --" not in ours.output


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1", id="TP2-SP-ETP1"
        ),
        pytest.param("--context-parallel-size 2 --expert-model-parallel-size 2", id="CP2-EP2"),
    ],
)
def test_the_default_dispatcher_within_a_replica(tmp_path: Path, layout: str) -> None:
    stock, ours = stock_and_balanced(tmp_path, f"{EXPERTS} {NO_AUXILIARY} {layout}", num_ranks=4)
    assert_equal(ours, reference=stock)


def test_fp16_with_loss_scaling(tmp_path: Path) -> None:
    """The loss is summed over tokens, so scales are small; the first steps overflow and are skipped by both."""
    stock, ours = stock_and_balanced(tmp_path, "--fp16 --initial-loss-scale 64 --loss-scale-window 2 --hysteresis 1")
    skipped = [step["grad_norm"] is None for step in stock.steps]
    assert set(skipped) == {True, False}
    assert [step["grad_norm"] is None for step in ours.steps] == skipped
    assert_equal(_trained(ours), reference=_trained(stock), precision="fp16")


def _trained(run: Recorded) -> Recorded:
    """The steps that were not skipped."""
    return replace(run, ranks=[[step for step in run.steps if step["grad_norm"] is not None]])


def test_multi_latent_attention(tmp_path: Path) -> None:
    flags = "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"
    stock, ours = stock_and_balanced(
        tmp_path, f"{flags} --rope-type rope", base=BATCH, leave_out={"--group-query-attention"}
    )
    assert_equal(ours, reference=stock)


@pytest.mark.parametrize(
    ("flags", "precision"),
    [
        pytest.param("--use-torch-fsdp2 --ckpt-format torch_dist", "fp32", id="torch"),
        pytest.param(
            "--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params "
            "--ckpt-format fsdp_dtensor --bf16",
            "bf16",
            id="megatron",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("einops") is None, reason="Megatron-FSDP needs einops, which is not installed"
            ),
        ),
    ],
)
def test_sharded_parameters(tmp_path: Path, flags: str, precision: str) -> None:
    stock, ours = stock_and_balanced(tmp_path, f"{flags} {SHARDED}", environment=SEVERAL_CONNECTIONS)
    assert_equal(ours, reference=stock, precision=precision)
    planned = next(steps for steps in ours.ranks if "ranks" in steps[0])
    for step in planned:  # parameters are gathered in every micro-batch by all ranks
        assert {len(slots) for slots in step["ranks"]} == {step["num_microbatches"]}


def test_a_batch_that_grows_and_steps_that_are_skipped(tmp_path: Path) -> None:
    """Of five steps the fourth is skipped; the batch has grown before the third (thresholds are tokens)."""
    model = MODEL.replace(f"--train-iters {NUM_STEPS}", "--train-samples 64")
    growing = ["--step-batch-size-schedule", "0:8 8192:16", "--iterations-to-skip", "4"]
    stock, ours = (
        train(tmp_path / name, [*f"{model} {GROUPED} {more}".split(), *growing], num_ranks=2)
        for name, more in (("stock", ""), ("ours", BALANCED))
    )
    assert_equal(ours, reference=stock)
    planned = next(steps for steps in ours.ranks if "ranks" in steps[0])
    assert [len(step["lengths"]) for step in planned] == [8, 8, 16, 16]


def test_a_run_ends_with_its_phase(tmp_path: Path) -> None:
    """The data of a phase ends with it; what is prepared ahead of its last step asks for more."""
    flags = MODEL.replace(f"--train-iters {NUM_STEPS}", "--train-samples 64 --phase-transition-iterations 2")
    stock, ours = (
        train(tmp_path / name, f"{flags} {BATCH} {GROUPED} {more}".split(), num_ranks=2)
        for name, more in (("stock", ""), ("ours", BALANCED))
    )
    assert len(stock.steps) == 2
    assert_equal(ours, reference=stock)


def test_a_step_that_is_run_again(tmp_path: Path) -> None:
    """Megatron calls a loss wrong that is not, runs the step again to see, and ends the run: it comes out the same."""
    flags = "--rerun-mode validate_results --error-injection-rate 2 --error-injection-type correct_result"
    flags += " --save-interval 100"
    with pytest.raises(RunFailed, match="ended with 16"):  # to go on from its checkpoint on another device
        run(tmp_path / "ours", f"{BATCH} {GROUPED} {BALANCED} {flags} --ckpt-format torch --save {tmp_path}")
    logs = "".join((tmp_path / "ours" / f"rank{rank}.log").read_text() for rank in range(2))
    assert "First rerun: unexpected result is reproducible within the tolerance" in logs
    assert "is not reproducible" not in logs


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param(
            f"{EXPERTS} {ALLTOALL} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01",
            ("--moe-aux-loss-coeff is 0.01 with",),
            id="auxiliary-losses",
        ),
        pytest.param(
            f"{EXPERTS} {ALLTOALL} {NO_AUXILIARY} --moe-input-jitter-eps 0.01 --hidden-dropout 0.1 "
            "--check-for-spiky-loss",
            ("--moe-input-jitter-eps is 0.01", "--hidden-dropout is 0.1", "--check-for-spiky-loss is set"),
            id="random-numbers",
        ),
    ],
)
def test_options_whose_figures_depend_on_the_grouping(tmp_path: Path, flags: str, said: tuple[str, ...]) -> None:
    """It trains on, the figures move as is said, and by less than the weight of the loss or the noise that is added."""
    stock, ours = stock_and_balanced(tmp_path, flags)
    assert 0 < largest_difference(ours, reference=stock, key="lm_loss") < 0.01
    for words in said:
        assert ours.output.count(f"megatron_balance: WARNING: {words}") == 1
    assert ours.output.count("megatron_balance: WARNING: --") == len(said)
    assert "megatron_balance:" not in stock.output
