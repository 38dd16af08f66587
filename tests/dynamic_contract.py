"""The contract of schedulers of dynamic context parallelism, as Megatron's dev branch and verl execute their plans.

Dev counts the ranks that hold a micro-batch's first sample and takes this rank's process group of that size; those
groups are aligned blocks. verl checks that ranks with equal lists are neighbours and aligned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


def check_contract(
    slots: Sequence[Sequence[Sequence[int]]],
    *,
    lengths: Mapping[int, int],
    num_ranks: int,
    cap: int,
    multiple: int = 1,
    least: int = 1,
) -> None:
    """Asserts the contract.

    Args:
        slots: `[num_microbatches][num_ranks]` lists of sample ids.
        lengths: tokens of every sample, by id.
        num_ranks: DP×CP.
        cap: tokens of a rank in a micro-batch.
        multiple: of micro-batches.
        least: ranks of a group, at least.
    """
    assert len(slots) % multiple == 0, "micro-batches are a multiple"
    places: Counter[int] = Counter()
    for ranks in slots:
        assert len(ranks) == num_ranks, "a list for every rank"
        assert all(ranks), "no rank is empty"
        first = 0
        while first < num_ranks:
            ids = list(ranks[first])
            # As dev counts, and as verl does.
            holders = [rank for rank, other in enumerate(ranks) if ids[0] in other]
            assert holders == [rank for rank, other in enumerate(ranks) if list(other) == ids], "one order on all ranks"
            size = len(holders)
            assert holders == list(range(first, first + size)), "members are neighbours"
            assert size == num_ranks or size & (size - 1) == 0, "a power of two, or all"
            assert size >= least, "the least size"
            assert first % size == 0, "a group starts at a multiple of its size"
            tokens = sum(lengths[sample] for sample in ids)
            alone = len(ids) == 1 and size == num_ranks
            assert tokens <= cap * size or alone, "the cap of a rank"
            places.update(ids)
            first += size
    assert places == Counter(lengths.keys()), "every sample once"
