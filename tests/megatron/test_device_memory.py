"""The log says once what device memory training took and the cap that it would allow; on a CPU it says nothing."""

from __future__ import annotations

import re
from pathlib import Path

from forked_runs import train

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    "--seq-length 512 --max-position-embeddings 512 --global-batch-size 16 --train-iters 7 "
    "--use-dynamic-batch-size --balance-data --balance-by-flops --max-tokens-per-gpu 1024"
)


def test_the_peak_of_the_fullest_rank_and_the_least_cap_are_said_once(tmp_path: Path) -> None:
    ran = train(tmp_path, FLAGS.split(), num_ranks=2, module="fake_device_memory")
    said = re.findall(
        r"peak device memory: (.*) GiB allocated, (.*) reserved\. .*--max-tokens-per-gpu (\d+) ", ran.output
    )
    # Both keep 12 of 80 GiB between steps. Of 60 left below nine tenths, the largest micro-batch took 10, or 20.
    largest = [max(tokens for step in steps[:4] for tokens in step["microbatch_tokens"]) for steps in ran.ranks]
    cap = min(largest[0] * 60 // 10, largest[1] * 60 // 20) // 128 * 128
    assert said == [("32.0", "40.0", str(cap))]


def test_nothing_is_said_where_no_device_reports_memory(tmp_path: Path) -> None:
    assert "device memory" not in train(tmp_path, FLAGS.split(), num_ranks=2).output
