"""Which of Megatron's options balancing refuses, cautions about, or takes as they are.

Command lines go through Megatron's own parser with `add_balance_args`; each begins with the option that it is about.
"""

from __future__ import annotations

import argparse
import functools
import re
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
from make_pages import PAGES

from megatron_balance import BalanceError, ModelShape
from megatron_balance.mcore import add_balance_args, cautions
from megatron_balance.mcore.setup.settings import topology_of
from megatron_balance.planner import resolve_objective

SHAPE = ModelShape.preset("Qwen3-8B")
BALANCED = "--balance-data --calculate-per-token-loss --attention-dropout 0 --hidden-dropout 0"
EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall"
PACKED = "--use-dynamic-batch-size --max-tokens-per-gpu 4096"
SIZED = f"--balance-dynamic-cp {PACKED}"
ON_CPU = f"{SIZED} --transformer-impl local --spec my_layers spec"
UNPADDED = "--balance-unpad 0 --no-create-attention-mask-in-dataloader"
FLEX = "--num-experts 4 --moe-token-dispatcher-type flex"
DOCUMENTS = "--dataloader-inter-document-masking --pipeline-model-parallel-size 4"
ALLGATHER = "--moe-token-dispatcher-type allgather --num-experts 4"

REFUSED = [
    "--hybrid-context-parallel",
    "--cuda-graph-impl local",
    "--enable-cuda-graph",
    "--external-cuda-graph",
    "--sequence-packing-scheduler dp_balanced",
    "--tp-comm-overlap",
    "--use-ring-exchange-p2p --pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-comm-backend ucc --pipeline-model-parallel-size 2",
    f"--expert-tensor-parallel-size 2 {EXPERTS}",
    "--tensor-parallel-num-weight-shards 4",
    "--cp-partition-mode contiguous --context-parallel-size 2",
    "--expert-tensor-parallel-num-weight-shards 2",
    "--fake-process-group",
    f"{ALLGATHER} --expert-model-parallel-size 2",
    f"{ALLGATHER} --tensor-model-parallel-size 2 --context-parallel-size 3 --expert-model-parallel-size 2",
    f"--moe-flex-dispatcher-backend hybridep {FLEX}",
    f"--moe-flex-dispatcher-backend ncclep {FLEX}",
    f"--moe-expert-capacity-factor 1.0 {EXPERTS}",
    f"--moe-expert-rank-capacity-factor 1.5 {EXPERTS}",
    f"--moe-paged-stash {EXPERTS}",
    f"--moe-router-load-balancing-type sinkhorn {EXPERTS}",
    f"--overlap-moe-expert-parallel-comm --moe-aux-loss-coeff 0.01 {EXPERTS}",
    f"--overlap-moe-expert-parallel-comm {SIZED} {EXPERTS}",
    f"--overlap-moe-expert-parallel-comm --balance-loss-weighting sample --mtp-num-layers 1 {EXPERTS}",
    "--window-size 64,0 --context-parallel-size 2",
    "--attention-backend unfused",
    "--transformer-impl local --seq-length 8",
    "--softmax-type learnable --context-parallel-size 2",
    f"--softmax-type learnable {SIZED}",
    "--qk-clip",
    "--log-max-attention-logit",
    "--position-embedding-type relative",
    "--position-embedding-type mrope",
    "--position-embedding-type mrope --no-rope-fusion --context-parallel-size 2",
    "--use-kitchen-attention",
    "--mtp-standalone",
    "--use-legacy-models",
    "--experimental-attention-variant dsa --dsa-indexer-loss-coeff 0.01",
    "--experimental-attention-variant gated_delta_net --deterministic-mode",
    "--hybrid-layer-pattern M*M- --disable-mamba-mem-eff-path",
    "--fp8-recipe custom --fp8-format e4m3",
    "--fp4-recipe custom --fp4-format e2m1",
    "--te-precision-config-file recipes.yaml",
    "--cpu-offloading-num-layers 1",
    "--fine-grained-activation-offloading",
    "--multiple-validation-sets --full-validation --num-layers-per-virtual-pipeline-stage 1",
    "--full-validation --multiple-validation-sets --dataloader-inter-document-masking --pipeline-model-parallel-size 4",
    "--reset-attention-mask",
    f"{DOCUMENTS} --mtp-num-layers 1 --pipeline-model-parallel-layout E|t|t|tmL",
    f"{DOCUMENTS} --eval-iters 10 --no-balance-evaluation",
    "--inprocess-restart",
    "--perform-rl-step",
    "--logits-load-dir teacher",
    "--yaml-cfg options.yaml",
    "--dataloader-save states",
    "--export-kd-teacher-load teacher",
    "--balance-unpad 0",
    f"--context-parallel-size 2 {UNPADDED}",
    f"--softmax-type off-by-one --cp-comm-type a2a {SIZED}",
    f"--recompute-modules core_attn mla_up_proj --multi-latent-attention {SIZED}",
    f"--recompute-modules gdn_norm_out --experimental-attention-variant gated_delta_net {SIZED}",
    f"--window-size 64,0 {SIZED}",
    f"--cp-comm-type all_gather {SIZED}",
    f"--cp-comm-type allgather {SIZED}",
    f"--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01 {SIZED} {EXPERTS}",
    f"--recompute-modules moe --recompute-granularity selective --moe-aux-loss-coeff 0.01 {SIZED} {EXPERTS}",
    f"--moe-layer-recompute --moe-aux-loss-coeff 0.01 {SIZED} {EXPERTS}",
    f"{ALLGATHER} --expert-model-parallel-size 2 --context-parallel-size 2 {SIZED}",
    f"--balance-objective step {SIZED}",
    f"--balance-shape-bucket 3 {SIZED}",
    f"--balance-algorithm karmarkar_karp {SIZED}",
    f"--balance-unpad 0 --no-create-attention-mask-in-dataloader {SIZED}",
    "--balance-cost flops",
    "--balance-cost seconds.json --balance-data",
    f"--balance-attention-rate 1 {PACKED}",
    f"--balance-attention-rate 1 --balance-cost seconds.json {PACKED}",
    f"--balance-fsdp-bandwidth 50 {PACKED}",
    "--balance-dynamic-cp",
    "--balance-dynamic-cp --no-balance-data --use-dynamic-batch-size --max-tokens-per-gpu 4096",
    "--max-tokens-per-gpu 0 --use-dynamic-batch-size",
    f"--balance-shape-bucket 0 {PACKED}",
    f"--balance-evaluation {SIZED}",
    "--balance-verify --hidden-dropout 0.1",
    f"--balance-verify --moe-input-jitter-eps 0.01 {EXPERTS}",
    "--balance-verify --fp8-format e4m3",
    "--balance-verify --balance-loss-weighting sample",
    "--balance-verify --use-torch-fsdp2",
    "--balance-verify --num-distributed-optimizer-instances 2",
    f"--balance-verify --overlap-moe-expert-parallel-comm {EXPERTS}",
    "--balance-verify --experimental-attention-variant dsa",
    "--balance-verify --dataloader-inter-document-masking --context-parallel-size 2",
]
WITHOUT_BALANCING = [
    "--balance-shape-bucket 128",
    "--balance-unpad 0",
    "--balance-record r",
    "--balance-evaluation",
    "--balance-verify",
    "--balance-loss-weighting sample",
    "--balance-cost flops",
]
"""Flags that refine balancing, alone."""

