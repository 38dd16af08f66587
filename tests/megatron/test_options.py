"""The tables of Megatron's options: each row says what it must, and applies to the command line that it is about."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest

from megatron_balance import BalanceError
from megatron_balance.mcore.options import conditions
from megatron_balance.mcore.options.balance_flags import BALANCE_FLAGS
from megatron_balance.mcore.options.option import Option, Support, flag_of
from megatron_balance.mcore.options.table import SUBJECTS, cautions, problems, stock_notice, why_stock
from megatron_balance.mcore.setup.flags import add_flags
from megatron_balance.mcore.setup.run_setup import agreed_run
from megatron_balance.mcore.wrappers import with_options_checked

ROOT = Path(__file__).parents[2]
ROWS = [row for subject in SUBJECTS.values() for row in subject]
BALANCED = "--balance-data --calculate-per-token-loss --attention-dropout 0 --hidden-dropout 0"
EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall"
SIZED = "--balance-context-parallel --use-dynamic-batch-size --max-tokens-per-gpu 4096"
UNPADDED = "--balance-unpad 0 --no-create-attention-mask-in-dataloader"
FLEX = "--num-experts 4 --moe-token-dispatcher-type flex"
DOCUMENTS = "--dataloader-inter-document-masking --pipeline-model-parallel-size 4"

REFUSED = [
    "--tp-comm-overlap",
    "--cp-comm-type a2a --context-parallel-size 2",
    "--cp-comm-type p2p all_gather --context-parallel-size 2",
    "--hierarchical-context-parallel-sizes 2 2 --context-parallel-size 4",
    "--use-ring-exchange-p2p --pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-comm-backend ucc --pipeline-model-parallel-size 2",
    f"--expert-tensor-parallel-size 2 {EXPERTS}",
    "--tensor-parallel-num-weight-shards 4",
    "--expert-tensor-parallel-num-weight-shards 2",
    "--fake-process-group",
    "--moe-token-dispatcher-type allgather --num-experts 4 --expert-model-parallel-size 2",
    f"--moe-flex-dispatcher-backend hybridep {FLEX}",
    f"--moe-flex-dispatcher-backend ncclep {FLEX}",
    f"--moe-expert-capacity-factor 1.0 {EXPERTS}",
    f"--moe-expert-rank-capacity-factor 1.5 {EXPERTS}",
    f"--moe-paged-stash {EXPERTS}",
    f"--moe-router-load-balancing-type sinkhorn {EXPERTS}",
    f"--moe-router-load-balancing-type quantile_balancing {EXPERTS}",
    f"--moe-enable-routing-replay {EXPERTS}",
    f"--overlap-moe-expert-parallel-comm {EXPERTS}",
    "--window-size 64,0 --context-parallel-size 2",
    "--attention-backend unfused",
    "--attention-backend local",
    "--transformer-impl local --seq-length 8",
    "--softmax-type learnable",
    "--qk-clip",
    "--log-max-attention-logit",
    "--position-embedding-type relative",
    "--position-embedding-type mrope",
    "--use-kitchen-attention",
    "--experimental-attention-variant dsa",
    "--experimental-attention-variant gated_delta_net",
    "--hybrid-override-pattern M*M-",
    "--hybrid-layer-pattern M*M-",
    "--fp8-recipe custom --fp8-format e4m3",
    "--fp4-recipe custom --fp4-format e2m1",
    "--te-precision-config-file recipes.yaml",
    "--cpu-offloading-num-layers 1",
    "--fine-grained-activation-offloading",
    "--rampup-batch-size 8 8 16 --balance-lookahead 2",
    "--multiple-validation-sets --full-validation --num-layers-per-virtual-pipeline-stage 1",
    "--full-validation --multiple-validation-sets --dataloader-inter-document-masking --pipeline-model-parallel-size 4",
    "--step-batch-size-schedule 0:8 --balance-lookahead 2",
    "--iterations-to-skip 3 --balance-lookahead 2",
    "--phase-transition-iterations 3 --balance-lookahead 2",
    "--non-persistent-save-interval 5 --balance-lookahead 2",
    "--reset-attention-mask",
    f"{DOCUMENTS} --balance-load-every-stage",
    f"{DOCUMENTS} --balance-calibrate-online",
    f"{DOCUMENTS} --mtp-num-layers 1 --pipeline-model-parallel-layout E|t|t|tmL",
    f"{DOCUMENTS} --eval-iters 10 --no-balance-evaluation",
    "--inprocess-restart",
    "--perform-rl-step",
    "--perform-rl-step --rl-use-sequence-packing --use-dynamic-batch-size --max-tokens-per-gpu 4096",
    "--logits-load-dir teacher",
    "--yaml-cfg options.yaml",
    "--balance-unpad 0",
    f"--context-parallel-size 2 {UNPADDED}",
    f"{SIZED} --transformer-impl local --spec my_layers spec {UNPADDED}",
    f"--multi-latent-attention {SIZED}",
    f"--mtp-num-layers 1 {SIZED}",
    f"--window-size 64,0 {SIZED}",
    f"--cp-comm-type a2a {SIZED}",
    f"--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01 {SIZED} {EXPERTS}",
    f"--recompute-modules moe --recompute-granularity selective --moe-aux-loss-coeff 0.01 {SIZED} {EXPERTS}",
    f"--moe-layer-recompute --moe-aux-loss-coeff 0.01 {SIZED} {EXPERTS}",
    f"--moe-token-dispatcher-type allgather --num-experts 4 --expert-model-parallel-size 2 "
    f"--context-parallel-size 2 {SIZED}",
    f"--use-megatron-fsdp {SIZED}",
    f"--use-torch-fsdp2 {SIZED}",
    f"--balance-objective step {SIZED}",
    f"--balance-shape-bucket 3 {SIZED}",
    f"--balance-algorithm greedy {SIZED}",
]
STOCK = [
    "--perform-rl-step --rl-use-sequence-packing",
    "--hybrid-context-parallel",
    "--cuda-graph-impl local",
    "--enable-cuda-graph",
    "--external-cuda-graph",
]
CAUTIONED = [
    f"--transformer-impl transformer_engine {SIZED}",
    "--moe-token-dispatcher-type flex --num-experts 4",
    f"--moe-flex-dispatcher-backend hybridep --moe-hybridep-pad-uneven-dispatch-inputs {FLEX}",
    f"--moe-aux-loss-coeff 0.01 {EXPERTS}",
    f"--moe-z-loss-coeff 0.01 {EXPERTS} {UNPADDED}",
    f"--moe-aux-loss-coeff 0 0.01 --moe-router-load-balancing-type aux_loss global_aux_loss {EXPERTS}",
    "--mtp-num-layers 1",
    f"--moe-input-jitter-eps 0.01 {EXPERTS}",
    "--attention-dropout 0.1",
    "--hidden-dropout 0.1 --attention-dropout 0",
    "--dataloader-type external",
    "--fp8-format e4m3",
    "--fp4-format e2m1",
    "--check-for-spiky-loss",
    "--dataloader-inter-document-masking --context-parallel-size 2 --eval-iters 10 --no-balance-evaluation",
    "--fine-grained-activation-offloading --balance-shape-bucket 1024",
]
ORDINARY = [
    "",
    UNPADDED,
    f"{UNPADDED} {EXPERTS}",
    f"{SIZED} --transformer-impl local --spec my_layers spec",
    f"{SIZED} --transformer-impl local --spec my_layers spec {EXPERTS} --expert-model-parallel-size 2",
    "--context-parallel-size 2",
    "--cp-comm-type a2a",
    "--window-size 64,0",
    "--pipeline-model-parallel-comm-backend nccl --pipeline-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--tensor-parallel-num-weight-shards 1",
    f"{EXPERTS} --expert-model-parallel-size 2",
    f"{EXPERTS} --moe-router-load-balancing-type none --moe-router-enable-expert-bias",
    "--moe-aux-loss-coeff 0.01",
    f"--moe-z-loss-coeff 0.001 {EXPERTS}",
    "--rampup-batch-size 8 8 16",
    "--full-validation --multiple-validation-sets --eval-micro-batch-size 2",
    "--skip-train",
    "--non-persistent-save-interval 5",
    "--transformer-impl local --spec my_layers spec",
    "--attention-backend flash --softmax-type vanilla --bf16",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--sft --reset-position-ids",
    "--dataloader-inter-document-masking --context-parallel-size 2 --eval-iters 0",
    "--dataloader-inter-document-masking --pipeline-model-parallel-size 2 --balance-load-every-stage",
    f"{DOCUMENTS} --eval-iters 10",
    f"{DOCUMENTS} --eval-iters 0 --no-balance-evaluation",
    "--sft --dataloader-inter-document-masking --context-parallel-size 2 --pipeline-model-parallel-size 4",
    "--hybrid-layer-pattern *-*-",
]
NO_BALANCE_FLAGS: dict[str, Any] = {
    "balance_by_flops": False,
    "balance_calibrate_online": False,
    "balance_context_parallel": None,
    "balance_evaluation": None,
    "balance_exchange": "gloo",
    "balance_lookahead": 1,
    "balance_record": None,
    "balance_shape_bucket": 1,
    "balance_unpad": None,
}
OTHER_RELEASES: list[dict[str, Any]] = [
    {"cp_partition_mode": "contiguous", "context_parallel_size": 2},
    {"sequence_packing_scheduler": "dp_balanced"},
    {"dynamic_context_parallel": True},
    {"use_varlen_dataset": True},
    {"use_legacy_models": True},
    {"mtp_standalone": True},
    {"dataloader_save": "states"},
    {"export_kd_teacher_load": "teacher"},
]
"""Options that the installed release does not have."""


def parsed(flags: str, **others: object) -> Any:
    args = megatron_parser().parse_args(f"{BALANCED} {flags}".split())
    vars(args).update(others)
    return args


@functools.cache
def megatron_parser() -> argparse.ArgumentParser:
    """Megatron's and ours, unchecked; made once, for it takes a second."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(inspect.unwrap(add_megatron_arguments)(parser))
    return parser


