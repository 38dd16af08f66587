"""Micro-batches with context-parallel sizes of their own train as they do at the static size."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attention_ranks
import pytest
from forked_runs import train
from rounding import assert_equal
from training_run import Recorded

from megatron_balance.record.run_record import read_record

NUM_STEPS = 4
FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --seq-length 1024 "
    f"--max-position-embeddings 1024 --train-iters {NUM_STEPS}"
)
LAYERS = "--num-layers 2 --global-batch-size 16"
BALANCED = "--use-dynamic-batch-size --balance-data --balance-by-flops"
STATIC = f"{BALANCED} --max-tokens-per-gpu 1024"
DYNAMIC = f"{BALANCED} --max-tokens-per-gpu 512 --balance-context-parallel"
CP2 = "--context-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPERT_BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"


def run(folder: Path, *flags: str, num_ranks: int, **how: Any) -> Recorded:
    return train(folder, " ".join((FLAGS, *flags)).split(), num_ranks=num_ranks, **how)


def sizes_that_ran(ours: Recorded) -> set[int]:
    return {size for steps in ours.ranks for step in steps for size in step["cp_sizes"]}


def case(flags: str, num_ranks: int, *, name: str, slow: bool = True) -> Any:
    return pytest.param(flags, num_ranks, id=name, marks=[pytest.mark.slow] if slow else [])


LAYOUTS = [
    case(f"{LAYERS} {CP2}", 4, name="DP2-CP2", slow=False),
    case(LAYERS, 4, name="DP4-CP1"),
    case(f"{LAYERS} --context-parallel-size 4", 4, name="DP1-CP4"),
    case(LAYERS, 8, name="DP8-CP1"),
    case("--num-layers 2 --global-batch-size 15", 3, name="DP3-CP1"),
    case(f"{LAYERS} {TP2_SP}", 4, name="TP2-SP-DP2"),
    case(f"{LAYERS} {TP2_SP} {CP2}", 8, name="TP2-SP-DP2-CP2"),
    case(f"{LAYERS} {PP2} {CP2}", 8, name="PP2-DP2-CP2"),
    case(
        f"--num-layers 4 --global-batch-size 16 {PP2} --num-layers-per-virtual-pipeline-stage 1 {CP2}",
        8,
        name="PP2-VPP2-DP2-CP2",
    ),
    case(f"{LAYERS} {CP2} {EXPERTS} --expert-model-parallel-size 2", 4, name="EP2-DP2-CP2"),
    case(f"{LAYERS} {EXPERTS} {EXPERT_BIAS} --expert-model-parallel-size 4", 4, name="EP4-expert-bias"),
    case(
        f"{LAYERS} {CP2} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        4,
        name="distributed-optimizer-overlap",
    ),
    case(f"{LAYERS} {CP2} {RECOMPUTED}", 4, name="recomputed"),
    case(
        f"{LAYERS} {CP2} --recompute-granularity selective --recompute-modules core_attn mlp",
        4,
        name="recomputed-in-parts",
    ),
    case(
        f"{LAYERS} {CP2} {EXPERTS} --expert-model-parallel-size 2 --recompute-granularity selective "
        "--recompute-modules core_attn moe",
        4,
        name="experts-recomputed-in-parts",
    ),
    case(f"{LAYERS} {CP2} --balance-shape-bucket 64", 4, name="shape-bucket"),
    case(f"{LAYERS} {CP2} --dataloader-inter-document-masking", 4, name="documents"),
    case(f"{LAYERS} --position-embedding-type learned_absolute", 4, name="learned-positions"),
]


@pytest.mark.parametrize(("flags", "num_ranks"), LAYOUTS)
def test_equal_to_static(tmp_path: Path, flags: str, num_ranks: int) -> None:
    """The planner's plans, and random ones, which have more groups and slots than a good plan."""
    static = run(tmp_path / "static", flags, STATIC, num_ranks=num_ranks)
    planned = run(tmp_path / "planned", flags, DYNAMIC, num_ranks=num_ranks)
    assert_equal(planned, reference=static)
    assert max(sizes_that_ran(planned)) > 1
    random = run(tmp_path / "random", flags, DYNAMIC, num_ranks=num_ranks, module="dynamic_steps")
    assert_equal(random, reference=static)
    assert len(sizes_that_ran(random)) > 1
    if PP2 not in flags and EXPERTS not in flags:
        assert any(len({step["num_microbatches"] for step in steps}) > 1 for steps in zip(*random.ranks, strict=True))


@pytest.mark.slow
def test_bf16_with_the_distributed_optimizer_and_overlap(tmp_path: Path) -> None:
    flags = f"{LAYERS} {CP2} --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    static = run(tmp_path / "static", flags, STATIC, num_ranks=4)
    for module in ("record_steps", "dynamic_steps"):
        ours = run(tmp_path / module, flags, DYNAMIC, num_ranks=4, module=module)
        assert_equal(ours, reference=static, precision="bf16")
        assert len(sizes_that_ran(ours)) > 1


