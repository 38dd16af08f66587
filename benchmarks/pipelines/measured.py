"""Gains of balanced pipelines on CPU ranks, predicted and measured, where stages differ by the output layer.

Each pass is timed by its thread on its own stage; events in Megatron's order give the makespan of the measured passes.
Seconds fitted to the record of the first layout predict all. Both runs are packed: the gain is that of balancing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from training_run import Recorded, train

from benchmarks.publish import RAW, fresh, say
from megatron_balance import CostModel, ModelShape
from megatron_balance.cli import main
from megatron_balance.cost.rates import resolve_cost
from megatron_balance.model.layout import PipelineLayout
from megatron_balance.planner import Pipeline
from megatron_balance.record import read_record

STEPS, WARM_UP, GLOBAL_BATCH_SIZE, LONGEST, DP_SIZE = 10, 2, 24, 2048, 2
SHAPE = ModelShape(
    hidden_size=64,
    num_layers=8,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    ffn_hidden_size=192,
    padded_vocab_size=4096,
    gated_linear_unit=True,
)
FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --num-query-groups 4 --ffn-hidden-size 192 --seed 1 "
    f"--vocab-size 4096 --seq-length {LONGEST} --max-position-embeddings {LONGEST} --train-iters {STEPS} "
    f"--global-batch-size {GLOBAL_BATCH_SIZE} --use-dynamic-batch-size --max-tokens-per-gpu {LONGEST}"
)
LAYOUTS = {"PP2": (2, 1, ""), "PP4": (4, 1, ""), "PP2 VPP2": (2, 2, "--num-layers-per-virtual-pipeline-stage 2")}


def measure_gains() -> dict[str, dict[str, float]]:
    """Trains each layout, packed and balanced by seconds."""
    folder, gains = fresh(RAW / "pipelines"), dict[str, dict[str, float]]()
    draw, costs, data = np.random.default_rng(1), folder / "seconds.json", folder / "data.jsonl"
    lengths = np.minimum(draw.lognormal(5.6, 0.9, STEPS * GLOBAL_BATCH_SIZE), LONGEST - 1).astype(int) + 2
    rows = [json.dumps({"tokens": draw.integers(0, 257, length).tolist()}) for length in lengths]
    data.write_text("\n".join(rows) + "\n")
    for name, (pp_size, vpp_size, flags) in LAYOUTS.items():
        layout = PipelineLayout.even_split(SHAPE.num_layers, pp_size=pp_size, vpp_size=vpp_size)
        times: list[tuple[float, float]] = []
        for kind, balanced in (("packed", ""), ("balanced", f"--balance-data --balance-cost {costs}")):
            run = folder / f"{name}-{kind}"
            parts = f"{FLAGS} --data-path {data} --pipeline-model-parallel-size {pp_size} {flags} {balanced}".split()
            recorded = train(run, [*parts, "--balance-record", str(run / "record")], num_ranks=DP_SIZE * pp_size)
            if not costs.exists():
                assert main(["fit", str(run / "record"), "--out", str(costs)]) == 0
            stages = CostModel.from_shape(SHAPE, layout=layout).stages
            seconds = replace(resolve_cost(str(costs)), stages=stages)
            steps = read_record(run / "record").steps[WARM_UP:]
            predicted = sum(replace(step, cost_model=seconds).metrics().predicted_cost for step in steps)
            times.append((predicted, makespan(recorded, pipeline=Pipeline(pp_size, vpp_size, pp_size))))
        packed, balanced = np.array(times)
        gains[name] = dict(zip(("predicted", "measured"), (packed / balanced).tolist(), strict=True))
        say(f"{name}: {gains[name]}")
    return gains


def makespan(run: Recorded, *, pipeline: Pipeline) -> float:
    """Seconds of all steps after the warm-up, each as long as the slowest data-parallel rank's events."""
    steps = [[rank[step] for rank in run.ranks] for step in range(WARM_UP, STEPS)]
    return sum(max(end_of_events(ranks[dp::DP_SIZE], pipeline=pipeline) for dp in range(DP_SIZE)) for ranks in steps)


def end_of_events(stages: Sequence[Mapping[str, Any]], *, pipeline: Pipeline) -> float:
    """The end of the last pass: each starts when its stage is free and its input is there."""
    number, last = stages[0]["num_microbatches"], len(stages) * pipeline.num_chunks
    queues = [
        list(zip(pipeline.passes(stage, number), row["each_pass_cpu_seconds"], strict=True))
        for stage, row in enumerate(stages)
    ]
    ends, free = dict[Any, float](), [0.0] * len(stages)
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                (backward, slot, chunk), seconds = queue[0]
                depth = chunk * len(stages) + stage
                source = (backward, slot, depth + 1) if backward else (backward, slot, depth - 1)
                source = (False, slot, depth) if backward and depth == last - 1 else source
                if (backward or depth) and source not in ends:
                    break
                free[stage] = ends[backward, slot, depth] = max(free[stage], ends.get(source, 0.0)) + seconds
                del queue[0]
    return max(free)
