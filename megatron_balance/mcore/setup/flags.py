"""Adds the balance flags to Megatron's own, checks them, and fills in what `--balance` leaves open (docs/flags.md)."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from megatron_balance.errors import BalanceError, RefusedError
from megatron_balance.hooking import is_off
from megatron_balance.mcore.setup.rules import flag_text, problems

ALL_RANKS = "all"
"""`--balance-dynamic-cp` without a largest size."""


def add_balance_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags, and check them right after parsing. Use as Megatron's `extra_args_provider`.

    Adding them twice adds them once, so that the hook and the provider can both be in use.
    """
    if "--balance-data" in parser._option_string_actions:
        return parser
    _add_flags(parser)
    parse_known_args = parser.parse_known_args

    def checked(args: Sequence[str] | None = None, namespace: Any = None, **keywords: Any) -> tuple[Any, list[str]]:
        parsed, unknown = parse_known_args(args, namespace, **keywords)
        if not is_off("Megatron"):
            fill_in(parsed, options=vars(parsed))
            refuse(vars(parsed))
        return parsed, unknown

    parser.parse_known_args = checked  # type: ignore[method-assign]
    return parser


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(title="balance").add_argument
    on_or_off = argparse.BooleanOptionalAction
    add(
        "--balance",
        action="store_true",
        help="Enable packing under a stock micro-batch's tokens, moving samples and FLOPs as costs, "
        "each unless it is given, and nothing else. The log names what it sets.",
    )
    add(
        "--use-dynamic-batch-size",
        action=on_or_off,
        help="Pack the samples of a step into as few micro-batches as fit --max-tokens-per-gpu.",
    )
    add(
        "--max-tokens-per-gpu",
        type=_word_or_number("auto", is_valid=lambda _: True, error="neither auto nor a number of tokens"),
        metavar="TOKENS|auto",
        help="Most tokens of a micro-batch on one GPU, over --context-parallel-size; a longer sample runs alone. auto: "
        "those of a stock micro-batch, raised in the first ten steps by what devices report, to nine tenths at most.",
    )
    add(
        "--balance-data",
        action=on_or_off,
        help="Move samples between data-parallel ranks within a step, so that every rank carries the same cost.",
    )
    add(
        "--balance-dynamic-cp",
        nargs="?",
        type=_word_or_number(ALL_RANKS, is_valid=lambda n: n.bit_count() == 1, error="not a power of two"),
        const=ALL_RANKS,
        metavar="N",
        help="Give each micro-batch a context-parallel size of its own, a power of two up to N or all data- and "
        "context-parallel ranks.",
    )
    add("--no-balance-dynamic-cp", action="store_const", const=None, dest="balance_dynamic_cp", help="Take it back.")
    add(
        "--balance-cost",
        metavar="tokens|flops|auto[:K]|FILE",
        help="The cost of a sample: its tokens (the default), the FLOPs of this run's model, or the seconds of a "
        "seconds.json (megatron-balance fit). auto: FLOPs, and after K steps (10) the seconds of the last ten, unless "
        "they predict steps left out of the fit worse. With FLOPs and seconds packs are of even cost, not filled "
        "first-fit.",
    )
    add(
        "--balance-rank-speeds",
        action="store_true",
        help="After ten steps (K with --balance-cost auto:K) give data-parallel ranks work by their measured speeds, "
        "where they wait for one another once a step.",
    )
    by_flops: dict[str, Any] = {"action": "store_const", "dest": "balance_cost"}
    add("--balance-by-flops", const="flops", help="The same as --balance-cost flops.", **by_flops)
    add("--no-balance-by-flops", const="tokens", help="The same as --balance-cost tokens.", **by_flops)
    add(
        "--balance-attention-rate",
        type=_rate,
        metavar="RATE",
        help="Rate at which GPUs run attention over that of all else, for --balance-cost flops; 1 counts plain FLOPs. "
        "Without it, what loses least over the published GPUs for the run's precision and kind of model.",
    )
    add(
        "--balance-algorithm",
        choices=("karmarkar_karp",),
        help="Give samples to ranks, then to their micro-batches, by largest differencing in place of level packing.",
    )
    add(
        "--balance-unpad",
        type=_word_or_number("attention_mask", is_valid=lambda _: True, error="neither a token id nor attention_mask"),
        metavar="PADDING",
        help="Take rows without cu_seqlens as samples of their true length and pack them: PADDING is the token id that "
        "rows are filled up with at their end, or attention_mask where the data has one.",
    )
    add(
        "--balance-share-prefixes",
        action="store_true",
        help="Compute once what samples of a micro-batch share: the tokens that they begin with. No GPU has run it: "
        "add --balance-verify.",
    )
    add(
        "--balance-loss-weighting",
        metavar="token|micro-batch|sample|KEY",
        help="What counts alike in gradients: every token, as with --calculate-per-token-loss; the micro-batches that "
        "were loaded, as in Megatron without it; samples; or all samples with one integer under this key of the data, "
        "such as the id of a rollout, or a float as their weight. It sets --calculate-per-token-loss.",
    )
    add(
        "--no-balance-evaluation",
        action="store_false",
        dest="balance_evaluation",
        help="Leave evaluation to Megatron, as under --sft and --balance-dynamic-cp; else its samples are packed too.",
    )
    add(
        "--no-balance-overlap",
        action="store_false",
        dest="balance_overlap",
        help="Fetch, plan and move a step's samples when it begins, not while the step before runs.",
    )
    add(
        "--balance-verify",
        action="store_true",
        help="Compute the first step also as stock would, and end the run before its optimizer step where losses or "
        "gradient norms differ by more than rounding; for the first run on a new cluster.",
    )
    add(
        "--balance-record",
        metavar="DIR",
        help="Write every step's lengths, plan and measured seconds to this folder, for megatron-balance report and "
        "compare; a resumed run goes on with its record.",
    )


