"""The setups that are replayed: those of slime's pull request 2017, cut down to what one device can run.

Width stays, depth goes. The vocabulary is cut in the same proportion as the depth, so that every part of the
model keeps its share of the work and the ratio of linear to quadratic cost is the whole model's. One rank's
micro-batch runs whole on the device: no tensor or expert parallelism, and experts run where the token is. So
plans are made for that: the routed experts' part waits for the slowest rank like all the rest.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from typing import Any

from benchmarks.planner.setups import SETUPS, Setup
from megatron_balance import CostModel, ModelShape, Topology

VOCABULARY_MULTIPLE = 128
"""Megatron pads a vocabulary to a multiple of it (`--make-vocab-size-divisible-by`)."""


@dataclass(frozen=True)
class ReplaySetup(Setup):
    """A setup with the model that is run in its place.

    Attributes:
        shape: that model.
        goal: the part of the train time that slime's pull request saved over its `--balance-data`; None if none.
    """

    _: KW_ONLY
    shape: ModelShape
    goal: float | None = None

    @cached_property
    def cost_model(self) -> CostModel:
        """FLOPs of the model that is run."""
        return CostModel.from_shape(self.shape)

    @cached_property
    def flops_model(self) -> CostModel:
        """The same: nothing is shared by an expert-parallel group here."""
        return self.cost_model


GOALS = (0.127, 0.301, 0.140, 0.206)
"""Less train time than token-sum Karmarkar-Karp, as the pull request gives it for the first four of `SETUPS`."""

STAND_INS = {"Qwen3.5-35B-A3B": "Qwen3-30B-A3B"}
"""Models whose layers Megatron cannot run everywhere (gated delta nets), and whose width stands in."""


def seed_setups(*, num_layers: int) -> tuple[ReplaySetup, ...]:
    """The four setups of the pull request, with models of `num_layers` layers."""
    return tuple(
        _with_shape(setup, goal=goal, num_layers=num_layers) for setup, goal in zip(SETUPS[:4], GOALS, strict=True)
    )


def reduced_shape(shape: ModelShape, *, num_layers: int) -> ModelShape:
    """The first layers of a model with equal layers, and the same share of its vocabulary.

    Raises:
        ValueError: layers differ, or there are not that many.
    """
    kinds = set(shape.decoder_layers())
    if len(kinds) > 1 or not 1 <= num_layers <= shape.num_layers:
        raise ValueError(
            f"--num-layers is {num_layers}: of a model of {shape.num_layers} layers and {len(kinds)} kinds of them; it "
            "must be at most the former, and the latter 1"
        )
    part = shape.padded_vocab_size * num_layers / shape.num_layers
    vocabulary = max(round(part / VOCABULARY_MULTIPLE), 1) * VOCABULARY_MULTIPLE
    return replace(shape.stack_of(kinds.pop(), num_layers=num_layers), padded_vocab_size=vocabulary)


def toy_setups() -> tuple[ReplaySetup, ...]:
    """Tiny models, few ranks and samples: seconds on a CPU, through all the same code."""
    dense = ModelShape(
        hidden_size=64,
        num_layers=2,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        ffn_hidden_size=128,
        padded_vocab_size=256,
        gated_linear_unit=True,
    )
    sparse = replace(dense, ffn_hidden_size=0, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64)
    return tuple(
        ReplaySetup(
            name,
            model=model,
            topology=topology,
            max_tokens_per_gpu=1024,
            global_batch_size=32,
            length_names=(lengths,),
            num_batches=2,
            shape=shape,
        )
        for name, model, topology, lengths, shape in (
            ("toy SFT dense, DP4", "toy", Topology(4), "code_files", dense),
            ("toy RL MoE, DP2 EP2", "toy MoE", Topology(2, ep_size=2), "reasoning_gym", sparse),
        )
    )


def _with_shape(setup: Setup, *, goal: float, num_layers: int) -> ReplaySetup:
    values: dict[str, Any] = {field.name: getattr(setup, field.name) for field in fields(setup)}
    values["model"] = STAND_INS.get(setup.model, setup.model)
    shape = reduced_shape(ModelShape.preset(values["model"]), num_layers=num_layers)
    return ReplaySetup(**values, shape=shape, goal=goal)
