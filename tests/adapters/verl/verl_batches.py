"""Batches as verl has them, for the tests of its adapter."""

from contextlib import contextmanager

import numpy as np
import torch
from tensordict import TensorDict
from verl.protocol import DataProto

from megatron_balance.adapters import verl

HEAVY_TAIL = (512, 480, 3, 40, 77, 130, 9, 300, 64, 25)


@contextmanager
def installed(model=None, **options):
    """The adapter in verl, undone at the end."""
    adapter = verl.install(model=model, **options)
    try:
        yield
    finally:
        adapter.undo()


def padded_batch(lengths, *, uids=None):
    """A DataProto with an attention mask and the number of each row, as a tensor and as an object."""
    lengths = torch.tensor(lengths)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    columns = {"name": np.array([f"row {row}" for row in range(len(lengths))], dtype=object)}
    if uids is not None:
        columns["uid"] = np.array(uids, dtype=object)
    tensors = {"row": torch.arange(len(lengths)), "attention_mask": mask}
    return DataProto.from_dict(tensors, columns)


def nested_batch(lengths):
    """A TensorDict with nested input_ids, as verl's engines get it. Row i holds the token i."""
    rows = [torch.full((length,), row) for row, length in enumerate(lengths)]
    ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return TensorDict({"input_ids": ids, "row": torch.arange(len(lengths))}, batch_size=[len(lengths)])
