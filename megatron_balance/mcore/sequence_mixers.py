"""Switches attention, delta nets and Mamba to the context-parallel group of the micro-batch that runs.

They read it from what they were built with; PackedSeqParams carry the group to attention kernels alone. A hook of each
module's forward enters the context, also when its activations are recomputed. Autograd functions keep
the group that they ran in.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import Function, Hook, patched_attrs
from megatron_balance.mcore.microbatch import RunningStep as Step
from megatron_balance.mcore.run import in_step


def attention(module: Any, group: dist.ProcessGroup) -> AbstractContextManager[None]:
    """Grouped-query attention: rotary angles are those of the rank's chunks."""
    _name_comm_type(module)
    return patched_attrs(module, pg_collection=_groups(module, group))


def latent_attention(module: Any, group: dist.ProcessGroup) -> AbstractContextManager[None]:
    """Multi-latent attention: it cuts rotary angles to its own tokens where the configuration has one rank."""
    _name_comm_type(module)
    config = copy.copy(module.config)
    config.context_parallel_size = group.size()
    return patched_attrs(module, config=config, pg_collection=_groups(module, group))


@contextlib.contextmanager
def sparse_attention(module: Any, group: dist.ProcessGroup) -> Iterator[None]:
    """The core of sparse attention, which gathers keys, and the indexer that picks them, in layers that have one."""
    with contextlib.ExitStack() as stack:
        # The only kind that it knows; layers name it only where the static group has several ranks.
        stack.enter_context(patched_attrs(module, pg_collection=_groups(module, group), cp_comm_type="allgather"))
        if module.indexer is not None:
            stack.enter_context(patched_attrs(module.indexer, pg_collection=_groups(module.indexer, group)))
        yield


