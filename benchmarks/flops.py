"""Forward FLOPs of each family of models, ours over Megatron's own count, and what the difference is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_formula import megatron_flops

from benchmarks.publish import Measured, table
from megatron_balance import ModelShape
from megatron_balance.model.flops import fwd_flops

TITLE = "FLOPs"
LENGTHS = (4096, 131072)

_ROUTER = "leaves out the router"
_LATENT = f"adds norms of latent vectors, {_ROUTER}"
_MODELS: Mapping[str, tuple[str, int, str]] = {
    "grouped queries": ("Qwen3-8B", 0, "is the same"),
    "experts": ("Qwen3-30B-A3B", 0, _ROUTER),
    "windows, experts": ("gpt-oss-120b", 0, f"takes windows for full attention, {_ROUTER}"),
    "gated delta net, experts": ("Qwen3.5-35B-A3B", 0, _ROUTER),
    "latent attention, experts": ("DeepSeek-V3", 0, _LATENT),
    "with a prediction depth": ("DeepSeek-V3", 1, f"adds norms of the depth too, {_ROUTER}"),
    "sparse attention, experts": ("DeepSeek-V3.2", 0, f"takes it for full latent attention, no indexer; {_LATENT}"),
    "Mamba": ("Nemotron-H-8B", 0, "is the same"),
    "Mamba, experts": ("Nemotron-3-Nano-30B-A3B", 0, f"takes Mamba for twice as wide as the model, {_ROUTER}"),
}
"""Family → preset, depths of multi-token prediction, and what Megatron's count does there."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def measure(args: argparse.Namespace) -> Measured:
    families: dict[str, Any] = {}
    for family, (name, depths, does) in _MODELS.items():
        shape = replace(ModelShape.preset(name), mtp_num_layers=depths)
        linear, quadratic = megatron_flops(shape)
        predicted = fwd_flops(shape)
        ratios = [predicted(length) / (linear * length + quadratic * length**2) for length in LENGTHS]
        families[family] = {"model": name, "over_megatron": ratios, "megatron": does}
    return Measured({"families": families})


def section(figures: Mapping[str, Any]) -> str:
    rows = [
        (family, row["model"], *(f"{ratio:.4f}" for ratio in row["over_megatron"]), row["megatron"])
        for family, row in figures["families"].items()
    ]
    return f"""Forward FLOPs of one sequence, ours over Megatron's `num_floating_point_operations`.
`tests/megatron/test_flops_oracle.py` adds up the differences for every preset and finds no other.

{table("family | model | 4,096 tokens | 131,072 tokens | Megatron's count", rows, align="llrrl")}"""
