"""Balanced batches without Megatron: samplers for the loaders of torch, Accelerate, Trainer and TRL."""

from megatron_balance.lengths import dataset_lengths
from megatron_balance.loaders.sampler import BalancedBatchSampler, BalancedStream
from megatron_balance.loaders.trainer import balance_trainer

__all__ = ["BalancedBatchSampler", "BalancedStream", "balance_trainer", "dataset_lengths"]
