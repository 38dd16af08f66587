"""Iterators on each rank of a test world: steps of a StepPrefetcher, without Megatron."""

import itertools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance import BalanceError, CostModel, Limits, Topology, build_data_schedule
from megatron_balance.mcore.setup.arguments import BalanceConfig
from megatron_balance.mcore.step.device_exchange import DeviceExchange
from megatron_balance.mcore.step.plan_process import MIN_SAMPLES
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.prefetcher import StepPrefetcher
from megatron_balance.planner.problem import CHEAPEST_LEVEL
from megatron_balance.runtime.replica import Replica

NUM_ITEMS = 2
"""Of a step."""

_groups: dict[str, list[dist.ProcessGroup]] = {}


def steps_of_loop(
    *, loops: list[str], layout: str = "dp", bug_on: int = -1, on_device: bool = False
) -> tuple[list[Any], list[str]]:
    """Sample numbers of every step on this rank, then the error that ended it, if one did; and what the thread said.

    Args:
        loops: of every rank, a letter a step, the iterator that it comes with: `a` and `b` go on for ever, `e` ends
            after four items, `f` and `x` fail in place of their fifth and second, `n` is a new one with the next items
            of `a`, `r` has Megatron run the last step again, and `-` is a rank without one.
        layout: `dp`: every rank loads its own data; `pp`: four ranks are two pipelines of two stages; `tp`: two
            replicas of two tensor-parallel ranks; `pp4`: one pipeline, whose stages 1 and 2 load nothing.
        bug_on: rank on which splitting fails from the third step on.
        on_device: samples move as between GPUs.
    """
    rank = dist.get_rank()
    dp_group, replica = _layout(layout)
    config = BalanceConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=16, balance_data=False)
    limits, cost_model = Limits(16), CostModel.tokens()
    planner = StepPlanner(
        config,
        topology=Topology(dp_group.size()),
        limits=limits,
        cost_model=cost_model,
        dp_group=dp_group,
        device_exchange=_device_exchange() if on_device else None,
    )
    prefetcher = StepPrefetcher(planner, replica=replica, shares_lengths=True)
    first = 1000 * dp_group.rank()
    iterators = {"a": _items(first), "b": _items(first + 500), "e": _items(first, end=4)}
    iterators |= {"f": _items(first, fail=4), "x": _items(first, fail=1)}
    outcomes: list[Any] = []
    messages: list[str] = []
    for step, name in enumerate(loops[rank]):
        if rank == bug_on and step == 1:  # whose data is pulled; the next one's is not
            planner._splitter._split_item = _fail  # type: ignore[method-assign]
        new = _items(first + NUM_ITEMS * step, end=NUM_ITEMS)
        iterator = {"n": new, "r": Replaying(), "-": None}.get(name) or iterators.get(name)
        try:
            made = prefetcher.balance(iterator, num_microbatches=NUM_ITEMS)
        except (BalanceError, OSError, MemoryError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
            break
        tokens = [microbatch["tokens"].flatten().tolist() for microbatch in made.microbatches or ()]
        if iterator is None:
            assert made.sequence_lengths is not None
            outcomes.append(sorted(n for lengths in made.sequence_lengths for n in lengths))
        else:
            outcomes.append(sorted({token - 1 for row in tokens for token in row}))
        prefetcher.prepare(iterator, num_microbatches=NUM_ITEMS, on_lost=lambda error: messages.append(str(error)))
    if prefetcher._prepared is not None:
        prefetcher._prepared.exception(timeout=30)  # every rank's thread must end, also where no step asks
    return outcomes, messages


def _device_exchange() -> DeviceExchange:
    """An exchange between GPUs, for which the CPU and gloo stand in."""
    torch.cuda.synchronize = lambda device=None: None
    if "device" not in _groups:
        _groups["device"] = [dist.new_group(backend="gloo", timeout=timedelta(seconds=30))]  # type: ignore[list-item]
    return DeviceExchange(_groups["device"][0], device=torch.device("cpu"))


class Replaying:
    """Stands for Megatron's iterator while it runs a step again: nothing may be pulled from it."""

    replaying = True


def _fail(*_: Any, **__: Any) -> Any:
    raise MemoryError("no host memory")


def _layout(name: str) -> tuple[dist.ProcessGroup, Replica]:
    """Data-parallel group and replica of this rank."""
    if name == "dp":
        assert dist.group.WORLD is not None
        return dist.group.WORLD, Replica()
    layouts = {
        "pp": (([0, 1], [2, 3]), ([0, 2], [1, 3])),
        "tp": (([0, 2], [1, 3]), ([0, 1], [2, 3])),
        "pp4": (([0], [1], [2], [3]), ([0, 1, 2, 3],)),
    }
    if name not in _groups:
        _groups[name] = [_own_group(groups) for groups in layouts[name]]
    of_data, of_replica = _groups[name]
    if name == "tp":
        return of_data, Replica(tensor=of_replica)
    return of_data, Replica(firsts=of_replica, some_firsts_listen=name == "pp4")


def _own_group(groups: tuple[list[int], ...]) -> dist.ProcessGroup:
    made = [dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=30)) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)  # type: ignore[return-value]


