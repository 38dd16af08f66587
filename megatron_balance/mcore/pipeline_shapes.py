"""The shapes of a step's pipeline messages, taken from the plan.

Where sequence lengths vary, Megatron's stages send the shape of every activation and gradient ahead of it, and the host
waits for it. Every rank of a replica knows the tokens of each micro-batch beforehand, and Megatron's schedule table
gives the order of the messages. A tensor of another shape than planned is an error of its sender, before it is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import patched_attrs
from megatron_balance.mcore.prepare import MicrobatchSizes
from megatron_balance.topology import Topology

Shape = list[int]

_NO_MESSAGE = (0, 0, 0)
"""The shape that Megatron's own exchange returns where nothing is received."""


class PipelineShapes:
    """The shapes of the messages of one step on one pipeline stage, in the order in which they are sent and received.

    Every virtual micro-batch passes on to the next stage, between the last stage and the first only those with a chunk
    left to run. `order` is Megatron's `get_schedule_table`: `(micro-batch, chunk)` of each virtual one.
    """

    def __init__(
        self,
        sizes: MicrobatchSizes,
        *,
        order: Sequence[tuple[int, int]],
        topology: Topology,
        stage: int,
        hidden_size: int,
    ) -> None:
        sp_size = topology.tp_size if topology.sequence_parallel else 1
        shapes = [
            [tokens // (cp_size * sp_size), 1, hidden_size]
            for tokens, cp_size in zip(sizes.num_tokens, sizes.cp_sizes, strict=True)
        ]
        messages = [shapes[microbatch] for microbatch, _ in order]
        wrapped = [shapes[microbatch] for microbatch, chunk in order if chunk > 0]
        from_previous = wrapped if stage == 0 else messages
        to_next = wrapped if stage == topology.pp_size - 1 else messages
        self._stage = stage
        self._activations_in, self._gradients_out = iter(from_previous), iter(from_previous)
        self._activations_out, self._gradients_in = iter(to_next), iter(to_next)

    def exchange(
        self, activation: Any, gradient: Any, receives_activation: bool, receives_gradient: bool
    ) -> tuple[Shape, Shape]:
        """Answer one `P2PCommunicator._communicate_shapes`: shapes of the activation and the gradient received."""
        self._check(activation, self._activations_out, kind="an activation")
        self._check(gradient, self._gradients_out, kind="a gradient")
        # A message that is not in the plan is an error of the stage that sends it.
        from_previous = next(self._activations_in, _NO_MESSAGE) if receives_activation else _NO_MESSAGE
        from_next = next(self._gradients_in, _NO_MESSAGE) if receives_gradient else _NO_MESSAGE
        return list(from_previous), list(from_next)

    def _check(self, tensor: Any, messages: Iterator[Shape], *, kind: str) -> None:
        if tensor is not None and list(tensor.shape) != (planned := next(messages, "nothing")):
            raise BalanceError(
                f"Pipeline stage {self._stage} would send {kind} of shape {list(tensor.shape)} where the plan says "
                f"{planned}. Stages must pass on one tensor a micro-batch, [tokens of this rank, 1, hidden size]: "
                "train this model without --balance-data and --use-dynamic-batch-size, or with "
                "--pipeline-model-parallel-size 1."
            )


def planned_shapes(
    sizes: MicrobatchSizes, *, topology: Topology, arguments: Mapping[str, Any]
) -> PipelineShapes | None:
    """The shapes of a step's messages, by the arguments of its schedule; None where stages exchange them as in stock.

    They do with multi-token prediction on its own stage, hyper-connections, or a caller's own communicator or shapes.
    """
    if topology.pp_size == 1:
        return None
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    config = _configs(arguments["model"])[0]
    if (
        config.mtp_standalone
        or getattr(config, "enable_hyper_connections", False)
        or arguments.get("p2p_communicator") is not None
        or arguments.get("adjust_tensor_shapes_fn") is not None
    ):
        return None
    stage: Any = parallel_state.get_pipeline_model_parallel_rank()
    return PipelineShapes(
        sizes,
        order=get_schedule_table(len(sizes.num_tokens), topology.vpp_size, topology.microbatch_multiple),
        topology=topology,
        stage=stage,
        hidden_size=config.hidden_size,
    )


@contextlib.contextmanager
def variable_seq_lengths(model: Any) -> Iterator[None]:
    """Have the chunks of a model ask for the shape of every message; validate_args forces this off."""
    with contextlib.ExitStack() as stack:
        for config in _configs(model):
            stack.enter_context(patched_attrs(config, variable_seq_lengths=True))
        yield


def _configs(model: Any) -> list[Any]:
    from megatron.core.utils import get_model_config

    return [get_model_config(chunk) for chunk in (model if isinstance(model, list) else [model])]
