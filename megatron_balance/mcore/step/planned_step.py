"""A planned step: its samples are still to be exchanged and packed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

import torch.distributed as dist

from megatron_balance.calibration.online import CalibrationState
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.device_exchange import DeviceExchange
from megatron_balance.mcore.step.own_slots import checksum, own_slots, pack_slots
from megatron_balance.planner.schedule import DataSchedule
from megatron_balance.runtime.failure import Failure, attempt, raise_together
from megatron_balance.runtime.gathered import GatheredLengths
from megatron_balance.runtime.prepared_exchange import PreparedExchange
from megatron_balance.samples.padding import sequence_lengths
from megatron_balance.samples.sample import Sample


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One rank's step before the exchange.

    Attributes:
        exchange: what this rank sends and receives.
        dp_group: ranks that load different samples; gloo.
        device_exchange: moves samples between GPUs on the training thread; None for `dp_group` on any.
        schedule: the plan.
        gathered: lengths of all samples.
        samples: that this rank loaded, as gathered.
        cp_rank: context-parallel rank of this one.
        shape_bucket: `--balance-shape-bucket`.
        pin_memory: copy micro-batches to pinned memory.
        exchange_seconds: so far; the others as in BalancedStep.
    """

    exchange: PreparedExchange
    dp_group: dist.ProcessGroup
    device_exchange: DeviceExchange | None
    _: KW_ONLY
    schedule: DataSchedule
    gathered: GatheredLengths
    samples: Sequence[Sample]
    cp_rank: int
    shape_bucket: int
    pin_memory: bool
    calibration: CalibrationState | None
    plan_seconds: float
    plan_level: int
    exchange_seconds: float
    new_iterator: bool

    def receive(self) -> BalancedStep:
        """Exchange the samples and pack those of this rank; once, on every rank of the group.

        Raises:
            BalanceError: on every rank of the group.
            AgreedError: the same, on a rank where code raised another error.
        """
        started = time.perf_counter()
        schema = self.gathered.schema
        assert schema is not None, "some rank has samples"
        if self.device_exchange is None:
            mine = self.exchange.run(group=self.dp_group)
        else:
            mine = self.device_exchange.run(self.exchange)
        own = own_slots(
            mine,
            schedule=self.schedule,
            gathered=self.gathered,
            dp_rank=self.dp_group.rank(),
            cp_rank=self.cp_rank,
            shape_bucket=self.shape_bucket,
        )
        packs = attempt(pack_slots, own, topology=self.schedule.topology, schema=schema, pin_memory=self.pin_memory)
        raise_together(
            replace(packs, during="packing this step's samples") if isinstance(packs, Failure) else None,
            group=self.dp_group,
            what="that all ranks have packed their micro-batches",
        )
        assert not isinstance(packs, Failure), "raised"
        return BalancedStep(
            num_microbatches=len(own.slots),
            microbatch_tokens=own.num_tokens,
            sequence_lengths=[sequence_lengths(slot) for slot in own.slots],
            step_tokens=own.step_tokens,
            microbatches=packs,
            schedule=self.schedule,
            # Leaves of a replica run different packs, made from what all of them loaded.
            fingerprint=(self.schedule.digest() ^ checksum(self.samples if own.leaves else packs)) & (2**63 - 1),
            cp_sizes=own.cp_sizes if own.leaves else None,
            leaves=own.leaves,
            calibration=self.calibration,
            plan_seconds=self.plan_seconds,
            plan_level=self.plan_level,
            exchange_seconds=time.perf_counter() - started + self.exchange_seconds,
            new_iterator=self.new_iterator,
            reported=self.gathered.reported,
        )
