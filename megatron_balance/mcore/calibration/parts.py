"""The parts of a model that are timed by themselves: each kind of layer, a few layers deep, and both ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.mcore.calibration.microbatches import Lengths
from megatron_balance.mcore.calibration.timed_model import TimedModel
from megatron_balance.model.flops_polynomial import causal_pairs
from megatron_balance.model.layers import Layer
from megatron_balance.model.shape import ModelShape

ATTENTION = ("attention", "mla")
"""Mixers whose time grows with the square of a length, and whose keys and values context-parallel ranks exchange."""


@dataclass(frozen=True)
class Part:
    """A part of the model that is timed by itself.

    Attributes:
        name: for people.
        times: number of copies of the timed part in the whole model.
        layer: the kind of layer; None for embedding, output layer and loss.
        model: what runs.
        cp_size: context-parallel ranks that share its micro-batches.
    """

    name: str
    times: float
    layer: Layer | None
    model: TimedModel
    cp_size: int = 1

    def features(self, microbatches: Sequence[Lengths]) -> NDArray[np.float64]:
        """`[num_microbatches, 4]`: 1, sequences, and of each rank tokens and twice the pairs of query and key."""
        rows = [[1.0, len(lengths), sum(lengths), sum(map(self._pairs, lengths))] for lengths in microbatches]
        return np.array(rows) / [1, 1, self.cp_size, self.cp_size]

    def _pairs(self, length: int) -> int:
        if self.layer is None or self.layer.mixer not in ATTENTION:
            return 0
        return causal_pairs(length, window=self.layer.window or length)


def layer_parts(shape: ModelShape, *, num_layers: int, options: dict[str, Any], cp_size: int = 1) -> list[Part]:
    """Every kind of layer; those that exchange keys and values, where several ranks share a micro-batch.

    Args:
        shape: the model.
        num_layers: layers of a kind that run together.
        options: of TimedModel.
        cp_size: context-parallel ranks, as `set_cp_size` has made them.
    """
    kinds = Counter((*shape.decoder_layers(), *shape.mtp_layers()))
    return [
        Part(
            _name(layer),
            times=count / num_layers,
            layer=layer,
            model=TimedModel(shape.stack_of(layer, num_layers=num_layers), part="layers", cp_size=cp_size, **options),
            cp_size=cp_size,
        )
        for layer, count in kinds.items()
        if cp_size == 1 or layer.mixer in ATTENTION
    ]


def ends_part(shape: ModelShape, *, options: dict[str, Any]) -> Part:
    """Embedding, output layer and loss; arguments as for `layer_parts`."""
    stack = shape.stack_of(shape.decoder_layers()[0], num_layers=1)
    model = TimedModel(stack, part="ends", **options)
    return Part("ends", times=1 + shape.mtp_num_layers, layer=None, model=model)


def measure(
    jobs: Sequence[tuple[Part, Lengths]],
    *,
    repeats: int,
    rng: np.random.Generator,
    progress: Callable[[int, int], None],
) -> NDArray[np.float64]:
    """Time each part with its micro-batch. All ranks, with the same arguments.

    Args:
        jobs: what runs.
        repeats: rounds that are kept.
        rng: of the order.
        progress: called with the measurements done and their total.

    Returns:
        `[num_jobs]` seconds, medians over the rounds, means over the ranks.
    """
    rounds = np.empty((repeats + 1, len(jobs)))
    done = 0
    for one_round in rounds:
        for job in rng.permutation(len(jobs)).tolist():
            part, lengths = jobs[job]
            one_round[job] = part.model.seconds(lengths)
            done += 1
            progress(done, rounds.size)
    medians = torch.from_numpy(np.median(rounds[1:], axis=0))
    dist.all_reduce(medians)
    return medians.numpy() / dist.get_world_size()


def _name(layer: Layer) -> str:
    window = f" window {layer.window}" if layer.window else ""
    return " + ".join(filter(None, (layer.mixer, layer.mlp))) + window
