"""Send and receive buffers of exchanges between CPUs, used again in every step."""

from __future__ import annotations

import torch
from torch import Tensor


class HostBuffers:
    """The buffers of one rank, as large as the largest step so far.

    Large blocks of fresh memory cost a page fault every 4 KiB, which takes three times as long as the copy into them.
    torch keeps pinned memory and that of GPUs by itself.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, *, nbytes: int) -> Tensor:
        """A buffer, uint8 `[nbytes]`: the memory that was returned for this name before, whose content is lost."""
        if name not in self._kept or self._kept[name].numel() < nbytes:
            self._kept.pop(name, None)  # before the larger one is made
            self._kept[name] = torch.empty(nbytes, dtype=torch.uint8)
        return self._kept[name][:nbytes]
