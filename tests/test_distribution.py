"""Shipped files and their licences: the checks of .ci/check_wheel can fail; docs/licences.md is complete."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import make_licences_page
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def check_contents() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_contents", ROOT / ".ci" / "check_contents.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GOOD = (
    "megatron_balance/__init__.py",
    "megatron_balance/cost/model.py",
    "megatron_balance/py.typed",
    "megatron_balance/report/assets/page.js",
    *(
        f"megatron_balance-0.1.0.dist-info/{name}"
        for name in ("METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt", "licenses/LICENSE")
    ),
)


def test_a_good_wheel_passes(check_contents: ModuleType) -> None:
    sizes = dict.fromkeys(GOOD, 1000)
    assert not check_contents.faults(sizes, patterns=check_contents.WHEEL, modules={GOOD[0]})


@pytest.mark.parametrize(
    "stranger",
    [
        "tests/test_cli.py",
        "megatron_balance/__pycache__/cli.cpython-312.pyc",
        "megatron_balance/../outside.py",
        "megatron_balance/report/assets/secret.key",
        "shared/notes.md",
        "build/lib/megatron_balance/cli.py",
        ".venv/bin/python",
    ],
)
def test_what_has_no_place_in_a_wheel_is_named(check_contents: ModuleType, stranger: str) -> None:
    sizes = dict.fromkeys((*GOOD, stranger), 1000)
    (fault,) = check_contents.faults(sizes, patterns=check_contents.WHEEL, modules=set())
    assert stranger in fault


def test_missing_and_large_files_are_named(check_contents: ModuleType) -> None:
    sizes = dict.fromkeys(GOOD, 1000) | {GOOD[1]: 10**6}
    del sizes["megatron_balance/py.typed"]
    found = check_contents.faults(sizes, patterns=check_contents.WHEEL, modules={"megatron_balance/cli/plan.py"})
    assert [re.sub(r"\\", "", one) for one in found] == [
        "nothing fits megatron_balance/py.typed",
        "megatron_balance/cost/model.py has 1000000 bytes",
        "megatron_balance/cli/plan.py is missing",
    ]


def test_every_dependency_has_a_licence_in_the_docs() -> None:
    rows = make_licences_page.rows_of(make_licences_page.PAGE.read_text(encoding="utf-8"))
    assert list(rows) == list(make_licences_page.dependencies())
    assert {"numpy", "torch", "megatron-core"} <= set(rows)
    assert make_licences_page.licence_of("numpy") == rows["numpy"]


def test_the_licence_is_there() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
