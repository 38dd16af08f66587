"""Megatron's examples/run_simple_mcore_train_loop.py, edited as docs/loops.md says, on CPU ranks.

MEGATRON_CHECKOUT names the checkout, and BALANCED=1 has it balance. Rows of its mock data set are cut to random
lengths and filled up with PAD; its attention mask stays as it is. Each rank records the loss and the gradient norm of
its steps.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_balance.devkit.cpu import patch_megatron

EXAMPLE = "examples/run_simple_mcore_train_loop.py"
PAD = 99

EDITS = {
    'backend="nccl"': 'backend="gloo"',
    "use_cpu_initialization=True,": "use_cpu_initialization=True, calculate_per_token_loss=True, attention_dropout=0, "
    "finalize_model_grads_func=finalize_model_grads, hidden_dropout=0, masked_softmax_fusion=False,",
    "= iter(train_dataloader)": "= with_padding(iter(train_dataloader))",
    "torch.sum(losses.view(-1) * loss_mask) / loss_mask.sum()": "torch.sum(losses.view(-1) * loss_mask)",
    'loss, {"lm loss": loss}': 'loss, loss_mask.sum().int(), {"lm loss": (loss.detach(), loss_mask.sum())}',
    "        finalize_model_grads([gpt_model])\n": "",
    "        optim.step()\n": "        record(gpt_model, losses_reduced)\n        optim.step()\n",
}
OF_BALANCING = {
    'data["attention_mask"].to(device)': "None",
    "=get_gpt_layer_local_spec()": "=thd_layer_spec(get_gpt_layer_local_spec())",
    "use_cpu_initialization=True,": 'use_cpu_initialization=True, moe_token_dispatcher_type="alltoall",',
    "= get_forward_backward_func()\n": "= balanced_schedule(get_forward_backward_func(), model=gpt_model, "
    f'max_tokens_per_gpu=128, num_steps=5, flags=["--balance-unpad", "{PAD}"])\n',
}


def main() -> None:
    """Train."""
    patch_megatron()
    source, _, _ = (Path(os.environ["MEGATRON_CHECKOUT"]) / EXAMPLE).read_text().partition("    # Saving the model")
    names: dict[str, Any] = {"__name__": "__main__", "with_padding": with_padding}
    edits = [EDITS]
    if os.environ["BALANCED"] == "1":
        from megatron_balance.mcore import balanced_schedule
        from megatron_balance.mcore.thd.attention import thd_layer_spec

        names |= {"balanced_schedule": balanced_schedule, "thd_layer_spec": thd_layer_spec}
        edits.append(OF_BALANCING)
    for old, new in (pair for one in edits for pair in one.items()):
        assert source.count(old) == 1, f"{EXAMPLE} has changed: {old}"
        source = source.replace(old, new)
    with (Path(sys.argv[1]) / f"rank{os.environ['RANK']}.jsonl").open("w") as out:

        def record(model: torch.nn.Module, losses: list[dict[str, Any]]) -> None:
            loss = torch.tensor([[float(part) for part in micro["lm loss"]] for micro in losses]).sum(0)
            dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
            squares = sum(float(weight.main_grad.double().square().sum()) for weight in model.parameters())  # type: ignore
            row = {"lm_loss": float(loss[0] / loss[1]), "grad_norm": squares**0.5, "num_microbatches": len(losses)}
            print(json.dumps(row), file=out, flush=True)

        exec(compile(source, EXAMPLE, "exec"), names | {"record": record})
    dist.destroy_process_group()


def with_padding(rows: Iterator[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Rows cut to random lengths, others on each data-parallel rank."""
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    for batch in rows:
        num_rows, width = batch["tokens"].shape
        lengths = (width * torch.rand(num_rows, 1, generator=generator) ** 3).ceil()
        real = torch.arange(width) < lengths
        padded = {name: batch[name].where(real, PAD) for name in ("tokens", "labels")}
        yield batch | padded | {"loss_mask": batch["loss_mask"] * real}
