"""Adds the balance flags to Megatron's own.

    --balance                  the flags below that are safe for this run, a cap, and a log line that says why
    --use-dynamic-batch-size   pack what a rank loaded into micro-batches of at most max_tokens_per_gpu*cp_size tokens
    --balance-data             move samples between data-parallel ranks, so that each carries the same cost
    --balance-by-flops         the cost is FLOPs, not tokens, and packing is number partitioning, not first-fit

The three combine; by-flops requires dynamic batching, since it packs.
"""

from __future__ import annotations

import argparse
import inspect
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.options import cautions, problems
from megatron_balance.planner import objective_names

ALL_RANKS = "all"
"""`--balance-context-parallel` without a limit."""

OFF = "off"
"""`--balance-context-parallel off`: the run's own size in every micro-batch, also under `--balance`."""

UNITS = ("segment", "sample")
ALGORITHMS = ("auto", "karmarkar_karp")
REMOVED_FLAGS = {
    "--balance-calibration": "give --balance-cost a file of megatron-balance fit.",
    "--balance-calibrate-online": "record a few steps, and give --balance-cost the file of megatron-balance fit.",
    "--balance-exchange": "samples move between CPUs while the step before runs, as gloo did; drop it.",
    "--balance-lookahead": "use --balance-context-parallel, which gives more and keeps the order of the data.",
    "--balance-memory-gib": "give --max-tokens-per-gpu a number; the log says after a few steps what memory allows.",
}
"""Flags of earlier releases, and what to do instead."""


