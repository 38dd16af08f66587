"""The documentation is true: its code runs, its links lead somewhere, what is generated is not stale.

A fenced block is one of
    python          run; the blocks of a page share their names, as a reader's session would
    bash            only `megatron-balance …` and comments: every command runs, on small inputs made here
    text            what the block before it prints
    python no-run   needs GPUs, another system or minutes; counted below, so that none is marked in passing
    bash no-run     likewise
Indented blocks are formulas in docs/, commands on the adapters' page and in the README.
"""

from __future__ import annotations

import argparse
import ast
import doctest
import importlib
import itertools
import json
import pkgutil
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tomllib
from make_pages import SITE_PAGES
from recorded_runs import run_info, write_record

import megatron_balance
import megatron_balance.planner
from megatron_balance import CostModel, ModelShape
from megatron_balance.cli import build_parser, main
from megatron_balance.mcore import add_balance_args

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.glob("*.md"))
ADAPTERS = DOCS / "adapters.md"

NOT_RUN = {"adapters.md": 1, "quickstart.md": 2, "megatron.md": 6, "loops.md": 4, "see-it.md": 1, "cost-model.md": 1}
"""Blocks that are not run: installing, training on GPUs, the quickstart, measuring a GPU, another system."""

LANGUAGES = {"python", "bash", "text", "python no-run", "bash no-run"}


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    found = re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", page.read_text(), flags=re.MULTILINE)
    return [Block(match[1], match[2], page.read_text()[: match.start()].count("\n") + 1) for match in found]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*\n(?:.*\n)*?```$", "", page.read_text(), flags=re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that commands in the documentation name, small, in an empty folder that becomes the current one."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "lengths.npz", length=np.clip(rng.lognormal(6.5, 1.1, 600).astype(np.int64), 16, 7900))
    info = run_info(cost_model=CostModel.from_shape(ModelShape.preset("Qwen2.5-0.5B")))
    write_record(tmp_path / "record", info, num_steps=5, num_samples=24)
    return tmp_path


def commands(block: Block) -> list[list[str]]:
    """Arguments of every `megatron-balance` in a block. Anything else in it must be a comment."""
    lines = block.code.replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    found = [words for words in split if words]
    strangers = [words for words in found if words[0] != "megatron-balance"]
    assert not strangers, f"line {block.line}: mark the block no-run, or leave out {strangers[0]}"
    return [words[1:] for words in found]


def figures_of(line: str) -> str:
    """A line of output as it is compared: spaces collapsed, without the milliseconds that end a row of a table."""
    return re.sub(r"(\d\.\d) \d+\.\d$", r"\1", " ".join(line.split()))


def run_command(arguments: list[str], *, capsys: pytest.CaptureFixture[str], line: int) -> list[str]:
    """Lines that a command prints. Only `doctor` has a process of its own: it loads Megatron and hooks it."""
    if arguments[0] == "doctor":
        command = [sys.executable, "-m", "megatron_balance", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        status, out, err = done.returncode, done.stdout, done.stderr
    else:
        status = main(arguments)
        out, err = capsys.readouterr()
    assert status == 0, f"line {line}: megatron-balance {shlex.join(arguments)}\n{out}\n{err}"
    return out.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("page", [*PAGES, README], ids=name_of)
def test_code_blocks_run(page: Path, inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": name_of(page)}
    printed: list[str] = []
    for block in blocks(page):
        assert block.language in LANGUAGES, f"line {block.line} is marked {block.language!r}"
        if block.language == "python":
            exec(compile(block.code, f"{name_of(page)} after line {block.line}", "exec"), names)
        elif block.language == "bash":
            printed = []
            for arguments in commands(block):
                printed += run_command(arguments, capsys=capsys, line=block.line)
        elif block.language == "text":
            got = [figures_of(line) for line in printed]
            missing = [line for line in block.code.splitlines() if figures_of(line) not in got]
            assert not missing, "line {}: not printed today:\n{}\nbut:\n{}".format(
                block.line, "\n".join(missing), "\n".join(printed)
            )


def test_blocks_that_do_not_run_are_few_and_known() -> None:
    marked = {page.name: sum(block.language.endswith("no-run") for block in blocks(page)) for page in PAGES}
    assert {name: count for name, count in marked.items() if count} == NOT_RUN


def test_the_adapters_page_names_what_exists() -> None:
    """Some blocks need the other system; that what they import is there needs nothing."""
    for block in blocks(ADAPTERS):
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_balance"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize("page", [*PAGES, README], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        made = target.parent == DOCS and target.stem in SITE_PAGES
        assert made != target.is_file(), f"{link} leads nowhere"
        there = anchors(SITE_PAGES[target.stem]() if made else without_code(target))
        assert not anchor or anchor in there, f"{link}: no such heading"


def anchors(text: str) -> set[str]:
    """As Python-Markdown makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:scripts|docs|tests|benchmarks|patches|megatron_balance)/[\w./-]+)", page.read_text())
    for name in named:
        assert (ROOT / name).exists(), f"there is no {name}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != ADAPTERS], ids=name_of)
def test_flags_that_are_named_exist(page: Path) -> None:
    known = set(add_balance_args(argparse.ArgumentParser())._option_string_actions)
    named = set(re.findall(r"--(?:no-)?balance-[a-z-]*[a-z]", page.read_text()))
    assert named <= known


RESULTS = ROOT / "benchmarks" / "RESULTS.md"
FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-\d+)?")
WITH_FIGURES = [README, DOCS / "evidence.md", DOCS / "dynamic-cp.md"]


def section_of_results(anchor: str) -> str:
    """The text below a heading of RESULTS.md, up to the next of its level or above."""
    lines = RESULTS.read_text().splitlines()
    (start,) = (index for index, line in enumerate(lines) if line.startswith("#") and anchors(line) == {anchor})
    level = len(lines[start].split()[0])
    rest = itertools.takewhile(lambda line: not re.match(rf"#{{1,{level}}} ", line), lines[start + 1 :])
    return "\n".join(rest)


@pytest.mark.parametrize("page", WITH_FIGURES, ids=name_of)
def test_figures_are_those_of_the_results(page: Path) -> None:
    """In a row of a table or a sentence with links to sections of RESULTS.md every figure is one of theirs.

    Numbers in words, in code, in names of layouts and versions are no figures.
    """
    found = 0
    for part in re.split(r"\n(?=\|)|\n\n|(?<=[.:;)])\s", without_code(page)):
        sections = re.findall(r"\]\([^)]*RESULTS\.md#([\w-]+)\)", part)
        shown = re.sub(r"`[^`]*`|\]\([^)]*\)|0\.19|fp32|bf16|\b(?:CP|DP)\d+", " ", part)
        figures = FIGURE.findall(shown)
        if not sections or not figures:
            continue
        results = set(FIGURE.findall(" ".join(map(section_of_results, sections))))
        missing = [figure for figure in figures if figure not in results | {"1.00"}]
        assert not missing, f"{missing} are not in {sections}: {part.strip()}"
        found += len(figures)
    assert found, "no figure was compared"


