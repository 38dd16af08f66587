"""The hooks in verl, in a checked table.

    from megatron_balance.adapters.verl import install
    adapter = install("Qwen3-8B")
    adapter.undo()

verl's modules bind functions by value. Modules that are loaded are hooked at once. The trainers load later than the
plug-in: they are hooked when the first worker group is made, in the one process that has a trainer.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys

from megatron_balance.adapters.verl.dynamic_cp import choose_scheduler
from megatron_balance.adapters.verl.image_tags import tag_images
from megatron_balance.adapters.verl.seqlen_balancing import (
    count_workload,
    pack_micro_batches,
    partition,
    partition_groups,
)
from megatron_balance.adapters.verl.settings import Settings, installation, is_hook
from megatron_balance.adapters.verl.workload import Model, choose_encoder, choose_workload
from megatron_balance.errors import BalanceError
from megatron_balance.hooking.installation import Installation, check_version
from megatron_balance.hooking.patches import Function, Hook, Patches
from megatron_balance.hooking.patches import install as install_hooks

SUPPORTED_VERSIONS = ("0.9",)
"""verl releases on which the tests run."""

BALANCING = "verl.utils.seqlen_balancing"
DYNAMIC_CP = "verl.utils.dynamic_cp_scheduler"
TRANSFER_QUEUE = "transfer_queue"
DECORATOR = "verl.single_controller.base.decorator"
WORKER_GROUP = "verl.single_controller.ray.base"
RAY_TRAINER = "verl.trainer.ppo.ray_trainer"
V1_TRAINER = "verl.trainer.ppo.v1.trainer_base"
TRAINERS = (RAY_TRAINER, V1_TRAINER, "verl.trainer.sft_trainer_ray")
ENGINES = ("verl.workers.engine.utils",)


def _bound_methods(stock: Function) -> Function:
    from megatron_balance.adapters.verl.transport import bind_balanced

    return bind_balanced(stock, before=hook_trainers)


def _split(stock: Function, *, pads: bool) -> Function:
    from megatron_balance.adapters.verl.transport import split_balanced

    return split_balanced(stock, pads=pads)


def _data_proto_batch(stock: Function) -> Function:
    from megatron_balance.adapters.verl.trainer import balance_data_proto_batch

    return balance_data_proto_batch(stock)


def _key_batch(stock: Function) -> Function:
    from megatron_balance.adapters.verl.trainer import balance_key_batch

    return balance_key_batch(stock)


def _bound(function: str, *modules: str) -> tuple[str, ...]:
    """Modules in which a function of `verl.utils.seqlen_balancing` is bound: that one, and loaded ones that import it.

    A module that was loaded while the adapter was installed before has a hook already, and keeps it.
    """
    loaded = [name for name in modules if name in sys.modules]
    return (BALANCING, *(name for name in loaded if not is_hook(getattr(sys.modules[name], function, None))))


def hooks() -> tuple[Hook, ...]:
    """The table of hooks for the modules that are loaded."""
    return (
        Hook(
            target=f"{BALANCING}:calculate_workload",
            bound_in=_bound("calculate_workload", *TRAINERS),
            parameters=("seqlen_list",),
            wrap=count_workload,
            why="its factor is that of one 7B model, and its sums overflow in its input's dtype",
            until="verl takes the factor from the model",
        ),
        Hook(
            target=f"{BALANCING}:get_seqlen_balanced_partitions",
            bound_in=_bound("get_seqlen_balanced_partitions", *TRAINERS),
            parameters=("seqlen_list", "k_partitions", "equal_size"),
            wrap=partition,
            why="largest differencing alone is weak on heavy tails, and asserts where ranks do not divide the rows",
            until="verl takes a partition function",
        ),
        Hook(
            target=f"{BALANCING}:get_group_balanced_partitions",
            bound_in=(BALANCING,),
            parameters=("seqlen_list", "uid_list", "k_partitions"),
            wrap=partition_groups,
            why="a uid that comes again counts as another group there",
            until="verl collects the rows of a uid",
        ),
        Hook(
            target=f"{BALANCING}:rearrange_micro_batches",
            bound_in=_bound("rearrange_micro_batches", *ENGINES),
            parameters=(
                "batch",
                "max_token_len",
                "dp_group",
                "num_batches_divided_by",
                "same_micro_num_in_dp",
                "min_num_micro_batch",
                "use_dynamic_bsz_balance",
                "force_group_size",
            ),
            wrap=pack_micro_batches,
            why="it raises the count until largest differencing happens to fit the cap",
            until="verl takes a packing function",
        ),
        Hook(
            target=f"{DECORATOR}:_split_args_kwargs_data_proto_with_auto_padding",
            bound_in=(DECORATOR,),
            parameters=("chunks", "args", "kwargs"),
            wrap=functools.partial(_split, pads=True),
            why="the only place that sees all arguments of a DP_COMPUTE_PROTO call before they are cut",
            until="verl has a hook for the order of rows",
        ),
        Hook(
            target=f"{DECORATOR}:_split_args_kwargs_data_proto",
            bound_in=(DECORATOR,),
            parameters=("chunks", "args", "kwargs"),
            wrap=functools.partial(_split, pads=False),
            why="the same for calls over a device mesh",
            until="verl has a hook for the order of rows",
        ),
        Hook(
            target=f"{WORKER_GROUP}:func_generator",
            bound_in=(WORKER_GROUP,),
            parameters=("self", "method_name", "dispatch_fn", "collect_fn", "execute_fn", "blocking"),
            wrap=_bound_methods,
            why="it joins dispatch and collect of one call, between which the order is kept",
            until="verl has a hook for the order of rows",
        ),
    )


def trainer_hooks() -> tuple[Hook, ...]:
    """The rows of trainers that are loaded and not hooked yet."""
    parameters = ("self", "batch", "metrics", "logging_prefix", "keep_minibatch")
    rows = (
        Hook(
            target=f"{RAY_TRAINER}:RayPPOTrainer._balance_batch",
            bound_in=(f"{RAY_TRAINER}:RayPPOTrainer",),
            parameters=parameters,
            wrap=_data_proto_batch,
            why="it sorts rows over mini-batches that it balanced, and counts a mini-batch in prompts",
            until="verl keeps the mini-batches it is asked to keep",
        ),
        Hook(
            target=f"{V1_TRAINER}:PPOTrainer._balance_batch",
            bound_in=(f"{V1_TRAINER}:PPOTrainer",),
            parameters=parameters,
            wrap=_key_batch,
            why="it does not look at keep_minibatch",
            until="verl keeps the mini-batches it is asked to keep",
        ),
    )
    return tuple(row for row in rows if _is_loaded_and_free(row.target))


def _is_loaded_and_free(target: str) -> bool:
    module_name, _, qualified_name = target.partition(":")
    class_name, _, method = qualified_name.partition(".")
    owner = getattr(sys.modules.get(module_name), class_name, None)
    # The row of a trainer without the class is installed too, which reports what is missing.
    return module_name in sys.modules and not is_hook(getattr(owner, method, None))


def dynamic_cp_hooks() -> tuple[Hook, ...]:
    """The hook of verl's dynamic context parallelism, where this verl has it."""
    if importlib.util.find_spec(DYNAMIC_CP) is None:
        return ()
    row = Hook(
        target=f"{DYNAMIC_CP}:get_megatron_dynamic_cp_scheduler_cls",
        bound_in=(DYNAMIC_CP,),
        parameters=(),
        wrap=choose_scheduler,
        why="Megatron's scheduler packs row by row, and leaves ranks idle behind the longest samples",
        until="verl takes a scheduler by name",
    )
    return (row,)