def add_balance_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags, and check them right after parsing. Use as Megatron's `extra_args_provider`.

    Adding them twice adds them once, so that the hook and the provider can both be in use.
    """
    if "--balance-data" not in parser._option_string_actions:
        add_flags(parser)
        _check_after_parsing(parser)
    return parser


class _Removed(argparse.Action):
    """Refuses a flag of an earlier release: a script whose parser ignores unknown flags would train otherwise."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Names the remedy."""
        parser.error(f"{self.option_strings[0]} is no longer a flag: {REMOVED_FLAGS[self.option_strings[0]]}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags, unchecked."""
    group = parser.add_argument_group(title="balance")
    group.add_argument(
        "--balance",
        action="store_true",
        help="Turn on what is safe for this run: --use-dynamic-batch-size with a cap of a stock micro-batch's tokens, "
        "--balance-data, --balance-by-flops, and --balance-context-parallel where no rule or caution is against it. "
        "Logs each choice and its reason; a flag that is given keeps its value.",
    )
    group.add_argument(
        "--use-dynamic-batch-size",
        action=argparse.BooleanOptionalAction,
        help="Pack the samples of a step into as few micro-batches as fit --max-tokens-per-gpu, in place of "
        "--micro-batch-size samples each.",
    )
    group.add_argument(
        "--max-tokens-per-gpu",
        type=int,
        default=None,
        metavar="TOKENS",
        help="Most tokens of a micro-batch on one GPU; a micro-batch holds this times --context-parallel-size. "
        "A longer sample runs alone. The log says after the first steps what cap the GPU's memory would allow.",
    )
    group.add_argument(
        "--balance-shape-bucket",
        type=int,
        default=1,
        metavar="N",
        help="Pad every micro-batch with masked tokens up to a multiple of N on each GPU, so that fewer shapes occur. "
        "The cap is rounded down to a multiple of it.",
    )
    group.add_argument(
        "--balance-data",
        action=argparse.BooleanOptionalAction,
        help="Move samples between data-parallel ranks within a step, so that every rank carries the same cost.",
    )
    group.add_argument(
        "--balance-context-parallel",
        nargs="?",
        type=context_parallel_limit,
        const=ALL_RANKS,
        default=None,
        metavar="SIZE",
        help="Give each micro-batch a context-parallel size of its own, a power of two up to SIZE or all data- and "
        "context-parallel ranks: many ranks share a long sample, and short ones wait for no exchange. "
        "--context-parallel-size is then the size of evaluation. off: that size everywhere, also under --balance. "
        "Requires --balance-data and --use-dynamic-batch-size.",
    )
    group.add_argument(
        "--balance-by-flops",
        action=argparse.BooleanOptionalAction,
        help="Count FLOPs of this run's model in place of tokens, and pack micro-batches by number partitioning "
        "in place of first-fit. Requires --use-dynamic-batch-size.",
    )
    group.add_argument(
        "--balance-attention-rate",
        type=positive_rate,
        default=None,
        metavar="RATE",
        help="Rate at which GPUs run attention over that of all else, for --balance-by-flops; 1 counts plain FLOPs. "
        "Without it, what loses least over the published GPUs for the run's precision and kind of model: the log "
        "says it.",
    )
    group.add_argument(
        "--balance-cost",
        metavar="FILE",
        default=None,
        help="Count the seconds of a seconds.json (megatron-balance fit), not FLOPs. Refines --balance-by-flops.",
    )
    group.add_argument(
        "--balance-objective",
        choices=objective_names(),
        default="auto",
        help="When ranks wait for each other: once a step, in every micro-batch (expert parallelism, FSDP), or in "
        "a pipeline. auto reads it from the parallel sizes.",
    )
    group.add_argument(
        "--balance-algorithm",
        choices=ALGORITHMS,
        default="auto",
        help="auto: level packing. karmarkar_karp: largest differencing over ranks, then over their micro-batches.",
    )
    group.add_argument(
        "--balance-unit",
        choices=UNITS,
        default="segment",
        help="What moves where a row holds several packed sequences: each by itself, or the row as a whole.",
    )
    group.add_argument(
        "--balance-unpad",
        type=padding_source,
        default=None,
        metavar="PADDING",
        help="Take rows without cu_seqlens as samples of their true length and pack them: PADDING is the token id that "
        "rows are filled up with at their end, or attention_mask where the data has one. The model is called with "
        "packed_seq_params.",
    )
    group.add_argument(
        "--balance-evaluation",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Pack and move the samples of evaluation too; its loss is then the sum over tokens divided by tokens. "
        "Without either flag: where Megatron divides sums as well, so not under --sft, where it averages means.",
    )
    group.add_argument(
        "--balance-load-every-stage",
        action=argparse.BooleanOptionalAction,
        help="Load and move data on every pipeline stage, or on the first and last alone; the others then know where "
        "sequences start and nothing else. Without this flag every stage does, unless the run uses Megatron's own "
        "get_batch for packed data, which reads no more there: --sft or --dataloader-inter-document-masking.",
    )
    group.add_argument(
        "--no-balance-overlap",
        action="store_false",
        dest="balance_overlap",
        help="Fetch, plan and move a step's samples when it begins, not while the step before runs.",
    )
    group.add_argument(
        "--balance-record",
        metavar="DIR",
        default=None,
        help="Write every step's lengths, plan and measured seconds to this folder, for megatron-balance report and "
        "compare. A run that begins anew replaces the record there; a resumed one goes on with it.",
    )
    for flag in REMOVED_FLAGS:
        group.add_argument(flag, nargs="?", action=_Removed, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


def context_parallel_limit(text: str) -> int | str:
    """The value of `--balance-context-parallel`, for argparse.

    Raises:
        argparse.ArgumentTypeError: it is no number of ranks.
    """
    if text in (ALL_RANKS, OFF):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks: give a power of two, or none for all ranks")
    return int(text)


def positive_rate(text: str) -> float:
    """The value of `--balance-attention-rate`, for argparse.

    Raises:
        argparse.ArgumentTypeError: it is no number above 0.
    """
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate: give a number above 0, 1 for FLOPs")
    return rate


def padding_source(text: str) -> int | str:
    """The value of `--balance-unpad`, for argparse: a token id, or `attention_mask`.

    Raises:
        argparse.ArgumentTypeError: it is neither.

    Example:
        >>> padding_source("attention_mask"), padding_source("0")
        ('attention_mask', 0)
    """
    if text == "attention_mask" or text.isdecimal():
        return int(text) if text.isdecimal() else text
    raise argparse.ArgumentTypeError(f"{text!r} is neither a token id nor 'attention_mask'")


def _check_after_parsing(parser: argparse.ArgumentParser) -> None:
    """Have this parser fill in what --balance leaves open, and refuse flags that cannot work together."""
    parse_known_args = parser.parse_known_args

    def checked(args: Sequence[str] | None = None, namespace: Any = None, **rest: Any) -> tuple[Any, list[str]]:
        parsed, unknown = parse_known_args(args, namespace, **rest)
        fill_in(parsed, options=vars(parsed))
        refuse(vars(parsed))
        return parsed, unknown

    parser.parse_known_args = checked  # type: ignore[method-assign]


def refuse(options: Mapping[str, Any]) -> None:
    """Raise the first refusal of these options (`options/`).

    Raises:
        BalanceError: it names the option, the value and the remedy.
    """
    for problem in problems(options):
        raise BalanceError(problem)


def parse_command_line(flags: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the flags of a training script outside a run, with Megatron's own parser; neither validated nor checked.

    Returns:
        Megatron's namespace with the balance flags, and what is neither Megatron's nor this package's.

    Raises:
        BalanceError: a flag's value is missing or wrong.
    """
    from megatron.training.arguments import add_megatron_arguments

    parser = _OneLineParser(allow_abbrev=False, add_help=False)
    # Megatron's own function: a hook in its place would refuse flags that are only read here.
    add_flags(inspect.unwrap(add_megatron_arguments)(parser))
    args, unknown = parser.parse_known_args(list(flags))
    fill_in(args, options=vars(args))
    return args, unknown


def parse_balance_flags(flags: Sequence[str]) -> argparse.Namespace:
    """Read the balance flags alone, where no script has parsed Megatron's; unchecked.

    Raises:
        BalanceError: a flag is not one of this package, or its value is wrong.
    """
    parser = _OneLineParser(allow_abbrev=False, add_help=False)
    add_flags(parser)
    return parser.parse_args(list(flags))


class _OneLineParser(argparse.ArgumentParser):
    """Raises argparse's error message instead of printing it below the usage."""

    def error(self, message: str) -> NoReturn:
        raise BalanceError(f"{message}.")


def fill_in(flags: argparse.Namespace, *, options: Mapping[str, Any]) -> None:
    """Set what `--balance` leaves open, and note in `flags.balance_choices` each choice and its reason.

    A flag that was given keeps its value. What is filled in follows from the command line and the installed releases
    alone, so that all ranks choose the same.

    Args:
        flags: the balance flags, just parsed.
        options: Megatron's options by name; a view in which these flags show.
    """
    choices: list[str] = []
    flags.balance_choices = choices
    sizes_are_open = flags.balance_context_parallel is None
    if flags.balance_context_parallel == OFF:
        flags.balance_context_parallel = None
    if not flags.balance:
        return

    def choose(name: str, value: object, reason: str) -> None:
        if getattr(flags, name) is None:
            setattr(flags, name, value)
            flag = f"--{name.replace('_', '-')}"
            choices.append(f"{flag if value is True else f'{flag} {value}'} ({reason})")

    choose("use_dynamic_batch_size", True, "samples share micro-batches, and padding is not computed")
    choose("balance_data", True, "samples move to ranks that would wait")
    if flags.use_dynamic_batch_size:
        # The tokens of a stock micro-batch are known to fit. Lengths may come later.
        rows, tokens = options.get("micro_batch_size") or 1, options.get("seq_length")
        cp_size = options.get("context_parallel_size") or 1
        if tokens:
            reason = f"as a stock micro-batch: --micro-batch-size {rows} times --seq-length {tokens}"
            reason += f" over {cp_size} context-parallel ranks" if cp_size > 1 else ""
            choose("max_tokens_per_gpu", -(-rows * tokens // cp_size), reason)
        choose("balance_by_flops", True, "attention grows with the square of a sample's length")
    if flags.use_dynamic_batch_size and flags.balance_data and sizes_are_open:
        trial = ChainMap({"balance_context_parallel": ALL_RANKS}, dict(options))
        known = {*problems(options), *cautions(options)}
        # That no test runs Transformer Engine on several GPUs is said in the log, and is no reason against it.
        against = [message for message in (*problems(trial), *cautions(trial, untried=False)) if message not in known]
        if against:
            choices.append(f"no --balance-context-parallel ({against[0].rstrip('.')})")
        else:
            choose("balance_context_parallel", ALL_RANKS, "many ranks share a long sample, short ones exchange less")
