"""Every option of the installed Megatron's parser is in a rule or was reviewed as harmless.

`scripts/check versions` runs it on other releases. It reads the rules below the public names: a run shows what they say
of its own options alone.
"""

from __future__ import annotations

import argparse
import inspect
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from megatron_balance.mcore.options import RULES

REVIEWED = Path(__file__).parents[1] / "scripts" / "drift" / "irrelevant_options.txt"

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
def options() -> set[str]:
    """Names under which the parser stores its options."""
    arguments = pytest.importorskip("megatron.training.arguments", reason="megatron.training is not installed")
    parser = argparse.ArgumentParser()
    inspect.unwrap(arguments.add_megatron_arguments)(parser)  # without this package's own
    return {action.dest for action in parser._actions} - {"help"}


def test_every_option_is_in_a_rule_or_was_reviewed(options: set[str]) -> None:
    in_rules = {name for rule in RULES for name in rule.names}
    lines = REVIEWED.read_text("utf-8").splitlines()
    patterns = [name for line in lines if not line.startswith("#") for name in line.split()]
    left = [name for name in options - in_rules if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    assert not left, f"give them a rule (mcore/options/rules.py), or add them to {REVIEWED.name}: {sorted(left)}"


def test_every_rule_is_of_an_option(options: set[str]) -> None:
    assert [rule.words for rule in RULES if rule.names and not rule.names & (options | NOT_IN_EVERY_RELEASE)] == []