CAUTIONED = [
    f"--transformer-impl transformer_engine {SIZED}",
    f"--moe-enable-routing-replay {EXPERTS}",
    f"--balance-loss-weighting sample --moe-z-loss-coeff 1e-3 {EXPERTS}",
    "--moe-token-dispatcher-type flex --num-experts 4",
    "--moe-token-dispatcher-type flex --num-experts 4 --moe-flex-dispatcher-backend hybridep "
    "--moe-hybridep-pad-uneven-dispatch-inputs",
    f"--moe-aux-loss-coeff 0.01 {EXPERTS}",
    f"--moe-z-loss-coeff 0.01 {EXPERTS} {UNPADDED}",
    f"--moe-aux-loss-coeff 0 0.01 --moe-router-load-balancing-type aux_loss global_aux_loss {EXPERTS}",
    "--mtp-num-layers 1",
    f"--use-megatron-fsdp {ON_CPU}",
    f"--use-torch-fsdp2 {ON_CPU}",
    f"--moe-input-jitter-eps 0.01 {EXPERTS}",
    "--experimental-attention-variant dsa",
    "--softmax-type learnable",
    "--attention-dropout 0.1",
    "--hidden-dropout 0.1 --attention-dropout 0",
    "--dataloader-type external",
    "--disable-gloo-process-groups",
    "--fp8-format e4m3",
    "--fp4-format e2m1",
    "--check-for-spiky-loss",
    "--num-workers 0",
    "--enable-ft-package",
    "--dataloader-inter-document-masking --context-parallel-size 2 --eval-iters 10 --no-balance-evaluation",
    "--fine-grained-activation-offloading --balance-shape-bucket 1024",
]
ORDINARY = [
    "",
    UNPADDED,
    ON_CPU,
    f"{ON_CPU} {EXPERTS} --expert-model-parallel-size 2",
    f"{ON_CPU} --multi-latent-attention --recompute-modules core_attn",
    f"{ON_CPU} --experimental-attention-variant gated_delta_net",
    f"{ON_CPU} --hybrid-layer-pattern M*M-",
    f"{ON_CPU} --position-embedding-type mrope --no-rope-fusion",
    f"{ON_CPU} --window-size 64,0 --cp-comm-type a2a",
    "--cp-comm-type a2a --context-parallel-size 2",
    "--cp-comm-type a2a all_gather --context-parallel-size 2 --window-size 64,0",
    "--window-size 64,0",
    "--experimental-attention-variant gated_delta_net --context-parallel-size 2",
    "--hybrid-layer-pattern M*MG- --context-parallel-size 2",
    "--position-embedding-type mrope --no-rope-fusion",
    "--pipeline-model-parallel-comm-backend nccl --pipeline-model-parallel-size 2",
    "--tensor-parallel-num-weight-shards 1",
    ALLGATHER,
    f"{ALLGATHER} --tensor-model-parallel-size 2",
    f"{ALLGATHER} --context-parallel-size 2 --expert-model-parallel-size 2",
    f"{ALLGATHER} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
    f"{EXPERTS} --moe-router-load-balancing-type none --moe-router-enable-expert-bias",
    "--moe-aux-loss-coeff 0.01",
    f"--moe-z-loss-coeff 0.001 {EXPERTS}",
    "--full-validation --multiple-validation-sets --eval-micro-batch-size 2",
    "--sft --reset-position-ids",
    "--dataloader-inter-document-masking --context-parallel-size 2 --eval-iters 0",
    f"{DOCUMENTS} --eval-iters 10",
    f"{DOCUMENTS} --eval-iters 0 --no-balance-evaluation",
    "--sft --dataloader-inter-document-masking --context-parallel-size 2 --pipeline-model-parallel-size 4",
    "--hybrid-layer-pattern *-*-",
]


