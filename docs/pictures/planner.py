"""Draws the three objectives, each from plans of this package: `python docs/pictures/planner.py`.

What is said in figures, titles included, is computed here from the plans; nothing is drawn by hand.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from panels import Bar, Panel

from megatron_balance import CostModel, DataSchedule, Limits, ModelShape, Topology, build_data_schedule
from megatron_balance.lengths import synthetic_lengths
from megatron_balance.planner import Pipeline, makespans

HERE = Path(__file__).parent
COST_MODEL = CostModel.from_shape(ModelShape.preset("Qwen3-8B"))
CAP = 16384
LIMITS = Limits(CAP)
_FILES = synthetic_lengths("code_files", num_samples=96, seed=2)
LENGTHS = _FILES[_FILES <= CAP]
"""Of one global batch over four ranks, tokens."""

LENGTHS_OF_A_PIPELINE = synthetic_lengths("tau_airline", num_samples=24, seed=1)
"""Of the share of one rank with four stages."""

TIME = "predicted time; 1 is a bound that no plan can beat"


@dataclass(frozen=True)
class Picture:
    """Two plans of one global batch, judged by one objective.

    Attributes:
        name: of the objective.
        panels: the plan that was made for something else, then the plan that was made for it.
    """

    name: str
    _: KW_ONLY
    panels: tuple[Panel, Panel]


def pictures() -> tuple[Picture, ...]:
    """All three, computed anew."""
    return (_step(), _microbatch(), _pipeline())


def main() -> None:
    """Write objective_NAME.svg beside this file."""
    from timeline import draw  # loads matplotlib

    for picture in pictures():
        draw(picture.panels, time_label=TIME, path=HERE / f"objective_{picture.name}.svg")


def _step() -> Picture:
    topology = Topology(4)
    homes = np.arange(LENGTHS.size) % topology.dp_size
    unmoved = build_data_schedule(
        LENGTHS,
        cost_model=CostModel.tokens(),
        topology=topology,
        limits=LIMITS,
        home_ranks=homes,
        move_samples=False,
    )
    balanced = build_data_schedule(LENGTHS, cost_model=COST_MODEL, topology=topology, limits=LIMITS)
    return Picture(
        "step",
        panels=(
            _meeting_once("Packed where they were loaded (--use-dynamic-batch-size)", unmoved),
            _meeting_once("Planned for `step`", balanced),
        ),
    )


def _microbatch() -> Picture:
    topology = Topology(4, fully_sharded=True)
    panels = [
        _meeting_always(
            f"Planned for `{objective}`",
            build_data_schedule(LENGTHS, cost_model=COST_MODEL, topology=topology, limits=LIMITS, objective=objective),
        )
        for objective in ("step", "microbatch")
    ]
    return Picture("microbatch", panels=(panels[0], panels[1]))


def _pipeline() -> Picture:
    panels = [
        _in_stages(
            f"Planned for `{objective}`",
            build_data_schedule(
                LENGTHS_OF_A_PIPELINE,
                cost_model=COST_MODEL,
                topology=Topology(1, pp_size=4),
                limits=LIMITS,
                objective=objective,
            ),
        )
        for objective in ("step", "pipeline")
    ]
    return Picture("pipeline", panels=(panels[0], panels[1]))


def _meeting_once(title: str, schedule: DataSchedule) -> Panel:
    """Micro-batches end to end; ranks wait at the end of the step."""
    figures = schedule.metrics(cost_model=COST_MODEL)
    seconds = _judged(schedule) / figures.lower_bound
    bars: list[Bar] = []
    for rank, spans in enumerate(seconds):
        ends = np.cumsum(spans)
        bars += [
            Bar(rank, start=end - duration, duration=duration, shade=duration / seconds.max())
            for end, duration in zip(ends, spans, strict=True)
        ]
        bars.append(_idle(rank, since=ends[-1], until=seconds.sum(axis=1).max()))
    return Panel(
        f"{title}: {figures.over_bound:.3f}", rows=_rank_names(seconds), bars=bars, meetings=[seconds.sum(axis=1).max()]
    )


def _meeting_always(title: str, schedule: DataSchedule) -> Panel:
    """Micro-batches in slots; ranks wait at the end of each."""
    figures = schedule.metrics(objective="microbatch")
    seconds = _judged(schedule) / figures.lower_bound
    ends = np.cumsum(seconds.max(axis=0))
    bars: list[Bar] = []
    for rank, spans in enumerate(seconds):
        for slot, duration in enumerate(spans):
            start = ends[slot] - seconds[:, slot].max()
            bars.append(Bar(rank, start=start, duration=duration, shade=duration / seconds.max()))
            bars.append(_idle(rank, since=start + duration, until=ends[slot]))
    return Panel(f"{title}: {figures.over_bound:.3f}", rows=_rank_names(seconds), bars=bars, meetings=ends.tolist())


def _in_stages(title: str, schedule: DataSchedule) -> Panel:
    """One rank's stages under one-forward-one-backward, as in `planner/objective.py`."""
    pp_size = schedule.topology.pp_size
    costs, bound = schedule.cost_grid[0] * pp_size, schedule.metrics(objective="pipeline").lower_bound
    unit = 3 * pp_size * bound
    ends = _one_forward_one_backward(costs, pp_size=pp_size)
    makespan = makespans(costs[None, None], Pipeline(pp_size))[0]
    assert abs(max(ends.values()) / (3 * pp_size) - makespan) <= 1, "the picture and the planner see one pipeline"
    bars: list[Bar] = []
    for stage in range(pp_size):
        free = 0.0
        for (_, slot, backward), end in sorted(
            (item for item in ends.items() if item[0][0] == stage), key=lambda item: item[1]
        ):
            start = end - int(costs[slot]) * (2 if backward else 1)
            bars.append(_idle(stage, since=free / unit, until=start / unit))
            bars.append(
                Bar(
                    stage,
                    start=start / unit,
                    duration=(end - start) / unit,
                    shade=0.9 if backward else 0.15,
                    label=str(slot + 1),
                )
            )
            free = end
        bars.append(_idle(stage, since=free / unit, until=max(ends.values()) / unit))
    return Panel(
        f"{title}: {makespan / bound:.3f}",
        rows=[f"stage {stage + 1}" for stage in range(pp_size)],
        bars=bars,
    )


