"""Memory and graphs: what is sized by the shapes of micro-batches."""

from __future__ import annotations

from megatron_balance.mcore.options.conditions import among, either, given, negated
from megatron_balance.mcore.options.option import Option, Support

MEMORY = (
    Option(
        names=("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
        case="other than none",
        support=Support.STOCK,
        when=either(
            negated(among("cuda_graph_impl", "none", "None")), given("enable_cuda_graph", "external_cuda_graph")
        ),
        because="CUDA graphs replay fixed shapes, and balanced micro-batches differ in length",
        remedy="drop it to balance",
    ),
)