ROUTED = (
    f"{LAYERS} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1 --moe-z-loss-coeff 1e-2 --log-interval 1"
)


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [
        case(CP2, 4, name="DP2-CP2", slow=False),
        case("", 4, name="DP4"),
        case(f"{CP2} --moe-router-load-balancing-type seq_aux_loss {RECOMPUTED}", 4, name="seq-recomputed"),
        case(f"{PP2} {CP2}", 8, name="PP2-DP2-CP2"),
        case(f"{TP2_SP} --expert-tensor-parallel-size 1 {CP2}", 8, name="TP2-SP-DP2-CP2"),
    ],
)
def test_router_losses_are_those_of_static_sizes(tmp_path: Path, flags: str, num_ranks: int) -> None:
    """An auxiliary loss depends on which samples share a micro-batch: each runs alone."""
    static = run(tmp_path / "static", ROUTED, flags, "--balance-data", num_ranks=num_ranks)
    alone = {"MOST_SAMPLES": "1"}
    ours = run(
        tmp_path / "ours", ROUTED, flags, DYNAMIC, num_ranks=num_ranks, module="dynamic_steps", environment=alone
    )
    assert_equal(ours, reference=static)
    assert len(sizes_that_ran(ours)) > 1
    logged = [_logged_losses(tmp_path / folder / f"rank{num_ranks - 1}.log") for folder in ("static", "ours")]
    assert logged[1] == pytest.approx(logged[0], rel=1e-5)
    assert len(set(logged[0]) - {0.0}) == NUM_STEPS


def _logged_losses(log: Path) -> list[float]:
    """Auxiliary losses as Megatron logs them, of all micro-batches."""
    return [float(loss) for loss in re.findall(r"load_balancing_loss: (\S+)", log.read_text(errors="replace"))]


def test_a_limit_and_look_ahead(tmp_path: Path) -> None:
    flags = f"{LAYERS} --balance-lookahead 2"
    static = run(tmp_path / "static", flags, STATIC, num_ranks=4)
    ours = run(tmp_path / "ours", flags, f"{DYNAMIC} 2", num_ranks=4)
    assert_equal(ours, reference=static)
    assert sizes_that_ran(ours) == {1, 2}


def test_the_record_and_the_log_have_the_sizes(tmp_path: Path) -> None:
    flags = f"{LAYERS} {CP2} --log-interval 1 --balance-record {tmp_path}/record --tensorboard-dir {tmp_path}/scalars"
    ours = run(tmp_path / "ours", flags, DYNAMIC, num_ranks=4, module="dynamic_steps")
    record = read_record(tmp_path / "record")
    assert [step.iteration for step in record.steps] == list(range(1, NUM_STEPS + 1))
    written = [json.loads(line) for line in (tmp_path / "scalars" / "rank3.jsonl").read_text().splitlines()]
    for index, step in enumerate(record.steps):
        assert step.cp_sizes is not None
        ran = [steps[index]["cp_sizes"] for steps in ours.ranks]
        assert [[size for size in sizes if size] for sizes in step.cp_sizes.tolist()] == ran
        assert ((step.seconds > 0) == (step.cp_sizes > 0)).all()
        scalars = {row["name"]: row["value"] for row in written if row["step"] == step.iteration}
        sizes = step.cp_sizes.ravel()[step.slot_of]
        shares = {size: float(step.lengths[sizes == size].sum() / step.lengths.sum()) for size in (1, 2, 4)}
        for size, share in shares.items():
            assert scalars[f"balance/tokens_at_cp_{size}"] == pytest.approx(share)
        mean = sum(size * share for size, share in shares.items())
        assert scalars["balance/mean_cp_size"] == pytest.approx(mean)
        assert f"context-parallel size {mean:.2f} " in (tmp_path / "ours" / "rank0.log").read_text()


def test_evaluation_after_training_steps_is_the_static_one(tmp_path: Path) -> None:
    flags = f"{LAYERS} {CP2} --eval-iters 2 --eval-interval 2"
    static = run(tmp_path / "static", flags, STATIC, "--no-balance-evaluation", num_ranks=4)
    ours = run(tmp_path / "ours", flags, DYNAMIC, num_ranks=4)
    assert ours.output.count("evaluation is Megatron's own: it runs at --context-parallel-size") == 1
    assert_equal(ours, reference=static)
    losses = [_evaluated(tmp_path / folder) for folder in ("static", "ours")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def _evaluated(folder: Path) -> list[str]:
    """Lines of evaluation, which the last rank prints."""
    lines = (folder / "rank3.log").read_text(errors="replace").splitlines()
    return [line.split("| lm loss PPL")[0] for line in lines if "loss at iteration" in line]


@pytest.mark.slow
def test_collectives_match_on_every_rank(tmp_path: Path) -> None:
    strict = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    run(tmp_path, LAYERS, CP2, DYNAMIC, num_ranks=4, module="dynamic_steps", environment=strict)


@pytest.mark.parametrize(
    ("num_plans", "num_ranks", "cp_size"),
    [
        (40, 4, 2),
        pytest.param(100, 3, 1, marks=pytest.mark.slow),
        pytest.param(400, 8, 2, marks=pytest.mark.slow),
    ],
)
def test_attention_of_random_plans_is_that_of_one_rank(
    tmp_path: Path, num_plans: int, num_ranks: int, cp_size: int
) -> None:
    flags = f"--num-plans {num_plans} --context-parallel-size {cp_size}".split()
    ranks = train(tmp_path, flags, num_ranks=num_ranks, module="attention_ranks").ranks
    rows = [row for [row] in ranks]
    assert all(row["worst"] < attention_ranks.TOLERANCE for row in rows)
    assert all(sum(row["groups"][level] for row in rows) > num_plans for level in range(len(rows[0]["groups"])))
    assert sum(row["tokens"] for row in rows) > 100 * num_plans
