"""Definitions of Megatron that the package relies on, beside the hooks' targets.

A row says what is read, passed or called, and whether the body counts too: of a function that Megatron changes in
every release and that is only called, its name and parameters are enough.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Relied:
    """One definition that must stay as it is used.

    Attributes:
        target: `module:function`, `module:Class` or `module:Class.method`.
        why: what relies on it.
        parameters: that are passed by name.
        names: that its body must mention: attributes it reads or sets (with a dot), functions it looks up, keywords
            it passes.
        bound_in: modules from which it is imported.
        body: whether any change of what it does is to be looked at.
        first: the first release that has it, as `(major, minor)`.
        last: the last release that has it.
    """

    target: str
    why: str
    parameters: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    bound_in: tuple[str, ...] = ()
    body: bool = False
    first: tuple[int, int] = (0, 17)
    last: tuple[int, int] = (999, 0)

    def is_in(self, release: tuple[int, int]) -> bool:
        """True if a release should have it."""
        return self.first <= release <= self.last


_SCHEDULE = ("forward_step_func", "data_iterator", "model", "num_microbatches", "micro_batch_size", "forward_only")
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_PARALLEL_STATE = "megatron.core.parallel_state"
_TRAINING = "megatron.training.training"

MEGATRON = (
    Relied(
        f"{_TRAINING}:train_step",
        "passes the schedule what the wrapper replaces, by keyword",
        names=("forward_backward_func", *_SCHEDULE),
    ),
    Relied(f"{_TRAINING}:train", "numbers the steps, and asks for the schedule", names=(".curr_iteration",)),
    Relied(
        f"{_TRAINING}:evaluate",
        "passes the schedule the items of one iteration, and divides sums over tokens unless --sft is set",
        names=("forward_only", "eval_iters", ".sft", *_SCHEDULE),
    ),
    *(
        Relied(
            f"{_SCHEDULES}:{name}",
            "runs the balanced micro-batches, and looks backward_step up when it calls it",
            parameters=_SCHEDULE,
            names=("backward_step", *names),
        )
        for name, names in (
            ("forward_backward_no_pipelining", ()),
            ("forward_backward_pipelining_without_interleaving", ()),
            (
                "forward_backward_pipelining_with_interleaving",
                ("get_schedule_table", ".microbatch_group_size_per_vp_stage"),
            ),
        )
    ),
    Relied(
        f"{_SCHEDULES}:get_schedule_table",
        "the order of the messages between stages",
        parameters=("num_microbatches", "num_model_chunks", "microbatch_group_size_per_vp_stage"),
        body=True,
    ),
    Relied(
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
        "asks for the shapes of every message, and receives tensors of these shapes",
        names=(".variable_seq_lengths", ".mtp_standalone", "._communicate_shapes"),
        body=True,
    ),
    Relied(
        "megatron.training.arguments:parse_args",
        "looks add_megatron_arguments up when it is called",
        names=("add_megatron_arguments",),
        body=True,
    ),
    Relied(
        "megatron.training.arguments:validate_args",
        "forces variable_seq_lengths off, so that it is set for the step",
        names=(".variable_seq_lengths",),
    ),
    Relied(
        "megatron.core.model_parallel_config:ModelParallelConfig",
        "pipeline stages ask for the shape of every message; under mtp_standalone a message is more than an activation",
        names=("variable_seq_lengths", "mtp_standalone"),
    ),
    Relied("megatron.core.utils:get_model_config", "finds that configuration", parameters=("model",), body=True),
    Relied(
        "megatron.core.models.gpt.gpt_model:GPTModel.forward",
        "hands the padding mask on to MoE layers",
        parameters=("padding_mask",),
    ),
    Relied(
        "megatron.core.models.gpt.gpt_model:GPTModel._preprocess",
        "splits the padding mask over sequence-parallel ranks, on the first pipeline stage only",
        names=("padding_mask", ".scatter_to_sequence_parallel_region", ".pre_process"),
    ),
    Relied(
        "megatron.core.transformer.moe.router:TopKRouter.routing",
        "leaves padding out of losses and counts, by its mask",
        parameters=("padding_mask",),
        names=("._apply_aux_loss", "._apply_seq_aux_loss", "._apply_global_aux_loss", "._apply_expert_bias"),
        body=True,
    ),
    *(
        Relied(
            f"megatron.core.transformer.moe.router:TopKRouter.{name}",
            "scales its loss by the tokens of this rank, and looks up the function that counts them",
            names=("get_tokens_per_expert_and_token_count", "with_padding_mask", "reduce_group"),
        )
        for name in ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")
    ),
    Relied("megatron.core.utils:unwrap_model", "finds the model that takes the mask", parameters=("model",)),
    Relied(
        "megatron.core.rerun_state_machine:RerunDataIterator",
        "items are pulled ahead behind it",
        names=(".iterable", ".saved_microbatches"),
        body=True,
    ),
    Relied(
        "megatron.core.num_microbatches_calculator:get_num_microbatches",
        "counts what was loaded: learning rate and resuming rely on it",
        body=True,
    ),
    Relied("megatron.training.global_vars:get_args", "the run's arguments", bound_in=("megatron.training",), body=True),
    Relied("megatron.training.global_vars:get_tensorboard_writer", "figures go there"),
    Relied("megatron.training.global_vars:get_wandb_writer", "figures go there"),
    Relied(
        "megatron.training.utils:get_batch_on_this_tp_rank",
        "ranks that receive a micro-batch take its shape from the arguments",
        parameters=("data_iterator",),
        names=(".micro_batch_size", ".seq_length"),
        last=(0, 17),
    ),
    Relied(
        "megatron.core.utils:get_batch_on_this_tp_rank",
        "ranks that receive a micro-batch take its shape from the arguments",
        parameters=("micro_batch_size", "seq_length", "broadcast_src_rank", "broadcast_group"),
        first=(0, 18),
    ),
    Relied(
        "megatron.core.utils:get_batch_on_this_cp_rank",
        "looks up what splits a row when it calls it",
        names=tuple(f"_get_batch_on_this_cp_rank_per_{unit}_balancing" for unit in ("sequence", "document")),
        first=(0, 19),
    ),
    Relied(
        "megatron.core.utils:_get_batch_on_this_cp_rank_per_document_balancing",
        "splits balanced micro-batches, by cu_seqlens_padded",
        parameters=("batch", "cp_group"),
        body=True,
        first=(0, 19),
    ),
    Relied(
        "megatron.core.utils:flatten_batch_for_packed_sequences",
        "makes one row of a micro-batch, and looks up what merges cu_seqlens when it calls it",
        parameters=("batch",),
        names=("_merge_cu_seqlens_across_micro_batch",),
        body=True,
        first=(0, 19),
    ),
    *(
        Relied(f"{_PARALLEL_STATE}:{name}", "a rank's place in the layout")
        for name in (
            "get_data_parallel_group",
            "get_model_parallel_group",
            "get_tensor_model_parallel_rank",
            "get_pipeline_model_parallel_rank",
            "get_context_parallel_rank",
            "get_context_parallel_group",
        )
    ),
    *(
        Relied(
            f"{_PARALLEL_STATE}:{name}", "reads what is swapped while a micro-batch runs", names=(state,), first=(0, 19)
        )
        for name, state in (
            ("get_context_parallel_global_ranks", "_CONTEXT_PARALLEL_GLOBAL_RANKS"),
            ("get_context_parallel_world_size", "get_context_parallel_group"),
        )
    ),
    Relied(
        "megatron.core.packed_seq_params:PackedSeqParams",
        "names the context-parallel group of a micro-batch",
        names=("cp_group", "local_cp_size"),
        first=(0, 19),
    ),
    Relied(
        "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
        "switches to the group that packed sequences name, and back to the one that is set after the step",
        names=(".set_context_parallel_group", ".local_cp_size", ".cp_stream", ".cp_comm_type"),
        body=True,
        first=(0, 19),
    ),
    Relied(
        f"{_TRAINING}:consume_seqlen_stats_in_iteration",
        "divides what micro-batches counted by the static context-parallel size",
        names=("_seqlen_stats_in_iteration", ".get_context_parallel_world_size"),
        first=(0, 19),
    ),
    *(
        Relied(f"megatron.core.{target}", "sizes of micro-batches under FP8 and FP4 follow from it", body=True)
        for target in (
            "enums:Fp8Recipe",
            "enums:Fp4Recipe",
            "fp8_utils:get_fp8_align_size",
            "fp4_utils:get_fp4_align_size",
            "transformer.moe.moe_utils:get_align_size_for_quantization",
            "transformer.moe.moe_utils:pad_routing_map",
        )
    ),
    Relied(
        "megatron.core.datasets.data_schedule:wrap_data_iterator",
        "chooses a scheduler from scheduler_map by its name",
        names=("scheduler_map", ".sequence_packing_scheduler", ".max_seqlen_per_dp_cp_rank"),
        first=(0, 20),
    ),
    Relied(
        "megatron.core.datasets.data_schedule:BasePackingScheduler",
        "keeps what PackingScheduler plans with",
        names=(".max_seqlen_per_dp_cp_rank", ".cp_size", ".dp_size", ".microbatch_group_size_per_vp_stage"),
        first=(0, 20),
        body=True,
    ),
    Relied(
        "megatron.core.datasets.data_schedule:DpBalancedScheduler.run",
        "moves samples by the plan of get_groups_and_subsamples",
        parameters=("data_iterator", "num_microbatches", "dp_group", "tp_group", "pp_group"),
        names=(".get_groups_and_subsamples",),
        first=(0, 20),
    ),
)

_DATA_SCHEDULE = "megatron.core.datasets.data_schedule"

DYNAMIC_CP = f"{_DATA_SCHEDULE}:DefaultDynamicCPScheduler"
"""By this definition a checkout is known to have an executor of dynamic context parallelism, as the dev branch has."""

MEGATRON_DYNAMIC_CP = (
    Relied(
        f"{DYNAMIC_CP}.__init__",
        "keeps what DynamicCpPackingScheduler plans with",
        parameters=("min_cp_size",),
        names=(".is_dynamic_cp", ".min_cp_size"),
    ),
    Relied(
        f"{DYNAMIC_CP}.get_groups_and_subsamples",
        "answers with a list of ids for every rank of every micro-batch",
        parameters=("sample_id_seqlens",),
    ),
    Relied(
        f"{_DATA_SCHEDULE}:DpBalancedScheduler.run",
        "asks for the plan, and has stages and experts in its last argument",
        parameters=("pp_group", "dp_cp_group", "config"),
        names=(".get_groups_and_subsamples", "build_packed_microbatches", ".is_dynamic_cp"),
    ),
    Relied(
        f"{_DATA_SCHEDULE}:wrap_data_iterator",
        "looks the scheduler up by a name when it is called",
        names=("scheduler_map", ".min_dynamic_context_parallel_size"),
    ),
    Relied(
        f"{_DATA_SCHEDULE}_utils:build_packed_microbatches",
        "takes the number of ranks that hold the first id as the size of a group",
        parameters=("sample_id_groups", "dcp_rank"),
        names=("sample_ids_this_group",),
    ),
    Relied(
        f"{_PARALLEL_STATE}:create_dynamic_dp_cp_groups",
        "makes the groups: powers of two below all ranks, each from a multiple of its size on",
        parameters=("ranks", "min_cp_size"),
        names=("log2", "group_size"),
    ),
    Relied(
        f"{_PARALLEL_STATE}:get_dynamic_data_context_parallel_groups",
        "has the group of each size, all ranks among them",
        parameters=("group_size",),
    ),
)

_RL = "megatron.rl.sequence_packing_utils"

RL_PACKING = f"{_RL}:SequencePacker"
"""By this definition a checkout is known to have an RL loop that packs sequences; wheels lack it."""

MEGATRON_RL = (
    Relied(
        f"{_RL}:pack_all_trajectories",
        "packs the sequences of all ranks and looks the hooked function up when it deals bins out",
        names=("distribute_packed_bins", ".packing_algo"),
    ),
    Relied(
        f"{RL_PACKING}.pack_sequences",
        "says where the sequences of each bin start, and the last one ends",
        names=("seq_starts", "bin_seq_indices", "seq_to_bin_idx"),
    ),
    Relied(
        f"{_RL}:create_packed_seq_params_for_bin",
        "runs the padding of a bin as a sequence",
        parameters=("bin_size",),
        names=("cu_seqlens",),
    ),
    Relied(
        "megatron.training.training:train",
        "asks for the schedule, which installs the hook, before it packs the first rollout",
        names=("get_forward_backward_func",),
    ),
)
