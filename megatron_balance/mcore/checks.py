"""The checks of `megatron-balance doctor` on one machine: packages, hooks, flags.

Invariants: only imports change this process; every problem names its remedy.
"""

from __future__ import annotations

import difflib
import importlib
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_balance import __version__
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.options import (
    cautions,
    executor_runs_our_plan,
    nothing_balances,
    problems,
    stock_notice,
    why_stock,
)
from megatron_balance.mcore.setup.flags import parse_command_line
from megatron_balance.mcore.setup.settings import costs_of_args, policy_of


@dataclass(frozen=True)
class Finding:
    """One line of the report: a check that passed or not, and the remedy where it did not."""

    ok: bool
    says: str


def check_packages() -> Iterator[Finding]:
    """Check that the packages of a run load, and name their versions."""
    yield Finding(True, f"megatron-balance {__version__}, Python {platform.python_version()}")
    try:
        import torch

        from megatron_balance.runtime.process import environment
    except ImportError as error:
        yield Finding(False, f"torch: {error}. Install it: pip install 'megatron-balance[megatron]'")
        return
    has_gpu = torch.cuda.is_available()
    hardware = environment("cuda" if has_gpu else "cpu")
    where = hardware["device"] if has_gpu else f"no GPU ({hardware['device']}): training needs one"
    yield Finding(True, f"torch {torch.__version__}, {where}")
    yield _megatron()
    versions = hardware["versions"]
    # The local attention of Megatron refuses packed sequences; Transformer Engine's takes them.
    without = "GPUs run packed sequences through it: pip install 'transformer-engine[pytorch]'"
    yield _optional("transformer-engine", "transformer_engine.pytorch", versions, needed=has_gpu, without=without)
    without = "without it and Transformer Engine add --no-gradient-accumulation-fusion"
    yield _optional("apex", "apex", versions, needed=False, without=without)


def _megatron() -> Finding:
    from megatron_balance.mcore.hooks import supported_version

    try:
        version = supported_version()
        importlib.import_module("megatron.training")
    except BalanceError as error:
        return Finding(False, str(error))
    except ImportError as error:
        return Finding(
            False,
            f"megatron.training does not load: {error}. Its wheel holds it with the extra [training]: pip install "
            "'megatron-balance[megatron]', or set PYTHONPATH to a Megatron-LM checkout.",
        )
    # After the + Megatron puts the commit of the repository that this process was started in.
    return Finding(True, f"megatron-core {version.partition('+')[0]}, with megatron.training")


def _optional(name: str, module: str, versions: dict[str, str], *, needed: bool, without: str) -> Finding:
    """A package that only some runs need; `without` says what to do without it."""
    version = versions.get(name)
    if version is None:
        return Finding(not needed, f"{name} is not installed; {without}")
    if needed:
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:
            return Finding(False, f"{name} {version} does not load: {error}. Build it for this torch: {without}")
    return Finding(True, f"{name} {version}")


def check_hooks() -> Iterator[Finding]:
    """Each hook by itself, put in place and taken out again. The package's own must not be in place."""
    from megatron_balance.hooking.patches import install
    from megatron_balance.mcore.hooks import hooks_of, supported_version
    from megatron_balance.mcore.packing_scheduler import NAME, SEAM, register

    try:
        version = supported_version()
    except BalanceError as error:
        yield Finding(False, f"no hook applies: {error}")
        return
    for hook in hooks_of(version):
        try:
            install([hook], version=f"megatron-core {version}").undo()
        except BalanceError as error:
            yield Finding(False, str(error))
        else:
            yield Finding(True, f"{hook.target}: {hook.why}")
    registration = register()
    if registration is not None:
        registration.undo()
        yield Finding(True, f"{SEAM}: sequence_packing_scheduler may be {NAME!r}")


def check_flags(flags: Sequence[str]) -> Iterator[Finding]:
    """Check the flags of a training script together, as far as possible before Megatron validates them."""
    try:
        args, unknown = parse_command_line(flags)
    except BalanceError as error:
        yield Finding(False, f"Megatron's parser refuses: {error} See its --help.")
        return
    except ImportError as error:
        yield Finding(False, f"flags were not read: {error}. Repair megatron-core first, see above.")
        return
    options = vars(args)
    yield from _unknown(unknown, known=[name.replace("_", "-") for name in options])
    refused = problems(options)
    if nothing_balances(options) and not refused:
        yield Finding(True, "no flag asks for balancing: the run is stock; add --balance-data to balance it")
        return
    broken = [Finding(False, problem) for problem in refused]
    reason = why_stock(args)
    if reason is not None and executor_runs_our_plan(options):
        yield Finding(True, stock_notice(options, reason=reason))
    elif reason is not None:
        broken.append(Finding(False, f"the run would stay stock: {reason}"))
    yield from (Finding(True, caution) for caution in cautions(args))
    # A checkpoint's own arguments are read when the run begins.
    if not broken and not args.use_checkpoint_args:
        args.vocab_size = args.vocab_size or 1  # in a run the tokenizer sets it
        try:
            costs_of_args(args)
        except BalanceError as error:
            broken.append(Finding(False, str(error)))
    yield from broken or [Finding(True, f"{policy_of(options)}: these flags go together")]


def _unknown(unknown: Sequence[str], *, known: Sequence[str]) -> Iterator[Finding]:
    """Unknown flags: a misspelt balance flag is a problem, others belong to the script."""
    for flag in unknown:
        if not flag.startswith("--"):
            continue
        name = flag.removeprefix("--").split("=")[0]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if near:
            yield Finding(False, f"{flag} is no flag of Megatron or this package: did you mean --{near[0]}?")
        elif "balance" in name:
            yield Finding(False, f"{flag} is no flag of Megatron or this package")
        else:
            yield Finding(True, f"{flag} is left to your script: Megatron does not know it")
