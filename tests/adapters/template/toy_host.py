"""A toy host: every rank loads its own sequences and runs them one by one; ranks meet once a step."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


class Loader:
    def __init__(self, sequences: Sequence[Tensor]) -> None:
        self.sequences = list(sequences)

    def load_step(self, group: dist.ProcessGroup) -> list[list[Tensor]]:
        """Micro-batches of this rank: one sequence in each."""
        return [[sequence] for sequence in self.sequences]


def train_step(loader: Loader, group: dist.ProcessGroup) -> list[list[Tensor]]:
    """The tokens that this rank computes in the step."""
    return loader.load_step(group)
