"""The runs that are planned with dynamic context-parallel sizes, and the lengths to fill them. All are Qwen3-8B."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_balance import CostModel, Limits, ModelShape, Topology
from megatron_balance.lengths import synthetic_lengths

EXCHANGES = (0.0, 0.01, 0.08)
"""Cost of receiving a token's keys and values, as part of what the token costs linearly: none, inside a node (NVLink),
between nodes (one 400 Gb/s link a GPU)."""

OBJECTIVES = {"step": {}, "microbatch": {"fully_sharded": True}}
"""Fields of the topology that ask for each objective."""

_FLOPS = replace(CostModel.from_shape(ModelShape.preset("Qwen3-8B")), per_microbatch=0)


@dataclass(frozen=True)
class DynamicSetup:
    name: str
    _: KW_ONLY
    topology: Topology
    max_tokens_per_gpu: int
    global_batch_size: int
    lengths: str | Callable[[np.random.Generator, int], NDArray[np.int64]]

    @property
    def limits(self) -> Limits:
        return Limits(self.max_tokens_per_gpu)


def cost_model(exchange: float) -> CostModel:
    """FLOPs of training, and a token's exchange as part of its linear cost."""
    return replace(_FLOPS, cp_exchange=round(exchange * _FLOPS.linear))


def lognormal(longest: int) -> Callable[[np.random.Generator, int], NDArray[np.int64]]:
    """Lengths of median 1,808 tokens, clipped to 64 and `longest`."""

    def draw(generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        return np.clip(np.exp(7.5 + 1.2 * generator.standard_normal(count)), 64, longest).astype(np.int64)

    return draw


def dominant(longest: int) -> Callable[[np.random.Generator, int], NDArray[np.int64]]:
    """The same up to a quarter of `longest`, and one sample in 64 uniform from there to `longest`."""

    def draw(generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        lengths = lognormal(longest // 4)(generator, count)
        num_dominant = count // 64
        lengths[:num_dominant] = generator.integers(longest // 4, longest + 1, num_dominant)
        return generator.permutation(lengths)

    return draw


def _setup(
    name: str, dp_size: int, cp_size: int, cap: int, count: int, lengths: str | Callable[..., NDArray[np.int64]]
) -> DynamicSetup:
    return DynamicSetup(
        f"DP{dp_size} CP{cp_size}, cap {cap}, {count} {name}",
        topology=Topology(dp_size, cp_size=cp_size, dynamic_cp=True),
        max_tokens_per_gpu=cap,
        global_batch_size=count,
        lengths=lengths,
    )


SETUPS = (
    _setup("lognormal to 16k", 8, 4, 4096, 256, lognormal(16384)),
    _setup("lognormal to 32k", 8, 4, 8192, 256, lognormal(32768)),
    _setup("with dominant samples to 131k", 8, 8, 16384, 512, dominant(131072)),
    _setup("with dominant samples to 131k", 32, 8, 16384, 2048, dominant(131072)),
    _setup("lognormal to 16k", 16, 2, 8192, 512, lognormal(16384)),
    _setup("code_files", 4, 8, 4096, 256, "code_files"),
    _setup("code_files", 16, 4, 8192, 512, "code_files"),
    _setup("servegen_mlarge", 16, 2, 8192, 512, "servegen_mlarge"),
    _setup("servegen_mlarge", 128, 2, 8192, 2048, "servegen_mlarge"),
    _setup("azure_conv", 16, 2, 4096, 256, "azure_conv"),
    _setup("reasoning_gym", 4, 8, 4096, 512, "reasoning_gym"),
    _setup("alpaca_eval", 8, 2, 4096, 256, "alpaca_eval"),
    _setup("mooncake_synthetic", 8, 8, 16384, 256, "mooncake_synthetic"),
    _setup("mooncake_synthetic", 2, 16, 8192, 128, "mooncake_synthetic"),
)

TIMED_SETUPS = (
    _setup("lognormal to 32k", 64, 4, 8192, 8192, lognormal(32768)),
    _setup("with dominant samples to 131k", 64, 4, 16384, 8192, dominant(131072)),
    _setup("servegen_mlarge", 64, 4, 8192, 8192, "servegen_mlarge"),
)


def batches(setup: DynamicSetup, *, num_batches: int, folder: Path | None) -> Iterator[NDArray[np.int64]]:
    """Global batches, one for each seed; samples that the ranks cannot hold at the largest size are left out."""
    max_tokens = setup.max_tokens_per_gpu * setup.topology.cp_size
    for seed in range(num_batches):
        generator = np.random.default_rng(seed)
        if not isinstance(setup.lengths, str):
            yield setup.lengths(generator, setup.global_batch_size)
            continue
        if folder is None:
            drawn = synthetic_lengths(setup.lengths, num_samples=4 * setup.global_batch_size, seed=seed)
        else:
            drawn = np.load(folder / f"{setup.lengths}.npz")["length"].astype(np.int64)
        usable = drawn[(drawn > 0) & (setup.topology.padded_seq_len(drawn) <= max_tokens)]
        yield np.resize(generator.permutation(usable), setup.global_batch_size)
