"""Keyword arguments of a model's forward that a script's forward step does not give."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any


def unwrapped(model: Any) -> Any:
    """A chunk without the wrappers for data parallelism and precision."""
    from megatron.core.utils import unwrap_model

    return unwrap_model(model)


def takes_keyword(model: Any, name: str) -> bool:
    """True if the forward of an unwrapped chunk has the parameter."""
    return name in inspect.signature(model.forward).parameters


@contextlib.contextmanager
def called_with(model: Any, **added: Any) -> Iterator[None]:
    """Have an unwrapped chunk called with these keyword arguments too, within this context."""

    def add(_: Any, positional: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return positional, keywords | added

    handle = model.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