def tag_hooks() -> tuple[Hook, ...]:
    """The hook of the TransferQueue, an optional package that verl loads where it is installed."""
    if TRANSFER_QUEUE not in sys.modules:
        return ()
    row = Hook(
        target=f"{TRANSFER_QUEUE}.interface:async_kv_batch_put",
        bound_in=(f"{TRANSFER_QUEUE}.interface", TRANSFER_QUEUE),
        parameters=("keys", "partition_id", "fields", "tags", "data_parser"),
        wrap=tag_images,
        why="the v1 trainers balance keys by their tags, which say nothing of images",
        until="verl tags rows with the patches of their images",
    )
    return (row,)


def install(
    model: Model | None = None,
    *,
    cost: str | None = None,
    keep_minibatch: bool = True,
    dispatch: bool | tuple[str, ...] = False,
) -> Installation[Settings]:
    """Hook verl in this process. Installing twice with the same arguments installs once.

    Args:
        model: model whose FLOPs a row costs: a preset's name, a Hugging Face config.json's path, content or
            `PretrainedConfig`, or `{"mlp_workload_factor": 24576}`. None for verl's own formula.
        cost: `flops`, `tokens` or the path of a seconds.json; by default flops where there is a model.
        keep_minibatch: the trainers always balance inside mini-batches; False to leave it to verl's caller, which
            does not ask for it in verl 0.9.
        dispatch: balance the calls of worker groups as well: all of them, or those of the methods named.

    Raises:
        BalanceError: verl is missing, of another version, or a target has moved; or the adapter is installed with
            other arguments. Nothing is changed then.
    """
    cost_model = choose_workload(model, cost=cost)
    settings = Settings(
        cost_model,
        keep_minibatch=keep_minibatch,
        dispatch=dispatch,
        encoder=choose_encoder(model, cost_model=cost_model),
    )
    return installation.install(settings, hook=_hook_loaded_modules)


def _hook_loaded_modules() -> Patches:
    remedy = f"install verl=={SUPPORTED_VERSIONS[-1]}.* or train without MEGATRON_BALANCE_VERL"
    version = check_version(verl_version(), system="verl", supported=SUPPORTED_VERSIONS, remedy=remedy)
    rows = (*hooks(), *dynamic_cp_hooks(), *tag_hooks(), *trainer_hooks())
    return install_hooks(rows, version=f"verl {version}")


def hook_trainers() -> None:
    """Hook the trainers that were loaded after `install`.

    Raises:
        BalanceError: a trainer is not as expected.
    """
    if rows := trainer_hooks():
        installation.add(install_hooks(rows, version=f"verl {verl_version()}"))


def verl_version() -> str:
    """The version of verl.

    Raises:
        BalanceError: it is not installed.
    """
    try:
        return importlib.import_module("verl").__version__
    except ModuleNotFoundError as error:
        raise BalanceError(f"verl cannot be imported ({error}): pip install verl==0.9.1.") from error
