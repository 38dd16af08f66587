"""Seconds fitted to the record of a real run plan the next one: the loss stays what it was."""

from __future__ import annotations

from pathlib import Path

from forked_runs import train
from rounding import assert_equal

from megatron_balance.cli import main
from megatron_balance.cost import Calibration
from megatron_balance.record import read_record

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    "--seq-length 512 --max-position-embeddings 512 --global-batch-size 16 --train-iters 5"
)
BALANCED = f"{FLAGS} --use-dynamic-batch-size --balance-data --balance-by-flops --max-tokens-per-gpu 512"


def test_a_record_is_fitted_and_the_next_run_plans_by_seconds(tmp_path: Path) -> None:
    stock = train(tmp_path / "stock", FLAGS.split(), num_ranks=2)
    record, costs = tmp_path / "record", tmp_path / "seconds.json"
    recorded = train(tmp_path / "first", f"{BALANCED} --balance-record {record}".split(), num_ranks=2)
    assert main(["fit", str(record), "--out", str(costs)]) == 0
    flags = f"{BALANCED} --balance-cost {costs} --balance-record {tmp_path / 'by_seconds'}"
    by_seconds = train(tmp_path / "second", flags.split(), num_ranks=2)
    for ours in (recorded, by_seconds):
        assert_equal(ours, reference=stock)
    planned = read_record(tmp_path / "by_seconds").info
    assert planned.cost_name == "seconds"
    assert planned.cost_model == Calibration.read(costs).cost_model()