def first_flag(flags: str) -> str:
    return flags.split()[0]


@pytest.mark.parametrize("flags", REFUSED)
def test_what_is_refused_names_the_option_its_value_and_the_remedy(flags: str) -> None:
    args = parsed(flags)
    [problem] = [problem for problem in problems(args) if problem.startswith(f"{first_flag(flags)} is ")]
    assert "; " in problem
    assert problem.endswith(".")
    assert not any(name in problem.split(":")[0] for name in ("None", "[", "<"))


def test_a_restart_within_the_process_is_refused_before_it_is_set_up() -> None:
    set_up: list[Any] = []
    wrapper = with_options_checked(lambda train, args: set_up.append(args))
    with pytest.raises(BalanceError, match=r"--inprocess-restart is .*restart processes"):
        wrapper(print, parsed("--inprocess-restart"))
    assert not set_up
    stock = parsed("--inprocess-restart", balance_data=False)
    wrapper(print, stock)
    assert set_up == [stock]


@pytest.mark.parametrize("flags", STOCK)
def test_what_stays_stock_says_why(flags: str) -> None:
    args = parsed(flags)
    assert problems(args) == []
    assert first_flag(flags) in (why_stock(args) or "")


@pytest.mark.parametrize(
    ("others", "opening"),
    [
        ({"dynamic_context_parallel": True}, "Megatron's own executor runs this package's plan. --dynamic-context"),
        ({"dynamic_context_parallel": True, "balance_data": False}, "training continues without balancing. --dynamic"),
        ({"hybrid_context_parallel": True}, "training continues without balancing. --hybrid-context-parallel"),
    ],
)
def test_the_log_of_a_stock_run_says_whose_plan_it_follows(others: dict[str, bool], opening: str) -> None:
    args = parsed("--use-dynamic-batch-size --max-tokens-per-gpu 64", **others)
    reason = why_stock(args)
    assert reason is not None
    assert stock_notice(args, reason=reason).startswith(opening)


