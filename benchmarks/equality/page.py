"""The text around the tables of docs/equality.md."""

PAGE = """# Equality

Made by `scripts/equality_matrix.sh --whole --publish`; do not edit. Every run by itself:
[equality.md](../benchmarks/results/equality.md); every figure: `equality.json` beside it.

{count} {where}

Each run trains a small model with Megatron's own `pretrain()` for {num_steps} steps of {global_batch_size} rows up to
{seq_length} tokens, no two rows of one length, Adam at a constant learning rate. Figures are the largest relative
difference of any step's loss and gradient norm from the unbalanced run with the same ranks, precision and optimizer.
Weights are those that the run has trained so far: what a step gets wrong stays in the steps after it.

- *stock* is the yardstick: what another order or grouping of the same rows changes without this package. An unbalanced
  run shuffles the rows within each global batch; two others have two and four rows in a micro-batch (not under
  pipelines, whose stages expect one). Balancing does both.
- A run counts as equal where it differs by at most what its number format allows ({allowed}; derived in
  rounding.py), or {spread} times the largest that these stock runs change anywhere in its precision, where that
  is more ({yardsticks}).
- In the first step both runs have the same weights. There no balanced run differs by more than: {first}.
- *Look-ahead* changes which rows share a step. It is compared with an unbalanced run that is fed, step by step, the
  rows that look-ahead chose. That the comparison can see such a change: fed the rows in their own order, the
  unbalanced run differs from that one by at least {other_rows} in every cell.
- A balanced run in which any step was not planned counts as failed.

## By ranks, precision and optimizer

`distributed` is `--use-distributed-optimizer`, `overlap` that with `--overlap-grad-reduce --overlap-param-gather`.
*policies*: how many were run in that cell, the next two columns the largest over them.

{layouts}
## By policy

The largest over all cells in which it was run.

{policies}
## Auxiliary losses of experts

They compare how tokens spread over experts *within a micro-batch* (`aux_loss`), a row of it (`seq_aux_loss`: a packed
micro-batch is one row) or the micro-batches of all ranks so far (`global_aux_loss`). So they depend on which samples
share a micro-batch, and the last one on their order even in stock Megatron, as they depend on
`--micro-batch-size` in stock Megatron. Two ranks, experts spread over both, coefficient 1e-2, fp32, plain optimizer;
all compared with stock at one sample a micro-batch.

{aux}
Stock Megatron pads the rows of a micro-batch of several samples to `--seq-length`, and routes the padding too.

Who compares by hand: Megatron 0.19 draws random numbers for a warm-up of fused functions, as many as a micro-batch has
elements, and after them the initial weights of routers. Runs with another `--micro-batch-size` therefore begin with
other routers, balanced or not. The ranks here leave that warm-up out.

## What is left out

- Overlap without the distributed optimizer: Megatron refuses `--overlap-param-gather` there; `--overlap-grad-reduce`
  by itself is not part of the matrix.
- fp16: its loss scale skips steps, which is no matter of equality.
- Balancing by FLOPs without packing: refused by the flags.
- Without `--whole` the rarer policies run on three layouts only: the column *policies* says how many ran in a cell.
- GPUs, NCCL and Transformer Engine: not measured.

## How it runs

One process imports Megatron once and forks the ranks of every run. The same run started by torchrun and compared with
the forked one must not differ by a bit:

{forked}"""
