"""One rank of the benchmark of LLaVAModel: the loop of scripts/train_llava_loop.py on the benchmark's samples."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from train_llava_loop import train

from benchmarks.llava.samples import CAP, PIXEL_SHUFFLE, SAMPLES_PER_RANK, SIZES, texts, ways
from megatron_balance.devkit.cpu import patch_megatron


def main() -> None:
    """Arguments: the folder of records. MIXTURE, WAY and NUM_STEPS in the environment."""
    patch_megatron()
    dist.init_process_group("gloo")
    with (Path(sys.argv[1]) / f"rank{os.environ['RANK']}.jsonl").open("w") as out:
        for row in train(
            num_steps=int(os.environ["NUM_STEPS"]),
            num_items=SAMPLES_PER_RANK,
            sizes={**SIZES, "pixel_shuffle": PIXEL_SHUFFLE},
            texts=functools.partial(texts, mixture=os.environ["MIXTURE"]),
            max_tokens=CAP,
            **ways()[os.environ["WAY"]],
        ):
            print(json.dumps(row), file=out, flush=True)
    dist.destroy_process_group()