@pytest.mark.parametrize("flags", CAUTIONED)
def test_what_should_be_known_is_said(flags: str) -> None:
    args = parsed(flags)
    assert problems(args) == []
    [caution] = cautions(args)
    assert caution.startswith(f"{first_flag(flags)} is ")


@pytest.mark.parametrize("flags", ORDINARY)
def test_ordinary_runs_are_left_alone(flags: str) -> None:
    args = parsed(flags)
    assert (problems(args), why_stock(args), cautions(args)) == ([], None, [])


@pytest.mark.parametrize("flags", [*REFUSED, *STOCK, *CAUTIONED])
def test_a_run_that_does_not_balance_is_none_of_our_business(flags: str) -> None:
    args = parsed(flags, balance_data=False, use_dynamic_batch_size=False, **NO_BALANCE_FLAGS)
    assert (problems(args), why_stock(args), cautions(args)) == ([], None, [])


@pytest.mark.parametrize(
    ("engine", "refused", "cautioned"),
    [("1.13.0", True, False), ("2.2.0+abc", True, False), ("2.3.0", False, True), ("2.8.0", False, True)]
    + [(version, False, False) for version in ("2.9.0", "2.20.2", "3.0")],
)
def test_the_release_of_transformer_engine_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, engine: str, refused: bool, cautioned: bool
) -> None:
    monkeypatch.setattr(conditions.metadata, "version", lambda name: engine)
    args = parsed("")
    assert any("install transformer-engine 2.3 or newer" in problem for problem in problems(args)) is refused
    assert any("before 2.9" in caution for caution in cautions(args)) is cautioned
    assert problems(parsed("--transformer-impl local --spec module function")) == []


