"""The text below the flags of `compare --help`: sources, examples, policies and columns."""

from __future__ import annotations

from megatron_balance.cli.flags import LENGTHS_HELP, MODELS_HELP
from megatron_balance.cost.model import MICROBATCH_TOKENS

MAX_SAMPLES = {"step": 2**17, "slots": 2**14, "groups": 2**12}
"""Samples planned without --steps, so that planning takes seconds. Planning takes
longer if ranks meet in every slot or in a pipeline, and longest if several groups of ranks do.
"""

EPILOG = f"""\
{LENGTHS_HELP}
  or the folder of a run recorded with --balance-record: its own steps, ranks, cap and costs

examples:
  megatron-balance compare lengths.npz --global-batch-size 256 --dp-size 8 --max-tokens-per-gpu 16384 \\
      --model Qwen3-8B --peak-tflops 989 --efficiency 0.4
  megatron-balance compare lengths.npz --global-batch-size 256 --dp-size 8 --max-tokens-per-gpu 16384 \\
      --model Qwen3-8B --cost seconds.json
  megatron-balance compare runs/record --model Qwen3-8B

policies (their flags are printed below the table):
  stock         Megatron's own sampler: sample i on rank i % dp_size, one sample a micro-batch
  packed        every rank packs the samples it loaded, first fit
  balance-data  samples move, ranks are made even in tokens
  by-flops      samples move, ranks are made even in FLOPs of --model
  calibrated    samples move, ranks are made even in the seconds of --cost seconds.json
  dynamic CP    the last of these, each micro-batch with a context-parallel size of its own; only with --model, and
                where training does not refuse it

columns, means over the steps:
  step s         predicted time of a step, forward and backward. Shown where its speed is known: --peak-tflops,
                 a seconds.json, or a recorded run that was measured
  tokens/s/GPU   tokens of your samples, padding not counted, by that time and by all GPUs (dp*cp*tp*pp)
  speed          predicted time under stock over this policy's
  no comm.       speed if communication between context-parallel ranks were free; dynamic CP is planned again for it
  step, micro-batch, pipeline
                 slowest over mean under each objective; 1.000 is even, also with one rank. * marks the objective of
                 your ranks, which the predicted times follow.
                 step: cost of a rank. micro-batch: the slowest rank in each slot, summed. pipeline: the longest
                 makespan over that of as many even micro-batches, so its bubble is not counted
  over bound     predicted time above a lower bound that no schedule can beat
  padding        padding for context and sequence parallelism, of all tokens run
  headroom       room below the token cap in the fullest micro-batch of all steps, in tokens, not in bytes; below 0:
                 one sample is longer than the cap
  CP             ranks that share a token by context parallelism
  micro-batches  of one rank in one step
  plan ms        time to plan one step

With --model each context-parallel rank receives the keys, values and gradients of the others at --cp-bandwidth, at one
size and with dynamic CP; no overlap with attention is assumed, so this is an upper bound on its time.

FLOPs are those this package plans by: causal attention counted once, 3x for a GEMM and 3.5x for attention in
training, no recomputation; each micro-batch counts {MICROBATCH_TOKENS} additional tokens on each context-parallel
rank, for launches. TFLOPS of tools that count the whole attention square, or 6*parameters, differ: choose --efficiency
for these FLOPs, or better, use fit.

{MODELS_HELP}
"""
