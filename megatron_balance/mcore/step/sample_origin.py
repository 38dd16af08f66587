"""Maps a row of a batch to its sample in the data set, so that error messages can name it.

Megatron's `single` sampler goes through the data set in order: `micro_batch_size` consecutive samples to each
data-parallel rank in turn, from the run's or checkpoint's first sample on. The order of other samplers is not known
here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SampleOrigin:
    """Positions in the data set of the items that one data-parallel rank loads.

    Attributes:
        first_sample: index in the data set with which the loader of all ranks began.
        micro_batch_size: samples of an item.
        dp_rank: of this rank, without context parallelism.
        dp_size: data-parallel ranks.
    """

    first_sample: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def sample_of(self, item: int, *, row: int) -> int:
        """Index in the data set.

        Args:
            item: counted from the loader's first on this rank.
            row: within the item.
        """
        return self.first_sample + (item * self.dp_size + self.dp_rank) * self.micro_batch_size + row
