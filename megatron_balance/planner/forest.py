"""Samples that begin with the same tokens: a forest whose paths are samples.

A node of the forest is a run of tokens, a sample the path from a root to its node. A micro-batch computes every node on
the paths of its samples once. In depth-first order a sample adds what it does not share with the nearest sample before
it, so that a plan is judged by neighbours alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner.problem import INT_MAX, Ints, as_integers, check_count, number_groups

if TYPE_CHECKING:
    from megatron_balance.samples.shared_prefixes import HashChains


@dataclass(frozen=True, eq=False)
class Forest:
    """Runs of tokens that samples share, each after its parent's.

    Attributes:
        node_tokens: `[num_nodes]` tokens of each node.
        parent: `[num_nodes]` the node that each follows, of a lower index; -1 for a root.
        node_of: `[num_samples]` the last node of each sample.

    Examples:
        >>> forest = Forest.from_prompts([7, 5, 4], prompt_tokens=[3, 3, 0], groups=["a", "a", "b"])
        >>> forest.lengths.tolist(), int(forest.node_tokens.sum())
        ([7, 5, 4], 13)
    """

    node_tokens: Ints
    parent: Ints
    node_of: Ints

    @classmethod
    def from_nodes(cls, node_tokens: Any, parent: Any, node_of: Any) -> Forest:
        """A forest of checked arrays; a BalanceError names the wrong entry."""
        tokens, last = as_integers(node_tokens, name="node_tokens"), as_integers(node_of, name="node_of")
        before = as_integers(np.asarray(parent) + 1, name="parent + 1") - 1
        wrong = np.flatnonzero(before >= np.arange(before.size))
        if before.size != tokens.size or wrong.size:
            raise BalanceError(
                f"parent has {before.size} entries for {tokens.size} nodes"
                + (f", and parent[{wrong[0]}] is {before[wrong[0]]}" if wrong.size else "")
                + ": give one for each node, below its own index, or -1."
            )
        if int(last.max(initial=-1)) >= tokens.size:
            raise BalanceError(f"node_of[{last.argmax()}] is {last.max()}: it must be below {tokens.size} nodes.")
        return cls(tokens, before, last)

    @classmethod
    def from_prompts(
        cls,
        lengths: Sequence[int] | NDArray[Any],
        *,
        prompt_tokens: Sequence[int] | NDArray[Any],
        groups: Sequence[Hashable] | NDArray[Any],
    ) -> Forest:
        """The samples of a group begin with the same prompt.

        Args:
            lengths: `[num_samples]` tokens, the prompt's included.
            prompt_tokens: `[num_samples]` tokens that a sample shares; of a group the least counts.
            groups: `[num_samples]` id of the group of each sample, any number or string.

        Raises:
            BalanceError: names the argument that is wrong.
        """
        total, prompts = as_integers(lengths, name="lengths"), as_integers(prompt_tokens, name="prompt_tokens")
        check_count("prompt_tokens", prompts.size, count=total.size)
        group_of = number_groups(groups, count=total.size)
        shared = np.full(int(group_of.max(initial=-1)) + 1, INT_MAX)
        np.minimum.at(shared, group_of, np.minimum(prompts, total))
        parent = np.concatenate([np.full(shared.size, -1), group_of])
        tokens = np.concatenate([shared, total - shared[group_of]])
        return cls(tokens, parent, shared.size + np.arange(total.size))

    @classmethod
    def from_chains(cls, lengths: Sequence[int] | NDArray[Any], chains: HashChains) -> Forest:
        """Samples share what the last hash that they have in common is of.

        Two hashes that are equal by chance give a forest that shares too much, never one of other lengths: compare the
        samples of a micro-batch before they are packed.

        Args:
            lengths: `[num_samples]` tokens.
            chains: of all samples, from `hash_chains` or `gather_lengths`.
        """
        total = as_integers(lengths, name="lengths")
        sample = np.repeat(np.arange(total.size), chains.counts)
        is_first = np.diff(sample, prepend=-1) > 0
        _, example, node = np.unique(chains.hashes, return_index=True, return_inverse=True)
        is_sound = chains.ends == chains.ends[example][node]  # else equal by chance
        users = np.bincount(node[is_sound], minlength=example.size)
        # Of hashes that the same samples have in common, the last is a node.
        followers = np.append(np.where(is_first | ~is_sound, 0, users[node])[1:], 0)
        kept = np.flatnonzero(is_sound & (users[node] > 1) & (followers < users[node]))
        first, inverse = np.unique(node[kept], return_index=True, return_inverse=True)[1:]
        by_end = np.argsort(chains.ends[kept][first], kind="stable")
        place = np.argsort(by_end)[inverse]
        parent = np.where(np.diff(sample[kept], prepend=-1) > 0, -1, np.roll(place, 1))[first][by_end]
        ends = chains.ends[kept][first][by_end]
        last = np.full(total.size, -1)
        last[sample[kept]] = place  # the last of a sample stays
        shared = np.append(ends, 0)
        tokens = np.concatenate([ends - shared[parent], total - shared[last]])
        return cls(tokens, np.concatenate([parent, last]), ends.size + np.arange(total.size))

    @cached_property
    def paths(self) -> Ints:
        """`[depth, num_samples]` the nodes of each sample, a root first; -1 behind its last."""
        climbed = [self.node_of]
        while (climbed[-1] >= 0).any():
            climbed.append(np.where(climbed[-1] < 0, -1, self.parent[climbed[-1]]))
        upward = np.stack(climbed[:-1] or climbed)
        depth = (upward >= 0).sum(axis=0)
        row = depth - 1 - np.arange(len(upward))[:, None]
        return np.where(row < 0, -1, np.take_along_axis(upward, row.clip(0), axis=0))

    @cached_property
    def ends(self) -> Ints:
        """`[num_nodes]` tokens from the start of a sample to the end of each node."""
        ends = np.zeros(self.node_tokens.size + 1, dtype=np.int64)
        for nodes in self.levels:
            ends[nodes] = ends[self.parent[nodes]] + self.node_tokens[nodes]
        return ends[:-1]

    @cached_property
    def levels(self) -> list[Ints]:
        """The nodes of each depth that samples have, roots first."""
        return [np.unique(nodes[nodes >= 0]) for nodes in self.paths]

    @property
    def lengths(self) -> Ints:
        """`[num_samples]` tokens of each sample."""
        return self.ends[self.node_of]

    @cached_property
    def order(self) -> Ints:
        """Samples depth first, so that those that share tokens are neighbours; of siblings the longest first."""
        total = np.zeros(self.node_tokens.size, dtype=np.int64)
        for nodes in self.paths:
            np.add.at(total, nodes[nodes >= 0], self.lengths[nodes >= 0])
        rank = np.empty(total.size + 1, dtype=np.int64)
        rank[np.argsort(-total, kind="stable")] = np.arange(total.size)
        rank[-1] = -1  # a sample that ends where others go on comes first
        return np.lexsort(rank[self.paths][::-1])

    @cached_property
    def branches(self) -> Ints:
        """`[num_samples]` the last node that each sample of `order` shares with the one before it, or -1."""
        branches = np.full(self.order.size, -1)
        branches[1:] = self._last_shared(self.order[:-1], self.order[1:])
        return branches

    def starts(self, microbatch_of: Ints) -> Ints:
        """`[num_samples]` the node where each sample leaves the one before it in its micro-batch, -1 where none is."""
        samples = self.order[np.argsort(microbatch_of[self.order], kind="stable")]
        before, after = samples[:-1], samples[1:]
        follows = microbatch_of[before] == microbatch_of[after]
        starts = np.full(samples.size, -1)
        starts[after[follows]] = self._last_shared(before[follows], after[follows])
        return starts

    def _last_shared(self, first: Ints, second: Ints) -> Ints:
        """The last node that pairs of samples have in common, or -1."""
        paths = self.paths[:, second]
        # A node comes after its parent.
        return np.where(self.paths[:, first] == paths, paths, -1).max(axis=0, initial=-1)
