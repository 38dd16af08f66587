"""The documentation is true: its code runs, its links lead somewhere, what is generated is not stale.

A fenced block is one of
    python          run; the blocks of a page share their names, as a reader's session would
    bash            only `megatron-balance …` and comments: every command runs, on small inputs made here
    text            what the block before it prints
    python no-run   needs GPUs, another system or minutes; counted below, so that none is marked in passing
    bash no-run     likewise
Indented blocks are formulas in docs/, commands on the adapters' pages and in the README.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from make_flags_page import PAGE, flags_page
from make_options_page import PAGE as OPTIONS_PAGE
from make_options_page import options_page
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import megatron_balance
from megatron_balance import CostModel, Limits, ModelShape, Topology, build_data_schedule
from megatron_balance.cli import build_parser, main
from megatron_balance.mcore.setup.flags import add_balance_args
from megatron_balance.mcore.telemetry.figures import Figures
from megatron_balance.record.run_record import RunInfo
from megatron_balance.record.step import StepRecord
from megatron_balance.record.writers import PlanWriter, SecondsWriter

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.glob("*.md"))
ADAPTERS = sorted((DOCS / "adapters").glob("*.md"))

NOT_RUN = {"quickstart.md": 2, "megatron.md": 5, "loops.md": 5, "see-it.md": 1, "cost-model.md": 1}
"""Blocks that are not run: installing, training on GPUs, the quickstart, measuring a GPU."""

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
    text = [{"messages": [{"role": "user", "content": "word " * count}]} for count in rng.integers(1, 900, 100)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in text))
    tokenizer = Tokenizer(WordLevel({"word": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    write_record(tmp_path / "record")
    return tmp_path


def write_record(folder: Path) -> None:
    """A run of five steps on four ranks, planned for real; its seconds are made up."""
    topology, limits = Topology(4), Limits(8192)
    cost_model = CostModel.from_shape(ModelShape.preset("Qwen2.5-0.5B"))
    info = RunInfo(
        topology=topology, limits=limits, cost_model=cost_model, cost_name="flops", objective="step", policy="a test's"
    )
    plans = PlanWriter(folder, info=info)
    writers = [SecondsWriter(folder, dp_rank=rank) for rank in range(4)]
    for iteration in range(1, 6):
        lengths = np.random.default_rng(iteration).integers(16, 8000, 24)
        homes = np.arange(24) % 4
        schedule = build_data_schedule(
            lengths, cost_model=cost_model, topology=topology, limits=limits, home_ranks=homes
        )
        plans.add(StepRecord.of_schedule(schedule, iteration=iteration))
        for writer, costs in zip(writers, schedule.cost_grid, strict=True):
            writer.add(iteration, seconds=costs * 2.0**schedule.cost_shift * 1e-14)
    for writer in (plans, *writers):
        writer.flush()


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


def test_there_are_blocks_that_run() -> None:
    run = [block.language for page in PAGES for block in blocks(page) if block.language in ("python", "bash")]
    assert run.count("python") >= 2
    assert run.count("bash") >= 10


@pytest.mark.parametrize("page", ADAPTERS, ids=name_of)
def test_adapter_pages_name_what_exists(page: Path) -> None:
    """Their blocks need the other system; that what they import is there needs nothing."""
    for block in blocks(page):
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_balance"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize("page", [*PAGES, *ADAPTERS, README], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def anchors(page: Path) -> set[str]:
    """As Python-Markdown makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *ADAPTERS], ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:scripts|docs|tests|benchmarks|patches|megatron_balance)/[\w./-]+)", page.read_text())
    for name in named:
        assert (ROOT / name).exists(), f"there is no {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_that_are_named_exist(page: Path) -> None:
    known = set(add_balance_args(argparse.ArgumentParser())._option_string_actions)
    named = set(re.findall(r"--(?:no-)?balance-[a-z-]*[a-z]", page.read_text()))
    assert named <= known


def test_flags_page_is_what_the_parsers_say() -> None:
    assert PAGE.read_text() == flags_page(), "stale: run python scripts/make_flags_page.py"


def test_options_page_is_what_the_tables_say() -> None:
    assert OPTIONS_PAGE.read_text() == options_page(), "stale: run python scripts/make_options_page.py"


def test_flags_page_has_every_flag_of_every_command() -> None:
    page = PAGE.read_text()
    (subparsers,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in subparsers.choices.items():
        assert f"## megatron-balance {name}" in page
        for action in command._actions:
            assert all(f"`{option}" in page for option in action.option_strings if option not in ("-h", "--help"))


def test_scalars_in_the_table_are_those_that_are_written() -> None:
    table = (DOCS / "see-it.md").read_text().split("| scalar `balance/…` |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)`[, |]", table, flags=re.MULTILINE)
    assert rows == list(Figures.of_row([0.0] * len(Figures().row()) + [1.0]).known())


def test_objectives_are_drawn_from_todays_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    pictures = importlib.import_module("objectives").pictures()
    page = (DOCS / "objectives.md").read_text()
    for picture in pictures:
        drawn = (DOCS / "pictures" / f"objective_{picture.name}.svg").read_text()
        for panel in picture.panels:
            # matplotlib writes a title as text; its figure is in the words beside the picture too.
            assert panel.title in drawn, f"stale: run python docs/pictures/objectives.py ({panel.title})"
            assert panel.title.rsplit(" ", 1)[1] in page
        before, after = (float(panel.title.rsplit(" ", 1)[1]) for panel in picture.panels)
        assert after < before


def test_groups_of_ranks_are_drawn_from_todays_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    pictures = importlib.import_module("dynamic_cp")
    drawn, page = pictures.PICTURE.read_text(), (DOCS / "dynamic-cp.md").read_text()
    times = [panel.title.rsplit(" ", 1)[1] for panel in pictures.panels()]
    for panel, time in zip(pictures.panels(), times, strict=True):
        assert panel.title in drawn, f"stale: run python docs/pictures/dynamic_cp.py ({panel.title})"
        assert time in page
    assert float(times[1]) < float(times[0])


def test_rooms_are_drawn_from_the_import_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    architecture = importlib.import_module("architecture")
    assert architecture.PICTURE.read_text() == architecture.picture(), "stale: run python docs/pictures/architecture.py"
    assert sorted(architecture.PURPOSE) == sorted(itertools.chain.from_iterable(architecture.rooms()))


def test_python_page_has_every_public_name() -> None:
    named = re.findall(r"^::: megatron_balance\.([\w.]+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
    assert {name.rpartition(".")[2] for name in named} >= set(megatron_balance.__all__) - {"__version__"}
    for name in named:
        module, _, attribute = name.rpartition(".")
        if not module.startswith("adapters"):  # needs the other system
            assert hasattr(importlib.import_module(f"megatron_balance.{module}"), attribute), f"there is no {name}"
