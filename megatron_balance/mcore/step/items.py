"""Splits the items of a data loader into samples on the CPU; an error names the item, and its rows in the data set.

Megatron's `single` sampler goes through the data set in order: `micro_batch_size` consecutive samples to each
data-parallel rank in turn, from the run's or checkpoint's first sample on. The order of other samplers is not known
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.failure import Failure, attempt
from megatron_balance.samples.attention_keys import with_cu_seqlens
from megatron_balance.samples.padded_rows import with_row_lengths
from megatron_balance.samples.sample import Sample, SampleSchema
from megatron_balance.samples.unpacking import RowError, split_packed


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


class ItemSplitter:
    """Splits one step's items.

    Args:
        unit: `segment` or `sample`.
        unpad: as in BalanceConfig.
        origin: which sample of the data set a row is, or None where that is not known.
    """

    def __init__(self, *, unit: str, unpad: int | str | None, origin: SampleOrigin | None) -> None:
        self._unit = unit
        self._unpad = unpad
        self._origin = origin

    def has_lengths(self, item: Mapping[str, Any]) -> bool:
        """True if the lengths of an item's sequences can be read."""
        return self._unpad is not None or any(item.get(key) is not None for key in ("cu_seqlens", "cu_seqlens_q"))

    def split(self, items: Sequence[Mapping[str, Any]], *, first_item: int) -> list[Sample] | Failure:
        """The samples of all items on the CPU, or the failure of one item.

        Args:
            items: of the data loader.
            first_item: number of the first of them, counted from the loader's first.
        """
        samples: list[Sample] = []
        schema: SampleSchema | None = None
        for index, item in enumerate(items):
            of_item = attempt(self._split_item, item, schema=schema)
            if isinstance(of_item, Failure):
                return replace(of_item, during=self._name(index, first_item=first_item, error=of_item.error))
            schema = schema or (SampleSchema.of(of_item[0]) if of_item else None)
            samples.extend(of_item)
        return samples

    def _split_item(self, item: Mapping[str, Any], *, schema: SampleSchema | None) -> list[Sample]:
        """The samples of one item; a BalanceError if their schema differs from that of earlier items."""
        on_cpu = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in item.items()}
        on_cpu = with_cu_seqlens(on_cpu)
        if self._unpad is not None and on_cpu.get("cu_seqlens") is None:
            on_cpu = with_row_lengths(on_cpu, padding=self._unpad)
        of_item = split_packed(on_cpu, unit=self._unit)
        # Samples of one item are slices of the same tensors; `gather_sample_lengths` compares each of them.
        if schema is not None and of_item and not schema.fits(of_item[0]):
            difference = "; ".join(SampleSchema.of(of_item[0]).differences(schema))
            raise BalanceError(f"it differs from the items before it: {difference}.")
        return of_item

    def _name(self, index: int, *, first_item: int, error: Exception) -> str:
        """The item in the words of an error: its number in the step, and its samples in the data set if known."""
        name = f"item {index} of this step"
        if self._origin is None:
            return name
        rows = [error.row] if isinstance(error, RowError) else [0, self._origin.micro_batch_size - 1]
        samples = [str(self._origin.sample_of(first_item + index, row=row)) for row in rows]
        return f"{name} (in the data set: sample {' to '.join(dict.fromkeys(samples))})"
