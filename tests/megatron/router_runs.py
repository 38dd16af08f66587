"""Routes packed micro-batches with padding and without through Megatron's routers, and prints what was seen as JSON.

    python router_runs.py

Each case has a reference, the sequences without padding, one a micro-batch, and the same in packs with padding between
them, filler behind them and a dummy: with the right mask, with one shifted by a token, and with none.

The shim makes `cuda` mean the CPU for the whole process, which is why tests do not do this in theirs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
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
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_balance.mcore import install, wrappers  # noqa: E402
from megatron_balance.mcore.microbatch.router_padding import RouterPadding  # noqa: E402
from megatron_balance.mcore.step.balanced_step import BalancedStep, Microbatch  # noqa: E402
from megatron_balance.mcore.thd.attention import thd_block_spec  # noqa: E402
from megatron_balance.samples.packing import dummy_microbatch, pack_microbatch  # noqa: E402
from megatron_balance.samples.padding import sequence_lengths  # noqa: E402
from megatron_balance.samples.sample import Sample, SampleSchema  # noqa: E402
from megatron_balance.topology import Topology  # noqa: E402

VOCABULARY = 61
LENGTHS = (13, 5, 31, 8)
TOKEN_MULTIPLE = 8
NUM_TOKENS = 128
STATISTICS: dict[str, dict[str, Any]] = {
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0},
    "global_aux_loss": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0},
    "z_loss": {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 1.0},
    "expert_bias": {
        "moe_router_load_balancing_type": "none",
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
    },
}


def model_of(**settings: Any) -> GPTModel:
    """A model with experts and one depth of multi-token prediction, the same for the same settings."""
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        mtp_num_layers=1,
        calculate_per_token_loss=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        **settings,
    )
    spec = thd_block_spec(config)
    mtp: Any = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)  # type: ignore[arg-type]
    model = GPTModel(
        config,
        spec,  # type: ignore[arg-type]
        vocab_size=VOCABULARY,
        max_sequence_length=NUM_TOKENS,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
    )
    return model.train()


def samples() -> list[Sample]:
    """`LENGTHS` random sequences; nothing is learned, so that gradients come from the routers' losses alone."""
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    return [Sample({"tokens": row, "labels": row, "loss_mask": torch.zeros(len(row))}) for row in tokens]


def run(model: GPTModel, microbatches: list[Microbatch], masks: list[torch.Tensor | None]) -> list[float]:
    """Sums of the routers' gradients and token counts after a forward and backward pass of each micro-batch."""
    padding = RouterPadding(Topology(1), leaf=0, tp_rank=0)
    for microbatch, mask in zip(microbatches, masks, strict=True):
        starts, longest = microbatch["cu_seqlens"][0], int(microbatch["max_seqlen"])
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        with contextlib.nullcontext() if mask is None else padding.given(mask, model=model):
            losses = model(
                microbatch["tokens"],
                microbatch["position_ids"],
                None,
                labels=microbatch["labels"],
                loss_mask=microbatch["loss_mask"],
                packed_seq_params=packed,
            )
        (losses * microbatch["loss_mask"]).sum().backward()
    return list(_seen(model))


def _seen(model: GPTModel) -> Iterator[float]:
    for name, module in model.named_modules():
        if name.endswith("router"):
            weight: Any = module.weight
            yield from [] if weight.grad is None else weight.grad.flatten().tolist()
            counts: Any = getattr(module, "local_tokens_per_expert", None)
            yield from [] if counts is None else counts.tolist()


def cases(**settings: Any) -> dict[str, Any]:
    """Figures of the routers, decoder and multi-token prediction, by how they were reached."""
    rows = samples()
    apart = [pack_microbatch([row]) for row in rows]
    schema = SampleSchema.of(rows[0])
    padded = [pack_microbatch([row], token_multiple=TOKEN_MULTIPLE, num_tokens=NUM_TOKENS) for row in rows] + [
        dummy_microbatch(schema, token_multiple=TOKEN_MULTIPLE)
    ]
    lengths = [sequence_lengths([row]) for row in rows] + [[]]
    step = BalancedStep(len(padded), [pack["tokens"].shape[1] for pack in padded], sequence_lengths=lengths)
    masks = RouterPadding(Topology(1, tp_size=TOKEN_MULTIPLE, sequence_parallel=True), leaf=0, tp_rank=0).masks(step)
    none: list[torch.Tensor | None] = [None] * len(padded)
    return {
        "reference": run(model_of(**settings), apart, none[:-1]),
        "with mask": run(model_of(**settings), padded, [*masks]),
        "with a mask shifted by one": run(model_of(**settings), padded, [mask.roll(1) for mask in masks]),
        "without mask": run(model_of(**settings), padded, none),
        "a dummy alone": run(model_of(**settings), padded[-1:], [masks[-1]]),
    }


def main() -> None:
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'rendezvous'}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        patch_megatron()
        install()
        wrappers.current = lambda: SimpleNamespace(in_step=True, context=None)  # type: ignore[assignment, return-value]
        print(json.dumps({name: cases(**settings) for name, settings in STATISTICS.items()}))
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