def test_the_picture_of_the_quickstart_is_of_the_published_run() -> None:
    published = json.loads(RESULTS.with_name("results.json").read_text())["quickstart"]["policies"]
    picture = (DOCS / "pictures" / "quickstart_before_after.svg").read_text()
    for name, figures in published.items():
        assert f"{figures['cpu_speedup']:.2f}×" in section_of_results("quickstart"), name
        if name not in ("packed", "balance_data"):
            assert f"{figures['busiest_cpu_seconds']:.2f} s a step" in picture, name


def test_every_dependency_of_a_user_has_a_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *itertools.chain(*(extras[name] for name in extras if name != "dev"))]
    section = (DOCS / "index.md").read_text().partition("## Licences")[2]
    for requirement in needed:
        name = re.split(r"[^\w.-]", requirement)[0]
        assert re.search(rf"`{name}`[^|]*\([A-Z]", section), f"{name} has no licence in docs/index.md"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_flags_page_has_every_flag_of_every_command() -> None:
    page = SITE_PAGES["flags"]()
    (subparsers,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in subparsers.choices.items():
        assert f"## megatron-balance {name}" in page
        for action in command._actions:
            assert all(f"`{option}" in page for option in action.option_strings if option not in ("-h", "--help"))


def test_plans_in_pictures_are_todays(monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib writes a title as text; its figure is in the words beside the picture too."""
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    dynamic_cp, planner = (importlib.import_module(name) for name in ("dynamic_cp", "planner"))
    drawn = [(dynamic_cp.PICTURE, DOCS / "dynamic-cp.md", dynamic_cp.panels())]
    for one in planner.pictures():
        drawn.append((DOCS / "pictures" / f"objective_{one.name}.svg", DOCS / "planner.md", one.panels))
    for picture, page, panels in drawn:
        figures = [panel.title.rsplit(" ", 1)[1] for panel in panels]
        for panel, figure in zip(panels, figures, strict=True):
            assert panel.title in picture.read_text(), f"stale: run its script in docs/pictures ({panel.title})"
            assert figure in page.read_text()
        assert float(figures[1]) < float(figures[0])


def test_the_steps_of_the_planner_are_drawn_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    steps = importlib.import_module("plan_steps")
    assert steps.PICTURE.read_text() == steps.picture(), "stale: run python docs/pictures/plan_steps.py"


def test_python_page_has_every_public_name() -> None:
    named = re.findall(r"^::: megatron_balance\.([\w.]+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
    assert {name.rpartition(".")[2] for name in named} >= set(megatron_balance.__all__) - {"__version__"}
    for name in named:
        module, _, attribute = name.rpartition(".")
        if not module.startswith("adapters"):  # needs the other system
            assert hasattr(importlib.import_module(f"megatron_balance.{module}"), attribute), f"there is no {name}"


PLANNER = [
    module.name
    for module in pkgutil.walk_packages(megatron_balance.planner.__path__, prefix="megatron_balance.planner.")
    if not module.ispkg
]


@pytest.mark.parametrize("name", PLANNER)
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
