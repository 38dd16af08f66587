"""Options of evaluation: its data sets, batch sizes, and runs that only evaluate."""

from __future__ import annotations

from typing import Any

from megatron_balance.mcore.options.conditions import above, both, given, negated
from megatron_balance.mcore.options.option import Option, Support

_DOCUMENTS = both(given("dataloader_inter_document_masking"), negated(given("sft")))

_VIRTUAL_PIPELINE = given(
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size",  # validation sets it, from a pipeline layout too
)


def _evaluates_as_stock(args: Any) -> bool:
    return args.balance_evaluation is False or args.balance_context_parallel is not None


EVALUATION = (
    Option(
        names=("full_validation", "multiple_validation_sets"),
        also=("validation_set_names",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("multiple_validation_sets", "num_layers_per_virtual_pipeline_stage"),
        case="with a virtual pipeline",
        support=Support.REFUSED,
        when=both(given("multiple_validation_sets"), _VIRTUAL_PIPELINE),
        because="Megatron's loop then gives each model chunk the rows of another set",
        remedy="drop one of them",
    ),
    Option(
        names=("full_validation", "dataloader_inter_document_masking", "pipeline_model_parallel_size"),
        case="with --dataloader-inter-document-masking and --pipeline-model-parallel-size above 2",
        support=Support.REFUSED,
        when=both(given("full_validation"), _DOCUMENTS, above("pipeline_model_parallel_size", 2)),
        because="every stage counts the rows of its data sets, and Megatron's scripts give stages in between none",
        remedy="drop --full-validation, or set --pipeline-model-parallel-size 2",
        first=(0, 19),
    ),
    Option(
        names=("eval_global_batch_size", "eval_micro_batch_size"),
        support=Support.SUPPORTED,
        first=(0, 18),
    ),
    Option(
        names=("skip_train",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("dataloader_inter_document_masking", "context_parallel_size", "eval_iters"),
        case="evaluated as by stock (--no-balance-evaluation), with --context-parallel-size above 1",
        support=Support.SUPPORTED,
        when=both(_DOCUMENTS, above("context_parallel_size", 1), above("eval_iters", 0), _evaluates_as_stock),
        caution="Megatron's scripts split its rows as a whole, while attention goes by document: it fails or is wrong, "
        "as without --balance-*; set --eval-iters 0",
        first=(0, 19),
    ),
    Option(
        names=("dataloader_inter_document_masking", "pipeline_model_parallel_size", "eval_iters"),
        case="above 2, evaluated as by stock (--no-balance-evaluation)",
        support=Support.REFUSED,
        when=both(_DOCUMENTS, above("pipeline_model_parallel_size", 2), above("eval_iters", 0), _evaluates_as_stock),
        because="Megatron's scripts give stages in between no data, and stock evaluation asks for it",
        remedy="set --eval-iters 0, or evaluate balanced",
        first=(0, 19),
    ),
)
