"""Runs small real Megatron models and layers in a process of their own, and prints what was seen as JSON.

    python layer_runs.py count-flops | run-stacks

The shim makes `cuda` mean the CPU for the whole process, which is why tests do not do this in theirs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_balance.devkit.cpu import enable_cpu, patch_megatron

enable_cpu()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlock  # noqa: E402
from model_config import block_spec_of, transformer_config_of  # noqa: E402
from small_shapes import DENSE, EXPERTS, LATENT, LAYERS, LENGTHS, SEQUENCES, SHAPES  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from megatron_balance.model.layers import Layer  # noqa: E402
from megatron_balance.model.shape import ModelShape  # noqa: E402


def count_flops(shape: ModelShape, length: int) -> int:
    """torch's count of one forward pass of a whole GPTModel over one sequence."""
    config = transformer_config_of(shape)
    # Megatron's hints say ModuleSpec where a block of layers is meant as well.
    spec: Any = block_spec_of(config, layers=shape.decoder_layers())
    mtp: Any = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if shape.mtp_num_layers else None
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=length,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
    )
    tokens = torch.arange(length).unsqueeze(0) % shape.padded_vocab_size
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, torch.arange(length).unsqueeze(0), None, labels=tokens)
    return counter.get_total_flops()


def run_stack(layer: Layer) -> dict[str, float]:
    """Two layers of a kind over packed sequences, forward and backward."""
    stack = replace(DENSE, **LATENT, **EXPERTS).stack_of(layer, num_layers=2)
    config = transformer_config_of(stack)
    block = TransformerBlock(config, block_spec_of(config, layers=stack.decoder_layers()), post_layer_norm=False)

    def forward(hidden: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        return block(hidden, None, packed_seq_params=packed)

    hidden = torch.randn(sum(SEQUENCES), 1, stack.hidden_size, requires_grad=True)
    output = forward(hidden, SEQUENCES)
    alone = torch.cat(
        [forward(piece, (length,)) for piece, length in zip(hidden.split(SEQUENCES), SEQUENCES, strict=True)]
    )
    # The tokens that the last one takes notice of.
    (gradient,) = torch.autograd.grad(output[-1].sum(), hidden, retain_graph=True)
    output.sum().backward()
    return {
        "difference": (output - alone).abs().max().item(),
        "reach": int((gradient.abs().amax((1, 2)) > 0).sum()),
        "least_weight_gradient": min(weight.grad.abs().max().item() for weight in block.parameters()),  # type: ignore
    }


def main() -> None:
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'rendezvous'}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        patch_megatron()
        model_parallel_cuda_manual_seed(1)
        seen: dict[str, Any] = {}
        if sys.argv[1] == "count-flops":
            seen = {name: [count_flops(shape, length) for length in LENGTHS] for name, shape in SHAPES.items()}
        elif sys.argv[1] == "run-stacks":
            seen = {name: run_stack(layer) for name, layer in LAYERS.items()}
        print(json.dumps(seen))
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
