"""A training loop on megatron.core alone, of the shape of Megatron's examples/run_simple_mcore_train_loop.py.

    PYTHONPATH=tests/kit torchrun --nproc-per-node 2 scripts/train_core_loop.py [RECORD_DIR]

On GPUs, or on CPU ranks where there are none (tests/kit/cpu_shim.py), on random packed rows. The variable LOOP holds
settings as JSON: the arguments of `train` and of `balanced_schedule`. Each rank prints a line a step, or writes it to
RECORD_DIR/rankN.jsonl as record_steps.py does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_balance.runtime.process import device_kind

if not torch.cuda.is_available():
    from cpu_shim import enable_cpu

    enable_cpu()

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from thd_attention import thd_block_spec
from torch import Tensor

from megatron_balance.mcore import balanced_schedule, packed_seq_params

LONGEST = 96
VOCAB_SIZE = 102


def main() -> None:
    rank = int(os.environ["RANK"])
    if device_kind() == "cpu":
        from cpu_shim import patch_megatron

        patch_megatron()
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    with contextlib.ExitStack() as stack:
        out = sys.stdout
        if len(sys.argv) > 1:
            out = stack.enter_context((Path(sys.argv[1]) / f"rank{rank}.jsonl").open("w"))
        for row in train(**json.loads(os.environ.get("LOOP", "{}"))):
            print(json.dumps(row), file=out, flush=True)
    dist.destroy_process_group()


def train(
    *,
    num_steps: int = 4,
    num_items: int = 6,
    tp_size: int = 1,
    pp_size: int = 1,
    balanced: bool = True,
    config: Mapping[str, Any] | None = None,
    **schedule_options: Any,
) -> Iterator[dict[str, Any]]:
    """Train; yields a row a step.

    A data-parallel rank loads `num_items` rows in a step; `config` has settings of the model in place of those below.
    """
    parallel_state.initialize_model_parallel(tp_size, pp_size)
    model_parallel_cuda_manual_seed(123)
    torch.manual_seed(123)
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": tp_size,
        "pipeline_model_parallel_size": pp_size,
        "normalization": "RMSNorm",
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "moe_token_dispatcher_type": "alltoall",  # the default takes no variable lengths, also without experts
        "calculate_per_token_loss": True,
        "variable_seq_lengths": not balanced,
        "finalize_model_grads_func": finalize_model_grads,
    }
    transformer = TransformerConfig(**sizes | dict(config or {}))
    model = _model(transformer)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=1.0, bf16=False, fp16=False), [model])
    items = _items(parallel_state.get_data_parallel_rank())
    forward_backward = get_forward_backward_func()
    if balanced:  # the one line of this package
        forward_backward = balanced_schedule(
            forward_backward, model=model, max_tokens_per_gpu=2 * LONGEST, **schedule_options
        )
    for _ in range(num_steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=items,
            model=model,
            num_microbatches=num_items,
            seq_length=2 * LONGEST + 2,
            micro_batch_size=1,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()  # pyright: ignore[reportGeneralTypeIssues]
        row: dict[str, Any] = {"grad_norm": float(grad_norm)}
        if parallel_state.is_pipeline_last_stage():
            summed = torch.stack([loss["lm loss"] for loss in losses]).sum(0)
            dist.all_reduce(summed, group=parallel_state.get_data_parallel_group())  # pyright: ignore[reportArgumentType]
            row["lm_loss"] = float(summed[0] / summed[1])
        step = getattr(forward_backward, "last_step", None)
        if step is not None:
            row["ranks"] = [[list(slot) for slot in slots] for slots in step.schedule.ranks]
            row["lengths"], row["imbalance"] = step.schedule.lengths.tolist(), step.schedule.cost_grid.sum(1).tolist()
        yield row


def _model(config: TransformerConfig) -> DistributedDataParallel:
    model = GPTModel(
        config,
        thd_block_spec(config),  # pyright: ignore[reportArgumentType]
        vocab_size=VOCAB_SIZE,
        max_sequence_length=2 * LONGEST + 2,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    return DistributedDataParallel(config=config, ddp_config=DistributedDataParallelConfig(), module=model.cuda())


def _items(dp_rank: int) -> Iterator[dict[str, Tensor]]:
    """Rows of one or two sequences of very different lengths."""
    rng = np.random.default_rng(dp_rank)
    while True:
        lengths = np.clip(rng.lognormal(3 + dp_rank % 2, 0.8, rng.integers(1, 3)).astype(np.int64), 2, LONGEST)
        tokens = torch.from_numpy(rng.integers(1, VOCAB_SIZE, int(lengths.sum()) + 1)).unsqueeze(0)
        loss_mask = torch.from_numpy(rng.integers(0, 2, int(lengths.sum()))).float().unsqueeze(0)
        yield {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": loss_mask,
            "position_ids": torch.cat([torch.arange(length) for length in lengths.tolist()]).unsqueeze(0),
            "cu_seqlens": torch.tensor([[0, *np.cumsum(lengths)]], dtype=torch.int32),
            "max_seqlen": torch.tensor([int(lengths.max())], dtype=torch.int32),
        }


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> tuple[Tensor, Any]:
    microbatch = next(data_iterator)
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in microbatch.items()}
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=packed_seq_params(microbatch),
    )
    return output, functools.partial(loss_func, batch["loss_mask"])


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Summed loss, the number of tokens, and both for the log."""
    mask = loss_mask.view(-1)
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


if __name__ == "__main__":
    main()
