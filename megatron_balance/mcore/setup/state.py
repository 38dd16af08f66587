"""The steps of a training loop, and the values in Megatron's arguments that change while it runs."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator


class LoopState:
    """The steps of a hand-written loop, which counts them here; it ends early after a multiple of `exit_interval`."""

    is_sft = False
    """Megatron's `--sft` is set."""

    def __init__(self, *, num_steps: int | None, exit_interval: int | None = None) -> None:
        self.num_done = 0
        self._num_steps, self._exit_interval = num_steps, exit_interval

    @property
    def iteration(self) -> int:
        """The number of the newest step, from 1."""
        return self.num_done + 1

    @property
    def has_next_step(self) -> bool:
        """True if another step may follow; a data set may hold no more than the steps there are."""
        exits = bool(self._exit_interval and self.iteration % self._exit_interval == 0)
        return not exits and (self._num_steps is None or self.iteration < self._num_steps)

    @contextlib.contextmanager
    def sft_as(self, value: bool) -> Iterator[None]:
        """Have Megatron take `--sft` as set or not. `evaluate` averages the losses by it, scripts read data by it."""
        yield

    @contextlib.contextmanager
    def microbatch_of(self, num_tokens: int, *, cp_size: int) -> Iterator[None]:
        """Give Megatron's arguments the shape of one micro-batch while it runs.

        Tensor-parallel ranks allocate their receive buffers by them (`get_batch_on_this_tp_rank`), and MoE layers view
        activations by seq_length. Tokens are those of all `cp_size` ranks that share it.
        """
        yield


class MegatronState(LoopState):
    """The state of a run in Megatron's validated arguments."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(num_steps=args.train_iters, exit_interval=getattr(args, "exit_interval", None))
        self._args = args
        self.is_sft = bool(getattr(args, "sft", False))

    @property
    def iteration(self) -> int:
        """The number in Megatron's log of the newest step; `curr_iteration` counts the steps before it.

        Under `--skip-train` it is the checkpoint's, and nothing sets `curr_iteration`.
        """
        before = getattr(self._args, "curr_iteration", None)
        return self._args.iteration if before is None else before + 1

    @contextlib.contextmanager
    def sft_as(self, value: bool) -> Iterator[None]:
        """As above."""
        args = self._args
        stock = getattr(args, "sft", False)
        args.sft = value
        try:
            yield
        finally:
            args.sft = stock

    @contextlib.contextmanager
    def microbatch_of(self, num_tokens: int, *, cp_size: int) -> Iterator[None]:
        """As above."""
        args = self._args
        stock = args.seq_length, args.micro_batch_size, args.context_parallel_size
        args.seq_length, args.micro_batch_size, args.context_parallel_size = num_tokens, 1, cp_size
        try:
            yield
        finally:
            args.seq_length, args.micro_batch_size, args.context_parallel_size = stock
