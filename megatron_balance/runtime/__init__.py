"""Moves samples between ranks by a given schedule, over torch.distributed.

In a step: `split_packed` (what the dataloader yields → samples), `gather_lengths` (every rank learns all lengths),
the planner, `check_same_schedule`, `reroute_samples`, `pack_microbatch`. Process groups are arguments and only
tensors are sent.
"""

from megatron_balance.runtime.agreement import Meeting, agree
from megatron_balance.runtime.exchange import reroute_samples, send_copies
from megatron_balance.runtime.gather import GatheredLengths, check_same_schedule, gather_lengths, gather_sample_lengths
from megatron_balance.runtime.image_patches import image_patches
from megatron_balance.runtime.peers import PeerError
from megatron_balance.runtime.replica import Replica, Share
from megatron_balance.samples.packing import dummy_microbatch, pack_microbatch
from megatron_balance.samples.sample import KeySpec, Sample, SampleSchema
from megatron_balance.samples.unpacking import split_packed

__all__ = [
    "GatheredLengths",
    "KeySpec",
    "Meeting",
    "PeerError",
    "Replica",
    "Sample",
    "SampleSchema",
    "Share",
    "agree",
    "check_same_schedule",
    "dummy_microbatch",
    "gather_lengths",
    "gather_sample_lengths",
    "image_patches",
    "pack_microbatch",
    "reroute_samples",
    "send_copies",
    "split_packed",
]
