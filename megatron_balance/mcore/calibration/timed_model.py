"""Runs a model's own Megatron layers over packed micro-batches, forward and backward, and times them.

    with process_groups(device="cuda"):
        model = TimedModel(ModelShape.preset("Qwen3-8B"), num_layers=2, device="cuda", dtype=torch.bfloat16)
        model.seconds([4096, 512, 300])

Weights and data are random: the time of a GEMM or an attention kernel does not depend on them, and an
untrained router sends tokens about evenly.

Invariant: gradients are kept from run to run, so that each run adds to them, as micro-batches of a step do.
"""

# Megatron types its getters Optional; this process has one of each.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_balance.mcore.calibration.model_config import block_spec_of, transformer_config_of
from megatron_balance.model.shape import ModelShape

Part = Literal["whole", "layers", "ends"]
"""`layers`: from hidden states to hidden states. `ends`: embedding, output layer and loss. `whole`: both."""


@contextlib.contextmanager
def process_groups(*, device: str, seed: int = 1) -> Iterator[None]:
    """Megatron's process groups, of the ranks that torchrun started or of this process alone. On a CPU, `enable_cpu()`
    comes before Megatron's import and `patch_megatron()` after it (`devkit/cpu.py`).

    Args:
        device: `cuda` or `cpu`.
        seed: of weights and data, the same on all ranks.
    """
    with TemporaryDirectory() as folder:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if device == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
        else:
            dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'rendezvous'}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def set_cp_size(cp_size: int) -> None:
    """Create Megatron's process groups again, for models built next; earlier models keep theirs.

    Args:
        cp_size: context-parallel ranks; divides the ranks.
    """
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size, create_gloo_process_groups=False)


class TimedModel:
    """A model, or a part of one, that can be timed.

    Args:
        shape: the model.
        num_layers: only its first num_layers layers; all by default.
        device: `cuda` or `cpu`.
        dtype: of weights and activations.
        recompute: layers are recomputed in the backward pass.
        part: the part that runs.
        cp_size: context-parallel ranks that share a micro-batch, as `set_cp_size` has made them; of `layers` only.

    Raises:
        BalanceError: Megatron cannot build a kind of layer here.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_layers: int | None = None,
        device: str,
        dtype: torch.dtype,
        recompute: bool = False,
        part: Part = "whole",
        cp_size: int = 1,
    ) -> None:
        config = transformer_config_of(shape, num_layers=num_layers, params_dtype=dtype, recompute=recompute)
        # Multi-token prediction is another decoder layer and output layer; a part is timed without it.
        config.mtp_num_layers = None
        config.context_parallel_size = cp_size
        has_ends = part != "layers"
        self._shape, self._part, self._device, self._dtype = shape, part, device, dtype
        self._cp_size = cp_size
        self._model = GPTModel(
            config,
            block_spec_of(config, layers=shape.decoder_layers()[: config.num_layers]),
            vocab_size=shape.padded_vocab_size,
            max_sequence_length=1,  # of learned positions only
            pre_process=has_ends,
            post_process=has_ends,
            position_embedding_type="rope",
        ).to(device)
        self._generator = torch.Generator().manual_seed(1)

    def seconds(self, lengths: Sequence[int]) -> float:
        """Time one forward and backward pass.

        Args:
            lengths: `[num_sequences]` tokens of the micro-batch's sequences, multiples of `2*cp_size` where several
                ranks share it.

        Returns:
            Seconds: of the GPU between two events, or of this process's CPU time.
        """
        inputs = self._inputs(sum(lengths) // self._cp_size)
        packed = self._packed(lengths)
        if dist.get_world_size() > 1:
            dist.all_reduce(torch.zeros(1))  # ranks start together
        if self._device == "cpu":
            started = time.process_time()
            self._run(inputs, packed)
            return time.process_time() - started
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._run(inputs, packed)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _run(self, inputs: Tensor, packed: PackedSeqParams) -> None:
        output = self._forward(inputs, packed)
        torch.autograd.backward(output, torch.ones_like(output))

    def _forward(self, inputs: Tensor, packed: PackedSeqParams) -> Tensor:
        model = self._model
        if self._part == "layers":
            model.set_input_tensor(inputs)
            return model(None, None, None, packed_seq_params=packed)
        positions = torch.arange(inputs.shape[1], device=inputs.device).unsqueeze(0)
        if self._part == "whole":
            return model(inputs, positions, None, labels=inputs, packed_seq_params=packed)
        hidden = model.embedding(input_ids=inputs, position_ids=positions)
        logits, _ = model.output_layer(hidden)
        return model.compute_language_model_loss(inputs, logits)

    def _inputs(self, num_tokens: int) -> Tensor:
        """`[t, 1, h]` hidden states, or `[1, t]` tokens."""
        if self._part != "layers":
            tokens = torch.randint(self._shape.padded_vocab_size, (1, num_tokens), generator=self._generator)
            return tokens.to(self._device)
        hidden = torch.randn(num_tokens, 1, self._shape.hidden_size, generator=self._generator)
        return hidden.to(device=self._device, dtype=self._dtype).requires_grad_()

    def _packed(self, lengths: Sequence[int]) -> PackedSeqParams:
        starts = torch.tensor([0, *lengths]).cumsum(0).to(dtype=torch.int32, device=self._device)
        longest = max(lengths)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
