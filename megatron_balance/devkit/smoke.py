"""Runs a small training on this machine's CPU, to check that everything works together.

The flags here are also those of the quickstart, the tests and the benchmarks (tests/kit/training_run.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

CPU_FLAGS = (
    "--transformer-impl local --spec megatron_balance.mcore.thd.attention thd_block_spec --distributed-backend gloo "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
    "--no-persist-layer-norm --no-rope-fusion --no-create-attention-mask-in-dataloader --num-workers 0"
)
"""Megatron's fused kernels and NCCL need a GPU."""

MODEL_FLAGS = (
    "--group-query-attention --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257 "
    "--make-vocab-size-divisible-by 1"
)
"""A Llama-like model on bytes."""

TRAINING_FLAGS = (
    "--micro-batch-size 1 --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --weight-decay 0 --clip-grad 1 "
    "--calculate-per-token-loss --eval-iters 0 --eval-interval 100000 --log-interval 1"
)

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONUNBUFFERED": "1"}
"""One thread a rank: ranks that share cores would slow each other down, and not evenly."""

NUM_RANKS = 2
NUM_STEPS = 2
TIMEOUT_SECONDS = 300

_SMOKE_FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    f"--seq-length 512 --max-position-embeddings 512 --global-batch-size 8 --train-iters {NUM_STEPS} "
    "--use-dynamic-batch-size --max-tokens-per-gpu 1024 --balance-data --balance-by-flops"
)


@dataclass(frozen=True)
class SmokeRun:
    """The outcome of a run.

    Attributes:
        problem: what went wrong, in one line; None where every step was balanced.
        output: all that the ranks printed.
    """

    problem: str | None
    output: str


def smoke_run(*, timeout_seconds: float = TIMEOUT_SECONDS) -> SmokeRun:
    """Train two steps on two ranks, through torchrun and the launcher, as a user would.

    Args:
        timeout_seconds: after which the run is ended.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    command += ["-m", "megatron_balance.launch", "--cpu", "-m", "megatron_balance.devkit.pretrain_sft"]
    command += f"{CPU_FLAGS} {MODEL_FLAGS} {TRAINING_FLAGS} {_SMOKE_FLAGS}".split()
    with subprocess.Popen(
        command,
        env=os.environ | ENVIRONMENT,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its workers when it gets SIGTERM
            output, _ = process.communicate()
            return SmokeRun(f"no end after {timeout_seconds:.0f} s: a rank hangs, or the machine is overloaded", output)
    if process.returncode:
        return SmokeRun(_first_error(output) or f"ended with status {process.returncode}", output)
    num_lines = sum(line.startswith("megatron_balance: iteration ") for line in output.splitlines())
    if num_lines != NUM_STEPS:
        return SmokeRun(f"it ran, but {num_lines} of {NUM_STEPS} steps were balanced", output)
    return SmokeRun(None, output)


def _first_error(output: str) -> str | None:
    """The first line that looks like an error message: later ones follow from it."""
    for line in output.splitlines():
        text = line.split("]: ", 1)[-1].strip()  # torchrun may put the rank before what a rank printed
        kind, _, message = text.partition(": ")
        of_the_launcher = kind == "megatron_balance" and not message.startswith(("iteration ", "WARNING"))
        if message and (of_the_launcher or (kind.endswith(("Error", "Exception")) and " " not in kind)):
            return text
    return None
