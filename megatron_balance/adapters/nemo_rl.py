"""NeMo-RL adapter (NVIDIA-NeMo/RL): the micro-batches of packed sequences are this package's.

    python -m megatron_balance.adapters.nemo_rl --model Qwen3-8B examples/run_grpo.py --config FILE

With `policy.sequence_packing.enabled` the driver packs every global batch into bins of
`sequence_packing.train_mb_tokens` and deals them to data-parallel ranks in turn, by tokens. Here bins are the plan's
micro-batches, one of every rank and then the next of every rank; `sequence_packing.algorithm` is not asked.

Where a plan would have an empty micro-batch (few sequences, each near the cap), or a sequence is over the cap, NeMo-RL
packs: the driver does so for all ranks, and all get its bins.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

from megatron_balance.adapters.kit import Function, Hook, Installation, launch
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import Model, resolve_cost
from megatron_balance.planner import build_data_schedule
from megatron_balance.topology import Limits, Topology

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Cost of a sequence, and when ranks wait for one another."""

    cost_model: CostModel
    objective: str


_REMEDY = "check out v0.6 of github.com/NVIDIA-NeMo/RL, or train without balancing"
installation: Installation[Settings] = Installation("nemo-rl", versions=("0.6",), remedy=_REMEDY)
is_installed = installation.is_installed


def install(
    *, cost: str | None = None, model: Model | None = None, objective: str = "microbatch"
) -> Installation[Settings]:
    """Hook NeMo-RL in this process, the driver. Installing twice with the same options installs once.

    Args:
        cost: `flops`, `tokens` or the path of a seconds.json; by default FLOPs where there is a model, else tokens.
        model: model whose FLOPs are counted: a preset's name, a Hugging Face config.json or a ModelShape.
        objective: when ranks wait for one another: `microbatch` (FSDP, experts over ranks) or `step`.

    Raises:
        BalanceError: NeMo-RL is missing, of another version, a target has moved, or other options are installed.
    """
    settings = Settings(cost_model=resolve_cost(cost, model=model), objective=objective)
    hook = Hook(
        target="nemo_rl.data.packing.algorithms:get_packer",
        bound_in=("nemo_rl.distributed.batched_data_dict",),
        parameters=("bin_capacity", "min_bin_count", "bin_count_multiple"),
        wrap=lambda stock: functools.partial(_get_packer, stock, settings),
        reason="shard_by_batch_size asks it for the bins of a global batch, of which rank r of n gets every n-th",
    )
    return installation.install(settings, lambda: [hook])


def _get_packer(stock: Function, settings: Settings, *args: Any, **sizes: Any) -> Any:
    """NeMo-RL's packer, with a `pack` that plans where bins are dealt to ranks."""
    packer = stock(*args, **sizes)
    num_ranks = sizes.get("bin_count_multiple")
    if num_ranks and sizes.get("min_bin_count") == num_ranks:
        stock_pack, cap = packer.pack, packer.bin_capacity

        def pack(sequence_lengths: list[int]) -> list[list[int]]:
            bins = _bins(sequence_lengths, num_ranks=num_ranks, cap=cap, settings=settings)
            if bins is None:
                logger.warning("%d sequences, some near or over the cap: NeMo-RL packs them.", len(sequence_lengths))
            return stock_pack(sequence_lengths) if bins is None else bins

        packer.pack = pack
    return packer


def _bins(lengths: list[int], *, num_ranks: int, cap: int, settings: Settings) -> list[list[int]] | None:
    """Bin i runs on rank i modulo `num_ranks`; None where one would be empty or over the cap."""
    schedule = build_data_schedule(
        lengths,
        cost_model=settings.cost_model,
        topology=Topology(num_ranks),
        limits=Limits(cap),
        objective=settings.objective,
    )
    if schedule.oversized or not schedule.slot_counts().all():
        return None
    return [list(ids) for slot in zip(*schedule.ranks, strict=True) for ids in slot]


if __name__ == "__main__":
    launch("megatron_balance.adapters.nemo_rl")
