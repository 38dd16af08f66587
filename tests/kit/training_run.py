"""Starts one recorded training run on this machine: for the quickstart, the tests and the benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RECORD_STEPS = ROOT / "tests" / "kit" / "record_steps.py"

CPU_LAUNCH = Path(__file__).with_name("cpu_launch.py")

CPU_FLAGS = (
    "--transformer-impl local --spec thd_attention thd_block_spec --distributed-backend gloo "
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

GPU_FLAGS = (
    "--transformer-impl transformer_engine --distributed-backend nccl --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-create-attention-mask-in-dataloader --num-workers 0"
)
"""In place of CPU_FLAGS; Apex is not needed."""


@dataclass(frozen=True)
class Recorded:
    """Records and output of a run.

    Attributes:
        ranks: for each rank that recorded, its steps (see record_steps.py).
        output: everything all ranks printed.
    """

    ranks: list[list[dict[str, Any]]]
    output: str

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps of a rank that knows the loss: of the last pipeline stage."""
        return next(steps for steps in self.ranks if steps and "lm_loss" in steps[0])


class RunFailed(RuntimeError):  # noqa: N818 - it says what happened
    """A run that ended with an error; the message ends with what it printed last."""


def search_path() -> str:
    """PYTHONPATH of a process, of any folder, that uses benchmarks and what lies here."""
    return os.pathsep.join([str(ROOT), str(ROOT / "tests" / "kit"), *filter(None, sys.path)])


def command_of(
    record: Path,
    flags: Sequence[str],
    *,
    num_ranks: int,
    script: Path = RECORD_STEPS,
    device: str = "cpu",
    rendezvous: Sequence[str] = ("--standalone",),
) -> list[str]:
    """The command line of a recorded run; `rendezvous` holds flags of torchrun, the others are as for `train`."""
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(num_ranks)]
    launch = [str(CPU_LAUNCH)] if device == "cpu" else ["-m", "megatron_balance.launch"]
    command += [*launch, str(script), str(record)]
    device_flags = CPU_FLAGS if device == "cpu" else GPU_FLAGS
    return [*command, *f"{device_flags} {MODEL_FLAGS} {TRAINING_FLAGS}".split(), *flags]


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
) -> Recorded:
    """Run pretrain_sft through the launcher and read its records.

    Args:
        record: folder for the records.
        flags: added to the common ones.
        num_ranks: processes on this machine.
        script: what each of them runs; it records as record_steps.py does.
        device: `cpu` over gloo, or `cuda` over NCCL with Transformer Engine, one GPU a rank.
        environment: variables beside those of this process.
        timeout_seconds: after which the run is killed.
        on_line: called with every line of output as it comes.

    Raises:
        RunFailed: the run ended with an error or was killed.
    """
    command = command_of(record, flags, num_ranks=num_ranks, script=script, device=device)
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
    return Recorded(ranks=read_records(record, num_ranks=num_ranks), output=output)


def read_records(record: Path, *, num_ranks: int) -> list[list[dict[str, Any]]]:
    """For each rank, its steps; a line that a rank did not end is left out."""
    paths = [record / f"rank{rank}.jsonl" for rank in range(num_ranks)]
    return [[json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()] for path in paths]


def largest_difference(run: Recorded, *, reference: Recorded, key: str) -> float:
    """Largest relative difference of a figure over all steps."""
    pairs = zip(run.steps, reference.steps, strict=True)
    return max(abs(ours[key] - theirs[key]) / abs(theirs[key]) for ours, theirs in pairs)
