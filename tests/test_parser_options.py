"""Options that the drift check reads from the sources of a parser, on sources made here, and which are classified."""

from __future__ import annotations

from pathlib import Path

import pytest
from drift.options import options_of, unclassified
from drift.sources import Sources

from megatron_balance.mcore.options import RULES, Rule

PARSER = """
from megatron.training.factory import ArgumentGroupFactory
from megatron.training.more import add_more_args as add_more

def add_megatron_arguments(parser):
    parser = _add_loop_args(parser)
    add_more(parser)
    unrelated(parser.prog)
    return parser

def _add_loop_args(parser):
    from megatron.training.config import LoopConfig
    left_out = ["hidden"]
    group = ArgumentGroupFactory(LoopConfig, exclude=left_out).build_group(parser, "loop")
    group.add_argument("--train-iters", "-n", type=int)
    group.add_argument("--no-rope", dest="rope", action="store_false")
    return parser

def unrelated(prog):
    prog.add_argument("--elsewhere")
"""
FILES = {
    "megatron/training/arguments.py": PARSER,
    "megatron/training/factory.py": "class ArgumentGroupFactory: ...",
    "megatron/training/config.py": '''
from dataclasses import dataclass, field
from typing import ClassVar

@dataclass
class Common:
    seed: int = 0

@dataclass
class LoopConfig(Common):
    """A loop."""
    count: ClassVar[int] = 1
    log_interval: int = 100
    """Steps between logs."""
    hidden: int = 0
    derived: int = field(init=False)
    use_nsys: bool = field(default=False, metadata={"argparse_meta": {"arg_names": ["--profile"], "dest": "profile"}})
''',
    "megatron/training/more.py": 'def add_more_args(parser):\n    parser.add_argument("--tp-comm-overlap")',
}
OPTIONS = {"seed", "log_interval", "profile", "train_iters", "rope", "tp_comm_overlap"}


def sources(changed: dict[str, str] | None = None) -> Sources:
    files = FILES | (changed or {})
    return Sources(frozenset(files), files.__getitem__)


def refused(condition: str) -> Rule:
    return Rule("A test", condition, "a reason; a remedy")


def test_every_way_of_adding_an_option_is_read() -> None:
    assert options_of(sources()) == OPTIONS


@pytest.mark.parametrize(
    "parser",
    [
        PARSER.replace("def add_megatron_arguments", "def add_arguments"),
        PARSER.replace("import LoopConfig", "import OtherConfig"),
        PARSER.replace('left_out = ["hidden"]', "left_out = hidden_ones()"),
        PARSER.replace("ArgumentGroupFactory(LoopConfig,", "ArgumentGroupFactory(configs()[0],"),
    ],
)
def test_what_cannot_be_read_is_an_error(parser: str) -> None:
    with pytest.raises(LookupError):
        options_of(sources({"megatron/training/arguments.py": parser}))


def test_options_without_a_class_are_named() -> None:
    found = unclassified([refused("tp_comm_overlap")], sources=sources(), release=(0, 19))
    assert [(finding.target, finding.broken) for finding in found] == [("--rope", False)]


def test_a_row_of_an_option_that_a_release_lacks_is_broken() -> None:
    rows = [refused("tp_comm_overlap rope"), refused("gone"), refused("cp_partition_mode=contiguous")]
    found = unclassified(rows, sources=sources(), release=(0, 19))
    assert [(finding.target, finding.broken) for finding in found] == [("--gone", True)]
    assert list(unclassified(rows, sources=sources(), release=None)) == []


@pytest.fixture(scope="module")
def installed() -> Sources:
    """The sources of the installed Megatron."""
    core = pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    root = Path(core.__file__).parents[2]
    files = {path.relative_to(root).as_posix(): path for path in (root / "megatron").rglob("*.py")}
    return Sources(frozenset(files), lambda path: files[path].read_text("utf-8"))


def test_the_parser_of_the_installed_megatron_is_read_as_it_is(installed: Sources) -> None:
    """The static reader finds what importing finds, and `kitchen_*`, which are there with that package alone."""
    arguments = pytest.importorskip("megatron.training.arguments", reason="megatron.training is not installed")
    import argparse
    import inspect

    parser = argparse.ArgumentParser()
    inspect.unwrap(arguments.add_megatron_arguments)(parser)
    stored = {action.dest for action in parser._actions} - {"help"}
    assert options_of(installed) - {"kitchen_config_file", "kitchen_recipe_number"} == stored


def test_every_option_of_the_installed_megatron_has_its_class(installed: Sources) -> None:
    version = pytest.importorskip("megatron.core", reason="megatron-core is not installed").__version__
    major, minor = map(int, version.split(".")[:2])
    assert list(unclassified(RULES, sources=installed, release=(major, minor))) == []
