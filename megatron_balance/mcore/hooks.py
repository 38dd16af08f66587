"""The hooks in Megatron, in a checked table.

`install` hooks `megatron.training` alone; without a balance flag these wrappers call Megatron's own functions: the run
is stock. A balanced run hooks what it needs of `megatron.core` before its first step (`core_hooks`).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import (
    Function,
    Hook,
    Installation,
    hooks_of_release,
    install_hooks,
    is_off,
    quiet_imports,
)
from megatron_balance.mcore import sequence_mixers
from megatron_balance.mcore.autotune import STATE
from megatron_balance.mcore.loss_weights import weigh
from megatron_balance.mcore.microbatch import CpGroups
from megatron_balance.mcore.microbatch import RunningStep as Step
from megatron_balance.mcore.run import build_run, end_run, in_step, run_of, while_balancing
from megatron_balance.mcore.setup.flags import add_balance_args
from megatron_balance.mcore.setup.rules import Options, holds
from megatron_balance.mcore.step import BalancedForwardBackward as Run
from megatron_balance.model.shape import ModelShape
from megatron_balance.runtime.process import version_of

SUPPORTED_VERSIONS = ("0.17", "0.18", "0.19")
"""Megatron Core releases on which the tests run."""


def _run_of_megatron() -> Run | None:
    """The balanced run of Megatron's loop; None where it stays stock, or a script parses no Megatron arguments."""
    from megatron.training import get_args

    args: Any = get_args()

    def build() -> Run | None:
        if not hasattr(args, "balance_data"):
            return None
        return build_run(vars(args), shape=lambda: ModelShape.from_megatron_args(args), hooks=core_hooks, args=args)

    return run_of(args, build)


def _with_balance_arguments(add_megatron_arguments: Function) -> Function:
    @functools.wraps(add_megatron_arguments)
    def wrapper(parser: Any) -> Any:
        return add_balance_args(add_megatron_arguments(parser))

    return wrapper


