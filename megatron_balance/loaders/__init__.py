"""Balanced batches without Megatron: samplers for the loaders of torch, Accelerate, Trainer and TRL."""

from megatron_balance.loaders.sampler import BalancedBatchSampler
from megatron_balance.loaders.stream import BalancedStream
from megatron_balance.loaders.trainer import balance_trainer, dataset_lengths

__all__ = ["BalancedBatchSampler", "BalancedStream", "balance_trainer", "dataset_lengths"]
