"""Which of Megatron's options balancing refuses, cautions about, or takes as they are.

Command lines go through Megatron's own parser with `add_balance_args`; each begins with the option that it is about.
"""

import argparse
import functools
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import tomllib
from make_pages import PAGES

from megatron_balance import BalanceError, ModelShape
from megatron_balance.mcore import add_balance_args, cautions
from megatron_balance.mcore.setup.settings import topology_of
from megatron_balance.planner import resolve_objective

SHAPE = ModelShape.preset("Qwen3-8B")
BALANCED = "--balance-data --calculate-per-token-loss --attention-dropout 0 --hidden-dropout 0"
EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall"
PACKED = "--use-dynamic-batch-size --max-tokens-per-gpu 4096"
SIZED = f"--balance-dynamic-cp {PACKED}"
ON_CPU = f"{SIZED} --transformer-impl local --spec my_layers spec"
UNPADDED = "--balance-unpad 0 --no-create-attention-mask-in-dataloader"
SHARED = f"--balance-share-prefixes {PACKED}"
FLEX = "--num-experts 4 --moe-token-dispatcher-type flex"
DOCUMENTS = "--dataloader-inter-document-masking --pipeline-model-parallel-size 4"
ALLGATHER = "--moe-token-dispatcher-type allgather --num-experts 4"

WORDS = {name: word for name, word in globals().items() if isinstance(word, str)}
TABLE = tomllib.loads((Path(__file__).parent / "options.toml").read_text())
REFUSED, WITHOUT_BALANCING, CAUTIONED, ORDINARY = (
    [line.format_map(WORDS) for line in lines] for lines in TABLE.values()
)


@functools.cache
def parser():
    """Megatron's, made once, for it takes a second, with flags of other releases and of scripts."""
    from megatron.training.arguments import add_megatron_arguments

    megatron_parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = ("--dataloader-save", "--cp-partition-mode", "--export-kd-teacher-load", "--sequence-packing-scheduler")
    for flag in flags:
        megatron_parser.add_argument(flag)
    megatron_parser.add_argument("--use-legacy-models", action="store_true")
    return add_balance_args(megatron_parser)


def parsed(flags, *, balanced=BALANCED):
    return parser().parse_args(f"{balanced} {flags}".split())


@pytest.mark.parametrize("flags", REFUSED)
def test_a_refusal_names_the_option_its_value_and_the_remedy(flags):
    with pytest.raises(BalanceError) as refusal:
        parsed(flags)
    messages = str(refusal.value)
    assert messages.startswith(f"{flags.split()[0]} is ")
    assert "; " in messages
    assert messages.endswith(".")
    assert not any(name in messages.split(":")[0] for name in ("None", "[", "<"))


def test_every_refusal_of_the_pages_is_met_here():
    """Those of releases have tests of their own below."""
    messages = ""
    lines = [(flags, BALANCED) for flags in REFUSED]
    lines += [(flags, "--calculate-per-token-loss") for flags in WITHOUT_BALANCING]
    for flags, balanced in [*lines, ("", PACKED)]:
        with pytest.raises(BalanceError) as refusal:
            parsed(flags, balanced=balanced)
        messages += str(refusal.value)
    options, flags = (PAGES[page]() for page in ("options.md", "flags.md"))
    rules = re.findall(r"^\| (.+) \| (.+) \|$", options.partition("## Cautions")[0], flags=re.MULTILINE)
    rules += re.findall(r"^- (--.+?): (.+)$", flags, flags=re.MULTILINE)
    assert len(rules) > 60
    missed = [condition for condition, message in rules if message not in messages]
    assert [
        condition for condition in missed if not re.search("(engine|core|torch) before|^where$|^---", condition)
    ] == []


@pytest.mark.parametrize("flags", ["--balance-data", PACKED])
def test_balancing_asks_for_the_loss_per_token(flags):
    with pytest.raises(BalanceError, match="add --calculate-per-token-loss"):
        parsed(flags, balanced="")


def test_an_option_that_the_script_s_parser_lacks_is_named_too():
    with pytest.raises(BalanceError, match="--calculate-per-token-loss is not set"):
        add_balance_args(argparse.ArgumentParser()).parse_args(["--balance-data"])


