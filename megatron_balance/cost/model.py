"""The cost of a sample: an integer, so that every rank makes the same plan.

A cost model gives the time of a sample as a function of its padded length L in tokens:

    cost(L) = linear*L + quadratic*L² + Σ_w window_w*pairs(L, w)

or with `cp_received*L` in place of both terms of attention, if that is more; `pairs` as in `causal_pairs` of the model.
A sample's images add the time of the vision encoder, which runs before the language model on the same rank.

Invariants: costs are non-negative int64; a sum over all samples stays below 2**62 (larger ones are
divided by a power of two, the same on every rank); a longer sample never costs less.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError, check_integer
from megatron_balance.model.flops import causal_pairs, fwd_flops_by_part, image_flops
from megatron_balance.model.shape import ModelShape

MICROBATCH_TOKENS = 128
"""Fixed cost of a micro-batch in tokens, if none was measured: kernel launches, reading weights and adding gradients.
With FLOPs alone micro-batches are free, and a plan uses more than needed: with dynamic context-parallel sizes 0 loses
1.8 % on published devices, and 128 at most 0.4 %."""

MAX_TOTAL_COST = 2**62
"""Sums of costs stay below this, so that adding a few of them never exceeds int64."""


@dataclass(frozen=True)
class SampleCosts:
    """`[num_samples]` int64 costs of a global batch in units of `2**shift`, which keeps their sum below 2**62.

    `costs` are of the sample's own rank, `expert_costs` shared by its expert-parallel group, and `image_costs` of the
    encoder for all its images.
    """

    costs: NDArray[np.int64]
    expert_costs: NDArray[np.int64]
    image_costs: NDArray[np.int64]
    shift: int


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Integer cost of a sample as a function of its length.

    Attributes:
        linear: cost per token.
        quadratic: cost per squared token.
        per_microbatch: cost per micro-batch, independent of its samples (kernel launches, pipeline bubbles).
        expert_linear: cost per token of expert layers whose work the expert-parallel group shares.
        windows: pairs `(keys a query attends to, cost per squared token)` of layers with sliding-window or sparse
            attention.
        cp_exchange: cost of receiving one token's keys and values from another context-parallel rank; a rank waits only
            for what takes longer than its attention. Plans with dynamic context-parallel sizes use it.
        cp_received: the same summed over all ranks, where the same number of them shares every sample.
        image_linear: cost per patch of an image in the vision encoder and the projector.
        image_quadratic: cost per squared patch of an image.

    Raises:
        BalanceError: a coefficient is negative or not an integer, or all are zero.

    Examples:
        >>> CostModel(linear=1024, quadratic=1)(512)
        786432
    """

    linear: int = 0
    quadratic: int = 0
    per_microbatch: int = 0
    expert_linear: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    cp_exchange: int = 0
    cp_received: int = 0
    image_linear: int = 0
    image_quadratic: int = 0

    def __post_init__(self) -> None:
        costs = {name: value for name, value in vars(self).items() if name != "windows"}
        for name, value in costs.items():
            object.__setattr__(self, name, check_integer(f"CostModel.{name}", value, least=0))
        windows = tuple(
            (
                check_integer("a window of CostModel.windows", window),
                check_integer(f"CostModel.windows[{window}]", cost, least=0),
            )
            for window, cost in self.windows
        )
        object.__setattr__(self, "windows", windows)
        if not any((*costs.values(), *(cost for _, cost in windows))):
            raise BalanceError("CostModel has no coefficient above zero: every sample would be free.")

    @classmethod
    def tokens(cls) -> CostModel:
        """The cost is the number of tokens."""
        return cls(linear=1)

    @classmethod
    def from_shape(
        cls,
        shape: ModelShape,
        *,
        ep_size: int = 1,
        frozen_encoder: bool = False,
        pack_tokens: int = 0,
        linear_tflops: float = 1.0,
        attention_tflops: float = 1.0,
    ) -> CostModel:
        """The cost is the time of training on the sample: forward and backward, whole model.

        The unit is the time of one FLOP at `linear_tflops`, so that with equal rates, the default, costs are FLOPs.
        A GEMM runs three times (forward, gradient of its input, of its weights), a frozen one twice; the attention core
        3.5 times, since FlashAttention's backward pass is five products where the forward is two (Dao 2023, arXiv
        2307.08691). A micro-batch costs `MICROBATCH_TOKENS` beside its samples. docs/cost-model.md has the indexer of
        sparse attention, frozen encoders, the rates of GPUs, and what is left out because no plan needs it.

        Args:
            shape: the model.
            ep_size: expert-parallel ranks. Above 1 the routed experts' part is kept apart in `expert_linear`.
            frozen_encoder: the vision encoder is not trained.
            pack_tokens: tokens of a full pack. Sparse attention without fused kernels computes all pairs of a pack, so
                that a token costs as much as the pack is long; 0 to count as if a sample were alone in its pack.
            linear_tflops: rate of all that is linear in tokens, 10**12 FLOP/s of one GPU in training.
            attention_tflops: rate of the attention core, causal, whose backward pass is 2.5 times its forward.

        Raises:
            BalanceError: a rate is not above zero.
        """
        for name, rate in (("linear_tflops", linear_tflops), ("attention_tflops", attention_tflops)):
            if not 0 < rate < math.inf:
                raise BalanceError(f"CostModel.from_shape: {name} is {rate!r}: give a finite rate above 0.")
        slowdown, unfused = Fraction(linear_tflops) / Fraction(attention_tflops), pack_tokens and not shape.dsa_fused
        gemm, loss = 3 - (shape.lora_rank > 0), shape.dsa_indexer_loss
        # How often a GEMM runs, and half of an attention core: twice forward, five times backward.
        passes = {"dsa_indexer": (1 + loss, 2 + 4 * loss), "dsa_target": (0, 2)}  # the indexer's input is detached
        linear = expert_linear = 0
        halves: Counter[int] = Counter()  # of cores, by window; 0 where there is none
        for part, flops in fwd_flops_by_part(shape).items():
            of_gemms, of_halves = passes.get(part, (gemm, 7))
            linear += of_gemms * flops.linear
            expert_linear += of_gemms * flops.expert_linear
            cores = {0: flops.quadratic, **dict(flops.windows)}
            if unfused and part.startswith("dsa"):
                # All pairs, the masked half included, forward and twice backward where there is a gradient.
                linear += (3 if part == "dsa" else of_halves // 2) * 2 * sum(cores.values()) * pack_tokens
            else:
                halves.update({window: of_halves * coefficient for window, coefficient in cores.items()})

        def core(halves: int) -> int:
            return math.ceil(Fraction(halves, 2) * slowdown)

        of_image = image_flops(shape)
        return cls(
            linear=linear if ep_size > 1 else linear + expert_linear,
            per_microbatch=MICROBATCH_TOKENS * (linear + expert_linear),
            quadratic=core(halves.pop(0, 0)),
            expert_linear=expert_linear if ep_size > 1 else 0,
            windows=tuple((window, core(coefficient)) for window, coefficient in sorted(halves.items())),
            image_linear=(1 if frozen_encoder else 3) * of_image.linear,
            image_quadratic=core((2 if frozen_encoder else 7) * of_image.quadratic),
        )

    def summed_over_cp(self, cp_size: int) -> CostModel:
        """Costs of samples that `cp_size` ranks share, summed over these ranks.

        Each of c ranks receives (c-1)/c of a sample's keys and values from the others while it computes attention, and
        waits for what takes longer: `max(0, cp_exchange*L*(c-1)/c - attention(L)/c)` beside a c-th of the sample's
        cost. It pays a micro-batch's fixed cost in full. Ring attention overlaps the two (Liu et al. 2023, arXiv
        2310.01889, section 3); published tables of long samples refute an exchange in full (docs/cost-model.md).

        Examples:
            >>> shared = CostModel(linear=100, quadratic=1, cp_exchange=8).summed_over_cp(4)
            >>> shared(10), shared(100)  # 24 units a token are waited for until attention takes as long
            (1240, 20000)
        """
        return replace(
            self,
            per_microbatch=self.per_microbatch * cp_size,
            cp_exchange=0,
            cp_received=self.cp_received + self.cp_exchange * (cp_size - 1),
        )

    def __call__(self, length: int) -> int:
        """Cost of one sample of `length` tokens on its own rank, unscaled, exact."""
        return int(self.exact_costs(np.array([length], dtype=object))[0])

    def exact_costs(self, lengths: NDArray[Any]) -> NDArray[Any]:
        """Of each length as in a call: int64, or Python's integers where these do not fit. `[num_lengths]`"""
        longest = int(lengths.max(initial=0))
        squares = 2 * (self.quadratic + sum(coefficient for _, coefficient in self.windows))  # at least all pairs
        most = ((squares * longest) + self.linear + self.cp_received) * max(longest, 1)
        exact: NDArray[Any] = lengths if most < MAX_TOTAL_COST else lengths.astype(object)
        in_windows = sum(coefficient * causal_pairs(exact, window=window) for window, coefficient in self.windows)
        attention = self.quadratic * exact * exact + in_windows
        return self.linear * exact + np.maximum(attention, self.cp_received * exact)

    def sample_costs(
        self, lengths: NDArray[np.int64], *, image_patches: NDArray[np.int64] | None = None
    ) -> SampleCosts:
        """Costs of samples of `[num_samples]` padded tokens; what costs anything keeps a cost of at least 1.

        `image_patches`: `[num_samples, 2]` int64, the sums of patches and of squared patches over a sample's images.
        """
        unique, inverse = np.unique(lengths, return_inverse=True)
        own = self.exact_costs(unique).tolist()  # Python's integers from here on: a sum passes int64 sooner
        expert = [self.expert_linear * length for length in unique.tolist()]
        sums: list[list[int]] = [] if image_patches is None else image_patches.tolist()
        images = [self.image_linear * patches + self.image_quadratic * squares for patches, squares in sums]
        total = self.per_microbatch * lengths.size + sum(images)
        total += sum(map(operator.mul, np.bincount(inverse).tolist(), map(operator.add, own, expert)))
        # One bit is left for the ones that rounding up below may add.
        shift = max(0, total.bit_length() - (MAX_TOTAL_COST.bit_length() - 2))

        def scaled(values: list[int]) -> NDArray[np.int64]:
            return np.array([max(value >> shift, 1) if value else 0 for value in values], dtype=np.int64)

        return SampleCosts(scaled(own)[inverse], scaled(expert)[inverse], scaled(images), shift)
