"""The cost of passing keys on between context-parallel ranks, against the link's speed by hand.

It reads below the public names: the cost model of a run has none, and its effect on a plan is too small to see.
"""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron_balance import ModelShape
from megatron_balance.mcore import add_balance_args
from megatron_balance.mcore.setup.settings import costs_of_args

SHAPE = ModelShape.preset("Qwen3-8B")
RUN = (
    "--calculate-per-token-loss --use-dynamic-batch-size --max-tokens-per-gpu 4096 --balance-data --balance-by-flops "
    "--bf16 --swiglu --group-query-attention --untie-embeddings-and-output-weights "
    f"--num-layers {SHAPE.num_layers} --hidden-size {SHAPE.hidden_size} --kv-channels {SHAPE.kv_channels} "
    f"--num-attention-heads {SHAPE.num_attention_heads} --num-query-groups {SHAPE.num_query_groups} "
    f"--ffn-hidden-size {SHAPE.ffn_hidden_size} --vocab-size {SHAPE.padded_vocab_size}"
)


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_balance_args(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def part_of_linear(args: Any, *, world_size: int) -> float:
    """The cost of a token's exchange over its linear cost."""
    args.world_size, args.padded_vocab_size = world_size, SHAPE.padded_vocab_size
    model = costs_of_args(args).model
    return model.cp_exchange / model.linear


@pytest.mark.parametrize(
    ("flags", "world_size", "ranks_of_node", "part"),
    [
        ("", 8, 8, 0),  # one size for all
        ("--balance-context-parallel", 8, 8, 0.0087),
        ("--balance-context-parallel", 8, 4, 0.078),  # the link between nodes
        ("--balance-context-parallel 8", 16, 8, 0.0087),  # groups fit a node
        ("--balance-context-parallel 8", 16, 4, 0.078),
        ("--balance-context-parallel 4 --tensor-model-parallel-size 2", 16, 8, 0.0087),
        ("--balance-context-parallel 8 --tensor-model-parallel-size 2", 16, 8, 0.078),
        ("--balance-context-parallel 4", 16, 6, 0.078),  # groups of 4 from rank 4 on reach over the end of a node of 6
    ],
)
def test_groups_within_a_node_exchange_over_its_links(
    parser: argparse.ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    world_size: int,
    ranks_of_node: int,
    part: float,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_node))
    args = parser.parse_args([*RUN.split(), *flags.split()])
    assert part_of_linear(args, world_size=world_size) == pytest.approx(part, rel=0.02)
