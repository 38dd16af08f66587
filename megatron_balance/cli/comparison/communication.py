"""Cost of the exchange between context-parallel ranks, and refusals of dynamic context parallelism.

Invariant: the cost follows from the model's keys and values and a bandwidth that is given, or stated as assumed.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from megatron_balance.cli.comparison.throughput import num_gpus
from megatron_balance.cost.calibration import UNITS_PER_SECOND
from megatron_balance.cost.communication import (
    BETWEEN_NODES,
    WITHIN_NODE,
    Link,
    exchange_bytes_per_token,
    exchange_flops_per_token,
)
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.options import dynamic_cp_problem
from megatron_balance.mcore.setup.arguments import ALL_RANKS
from megatron_balance.model.shape import ModelShape
from megatron_balance.topology import Topology

GPUS_PER_NODE = 8
"""Without --cp-bandwidth, runs on at most this many GPUs are assumed to be on one node."""

ASSUMED_LINKS = (
    f"{WITHIN_NODE.bytes_per_second / 1e9:g} GB/s on at most {GPUS_PER_NODE} GPUs, else "
    f"{BETWEEN_NODES.bytes_per_second / 1e9:g}, an assumption"
)
"""The bandwidths assumed without --cp-bandwidth, as text."""


def cp_link(topology: Topology, *, gigabytes_per_second: float | None, tflops: float | None) -> Link:
    """The link that context-parallel ranks receive over.

    Args:
        topology: the ranks.
        gigabytes_per_second: `--cp-bandwidth`; None for NVLink on one node, one 400 Gb/s link a GPU on several.
        tflops: speed that a GPU reaches; None for the link's default.

    Raises:
        BalanceError: the bandwidth is not above zero.
    """
    if gigabytes_per_second is not None and not 0 < gigabytes_per_second < float("inf"):
        raise BalanceError(f"--cp-bandwidth is {gigabytes_per_second:g}: it must be GB/s that a GPU receives, above 0.")
    link = WITHIN_NODE if num_gpus(topology) <= GPUS_PER_NODE else BETWEEN_NODES
    if gigabytes_per_second is not None:
        link = replace(link, bytes_per_second=gigabytes_per_second * 1e9)
    return link if tflops is None else replace(link, flops_per_second=tflops * 1e12)


def exchange_cost(shape: ModelShape, *, topology: Topology, link: Link, cost_name: str) -> int | None:
    """`CostModel.cp_exchange` of one context-parallel rank, tensor-parallel ranks together.

    Args:
        shape: the model.
        topology: the ranks.
        link: between them.
        cost_name: `flops` or `seconds`, the unit.

    Returns:
        None if the model has layers that do not pass keys and values around a ring.
    """
    try:
        if cost_name == "flops":
            return exchange_flops_per_token(shape, link=link)
        seconds = exchange_bytes_per_token(shape) / link.bytes_per_second / topology.tp_size
    except BalanceError:
        return None
    return round(seconds * UNITS_PER_SECOND)


def dynamic_cp_refusal(shape: ModelShape | None, *, topology: Topology) -> str | None:
    """The reason why `--balance-context-parallel` is refused with this model, or None.

    The fields of a shape have the names of Megatron's options, so the table of options used in training decides.
    """
    of_shape = {} if shape is None else vars(shape)
    args = Namespace(**of_shape, balance_context_parallel=ALL_RANKS, use_megatron_fsdp=topology.fully_sharded)
    return dynamic_cp_problem(args)