def _with_state(check_checkpoint_args: Function) -> Function:
    @functools.wraps(check_checkpoint_args)
    def wrapper(checkpoint_args: Any, *positional: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        setattr(get_args(), STATE, getattr(checkpoint_args, STATE, None))
        return check_checkpoint_args(checkpoint_args, *positional, **keywords)

    return wrapper


def _schedule(run: Run, get_forward_backward_func: Function, *positional: Any, **keywords: Any) -> Function:
    return functools.partial(run, get_forward_backward_func(*positional, **keywords))


def _evaluate(run: Run, evaluate: Function, *positional: Any, **keywords: Any) -> Any:
    from megatron.training import get_args

    args: Any = get_args()
    num_steps = inspect.signature(evaluate).bind(*positional, **keywords).arguments.get("eval_iters")
    with run.evaluating(args.eval_iters if num_steps is None else num_steps):
        return evaluate(*positional, **keywords)


def _backward_step(step: Step, backward_step: Function, *positional: Any, **keywords: Any) -> Any:
    with step.timed(None):
        return backward_step(*positional, **keywords)


def _split_by_document(step: Step, split_whole_row: Function, batch: Any, cp_group: Any) -> Any:
    from megatron.core import utils

    return utils._get_batch_on_this_cp_rank_per_document_balancing(batch, cp_group)


def _apply_expert_bias(step: Step, apply: Function, router: Any, routing_map: Any, padding_mask: Any = None) -> Any:
    if padding_mask is not None:
        routing_map = routing_map * ~padding_mask.reshape(-1, 1)  # numbers where samples share tokens
    return apply(router, routing_map)


def _count_tokens(
    step: Step, count: Function, *positional: Any, with_padding_mask: bool = False, **keywords: Any
) -> Any:
    """Count at least one token, and on every rank of `reduce_group` their mean: so parts of a loss weigh the same."""
    per_expert, local, total = count(*positional, with_padding_mask=with_padding_mask, **keywords)
    if not with_padding_mask:
        return per_expert, local, total
    # Whole: Transformer Engine from 2.18 takes no other count in its fused loss (csrc/extensions/router.cpp).
    total = total.round().to(torch.int64).clamp(min=1)
    return per_expert, total / keywords["reduce_group"].size(), total


def _get_embeddings(step: Step, get: Function, *positional: Any, padding_mask: Any = None, **keywords: Any) -> Any:
    if padding_mask is None:
        return get(*positional, **keywords)
    input_ids, position_ids, _, *embeddings = get(*positional, **keywords)
    return input_ids, position_ids, padding_mask, *embeddings


def _build_schedule_plan(step: Step, build: Function, model: Any, *positional: Any, **keywords: Any) -> Any:
    return build(model, *positional, **{"packed_seq_params": step.packed_params, **keywords})


def _prediction_losses(step: Step, process: Function, *positional: Any, **keywords: Any) -> Any:
    """Weigh the losses of multi-token prediction as those of the next token, in the group of their micro-batch."""
    if (weights := step.token_weights) is not None:
        losses_of = keywords["compute_language_model_loss"]
        keywords["compute_language_model_loss"] = lambda *inputs: weigh(losses_of(*inputs), weights())
    group = sequence_mixers.group_of(step, keywords)
    return process(*positional, **keywords if group is None else keywords | {"cp_group": group})


def _save_prediction_loss(step: Step, save: Function, loss: Any, *positional: Any, **keywords: Any) -> Any:
    return save(loss if step.cp_groups is None else loss * step.cp_groups.mean_weight, *positional, **keywords)


def _whole_angles(step: Step, forward: Function, module: Any, *positional: Any, **keywords: Any) -> Any:
    """Angles of all tokens of a micro-batch: attention takes those of each sequence's chunks."""
    if step.cp_groups is None:
        return forward(module, *positional, **keywords)
    call = inspect.signature(forward).bind(module, *positional, **keywords)
    call.arguments["cp_group"] = None  # the module's own, which is of one rank
    if (length := call.arguments["position_ids"].shape[-1]) != (num_tokens := step.num_tokens):
        raise BalanceError(
            f"position_ids has {length} positions for a micro-batch of {num_tokens} tokens: its sequences "
            "are split one by one, so give the model the positions of the whole micro-batch, or set "
            "--no-balance-dynamic-cp."
        )
    return forward(*call.args, **call.kwargs)


def _log_losses(run: Run, log: Function, *positional: Any, **keywords: Any) -> Any:
    """Divide logged sums by the micro-batches that ran: Megatron divides by those that were loaded."""
    call = inspect.signature(log).bind(*positional, **keywords)
    call.arguments["loss_scale"] *= run.log_scale
    return log(*call.args, **call.kwargs)


def _log_prediction_losses(run: Run, log: Function, *positional: Any, **keywords: Any) -> Any:
    """Megatron's dev branch divides sums over tokens by tokens, whatever micro-batches ran."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    divides_by_tokens = "loss_sums" in MTPLossLoggingHelper.tracker
    return log(*positional, **keywords) if divides_by_tokens else _log_losses(run, log, *positional, **keywords)


def _record(step: Step, record: Function, tracker: Any, name: str, value: Any, *positional: Any, **groups: Any) -> Any:
    if step.cp_groups is not None:
        value, groups = step.cp_groups.logged_loss(value, groups)
    return record(tracker, name, value, *positional, **groups)


def _count_lengths(run: Run, consume: Function) -> Any:
    """Tokens and squared lengths of the step's samples; Megatron's own count is taken in any case, which ends it."""
    counted = consume()
    return counted if run.totals is None else (float(run.totals.tokens), float(run.totals.squares))


HOOKS = (
    Hook(
        target="megatron.training.arguments:add_megatron_arguments",
        parameters=("parser",),
        wrap=_with_balance_arguments,
        reason="the flags reach every script; parse_args looks the function up when it is called",
        # Until Megatron reads extra arguments from an entry point.
    ),
    Hook(
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        bound_in=("megatron.training.training",),
        parameters=("pp_size", "vp_size"),
        wrap=while_balancing(_schedule, run=_run_of_megatron),
        reason="train() asks it for the schedule of every step and passes the data iterator to that",
        # Until train() calls wrap_data_iterator of core/datasets/data_schedule.py, and its registry is an entry point.
    ),
    Hook(
        target="megatron.training.checkpointing:check_checkpoint_args",
        parameters=("checkpoint_args",),
        wrap=_with_state,
        reason="Megatron saves its arguments, with what --balance-cost auto has found, and reads a few of them back",
        # Until Megatron hands the arguments of a checkpoint to those that asked for some.
    ),
    Hook(
        target="megatron.training.training:evaluate",
        parameters=("eval_iters",),
        wrap=while_balancing(_evaluate, run=_run_of_megatron),
        reason="only its forward-only steps are balanced, and it knows how many they are",
        # Until the schedule of evaluate can be replaced alone.
    ),
    Hook(
        target="megatron.core.pipeline_parallel.schedules:forward_step",
        parameters=("forward_step_func", "data_iterator", "model", "current_microbatch"),
        wrap=in_step(Step.forward_step),
        reason="numbers each micro-batch, whose shape, masks and groups hold from its forward pass to its loss",
        # Until the schedules take a shape for each micro-batch.
    ),
    Hook(
        target="megatron.core.pipeline_parallel.combined_1f1b:combined_forward_backward_step",
        parameters=("forward_step_func", "data_iterator", "f_model", "current_microbatch"),
        wrap=in_step(Step.forward_step),
        reason="numbers each micro-batch where its forward pass overlaps the backward pass of another",
        # Until the schedules take a shape for each micro-batch.
        needed="overlap_moe_expert_parallel_comm",
        first="0.19",
    ),
    Hook(
        target="megatron.core.pipeline_parallel.schedules:backward_step",
        wrap=in_step(_backward_step),
        reason="measures backward passes while a run balances; every schedule looks the function up; else nothing",
        # Until schedules report when micro-batches begin and end.
    ),
    Hook(
        target="megatron.core.utils:_get_batch_on_this_cp_rank_per_sequence_balancing",
        parameters=("batch", "cp_group"),
        wrap=in_step(_split_by_document),
        reason="scripts ask for it under --dataloader-inter-document-masking; packs hold documents that split alone",
        # Until Megatron splits packed sequences by document under that flag, as attention and rotary angles expect.
        needed=":context_parallel",
        first="0.19",
    ),
    *sequence_mixers.HOOKS,
    Hook(
        target="megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.save_metrics_to_tracker",
        parameters=("loss",),
        wrap=in_step(_save_prediction_loss),
        reason="the log averages over all ranks, and so counts a micro-batch once for each rank that shares it",
        # Until a release logs sums over tokens, as Megatron's dev branch does.
        needed="balance_dynamic_cp mtp_num_layers",
        first="0.19",
    ),
    Hook(
        target="megatron.core.models.common.embeddings.rotary_pos_embedding:MultimodalRotaryEmbedding.forward",
        parameters=("position_ids", "cp_group"),
        wrap=in_step(_whole_angles),
        reason="cuts the angles of a micro-batch as a whole, where its sequences are split one by one",
        # Until Megatron cuts them sequence by sequence, as its dev branch does.
        needed="balance_dynamic_cp position_embedding_type=mrope",
        first="0.19",
    ),
    Hook(
        target="megatron.core.transformer.transformer_layer:TransformerLayer.forward",
        wrap=sequence_mixers.in_own_group(CpGroups.router_group),
        reason="routers sum auxiliary losses over the static group, whatever group the packed sequences name",
        # Until a release hands routers the group of packed_seq_params.
        needed="balance_dynamic_cp num_experts",
        first="0.19",
    ),
    Hook(
        target="megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.record",
        parameters=("name", "value", "reduce_group", "avg_group"),
        wrap=in_step(_record),
        reason="routers name the groups of micro-batches with context-parallel sizes of their own, and the log has one",
        # Until Megatron's log takes losses of groups of several sizes.
        needed="balance_dynamic_cp num_experts",
        first="0.19",
    ),
    Hook(
        target="megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.report",
        parameters=("loss_scale",),
        wrap=while_balancing(_log_losses),
        reason="the log divides sums over the micro-batches that ran by the number of those that were loaded",
        # Until Megatron's log takes the number of micro-batches that ran, as its dev branch does of its own schedulers.
        needed="num_experts",
        first="0.18",
    ),
    Hook(
        target="megatron.core.transformer.moe.moe_utils:track_moe_metrics",
        bound_in=("megatron.training.training",),
        parameters=("loss_scale",),
        wrap=while_balancing(_log_losses),
        reason="the log divides sums over the micro-batches that ran by the number of those that were loaded",
        # Until 0.18, which has a tracker in moe_logging.py.
        last="0.17",
    ),
    Hook(
        target="megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.track_mtp_metrics",
        parameters=("loss_scale",),
        wrap=while_balancing(_log_prediction_losses),
        reason="the log divides sums over the micro-batches that ran by the number of those that were loaded",
        # Until a release divides sums over tokens by tokens, as Megatron's dev branch does.
        needed="mtp_num_layers",
    ),
    Hook(
        target="megatron.training.training:consume_seqlen_stats_in_iteration",
        wrap=while_balancing(_count_lengths),
        reason="TFLOP/s count filler, dummies, evaluations, and each context-parallel rank's packs as those of all",
        # Until scripts count the lengths that a packing scheduler gives them.
        first="0.18",
    ),
    Hook(
        target="megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
        parameters=("routing_map", "padding_mask"),
        wrap=in_step(_apply_expert_bias),
        reason="fails on a padding mask: it combines [num_tokens, num_experts] with [num_tokens]",
        # Until 0.20, which gives the mask a second dimension.
        needed="num_experts",
        last="0.19",
    ),
    Hook(
        target="megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
        bound_in=("megatron.core.transformer.moe.router",),
        parameters=("reduce_group", "with_padding_mask"),
        wrap=in_step(_count_tokens),
        reason="no tokens make an auxiliary loss NaN; parts of ranks with unequal padding weigh unequally",
        # Until Megatron scales auxiliary losses by the tokens of the group, at least one.
        needed="num_experts",
    ),
    Hook(
        target="megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer._get_embeddings",
        parameters=("padding_mask",),
        wrap=in_step(_get_embeddings),
        reason="it shifts the padding mask with the tokens, so that the routers of these layers count padding",
        # Until Megatron passes the mask on unchanged, as its dev branch does.
        needed="num_experts mtp_num_layers",
        first="0.18",
    ),
    Hook(
        target="megatron.core.transformer.multi_token_prediction:process_mtp_loss",
        bound_in=("megatron.core.models.gpt.gpt_model", "megatron.core.models.hybrid.hybrid_model"),
        parameters=("compute_language_model_loss", "cp_group", "packed_seq_params"),
        wrap=in_step(_prediction_losses),
        reason="models sum losses, where no weight of a sample reaches them, and hand it the static group",
        # Until Megatron takes weights of samples, and models hand it the group of packed_seq_params.
        needed="mtp_num_layers",
        first="0.19",
    ),
    Hook(
        target="megatron.core.models.gpt.gpt_model:GPTModel.build_schedule_plan",
        parameters=("packed_seq_params",),
        wrap=in_step(_build_schedule_plan),
        reason="scripts do not tell the schedule of expert overlap where packed sequences begin",
        # Until scripts pass packed_seq_params, as on Megatron's dev branch.
        needed="overlap_moe_expert_parallel_comm",
        first="0.19",
    ),
)


def core_hooks(options: Options) -> list[Hook]:
    """The hooks in `megatron.core` that a balanced run with these options needs."""
    hooks = (hook for hook in hooks_of_release(HOOKS, supported_version()) if holds(hook.needed, options))
    return [hook for hook in hooks if all(place.startswith("megatron.core.") for place in hook.places)]


def _version_of_core(package: str) -> str:
    version = version_of(package)
    if version is None:
        raise BalanceError(
            f"{package} is not installed: pip install '.[megatron]' in a clone, or set PYTHONPATH to it."
        )
    return version


installation: Installation[str] = Installation(
    "megatron-core",
    versions=SUPPORTED_VERSIONS,
    remedy=f"install megatron-core[training]=={SUPPORTED_VERSIONS[-1]}.*, train without --balance-*",
    version_of=_version_of_core,
)
"""The hooks of this process; its settings are the version of Megatron Core."""


@quiet_imports()
def install() -> Installation[str]:
    """Hook Megatron's training loop in this process. Installing twice installs once.

    Under MEGATRON_BALANCE=0 scripts parse the balance flags all the same, and nothing reads them.

    Raises:
        BalanceError: Megatron is missing, of another version, or a target has moved; no hook is in place then.
    """
    if is_off("Megatron"):
        installation.add(install_hooks(HOOKS[:1], version="megatron-core"))
        return installation
    rows = [hook for hook in HOOKS if hook.places[0].startswith("megatron.training.")]
    return installation.install(supported_version(), lambda: rows, end=end_run)


def supported_version() -> str:
    """The version of the Megatron Core that is imported, if it is one of SUPPORTED_VERSIONS or ANY_VERSION is set."""
    version = installation.version()
    assert version is not None, "_version_of_core raises"
    return version
