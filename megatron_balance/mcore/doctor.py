"""The checks of `megatron-balance doctor` on one machine: packages, hooks, environment and flags.

Invariants: only imports change this process; every problem names its remedy.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import resource
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata

import torch

from megatron_balance.cost.rates import run_costs, split_advice
from megatron_balance.errors import BalanceError
from megatron_balance.hooking import hooks_of_release, install_hooks
from megatron_balance.mcore.setup.flags import parse_flags
from megatron_balance.mcore.setup.rules import cautions, nothing_balances, problems
from megatron_balance.mcore.setup.settings import logits_caution, logits_nbytes, policy_of, topology_of
from megatron_balance.model.layout import PipelineLayout
from megatron_balance.model.shape import ModelShape
from megatron_balance.runtime.process import device_kind, files_needed, version_of
from megatron_balance.runtime.rendezvous import Finding
from megatron_balance.version import build_version


def check_packages() -> Iterator[Finding]:
    """Check that the packages of a run load, and name their versions."""
    yield Finding(True, f"megatron-balance {build_version()}, Python {platform.python_version()}")
    yield (finding := _loaded("torch", package="torch", remedy="pip install '.[megatron]' in a clone"))
    if not finding.ok:
        return
    from megatron_balance.mcore.hooks import supported_version

    try:
        package = f"megatron-core {supported_version()}"
    except BalanceError as error:
        yield Finding(False, str(error))
    else:
        remedy = "pip install '.[megatron]' in a clone, or set PYTHONPATH to a Megatron-LM checkout"
        yield _loaded("megatron.training", package=package, remedy=remedy)
    # The local attention of Megatron refuses packed sequences; Transformer Engine's takes them.
    if torch.cuda.is_available():
        yield Finding(True, torch.cuda.get_device_name())
        remedy = "GPUs run packed sequences through it: pip install 'transformer-engine[pytorch]'"
        yield _loaded("transformer_engine.pytorch", package="transformer-engine", remedy=remedy)
        with contextlib.suppress(RuntimeError, ValueError):  # torch refuses another one than it was built with
            yield Finding(True, f"cuDNN {torch.backends.cudnn.version()}")
    else:
        yield Finding(True, "no GPU: training needs one, and transformer-engine")


def _loaded(module: str, *, package: str, remedy: str) -> Finding:
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return Finding(False, f"{module} of {package} does not load: {error}; {remedy}")
    return Finding(True, f"{package} {'' if ' ' in package else version_of(package)} loads")


def check_hooks() -> Iterator[Finding]:
    """Each hook, put in place and taken out again; they must not be in place. What some runs alone need is noted."""
    from megatron_balance.mcore.hooks import HOOKS, supported_version

    try:
        version = supported_version()
    except BalanceError as error:
        yield Finding(False, f"no hook applies: {error}")
        return
    for hook in hooks_of_release(HOOKS, version):
        try:
            install_hooks([hook], version=f"megatron-core {version}").close()
            yield Finding(True, f"{hook.target}: {hook.reason}")
        except BalanceError as error:
            scope = f" Runs with {hook.needed} alone need it." if hook.needed else ""
            yield Finding(bool(hook.needed), f"{error}{scope}", is_note=bool(hook.needed))


def check_environment() -> Iterator[Finding]:
    """What a run takes from this machine's limits, environment and metadata (docs/megatron.md has the variables)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding(True, f"open files: {soft}, which a run raises up to {hard} (docs/scale.md has its need)")
    pip = _metadata_version("megatron-core")
    if pip != (imported := version_of("megatron-core")):
        yield Finding(True, f"pip has megatron-core {pip}, {imported} is imported: the second counts", is_note=True)
    cores, num_gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_gpus))
    if cores < 3 * ranks:
        needs = "trains, prepares steps and plans in one thread each, beside loader workers"
        yield Finding(True, f"{cores} CPU cores for {ranks} ranks: a rank {needs}", is_note=True)
    for name, (advice, is_worth_saying) in VARIABLES.items():
        value = os.environ.get(name)
        if is_worth_saying(value):
            yield Finding(True, f"{name} is {value or 'not set'}: {advice}", is_note=True)


