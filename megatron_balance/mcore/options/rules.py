"""The rules: what is refused, what leaves a run stock, and what its log warns of, by subject.

Each is a condition (`__init__.py`) and the reason, with the remedy after a semicolon. An option that no rule names
was reviewed as harmless: scripts/drift/irrelevant_options.txt.

Sources: megatron/core of 0.17 to 0.19; for attention Transformer Engine 2.3 to 2.20.
"""

from __future__ import annotations

_DOCUMENTS = "dataloader_inter_document_masking !sft"
_IN_STAGES = f"{_DOCUMENTS} pipeline_model_parallel_size>2"
_BY_IT = "its attention takes no packed sequences by it; install"
_STATIC_GROUP = "heads are exchanged in the static context-parallel group, whatever group a micro-batch has; set"
_AUX_LOSS = "moe_aux_loss_coeff>0 num_experts"
_EARLY_STAGES = "Megatron's scripts give stages in between no data"

BALANCE_FLAGS = {
    "balance_record :stock": "nothing is balanced, so no lengths are known; "
    "add --balance-data or --use-dynamic-batch-size, or drop it",
    "balance_unpad!=None :stock": "nothing is balanced, and rows stay padded; "
    "add --use-dynamic-batch-size and --max-tokens-per-gpu, or drop it",
    "balance_by_flops !use_dynamic_batch_size": "without --use-dynamic-batch-size there is nothing to pack; "
    "add --use-dynamic-batch-size and --max-tokens-per-gpu, or drop it",
    "balance_evaluation :stock": "nothing is balanced; add --balance-data or --use-dynamic-batch-size, or drop it",
    "balance_evaluation balance_context_parallel": "evaluation runs at --context-parallel-size; drop one of them",
    "balance_attention_rate !balance_by_flops": "it weighs attention among the FLOPs, which are not counted; "
    "add --balance-by-flops, or drop it",
    "balance_attention_rate balance_cost": "measured seconds hold the rate of attention; drop one of them",
    "balance_cost !balance_by_flops": "it refines --balance-by-flops, which is not set; add that, or drop it",
    "balance_context_parallel !balance_data": "samples must move to the ranks that share them; "
    "add --balance-data, or drop it",
    "balance_context_parallel !use_dynamic_batch_size": "micro-batches are of a number of tokens; "
    "add --use-dynamic-batch-size and --max-tokens-per-gpu, or drop it",
    ":bucket_splits_unevenly balance_context_parallel": "a rank that shares a sequence holds two chunks, each of which "
    "tensor-parallel ranks may split; set such a multiple",
    "balance_context_parallel core<0.19": "packed sequences name no context-parallel group there; "
    "install megatron-core 0.19, or drop it",
    "balance_unpad!=None balance_context_parallel": "scripts for padded rows split a whole row over context-parallel "
    "ranks, and a pack is split sample by sample; drop it, or give packed rows",
    "balance_objective!=auto balance_context_parallel": "which plans run at all follows from who waits for whom; "
    "set auto",
    "balance_algorithm!=auto balance_context_parallel": "it has one algorithm; set auto",
    "max_tokens_per_gpu<1 use_dynamic_batch_size": "--max-tokens-per-gpu must be above 0; "
    "give the most tokens that fit a GPU's memory, --seq-length for a start",
    "balance_shape_bucket<1": "it counts tokens; set 1 (off) or more",
    "balance_shape_bucket>1 :stock": "nothing is balanced; add --use-dynamic-batch-size or --balance-data, or drop it",
}
"""Refused in every run: combinations of balance flags that cannot work."""

