"""Trains and records every evaluation: run by __main__.py and by the tests.

Each rank's lines are those of record_steps.py and one for each call of Megatron's `evaluate`: its result and, summed
over its iterations, the loss and the tokens of this rank's micro-batches, before Megatron averages them; the first
token of each sequence whose loss it sums, by which tests know a sample; and for each iteration the lengths of the
sequences that it ran, with their padding.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from typing import Any, TextIO

import record_steps
from torch import Tensor

from megatron_balance.hooking.patches import Function, Hook
from megatron_balance.mcore import hooks

_out: list[TextIO] = []
_sums: list[list[float]] = []
_tokens_of_slots: list[int] = []
_first_tokens: list[int] = []
_lengths: list[list[int]] = []


def main() -> None:
    """Record while the script trains."""
    rows = [
        ("evaluate", _recorded),
        ("get_forward_backward_func", _summed),
    ]
    also = [
        Hook(
            target=f"megatron.training.training:{target}",
            bound_in=("megatron.training.training",),
            parameters=(),
            wrap=wrap,
            why="records an evaluation",
            until="Megatron has callbacks around it",
        )
        for target, wrap in rows
    ]
    record_steps.train_wrapped(_training, why="as record_steps", also=also)


def _training(train_step: Function, *, out: TextIO) -> Function:
    _out.append(out)
    return record_steps.recorded(train_step, out=out)


def _recorded(evaluate: Function) -> Function:
    @functools.wraps(evaluate)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        _sums.clear()
        _tokens_of_slots.clear()
        _first_tokens.clear()
        _lengths.clear()
        args: Any = get_args()
        before = args.consumed_valid_samples
        wall, cpu = time.perf_counter(), time.process_time()
        result = evaluate(*positional, **keywords)
        row = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        row |= {"evaluation": {name: float(value) for name, value in result[0].items()}}
        row |= {"sums": _sums[:], "consumed": args.consumed_valid_samples - before, "sft": args.sft}
        row |= {"microbatch_tokens": _tokens_of_slots[:], "first_tokens": _first_tokens[:]}
        row |= {"lengths": _lengths[:]}
        print(json.dumps(row), file=_out[0], flush=True)
        return result

    return wrapper


def _summed(get_forward_backward_func: Function) -> Function:
    @functools.wraps(get_forward_backward_func)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        schedule = get_forward_backward_func(*positional, **keywords)

        def run(*args: Any, **arguments: Any) -> Any:
            if not arguments.get("forward_only"):
                return schedule(*args, **arguments)
            arguments["forward_step_func"] = _watched(arguments["forward_step_func"])
            _lengths.append([])
            losses = schedule(*args, **arguments)
            _sums.append([sum(float(loss["lm loss"].view(-1)[i]) for loss in losses) for i in (0, 1)])
            balanced = hooks.current()
            if balanced is not None and balanced.evaluation is not None:
                assert balanced.evaluation.last_step is not None
                _tokens_of_slots.extend(balanced.evaluation.last_step.microbatch_tokens)
            return losses

        return run

    return wrapper


def _watched(forward_step: Function) -> Function:
    """A forward step that notes the sequences of the item that it reads."""

    @functools.wraps(forward_step)
    def wrapper(data_iterator: Iterator[dict[str, Tensor]] | None, *rest: Any, **keywords: Any) -> Any:
        item = next(data_iterator or iter(()), None)
        if item is None:  # a rank that reads no data
            return forward_step(data_iterator, *rest, **keywords)
        if "tokens" in item:  # not on a pipeline stage that loads no data
            starts_of = item.get("cu_seqlens_padded", item["cu_seqlens"])
            for tokens, learned, starts in zip(item["tokens"], item["loss_mask"], starts_of, strict=True):
                bounds = list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
                _lengths[-1].extend(end - start for start, end in bounds)
                _first_tokens.extend(int(tokens[start]) for start, end in bounds if learned[start:end].any())
        return forward_step(iter([item]), *rest, **keywords)

    return wrapper


if __name__ == "__main__":
    main()
