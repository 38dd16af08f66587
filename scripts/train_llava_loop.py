"""A training loop of megatron.core's LLaVAModel: texts with images, balanced by the cost of both.

    torchrun --nproc-per-node 2 scripts/train_llava_loop.py [RECORD_DIR]

On GPUs, or on CPU ranks where there are none. Texts and images are random; some texts have no image. The variable LOOP
holds arguments of `train` as JSON. Each rank prints a line a step, or writes it to RECORD_DIR/rankN.jsonl.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_balance.devkit.cpu import enable_cpu, patch_megatron
from megatron_balance.runtime.environment import device_kind

if not torch.cuda.is_available():
    enable_cpu()

import numpy as np
import torch.distributed as dist
from llava_sizes import IMAGE_TOKEN, PATCH, VOCAB_SIZE, Sizes, Text
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_balance.mcore import balanced_schedule, packed_seq_params
from megatron_balance.mcore.thd.attention import thd_layer_spec
from megatron_balance.model import ModelShape, VisionEncoder
from megatron_balance.samples.image_tokens import collapse_image_tokens, expand_image_tokens


def main() -> None:
    """Train, and write a line a step."""
    if device_kind() == "cpu":
        patch_megatron()
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    with contextlib.ExitStack() as stack:
        out = sys.stdout
        if len(sys.argv) > 1:
            out = stack.enter_context((Path(sys.argv[1]) / f"rank{os.environ['RANK']}.jsonl").open("w"))
        for row in train(**json.loads(os.environ.get("LOOP", "{}"))):
            print(json.dumps(row), file=out, flush=True)
    dist.destroy_process_group()


def train(
    *,
    num_steps: int = 4,
    num_items: int = 6,
    images: str = "some",
    balanced: bool = True,
    overlap_grad_reduce: bool = False,
    dummy_images: bool = False,
    sizes: Mapping[str, int] | None = None,
    texts: Callable[[int], Iterator[Text]] | None = None,
    max_tokens: int = 256,
    **of_schedule: Any,
) -> Iterator[dict[str, Any]]:
    """Train; yields a row a step.

    Args:
        num_steps: of the loop.
        num_items: rows that a data-parallel rank loads in a step.
        images: `some` texts have images, a `few` have, one in six of rank 0, or `none`.
        balanced: call `balanced_schedule`.
        overlap_grad_reduce: of DistributedDataParallel.
        dummy_images: the encoder runs an image of zeros where a micro-batch has none.
        sizes: fields of Sizes.
        texts: data-parallel rank → its samples, in place of those that `images` names.
        max_tokens: the cap of a micro-batch.
        of_schedule: further arguments of `balanced_schedule`.
    """
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(123)
    torch.manual_seed(123)
    of_model = Sizes(**(sizes or {}))
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=overlap_grad_reduce)
    llava = _llava(of_model, max_tokens=max_tokens)
    model = DistributedDataParallel(config=llava.config, ddp_config=ddp, module=llava.cuda())
    llava.config.finalize_model_grads_func = finalize_model_grads
    if overlap_grad_reduce:
        llava.config.no_sync_func = model.no_sync
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=1.0, bf16=False, fp16=False), [model])
    rank = parallel_state.get_data_parallel_rank()
    items = _items((texts or functools.partial(_drawn, images=images))(rank), sizes=of_model, seed=rank)
    schedule = get_forward_backward_func()
    if balanced:
        schedule = balanced_schedule(
            schedule, model=model, max_tokens_per_gpu=max_tokens, **{"cost": _shape(of_model)} | of_schedule
        )
    for _ in range(num_steps):
        ran: list[tuple[list[int], int]] = []
        model.zero_grad_buffer()
        optimizer.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        losses = schedule(
            forward_step_func=functools.partial(forward_step, sizes=of_model, dummy_images=dummy_images, ran=ran),
            data_iterator=items,
            model=model,
            num_microbatches=num_items,
            seq_length=max_tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        row: dict[str, Any] = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        encoder_grads = [weight.main_grad for weight in llava.vision_model.parameters()]
        row["encoder_grad_norm"] = float(torch.stack([grad.norm() for grad in encoder_grads]).norm())
        _, grad_norm, _ = optimizer.step()
        summed = torch.stack([loss["lm loss"] for loss in losses]).sum(0)
        dist.all_reduce(summed, group=parallel_state.get_data_parallel_group())
        row |= {"lm_loss": float(summed[0] / summed[1]), "grad_norm": float(grad_norm)}
        row["sequences"], row["num_tiles"] = [lengths for lengths, _ in ran], [num_tiles for _, num_tiles in ran]
        step = getattr(schedule, "last_step", None)
        if step is not None:
            row["costs"], row["lengths"] = step.schedule.cost_grid.sum(1).tolist(), step.schedule.lengths.tolist()
        yield row


def _shape(sizes: Sizes) -> ModelShape:
    """Sizes that the cost is counted from; MLPs are four times as wide as the residual stream."""
    merged = 4 if sizes.pixel_shuffle else 1
    return ModelShape(
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=sizes.hidden_size // 4,
        ffn_hidden_size=4 * sizes.hidden_size,
        padded_vocab_size=VOCAB_SIZE,
        gated_linear_unit=False,
        vision=VisionEncoder(
            hidden_size=sizes.vision_hidden_size,
            num_layers=sizes.vision_layers,
            ffn_hidden_size=4 * sizes.vision_hidden_size,
            gated_linear_unit=False,
            patch_values=3 * PATCH**2,
            patches_per_token=merged,
            projector_hidden_size=sizes.hidden_size,
        ),
    )


def _llava(sizes: Sizes, *, max_tokens: int) -> LLaVAModel:
    language = TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=4,
        use_cpu_initialization=True,
        init_method_std=0.1,  # so that the encoder's gradients count in the norm
        normalization="RMSNorm",
        attention_dropout=0,
        hidden_dropout=0,
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - the default takes no variable lengths, also without experts
        calculate_per_token_loss=True,
    )
    vision = copy.deepcopy(language)
    vision.num_layers, vision.hidden_size = sizes.vision_layers, sizes.vision_hidden_size
    vision.ffn_hidden_size, vision.kv_channels = 4 * sizes.vision_hidden_size, sizes.vision_hidden_size // 4
    vision.normalization = "LayerNorm"
    # As Megatron's examples/multimodal sets it; the outer norms of clip and siglip need Transformer Engine.
    vision.vision_model_type = "internvit300M"  # type: ignore[attr-defined]
    projection = copy.deepcopy(language)
    projection.ffn_hidden_size = sizes.hidden_size
    model = LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=thd_layer_spec(get_gpt_layer_local_spec(normalization="RMSNorm")),
        language_vocab_size=VOCAB_SIZE,
        language_max_sequence_length=2 * max_tokens,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=True,
        vision_projection_config=projection,
        vision_projection_layer_spec=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        language_position_embedding_type="rope",
        img_h=sizes.tile,
        img_w=sizes.tile,
        patch_dim=PATCH,
        image_token_index=IMAGE_TOKEN,
        pixel_shuffle=sizes.pixel_shuffle,
    )
    model.model_type = ModelType.encoder_or_decoder  # as Megatron's get_model sets it
    return model


def _drawn(dp_rank: int, *, images: str) -> Iterator[Text]:
    """Texts of very different lengths, half of them with one or two images of one to three tiles."""
    rng = np.random.default_rng(dp_rank)
    for index in itertools.count():
        num_tokens = int(np.clip(rng.lognormal(3, 0.8), 4, 64))
        has_images = {"some": rng.random() < 0.5, "few": dp_rank == index % 6 == 0, "none": False}[images]
        num_images = int(rng.integers(1, 3)) if has_images else 0
        yield Text(num_tokens, rng.integers(1, 4, num_images).tolist())


def _items(texts: Iterator[Text], *, sizes: Sizes, seed: int) -> Iterator[dict[str, Tensor]]:
    """Rows of one sample each, with the token of an image once for each of its embeddings."""
    rng = torch.Generator().manual_seed(seed)
    for text in texts:
        tokens = torch.randint(1, IMAGE_TOKEN, (text.num_tokens + 1,), generator=rng)
        # Behind the first token of text, which every sequence of LLaVAModel needs.
        places = 1 + torch.randperm(text.num_tokens - 1, generator=rng)[: len(text.num_tiles)]
        tokens[places] = IMAGE_TOKEN
        tiles = torch.tensor(text.num_tiles, dtype=torch.int32)
        expanded = expand_image_tokens(
            {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": torch.ones(text.num_tokens)},
            num_image_tiles=tiles,
            image_token=IMAGE_TOKEN,
            tokens_per_tile=sizes.tokens_per_tile,
        )
        length, num_tiles = len(expanded["tokens"]), int(tiles.sum())
        yield {
            **{name: tensor.unsqueeze(0) for name, tensor in expanded.items()},
            "cu_seqlens": torch.tensor([[0, length]], dtype=torch.int32),
            "max_seqlen": torch.tensor([length], dtype=torch.int32),
            "images": torch.randn(num_tiles, 3, sizes.tile, sizes.tile, generator=rng),
            "images_lengths": torch.tensor([num_tiles]),
            "num_image_tiles": tiles,
            "num_image_tiles_lengths": torch.tensor([len(tiles)]),
        }


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]],
    model: torch.nn.Module,
    *,
    sizes: Sizes,
    dummy_images: bool,
    ran: list[tuple[list[int], int]],
) -> tuple[Tensor, Any]:
    """One micro-batch forward; adds the lengths of its sequences and its number of tiles to `ran`."""
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(data_iterator).items()}
    ran.append((batch["cu_seqlens"][0].diff().tolist(), len(batch["images"])))
    text = collapse_image_tokens(batch, image_token=IMAGE_TOKEN, tokens_per_tile=sizes.tokens_per_tile)
    output, _ = model(
        batch["images"],
        text["tokens"],
        text["position_ids"],
        None,
        labels=text["labels"],
        loss_mask=text["loss_mask"],
        num_image_tiles=batch["num_image_tiles"],
        packed_seq_params=packed_seq_params(batch),
    )
    if dummy_images and not len(batch["images"]):
        llava: Any = model.module
        seen = llava.vision_model(torch.zeros(1, 3, sizes.tile, sizes.tile, device=output.device))
        output = output + 0 * llava.vision_projection(seen).sum()
    return output, functools.partial(loss_func, batch["loss_mask"])


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Summed loss, the number of tokens, and both for the log."""
    mask = loss_mask.view(-1)
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


if __name__ == "__main__":
    main()