def _one_forward_one_backward(costs: NDArray[np.int64], *, pp_size: int) -> dict[tuple[int, int, bool], int]:
    """End of each pass of each micro-batch on each stage, in thirds of a cost over `pp_size`.

    Args:
        costs: `[num_microbatches]`.
        pp_size: stages.

    Returns:
        dict: `(stage, slot, backward)` to the end of that pass.
    """
    queues = []
    for stage in range(pp_size):
        num_warm_up = min(pp_size - 1 - stage, costs.size)
        order = [(slot, False) for slot in range(num_warm_up)]
        for slot in range(num_warm_up, costs.size):
            order += [(slot, False), (slot - num_warm_up, True)]
        order += [(slot, True) for slot in range(costs.size - num_warm_up, costs.size)]
        queues.append(order)
    ends: dict[tuple[int, int, bool], int] = {}
    free = [0] * pp_size
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                slot, backward = queue[0]
                neighbour = (stage + 1 if backward else stage - 1, slot, backward)
                if 0 <= neighbour[0] < pp_size and neighbour not in ends:
                    break
                start = max(free[stage], ends.get(neighbour, 0))
                ends[stage, slot, backward] = free[stage] = start + int(costs[slot]) * (2 if backward else 1)
                queue.pop(0)
    return ends


def _judged(schedule: DataSchedule) -> NDArray[np.int64]:
    """`[dp_size, num_microbatches]` costs of the plan's micro-batches by `COST_MODEL`."""
    grid = np.full(schedule.cost_grid.size, COST_MODEL.per_microbatch)
    np.add.at(grid, schedule.microbatch_of, [COST_MODEL(int(length)) for length in schedule.lengths])
    return grid.reshape(schedule.cost_grid.shape)


def _idle(row: int, *, since: float, until: float) -> Bar:
    return Bar(row, start=since, duration=max(until - since, 0), shade=None)


def _rank_names(seconds: NDArray[np.float64]) -> list[str]:
    return [f"rank {rank}" for rank in range(len(seconds))]


if __name__ == "__main__":
    main()
