"""Supervised fine-tuning on packed (thd) sequences with Megatron's own `pretrain()`.

    torchrun --nproc-per-node 2 -m megatron_balance.launch tests/kit/pretrain_sft.py ARGS

The Megatron wheel has the training loop but no script. The functions' parameters, not a version, decide how they are
called: every layout from 0.19 on, data-parallel ranks of 0.17 and 0.18. Data is jsonl files (`--data-path FILE …`, or
one flag a split) or, without any, the built-in corpus (`--tokenizer-type NullTokenizer --vocab-size 257`). Nothing
here is about balancing.
"""

# Megatron types its getters Optional; before training they are not.
# pyright: reportOptionalMemberAccess=false, reportOptionalCall=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron.core.utils as core_utils
import torch
from megatron.core import mpu
from megatron.core.datasets.utils import Split
from megatron.core.enums import ModelType
from megatron.training import argument_utils, arguments, get_args, get_timers, pretrain, training
from sft_dataset import SftDataset, SftSample, builtin_samples, jsonl_samples
from torch import Tensor

from megatron_balance.mcore import packed_seq_params

BATCH_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
)


def main() -> None:
    """Parse Megatron's arguments and train, by the interface of the installed release."""
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    run: dict[str, Any] = {
        "train_valid_test_dataset_provider": datasets_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    defaults = {"tokenizer_type": "NullTokenizer"}
    if "cfg_container" not in inspect.signature(pretrain).parameters:  # 0.17
        pretrain(**run, model_provider=model_provider, args_defaults=defaults)
        return
    args = arguments.parse_and_validate_args(args_defaults=defaults)
    if hasattr(argument_utils, "gpt_config_from_args"):
        of_model = [argument_utils.gpt_config_from_args(args)]
    else:  # 0.18
        of_model, run["model_provider"] = [], model_provider
    pretrain(**run, cfg_container=argument_utils.pretrain_cfg_container_from_args(args, *of_model))


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """The model of Megatron's flags, for 0.17 and 0.18: there it is built by scripts, and the wheel has none."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.spec_utils import import_module

    args: Any = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=import_module(args.spec)(config, vp_stage=vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def datasets_provider(num_samples: list[int | None], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Train, valid and test sets, None where there is none; only the first tensor-parallel rank reads data.

    `num_samples` are the rows wanted of each, None for every sample once (`--full-validation`). Every chunk of a
    virtual pipeline reads the same rows.
    """
    args = get_args()
    rows_of_an_item = max(args.micro_batch_size, getattr(args, "eval_micro_batch_size", None) or 1)  # 0.17 has one size
    loads = mpu.get_tensor_model_parallel_rank() == 0
    # Stock Megatron passes activations of one shape between ranks of a model replica.
    split_model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size > 1
    train, valid, test = (
        [
            SftDataset(
                _samples(files),
                num_samples=wanted,
                seq_length=args.seq_length,
                pad_to_seq_length=split_model or rows_of_an_item > 1,
                pad_token=0,
                seed=args.seed + index,
                split=split,
            )
            if loads and files is not None and wanted != 0
            else None
            for files in _files_of_sets(args, split)
        ]
        for index, (wanted, split) in enumerate(zip(num_samples, Split, strict=True))
    )
    return train[0], valid if args.multiple_validation_sets else valid[0], test[0]


def _files_of_sets(args: Any, split: Split) -> list[tuple[str, ...] | None]:
    """The files of each data set of a split; none for the built-in corpus, None where only other splits have files."""
    by_split = {Split.train: args.train_data_path, Split.valid: args.valid_data_path, Split.test: args.test_data_path}
    if not any(by_split.values()):
        return [tuple(args.data_path or ())]
    files = by_split[split]
    if not files:
        return [None]
    return [(file,) for file in files] if split == Split.valid and args.multiple_validation_sets else [tuple(files)]


@functools.cache  # splits and chunks of a virtual pipeline may share it
def _samples(files: tuple[str, ...]) -> tuple[SftSample, ...]:
    if not files:
        return builtin_samples()
    return tuple(sample for file in files for sample in jsonl_samples(Path(file)))


def get_batch(data_iterator: Iterator[dict[str, Tensor]] | None, *, packed: bool = True) -> dict[str, Any]:
    """The next micro-batch on this rank, by Megatron's functions: BATCH_KEYS, None where a stage has no use for one.

    One rank of a tensor-parallel group reads it and sends it to the others; a packed one is split over context-parallel
    ranks, and `cu_seqlens` and `max_seqlen` are of the whole.
    """
    args = get_args()
    with_mtp = bool(args.mtp_num_layers) and mpu.is_pipeline_last_stage()
    if not hasattr(core_utils, "get_batch_on_this_tp_rank"):  # 0.17 sends other ranks no starts of sequences
        from megatron.training.utils import get_batch_on_this_tp_rank

        batch = get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=with_mtp)
        return {key: batch.get(key) for key in BATCH_KEYS}
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        row = next(data_iterator)
        batch = {key: row[key].cuda(non_blocking=True) if row.get(key) is not None else None for key in BATCH_KEYS}
    on_this_tp_rank = core_utils.get_batch_on_this_tp_rank
    starts = "has_cu_seqlens" if "has_cu_seqlens" in inspect.signature(on_this_tp_rank).parameters else "is_sft"
    batch = on_this_tp_rank(
        batch,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=with_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
        **{starts: packed},
    )
    if not packed:
        return batch
    if hasattr(core_utils, "flatten_batch_for_packed_sequences"):
        batch = core_utils.flatten_batch_for_packed_sequences(batch)
    if batch["tokens"] is None and batch["labels"] is None:
        return batch  # a middle pipeline stage: it needs nothing but the starts of sequences
    # As Megatron's own scripts ask for it; 0.18 has neither the option nor the parameter.
    documents = getattr(args, "dataloader_inter_document_masking", False) and not args.sft
    whole_row = {"use_per_sequence_balancing": True} if documents else {}
    return core_utils.get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group(), **whole_row
    )


def forward_step(data_iterator: Iterator[dict[str, Tensor]] | None, model: torch.nn.Module) -> tuple[Tensor, Any]:
    """One micro-batch forward, in the form Megatron's schedules call it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator)
    timers("batch-generator").stop()
    if hasattr(training, "update_seqlen_stats_from_cu_seqlens"):  # from 0.18
        training.update_seqlen_stats_from_cu_seqlens(batch["cu_seqlens"].squeeze(0))
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed_seq_params(batch),
    )
    return output, functools.partial(loss_func, batch["loss_mask"])


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Summed loss of the learned tokens, their number, and both for the log (`--calculate-per-token-loss`)."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


if __name__ == "__main__":
    main()