@pytest.mark.parametrize("flags", CAUTIONED)
def test_what_should_be_known_is_said_once(flags):
    [caution] = cautions(parsed(flags))
    assert caution.startswith(f"{flags.split()[0]} is ")


@pytest.mark.parametrize("flags", ORDINARY)
def test_ordinary_runs_are_left_alone(flags):
    assert cautions(parsed(flags)) == []


OF_MEGATRON = [
    flags
    for flags in (*REFUSED, *CAUTIONED)
    if not any(flag in flags for flag in ("--balance", "--no-balance", "--use-dynamic", "--max-tokens"))
]


@pytest.mark.parametrize("flags", OF_MEGATRON)
def test_a_run_that_does_not_balance_is_none_of_our_business(flags):
    assert cautions(parsed(flags, balanced="")) == []


@pytest.mark.parametrize(
    ("flags", "oldest"),
    [
        ("", "2.3"),
        ("--softmax-type learnable", "2.8"),
        ("--context-parallel-size 4 --cp-comm-type a2a", "2.10"),
        ("--context-parallel-size 4 --cp-comm-type all_gather", "2.15"),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p", "2.20"),
    ],
)
def test_an_older_transformer_engine_is_refused(monkeypatch, flags, oldest):
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{oldest}.1+abc")
    args = parsed(flags)
    assert any("before 2.9" in caution for caution in cautions(args)) is (oldest in ("2.3", "2.8"))
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"2.{int(oldest[2:]) - 1}.7")
    with pytest.raises(BalanceError, match=rf"install transformer-engine {oldest} or newer"):
        parsed(flags)
    parsed("--transformer-impl local --spec module function")


@pytest.mark.parametrize("metadata", ["0.19.2", None])
@pytest.mark.parametrize(
    "flags",
    [
        f"--hybrid-layer-pattern M*M- {PACKED}",
        f"--overlap-moe-expert-parallel-comm {EXPERTS} {PACKED}",
        SIZED,
        SHARED,
        f"--balance-loss-weighting sample --mtp-num-layers 1 {PACKED}",
        f"--balance-loss-weighting sample --moe-z-loss-coeff 1e-3 {EXPERTS} {PACKED}",
    ],
)
def test_a_rule_about_a_release_asks_the_module_that_is_imported(monkeypatch, metadata, flags):
    """Fault: pip's metadata of another release, or none, let both through."""

    def version(name):
        if metadata is None:
            raise PackageNotFoundError(name)
        return metadata

    parser()  # imports what asks for other packages
    monkeypatch.setattr("importlib.metadata.version", version)
    for imported in ("0.18.3", None):
        monkeypatch.setattr("megatron.core.package_info.__version__", imported)
        with pytest.raises(BalanceError, match=r"install megatron-core 0\.19"):
            parsed(f"{flags} --transformer-impl local --spec module function")


@pytest.mark.parametrize(
    ("flags", "objective"),
    [
        ("--fp8-format hybrid", "microbatch"),  # its recipe is delayed
        ("--fp8-format hybrid --fp8-recipe tensorwise", "step"),
        (f"--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01 {EXPERTS}", "microbatch"),
        (f"--moe-router-load-balancing-type global_aux_loss {EXPERTS}", "step"),
    ],
)
def test_plans_are_for_ranks_that_reduce_in_every_micro_batch(flags, objective):
    """Fault: plans of `delayed` FP8 levelled steps, and with sizes of their own ranks never met."""
    options = vars(parsed(flags)) | {"world_size": 8}
    topology = topology_of(options, shape=lambda: SHAPE)
    assert resolve_objective("auto", topology=topology) == objective
    assert topology.has_equal_counts is (objective == "microbatch")
    if "--fp8-format" in flags:  # no flag sets it, a loop's configuration may
        for sizes in ({}, {"context_parallel_size": 2}, {"context_parallel_size": 2, "balance_dynamic_cp": "all"}):
            delayed = options | sizes | {"tp_only_amax_red": True, "fp8_recipe": "delayed"}
            topology = topology_of(delayed, shape=lambda: SHAPE)
            assert topology.reduces_in_microbatches is ("balance_dynamic_cp" in sizes)