def _metadata_version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package).partition("+")[0]
    return None


VARIABLES: dict[str, tuple[str, Callable[[str | None], bool]]] = {
    "MEGATRON_BALANCE": ("no run balances", lambda value: value == "0"),
    "MEGATRON_BALANCE_ANY_VERSION": ("releases that were not tested are allowed", lambda value: value == "1"),
    "TORCH_GLOO_LAZY_INIT": ("all ranks of a group connect when it is made; unset it", lambda value: value == "0"),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": (
        "ranks that torchrun starts again would meet in the store of those before; set it to 1",
        lambda value: value != "1" and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0",
    ),
    "OMP_NUM_THREADS": (
        "the thread that prepares steps takes all cores; set it, to 1 for a start",
        lambda value: value is None and "RANK" in os.environ,
    ),
    "PYTORCH_CUDA_ALLOC_CONF": (
        "lengths that change fragment memory; set expandable_segments:True",
        lambda value: device_kind() == "cuda" and torch.cuda.is_available() and "expandable" not in (value or ""),
    ),
}
"""Of the environment: advice, and when it is given; GLOO_SOCKET_IFNAME is checked where ranks meet."""


def check_flags(flags: Sequence[str]) -> Iterator[Finding]:
    """Check the flags of a training script together, as far as possible before Megatron validates them."""
    try:
        args, unknown = parse_flags(flags, with_megatron=True)
    except BalanceError as error:
        yield Finding(False, f"Megatron's parser refuses: {error} See its --help.")
        return
    except ImportError as error:
        yield Finding(False, f"flags were not read: {error}. Repair megatron-core first, see above.")
        return
    options = vars(args)
    for flag in unknown:
        if "balance" in flag:
            yield Finding(False, f"{flag} is not a known flag")
        elif flag.startswith("--"):
            yield Finding(True, f"{flag} is left to your script: Megatron does not know it")
    refused = problems(options)
    if nothing_balances(options) and not refused:
        yield Finding(True, "no balance flag is set: the run is stock; add --balance-data to balance it")
        return
    broken = [Finding(False, problem) for problem in refused]
    yield from (Finding(True, caution, is_note=True) for caution in cautions(args))
    # A checkpoint's own arguments are read when the run begins.
    if not broken and not args.use_checkpoint_args:
        knows_vocabulary = bool(args.vocab_size)
        args.vocab_size = args.vocab_size or 1  # in a run the tokenizer sets it
        args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        try:
            topology = topology_of(options, shape=lambda: ModelShape.from_megatron_args(args))
            num_files = files_needed(topology.num_sockets)
            yield Finding(True, f"open files: a rank of {args.world_size} (WORLD_SIZE) needs up to {num_files}")
            costs = run_costs(options, topology=topology, shape=lambda: ModelShape.from_megatron_args(args))
            yield from (Finding(True, line) for line in costs.log_lines)
            if costs.attention_rate is not None and knows_vocabulary:
                shape = ModelShape.from_megatron_args(args)
                layout, rate = PipelineLayout.from_options(options, shape=shape), costs.attention_rate
                if advice := split_advice(layout, shape=shape, lengths=[args.seq_length], attention_rate=rate):
                    yield Finding(True, advice, is_note=True)
            nbytes, flag = logits_nbytes(options, topology=topology)
            if nbytes and knows_vocabulary:
                yield Finding(True, f"{flag}: logits take up to {nbytes / 2**30:.2f} GiB in fp32 on the last stage")
                notes = logits_caution(options, topology=topology)
                yield from (Finding(True, note, is_note=True) for note in notes)
        except BalanceError as error:
            broken.append(Finding(False, str(error)))
    if not broken and not args.balance_verify:
        yield Finding(True, "for the first run on a new cluster: --balance-verify compares its first step with stock's")
    yield from broken or [Finding(True, f"{policy_of(options)}: these flags go together")]
