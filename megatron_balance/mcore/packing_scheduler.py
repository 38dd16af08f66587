"""The package's schedule as one of Megatron's own packing schedulers, where Megatron has them (0.20).

    config.sequence_packing_scheduler = "megatron_balance"     # then Megatron's wrap_data_iterator chooses it

`core/datasets/data_schedule.py` looks a scheduler up by its name in an enumeration, then by the member in
`scheduler_map`, builds it for every step and calls `run`. Ours plans with `build_data_schedule` and moves samples with
`reroute_samples`; what Megatron then hands to pipeline stages, tensor-parallel ranks and chunks of a virtual pipeline
it hands on with Megatron's own functions.

The cost is the FLOPs of the model that Megatron's arguments describe; tokens where megatron.core is used alone, in a
process that parsed none.

Invariants: every rank of a step gets the same number of micro-batches; every sample is in one of them once; a
micro-batch of several samples keeps to `max_seqlen_per_dp_cp_rank`; `Registration.undo` leaves Megatron as it was.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.pull_ahead import next_items
from megatron_balance.mcore.token_alignment import token_alignment
from megatron_balance.planner.cost import MICROBATCH_TOKENS, CostModel
from megatron_balance.planner.model_shape import ModelShape
from megatron_balance.planner.schedule import build_data_schedule
from megatron_balance.planner.shape_buckets import bucketed_limits, filled_tokens
from megatron_balance.planner.topology import Limits, Topology
from megatron_balance.runtime.exchange import reroute_samples
from megatron_balance.runtime.gather import check_same_schedule, gather_sample_lengths
from megatron_balance.runtime.packing import dummy_microbatch, pack_microbatch
from megatron_balance.runtime.sample import Sample
from megatron_balance.runtime.unpacking import split_packed

NAME = "megatron_balance"
"""What `sequence_packing_scheduler` says to choose it; Megatron does not look at its case."""

SEAM = "megatron.core.datasets.data_schedule"
_MOVED_ON = "megatron.core.datasets.data_schedule_utils"  # came with scheduler_map

_PER_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")


class PackingScheduler:
    """Balances one global batch over the data-parallel ranks; built anew for every step.

    Args:
        max_seqlen_per_dp_cp_rank: tokens that a GPU may hold in a micro-batch.
        cp_size: context-parallel ranks.
        dp_size: data-parallel ranks, context parallelism not counted.
        microbatch_group_size_per_vp_stage: what the number of micro-batches is a multiple of under a virtual pipeline,
            else None.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None,
    ) -> None:
        self.limits = Limits(max_seqlen_per_dp_cp_rank)
        self.cp_size = cp_size
        self.dp_size = dp_size
        self.microbatch_multiple = microbatch_group_size_per_vp_stage or 1

    def get_required_sample_keys(self) -> list[str]:
        """Keys without which a sample cannot be trained on."""
        return list(_PER_TOKEN)

    def get_groups_and_subsamples(self, sample_id_seqlens: list[tuple[int, int]]) -> Any:
        """Not offered: a rank without samples in a micro-batch cannot be told by lists of ids; `run` does it."""
        raise NotImplementedError("PackingScheduler plans and moves samples in run().")

    def run(
        self,
        data_iterator: Any,
        num_microbatches: int,
        dp_group: dist.ProcessGroup,
        tp_group: dist.ProcessGroup,
        pp_group: dist.ProcessGroup,
        dp_cp_group: dist.ProcessGroup,
        dev: Any,
        config: Any,
    ) -> tuple[Any, int, float, float]:
        """One step, as Megatron's schedulers do it.

        Args:
            data_iterator: of the first tensor-parallel rank of the first and the last pipeline stage, else None; a list
                under a virtual pipeline.
            num_microbatches: items that this rank pulls.
            dp_group: ranks that load different samples.
            tp_group: of this rank.
            pp_group: of this rank.
            dp_cp_group: `dp_group` over all context-parallel ranks.
            dev: the device, as `torch.cuda.current_device()` says it.
            config: of the model.

        Returns:
            The new iterator (a list under a virtual pipeline), the number of micro-batches, and the sums of the
            samples' lengths and of their squares.

        Raises:
            BalanceError: on every rank of the data-parallel group alike.
        """
        utils = importlib.import_module(_MOVED_ON)
        source = _of_this_stage(data_iterator, pp_group=pp_group, config=config)
        made: Any = (None, None, None, None)
        if source is not None:
            topology = Topology(
                self.dp_size,
                cp_size=self.cp_size,
                tp_size=tp_group.size(),
                pp_size=pp_group.size(),
                vpp_size=config.virtual_pipeline_model_parallel_size or 1,
                microbatch_multiple=self.microbatch_multiple,
                sequence_parallel=bool(getattr(config, "sequence_parallel", False)),
                token_alignment=token_alignment(config),
            )
            device = torch.device("cuda", dev)
            items = next_items(source, num_microbatches)
            problem = None
            if len(items) < num_microbatches:
                problem = f"its data ended after {len(items)} of {num_microbatches} items of this step."
            made = self._make(items, topology=topology, dp_group=dp_group, device=device, problem=problem)
        if tp_group.rank() == 0:
            made = utils.broadcast_to_pp_group(*made, pp_group, dev)
        microbatches, *scalars = made
        num_microbatches, seqlen_sum, seqlen_squared_sum = utils.broadcast_scalars(scalars, tp_group, dev)
        iterator = utils.create_data_iterator(microbatches, pp_group, tp_group, config)
        return iterator, int(num_microbatches), seqlen_sum, seqlen_squared_sum

    def _make(
        self,
        items: list[Any],
        *,
        topology: Topology,
        dp_group: dist.ProcessGroup,
        device: torch.device,
        problem: str | None,
    ) -> tuple[list[dict[str, Tensor]], int, float, float]:
        """What `broadcast_to_pp_group` takes of a stage that has data."""
        samples: list[Sample] = []
        try:
            samples = [sample for row in _rows(items, device=device) for sample in split_packed(row)]
        except BalanceError as error:
            problem = str(error)
        # What is wrong with the data of one rank is raised on every rank, here.
        gathered = gather_sample_lengths(samples, group=dp_group, problem=problem, device=device)
        if gathered.schema is None:
            raise BalanceError("The data iterators of all ranks yielded no tokens for this step: check the data set.")
        flag = "max_seqlen_per_dp_cp_rank"
        limits = bucketed_limits(self.limits, topology=topology, shape_bucket=1, flag=flag)
        schedule = build_data_schedule(
            gathered.lengths,
            cost_model=_cost_model(),
            topology=topology,
            limits=limits,
            home_ranks=gathered.home_ranks,
        )
        check_same_schedule(schedule.digest(), group=dp_group, device=device)
        mine = reroute_samples(
            samples, destinations=schedule.destinations(), gathered=gathered, group=dp_group, device=device
        )
        shape = {"token_multiple": topology.token_multiple, "cp_size": topology.cp_size}
        sizes = filled_tokens(schedule.slot_tokens(), topology=topology, limits=limits, shape_bucket=1)
        microbatches = [
            pack_microbatch([mine[sample] for sample in slot], num_tokens=size, **shape)
            if slot
            else dummy_microbatch(gathered.schema, num_tokens=size, **shape, device=device)
            for slot, size in zip(
                schedule.ranks[dp_group.rank()],
                sizes.reshape(topology.dp_size, -1)[dp_group.rank()].tolist(),
                strict=True,
            )
        ]
        lengths = gathered.lengths.astype(float)
        flat = [_flat(microbatch) for microbatch in microbatches]
        return flat, schedule.num_microbatches, float(lengths.sum()), float((lengths**2).sum())


