"""Packs samples that begin alike into one thd micro-batch, which holds once what they share.

In the order of the plan every sample adds the tokens behind those that it shares with the sample before it. Samples
part in front of the last token that they have in common, whose labels differ: every token has one label, and the loss
mask is the sum of its samples' masks, so that a loss that is linear in the mask is what it is without sharing.

A node is a run of tokens that the same samples hold. The nodes below it follow it at once (depth first): each node
attends to itself causally, and what is below to all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.samples.packing import FILLER_TOKENS
from megatron_balance.samples.sample import Samples

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The nodes of a micro-batch, in the order of their tokens; filler is in nodes without samples.

    Attributes:
        starts: `[num_nodes + 1]` the first token of each, and the end.
        ends: `[num_nodes]` the end of the nodes below each.
        first_positions: `[num_nodes]` the position of its first token in its samples.
        first_samples, num_samples: `[num_nodes]` the first sample that holds each, and how many follow one another.
        shared: of each sample, tokens that it shares with the one before it.
    """

    starts: Ints
    ends: Ints
    first_positions: Ints
    first_samples: Ints
    num_samples: Ints
    shared: Sequence[int]

    @classmethod
    def of(cls, lengths: Sequence[int], shared: Sequence[int], *, num_tokens: int) -> PrefixTree:
        """The tree of samples of these lengths, of which each shares so many tokens with the one before it."""
        filler = num_tokens - (sum(lengths) - sum(shared))
        fillers = [(min(FILLER_TOKENS, filler - start), 0) for start in range(0, filler, FILLER_TOKENS)]
        runs = [*zip(lengths, shared, strict=True), *fillers]
        starts = _cuts(runs)
        ends, first_positions, first_samples, num_samples = np.zeros((4, starts.size - 1), dtype=np.int64)
        path: list[tuple[int, int]] = []  # of the sample before: nodes, and the position where each ends
        node = place = 0
        for sample, (length, common) in enumerate([*runs, (0, 0)]):
            while path and path[-1][1] > common:
                left, _ = path.pop()
                ends[left], num_samples[left] = place, sample - first_samples[left]
            position, place = common, place + length - common
            while node < ends.size and starts[node] < place:
                first_positions[node], first_samples[node] = position, sample
                position += int(starts[node + 1] - starts[node])
                path.append((node, position))
                node += 1
        is_filler = starts[:-1] >= num_tokens - filler
        first_samples[is_filler] = num_samples[is_filler] = 0
        return cls(starts, ends, first_positions, first_samples, num_samples, shared)

    @property
    def positions(self) -> Ints:
        """`[num_tokens]` the position of each token in its samples."""
        return np.arange(self.starts[-1]) + np.repeat(self.first_positions - self.starts[:-1], np.diff(self.starts))

    @property
    def multiplicity(self) -> Ints:
        """`[num_tokens]` samples that hold each token."""
        return np.repeat(self.num_samples, np.diff(self.starts))

    @property
    def token_ends(self) -> Ints:
        """`[num_tokens]` where the node of each token ends, with all nodes below it."""
        return np.repeat(self.ends, np.diff(self.starts))


def _cuts(runs: Sequence[tuple[int, int]]) -> Ints:
    """Where nodes begin, and the end: where a sample begins to add tokens, and where a later one leaves it."""
    cuts: set[int] = set()
    path: list[tuple[int, int]] = []  # what the sample before is made of: first positions, and their tokens
    place = 0
    for length, common in runs:
        while path and path[-1][0] >= common:
            path.pop()
        if path:
            cuts.add(path[-1][1] + common - path[-1][0])
        if length > common:
            cuts.add(place)
            path.append((common, place))
            place += length - common
    return np.array(sorted(cuts | {place}), dtype=np.int64)


def check_shareable(samples: Samples, *, weighting: str | None = None) -> None:
    """Refuse samples with other keys than per-token ones, but for a `weighting`, or positions of their own."""
    keys = () if samples.schema is None else samples.schema.keys
    other = [key.name for key in keys if key.kind != "per_token" and key.name != weighting]
    mask = next((key for key in keys if key.name == "loss_mask"), None)
    positions = samples.columns.get("position_ids", ())
    if other:
        problem = f"keys that are not of tokens ({', '.join(other)}), and a shared pack has no bounds of samples"
    elif keys and (mask is None or mask.dtype == torch.bool):
        problem = "no loss_mask of numbers, by which a shared token counts as often as samples hold it"
    elif not all(torch.equal(values, torch.arange(len(values), dtype=values.dtype)) for values in positions):
        problem = "position_ids that do not count the tokens of a sample from 0"
    else:
        return
    raise BalanceError(f"--balance-share-prefixes is set, and samples have {problem}: drop them, or the flag.")


def pack_shared(samples: Samples, *, tree: PrefixTree, masks_differ: bool = True) -> dict[str, Tensor]:
    """Pack samples, in the order of their tree, into one micro-batch; none make a masked dummy.

    Args:
        samples: on the CPU, of `check_shareable`, with the schema of all samples of the run.
        tree: of those that are not empty.
        masks_differ: False where samples have weights, and share tokens of one loss mask.

    Returns:
        Per-token keys `[1, num_tokens, *trailing]`, filled up with zeros, `position_ids` counted within each sample,
        and what `tree_starts` returns.

    Raises:
        BalanceError: shared tokens differ in any key but the loss mask: hashes were equal by chance.
    """
    assert samples.schema is not None, "a dummy has the schema of the run"
    keys = [key for key in samples.schema.keys if key.kind == "per_token" and key.name != "position_ids"]
    samples = samples.select(samples.lengths.nonzero()[0])
    shared, filler = tree.shared, int((tree.multiplicity == 0).sum())
    batch = tree_starts(tree)
    for key in keys:
        column = samples.columns.get(key.name, ())
        for index, common in enumerate(shared if key.name != "loss_mask" or not masks_differ else ()):
            if common and not torch.equal(column[index - 1][:common], column[index][:common]):
                raise BalanceError(
                    f"--balance-share-prefixes: by their hashes two samples share {common} tokens, and {key.name} "
                    "differs among them: train without the flag, and report this with the samples."
                )
        added = [values[common:] for values, common in zip(column, shared, strict=True)]
        batch[key.name] = torch.cat([*added, torch.zeros(filler, *key.shape, dtype=key.dtype)]).unsqueeze(0)
    mask, path, place = batch["loss_mask"][0], np.zeros(0, dtype=np.int64), 0
    for values, common in zip(samples.columns.get("loss_mask", ()), shared, strict=True):
        path = np.append(path[:common], np.arange(place, place + len(values) - common))
        mask[path[:common]] += values[:common]
        place += len(values) - common
    return batch | {"position_ids": torch.from_numpy(tree.positions).unsqueeze(0)}


def tree_starts(tree: PrefixTree) -> dict[str, Tensor]:
    """`cu_seqlens` int32 `[1, 2]` of one sequence, and `max_seqlen` `[1]`, which rotary embeddings make rows for."""
    longest = int(tree.positions.max()) + 1
    ends = torch.tensor([[0, int(tree.starts[-1])]], dtype=torch.int32)
    return {"cu_seqlens": ends, "max_seqlen": torch.tensor([longest], dtype=torch.int32)}
