"""record_steps, with the items that each rank has pulled from Megatron's loader and whether it moves samples.

The variable READS names a key that the forward step reads on every stage; with DATA=ends only the first and the last
stage have a data set, as in Megatron's scripts under --dataloader-inter-document-masking.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any, TextIO

import record_steps
from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

from megatron_balance.devkit import pretrain_sft
from megatron_balance.hooking.patches import Function
from megatron_balance.mcore import hooks


def main() -> None:
    """Train."""
    pulled = 0
    stock = _BaseDataLoaderIter.__next__

    def counted(self: Any) -> Any:
        nonlocal pulled
        pulled += 1
        return stock(self)

    def recorded(train_step: Function, *, out: TextIO) -> Function:
        @functools.wraps(train_step)
        def wrapper(*positional: Any, **keywords: Any) -> Any:
            from megatron.core import parallel_state

            balanced = hooks.current()
            exchanges = balanced is not None and balanced.prefetcher.planner._dp_group is not None
            stage = parallel_state.get_pipeline_model_parallel_rank()
            step = record_steps.recorded(train_step, out=out, pulled=pulled, stage=stage, exchanges=exchanges)
            return step(*positional, **keywords)

        return wrapper

    if "READS" in os.environ:
        get_batch = pretrain_sft.get_batch
        pretrain_sft.get_batch = lambda iterator: get_batch(_reading(iterator, key=os.environ["READS"]))
    if os.environ.get("DATA") == "ends":
        pretrain_sft.datasets_provider = _at_the_ends(pretrain_sft.datasets_provider)
    _BaseDataLoaderIter.__next__ = counted  # type: ignore[method-assign]
    record_steps.train_wrapped(recorded, why="records what each rank pulled before the step")


def _at_the_ends(provider: Function) -> Function:
    @functools.wraps(provider)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        from megatron.core import parallel_state

        last = parallel_state.get_pipeline_model_parallel_world_size() - 1
        at_an_end = parallel_state.get_pipeline_model_parallel_rank() in (0, last)
        return provider(*positional, **keywords) if at_an_end else (None, None, None)

    return wrapper


def _reading(iterator: Iterator[dict[str, Tensor]] | None, *, key: str) -> Iterator[dict[str, Tensor]] | None:
    if iterator is None:
        return None
    batch = next(iterator)
    assert batch[key].numel()
    return iter([batch])


if __name__ == "__main__":
    main()