def test_every_row_that_says_something_was_shown_to_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [parsed(flags) for flags in (*REFUSED, *STOCK, *CAUTIONED)]
    shown += [parsed("", **others) for others in OTHER_RELEASES]
    shown.append(parsed("", calculate_per_token_loss=False))
    silent = [row for row in ROWS if row.when is not None and not any(map(row.applies, shown))]
    for engine in ("2.2.0", "2.3.0"):
        monkeypatch.setattr(conditions.metadata, "version", lambda name, engine=engine: engine)
        silent = [row for row in silent if not row.applies(parsed(""))]
    monkeypatch.setattr(conditions.metadata, "version", lambda name: "0.18.2")
    silent = [row for row in silent if not row.applies(parsed(SIZED))]
    assert [f"{flag_of(row.names[0])} {row.case}" for row in silent] == []


def test_tests_that_rows_name_exist() -> None:
    for row in ROWS:
        if row.support is Support.SUPPORTED:
            path, _, name = row.test.partition("::")
            tree = ast.parse((ROOT / path).read_text())
            found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert name in found, f"{row.names}: there is no {row.test}"


def test_flags_of_rows_are_those_of_megatron() -> None:
    flags = {action.dest: action.option_strings for action in megatron_parser()._actions}
    for name in {name for row in (*BALANCE_FLAGS, *ROWS) for name in (*row.names, *row.also)} & set(flags):
        assert flag_of(name) in flags[name]


@pytest.mark.parametrize(
    "wrong",
    [
        {"support": Support.SUPPORTED},
        {"support": Support.REFUSED, "because": "it cannot", "when": bool},
        {"support": Support.REFUSED, "because": "it cannot", "remedy": "drop it"},
        {"support": Support.STOCK, "test": "tests/test_docs.py::test_links_lead_somewhere", "when": bool},
        {"support": Support.SUPPORTED, "test": "tests/test_docs.py::test_links_lead_somewhere", "caution": "beware"},
    ],
)
def test_there_is_no_fourth_kind(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="seed"):
        Option(names=("seed",), **wrong)


def test_what_is_set_after_parsing_is_refused_before_the_first_step() -> None:
    """By Megatron's validation, or a checkpoint's own arguments."""
    args = parsed("")
    args.tp_comm_overlap = True
    with pytest.raises(BalanceError, match="--tp-comm-overlap is set: its buffers are sized once"):
        agreed_run(args)
