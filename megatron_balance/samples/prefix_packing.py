"""Packs samples that begin alike into one thd micro-batch, which holds once what they share.

In the order of the plan every sample adds the tokens behind those that it shares with the sample before it. Samples
part in front of the last token that they have in common, whose labels differ: every token has one label, and the loss
mask is the sum of its samples' masks, so that a loss that is linear in the mask is what it is without sharing.

A token is followed at once by all tokens behind it in its samples (depth first): it attends to those before it that
do not end, with these, before it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.samples.sample import Samples

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The tokens of a micro-batch in the order of its samples; filler is in no sample.

    Attributes:
        positions: `[num_tokens]` the position of each token in its samples.
        ends: `[num_tokens]` where the tokens end that follow it in its samples.
        multiplicity: `[num_tokens]` samples that hold each token.
        paths: of each sample, the places of its tokens.
    """

    positions: Ints
    ends: Ints
    multiplicity: Ints
    paths: Sequence[Ints]

    @classmethod
    def of(cls, lengths: Sequence[int], shared: Sequence[int], *, num_tokens: int) -> PrefixTree:
        """The tree of samples of these lengths, of which each shares so many tokens with the one before it."""
        filler = num_tokens - (sum(lengths) - sum(shared))
        positions, ends, multiplicity = np.zeros((3, num_tokens), dtype=np.int64)
        paths, path, place = list[Ints](), np.zeros(0, dtype=np.int64), 0
        for length, common in [*zip(lengths, shared, strict=True), (filler, 0)]:
            path = np.append(path[:common], np.arange(place, place + length - common))
            place += length - common
            positions[path], ends[path] = np.arange(length), place
            multiplicity[path] += len(paths) < len(lengths)
            paths.append(path)
        return cls(positions, ends, multiplicity, paths[: len(lengths)])


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
    schema, samples = samples.schema, samples.select(samples.lengths.nonzero()[0])
    assert schema is not None, "a dummy has the schema of the run"
    paths = [torch.from_numpy(path) for path in tree.paths]
    batch = tree_starts(tree)
    for key in schema.keys:
        if key.kind != "per_token" or key.name == "position_ids":
            continue
        values = torch.zeros(tree.positions.size, *key.shape, dtype=key.dtype)
        rows = [*zip(paths, samples.columns.get(key.name, ()), strict=True)]
        for path, row in rows:
            values[path] = row
        may_differ = key.name == "loss_mask" and masks_differ
        if not may_differ and not all(torch.equal(values[path], row) for path, row in rows):
            raise BalanceError(
                f"--balance-share-prefixes: by their hashes two samples begin alike, and {key.name} differs among the "
                "tokens that they share: train without the flag, and report this with the samples."
            )
        if key.name == "loss_mask":
            values.zero_()
            for path, row in rows:
                values[path] += row
        batch[key.name] = values.unsqueeze(0)
    return batch | {"position_ids": torch.from_numpy(tree.positions).unsqueeze(0)}


def tree_starts(tree: PrefixTree) -> dict[str, Tensor]:
    """`cu_seqlens` int32 `[1, 2]` of one sequence, and `max_seqlen` `[1]`, which rotary embeddings make rows for."""
    longest = int(tree.positions.max()) + 1
    ends = torch.tensor([[0, tree.positions.size]], dtype=torch.int32)
    return {"cu_seqlens": ends, "max_seqlen": torch.tensor([longest], dtype=torch.int32)}