DYNAMIC_CP = {
    "multi_latent_attention balance_context_parallel": "Megatron asserts that its micro-batches name no group: its "
    "rotary angles are those of the static one; drop --balance-context-parallel",
    "mtp_num_layers balance_context_parallel": "tokens are shifted within the static context-parallel group, whose "
    "ranks weigh parts by themselves; drop --balance-context-parallel",
    "window_size balance_context_parallel": "Transformer Engine takes no window where context-parallel ranks pass keys "
    "on (p2p); drop one of them",
    "cp_comm_type=a2a,all_gather,allgather,a2a+p2p balance_context_parallel": "groups of any size pass keys on (p2p): "
    "a2a needs a head for each rank, the others one static group; set --cp-comm-type p2p",
    f"moe_router_load_balancing_type=global_aux_loss {_AUX_LOSS} balance_context_parallel": "all ranks meet for it in "
    "every micro-batch, of which they may run different numbers; "
    "set aux_loss or seq_aux_loss, or drop --balance-context-parallel",
    f"recompute_modules=moe {_AUX_LOSS} balance_context_parallel": "the router runs again in the backward pass, where "
    "the group of its micro-batch is not known; "
    "drop moe from --recompute-modules, or set --recompute-granularity full",
    f"moe_layer_recompute {_AUX_LOSS} balance_context_parallel": "the router runs again in the backward pass, where "
    "the group of its micro-batch is not known; drop it, or set --recompute-granularity full",
    "moe_token_dispatcher_type=allgather :experts_span_ranks balance_context_parallel": "its all-gathers are of equal "
    "sizes, and context-parallel ranks hold different micro-batches; set --moe-token-dispatcher-type alltoall",
    "use_megatron_fsdp/use_torch_fsdp2 balance_context_parallel": "all ranks gather weights in every micro-batch, of "
    "which they may run different numbers; "
    "set --use-distributed-optimizer in place of FSDP, or drop --balance-context-parallel",
    ":delta_net balance_context_parallel": f"{_STATIC_GROUP} --context-parallel-size in its place",
    ":mamba balance_context_parallel": f"{_STATIC_GROUP} --context-parallel-size in its place",
    ":dsa balance_context_parallel": "keys are gathered in the static context-parallel group, whatever group a "
    "micro-batch has; set --context-parallel-size in its place",
    "softmax_type=off-by-one,learnable balance_context_parallel": "Transformer Engine has such a softmax under context "
    "parallelism by a2a alone, of one static group; set --context-parallel-size and --cp-comm-type a2a in its place",
    "position_embedding_type=mrope balance_context_parallel": "Megatron cuts the angles of the whole micro-batch, not "
    "of each sequence, so that tokens get positions of others; drop --balance-context-parallel",
}
"""Refused with `--balance-context-parallel`."""

