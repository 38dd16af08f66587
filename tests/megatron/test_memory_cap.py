"""The cap that a run derives from its arguments and a device's memory."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.training")

import torch
from test_flops_oracle import QWEN3_30B, RUN

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.arguments import BalanceConfig
from megatron_balance.mcore.setup.command_line import parse_command_line
from megatron_balance.mcore.setup.memory_cap import (
    derived_cap,
    memory_model_from_megatron_args,
    training_memory,
)
from megatron_balance.memory.model import GIB
from megatron_balance.model.shape import ModelShape

THD_LAYERS = "--spec megatron_balance.mcore.thd.attention thd_block_spec"
AUTO = "--calculate-per-token-loss --use-dynamic-batch-size --max-tokens-per-gpu auto"
MODEL = """--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --swiglu --vocab-size 32000 --bf16
    --hidden-dropout 0 --use-distributed-optimizer"""


def parsed(*flags: str) -> Namespace:
    """Arguments as validate_args leaves them, as far as they are read here."""
    args = parse_command_line(" ".join((RUN, THD_LAYERS, *flags)).split()).args
    args.data_parallel_size, args.virtual_pipeline_model_parallel_size = 2, None
    return args


def with_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    properties: Any = SimpleNamespace(total_memory=num_bytes)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_the_cap_follows_from_the_devices_memory_and_fits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parsed(MODEL, AUTO)
    with_memory(monkeypatch, 24 * GIB)
    derived = derived_cap(BalanceConfig.from_megatron_args(args), args=args)
    assert derived is not None
    cap, model = derived.tokens, memory_model_from_megatron_args(args)
    assert cap % 128 == 0
    assert model.peak_bytes(cap) <= 24 * GIB * 0.9 < model.peak_bytes(cap + 128)


def test_a_given_budget_takes_the_place_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 24 * GIB)
    args = parsed(MODEL, AUTO, "--balance-memory-gib 10")
    cap = derived_cap(BalanceConfig.from_megatron_args(args), args=args)
    assert cap is not None
    assert cap.budget_bytes == 10 * GIB
    assert memory_model_from_megatron_args(args).peak_bytes(cap.tokens) <= 10 * GIB


def test_a_device_that_tells_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 0)
    args = parsed(MODEL, AUTO)
    with pytest.raises(BalanceError, match=r"--max-tokens-per-gpu is auto, .* give --balance-memory-gib"):
        derived_cap(BalanceConfig.from_megatron_args(args), args=args)


def test_nothing_is_derived_where_a_number_is_given() -> None:
    args = parsed(MODEL, "--calculate-per-token-loss --use-dynamic-batch-size --max-tokens-per-gpu 4096")
    config = BalanceConfig.from_megatron_args(args)
    assert derived_cap(config, args=args) is None


def test_arguments_are_read_as_megatron_means_them() -> None:
    local = training_memory(parsed(MODEL))
    assert local.distributed_optimizer
    assert (local.precision.activation, local.precision.fused, local.precision.hidden_dropout) == (2, False, False)
    again = training_memory(
        parsed(QWEN3_30B, "--transformer-impl transformer_engine --recompute-granularity selective --qk-layernorm",
               "--recompute-modules core_attn moe_act")
    )  # fmt: skip
    assert again.precision.optimizer == 8  # fp32
    assert again.precision.fused
    assert again.precision.hidden_dropout  # Megatron's default is 0.1
    assert again.dropped == {"core_attn", "moe_act"}
    assert memory_model_from_megatron_args(parsed(QWEN3_30B)).static_bytes > 16 * 3 * 10**10
    assert ModelShape.from_megatron_args(parsed(QWEN3_30B)).num_experts == 128
