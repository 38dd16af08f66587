"""`megatron-balance calibrate` on real Megatron layers, in a process of its own: the shim is for a whole process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.cli import main
from megatron_balance.cost.calibration import Calibration
from megatron_balance.mcore.calibration.exchange import SharedLayers, fit_exchange, shared_grid
from megatron_balance.mcore.calibration.microbatches import NUM_HELD_OUT, grid_of, mixed_microbatches
from megatron_balance.mcore.calibration.parts import Part
from megatron_balance.mcore.setup.command_line import shape_from_command_line
from megatron_balance.model.flops import fwd_flops
from megatron_balance.model.layers import Layer

DENSE = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 64 --swiglu --vocab-size 96 --make-vocab-size-divisible-by 1"
)
MIXED = f"{DENSE} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-layer-freq [0,1,1]"


def calibrate(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_balance", "calibrate", "--device", "cpu", "--out", str(out), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"NO_COLOR": "1"})


def test_a_dense_model(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    done = calibrate(out, "--max-tokens", "1024", "--repeats", "2", "--", *DENSE.split())
    assert done.returncode == 0, done.stderr
    assert "not fitted it is off by" in done.stdout
    assert "WARNING" not in done.stderr
    assert "warn" not in done.stderr
    calibration = Calibration.read(out)
    assert calibration.linear > 0
    assert calibration.expert_linear == 0
    assert len(calibration.measurements) == len(grid_of(1024)) + NUM_HELD_OUT
    # Loose: it runs beside other tests. What it is on a quiet machine is in benchmarks/results.
    assert calibration.held_out_error is not None
    assert calibration.held_out_error < 0.3
    # What the model takes is three times what one layer takes, and the ends.
    parts = calibration.origin["parts"]
    assert set(parts) == {"attention + dense", "ends"}
    assert parts["attention + dense"][0] == 1.5  # two of the three layers were timed together
    for index, name in enumerate(("per_microbatch", "per_sequence", "linear", "quadratic"), start=1):
        total = sum(part[0] * part[index] for part in parts.values())
        assert getattr(calibration, name) == pytest.approx(total)
    # And it plans.
    assert main(["plan", "synthetic:gsm8k_sft:64", "--global-batch-size", "32", "--dp-size", "2",
                 "--max-tokens-per-gpu", "1024", "--cost", str(out)]) == 0  # fmt: skip


def test_every_kind_of_layer_is_measured_by_itself(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    done = calibrate(out, "--max-tokens", "256", "--repeats", "1", "--recompute", "--", *MIXED.split())
    assert done.returncode == 0, done.stderr
    calibration = Calibration.read(out)
    assert {name: part[0] for name, part in calibration.origin["parts"].items()} == {
        "attention + dense": 0.5,
        "attention + moe": 1.0,
        "ends": 1.0,
    }
    # Routed experts take their part of the FLOPs of the layers they are in.
    moe_linear = calibration.origin["parts"]["attention + moe"][3]
    attention, router, experts = 2 * 32 * (32 + 32) + 2 * 32 * 32, 2 * 32 * 4, 2 * 6 * 32 * 32
    assert calibration.expert_linear == pytest.approx(moe_linear * experts / (attention + router + experts))
    assert calibration.origin["recompute"]


def test_several_ranks_measure_the_exchange(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "megatron_balance", "calibrate", "--device", "cpu", "--out", str(out)]
    command += ["--max-tokens", "256", "--repeats", "1", "--layers-per-kind", "1", "--", *DENSE.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Written to") == 1
    assert "within a node takes" in done.stdout
    calibration = Calibration.read(out)
    assert calibration.cp_exchange is not None
    assert calibration.cp_exchange > 0  # two processes on one machine: what they send is copied
    assert calibration.cp_exchange_between_nodes is None
    assert calibration.cost_model().cp_exchange == round(calibration.cp_exchange * 1e18)
    fit = calibration.origin["exchange"]["cp_exchange"]
    assert fit["held_out_error"] < fit["held_out_error_without"]
    assert {m["cp_size"] for m in fit["measurements"]} == {2}


EXCHANGE, OF_LAYER = 3e-6, np.array([1e-3, 1e-4, 2e-5, 4e-9])


def sizes_of(layer: Layer, *, max_tokens: int = 1024) -> list[SharedLayers]:
    """Sizes 2 and 4 of one kind of layer, which the model has three times as often as it runs."""
    mixed = mixed_microbatches(max_tokens, rng=np.random.default_rng(0))
    held_out = [tuple(length + -length % 8 for length in lengths) for lengths in mixed]
    return [
        SharedLayers(
            size,
            [Part("layer", times=3, layer=layer, model=None, cp_size=size)],  # type: ignore[arg-type]
            shared_grid(max_tokens, cp_size=size),
            held_out,
        )
        for size in (2, 4)
    ]


def test_a_known_exchange_comes_back() -> None:
    runs = sizes_of(Layer("attention", "dense"))
    rng = np.random.default_rng(1)
    seconds = np.array(
        [
            (part.features([lengths]) @ OF_LAYER).item() + EXCHANGE / 3 * sum(lengths) * (1 - 1 / part.cp_size)
            for run in runs
            for part, lengths in run.jobs
        ]
    )
    fit = fit_exchange(runs, seconds=seconds * rng.normal(1, 0.01, seconds.size), fits={"layer": OF_LAYER})
    assert fit is not None
    assert fit.seconds == pytest.approx(EXCHANGE, rel=0.05)
    assert fit.origin["held_out_error"] < 0.02 < fit.origin["held_out_error_without"]
    assert fit_exchange([], seconds=seconds[:0], fits={}) is None


def test_ranks_that_are_faster_together_exchange_for_nothing() -> None:
    runs = sizes_of(Layer("attention", "dense"))
    half = [(part.features([lengths]) @ OF_LAYER).item() / 2 for run in runs for part, lengths in run.jobs]
    fit = fit_exchange(runs, seconds=np.array(half), fits={"layer": OF_LAYER})
    assert fit is not None
    assert fit.seconds == 0


@pytest.mark.parametrize(("max_tokens", "cp_size"), [(256, 2), (1000, 4), (4096, 64)])
def test_shared_micro_batches_split_into_two_chunks_a_rank(max_tokens: int, cp_size: int) -> None:
    grid = shared_grid(max_tokens, cp_size=cp_size)
    assert all(length % (2 * cp_size) == 0 for lengths in grid for length in lengths)
    assert max_tokens * cp_size - 2 * cp_size < max(map(sum, grid)) <= max_tokens * cp_size
    assert len(grid) == len(set(grid)) >= 3


def test_flags_describe_the_model() -> None:
    shape = shape_from_command_line(f"{DENSE} --balance-data --train-iters 3".split())
    assert (shape.num_layers, shape.hidden_size, shape.padded_vocab_size) == (3, 32, 96)
    assert fwd_flops(shape).quadratic == 3 * 2 * 32


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-tokens", "1024"], "either --model, or Megatron's flags after --"),
        (["--max-tokens", "1024", "--model", "Qwen3-8B", "--", "--num-layers", "1"], "and not both"),
        (["--max-tokens", "100", "--model", "Qwen3-8B"], "max_tokens is 100: it must be at least 256"),
        (["--max-tokens", "1024", "--", "--num-layers", "1"], "--hidden-size is not given"),
        (["--max-tokens", "1024", "--model", "Nemotron-H-8B"], "mamba layer cannot be built alone"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(tmp_path: Path, flags: list[str], message: str) -> None:
    done = calibrate(tmp_path / "calibration.json", *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_grid_and_what_is_held_out() -> None:
    grid = grid_of(4096)
    assert max(map(sum, grid)) == 4096
    assert {lengths[0] for lengths in grid} == {64, 128, 256, 512, 1024, 2048, 4096}
    assert all(len(set(lengths)) == 1 for lengths in grid)
    held_out = mixed_microbatches(4096, rng=np.random.default_rng(0))
    assert len(held_out) == NUM_HELD_OUT
    assert not set(held_out) & set(grid)
    assert max(map(sum, held_out)) == 4096
    json.dumps(grid)
