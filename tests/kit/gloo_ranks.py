"""Cases of tests on gloo ranks: forks of a server that has imported once what they need (forked.py)."""

import importlib
import pickle
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from forked import call, run_forked
from training_run import RunFailed

CASE_SECONDS = 100
"""A case takes a few at most, on a loaded machine too; one that does not end then hangs."""


def run_ranks(num_ranks, case, *, imports=None, **arguments):
    """What `MODULE:FUNCTION`, or a function of the `imports`, returns on every rank; a failure fails the test.

    The server imports the module or the `imports`; none of them: what a training run does.
    """
    imports = [case.partition(":")[0]] if imports is None else imports
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "arguments").write_bytes(pickle.dumps(arguments))
        try:
            call("gloo_ranks:run_here", folder, num_ranks, case, imports, imports=imports)
        except RunFailed as error:
            pytest.fail(str(error), pytrace=False)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(num_ranks)]


def run_here(folder, num_ranks, case, imports):
    """The case on forks of this process."""
    module, _, name = case.rpartition(":")
    modules = map(importlib.import_module, [module] if module else imports)
    function = next(getattr(module, name) for module in modules if hasattr(module, name))

    def main():
        import torch.distributed as dist
        from cpu_shim import share_gloo_device

        share_gloo_device()
        dist.init_process_group("gloo", timeout=timedelta(minutes=2))
        answer = function(**pickle.loads(Path(folder, "arguments").read_bytes()))
        Path(folder, str(dist.get_rank())).write_bytes(pickle.dumps(answer))
        dist.barrier()  # another rank may read from this one until its end

    run_forked(
        main, folder=Path(folder), num_ranks=num_ranks, timeout_seconds=CASE_SECONDS, arguments=[name], grace_seconds=10
    )
