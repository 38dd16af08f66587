"""Measure what your model's micro-batches take on this device, and write calibration.json.

The model's own Megatron layers run forward and backward over packed micro-batches of many shapes; seconds are
fitted to launches, sequences, tokens and attention. `plan --cost calibration.json` and, in training,
`--balance-calibration calibration.json` then plan with seconds in place of FLOPs.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.resolve import find_shape
from megatron_balance.errors import BalanceError
from megatron_balance.model.presets import PRESETS
from megatron_balance.model.shape import ModelShape

_EPILOG = f"""\
examples:
  megatron-balance calibrate --model Qwen3-8B --max-tokens 32768
  torchrun --nproc-per-node 8 -m megatron_balance calibrate --model Qwen3-8B --max-tokens 16384
      context-parallel exchange as well, for --balance-context-parallel; over several nodes as you start training
  megatron-balance calibrate --max-tokens 4096 -- --num-layers 2 --hidden-size 128 --num-attention-heads 4 …
      what follows -- are the flags of your training script, which describe its model

models:
  {", ".join(PRESETS)}
  or the path of a Hugging Face config.json

Run it on one GPU of the kind you train on, with nothing else on it; a model need not fit: every kind of layer
is measured by itself. Without a GPU it measures the CPU, which is for trying things out.
"""

DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `calibrate`."""
    parser.epilog = _EPILOG
    parser.add_argument("megatron_args", nargs="*", metavar="-- MEGATRON_ARGS", help="Megatron's flags, after --")
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="MODEL", help="preset name, or a Hugging Face config.json")
    model.add_argument("--recompute", action="store_true", help="as under --recompute-granularity full")
    model.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")

    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--max-tokens", type=int, required=True, metavar="T", help="largest micro-batch: your --max-tokens-per-gpu"
    )
    measuring.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    measuring.add_argument(
        "--layers-per-kind", type=int, default=2, metavar="K", help="layers of a kind that run together (default: 2)"
    )
    measuring.add_argument(
        "--repeats", type=int, default=3, metavar="R", help="times each shape is measured (default: 3)"
    )
    measuring.add_argument("--seed", type=int, default=0, metavar="S", help="of held-out lengths and of the order")

    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", type=Path, default=Path("calibration.json"), metavar="FILE", help="default: calibration.json"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write, and say how good the fit is."""
    if bool(args.model) == bool(args.megatron_args):
        raise BalanceError("calibrate needs either --model, or Megatron's flags after --, and not both.")
    try:
        import torch
    except ModuleNotFoundError as error:
        raise BalanceError(
            f"calibrate runs Megatron's layers, and {error.name} is not installed: "
            "pip install 'megatron-balance[megatron]'."
        ) from error
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise BalanceError("--device is cuda and torch finds none: use --device cpu, for trying things out.")
    if device == "cpu":
        from megatron_balance.devkit.cpu import enable_cpu, patch_megatron

        enable_cpu()
        torch.set_num_threads(1)  # as torchrun gives a rank; more would count CPU seconds of waiting
    _quieten_megatron()
    from megatron_balance.mcore.calibration.calibrate import calibrate

    if device == "cpu":
        patch_megatron()

    shape = _shape(args.model, args.megatron_args)
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    calibration = calibrate(
        shape,
        max_tokens=args.max_tokens,
        device=device,
        dtype=getattr(torch, dtype),
        num_layers=args.layers_per_kind,
        repeats=args.repeats,
        recompute=args.recompute,
        seed=args.seed,
        progress=_progress,
    )
    if os.environ.get("RANK", "0") != "0":
        return 0
    calibration.write(args.out)
    _print_result(calibration, shape=shape, recompute=args.recompute)
    print(f"Written to {args.out}. Use it: plan --cost {args.out}, or --balance-calibration {args.out} in training.")
    return 0


def _quieten_megatron() -> None:
    """Silences warnings about missing kernels on import, which do not concern this command."""
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("megatron").setLevel(logging.ERROR)


def _shape(model: str | None, megatron_args: list[str]) -> ModelShape:
    if model is not None:
        return find_shape(model)
    from megatron_balance.mcore.setup.command_line import shape_from_command_line

    return shape_from_command_line(megatron_args)


def _progress(done: int, total: int) -> None:
    """One line that grows, for people only."""
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print(f"\r{done} of {total} measurements", end="" if done < total else "\n", file=sys.stderr, flush=True)


def _print_result(calibration: Calibration, *, shape: ModelShape, recompute: bool) -> None:
    origin = calibration.origin
    print(f"{origin['device']}, {origin['dtype']}, {origin['clock']}; {len(calibration.measurements)} micro-batches.")
    print(
        f"A micro-batch takes {calibration.per_microbatch * 1e3:.3g} ms, and {calibration.per_sequence * 1e6:.3g} us a "
        f"sequence, {(calibration.linear + calibration.expert_linear) * 1e6:.3g} us a token, "
        f"{calibration.quadratic * 1e12:.3g} ps a squared token."
    )
    assert calibration.held_out_error is not None, "calibrate keeps micro-batches out"
    print(
        f"On {sum(m['held_out'] for m in calibration.measurements)} micro-batches that were not fitted it is off by "
        f"{calibration.held_out_error:.1%} (median), {origin['held_out_error_worst']:.1%} at worst."
    )
    for name, fit in origin["exchange"].items():
        where = "several nodes" if name == "cp_exchange_between_nodes" else "a node"
        sizes = ", ".join(map(str, fit["cp_sizes"]))
        print(
            f"Receiving a token's keys and values within {where} takes {getattr(calibration, name) * 1e6:.3g} us. On "
            f"micro-batches that {sizes} ranks share, the calibration is off by {fit['held_out_error']:.1%} (median), "
            f"by {fit['held_out_error_without']:.1%} without it."
        )
    crossover = _crossover(calibration.cost_model())
    if crossover is not None:
        flops = _crossover(CostModel.from_shape(shape, recompute=recompute))
        print(
            f"Attention outweighs the rest from {crossover:.0f} tokens on"
            + (f"; by FLOPs it would from {flops:.0f}." if flops is not None else ".")
        )


def _crossover(cost_model: CostModel) -> float | None:
    """Tokens at which the quadratic part equals the linear one; None where nothing is quadratic."""
    return cost_model.linear / cost_model.quadratic if cost_model.quadratic else None