class Registration:
    """The scheduler's place in Megatron; `undo` takes it out."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._stock = module.PackingSchedulerEnum
        members = {member.name: member.value for member in self._stock}
        # An enumeration cannot grow: a larger one takes its place. Members of the old one stay keys of the map.
        self._larger: Any = enum.Enum(self._stock.__name__, {**members, NAME.upper(): NAME})
        self._added = {self._larger[member.name]: module.scheduler_map[member] for member in self._stock}
        self._added[self._larger[NAME.upper()]] = PackingScheduler
        module.scheduler_map.update(self._added)
        module.PackingSchedulerEnum = self._larger

    def undo(self) -> None:
        """Leave Megatron as it was.

        Raises:
            BalanceError: someone else has replaced the enumeration since; nothing is changed then.
        """
        if self._module.PackingSchedulerEnum is not self._larger:
            raise BalanceError(f"{SEAM}.PackingSchedulerEnum was replaced after {NAME} was added: undo that first.")
        self._module.PackingSchedulerEnum = self._stock
        for member in self._added:
            del self._module.scheduler_map[member]


def register() -> Registration | None:
    """Add the scheduler where this Megatron has a `scheduler_map`; None where it has none.

    Raises:
        BalanceError: the map or its enumeration is not what Megatron 0.20 has.
    """
    if importlib.util.find_spec(_MOVED_ON) is None:
        return None
    module = importlib.import_module(SEAM)
    schedulers: Any = getattr(module, "scheduler_map", None)
    names: Any = getattr(module, "PackingSchedulerEnum", None)
    are_known = isinstance(names, enum.EnumMeta) and isinstance(schedulers, dict)
    if not are_known or any(member not in schedulers for member in list(names)):
        raise BalanceError(
            f"{SEAM} of this Megatron has no scheduler_map with an entry for each PackingSchedulerEnum: {NAME} cannot "
            "be added to it. Use a supported version, or train without balancing."
        )
    return Registration(module)


def _cost_model() -> CostModel:
    """The same on every rank: arguments were parsed on all of them or on none."""
    try:
        from megatron.training.global_vars import get_args
    except ModuleNotFoundError:  # megatron.core alone
        return CostModel.tokens()
    try:
        args: Any = get_args()
    except AssertionError:  # that there are none
        return CostModel.tokens()
    return CostModel.from_shape(
        ModelShape.from_megatron_args(args),
        ep_size=args.expert_model_parallel_size,
        recompute=args.recompute_granularity == "full",
        microbatch_tokens=MICROBATCH_TOKENS,
    )


def _of_this_stage(data_iterator: Any, *, pp_group: dist.ProcessGroup, config: Any) -> Iterator[Any] | None:
    """The first stage reads for its first chunk, the last for its last."""
    if (config.virtual_pipeline_model_parallel_size or 1) == 1 or data_iterator is None:
        return data_iterator
    if pp_group.rank() == 0:
        return data_iterator[0]
    return data_iterator[-1] if pp_group.rank() == pp_group.size() - 1 else None


def _rows(items: Iterable[Any], *, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """What Megatron's data sets yield → batches of one row, as `split_packed` takes them.

    An item is a row with `cu_seqlens`, or samples that carry their lengths; either with or without a batch dimension.
    """
    for item in items:
        for entry in item if isinstance(item, list) else [item]:
            row = {name: _one_row(entry[name]).to(device) for name in _PER_TOKEN if name in entry}
            yield {**row, **{name: value.to(device) for name, value in _cu_seqlens(entry).items()}}


def _cu_seqlens(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if "padded_seq_len" not in entry:
        return {name: _one_row(entry[name]) for name in ("cu_seqlens", "cu_seqlens_padded") if name in entry}
    padded = int(entry["padded_seq_len"])
    real = int(entry.get("original_seq_len", padded))
    return {
        "cu_seqlens": torch.tensor([[0, real]], dtype=torch.int32),
        "cu_seqlens_padded": torch.tensor([[0, padded]], dtype=torch.int32),
    }


def _one_row(tensor: Tensor) -> Tensor:
    """`[1, n]` from `[n]` or `[1, n]`."""
    return tensor if tensor.dim() == 2 else tensor.unsqueeze(0)


def _flat(microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A micro-batch as `get_batch_on_this_rank_for_sequence_packing` reads it: without batch dimension."""
    flat = {name: value.squeeze(0) for name, value in microbatch.items()}
    return {"cu_seqlens_padded": flat["cu_seqlens"], **flat}
