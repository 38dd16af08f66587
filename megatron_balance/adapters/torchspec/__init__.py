"""TorchSpec adapter: ranks of a speculative-decoding trainer get batches of similar lengths.

    from megatron_balance.adapters import torchspec
    patches = torchspec.install(approach="B", window=4)      # before the controller starts
    patches.undo()

or, without code, `python -m megatron_balance.adapters.torchspec --balance-approach B ...` in place of
`python -m torchspec.train_entry ...`.

TorchSpec's controller collects samples in a pool, and every dispatch gives each rank `per_dp_rank_batch_size` of
them in turn. The trainer pads them to the longest, and all ranks wait for the slowest.

    A  the samples of a dispatch are given to ranks by length (`plan.py`)
    B  also, they are chosen among `window` dispatches' worth of the pool (`window.py`, `dispatch.py`)
    C  also, the data set is sorted into dispatches of similar lengths beforehand (`plan.py`)

Each includes the one before it. Importing the package patches nothing.
"""

from megatron_balance.adapters.torchspec.hooks import install, is_installed

__all__ = ["install", "is_installed"]
