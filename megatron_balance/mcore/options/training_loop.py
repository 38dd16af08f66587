"""Options of the training loop and its data: order and form of batches, and resuming."""

from __future__ import annotations

from megatron_balance.mcore.options.conditions import above, among, both, either, given, negated
from megatron_balance.mcore.options.option import Option, Support

_DOCUMENTS = both(given("dataloader_inter_document_masking"), negated(given("sft")))

_EVERY_STAGE_LOADS = either(
    given("balance_load_every_stage"),
    both(given("mtp_num_layers"), given("pipeline_model_parallel_layout")),
)

TRAINING_LOOP = (
    Option(
        names=("calculate_per_token_loss",),
        case="not set",
        support=Support.REFUSED,
        when=negated(given("calculate_per_token_loss")),
        because="balancing changes which samples share a micro-batch, and loss and gradients would depend on it",
        remedy="add --calculate-per-token-loss",
    ),
    Option(
        names=("rampup_batch_size", "step_batch_size_schedule"),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("iterations_to_skip",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("phase_transition_iterations",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("async_save",),
        also=("async_strategy", "use_persistent_ckpt_worker"),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("dataloader_save",),
        case="of scripts with loaders that save a state",
        support=Support.REFUSED,
        when=given("dataloader_save"),
        because="balancing pulls the next step's items ahead, which the loader's own state would count as trained, and "
        "a resumed run would skip them",
        remedy="drop it, or the balance flags",
        of_scripts=True,
    ),
    Option(
        names=("dataloader_type",),
        case="single or cyclic",
        support=Support.SUPPORTED,
    ),
    Option(
        names=("dataloader_type",),
        case="external",
        support=Support.SUPPORTED,
        when=among("dataloader_type", "external"),
        caution="items are pulled one step ahead; a loader that saves a state of its own must count trained items, not "
        "pulled ones",
    ),
    Option(
        names=("reset_attention_mask", "reset_position_ids"),
        case="without --sft or --dataloader-inter-document-masking",
        support=Support.REFUSED,
        when=both(
            given("reset_attention_mask", "reset_position_ids"),
            negated(given("sft", "dataloader_inter_document_masking")),
        ),
        because="it separates documents by a mask or by positions, and the data has no cu_seqlens to balance by",
        remedy="set --dataloader-inter-document-masking in its place (from 0.19)",
    ),
    Option(
        names=("dataloader_inter_document_masking",),
        support=Support.SUPPORTED,
        first=(0, 19),
    ),
    Option(
        names=("dataloader_inter_document_masking", "pipeline_model_parallel_size"),
        case="with --pipeline-model-parallel-size above 2",
        support=Support.SUPPORTED,
        first=(0, 19),
    ),
    Option(
        names=("dataloader_inter_document_masking", "pipeline_model_parallel_size"),
        case="above 2, where stages in between load (--balance-load-every-stage, "
        "--mtp-num-layers with --pipeline-model-parallel-layout)",
        support=Support.REFUSED,
        when=both(_DOCUMENTS, above("pipeline_model_parallel_size", 2), _EVERY_STAGE_LOADS),
        because="Megatron's scripts give these stages no data",
        remedy="leave these out, or set --pipeline-model-parallel-size 2, or train on --sft data",
        first=(0, 19),
    ),
    Option(
        names=("use_varlen_dataset",),
        also=("varlen_sbhd_validation", "varlen_mock_dataset_config_json"),
        case="of Megatron's dev branch",
        support=Support.REFUSED,
        when=given("use_varlen_dataset"),
        because="no test here reads its rows",
        remedy="train with --sft",
        first=(0, 20),
    ),
    Option(
        names=("sft",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("rerun_mode",),
        also=("error_injection_rate", "error_injection_type"),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("check_for_spiky_loss",),
        support=Support.SUPPORTED,
        when=given("check_for_spiky_loss"),
        caution="spikes are judged micro-batch by micro-batch, and balanced ones hold other samples",
    ),
    Option(
        names=("inprocess_restart",),
        support=Support.REFUSED,
        when=given("inprocess_restart"),
        because="process groups and threads of this package do not survive a restart within the process",
        remedy="restart processes (torchrun --max-restarts)",
    ),
    Option(
        names=("perform_rl_step",),
        also=("rl_use_sequence_packing",),
        support=Support.REFUSED,
        when=given("perform_rl_step"),
        because="Megatron's RL loop makes its own iterator, and packs and deals out its rollouts itself",
        remedy="use the adapters for RL systems, or drop the balance flags",
    ),
    Option(
        names=("logits_save_dir", "logits_load_dir"),
        support=Support.REFUSED,
        when=given("logits_save_dir", "logits_load_dir"),
        because="logits are kept by the order of samples, which balancing changes",
        remedy="drop it, or the balance flags",
        first=(0, 19),
    ),
    Option(
        names=("export_kd_teacher_load",),
        case="of scripts that distil with ModelOpt",
        support=Support.REFUSED,
        when=given("export_kd_teacher_load"),
        because="pipeline messages of student and teacher are sized from --seq-length",
        remedy="drop it, or the balance flags",
        of_scripts=True,
    ),
    Option(
        names=("yaml_cfg",),
        support=Support.REFUSED,
        when=given("yaml_cfg"),
        because="the file replaces every option, the balance flags among them",
        remedy="give the options as flags",
    ),
)
