"""Flags that cannot work together are refused when they are parsed, by Megatron's own parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_balance import BalanceError, CostModel, ModelShape
from megatron_balance.cost.calibration import Calibration
from megatron_balance.mcore import add_balance_args, hooks
from megatron_balance.mcore.options.table import problems, why_stock
from megatron_balance.mcore.setup.arguments import (
    BalanceConfig,
    cost_model_from_megatron_args,
    exchange_source,
    patch_values_from_megatron_args,
)
from megatron_balance.mcore.setup.cp_exchange import spans_nodes

PER_TOKEN = "--calculate-per-token-loss"
PACKED = "--use-dynamic-batch-size --max-tokens-per-gpu 4096"


@pytest.fixture
def parser() -> Iterator[argparse.ArgumentParser]:
    from megatron.training import arguments

    installed = hooks.install()
    yield arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    installed.undo()


def parse(parser: argparse.ArgumentParser, flags: str) -> BalanceConfig:
    return BalanceConfig.from_megatron_args(parser.parse_args(flags.split()))


def test_the_hook_brings_the_flags(parser: argparse.ArgumentParser) -> None:
    config = parse(parser, f"{PER_TOKEN} {PACKED} --balance-data --balance-by-flops --balance-objective step")
    assert config == BalanceConfig(
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=4096,
        balance_data=True,
        balance_by_flops=True,
        objective="step",
    )


def test_the_provider_on_top_of_the_hook_adds_them_once(parser: argparse.ArgumentParser) -> None:
    assert add_balance_args(parser) is parser
    assert parse(parser, "") == BalanceConfig()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{PER_TOKEN} --balance-by-flops", "--balance-by-flops is set: without --use-dynamic-batch-size"),
        (
            f"{PER_TOKEN} --use-dynamic-batch-size",
            "--max-tokens-per-gpu is None: with --use-dynamic",
        ),
        (f"{PER_TOKEN} --use-dynamic-batch-size --max-tokens-per-gpu 0", "--max-tokens-per-gpu is 0: with"),
        (f"{PER_TOKEN} --use-dynamic-batch-size --max-tokens-per-gpu -5", "--max-tokens-per-gpu is -5: with"),
        ("--balance-data", "add --calculate-per-token-loss"),
        (PACKED, "add --calculate-per-token-loss"),
        (
            f"{PER_TOKEN} {PACKED} --balance-calibration c.json",
            "--balance-calibration is c.json: it refines --balance-by-flops, which is not set",
        ),
        (
            f"{PER_TOKEN} {PACKED} --balance-encoder Qwen2.5-VL-7B",
            "--balance-encoder is Qwen2.5-VL-7B: it refines --balance-by-flops, which is not set",
        ),
        (
            f"{PER_TOKEN} {PACKED} --balance-memory-gib 70",
            "--balance-memory-gib is 70.0 with --max-tokens-per-gpu 4096: only",
        ),
        (
            f"{PER_TOKEN} --use-dynamic-batch-size --max-tokens-per-gpu auto --balance-memory-gib -1",
            "--balance-memory-gib is -1.0: it must be a positive number of GiB",
        ),
        (f"{PER_TOKEN} {PACKED} --balance-shape-bucket 0", "--balance-shape-bucket is 0: it counts tokens; set 1"),
        (
            f"{PER_TOKEN} {PACKED} --balance-shape-bucket 5000",
            "is 5000 with --max-tokens-per-gpu 4096: .* over the cap",
        ),
        ("--balance-shape-bucket 128", "--balance-shape-bucket is 128: nothing is balanced"),
        (f"{PER_TOKEN} {PACKED} --balance-exchange nccl", "--balance-exchange is nccl: no samples move"),
        (
            f"{PER_TOKEN} {PACKED} --balance-data --balance-exchange nccl --distributed-backend gloo",
            "--balance-exchange is nccl with --distributed-backend gloo: training has no NCCL",
        ),
        (f"{PER_TOKEN} --balance-record r", "--balance-record is r: nothing is balanced"),
        (
            f"{PER_TOKEN} {PACKED} --balance-lookahead 2 --non-persistent-save-interval 5",
            "--non-persistent-save-interval is 5 with --balance-lookahead 2",
        ),
        (
            f"{PER_TOKEN} {PACKED} --balance-lookahead 2 --rampup-batch-size 8 8 100",
            "--rampup-batch-size is 8 8 100 with --balance-lookahead 2",
        ),
        (f"{PER_TOKEN} --balance-evaluation", "--balance-evaluation is set: nothing is balanced"),
        (
            f"{PER_TOKEN} {PACKED} --balance-data --balance-context-parallel --balance-evaluation",
            "--balance-evaluation is set with .*: evaluation runs at --context-parallel-size",
        ),
        (f"{PER_TOKEN} {PACKED} --balance-calibrate-online", "-online is set: it refines --balance-by-flops"),
    ],
)
def test_flags_that_cannot_work(parser: argparse.ArgumentParser, flags: str, message: str) -> None:
    with pytest.raises(BalanceError, match=message):
        parser.parse_args(flags.split())


def test_a_loader_that_saves_its_own_state_is_refused(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataloader-save")  # a script's own, which Megatron reads all the same
    with pytest.raises(BalanceError, match=r"--dataloader-save is d: .*; drop it"):
        parser.parse_args(f"{PER_TOKEN} {PACKED} --dataloader-save d".split())


@pytest.mark.parametrize("flags", ["--balance-objective fastest", "--balance-algorithm magic"])
def test_unknown_choices(parser: argparse.ArgumentParser, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(flags.split())
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--hybrid-context-parallel", "scheduler of its own"),
        ("--cuda-graph-impl local", "CUDA graphs"),
        ("--enable-cuda-graph", "CUDA graphs"),
    ],
)
def test_runs_that_stay_stock(parser: argparse.ArgumentParser, flags: str, reason: str) -> None:
    args = parser.parse_args(f"{PER_TOKEN} --balance-data {flags}".split())
    assert not problems(args)
    assert reason in (why_stock(args) or "")


def test_an_ordinary_run_is_balanced(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args(f"{PER_TOKEN} --balance-data".split())
    assert why_stock(args) is None


def test_every_problem_is_found_not_only_the_first(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args([])
    args.balance_by_flops, args.balance_calibrate_online, args.balance_data = True, True, True
    found = problems(args)
    assert [problem.split()[0] for problem in found] == ["--balance-by-flops", "--calculate-per-token-loss"]


class TestTheDefaultDispatcherOfExperts:
    """It gathers as many tokens from each rank; ranks that hold different micro-batches have different numbers."""

    FLAGS = f"{PER_TOKEN} {PACKED} --num-experts 4"

    @pytest.mark.parametrize(
        "layout",
        [
            "--expert-model-parallel-size 2",
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 2",
            "--tensor-model-parallel-size 2 --context-parallel-size 3 --expert-model-parallel-size 2",
        ],
    )
    def test_is_refused_where_experts_reach_over_replicas(self, parser: argparse.ArgumentParser, layout: str) -> None:
        with pytest.raises(BalanceError, match=r"--moe-token-dispatcher-type is allgather .* set .* alltoall"):
            parser.parse_args(f"{self.FLAGS} {layout}".split())
        parser.parse_args(f"{self.FLAGS} {layout} --moe-token-dispatcher-type alltoall".split())

    @pytest.mark.parametrize(
        "layout",
        [
            "",
            "--tensor-model-parallel-size 2",
            "--context-parallel-size 2 --expert-model-parallel-size 2",
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
        ],
    )
    def test_is_left_alone_within_a_replica(self, parser: argparse.ArgumentParser, layout: str) -> None:
        parser.parse_args(f"{self.FLAGS} {layout}".split())


@pytest.mark.parametrize(("ranks_of_node", "part_of_linear"), [("8", 0.0087), ("4", 0.078)])
def test_sizes_of_their_own_cost_the_exchange(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, ranks_of_node: str, part_of_linear: float
) -> None:
    """A run over several nodes counts the link between them: about 1 % of a token's linear cost, or 8 %."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_of_node)
    shape = ModelShape.preset("Qwen3-8B")
    flags = f"{PER_TOKEN} {PACKED} --balance-data --balance-by-flops --bf16 --swiglu --group-query-attention"
    flags += f" --num-layers {shape.num_layers} --hidden-size {shape.hidden_size} --kv-channels {shape.kv_channels}"
    flags += f" --num-attention-heads {shape.num_attention_heads} --num-query-groups {shape.num_query_groups}"
    flags += f" --ffn-hidden-size {shape.ffn_hidden_size} --vocab-size {shape.padded_vocab_size}"
    args = parser.parse_args([*flags.split(), "--untie-embeddings-and-output-weights"])
    args.world_size, args.padded_vocab_size = 8, shape.padded_vocab_size
    assert cost_model_from_megatron_args(args, config=BalanceConfig.from_megatron_args(args)).cp_exchange == 0
    args.balance_context_parallel = "all"
    model = cost_model_from_megatron_args(args, config=BalanceConfig.from_megatron_args(args))
    assert model.cp_exchange / model.linear == pytest.approx(part_of_linear, rel=0.02)


