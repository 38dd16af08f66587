"""The runs that are planned: a model, its ranks, its cap and its global batch, and the lengths to fill it.

The first four are the setups of slime's pull request 2017 (`--balance-by-flops`). The others are larger:
many ranks, and long contexts under context parallelism. The cost is the model's FLOPs of training.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_balance import CostModel, Limits, ModelShape, Topology
from megatron_balance.lengths import SYNTHETIC_LENGTHS, synthetic_lengths
from megatron_balance.planner import resolve_objective

SFT_LENGTHS = ("alpaca_eval", "code_files", "gsm8k_sft", "tau_airline")
RL_LENGTHS = ("azure_conv", "reasoning_gym", "servegen_mlarge")
MIXED_LENGTHS = ("code_files", "reasoning_gym", "servegen_mlarge")
LONG_LENGTHS = ("code_files", "mooncake_synthetic")
LENGTHS = Path(__file__).resolve().parents[3] / "shared" / "data" / "lengths"
"""Folder of the real lengths in a development checkout; they are not part of the repository."""

_DP1024 = Topology(1024, tp_size=8, sequence_parallel=True)


@dataclass(frozen=True)
class Setup:
    name: str
    _: KW_ONLY
    model: str
    topology: Topology
    max_tokens_per_gpu: int
    global_batch_size: int
    length_names: tuple[str, ...]
    num_batches: int

    @cached_property
    def limits(self) -> Limits:
        return Limits(self.max_tokens_per_gpu)

    @property
    def cap(self) -> int:
        """Tokens a micro-batch holds, over its context-parallel ranks."""
        return self.max_tokens_per_gpu * self.topology.cp_size

    @property
    def objective(self) -> str:
        """`step` or `microbatch`, from the topology."""
        return resolve_objective("auto", topology=self.topology)

    @cached_property
    def cost_model(self) -> CostModel:
        """The cost model that judges every row: FLOPs, the routed experts' part shared by the expert-parallel group."""
        shape, ep_size = ModelShape.preset(self.model), self.topology.ep_size
        return replace(CostModel.from_shape(shape, ep_size=ep_size), per_microbatch=0)

    @cached_property
    def flops_model(self) -> CostModel:
        """FLOPs of a sample as a whole: what a planner that knows no expert groups would balance."""
        return replace(CostModel.from_shape(ModelShape.preset(self.model)), per_microbatch=0)

    def padded(self, lengths: NDArray[np.int64]) -> list[int]:
        """Padded tokens of each sample, as the integers that other planners take."""
        return self.topology.padded_seq_len(lengths).tolist()

    def flops(self, lengths: NDArray[np.int64]) -> list[int]:
        return self.flops_model.sample_costs(self.topology.padded_seq_len(lengths)).costs[0].tolist()


SETUPS = tuple(
    Setup(
        name,
        model=model,
        topology=topology,
        max_tokens_per_gpu=cap,
        global_batch_size=global_batch_size,
        length_names=length_names,
        num_batches=num_batches,
    )
    for name, model, topology, cap, global_batch_size, length_names, num_batches in (
        ("SFT dense, DP4", "Qwen3-4B", Topology(4), 9216, 128, SFT_LENGTHS, 12),
        ("SFT MoE, TP2 DP4 EP8", "Qwen3.5-35B-A3B", Topology(4, tp_size=2, ep_size=8), 8192, 128, SFT_LENGTHS, 12),
        ("RL dense, TP2 DP4", "Qwen3-4B", Topology(4, tp_size=2), 9216, 256, RL_LENGTHS, 12),
        ("RL MoE, TP4 DP2 EP8", "Qwen3-30B-A3B", Topology(2, tp_size=4, ep_size=8), 20480, 256, RL_LENGTHS, 12),
        ("30B, DP32", "Qwen3-30B-A3B", Topology(32), 16384, 2048, MIXED_LENGTHS, 4),
        ("30B, DP32 EP32", "Qwen3-30B-A3B", Topology(32, ep_size=32), 16384, 2048, MIXED_LENGTHS, 4),
        ("30B, DP128 EP64", "Qwen3-30B-A3B", Topology(128, ep_size=64), 16384, 8192, MIXED_LENGTHS, 2),
        ("70B, TP8 DP1024", "Llama-3.1-70B", _DP1024, 16384, 65536, ("servegen_mlarge",), 1),
        ("8B, CP4 DP8, 131k", "Qwen3-8B", Topology(8, cp_size=4), 32768, 256, LONG_LENGTHS, 6),
    )
)


def global_batches(setup: Setup, *, lengths_folder: Path | None) -> Iterator[NDArray[np.int64]]:
    """The global batches of a setup, set by set.

    Samples longer than a micro-batch are left out: verl and AReaL refuse them, and a training run filters or
    truncates them. A set is shuffled with a fixed seed, and starts again where it is too small.
    """
    longest = setup.cap - setup.cap % setup.topology.token_multiple
    for name in setup.length_names:
        num_samples = setup.num_batches * setup.global_batch_size
        drawn = draw_lengths(name, num_samples=num_samples, longest=longest, folder=lengths_folder)
        yield from drawn.reshape(setup.num_batches, setup.global_batch_size)


def draw_lengths(name: str, *, num_samples: int, longest: int, folder: Path | None) -> NDArray[np.int64]:
    """Lengths of a set in a fixed random order, without those above `longest`; from its start again where too few."""
    if folder is None:
        # Twice as many as needed, because some are over-long.
        drawn = synthetic_lengths(name, num_samples=2 * num_samples, seed=0)
    else:
        drawn = np.load(folder / f"{name}.npz")["length"].astype(np.int64)
    shuffled = np.random.default_rng(0).permutation(drawn[drawn <= longest])
    return np.resize(shuffled, num_samples)


def draw_rollouts(
    name: str, *, groups: int, responses: int, longest: int, folder: Path | None, draw: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`[groups]` tokens of prompts, and `[groups, responses]` of responses to prompts of like lengths."""
    pairs = np.exp(draw.normal([[6.0], [5.5]], [[0.9], [0.8]], (2, 8192))).astype(np.int64)
    if folder is not None:
        with np.load(folder / f"{name}.npz") as data:
            pairs = np.stack([data["prompt"], data["response"]]).astype(np.int64)
    pairs = pairs[:, (pairs > 0).all(axis=0) & (pairs.sum(axis=0) <= longest)]
    pairs = pairs[:, np.argsort(pairs[0], kind="stable")]
    middle = draw.integers(0, pairs.shape[1], groups)
    near = (middle[:, None] + draw.integers(-100, 100, (groups, responses))).clip(0, pairs.shape[1] - 1)
    return pairs[0, middle], pairs[1, near]


def add_length_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--synthetic` and `--lengths`."""
    parser.add_argument("--synthetic", action="store_true", help="lengths from the built-in fits, not from files")
    parser.add_argument("--lengths", type=Path, default=LENGTHS, metavar="DIR", help="folder of NAME.npz lengths")


def lengths_folder(args: argparse.Namespace) -> Path | None:
    """The folder of real lengths; None where they are to be drawn, or not every set is there."""
    complete = all((args.lengths / f"{name}.npz").is_file() for name in SYNTHETIC_LENGTHS)
    return args.lengths if complete and not args.synthetic else None


def lengths_said(folder: Path | None) -> str:
    return "real lengths, from files" if folder is not None else "lengths drawn from the built-in fits"
