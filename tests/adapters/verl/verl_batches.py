"""Batches as verl has them, for the tests of its adapter."""

import numpy as np
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.utils import tensordict_utils

HEAVY_TAIL = (512, 480, 3, 40, 77, 130, 9, 300, 64, 25)


def padded_batch(lengths, *, uids=None, grids=None, auto_padding=False, **meta):
    """A DataProto with an attention mask and the number of each row, as a tensor and as an object."""
    lengths = torch.tensor(lengths)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    columns = {"name": np.array([f"row {row}" for row in range(len(lengths))], dtype=object)}
    if uids is not None:
        columns["uid"] = np.array(uids, dtype=object)
    if grids is not None:
        columns["multi_modal_inputs"] = multi_modal_inputs(grids)
    tensors = {"row": torch.arange(len(lengths)), "attention_mask": mask}
    return DataProto.from_dict(tensors, columns, meta_info=dict(meta), auto_padding=auto_padding)


def multi_modal_inputs(grids):
    """verl's column of a processor's outputs: for each row a dict, empty without images, from its image_grid_thw."""
    column = np.empty(len(grids), dtype=object)
    for row, grid in enumerate(grids):
        sizes = torch.tensor(grid, dtype=torch.int64).reshape(-1, 3)
        pixels = torch.zeros(int(sizes.prod(1).sum()), 2)
        column[row] = {"pixel_values": pixels, "image_grid_thw": sizes} if grid else {}
    return column


def nested_batch(lengths, *, grids=None):
    """A TensorDict with nested input_ids, as verl's engines get it. Row i holds the token i."""
    rows = [torch.full((length,), row) for row, length in enumerate(lengths)]
    ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    batch = TensorDict({"input_ids": ids, "row": torch.arange(len(lengths))}, batch_size=[len(lengths)])
    if grids is not None:
        tensordict_utils.assign_non_tensor(batch, multi_modal_inputs=multi_modal_inputs(grids).tolist())
    return batch