REFUSED = {
    "Context parallelism of each micro-batch": DYNAMIC_CP,
    "Parallelism": {
        "tp_comm_overlap": "its buffers are sized once from --seq-length and --micro-batch-size; drop it",
        "cp_comm_type=a2a context_parallel_size>1 engine<2.10": f"{_BY_IT} transformer-engine 2.10 or newer, or set "
        "--cp-comm-type p2p",
        "cp_comm_type=all_gather,allgather context_parallel_size>1 engine<2.15": f"{_BY_IT} transformer-engine 2.15 or "
        "newer, or set --cp-comm-type p2p",
        "cp_comm_type=a2a+p2p context_parallel_size>1 engine<2.20": f"{_BY_IT} transformer-engine 2.20 or newer, or "
        "set --cp-comm-type p2p",
        "cp_partition_mode=contiguous context_parallel_size>1": "packs are padded and split in the zigzag order of "
        "context parallelism; set --cp-partition-mode zigzag",
        "use_ring_exchange_p2p pipeline_model_parallel_size>1": "torch has no ring exchange: it is in a build of its "
        "own; drop it",
        "pipeline_model_parallel_comm_backend=ucc pipeline_model_parallel_size>1": "builds of torch have no UCC to try "
        "messages of changing shapes with; set nccl",
        ":weights_are_sharded_over_data": "ranks that share weights hold different micro-batches and count as "
        "data-parallel, which plans do not model; drop it",
        "fake_process_group": "ranks of a balanced run agree and move samples, and there is nobody to do so with; "
        "drop it",
    },
    "Mixture of experts": {
        "moe_token_dispatcher_type=allgather :experts_span_replicas": "its all-gathers are of equal sizes, and ranks "
        "of a balanced run hold different numbers of tokens; set --moe-token-dispatcher-type alltoall",
        ":expert_tensors_span_replicas": "every dispatcher gathers over it, and ranks of a balanced run hold different "
        "numbers of tokens; set --expert-tensor-parallel-size to --tensor-model-parallel-size or less",
        "moe_flex_dispatcher_backend=hybridep moe_token_dispatcher_type=flex num_experts "
        "!moe_hybridep_pad_uneven_dispatch_inputs/moe_hybridep_pad_variable_tokens": "it expects as many tokens from "
        "each rank, and ranks of a balanced run hold different numbers; "
        "add --moe-hybridep-pad-uneven-dispatch-inputs (from 0.19), or set --moe-token-dispatcher-type alltoall",
        "moe_flex_dispatcher_backend=ncclep moe_token_dispatcher_type=flex num_experts": "its buffers are sized by the "
        "first micro-batch, and a later one may hold more tokens; set --moe-token-dispatcher-type alltoall",
        "moe_expert_capacity_factor/moe_pad_expert_input_to_capacity num_experts": "dropped tokens depend on the "
        "samples that share a micro-batch, and balancing changes these; drop the capacity factor",
        "moe_expert_rank_capacity_factor/moe_paged_stash num_experts": "buffers are sized by tokens of other "
        "micro-batches, and tokens beyond them are dropped or end the run; drop it",
        "moe_router_load_balancing_type=sinkhorn,quantile_balancing num_experts": "the route of a token depends on the "
        "other tokens of its micro-batch, and balancing changes those; "
        "set aux_loss or none, or --moe-router-enable-expert-bias",
        "moe_enable_routing_replay num_experts": "it replays routes in the order in which tokens were recorded, and "
        "balancing changes that order; drop it",
        "overlap_moe_expert_parallel_comm": "Megatron's scripts build its schedule without saying where packed "
        "sequences begin, so attention reaches across them; drop it",
    },
    "Attention and layers": {
        "attention_backend=unfused,local": "it does not take packed sequences; set auto, flash or fused",
        "transformer_impl=local !spec": "Megatron's own local attention does not take packed sequences; "
        "set --transformer-impl transformer_engine, or name layers that take them with --spec",
        "engine<2.3": "its attention does not take all that Megatron passes with packed sequences; "
        "install transformer-engine 2.3 or newer",
        "qk_clip/log_max_attention_logit": "Transformer Engine gives the largest logits of packed sequences in new "
        "releases alone; drop it",
        "position_embedding_type=relative": "packed sequences take no bias of attention; set rope",
        "use_kitchen_attention": "Nvidia's Kitchen is not public, to try packed sequences with; drop it",
        "mtp_standalone": "Megatron derives it from the pipeline's layout; set --pipeline-model-parallel-layout",
        "use_legacy_models": "they do not take packed sequences; drop it",
        ":delta_net deterministic_mode": "Megatron's deterministic kernel takes no packed sequences; "
        "drop --deterministic-mode",
        ":mamba core<0.19": "Megatron hands its layers no bounds of packed sequences, so that a state passes from one "
        "to the next; install megatron-core 0.19",
        ":mamba !use_mamba_mem_eff_path": "the other path passes a state from one packed sequence to the next; "
        "drop --disable-mamba-mem-eff-path",
        "softmax_type=off-by-one,learnable engine<2.8": "its attention has no such softmax; "
        "install transformer-engine 2.8 or newer",
        "softmax_type=off-by-one,learnable context_parallel_size>1 cp_comm_type!=a2a": "Transformer Engine has such a "
        "softmax under context parallelism by a2a alone; set --cp-comm-type a2a, or --context-parallel-size 1",
        "window_size context_parallel_size>1 cp_comm_type!=a2a,all_gather,allgather": "Transformer Engine takes no "
        "window where context-parallel ranks pass keys on; "
        "set --cp-comm-type a2a or all_gather, or --context-parallel-size 1",
        ":dsa dsa_indexer_loss_coeff>0": "the indexer's loss is a mean over all tokens of a micro-batch, padding and "
        "dummies included; set --dsa-indexer-loss-coeff 0",
        "position_embedding_type=mrope context_parallel_size>1": "Megatron cuts the angles of the whole micro-batch, "
        "not of each sequence, so that tokens get positions of others; set --context-parallel-size 1, or train on "
        "Megatron's dev branch, which cuts each sequence (packed_seq of get_pos_emb_on_this_cp_rank)",
        "position_embedding_type=mrope apply_rope_fusion": "the fused kernel takes the angles of the first tokens for "
        "every packed sequence; set --no-rope-fusion",
    },
    "Precision": {
        "fp8_recipe!=delayed,tensorwise,mxfp8,blockwise fp8": "the numbers of tokens that its kernels take are not "
        "known; set delayed, tensorwise, mxfp8 or blockwise",
        "fp4_recipe!=nvfp4 fp4": "the numbers of tokens that its kernels take are not known; set nvfp4",
        "te_precision_config_file/kitchen_config_file/kitchen_recipe_number": "the numbers of tokens that its layers "
        "take are not known; set --fp8-recipe or --fp4-recipe in its place",
    },
    "Memory": {
        "cpu_offloading_num_layers": "its buffers on the host are pinned by shape, and balanced micro-batches have "
        "many; use --recompute-granularity",
        "fine_grained_activation_offloading balance_shape_bucket<2": "it keeps pinned buffers for every shape it has "
        "seen, and balanced micro-batches have many; add --balance-shape-bucket 1024, so that few shapes occur",
    },
    "Training loop and data": {
        "!calculate_per_token_loss": "balancing changes which samples share a micro-batch, and loss and gradients "
        "would depend on it; add --calculate-per-token-loss",
        "dataloader_save": "balancing pulls the next step's items ahead, which the loader's own state would count as "
        "trained, and a resumed run would skip them; drop it, or the balance flags",
        "reset_attention_mask/reset_position_ids !sft/dataloader_inter_document_masking": "it separates documents by a "
        "mask or by positions, and the data has no cu_seqlens to balance by; "
        "set --dataloader-inter-document-masking in its place (from 0.19)",
        f"{_IN_STAGES} mtp_num_layers pipeline_model_parallel_layout": f"{_EARLY_STAGES}, "
        "and a layout may put multi-token prediction, which reads tokens, on any; leave the layout out, or set "
        "--pipeline-model-parallel-size 2",
        "inprocess_restart": "process groups and threads of this package do not survive a restart within the process; "
        "restart processes (torchrun --max-restarts)",
        "perform_rl_step": "Megatron's RL loop makes its own iterator, and packs and deals out its rollouts itself; "
        "use the adapters for RL systems, or drop the balance flags",
        "logits_save_dir/logits_load_dir": "logits are kept by the order of samples, which balancing changes; "
        "drop it, or the balance flags",
        "export_kd_teacher_load": "pipeline messages of student and teacher are sized from --seq-length; "
        "drop it, or the balance flags",
        "yaml_cfg": "the file replaces every option, the balance flags among them; give the options as flags",
    },
    "Evaluation": {
        "multiple_validation_sets num_layers_per_virtual_pipeline_stage/num_virtual_stages_per_pipeline_rank/"
        "virtual_pipeline_model_parallel_size": "Megatron's loop then gives each model chunk the rows of another set; "
        "drop one of them",
        f"full_validation {_IN_STAGES}": "every stage counts the rows of its data sets, "
        "and Megatron's scripts give stages in between none; "
        "drop --full-validation, or set --pipeline-model-parallel-size 2",
        f"{_IN_STAGES} eval_iters>0 :stock_evaluation": f"{_EARLY_STAGES}, and stock "
        "evaluation asks for it; set --eval-iters 0, or evaluate balanced",
    },
    "Padded rows": {
        "balance_unpad!=None create_attention_mask_in_dataloader": "Megatron's scripts would ask for a mask of every "
        "micro-batch, and packs have none; add --no-create-attention-mask-in-dataloader",
        "context_parallel_size>1 balance_unpad!=None": "scripts for padded rows split a whole row over "
        "context-parallel ranks, and a pack is split sample by sample; set --context-parallel-size 1, or give packed "
        "rows",
    },
}
"""Refused in runs that balance."""

