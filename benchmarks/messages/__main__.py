"""Counts messages between pipeline stages: shapes exchanged by Megatron before each message against planned shapes.

    scripts/count_messages.sh                              a minute
    scripts/count_messages.sh --out benchmarks/results     what is committed

Each layout trains twice on the same data with the same plans. The exit status is 1 where shapes are still exchanged,
or a figure without them is not what the one with them allows.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forked import import_once, train_forked
from training_run import ROOT

from benchmarks.equality.cases import Layout
from benchmarks.markdown import table
from benchmarks.messages.counted import FIGURES, WAY
from benchmarks.results_file import made_by, page_head, versions_of, write_results

NUM_STEPS = 3
FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --seq-length 512 "
    f"--max-position-embeddings 512 --global-batch-size 16 --train-iters {NUM_STEPS} "
    "--use-dynamic-batch-size --max-tokens-per-gpu 512 --balance-data --balance-by-flops"
)
_PP4 = "--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
_PP2_VPP2 = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"


LAYOUTS = {
    "PP2": Layout("--num-layers 2 --pipeline-model-parallel-size 2", 2),
    "PP4": Layout("--num-layers 4 --pipeline-model-parallel-size 4", 4),
    "PP2-VPP2": Layout(_PP2_VPP2, 2),
    "PP4-VPP2, no overlap": Layout(f"{_PP4} --no-overlap-p2p-communication", 4),
}
WAYS = ("exchanged", "planned")


def main() -> int:
    """Train, print, write."""
    parser = argparse.ArgumentParser(prog="scripts/count_messages.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the results")
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS), choices=LAYOUTS, metavar="LAYOUT", help="layouts")
    args = parser.parse_args()
    folder = ROOT / "build" / "bench" / "runs" / "messages"
    shutil.rmtree(folder, ignore_errors=True)
    import_once()
    layouts = {
        layout: {way: _counted(folder / layout / way, layout=LAYOUTS[layout], way=way) for way in WAYS}
        for layout in args.only
    }
    result = made_by("scripts/count_messages.sh", layouts=layouts)
    text = write_results("messages", result, report=_report, out=args.out)
    sys.stdout.write(text)
    return 0 if all(_holds(ways) for ways in layouts.values()) else 1


def _counted(record: Path, *, layout: Layout, way: str) -> dict[str, Any]:
    """Figures of one step of all ranks, means over the steps."""
    run = train_forked(
        record,
        f"{FLAGS} {layout.flags}".split(),
        num_ranks=layout.num_ranks,
        timeout_seconds=600,
        module="benchmarks.messages.counted",
        environment={WAY: way},
    )
    ranks = run.recorded.ranks
    num_microbatches = sum(len(step["microbatch_tokens"]) for step in ranks[0])
    totals = {figure: sum(step[figure] for steps in ranks for step in steps) for figure in FIGURES}
    return {"num_microbatches": num_microbatches / NUM_STEPS} | {
        figure: total / NUM_STEPS for figure, total in totals.items()
    }


def _holds(ways: Mapping[str, Mapping[str, float]]) -> bool:
    """Half the messages, none of them a shape, and no tensor read by the host."""
    before, after = ways["exchanged"], ways["planned"]
    return (
        before["messages"] == 2 * after["messages"] > 0
        and before["shape_messages"] == after["messages"]
        and after["shape_messages"] == after["reads_by_host"] == 0
        and after["device_waits"] < before["device_waits"]
    )


def _report(result: Mapping[str, Any]) -> str:
    rows = [
        (
            layout,
            f"{ways['planned']['num_microbatches']:.1f}",
            *(
                f"{ways['exchanged'][figure]:.0f} → {ways['planned'][figure]:.0f}"
                for figure in ("messages", "shape_messages", "device_waits", "reads_by_host")
            ),
        )
        for layout, ways in result["layouts"].items()
    ]
    columns = "layout | micro-batches | messages | shapes among them | waits for the device | reads by the host"
    return f"""{page_head("Messages between pipeline stages", f"{result['command']} --out benchmarks/results")}
A step of one model replica, all its stages together, mean of {NUM_STEPS} steps: with shapes exchanged before every
message, as Megatron does where sequence lengths vary → with shapes from the plan. Counted in `P2PCommunicator`, on a
CPU: `isend` calls, those of them that carry a shape, `torch.cuda.synchronize` calls, and `tolist` calls, which wait for
the device too. {versions_of(result)}.

{table(columns, rows)}

The waits that are left in layouts without overlap are Megatron's own after a batch of messages (`batch_p2p_sync`).
"""


if __name__ == "__main__":
    sys.exit(main())
