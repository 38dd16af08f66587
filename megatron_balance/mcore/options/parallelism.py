"""Options of parallelism: how the model is split, and the messages between ranks."""

from __future__ import annotations

from megatron_balance.mcore.options.conditions import (
    above,
    among,
    both,
    engine_before,
    given,
    weights_are_sharded_over_data,
)
from megatron_balance.mcore.options.option import Option, Support

_CP = above("context_parallel_size", 1)
_PP = above("pipeline_model_parallel_size", 1)
PARALLELISM = (
    Option(
        names=("tensor_model_parallel_size", "sequence_parallel"),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("tp_comm_overlap",),
        support=Support.REFUSED,
        when=given("tp_comm_overlap"),
        because="its buffers are sized once from --seq-length and --micro-batch-size",
        remedy="drop it",
    ),
    Option(
        names=("context_parallel_size",),
        case="with --cp-comm-type p2p, the default",
        support=Support.SUPPORTED,
    ),
    Option(
        names=("cp_comm_type", "context_parallel_size"),
        case="a2a, with transformer_engine before 2.10",
        support=Support.REFUSED,
        when=both(_CP, among("cp_comm_type", "a2a"), engine_before(2, 10)),
        because="its attention takes no packed sequences by it",
        remedy="install transformer-engine 2.10 or newer, or set --cp-comm-type p2p",
    ),
    Option(
        names=("cp_comm_type", "context_parallel_size"),
        case="all_gather, with transformer_engine before 2.15",
        support=Support.REFUSED,
        when=both(_CP, among("cp_comm_type", "all_gather", "allgather"), engine_before(2, 15)),
        because="its attention takes no packed sequences by it",
        remedy="install transformer-engine 2.15 or newer, or set --cp-comm-type p2p",
    ),
    Option(
        names=("cp_comm_type", "context_parallel_size"),
        also=("hierarchical_context_parallel_sizes",),
        case="a2a+p2p, with transformer_engine before 2.20",
        support=Support.REFUSED,
        when=both(_CP, among("cp_comm_type", "a2a+p2p"), engine_before(2, 20)),
        because="its attention takes no packed sequences by it",
        remedy="install transformer-engine 2.20 or newer, or set --cp-comm-type p2p",
    ),
    Option(
        names=("cp_partition_mode", "context_parallel_size"),
        also=("linear_cp_mode",),
        case="contiguous, in Megatron's dev branch",
        support=Support.REFUSED,
        when=both(_CP, among("cp_partition_mode", "contiguous")),
        because="packs are padded and split in the zigzag order of context parallelism",
        remedy="set --cp-partition-mode zigzag",
        first=(0, 20),
    ),
    Option(
        names=("hybrid_context_parallel",),
        also=("max_seqlen_per_dp_cp_rank",),
        support=Support.STOCK,
        when=given("hybrid_context_parallel"),
        because="it has a scheduler of its own",
        remedy="drop it to balance, with --context-parallel-size for long samples",
    ),
    Option(
        names=("dynamic_context_parallel",),
        also=("min_dynamic_context_parallel_size",),
        case="of Megatron's dev branch",
        support=Support.STOCK,
        when=given("dynamic_context_parallel"),
        because="Megatron's own executor moves samples and runs them, by this package's plan under --balance-data",
        remedy="drop it to balance with the other flags as well",
        first=(0, 20),
    ),
    Option(
        names=("sequence_packing_scheduler",),
        also=(
            "pad_packed_seq_alignment",
            "thd_tail_padding_policy",
            "thd_max_packed_sequences",
        ),
        case="of Megatron's dev branch",
        support=Support.STOCK,
        when=given("sequence_packing_scheduler"),
        because="Megatron's own scheduler packs and moves samples",
        remedy="drop it to balance",
        first=(0, 20),
    ),
    Option(
        names=("pipeline_model_parallel_size",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("num_layers_per_virtual_pipeline_stage",),
        also=("num_virtual_stages_per_pipeline_rank",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("microbatch_group_size_per_vp_stage",),
        also=("overlap_p2p_comm",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("decoder_first_pipeline_num_layers", "pipeline_model_parallel_layout"),
        also=(
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("overlap_p2p_comm_warmup_flush",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("use_ring_exchange_p2p", "pipeline_model_parallel_size"),
        support=Support.REFUSED,
        when=both(_PP, given("use_ring_exchange_p2p")),
        because="it is a function of a custom torch, with which no test here runs",
        remedy="drop it",
    ),
    Option(
        names=("pipeline_model_parallel_comm_backend", "pipeline_model_parallel_size"),
        case="ucc",
        support=Support.REFUSED,
        when=both(_PP, among("pipeline_model_parallel_comm_backend", "ucc")),
        because="pipeline messages of changing shapes were never sent over UCC here",
        remedy="set nccl",
    ),
    Option(
        names=("use_tp_pp_dp_mapping",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"),
        case="above the tensor-parallel size",
        support=Support.REFUSED,
        when=weights_are_sharded_over_data,
        because="ranks that share weights hold different micro-batches and count as data-parallel, which plans do not "
        "model",
        remedy="drop it",
        first=(0, 19),
    ),
    Option(
        names=("use_torch_fsdp2",),
        also=("torch_fsdp2_reshard_after_forward",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("use_megatron_fsdp",),
        also=(
            "data_parallel_sharding_strategy",
            "outer_dp_sharding_strategy",
            "enable_full_sharding_in_hsdp",
            "fsdp_double_buffer",
        ),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("fake_process_group",),
        support=Support.REFUSED,
        when=given("fake_process_group"),
        because="ranks of a balanced run agree and move samples, and there is nobody to do so with",
        remedy="drop it",
    ),
)
