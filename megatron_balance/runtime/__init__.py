"""Moves samples between ranks by a given schedule, over torch.distributed.

In a step: `samples.split_packed` (what the dataloader yields → samples), `gather_sample_lengths` (every rank learns all
lengths), the planner, `check_same_schedule`, `reroute_samples`, `samples.pack_microbatch`. Process groups are arguments
and only tensors are sent.
"""

from megatron_balance.runtime.comm import PeerError
from megatron_balance.runtime.exchange import reroute_samples
from megatron_balance.runtime.failure import check_same_schedule, share
from megatron_balance.runtime.gather import (
    GatheredLengths,
    Header,
    gather_lengths,
    gather_sample_lengths,
    image_patches,
)
from megatron_balance.runtime.start import Meeting, agree

__all__ = [
    "GatheredLengths",
    "Header",
    "Meeting",
    "PeerError",
    "agree",
    "check_same_schedule",
    "gather_lengths",
    "gather_sample_lengths",
    "image_patches",
    "reroute_samples",
    "share",
]
