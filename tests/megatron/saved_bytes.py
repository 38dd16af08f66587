"""Counts what real Megatron models keep for their backward pass, on the CPU, and prints it as JSON.

    python saved_bytes.py        {shape: {recompute: [bytes at each of TOKENS]}}

torch hands every tensor that autograd keeps to a hook; storages are counted once, weights not at all.
"""

from __future__ import annotations

import json
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
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from memory_shapes import MEASURED, RECOMPUTES, TOKENS  # noqa: E402

from megatron_balance.mcore.calibration.model_config import block_spec_of, transformer_config_of  # noqa: E402
from megatron_balance.model.shape import ModelShape  # noqa: E402


def kept_bytes(shape: ModelShape, *, num_tokens: int, recompute: str) -> int:
    """Bytes that autograd keeps between forward and backward of a whole GPTModel and its loss."""
    config = transformer_config_of(shape, **RECOMPUTES[recompute])
    spec: Any = block_spec_of(config, layers=shape.decoder_layers())
    mtp: Any = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if shape.mtp_num_layers else None
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=max(TOKENS),
        position_embedding_type="rope",
        mtp_block_spec=mtp,
    )
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage  # held, so that no other storage takes its address
        return tensor

    tokens = torch.arange(num_tokens).unsqueeze(0) % shape.padded_vocab_size
    positions = torch.arange(num_tokens).unsqueeze(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, positions, None, labels=tokens)
    num_bytes = sum(storage.nbytes() for storage in storages.values())
    loss.sum().backward()
    return num_bytes


def main() -> None:
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'rendezvous'}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        patch_megatron()
        model_parallel_cuda_manual_seed(1)
        seen = {
            name: {
                recompute: [kept_bytes(shape, num_tokens=num_tokens, recompute=recompute) for num_tokens in TOKENS]
                for recompute in RECOMPUTES
            }
            for name, shape in MEASURED.items()
        }
        print(json.dumps(seen))
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