@pytest.mark.parametrize(
    ("flags", "limit", "ranks_of_node", "spans"),
    [
        ("", None, 16, False),
        ("", None, 8, True),
        ("", 8, 8, False),
        ("", 8, 4, True),
        ("--tensor-model-parallel-size 2", 4, 8, False),
        ("--tensor-model-parallel-size 2", 8, 8, True),
        ("--pipeline-model-parallel-size 2", None, 8, False),
        ("", 4, 6, True),  # groups of 4 from rank 4 on reach over the end of a node of 6
    ],
)
def test_groups_that_fit_a_node_exchange_within_it(
    parser: argparse.ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    limit: int | None,
    ranks_of_node: int,
    spans: bool,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_node))
    args = parser.parse_args(flags.split())
    args.world_size = 16
    assert spans_nodes(args, max_cp_size=limit) is spans


MISTRAL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --vocab-size 32768 --patch-dim 14 --img-h 336 --img-w 336"
)
"""Of examples/multimodal/sft_mistral_clip.sh."""


def costs_of_images(parser: argparse.ArgumentParser, flags: str = "", **multimodal: Any) -> tuple[CostModel, int]:
    args = parser.parse_args(f"{PER_TOKEN} {PACKED} --balance-data --balance-by-flops {MISTRAL} {flags}".split())
    vars(args).update(padded_vocab_size=32768, **multimodal)
    model = cost_model_from_megatron_args(args, config=BalanceConfig.from_megatron_args(args))
    return model, patch_values_from_megatron_args(args, cost_model=model)


