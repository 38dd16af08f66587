"""Rates: of GPUs, as published or as a run takes them by default, and of the links between context-parallel ranks.

profiles.json, made and judged by `scripts/bench rates`, has the published ones. A profile belongs to a GPU, a
precision, a kind of model, an attention kernel and a software version: the same GPU has others in the next release.
What its source does not say is absent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape

ATTENTION_RATES = {("dense", "bf16"): 0.6, ("dense", "fp8"): 0.4, ("moe", "bf16"): 2.0, ("moe", "fp8"): 2.0}
"""The attention rate that loses least over all profiles of a kind of model and a precision (`scripts/bench rates`)."""

WITHIN_NODE = 450e9
"""Bytes a second that one GPU receives by NVLink: an H100 has 900 GB/s in both directions (NVIDIA H100 data sheet)."""

BETWEEN_NODES = 50e9
"""Bytes a second over one 400 Gb/s link a GPU."""

ASSUMED_TFLOPS = 400.0
"""Of an H100 in training, to compare a time with FLOPs where no rate is known: 40 % of its bf16 peak."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Rates of one GPU in training.

    Attributes:
        gpu: its name.
        precision: of matrix products, `bf16` or `fp8`.
        models: `dense` or `moe`.
        linear_tflops: rate of all that is linear in tokens, 10**12 FLOP/s.
        attention_tflops: rate of the causal attention core, forward and backward.
        kind: `end to end` (whole runs), `kernel` (attention measured, the rest assumed), `assumed attention`, or
            `own run` (measured by `scripts/bench gpu`).
        source: repository and commit, or paper.
        kernel: of attention, where the source names it.
        software: and its version, where the source names it.
        held_out: mean and worst relative error on published rows that were not fitted; None where none are left.
    """

    gpu: str
    precision: str
    models: str
    linear_tflops: float
    attention_tflops: float
    kind: str
    source: str
    kernel: str | None = None
    software: str | None = None
    held_out: Sequence[float] | None = None

    @property
    def attention_rate(self) -> float:
        """Rate of attention over the linear rate; FLOPs count 1."""
        return self.attention_tflops / self.linear_tflops


@cache
def profiles() -> dict[str, Profile]:
    """All profiles, by name."""
    rows = json.loads((files(__package__) / "profiles.json").read_text(encoding="utf-8"))
    return {name: Profile(**row) for name, row in rows.items()}


def find_profile(name: str) -> Profile:
    """The profile of a name; a GPU's name alone is refused."""
    if name not in profiles():
        raise BalanceError(
            f"the device (--device) is {name!r}: rates belong to a GPU, a precision and a software version, give one "
            f"of {', '.join(profiles())}, or measure your own run (megatron-balance fit)."
        )
    return profiles()[name]


def default_attention_rate(*, has_experts: bool, fp8: bool) -> float:
    """The rate of attention over the linear rate to plan with where none was measured."""
    return ATTENTION_RATES["moe" if has_experts else "dense", "fp8" if fp8 else "bf16"]


def exchange_flops_per_token(
    shape: ModelShape,
    *,
    bytes_per_second: float,
    tflops: float = ASSUMED_TFLOPS,
    bytes_per_number: int = 2,
    recompute: bool = False,
) -> int:
    """FLOPs in the time that a rank takes to receive one token's keys and values: `cp_exchange` of a CostModel.

    Ring attention passes them to every other rank of a group: once in the forward pass, once more in the backward pass,
    and there their gradients as well (Liu et al. 2023, arXiv 2310.01889, section 3). A sliding window does not shorten
    the ring. `CostModel.at_cp_size` counts what attention does not hide of it.

    A GPU receives `bytes_per_second` and runs what is linear in tokens at `tflops`. Recomputed layers pass keys and
    values once more. Layers that context parallelism does not split by such a ring are refused.

    Example:
        >>> shape = ModelShape.preset("Qwen3-8B")
        >>> [exchange_flops_per_token(shape, bytes_per_second=link) for link in (WITHIN_NODE, BETWEEN_NODES)]
        [393216000, 3538944000]
    """
    numbers = 0
    for layer in (*shape.decoder_layers(), *shape.mtp_layers()):
        if layer.mixer == "attention":
            numbers += 2 * shape.num_query_groups * shape.kv_channels
        elif layer.mixer == "mla":  # uncompressed, as it is trained
            numbers += shape.num_attention_heads * (shape.qk_head_dim + shape.qk_pos_emb_head_dim + shape.v_head_dim)
        elif layer.mixer is not None:
            raise BalanceError(
                f"The model has {layer.mixer} layers, whose context-parallel communication is not that of a ring of "
                "keys and values: give cp_exchange, or keep --context-parallel-size for all samples."
            )
    return round((3 + recompute) * numbers * bytes_per_number * tflops * 1e12 / bytes_per_second)
