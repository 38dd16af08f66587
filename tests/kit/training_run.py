"""One recorded training run on this machine, under torchrun, and how far two runs may differ by the number format."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_balance.mcore.verify import allowances

KIT = Path(__file__).resolve().parent
ROOT = KIT.parent.parent
RECORD_STEPS = KIT / "record_steps.py"

CPU_FLAGS = (
    "--transformer-impl local --spec thd_attention thd_block_spec --distributed-backend gloo "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
    "--no-persist-layer-norm --no-rope-fusion --no-create-attention-mask-in-dataloader --num-workers 0"
)
"""Megatron's fused kernels and NCCL need a GPU."""

GPU_FLAGS = (
    "--transformer-impl transformer_engine --distributed-backend nccl --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-create-attention-mask-in-dataloader --num-workers 0"
)
"""In place of CPU_FLAGS; Apex is not needed."""

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


@dataclass(frozen=True)
class Recorded:
    """Of each rank its steps (record_steps.py), what was printed, and the seconds of a run in forks."""

    ranks: list[list[dict[str, Any]]]
    output: str
    cpu_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps of a rank that knows the loss: of the last pipeline stage."""
        return next(steps for steps in self.ranks if steps and "lm_loss" in steps[0])


class RunFailed(RuntimeError):  # noqa: N818 - it says what happened
    """A run that ended with an error; the message ends with what it printed last."""


def search_path() -> str:
    """PYTHONPATH of a process, of any folder, that uses benchmarks and what lies here."""
    return os.pathsep.join([str(ROOT), str(KIT), *filter(None, sys.path)])


def command_of(
    record: Path,
    flags: Sequence[str],
    *,
    num_ranks: int,
    script: Path = RECORD_STEPS,
    device: str = "cpu",
    rendezvous: Sequence[str] = ("--standalone",),
    common: str = f"{MODEL_FLAGS} {TRAINING_FLAGS}",
) -> list[str]:
    """The command line of a recorded run; `rendezvous` holds flags of torchrun, the others are as for `train`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(num_ranks)]
    on_cpu = device == "cpu"
    launch = [str(KIT / "cpu_shim.py")] if on_cpu else ["-m", "megatron_balance.launch"]
    kernels = CPU_FLAGS if on_cpu else GPU_FLAGS if common else ""  # without common flags the caller's are whole
    return [*torchrun, *launch, str(script), str(record), *kernels.split(), *common.split(), *flags]


def train(
    record: Path,
    flags: Sequence[str],
    *,
    num_ranks: int,
    script: Path = RECORD_STEPS,
    device: str = "cpu",
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 300,
    on_line: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> Recorded:
    """Run `script` through the launcher, one rank a process of this machine, and read its records.

    `device` is `cpu`, over gloo, or `cuda`, over NCCL with Transformer Engine; `flags` and `environment` are added to
    the common ones; `on_line` gets every line of output as it comes; `options` are of `command_of`. A run that fails or
    is killed raises RunFailed.
    """
    command = command_of(record, flags, num_ranks=num_ranks, script=script, device=device, **options)
    lines: list[str] = []
    with subprocess.Popen(
        command,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": search_path()} | dict(environment or {}),
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        # torchrun ends its workers when it is told to end; killed outright it would leave them.
        killer = threading.Timer(timeout_seconds, process.terminate)
        killer.start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            on_line(line)
        killer.cancel()
    output = "".join(lines)
    if process.returncode:
        raise RunFailed(f"{' '.join(command)}\nended with {process.returncode}:\n{output[-8000:]}")
    return Recorded(read_records(record, num_ranks=num_ranks), output)


def share_a_core() -> None:
    """Put this process and its children on one core, in turns of 0.1 s: Linux' 1.4 ms cost 4 % in caches refilled."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    number = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
    if number is not None:  # of sched_setattr(2), whose sched_runtime is the length of a turn since Linux 6.12
        attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_BATCH, 0, 0, 0, 100_000_000, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def read_records(record: Path, *, num_ranks: int) -> list[list[dict[str, Any]]]:
    """Of each rank its lines; one that a rank did not end is left out."""
    texts = [(record / f"rank{rank}.jsonl").read_text() for rank in range(num_ranks)]
    return [[json.loads(line) for line in text.rpartition("\n")[0].splitlines()] for text in texts]


class Allowance(NamedTuple):
    """Largest relative differences of any step."""

    loss: float
    grad_norm: float


ALLOWANCES = {
    name: Allowance(*allowances(precision))
    for name, precision in {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.items()
}
"""By precision, as `--balance-verify` has them."""


def largest_difference(run: Any, *, reference: Any, key: str) -> float:
    """Largest relative difference of a figure over all steps."""
    pairs = zip(run.steps, reference.steps, strict=True)
    return max(abs(ours[key] - theirs[key]) / abs(theirs[key]) for ours, theirs in pairs)


def assert_equal(run: Any, *, reference: Any, precision: str = "fp32") -> None:
    """Assert that the `steps` of two runs on the same samples are the same up to rounding."""
    assert len(run.steps) == len(reference.steps) > 0, f"{len(run.steps)} steps, not {len(reference.steps)}"
    allowed = ALLOWANCES[precision]
    for key, limit in (("lm_loss", allowed.loss), ("grad_norm", allowed.grad_norm)):
        difference = largest_difference(run, reference=reference, key=key)
        assert difference <= limit, f"{key} differs by {difference:.2e}; rounding in {precision} allows {limit:.2e}"