def _word_or_number(word: str, *, is_valid: Callable[[int], bool], error: str) -> Callable[[str], int | str]:

    def value(text: str) -> int | str:
        if text == word:
            return text
        if not text.isdecimal() or not is_valid(int(text)):
            raise argparse.ArgumentTypeError(f"{text!r} is {error}")
        return int(text)

    return value


def _rate(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid rate: give a number above 0")
    return float(text)


def refuse(options: Mapping[str, Any]) -> None:
    """Raise the first refusal of these options (`rules.txt`)."""
    for problem in problems(options):
        raise RefusedError(problem)


def parse_flags(flags: Sequence[str], *, with_megatron: bool = False) -> tuple[argparse.Namespace, list[str]]:
    """Read flags where no script does: the balance flags alone, or those of a training script with Megatron's parser.

    Nothing is validated or checked. With Megatron's parser the second result are flags that it does not know.
    """
    parser = _OneLineParser(allow_abbrev=False, add_help=False)
    _add_flags(parser)
    if not with_megatron:
        return parser.parse_args(list(flags)), []
    from megatron.training.arguments import add_megatron_arguments

    # Megatron's own function: a hook in its place would refuse flags that are only read here.
    parsed, unknown = inspect.unwrap(add_megatron_arguments)(parser).parse_known_args(list(flags))
    fill_in(parsed, options=vars(parsed))
    return parsed, unknown


class _OneLineParser(argparse.ArgumentParser):
    """Raises argparse's error message instead of printing it below the usage."""

    def error(self, message: str) -> NoReturn:
        raise BalanceError(f"{message}.")


def fill_in(flags: argparse.Namespace, *, options: Mapping[str, Any]) -> None:
    """Set what `--balance` leaves open, and say in `flags.balance_choices` what it set.

    It follows from the command line alone, so that all ranks choose the same; `options` is a view in which the flags
    show.
    """
    if flags.balance_loss_weighting is not None and hasattr(flags, "calculate_per_token_loss"):
        flags.calculate_per_token_loss = True  # other loops have built their model
    # The tokens of a stock micro-batch are known to fit.
    rows, tokens = options.get("micro_batch_size") or 1, options.get("seq_length") or 0
    stock_tokens = -(-rows * tokens // (options.get("context_parallel_size") or 1))
    if flags.max_tokens_per_gpu == "auto":
        flags.max_tokens_per_gpu, flags.balance_auto_cap = stock_tokens, True
    if not flags.balance:
        return
    choices: dict[str, object] = {"use_dynamic_batch_size": True, "balance_data": True}
    if flags.use_dynamic_batch_size is not False:
        choices |= {"max_tokens_per_gpu": stock_tokens, "balance_cost": "flops"}
    choices = {name: value for name, value in choices.items() if getattr(flags, name) is None}
    vars(flags).update(choices)
    texts = [flag_text(name, value) for name, value in choices.items()]
    flags.balance_choices = (
        f"{', '.join(texts)}; a stock micro-batch has {stock_tokens} tokens on a GPU. It leaves out "
        "--balance-dynamic-cp, which no GPU has run: add it by name where samples are long."
    )
