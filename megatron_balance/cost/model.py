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
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError, check_integer, check_sizes
from megatron_balance.model.flops import (
    Chunk,
    FlopsPolynomial,
    causal_pairs,
    exchange_numbers,
    fwd_flops_by_part,
    image_flops,
    whole_model,
)
from megatron_balance.model.layout import PipelineLayout
from megatron_balance.model.shape import ModelShape

MICROBATCH_TOKENS = 128
"""Fixed cost of a micro-batch in tokens, if none was measured: kernel launches, reading weights and adding gradients.
With FLOPs alone micro-batches are free, and a plan uses more than needed: with dynamic context-parallel sizes 0 loses
1.8 % on published devices, and 128 at most 0.4 %."""

MAX_TOTAL_COST = 2**62
"""Sums of costs stay below this, so that adding a few of them never exceeds int64."""

STAGE_BITS = 10
"""Costs by kind of chunk are in units of 2**-10, so that 1.55 times a cost of one a token is told from 2."""


@dataclass(frozen=True)
class SampleCosts:
    """int64 costs of a global batch in units of `2**shift`, which keeps the sum of each row below 2**62.

    They have a row for each kind of chunk (`CostModel.stages`), as if all chunks were of this kind; one row without.
    `costs` are of the sample's own rank, `expert_costs` shared by its expert-parallel group, `image_costs` of the
    encoder for all its images, `per_microbatch` the fixed cost of a micro-batch, and `gather` its least.
    """

    costs: NDArray[np.int64]  # [num_kinds, num_samples]
    expert_costs: NDArray[np.int64]  # [num_kinds, num_samples]
    image_costs: NDArray[np.int64]  # [num_kinds, num_samples], or [num_kinds, 0] without images
    per_microbatch: NDArray[np.int64]  # [num_kinds]
    gather: NDArray[np.int64]  # [num_kinds]
    shift: int  # negative where kinds are told apart by fractions of a unit


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Integer cost of a sample as a function of its length.

    Attributes:
        linear: cost per token.
        quadratic: cost per squared token.
        per_microbatch: cost per micro-batch, independent of its samples (kernel launches, pipeline bubbles).
        gather: cost of gathering a rank's weights, which FSDP does in every micro-batch while it computes: the least
            that a micro-batch costs, `per_microbatch` included.
        expert_linear: cost per token of expert layers whose work the expert-parallel group shares.
        windows: pairs `(keys a query attends to, cost per squared token)` of layers with sliding-window or sparse
            attention.
        cp_exchange: cost of receiving one token's keys and values from another context-parallel rank; a rank waits only
            for what takes longer than its attention. Plans with dynamic context-parallel sizes use it.
        cp_all_to_all: cost of receiving a token in exchanges that nothing hides, of which c ranks keep a c-th each.
        cp_all_gather: the same of what every rank receives from all others.
        cp_received: `cp_exchange` summed over all ranks, where the same number of them shares every sample.
        image_linear: cost per patch of an image in the vision encoder and the projector.
        image_quadratic: cost per squared patch of an image.
        stages: the parts that pipeline stages take; None where all take the same.

    Raises:
        BalanceError: a coefficient is negative or not an integer, or all are zero.

    Examples:
        >>> CostModel(linear=1024, quadratic=1)(512)
        786432
    """

    linear: int = 0
    quadratic: int = 0
    per_microbatch: int = 0
    gather: int = 0
    expert_linear: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    cp_exchange: int = 0
    cp_all_to_all: int = 0
    cp_all_gather: int = 0
    cp_received: int = 0
    image_linear: int = 0
    image_quadratic: int = 0
    stages: StageCosts | None = None

    def __post_init__(self) -> None:
        windows: list[tuple[int, int]] = []
        for window, cost in self.windows:
            window = check_integer("a window of CostModel.windows", window)
            windows.append((window, check_integer(f"CostModel.windows[{window}]", cost, minimum=0)))
        object.__setattr__(self, "windows", tuple(windows))
        check_sizes(self)
        if not any(self.terms().values()):
            raise BalanceError("CostModel has no coefficient above zero: every sample would be free.")

    def terms(self) -> dict[str | int, int]:
        """All coefficients by name, those of windows by their tokens."""
        values = {name: value for name, value in vars(self).items() if name not in ("windows", "stages")}
        return values | dict(self.windows)

    def with_terms(self, terms: Mapping[str | int, int]) -> CostModel:
        """With these coefficients in place of its own."""
        windows = tuple((window, terms[window]) for window, _ in self.windows)
        return replace(self, **{name: value for name, value in terms.items() if isinstance(name, str)}, windows=windows)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostModel:
        """The model whose `dataclasses.asdict` a record or a file holds."""
        model = cls(**{name: value for name, value in values.items() if name != "stages"})
        if (stages := values.get("stages")) is None:
            return model
        costs = tuple(cls.from_dict(cost) for cost in stages["costs"])
        return replace(model, stages=StageCosts(tuple(tuple(map(int, stage)) for stage in stages["kinds"]), costs))

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
        layout: PipelineLayout | None = None,
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
            layout: the chunks of the pipeline's stages, whose parts become `stages`; None for equal parts.
            linear_tflops: rate of all that is linear in tokens, 10**12 FLOP/s of one GPU in training.
            attention_tflops: rate of the attention core, causal, whose backward pass is 2.5 times its forward.

        Raises:
            BalanceError: a rate is not above zero.
        """
        for name, rate in (("linear_tflops", linear_tflops), ("attention_tflops", attention_tflops)):
            if not 0 < rate < math.inf:
                raise BalanceError(f"CostModel.from_shape: {name} is {rate!r}: give a finite rate above 0.")
        slowdown = Fraction(linear_tflops) / Fraction(attention_tflops)

        def cost(chunk: Chunk) -> CostModel:
            terms = _training_flops(shape, chunk, slowdown=slowdown, frozen=frozen_encoder)
            if ep_size == 1:
                terms["linear"] += terms.pop("expert_linear")
            if not any(terms.values()):  # an embedding alone
                terms["per_microbatch"] = 1
            return cls(**terms)

        model = cost(whole_model(shape))
        if layout is None:
            return model
        # Of launches and exchanges the proportions count: a layer launches as much as another, or an end.
        costs = [
            replace(
                cost(chunk),
                per_microbatch=len(chunk.layers) + chunk.output_layers + chunk.has_encoder,
                **exchange_numbers(shape, chunk.layers),
            )
            for chunk in layout.chunks(shape)
        ]
        kinds = list(dict.fromkeys(costs))
        table = tuple(tuple(map(kinds.index, costs[stage :: layout.pp_size])) for stage in range(layout.pp_size))
        return replace(model, stages=StageCosts(table, tuple(kinds)))

    def summed_over_cp(self, cp_size: int) -> CostModel:
        """Costs of samples that `cp_size` ranks share, summed over these ranks.

        Each of c ranks receives (c-1)/c of a sample's keys and values from the others while it computes attention, and
        waits for what takes longer: `max(0, cp_exchange*L*(c-1)/c - attention(L)/c)` beside a c-th of the sample's
        cost. Of `cp_all_to_all` it pays (c-1)/c of each of its L/c tokens, of `cp_all_gather` of all L: nothing hides
        them. It pays a micro-batch's fixed cost in full. Ring attention overlaps the two (Liu et al. 2023, arXiv
        2310.01889, section 3); published tables of long samples refute an exchange in full (docs/cost-model.md).

        Examples:
            >>> shared = CostModel(linear=100, quadratic=1, cp_exchange=8).summed_over_cp(4)
            >>> shared(10), shared(100)  # 24 units a token are waited for until attention takes as long
            (1240, 20000)
        """
        return replace(
            self,
            linear=self.linear - (-self.cp_all_to_all * (cp_size - 1) // cp_size) + self.cp_all_gather * (cp_size - 1),
            per_microbatch=self.per_microbatch * cp_size,
            gather=self.gather * cp_size,
            cp_exchange=0,
            cp_all_to_all=0,
            cp_all_gather=0,
            cp_received=self.cp_received + self.cp_exchange * (cp_size - 1),
        )

    def of_rank(self, *, tp_size: int = 1, cp_size: int = 1) -> CostModel:
        """The costs of one of the ranks that share tokens and heads; each pays for launches."""
        summed = self if cp_size == 1 else self.summed_over_cp(cp_size)
        terms = {name: round(cost / (tp_size * cp_size)) for name, cost in summed.terms().items()}
        return summed.with_terms(terms | {"per_microbatch": self.per_microbatch})

    def __call__(self, lengths: Any) -> Any:
        """Cost of samples with the work of routed experts, unscaled, exact; `lengths` as for `local_cost`."""
        return replace(self, linear=self.linear + self.expert_linear).local_cost(lengths)

    def local_cost(self, lengths: Any) -> Any:
        """Cost of samples on their own ranks: without the work of routed experts that a group shares (`expert_linear`).

        Args:
            lengths: tokens of a sample, or an array of them.

        Returns:
            An integer, or an array of the same shape: int64, or Python's integers where these do not fit.

        Examples:
            >>> CostModel(linear=2, expert_linear=3).local_cost(np.array([10, 20])).tolist()
            [20, 40]
        """
        tokens = np.atleast_1d(lengths)
        longest = int(tokens.max(initial=0))
        squares = 2 * (self.quadratic + sum(coefficient for _, coefficient in self.windows))  # at least all pairs
        largest = ((squares * longest) + self.linear + self.cp_received) * max(longest, 1)
        exact: NDArray[Any] = tokens if largest < MAX_TOTAL_COST else tokens.astype(object)
        in_windows = sum(coefficient * causal_pairs(exact, window=window) for window, coefficient in self.windows)
        attention = self.quadratic * exact * exact + in_windows
        costs = self.linear * exact + np.maximum(attention, self.cp_received * exact)
        return costs if np.ndim(lengths) else int(costs[0])

    def sample_costs(
        self,
        lengths: NDArray[np.int64],
        *,
        cp_size: int = 1,
        shift: int = -STAGE_BITS,
        image_patches: NDArray[np.int64] | None = None,
        copies: int = 1,
    ) -> SampleCosts:
        """Costs of samples of `[num_samples]` padded tokens, rounded up.

        `cp_size`: ranks that share every sample; costs are then those of each. `shift`: the least of the result's.
        `image_patches`: `[num_samples, 2]` int64, the sums of patches and of squared patches over a sample's images.
        `copies`: so many times the sum of all costs stays below 2**62.
        """
        unique, inverse = np.unique(lengths, return_inverse=True)
        models = (self,) if self.stages is None else self.stages.kinds_of(self)
        kinds = [model.summed_over_cp(cp_size) for model in models]
        # Python's integers: a sum passes int64 sooner.
        local = np.stack([kind.local_cost(unique).astype(object) for kind in kinds])
        expert = np.stack([kind.expert_linear * unique.astype(object) for kind in kinds])
        sums = (np.zeros((0, 2)) if image_patches is None else image_patches).astype(object)
        images = np.stack([sums @ [kind.image_linear, kind.image_quadratic] for kind in kinds])
        launches = np.array([kind.per_microbatch for kind in kinds], dtype=object)
        gathers = np.array([kind.gather for kind in kinds], dtype=object)
        totals = (local + expert) @ np.bincount(inverse).astype(object) + images.sum(axis=1)
        totals += (launches + gathers) * lengths.size
        # Two bits are left for the ones that rounding up below may add.
        bits = STAGE_BITS if self.stages else 0
        shift = max(0, shift + bits, (int(totals.max()) * copies).bit_length() - (MAX_TOTAL_COST.bit_length() - 3))

        def scaled(costs: NDArray[Any], num_ranks: int = 1) -> NDArray[np.int64]:
            return (-(-costs // (num_ranks << shift))).astype(np.int64)

        return SampleCosts(
            scaled(local, cp_size)[:, inverse],
            scaled(expert)[:, inverse],
            scaled(images),
            scaled(launches, cp_size),
            scaled(gathers, cp_size),
            shift - bits,
        )


@dataclass(frozen=True)
class StageCosts:
    """The chunks of the stages of a pipeline, where they do not cost the same.

    Attributes:
        kinds: `[pp_size][vpp_size]` the kind of each chunk.
        costs: `[num_kinds]` what a chunk of this kind costs; only the proportions count, of each coefficient by itself.

    Raises:
        BalanceError: the table is no table, or names a kind that has no cost.
    """

    kinds: tuple[tuple[int, ...], ...]
    costs: tuple[CostModel, ...]

    def __post_init__(self) -> None:
        if len({len(stage) for stage in self.kinds}) != 1 or set().union(*self.kinds) != set(range(len(self.costs))):
            raise BalanceError(
                f"StageCosts.kinds is {self.kinds} for {len(self.costs)} costs: it must have as many chunks on every "
                "stage, and every kind must occur."
            )

    def kinds_of(self, whole: CostModel) -> tuple[CostModel, ...]:
        """For each kind what `whole` would cost if all its chunks were of this kind, in units of 2**-STAGE_BITS.

        Examples:
            >>> from megatron_balance import CostModel
            >>> stages = StageCosts(((0,), (1,)), (CostModel(linear=1), CostModel(linear=3)))
            >>> [cost(10) for cost in stages.kinds_of(CostModel(linear=7))]
            [35840, 107520]
        """
        kinds = [cost.terms() for cost in self.costs]
        chunks = [kinds[kind] for stage in self.kinds for kind in stage]

        def model(kind: Mapping[str | int, int]) -> CostModel:
            terms: dict[str | int, int] = {}
            for name, value in whole.terms().items():
                total, scaled = sum(chunk.get(name, 0) for chunk in chunks), value << STAGE_BITS
                share = 2 * scaled * len(chunks) * kind.get(name, 0)  # half a unit is rounded up
                terms[name] = (share + total) // (2 * total) if total else scaled
            if not any(terms.values()):
                terms["per_microbatch"] = 1
            return replace(whole.with_terms(terms), stages=None)

        return tuple(map(model, kinds))

    def whole_from_first(self, measured: CostModel) -> CostModel:
        """The costs of the whole model where those of its first stage, times `pp_size`, were measured."""
        terms, first = measured.terms(), [self.kinds_of(measured)[kind].terms() for kind in self.kinds[0]]
        for name, value in terms.items():
            if share := sum(kind[name] for kind in first):  # of terms that it lacks nothing is known
                terms[name] = (value * value * len(first) << STAGE_BITS) // share
        return measured.with_terms(terms)

    def loads(self, whole: CostModel, lengths: Any) -> list[float]:
        """`[pp_size]` cost of samples of these lengths on each stage, over that of an even share."""
        costs = [float(kind(np.asarray(lengths)).astype(np.float64).sum()) for kind in self.kinds_of(whole)]
        stages = [sum(costs[kind] for kind in stage) for stage in self.kinds]
        return [stage * len(stages) / sum(stages) for stage in stages]


def _training_flops(shape: ModelShape, chunk: Chunk, *, slowdown: Fraction, frozen: bool) -> dict[str, Any]:
    """Coefficients of a chunk of the model: FLOPs, those of attention times `slowdown`."""
    linear = expert_linear = 0
    halves: Counter[int] = Counter()  # of cores, by window; 0 where there is none
    for part, flops in fwd_flops_by_part(shape, chunk).items():
        # How often a GEMM runs, and half of an attention core: twice forward, five times backward. Indexers only pick.
        gemm_passes, core_halves = (1, 2) if part == "dsa_indexer" else (3 - (shape.lora_rank > 0), 7)
        linear += gemm_passes * flops.linear
        expert_linear += gemm_passes * flops.expert_linear
        for window, core_flops in ((0, flops.quadratic), *flops.windows):
            halves[window] += core_halves * core_flops

    def core(halves: int) -> int:
        return math.ceil(Fraction(halves, 2) * slowdown)

    image = image_flops(shape) if chunk.has_encoder else FlopsPolynomial()
    return {
        "linear": linear,
        "per_microbatch": MICROBATCH_TOKENS * (linear + expert_linear),
        "quadratic": core(halves.pop(0, 0)),
        "expert_linear": expert_linear,
        "windows": tuple((window, core(coefficient)) for window, coefficient in sorted(halves.items())),
        "image_linear": (1 if frozen else 3) * image.linear,
        "image_quadratic": core((2 if frozen else 7) * image.quadratic),
    }