@functools.cache
def parser() -> argparse.ArgumentParser:
    """Megatron's, made once, for it takes a second, with flags of other releases and of scripts."""
    from megatron.training.arguments import add_megatron_arguments

    megatron_parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = ("--dataloader-save", "--cp-partition-mode", "--export-kd-teacher-load", "--sequence-packing-scheduler")
    for flag in flags:
        megatron_parser.add_argument(flag)
    megatron_parser.add_argument("--use-legacy-models", action="store_true")
    return add_balance_args(megatron_parser)


def parsed(flags: str, *, balanced: str = BALANCED) -> Any:
    return parser().parse_args(f"{balanced} {flags}".split())


@pytest.mark.parametrize("flags", REFUSED)
def test_a_refusal_names_the_option_its_value_and_the_remedy(flags: str) -> None:
    with pytest.raises(BalanceError) as refusal:
        parsed(flags)
    messages = str(refusal.value)
    assert messages.startswith(f"{flags.split()[0]} is ")
    assert "; " in messages
    assert messages.endswith(".")
    assert not any(name in messages.split(":")[0] for name in ("None", "[", "<"))


def test_every_refusal_of_the_pages_is_met_here() -> None:
    """Those of releases have tests of their own below."""
    messages = ""
    lines = [(flags, BALANCED) for flags in REFUSED]
    lines += [(flags, "--calculate-per-token-loss") for flags in WITHOUT_BALANCING]
    for flags, balanced in [*lines, ("", PACKED)]:
        with pytest.raises(BalanceError) as refusal:
            parsed(flags, balanced=balanced)
        messages += str(refusal.value)
    options, flags = (PAGES[page]() for page in ("options.md", "flags.md"))
    rules = re.findall(r"^\| (.+) \| (.+) \|$", options.partition("## Cautions")[0], flags=re.MULTILINE)
    rules += re.findall(r"^- (--.+?): (.+)$", flags, flags=re.MULTILINE)
    assert len(rules) > 60
    missed = [condition for condition, message in rules if message not in messages]
    assert [condition for condition in missed if not re.search("(engine|core)(<|&lt;)|^where$|^---", condition)] == []


@pytest.mark.parametrize("flags", ["--balance-data", PACKED])
def test_balancing_asks_for_the_loss_per_token(flags: str) -> None:
    with pytest.raises(BalanceError, match="add --calculate-per-token-loss"):
        parsed(flags, balanced="")


