"""Megatron-LM dev's scheduler of dynamic context parallelism, run from a checkout: nothing of it is in this repository.

Its two functions need numbers only, the module around them Transformer Engine and a GPU. So they alone are compiled.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Callable
from functools import lru_cache
from math import ceil, log2
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHECKOUT = "MEGATRON_DEV_CHECKOUT"
"""Environment variable with the folder of a checkout of the dev branch."""

_PATH = Path("megatron/core/datasets/data_schedule_utils.py")
_FUNCTIONS = ("next_hdp_group_packing_aware", "dcp_gpus_needed")
_CONSTANT = "_DYNAMIC_CP_WORKLOAD_CAP_DELTA"

Rows = list[list[list[int]]]
"""For every row, for every rank: sample ids."""


def load_scheduler(checkout: Path) -> Callable[..., Rows]:
    """Rows of `DefaultDynamicCPScheduler`, as a function of lengths, ranks and cap."""
    path = checkout / _PATH
    if not path.is_file():
        raise ValueError(
            f"{CHECKOUT} is {checkout}, which has no {_PATH}: name a checkout of Megatron-LM's dev branch."
        )
    nodes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if _is_needed(node)]
    if len(nodes) != len(_FUNCTIONS) + 1:
        raise ValueError(f"{path} has {len(nodes)} of {(*_FUNCTIONS, _CONSTANT)}: has dev moved on?")
    names: dict[str, Any] = {"ceil": ceil, "log2": log2, "lru_cache": lru_cache, **vars(typing)}
    exec(compile(ast.Module(nodes, type_ignores=[]), str(path), "exec"), names)  # noqa: S102
    next_row = names[_FUNCTIONS[0]]

    def rows_of(lengths: NDArray[np.int64], *, num_ranks: int, max_tokens_per_gpu: int) -> Rows:
        remaining = sorted(enumerate(lengths.tolist()), key=lambda pair: pair[1], reverse=True)
        rows: Rows = []
        while remaining:
            _, remaining, _, rank_samples = next_row(remaining, num_ranks, max_seq_len_per_rank=max_tokens_per_gpu)
            rows.append(rank_samples)
        return rows

    return rows_of


def _is_needed(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in _FUNCTIONS
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == _CONSTANT for target in node.targets
    )
