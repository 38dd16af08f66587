"""Balanced batches for Trainer of transformers and for TRL's, which inherits from it, and lengths of data sets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.loaders.sampler import BalancedBatchSampler
from megatron_balance.model.shape import ModelShape
from megatron_balance.planner import as_integers

LENGTH_COLUMNS = ("seq_lengths", "length", "lengths", "input_ids", "tokens")
"""Columns that lengths are read from where none is named, the first that a data set has."""


def dataset_lengths(
    dataset: Any, *, column: str | None = None, length: Callable[[Any], int] | None = None
) -> dict[str, NDArray[np.int64]]:
    """Lengths of a data set, as keywords of `BalancedBatchSampler`.

    Args:
        dataset: rows by position, dictionaries, or a `datasets.Dataset`.
        column: of lengths, of tokens, or of lists of segment lengths (`seq_lengths` of packs); None for the first of
            `LENGTH_COLUMNS` that is there.
        length: tokens of a row, where no column has them.

    Returns:
        `lengths`, and `num_segments` where rows are packs.

    Raises:
        BalanceError: the data set has no such column, or it holds neither numbers nor lists.

    Example:
        >>> dataset_lengths([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
        {'lengths': array([3, 1])}
    """
    if length is not None:
        return {"lengths": as_integers([length(dataset[row]) for row in range(len(dataset))], name="lengths")}
    names: Sequence[str] = getattr(dataset, "column_names", None) or (list(dataset[0]) if len(dataset) else [])
    column = next((name for name in LENGTH_COLUMNS if name in names), None) if column is None else column
    if column not in names:
        raise BalanceError(
            f"The data set's columns are {', '.join(map(str, names)) or 'none'}, and lengths are read from "
            f"{column or ' or '.join(LENGTH_COLUMNS)}: name a column, or give length=, a function of a row."
        )
    values = dataset[column] if hasattr(dataset, "column_names") else [row[column] for row in dataset]
    if column == "seq_lengths":
        counts = np.fromiter(map(len, values), dtype=np.int64, count=len(dataset))
        segments = [tokens for row in values for tokens in row]
        return {"lengths": as_integers(segments, name="seq_lengths"), "num_segments": counts}
    tokens = [len(value) if hasattr(value, "__len__") else value for value in values]
    return {"lengths": as_integers(tokens, name=str(column))}


def balance_trainer(
    trainer: Any,
    *,
    lengths: Sequence[int] | NDArray[Any] | None = None,
    model: ModelShape | CostModel | None = None,
    padded: bool | None = None,
    **options: Any,
) -> BalancedBatchSampler:
    """Makes a Trainer train on balanced micro-batches; call it before `train()`, on every rank.

    Steps keep their samples: `per_device_train_batch_size` times `gradient_accumulation_steps` times the ranks. A rank
    runs `gradient_accumulation_steps` micro-batches of any number of samples.

    Args:
        trainer: of transformers or TRL, with a data set that has a length.
        lengths: `[len(train_dataset)]` tokens of each row; None to read them from it, see `dataset_lengths`.
        model: as of the sampler; None for the shape in the trainer's model's configuration.
        padded: the collator pads to the longest row; None to see it from the trainer's collator.
        options: others of `BalancedBatchSampler`: `max_tokens`, `max_samples`, `objective`, `seed`, `drop_last`.

    Returns:
        The sampler.

    Raises:
        BalanceError: a setting makes the loss depend on which samples share a micro-batch, or cuts batches anew.
    """
    args, dataset = trainer.args, trainer.train_dataset
    _check_settings(trainer)
    columns = dataset_lengths(dataset) if lengths is None else {"lengths": as_integers(lengths, name="lengths")}
    num_rows = columns.get("num_segments", columns["lengths"]).size
    if num_rows != len(dataset):
        raise BalanceError(f"lengths has {num_rows} entries, and the data set {len(dataset)} rows: give one for each.")
    sampler = BalancedBatchSampler(
        **columns,
        global_batch_size=trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size,
        num_microbatches=args.gradient_accumulation_steps,
        model=_shape(trainer.model) if model is None else model,
        padded=_is_padded(trainer) and "num_segments" not in columns if padded is None else padded,
        num_replicas=args.world_size,
        rank=args.process_index,
        **{"seed": args.data_seed or args.seed, "drop_last": args.dataloader_drop_last, **options},
    )
    stock = trainer.get_train_dataloader

    def get_train_dataloader(*args: Any, **keywords: Any) -> DataLoader[Any]:
        loader = stock(*args, **keywords)
        # Not prepared by Accelerate, which would deal this rank's micro-batches out to all ranks again.
        return DataLoader(
            loader.dataset,
            batch_sampler=sampler,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            persistent_workers=loader.persistent_workers,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            worker_init_fn=loader.worker_init_fn,
        )

    trainer.get_train_dataloader = get_train_dataloader
    return sampler


def _check_settings(trainer: Any) -> None:
    """Refuses settings with which a step's loss depends on its micro-batches, as stock's own does with them."""
    args = trainer.args
    config = args.accelerator_config
    for is_set, setting, remedy in (
        (config.split_batches, "accelerator_config.split_batches=True", "it cuts micro-batches anew: leave it out"),
        (config.dispatch_batches, "accelerator_config.dispatch_batches=True", "it deals rows out anew: leave it out"),
        (
            args.world_size > 1 and not getattr(args, "average_tokens_across_devices", False),
            "average_tokens_across_devices=False",
            "each rank then divides by its own tokens, so that losses depend on which rank runs a sample: set it True",
        ),
        (getattr(args, "group_by_length", False), "group_by_length=True", "leave the order of samples to this sampler"),
        (not hasattr(trainer.train_dataset, "__len__"), "a train_dataset without a length", "use BalancedStream"),
    ):
        if is_set:
            raise BalanceError(f"{setting} does not go with balanced batches: {remedy}.")
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and getattr(parallel, "non_data_parallel_size", 1) > 1:
        raise BalanceError(
            "ParallelismConfig has tensor, context or sequence parallelism: build a BalancedBatchSampler with "
            "num_replicas and rank of the data-parallel group and return its loader from get_train_dataloader."
        )
    if not getattr(trainer, "model_accepts_loss_kwargs", True) and trainer.compute_loss_func is None:
        warnings.warn(
            "The model's forward takes no **kwargs, so that Trainer averages the means of micro-batches: the loss "
            "depends on which samples share one, balanced or not.",
            stacklevel=3,
        )


def _shape(model: Any) -> ModelShape:
    try:
        return ModelShape.from_hf_config(model.config.to_dict())
    except (AttributeError, BalanceError) as error:
        raise BalanceError(
            f"The trainer's model has no configuration to count FLOPs from: give model=. {error}"
        ) from None


def _is_padded(trainer: Any) -> bool:
    """True unless the collator joins samples: TRL's with `padding_free`, or transformers' that flattens."""
    collator = trainer.data_collator
    return not (getattr(collator, "padding_free", False) or "Flattening" in type(collator).__name__)