def length_of(number: int) -> int:
    """Tokens of an item, so that steps differ in their lengths."""
    return 1 + number % 7


def _item(number: int) -> dict[str, torch.Tensor]:
    length = length_of(number)
    tokens = torch.full((1, length), number + 1)
    return {
        "tokens": tokens,
        "labels": tokens,
        "loss_mask": torch.ones(1, length),
        "cu_seqlens": torch.tensor([[0, length]], dtype=torch.int32),
        "max_seqlen": torch.tensor([length], dtype=torch.int32),
    }


def _items(first: int, *, end: int | None = None, fail: int | None = None) -> Any:
    for index in itertools.count():
        if index == end:
            return
        if index == fail:
            raise OSError(5, "the disk is gone")
        yield _item(first + index)


def steps_with_a_planning_process(*, overlap: bool, number: int) -> tuple[int, str]:
    """Steps until rank 1's planning process gets a signal after the third, and the error that then ends them."""
    group = dist.group.WORLD
    assert group is not None
    config = BalanceConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=16, balance_data=True)
    planner = StepPlanner(
        config,
        topology=Topology(group.size()),
        limits=Limits(16),
        cost_model=CostModel.tokens(),
        dp_group=group,
        timeout=timedelta(seconds=6),
    )
    prefetcher, iterator = StepPrefetcher(planner), _items(1000 * group.rank())
    steps = 0
    try:
        while steps < 20:
            made = prefetcher.balance(iterator, num_microbatches=MIN_SAMPLES // 2)
            assert made.schedule is not None
            steps += 1
            if steps == 3 and group.rank() == 1:
                pid = planner._plans.pid
                assert pid is not None
                os.kill(pid, number)
            if overlap:
                prefetcher.prepare(iterator, num_microbatches=MIN_SAMPLES // 2)
    except BalanceError as error:
        return steps, str(error)
    finally:
        planner._plans.close()
    return steps, "none"


def steps_with_images(*, overlap: bool) -> list[list[tuple[list[int], list[int]]]]:
    """Of every micro-batch of this rank's steps: the first token of each sequence, and the entries that came with it.

    A sequence of tokens t has t % 3 videos of two frames of three patches, each with an entry that holds t; rank 1
    loads none. A patch costs as much as a token, and so does a pair of patches of a frame.
    """
    group = dist.group.WORLD
    assert group is not None
    config = BalanceConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=16, balance_data=True, balance_by_flops=True)
    planner = StepPlanner(
        config,
        topology=Topology(group.size()),
        limits=Limits(16),
        cost_model=CostModel(linear=1, image_linear=1, image_quadratic=1),
        dp_group=group,
    )
    prefetcher = StepPrefetcher(planner)
    iterator = _rows_with_images(group.rank())
    found: list[list[tuple[list[int], list[int]]]] = []
    for _ in range(4):
        made = prefetcher.balance(iterator, num_microbatches=NUM_ITEMS)
        step: list[tuple[list[int], list[int]]] = []
        for microbatch in made.microbatches or ():
            starts = microbatch["cu_seqlens"].flatten().tolist()[:-1]
            counts: list[int] = microbatch["pixel_values_lengths"].tolist()
            owners = [microbatch["tokens"].flatten().tolist()[start] for start in starts][: len(counts)]
            pixels = [int(value) for value in microbatch["pixel_values"][:, 0].tolist()]
            assert microbatch["pixel_values"].shape[1:] == (2,)
            step.append(([owner for owner, count in zip(owners, counts, strict=True) for _ in range(count)], pixels))
        assert made.schedule is not None
        own_cost = made.schedule.cost_grid[group.rank()].sum()
        assert own_cost == sum(made.microbatch_tokens) + sum(2 * (3 + 3**2) * len(pixels) for _, pixels in step)
        found.append(step)
        if overlap:
            prefetcher.prepare(iterator, num_microbatches=NUM_ITEMS)
    if prefetcher._prepared is not None:
        prefetcher._prepared.exception(timeout=30)
    return found


def _rows_with_images(rank: int) -> Any:
    """Rows of two sequences, of 3 and 5 tokens."""
    for item in itertools.count():
        ids = [1000 * (rank + 1) + 2 * item, 1000 * (rank + 1) + 2 * item + 1]
        counts = [0 if rank == 1 else number % 3 for number in ids]
        tokens = torch.tensor([[ids[0]] * 3 + [ids[1]] * 5])
        yield {
            "tokens": tokens,
            "loss_mask": torch.ones(1, 8),
            "cu_seqlens": torch.tensor([[0, 3, 8]]),
            "pixel_values": torch.tensor(ids).repeat_interleave(torch.tensor(counts))[:, None].expand(-1, 2).float(),
            "pixel_values_lengths": torch.tensor(counts),
            "image_grid_thw": torch.tensor([[2, 1, 3]]).expand(sum(counts), 3),
            "image_grid_thw_lengths": torch.tensor(counts),
        }


def levels_of_steps(
    *, slow_rank: int | None, num_steps: int, deterministic: bool = False
) -> list[tuple[int, int, list[int]]]:
    """The level of every step's plan, its digest, and those of the plans of all levels, in two stages of two replicas.

    Args:
        slow_rank: rank whose plans take longest by its own clock; those of the others take no time.
        num_steps: of the run.
        deterministic: `--deterministic-mode`.
    """
    dp_group, replica = _layout("pp")
    config = BalanceConfig(
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=64,
        balance_data=True,
        balance_by_flops=True,
        deterministic=deterministic,
    )
    topology, limits, cost_model = Topology(2), Limits(64), CostModel(linear=10, quadratic=1)
    planner = StepPlanner(config, topology=topology, limits=limits, cost_model=cost_model, dp_group=dp_group)
    seconds = 1e3 if dist.get_rank() == slow_rank else 0.0
    add_plan = planner.budget.add_plan
    planner.budget.add_plan = lambda _: add_plan(seconds)  # type: ignore[method-assign]
    prefetcher, iterator = StepPrefetcher(planner, replica=replica), _items(1000 * dp_group.rank())
    num_items = MIN_SAMPLES // dp_group.size()
    outcomes: list[tuple[int, int, list[int]]] = []
    level = 0
    for _ in range(num_steps):
        made = prefetcher.balance(iterator, num_microbatches=num_items)
        plan = made.schedule
        assert plan is not None
        of_levels = [
            build_data_schedule(
                plan.lengths,
                cost_model=cost_model,
                topology=topology,
                limits=limits,
                home_ranks=plan.home_ranks,
                level=of_level,
            ).digest()
            for of_level in range(CHEAPEST_LEVEL + 1)
        ]
        outcomes.append((level, plan.digest(), of_levels))
        level = made.plan_level
        prefetcher.prepare(iterator, num_microbatches=num_items)
    assert prefetcher._prepared is not None
    prefetcher._prepared.result(timeout=30)
    planner._plans.close()
    return outcomes
