"""Findings of the drift check on sources made here; each supported release, and each of its options, was reviewed.

`scripts/check versions` asks for the options of other releases. Their rules are read below the public names: a run
shows what they say of its own options alone.
"""

import argparse
import inspect
import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from drift import compare
from drift.compare import PACKAGES, Relied, numbers
from drift.sources import open_sources

from megatron_balance.hooking import Hook
from megatron_balance.mcore import add_balance_args, hooks
from megatron_balance.mcore.setup.rules import RULES, names_of

STOCK = {
    "up/__init__.py": "",
    "up/schedules.py": '''
def schedule(batch, *, parts=2):
    """Cuts a batch."""
    # in equal parts
    return batch[:: parts]

class Loader:
    def __init__(self, source):
        self.items = source
''',
    "up/again.py": "from .schedules import schedule",
    "up/training.py": "if True:\n    from up.again import schedule as schedule",
}
HOOK = Hook(
    target="up.schedules:schedule",
    bound_in=("up.training",),
    parameters=("parts",),
    wrap=lambda function: function,
    reason="a test",
)
RELIED = Relied("up.schedules:Loader", (0, 0))


def edited(old, new, *, path="up/schedules.py"):
    assert old in STOCK[path]
    return {path: STOCK[path].replace(old, new)}


@pytest.mark.parametrize(
    ("changed", "broken", "says"),
    [
        (edited("def schedule", "def plan"), True, "is not there"),
        (edited("parts", "shares"), True, "no longer takes parts"),
        (edited("self.items", "self._items"), False, "does something else"),
        (edited("class Loader", "class Reader"), True, "is not there"),
        ({"up/training.py": "schedule = None"}, True, "up.training.schedule is not that function"),
        ({"up/again.py": "from elsewhere import schedule"}, True, "up.training.schedule is not that function"),
        (edited("[:: parts]", "[::-parts]"), False, "does something else"),
        (edited("parts=2", "parts=3"), False, "takes parts=3 as well; parts=2 no longer"),
        (edited("def schedule", "@cached\ndef schedule"), False, "does something else"),
        ({"up/rl.py": "from up.schedules import schedule"}, False, "is bound by value in up.rl as well"),
        # What changes nothing is not told.
        ({}, None, ""),
        (edited("Cuts a batch.", "Takes every other."), None, ""),
        (edited("    # in equal parts\n", ""), None, ""),
        (edited("(batch, *", "(batch: list, *"), None, ""),
        (edited("[:: parts]", "[\n        ::parts\n    ]"), None, ""),
        ({"tests/test_up.py": "from up.schedules import schedule"}, None, ""),
        ({"up/again.py": "from up.schedules import schedule"}, None, ""),
    ],
)
def test_a_change_is_told(tmp_path, changed, broken, says):
    seen = []
    for name, files in (("stock", STOCK), ("changed", STOCK | changed)):
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        with open_sources(tmp_path / name) as sources:
            seen.append(compare.record([HOOK, RELIED], sources=sources))
    found = [*compare.broken([HOOK, RELIED], sources=sources), *compare.differences(seen[1], reviewed=seen[0])]
    if broken is None:
        assert found == []
    else:
        assert any(finding.broken is broken and says in finding.says for finding in found), found


def test_each_supported_release_of_megatron_was_reviewed():
    reviewed = [".".join(version.split(".")[:2]) for version in PACKAGES[0].reviewed_versions()]
    assert reviewed == list(hooks.SUPPORTED_VERSIONS)


def test_the_oldest_transformer_engine_that_is_supported_was_reviewed():
    """2.3 is the first release whose attention takes all that Megatron 0.19 passes with packed sequences."""
    engine = next(package for package in PACKAGES if package.name == "transformer-engine")
    oldest, *_, newest = engine.reviewed_versions()
    assert numbers(oldest)[:2] == (2, 3) < numbers(newest)[:2]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_row_was_recorded_in_every_reviewed_release(package):
    assert package.reviewed_versions()
    for version in package.reviewed_versions():
        recorded = json.loads(package.fingerprints(version).read_text())
        assert set(recorded) == {row.target for row in package.rows_of(version)}


REVIEWED = Path(__file__).parents[1] / ".ci" / "drift" / "irrelevant_options.txt"

NOT_IN_EVERY_RELEASE = {
    # up to 0.17
    "use_legacy_models",
    # from 0.18, 0.19 and 0.20
    "moe_expert_rank_capacity_factor",
    "moe_paged_stash",
    "tensor_parallel_num_weight_shards",
    "logits_save_dir",
    "dataloader_inter_document_masking",
    "cp_partition_mode",
    "dynamic_context_parallel",
    "sequence_packing_scheduler",
    # of scripts alone
    "dataloader_save",
    "export_kd_teacher_load",
}
"""Options of rules that some release lacks."""


@pytest.fixture(scope="module")
def options():
    """Names under which the parser stores its options."""
    from megatron.training import arguments

    parser = argparse.ArgumentParser()
    inspect.unwrap(arguments.add_megatron_arguments)(parser)  # without this package's own
    return {action.dest for action in parser._actions} - {"help"}


def test_every_option_is_in_a_rule_or_was_reviewed(options):
    in_rules = {name for rule in RULES for name in names_of(rule.condition)}
    lines = REVIEWED.read_text("utf-8").splitlines()
    patterns = [name for line in lines if not line.startswith("#") for name in line.split()]
    left = [name for name in options - in_rules if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    assert not left, f"give them a rule (mcore/setup/rules.txt), or add them to {REVIEWED.name}: {sorted(left)}"


def test_every_rule_is_of_an_option(options):
    ours = {action.dest for action in add_balance_args(argparse.ArgumentParser())._actions}
    ours |= {"balance_auto_cap"}  # of --max-tokens-per-gpu auto
    for rule in RULES:
        names = {*names_of(rule.condition)} - ours
        assert not names or names & (options | NOT_IN_EVERY_RELEASE), rule
