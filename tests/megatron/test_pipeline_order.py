"""The planner's pipelines run their passes as Megatron's own functions order them, and end when events say."""

import numpy as np
import pytest
from megatron.core.pipeline_parallel import schedules

from megatron_balance.planner import Pipeline, makespans


def end_of_events(costs, pipeline, monkeypatch):
    """The time of the last pass, each started when its stage is free and its input is there; parts of a cost."""
    stages, chunks = pipeline.num_stages, pipeline.num_chunks
    table = schedules.get_schedule_table(costs.shape[1], chunks, pipeline.group_size)
    orders = []
    for stage in range(stages):
        for name, value in (
            ("get_pipeline_model_parallel_world_size", stages),
            ("get_pipeline_model_parallel_rank", stage),
            ("get_virtual_pipeline_model_parallel_world_size", chunks if chunks > 1 else None),
        ):
            monkeypatch.setattr(schedules.parallel_state, name, lambda value=value: value)
        _, _, warmup, remaining = schedules.get_pp_rank_microbatches(costs.shape[1], chunks, pipeline.group_size)
        forwards = [(False, slot, chunk) for slot, chunk in table]
        backwards = [(True, slot, chunks - 1 - chunk) for slot, chunk in table]
        steady = [step for pair in zip(forwards[warmup:], backwards, strict=False) for step in pair]
        orders.append(forwards[:warmup] + steady + backwards[remaining:])
    ends, free = {}, [0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                backward, slot, chunk = order[0]
                depth = chunk * stages + stage + (1 if backward else -1)
                required = (backward, slot, depth)
                if backward and depth == stages * chunks:
                    required = (False, slot, depth - 1)
                if depth >= 0 and required not in ends:
                    break
                kind = pipeline.kinds[stage][chunk] if pipeline.kinds else 0
                free[stage] = max(free[stage], ends.get(required, 0)) + (1 + backward) * int(costs[kind, slot])
                ends[backward, slot, chunk * stages + stage] = free[stage]
                del order[0]
    return max(free)


@pytest.mark.parametrize("seed", range(60))
def test_makespans_are_those_of_events_in_megatrons_order(seed, monkeypatch):
    draw = np.random.default_rng(seed)
    stages, chunks = int(draw.integers(2, 9)), int(draw.integers(1, 5))
    group = stages + int(draw.integers(0, 4))
    last = int(draw.integers(stages, group + 1))  # the last group may be shorter, if every stage has one
    number = group * int(draw.integers(0, 3)) + last if chunks > 1 else int(draw.integers(1, 20))
    kinds = tuple(tuple(map(int, draw.integers(0, 2, chunks))) for _ in range(stages))
    pipeline = Pipeline(stages, chunks, group, kinds if seed % 2 else ())
    costs = draw.integers(1, 10**6, (2, number))
    expected = end_of_events(costs, pipeline, monkeypatch)
    assert makespans(costs[None], pipeline)[0] == -(-expected // (3 * stages * chunks))


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 2), (8, 4)])
def test_equal_micro_batches_idle_as_the_paper_says(stages, chunks):
    number = 4 * stages
    costs = np.full((1, 1, number), 3 * stages * chunks)
    # Narayanan et al. 2021, section 2.2: the bubble is (p - 1) / (m v) of the work.
    assert makespans(costs, Pipeline(stages, chunks, stages))[0] == 3 * (number * chunks + stages - 1)
