"""Training runs on the toy device with a mistake in them, named by FAULT, that the device must find."""

from __future__ import annotations

import os
from typing import Any

import torch
import toy_device

from megatron_balance.devkit import pretrain_sft


def main() -> None:
    get_batch = pretrain_sft.get_batch
    spoil = FAULTS[os.environ["FAULT"]]
    pretrain_sft.get_batch = lambda data_iterator: spoil(get_batch(data_iterator))
    toy_device.main()


def read_a_value(batch: dict[str, Any]) -> dict[str, Any]:
    batch["loss_mask"].sum().item()
    return batch


def leave_a_tensor_on_the_host(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"position_ids": batch["position_ids"].cpu()}


def mix_host_and_device(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"loss_mask": batch["loss_mask"] * torch.ones(batch["loss_mask"].shape)}


FAULTS = {fault.__name__: fault for fault in (read_a_value, leave_a_tensor_on_the_host, mix_host_and_device)}