def test_an_encoder_comes_from_the_flags_of_the_multimodal_example(parser: argparse.ArgumentParser) -> None:
    text, no_patch = costs_of_images(parser)
    assert (text.image_linear, text.image_quadratic, no_patch) == (0, 0, 0)
    clip = {"vision_model_type": "clip", "language_model_type": "mistral_7b"}
    model, patch_values = costs_of_images(parser, **clip)
    assert patch_values == 3 * 14 * 14
    # CLIP ViT-L/14 and a projector of two layers; attention is not causal.
    layers, projector = 24 * (4 + 2 * 4) * 1024**2, 14336 * (1024 + 4096)
    assert model.image_linear == 3 * 2 * (588 * 1024 + layers + projector)
    assert model.image_quadratic == 24 * 4 * 1024 * 7 // 2
    assert (model.linear, model.quadratic) == (text.linear, text.quadratic)
    frozen, _ = costs_of_images(parser, freeze_ViT=True, **clip)
    assert frozen.image_linear == 2 * (588 * 1024 + layers + 2 * projector)
    shuffled, _ = costs_of_images(parser, pixel_shuffle=True, **clip)
    assert shuffled.image_linear == 3 * 2 * (588 * 1024 + layers + 14336 * (4 * 1024 + 4096) // 4)
    with pytest.raises(BalanceError, match=r"--vision-model-type is 'hf://x': .* --balance-encoder"):
        costs_of_images(parser, **clip | {"vision_model_type": "hf://x"})


def test_an_encoder_is_named_by_a_flag(parser: argparse.ArgumentParser) -> None:
    model, patch_values = costs_of_images(parser, "--balance-encoder Qwen2.5-VL-7B")
    assert patch_values == 3 * 2 * 14 * 14
    # Its own encoder in front of another language model: only the projector's output differs.
    own = CostModel.from_shape(ModelShape.preset("Qwen2.5-VL-7B"))
    assert model.image_linear == own.image_linear + 3 * 2 * 5120 * (4096 - 3584) // 4
    for name, phrase in (("Qwen3-8B", "that model has no vision encoder"), ("none", "it must be the path of")):
        with pytest.raises(BalanceError, match=f"--balance-encoder is '{name}': {phrase}"):
            costs_of_images(parser, f"--balance-encoder {name}")


def test_a_calibration_gives_the_exchange_or_a_link_does(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    flags = f"{PER_TOKEN} {PACKED} --balance-data --balance-by-flops --balance-calibration {path} --bf16 --num-layers 4"
    flags += " --hidden-size 64 --num-attention-heads 4 --kv-channels 16 --ffn-hidden-size 128 --vocab-size 64"
    args = parser.parse_args([*flags.split(), "--tensor-model-parallel-size", "2", "--balance-context-parallel"])
    args.world_size, args.padded_vocab_size = 8, 64

    def costs(**exchange: float) -> tuple[CostModel, str]:
        Calibration(linear=1e-6, quadratic=1e-9, **exchange).write(path)
        config = BalanceConfig.from_megatron_args(args)
        source = exchange_source(args, config=config)
        assert source is not None
        return cost_model_from_megatron_args(args, config=config), source

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    model, source = costs(cp_exchange=4e-8, cp_exchange_between_nodes=2e-7)
    assert (model.linear, model.cp_exchange) == (5e11, 2e10)  # two tensor-parallel ranks hold half the heads each
    assert source == "4.00% of a token's linear cost, measured within a node by the calibration"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert costs(cp_exchange=4e-8, cp_exchange_between_nodes=2e-7)[0].cp_exchange == 1e11
    # Not measured between nodes: 4 layers x 2 x 4 heads x 16 numbers of 2 bytes, three times, over 50 GB/s.
    model, source = costs(cp_exchange=4e-8)
    assert model.cp_exchange == pytest.approx(4 * 2 * 4 * 16 * 2 * 3 / 50e9 * 1e18 / 2)
    assert "assumed from 50 GB/s between nodes; megatron-balance calibrate" in source
    args.balance_context_parallel = None
    config = BalanceConfig.from_megatron_args(args)
    assert exchange_source(args, config=config) is None
    assert cost_model_from_megatron_args(args, config=config).cp_exchange == 0
