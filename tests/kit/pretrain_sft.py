"""Supervised fine-tuning on packed (thd) sequences with Megatron's own `pretrain()`.

    torchrun --nproc-per-node 2 -m megatron_balance.launch tests/kit/pretrain_sft.py ARGS

The Megatron wheel has the training loop but no script: this is one, for text models, on every supported release.
Data is jsonl files (`--data-path FILE …`, or `--train-data-path`, `--valid-data-path` and `--test-data-path`; under
`--multiple-validation-sets` each valid file is a set) or, without any, the built-in corpus of byte-level tokens
(`--tokenizer-type NullTokenizer --vocab-size 257`). It has no code for balancing: balance flags work as in any
script.
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

import torch
from megatron.core import mpu
from megatron.core.datasets.utils import Split
from megatron.core.enums import ModelType
from megatron.training import argument_utils, arguments, get_args, get_timers, pretrain, training
from sft_batch import get_batch
from sft_dataset import SftDataset, SftSample, builtin_samples, jsonl_samples
from torch import Tensor

from megatron_balance.mcore.packed_params import packed_seq_params


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
        from sft_model import model_provider

        pretrain(**run, model_provider=model_provider, args_defaults=defaults)
        return
    args = arguments.parse_and_validate_args(args_defaults=defaults)
    if hasattr(argument_utils, "gpt_config_from_args"):
        model = argument_utils.gpt_config_from_args(args)
        pretrain(**run, cfg_container=argument_utils.pretrain_cfg_container_from_args(args, model))
    else:  # 0.18
        from sft_model import model_provider

        container = argument_utils.pretrain_cfg_container_from_args(args)
        pretrain(**run, cfg_container=container, model_provider=model_provider)


def datasets_provider(num_samples: list[int | None], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Train, valid and test sets; only the first tensor-parallel rank reads data.

    Args:
        num_samples: rows wanted of each; None for every sample once (`--full-validation`).
        vp_stage: the model chunk under a virtual pipeline; every chunk reads the same rows.

    Returns:
        a set of each split, None where there is none; of valid a list under `--multiple-validation-sets`.
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