def delta_net(module: Any, group: dist.ProcessGroup) -> AbstractContextManager[None]:
    """Gated delta net: it exchanges heads, and splits its projection by widths that were fixed when it was built."""
    size, widths = group.size(), getattr(module, "feat_dim_split", ())
    widths = tuple(width * module.cp_size // size for width in widths)
    return patched_attrs(module, pg_collection=_groups(module, group), cp_size=size, feat_dim_split=widths)


def mamba(module: Any, group: dist.ProcessGroup) -> AbstractContextManager[None]:
    """Mamba: the object that exchanges heads, and slices its parameters by them, is built anew."""
    exchange = module.cp
    sizes = {name: getattr(exchange, name) for name in inspect.signature(type(exchange)).parameters}
    return patched_attrs(module, cp=type(exchange)(**sizes | {"cp_group": group}))


@contextlib.contextmanager
def prediction_depths(module: Any, group: dist.ProcessGroup) -> Iterator[None]:
    """Depths of multi-token prediction: they shift tokens past the ends of a rank's chunks."""
    with contextlib.ExitStack() as stack:
        for reader in (module, *module.layers):
            stack.enter_context(patched_attrs(reader, cp_group=group))
        yield


def check_sequence_bounds(mixer: Any, states: Any, packed_seq_params: Any) -> None:
    """Raise BalanceError where packed sequences come to a Mamba layer without their bounds."""
    if packed_seq_params is None:
        return
    shards = mixer.tp_group.size() if mixer.config.sequence_parallel else 1
    num_tokens = states.shape[0] * shards * mixer.cp.cp_size
    seq_idx = getattr(packed_seq_params, "seq_idx", None)
    if seq_idx is None or seq_idx.shape[-1] != num_tokens:
        bounds = "none" if seq_idx is None else f"of {seq_idx.shape[-1]} tokens"
        raise BalanceError(
            f"PackedSeqParams.seq_idx is {bounds} for a micro-batch of {num_tokens} tokens: a Mamba layer would pass "
            "its state from one sequence to the next. Give PackedSeqParams total_tokens, the tokens of the micro-batch "
            "over all context-parallel ranks, or make it by mcore.packed_seq_params."
        )


def _name_comm_type(module: Any) -> None:
    """Tell the kernel `--cp-comm-type`: layers do so only where the static group has several ranks.

    It stays, for a kernel that recomputation calls alone.
    """
    comm_type = module.config.cp_comm_type
    if isinstance(comm_type, list):
        comm_type = comm_type[module.layer_number - 1]
    if comm_type is not None and hasattr(module.core_attention, "cp_comm_type"):
        module.core_attention.cp_comm_type = comm_type


def _groups(module: Any, group: dist.ProcessGroup) -> Any:
    groups = copy.copy(module.pg_collection)  # modules share theirs
    groups.cp = group
    return groups


Switch = Callable[[Any, dist.ProcessGroup], AbstractContextManager[None]]

_ABSORBED = "transformer.experimental_attention_variant.absorbed_mla:AbsorbedMLASelfAttention"

_LATENT_SELF_ATTENTION = (
    ("transformer.multi_latent_attention:MLASelfAttention", "multi_latent_attention"),
    (_ABSORBED, ":dsa"),
)
"""Classes below `megatron.core` that make latent queries and keys, and the options that need a hook there."""

_SWITCHES: tuple[tuple[str, Switch, str], ...] = (
    ("transformer.attention:Attention", attention, ""),
    ("transformer.multi_latent_attention:MultiLatentAttention", latent_attention, "multi_latent_attention"),
    (_ABSORBED, latent_attention, ":dsa"),
    ("transformer.experimental_attention_variant.dsa:DSAttention", sparse_attention, ":dsa"),
    ("ssm.gated_delta_net.gdn:GatedDeltaNet", delta_net, ":delta_net"),
    ("transformer.multi_token_prediction:MultiTokenPredictionBlock", prediction_depths, "mtp_num_layers"),
)
"""Classes below `megatron.core`, how their forward is switched, and the options that need it; Mamba has more to do."""


def group_of(step: Step, keywords: dict[str, Any]) -> Any:
    """The context-parallel group of a micro-batch, by its params, where modules were built with another one."""
    return None if step.cp_groups is None else step.cp_groups.group_of(keywords.get("packed_seq_params"))


def in_own_group(switch: Callable[[Any, Any, Any], AbstractContextManager[None]]) -> Callable[[Function], Function]:
    """A module's forward in the context-parallel group of its micro-batch: `switch(step.cp_groups, module, group)`."""

    def forward_in_group(step: Step, forward: Function, module: Any, *positional: Any, **keywords: Any) -> Any:
        group = group_of(step, keywords)
        with contextlib.nullcontext() if group is None else switch(step.cp_groups, module, group):
            return forward(module, *positional, **keywords)

    return in_step(forward_in_group)


def _latent_tensors(step: Step, get: Function, attention: Any, *positional: Any, **keywords: Any) -> Any:
    """They assert that params name no size; the module reads the group of the micro-batch by now."""
    call = inspect.signature(get).bind(attention, *positional, **keywords)
    params = call.arguments.get("packed_seq_params")
    with contextlib.nullcontext() if params is None else patched_attrs(params, local_cp_size=None):
        return get(*call.args, **call.kwargs)


def _mixer_forward(step: Step, forward: Function, mixer: Any, states: Any, *positional: Any, **keywords: Any) -> Any:
    group = group_of(step, keywords)
    with contextlib.nullcontext() if group is None else mamba(mixer, group):
        check_sequence_bounds(mixer, states, keywords.get("packed_seq_params"))
        return forward(mixer, states, *positional, **keywords)


HOOKS = (
    *(
        Hook(
            target=f"megatron.core.{module}.forward",
            parameters=("packed_seq_params",),
            wrap=in_own_group(lambda _, module, group, switch=switch: switch(module, group)),
            reason="reads the static context-parallel group, whatever group the packed sequences name",
            # Until a release takes the group from packed_seq_params, as Megatron's dev branch does in most of them.
            needed=f"balance_dynamic_cp {needed}".strip(),
            first="0.19",
        )
        for module, switch, needed in _SWITCHES
    ),
    *(
        Hook(
            target=f"megatron.core.{module}.get_query_key_value_tensors",
            parameters=("packed_seq_params",),
            wrap=in_step(_latent_tensors),
            reason="refuses packed sequences that name a context-parallel size",
            # Until a release drops the assertion, as Megatron's dev branch does.
            needed=f"balance_dynamic_cp {needed}",
            first="0.19",
        )
        for module, needed in _LATENT_SELF_ATTENTION
    ),
    Hook(
        target="megatron.core.ssm.mamba_mixer:MambaMixer.forward",
        parameters=("hidden_states", "packed_seq_params"),
        wrap=in_step(_mixer_forward),
        reason="without seq_idx, which scripts forget, its scan takes all packed sequences for one and says nothing; "
        "its heads are exchanged in the static context-parallel group",
        # Until Megatron makes seq_idx wherever a Mamba layer gets packed sequences, and takes the group from these.
        needed=":mamba",
        first="0.19",
    ),
)
"""The hooks of these modules."""
