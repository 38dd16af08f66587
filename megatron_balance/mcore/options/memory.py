"""Options of memory and graphs: recomputation, offloading, and buffers sized by micro-batch shapes."""

from __future__ import annotations

from megatron_balance.mcore.options.conditions import above, among, both, either, given, negated
from megatron_balance.mcore.options.option import Option, Support

_HAS_BUCKET = above("balance_shape_bucket", 1)

MEMORY = (
    Option(
        names=("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
        also=(
            "cuda_graph_scope",
            "cuda_graph_modules",
            "cuda_graph_warmup_steps",
            "cuda_graph_dynamic_microbatches",
            "delay_offload_until_cuda_graph",
        ),
        case="other than none",
        support=Support.STOCK,
        when=either(
            negated(among("cuda_graph_impl", "none", "None")), given("enable_cuda_graph", "external_cuda_graph")
        ),
        because="CUDA graphs replay fixed shapes, and balanced micro-batches differ in length",
        remedy="drop it to balance",
    ),
    Option(
        names=("recompute_granularity",),
        also=(
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
            "recompute_activations",
            "distribute_saved_activations",
            "moe_layer_recompute",
        ),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("cpu_offloading_num_layers",),
        also=("cpu_offloading_retain_pinned_cpu_buffers",),
        support=Support.REFUSED,
        when=given("cpu_offloading_num_layers"),
        because="its buffers on the host were never tried with micro-batches of changing shapes",
        remedy="use --recompute-granularity",
    ),
    Option(
        names=("fine_grained_activation_offloading",),
        also=(
            "offload_modules",
            "min_offloaded_tensor_size",
            "delta_offload_bytes_across_pp_ranks",
            "activation_offload_fraction",
            "fine_grained_offloading_max_inflight_offloads",
        ),
        case="without --balance-shape-bucket",
        support=Support.REFUSED,
        when=both(given("fine_grained_activation_offloading"), negated(_HAS_BUCKET)),
        because="it keeps pinned buffers for every shape it has seen, and balanced micro-batches have many",
        remedy="add --balance-shape-bucket 1024, so that few shapes occur",
    ),
    Option(
        names=("fine_grained_activation_offloading", "balance_shape_bucket"),
        case="with --balance-shape-bucket",
        support=Support.SUPPORTED,
        when=both(given("fine_grained_activation_offloading"), _HAS_BUCKET),
        caution="it needs a GPU and is not run by the tests; what it relies on is tested: micro-batches are padded to "
        "multiples of the bucket, so that few shapes occur",
    ),
)
