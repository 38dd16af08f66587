"""After `undo()` nothing of a run is left: no thread, process, process group or wrapped function."""

from forked import train
from kept_runs import write_rows

BATCH = 256
"""Samples, enough for a planning process."""

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --num-query-groups 2 --ffn-hidden-size 16 --seq-length 32 "
    f"--max-position-embeddings 32 --global-batch-size {BATCH} --train-iters 3"
)
BALANCED = "--use-dynamic-batch-size --max-tokens-per-gpu 1024 --balance-data --balance-by-flops"


def leftovers(folder, flags):
    """What a rank of two has after training, and once the hooks are undone."""
    data = folder.parent / "data.jsonl"
    write_rows(data, range(1, 3 * BATCH + 1), longest=32, seed=0)
    ran = train(
        folder,
        f"{FLAGS} {flags} --vocab-size 1024 --data-path {data}".split(),
        num_ranks=2,
        module="undone_run",
        timeout_seconds=200,
    )
    rows = [rank[0] for rank in ran.ranks]
    assert rows[0] == rows[1]
    return rows[0]["trained"], rows[0]["undone"]


def test_undo_leaves_the_process_as_a_stock_run_does(tmp_path):
    stock, unhooked = leftovers(tmp_path / "stock", "--micro-batch-size 32")
    trained, undone = leftovers(tmp_path / "balanced", BALANCED)
    assert trained["threads"] >= 1
    assert trained["processes"] == 1
    assert trained["groups"] > stock["groups"]
    assert undone == unhooked == stock | {"wrapped": 0}