def test_an_option_that_the_script_s_parser_lacks_is_named_too() -> None:
    with pytest.raises(BalanceError, match="--calculate-per-token-loss is not set"):
        add_balance_args(argparse.ArgumentParser()).parse_args(["--balance-data"])


@pytest.mark.parametrize("flags", CAUTIONED)
def test_what_should_be_known_is_said_once(flags: str) -> None:
    [caution] = cautions(parsed(flags))
    assert caution.startswith(f"{flags.split()[0]} is ")


@pytest.mark.parametrize("flags", ORDINARY)
def test_ordinary_runs_are_left_alone(flags: str) -> None:
    assert cautions(parsed(flags)) == []


OF_MEGATRON = [
    flags
    for flags in (*REFUSED, *CAUTIONED)
    if not any(flag in flags for flag in ("--balance", "--no-balance", "--use-dynamic", "--max-tokens"))
]


@pytest.mark.parametrize("flags", OF_MEGATRON)
def test_a_run_that_does_not_balance_is_none_of_our_business(flags: str) -> None:
    assert cautions(parsed(flags, balanced="")) == []


@pytest.mark.parametrize(
    ("flags", "oldest"),
    [
        ("", "2.3"),
        ("--softmax-type learnable", "2.8"),
        ("--context-parallel-size 4 --cp-comm-type a2a", "2.10"),
        ("--context-parallel-size 4 --cp-comm-type all_gather", "2.15"),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p", "2.20"),
    ],
)
def test_an_older_transformer_engine_is_refused(monkeypatch: pytest.MonkeyPatch, flags: str, oldest: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{oldest}.1+abc")
    args = parsed(flags)
    assert any("before 2.9" in caution for caution in cautions(args)) is (oldest in ("2.3", "2.8"))
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"2.{int(oldest[2:]) - 1}.7")
    with pytest.raises(BalanceError, match=rf"install transformer-engine {oldest} or newer"):
        parsed(flags)
    parsed("--transformer-impl local --spec module function")


@pytest.mark.parametrize("metadata", ["0.19.2", None])
@pytest.mark.parametrize(
    "flags",
    [
        f"--hybrid-layer-pattern M*M- {PACKED}",
        f"--overlap-moe-expert-parallel-comm {EXPERTS} {PACKED}",
        SIZED,
        f"--balance-loss-weighting sample --mtp-num-layers 1 {PACKED}",
        f"--balance-loss-weighting sample --moe-z-loss-coeff 1e-3 {EXPERTS} {PACKED}",
    ],
)
def test_a_rule_about_a_release_asks_the_module_that_is_imported(
    monkeypatch: pytest.MonkeyPatch, metadata: str | None, flags: str
) -> None:
    """Fault: pip's metadata of another release, or none, let both through."""

    def version(name: str) -> str:
        if metadata is None:
            raise PackageNotFoundError(name)
        return metadata

    parser()  # imports what asks for other packages
    monkeypatch.setattr("importlib.metadata.version", version)
    for imported in ("0.18.3", None):
        monkeypatch.setattr("megatron.core.package_info.__version__", imported)
        with pytest.raises(BalanceError, match=r"install megatron-core 0\.19"):
            parsed(f"{flags} --transformer-impl local --spec module function")


@pytest.mark.parametrize(
    ("flags", "objective"),
    [
        ("--fp8-format hybrid", "microbatch"),  # its recipe is delayed
        ("--fp8-format hybrid --fp8-recipe tensorwise", "step"),
        (f"--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01 {EXPERTS}", "microbatch"),
        (f"--moe-router-load-balancing-type global_aux_loss {EXPERTS}", "step"),
    ],
)
def test_plans_are_for_ranks_that_reduce_in_every_micro_batch(flags: str, objective: str) -> None:
    """Fault: plans of `delayed` FP8 levelled steps, and with sizes of their own ranks never met."""
    options = vars(parsed(flags)) | {"world_size": 8}
    topology = topology_of(options, shape=lambda: SHAPE)
    assert resolve_objective("auto", topology=topology) == objective
    assert topology.has_equal_counts is (objective == "microbatch")
    if "--fp8-format" in flags:  # no flag sets it, a loop's configuration may
        for sizes in (
            {},
            {"context_parallel_size": 2},
            {"context_parallel_size": 2, "balance_dynamic_cp": "all"},
        ):
            delayed = options | sizes | {"tp_only_amax_red": True, "fp8_recipe": "delayed"}
            topology = topology_of(delayed, shape=lambda: SHAPE)
            assert topology.reduces_in_microbatches is ("balance_dynamic_cp" in sizes)
