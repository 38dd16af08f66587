"""Which layers run in which model chunk of a pipeline, as Megatron splits them.

A stage holds `vpp_size` chunks; micro-batches pass chunk 0 of every stage, then chunk 1, and so on, so that chunk i in
this order is on stage `i % pp_size`. The embedding is on the first one and costs nothing here; the output layer, once
more for each depth of multi-token prediction, is on the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from megatron_balance.errors import BalanceError
from megatron_balance.model.flops import Chunk

if TYPE_CHECKING:
    from megatron_balance.model.shape import ModelShape


@dataclass(frozen=True)
class PipelineLayout:
    """The layers of each chunk of a pipeline.

    Attributes:
        pp_size: stages.
        num_layers: `[pp_size * vpp_size]` decoder layers of each chunk, in the order in which micro-batches pass them.
        mtp_chunk: the chunk with the layers of multi-token prediction, counted from the end if negative.

    Raises:
        BalanceError: the chunks are no multiple of the stages.

    Example:
        >>> PipelineLayout.even_split(10, pp_size=4).num_layers  # the last stage has the output layer as well
        (3, 3, 2, 2)
    """

    pp_size: int
    num_layers: tuple[int, ...]
    mtp_chunk: int = -1

    def __post_init__(self) -> None:
        if not self.num_layers or len(self.num_layers) % self.pp_size or min(self.num_layers) < 0:
            raise BalanceError(
                f"PipelineLayout.num_layers is {self.num_layers}: it must have as many chunks for each of "
                f"{self.pp_size} stages, and no negative number of layers."
            )

    @classmethod
    def even_split(cls, num_layers: int, *, pp_size: int, vpp_size: int = 1) -> PipelineLayout:
        """As many layers on each chunk; where they do not divide, one more on the first ones."""
        chunks = pp_size * vpp_size
        return cls(pp_size, tuple(num_layers // chunks + (chunk < num_layers % chunks) for chunk in range(chunks)))

    def chunks(self, shape: ModelShape) -> list[Chunk]:
        """What each chunk runs; the layers must be those of the model."""
        if sum(self.num_layers) != shape.num_layers:
            raise BalanceError(
                f"PipelineLayout.num_layers is {self.num_layers}: the model has {shape.num_layers} layers."
            )
        layers, last, depths = shape.layers(), len(self.num_layers) - 1, shape.mtp_num_layers
        result: list[Chunk] = []
        for index, (first, end) in enumerate(pairwise(accumulate(self.num_layers, initial=0))):
            has_mtp = index == self.mtp_chunk % (last + 1)
            result.append(
                Chunk(
                    layers[first:end] + (layers[shape.num_layers :] if has_mtp else ()),
                    mtp_projections=depths * has_mtp,
                    output_layers=(1 + depths) * (index == last),
                    has_encoder=index == 0,
                )
            )
        return result
