"""Finds the controller's class beneath Ray's actor class, and TorchSpec's version.

`@ray.remote` leaves an `ActorClass` object under the class's name. It keeps a subclass of the plain class, in which it
wraps every method to trace it, and pickles both by value into the actor's process when the first actor starts. Patches
made before that reach the actor, but only those on the subclass: its methods hide those of the plain class.
`AsyncTrainingController` of this module is that subclass, so that a hook can name
`megatron_balance.adapters.torchspec.actor_class:AsyncTrainingController`.
"""

from __future__ import annotations

import importlib
from importlib import util
from pathlib import Path
from typing import Any

from megatron_balance.adapters import kit
from megatron_balance.errors import BalanceError

CONTROLLER = "torchspec.controller.training_controller"
SUPPORTED_VERSIONS = ("0.1.0",)
"""TorchSpec versions on which the tests run."""


def __getattr__(name: str) -> Any:
    """`AsyncTrainingController`, looked up on access: importing this module does not import TorchSpec."""
    if name != "AsyncTrainingController":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    controller = getattr(importlib.import_module(CONTROLLER), name, None)
    ray_metadata = getattr(controller, "__ray_metadata__", None)
    if ray_metadata is None:
        return controller  # Ray's decorator was switched off.
    # Where Ray does not trace, the subclass has no methods of its own.
    modified = ray_metadata.modified_class
    return next((owner for owner in modified.__mro__ if "_partition_results" in vars(owner)), modified)


def find_version() -> str:
    """The version of the TorchSpec that would be imported.

    Raises:
        BalanceError: there is none.
    """
    spec = util.find_spec("torchspec")
    # A folder of that name without an __init__.py has no origin.
    if spec is None or spec.origin is None:
        raise BalanceError("torchspec is not installed: install it from its git repository, PyPI's is a placeholder.")
    # A checkout on PYTHONPATH has no metadata; its version is in a file beside the package.
    version_file = Path(spec.origin).parent.parent / "version.txt"
    if version_file.is_file():
        return version_file.read_text().strip()
    return kit.find_version("torchspec", missing=f"torchspec in {spec.origin} has no version: install it with pip.")


def check_not_started() -> None:
    """Refuse to hook after a controller has started: it keeps the methods that it started with.

    Raises:
        BalanceError: an actor was started in this process.
    """
    controller = importlib.import_module(CONTROLLER).AsyncTrainingController
    ray_metadata = getattr(controller, "__ray_metadata__", None)
    if getattr(ray_metadata, "last_export_cluster_and_job", None) is not None:
        raise BalanceError("an AsyncTrainingController was started already: install the balancing before it starts.")
