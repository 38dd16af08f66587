"""Moves samples between ranks by a given schedule, over torch.distributed.

In a step: `split_packed` (what the dataloader yields → samples), `gather_lengths` (every rank learns all lengths),
the planner, `check_same_schedule`, `reroute_samples`, `pack_microbatch`. Process groups are arguments and only
tensors are sent.
"""

from megatron_balance.runtime.exchange import reroute_samples
from megatron_balance.runtime.gather import GatheredLengths, check_same_schedule, gather_lengths, gather_sample_lengths
from megatron_balance.samples.packing import dummy_microbatch, pack_microbatch
from megatron_balance.samples.sample import KeySpec, Sample, SampleSchema
from megatron_balance.samples.unpacking import split_packed

__all__ = [
    "GatheredLengths",
    "KeySpec",
    "Sample",
    "SampleSchema",
    "check_same_schedule",
    "dummy_microbatch",
    "gather_lengths",
    "gather_sample_lengths",
    "pack_microbatch",
    "reroute_samples",
    "split_packed",
]
