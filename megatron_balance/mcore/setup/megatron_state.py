"""The values in Megatron's arguments that change while a run trains; everything else is read once (`run_setup.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class MegatronState:
    """Reads the state of a run in Megatron's arguments, and sets the shape of the micro-batch that runs.

    Args:
        args: Megatron's validated arguments.
    """

    def __init__(self, args: Any) -> None:
        self._args = args

    @property
    def iteration(self) -> int:
        """The number in Megatron's log, from 1, of the newest step; `curr_iteration` counts the steps before it.

        Under `--skip-train` it is the checkpoint's, and nothing sets `curr_iteration`.
        """
        before = getattr(self._args, "curr_iteration", None)
        return self._args.iteration if before is None else before + 1

    @property
    def has_next_step(self) -> bool:
        """True if flags let another step follow; a data set may hold no more than the steps there are."""
        last, exit_interval = self._args.train_iters, getattr(self._args, "exit_interval", None)
        exits = bool(exit_interval and self.iteration % exit_interval == 0)
        return not exits and (last is None or self.iteration < last)

    @contextlib.contextmanager
    def sft_as(self, value: bool) -> Iterator[None]:
        """Have Megatron take `--sft` as set or not. `evaluate` averages the losses by it, scripts read data by it."""
        args = self._args
        stock = getattr(args, "sft", False)
        args.sft = value
        try:
            yield
        finally:
            args.sft = stock

    @property
    def is_sft(self) -> bool:
        """True if `--sft` is set."""
        return bool(getattr(self._args, "sft", False))

    @contextlib.contextmanager
    def microbatch_of(self, num_tokens: int, *, cp_size: int | None = None) -> Iterator[None]:
        """Give Megatron's arguments the shape of one micro-batch while it runs.

        Tensor-parallel ranks allocate their receive buffers by them (`get_batch_on_this_tp_rank`), and MoE layers view
        activations by seq_length.

        Args:
            num_tokens: over all its context-parallel ranks.
            cp_size: these ranks, None for as many as the run has.
        """
        args = self._args
        stock = args.seq_length, args.micro_batch_size, args.context_parallel_size
        args.seq_length, args.micro_batch_size = num_tokens, 1
        if cp_size is not None:
            args.context_parallel_size = cp_size
        try:
            yield
        finally:
            args.seq_length, args.micro_batch_size, args.context_parallel_size = stock
