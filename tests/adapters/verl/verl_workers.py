"""A worker of verl's, for the tests of calls through a worker group. Each row comes back with the rank that had it."""

import ray
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils


@ray.remote
class EchoWorker(Worker):
    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info(mesh_name="train", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        data.batch["rank"] = torch.full((len(data),), self.rank)
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def join(self, left: DataProto, right: DataProto) -> DataProto:
        left.batch["row_of_right"] = right.batch["row"]
        return left

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def halve(self, data: DataProto) -> DataProto:
        return data[: len(data) - 1]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count_tokens(self, data: DataProto) -> int:
        return int(data.batch["attention_mask"].sum())

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def echo_tensors(self, data: TensorDict) -> TensorDict:
        data = tensordict_utils.contiguous(data)
        data["rank"] = torch.full((len(data),), self.rank)
        data["place"] = torch.arange(len(data))
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def echo_again(self, data: TensorDict) -> TensorDict:
        return data
