"""Balanced batches for Trainer of transformers and for those of TRL, which inherit from it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from torch.utils.data import DataLoader

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.lengths import dataset_lengths
from megatron_balance.loaders.sampler import BalancedBatchSampler
from megatron_balance.model.shape import ModelShape


def balance_trainer(
    trainer: Any,
    *,
    lengths: Sequence[Any] | NDArray[Any] | None = None,
    model: ModelShape | CostModel | None = None,
    padded: bool | None = None,
    **options: Any,
) -> BalancedBatchSampler:
    """Makes a Trainer train on micro-batches of the sampler that it returns; call it before `train()`, on every rank.

    Steps keep their samples: `per_device_train_batch_size` times `gradient_accumulation_steps` times the ranks. A rank
    runs `gradient_accumulation_steps` micro-batches of any number of samples.

    Args:
        trainer: of transformers or TRL, with a data set that has a length.
        lengths: of each row, as of the sampler; None to read them from the data set, see `dataset_lengths`.
        model: as of the sampler; None for the shape in the trainer's model's configuration.
        padded: the collator pads to the longest row; None to see it from the trainer's collator.
        options: others of `BalancedBatchSampler`: `max_tokens`, `max_samples`, `objective`, `seed`, `drop_last`.

    Raises:
        BalanceError: a setting makes the loss depend on which samples share a micro-batch, or cuts batches anew.
    """
    args, dataset, collator = trainer.args, trainer.train_dataset, trainer.data_collator
    _check_settings(trainer)
    joins = getattr(collator, "padding_free", False) or "Flattening" in type(collator).__name__
    seed = args.seed if args.data_seed is None else args.data_seed
    lengths = dataset_lengths(dataset) if lengths is None else lengths
    if len(lengths) != len(dataset):
        raise BalanceError(f"lengths has {len(lengths)} entries, and the data set {len(dataset)} rows: give each one.")
    sampler = BalancedBatchSampler(
        lengths,
        global_batch_size=trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size,
        num_microbatches=args.gradient_accumulation_steps,
        model=_shape(trainer.model) if model is None else model,
        padded=not joins if padded is None else padded,
        num_replicas=args.world_size,
        rank=args.process_index,
        **{"drop_last": args.dataloader_drop_last, "seed": seed, **options},
    )
    stock = trainer.get_train_dataloader

    def get_train_dataloader(*args: Any, **keywords: Any) -> DataLoader[Any]:
        loader = stock(*args, **keywords)
        # Not prepared by Accelerate, which would deal this rank's micro-batches out to all ranks again.
        names = "collate_fn num_workers pin_memory persistent_workers prefetch_factor worker_init_fn in_order"
        options = {name: getattr(loader, name) for name in (*names.split(), "multiprocessing_context")}
        return DataLoader(loader.dataset, batch_sampler=sampler, **options)

    trainer.get_train_dataloader = get_train_dataloader
    return sampler


def _check_settings(trainer: Any) -> None:
    """Refuses settings with which a step's loss depends on its micro-batches, as stock's own does with them."""
    args, config = trainer.args, trainer.args.accelerator_config
    strategy = getattr(args, "train_sampling_strategy", "random")  # group_by_length before transformers 5
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    for is_set, words in (
        (config.split_batches, "split_batches=True cuts micro-batches anew: leave it out"),
        (config.dispatch_batches, "dispatch_batches=True deals rows out anew: leave it out"),
        (
            args.world_size > 1 and not getattr(args, "average_tokens_across_devices", False),
            "average_tokens_across_devices=False lets each rank divide by its own tokens, so that losses depend on "
            "which rank runs a sample: set it True",
        ),
        (
            strategy != "random" or getattr(args, "group_by_length", False),
            f"train_sampling_strategy={strategy!r} is an order of its own: leave it out",
        ),
        (not hasattr(trainer.train_dataset, "__len__"), "train_dataset has no length: use BalancedStream"),
        (
            getattr(parallel, "non_data_parallel_size", 1) > 1,
            "ParallelismConfig has tensor, context or sequence parallelism: return from get_train_dataloader the "
            "loader of a BalancedBatchSampler with num_replicas and rank of the data-parallel group",
        ),
    ):
        if is_set:
            raise BalanceError(f"{words}.")
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
