"""Ranks and limits of a run.

Terms are Megatron's: a *micro-batch* is one forward-backward pass of one model replica, a *slot* is
the index of a micro-batch within a data-parallel rank. `original_seq_len` counts the tokens of a
sample, `padded_seq_len` those that it occupies once padded for context and sequence parallelism.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError, check_sizes


@dataclass(frozen=True)
class Topology:
    """Ranks of one training run, in Megatron's terms.

    Attributes:
        dp_size: data-parallel ranks that load different samples (context-parallel ranks not counted).
        cp_size: context-parallel ranks that share one sample.
        tp_size: tensor-parallel ranks.
        pp_size: pipeline stages.
        ep_size: expert-parallel ranks.
        etp_size: tensor-parallel ranks of an expert (`--expert-tensor-parallel-size`).
        vpp_size: model chunks a pipeline stage holds (virtual pipeline).
        microbatch_multiple: num_microbatches must be a multiple of this
            (`microbatch_group_size_per_vp_stage` under interleaving).
        sequence_parallel: activations are split over tensor-parallel ranks along the sequence.
        fully_sharded: weights are gathered in every micro-batch (FSDP, ZeRO-3).
        reduces_in_microbatches: all data-parallel ranks reduce a number in every micro-batch (FP8's `delayed` scaling,
            an auxiliary loss over all ranks).
        token_alignment: the tokens of a micro-batch on each GPU, once context and sequence parallelism have split
            them, are a multiple of this, as FP8 and FP4 layers require. 1 for none.
        dynamic_cp: every micro-batch has a context-parallel size of its own, a power of two of the
            `dp_size * cp_size` DP×CP ranks.
        max_cp_size: largest such size; None for as large as these allow.

    Raises:
        BalanceError: a size is not a positive integer, or `max_cp_size` is given without `dynamic_cp`.
    """

    dp_size: int
    _: KW_ONLY
    cp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    etp_size: int = 1
    vpp_size: int = 1
    microbatch_multiple: int = 1
    sequence_parallel: bool = False
    fully_sharded: bool = False
    reduces_in_microbatches: bool = False
    token_alignment: int = 1
    dynamic_cp: bool = False
    max_cp_size: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.pp_size > 1 and self.vpp_size > 1 and self.microbatch_multiple < self.pp_size:
            raise BalanceError(
                f"Topology.microbatch_multiple is {self.microbatch_multiple} with vpp_size {self.vpp_size}: Megatron "
                f"runs groups of at least pp_size micro-batches through a chunk, so set at least {self.pp_size}."
            )
        if self.max_cp_size is not None and not self.dynamic_cp:
            raise BalanceError(
                f"Topology.max_cp_size is {self.max_cp_size} without dynamic_cp: set dynamic_cp, or leave it out."
            )

    @property
    def dp_cp_size(self) -> int:
        """Ranks that dynamic context parallelism groups: DP×CP rank `dp_rank * cp_size + cp_rank`."""
        return self.dp_size * self.cp_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks of a pipeline stage that share a sample's cost; with dynamic sizes those of a DP×CP rank."""
        return self.tp_size * (1 if self.dynamic_cp else self.cp_size)

    @property
    def num_gpus(self) -> int:
        """GPUs of the run. Experts are spread over those that are there already."""
        return self.dp_cp_size * self.tp_size * self.pp_size

    @property
    def gpus_per_rank(self) -> int:
        """GPUs that share the cost of a micro-batch of a data-parallel rank; with `dynamic_cp` of a DP×CP rank."""
        return self.model_parallel_size * self.pp_size

    @property
    def num_sockets(self) -> int:
        """Sockets of this package's on one rank, at most: of its data-parallel group, and in its model replica.

        Examples:
            >>> Topology(1024, tp_size=8).num_sockets
            2051
        """
        return 2 * self.dp_size + (self.cp_size * self.tp_size * self.pp_size - 1).bit_length()

    @property
    def dynamic_cp_sizes(self) -> tuple[int, ...]:
        """Context-parallel sizes that a micro-batch may have, ascending.

        Examples:
            >>> Topology(3, cp_size=4, dynamic_cp=True).dynamic_cp_sizes
            (1, 2, 4, 8)
        """
        if not self.dynamic_cp:
            return (self.cp_size,)
        largest = min(self.dp_cp_size, self.max_cp_size or self.dp_cp_size)
        return tuple(1 << level for level in range(largest.bit_length()))

    @property
    def has_equal_counts(self) -> bool:
        """True if all ranks run the same number of micro-batches: those of a pipeline meet in each, as others may."""
        return self.pp_size > 1 or self.ep_size > 1 or self.sync_size > 1

    @property
    def token_multiple(self) -> int:
        """Every sequence is padded to a multiple of this many tokens.

        Context parallelism cuts a sequence into `2*cp_size` chunks (two a rank, for causal balance);
        sequence parallelism then splits each rank's share over `tp_size`.
        """
        for_cp = 2 * self.cp_size if self.cp_size > 1 else 1
        return for_cp * self._sp_size

    @property
    def pack_multiple(self) -> int:
        """Every micro-batch, dummies included, holds a multiple of this many tokens over its context-parallel ranks.

        Examples:
            >>> Topology(8, cp_size=2, tp_size=4, sequence_parallel=True, token_alignment=32).pack_multiple
            256
        """
        return math.lcm(self.token_alignment * self.cp_size * self._sp_size, self.token_multiple)

    @property
    def _sp_size(self) -> int:
        return self.tp_size if self.sequence_parallel else 1

    @property
    def sync_size(self) -> int:
        """Neighbouring data-parallel ranks, or DP×CP ranks, that wait for one another in every micro-batch; 1 for none.

        Examples:
            >>> [Topology(8, **ranks).sync_size for ranks in ({}, {"ep_size": 4}, {"fully_sharded": True})]
            [1, 4, 8]
        """
        if self.fully_sharded or self.reduces_in_microbatches:
            return self.dp_cp_size if self.dynamic_cp else self.dp_size
        return self.ep_dp_size

    @property
    def ep_dp_size(self) -> int:
        """Neighbouring data-parallel ranks, or DP×CP ranks, that exchange tokens with one another in every MoE layer.

        Megatron numbers ranks with tensor parallelism innermost, then context, then data parallelism,
        and forms expert groups of `etp_size*ep_size` consecutive ranks, so that a group reaches over
        `etp_size*ep_size / (tp_size*cp_size)` data-parallel ranks, and with `dynamic_cp` over `etp_size*ep_size /
        tp_size` DP×CP ranks. (megatron.core.parallel_state, RankGenerator with order tp-cp-ep-dp-pp.)
        """
        if self.ep_size == 1:
            return 1
        # A DP×CP rank is one context-parallel rank.
        num_ranks, cp_size = (self.dp_cp_size, 1) if self.dynamic_cp else (self.dp_size, self.cp_size)
        span = -(-self.etp_size * self.ep_size // (self.tp_size * cp_size))
        return min(max(span, 1), num_ranks)

    def padded_seq_len(self, original_seq_len: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens a sequence occupies once padded. `[num_samples]` → `[num_samples]`, tokens."""
        multiple = self.token_multiple
        return -(-original_seq_len // multiple) * multiple

    def with_cp_size(self, cp_size: int) -> Topology:
        """The ranks as a micro-batch of one context-parallel size sees them: its padding is theirs."""
        return replace(self, cp_size=cp_size, dynamic_cp=False, max_cp_size=None)


@dataclass(frozen=True)
class Limits:
    """The limits of one micro-batch: a number of tokens, a number of samples, or both.

    Attributes:
        max_tokens_per_gpu: tokens a GPU may hold in a micro-batch (`--max-tokens-per-gpu`). A micro-batch
            then holds at most `max_tokens_per_gpu * cp_size` tokens of `padded_seq_len`. A longer sample runs alone.
        micro_batch_size: samples a micro-batch holds at most; without a token cap that is `--balance-data` without
            `--use-dynamic-batch-size`.

    Raises:
        BalanceError: none is given, or one is not a positive integer.
    """

    max_tokens_per_gpu: int | None = None
    _: KW_ONLY
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens_per_gpu is None and self.micro_batch_size is None:
            raise BalanceError("Limits has neither max_tokens_per_gpu nor micro_batch_size: give one of them, or both.")
        check_sizes(self)

    def max_tokens_per_microbatch(self, topology: Topology) -> int | None:
        """The cap of a micro-batch over its context-parallel ranks, tokens; None where only samples count."""
        return None if self.max_tokens_per_gpu is None else self.max_tokens_per_gpu * topology.cp_size