STOCK = {
    "hybrid_context_parallel": "it has a scheduler of its own; "
    "drop it to balance, with --context-parallel-size for long samples",
    "dynamic_context_parallel": "Megatron's own executor moves samples and runs them, by this package's plan under "
    "--balance-data; drop it to balance with the other flags as well",
    "sequence_packing_scheduler": "Megatron's own scheduler packs and moves samples; drop it to balance",
    "cuda_graph_impl!=none,None": "CUDA graphs replay fixed shapes, and balanced micro-batches differ in length; "
    "drop it to balance",
    "enable_cuda_graph/external_cuda_graph": "CUDA graphs replay fixed shapes, and balanced micro-batches differ in "
    "length; drop it to balance",
}
"""Megatron trains as without balance flags, and the log says why."""

CAUTIONS = {
    "engine<2.9": "Megatron's developers report that packed sequences may converge badly with Transformer Engine "
    "before 2.9; install a newer one where you can",
    "use_gloo_process_groups=False": "ranks of a balanced run meet over gloo all the same; megatron-balance doctor "
    "under torchrun says whether they can, and which interface GLOO_SOCKET_IFNAME should name",
    "attention_dropout/hidden_dropout>0": "random numbers depend on a token's place in a micro-batch, so losses are "
    "those of another draw",
    "mtp_num_layers": "where the first tokens of sequences are learned, Megatron weighs the loss of multi-token "
    "prediction by micro-batch, so any regrouping changes it a little, by one over the tokens of a sequence at most",
    _AUX_LOSS: "auxiliary losses are computed over the tokens of a micro-batch, so any regrouping changes them a "
    "little; padding counts nowhere",
    "moe_router_force_load_balancing/moe_router_force_biased/moe_input_jitter_eps num_experts": "random numbers depend "
    "on a token's place in a micro-batch, which balancing changes",
    "moe_aux_loss_coeff/moe_z_loss_coeff/moe_router_enable_expert_bias num_experts balance_unpad!=None": "routers of "
    "padded rows count padding, those of packs do not, so that these terms differ from a run without --balance-unpad",
    "softmax_type=off-by-one,learnable transformer_impl!=local": "Transformer Engine's fused kernel takes packed "
    "sequences with it from cuDNN 9.18; a slower one runs where that is older",
    ":dsa": "the indexer's ReLU gives many keys the score 0, and which of these it chooses depends on the micro-batch: "
    "losses differ a little from those of another grouping",
    "dataloader_type=external": "items are pulled one step ahead; a loader that saves a state of its own must count "
    "trained items, not pulled ones",
    "check_for_spiky_loss": "spikes are judged micro-batch by micro-batch, and balanced ones hold other samples",
    f"{_DOCUMENTS} context_parallel_size>1 eval_iters>0 :stock_evaluation": "Megatron's scripts split its rows as a "
    "whole, while attention goes by document: it fails or is wrong, as without --balance-*; set --eval-iters 0",
}
"""Warned of once: the run balances, and the numbers or the speed are other than one may expect."""

_UNTRIED = "it needs a GPU, and the tests run on CPUs alone; what it relies on is tested:"
_SAME_NUMBER = f"{_UNTRIED} ranks that exchange tokens run the same number of micro-batches"
_MULTIPLES = f"{_UNTRIED} micro-batches hold multiples of the tokens that its kernels take"
UNTRIED = {
    "transformer_impl!=local balance_context_parallel": "it needs several GPUs, and the tests run it on CPU ranks "
    "alone, with another attention; compare the first losses with those of a run without it",
    "moe_token_dispatcher_type=flex num_experts moe_flex_dispatcher_backend!=hybridep,ncclep": _SAME_NUMBER,
    "moe_flex_dispatcher_backend=hybridep moe_token_dispatcher_type=flex num_experts "
    "moe_hybridep_pad_uneven_dispatch_inputs/moe_hybridep_pad_variable_tokens": _SAME_NUMBER,
    "fp8": _MULTIPLES,
    "fp4": _MULTIPLES,
    "fine_grained_activation_offloading balance_shape_bucket>1": f"{_UNTRIED} micro-batches are padded to multiples of "
    "the bucket, so that few shapes occur",
}
"""Warned of once: the run balances, and no test has run this on a GPU."""
