"""Faster Megatron-LM training on samples of very different lengths.

Each step, `build_data_schedule` plans which data-parallel rank runs which sample in which micro-batch. The
names here are the planner's: importing them loads numpy, and neither torch nor Megatron.
"""

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.model.flops import calculate_fwd_flops
from megatron_balance.model.shape import ModelShape
from megatron_balance.planner import DataSchedule, Forest, balance, build_data_schedule
from megatron_balance.topology import Limits, Topology
from megatron_balance.version import __version__

__all__ = [
    "BalanceError",
    "CostModel",
    "DataSchedule",
    "Forest",
    "Limits",
    "ModelShape",
    "Topology",
    "__version__",
    "balance",
    "build_data_schedule",
    "calculate_fwd_flops",
]
