"""The documentation is true: its code runs, its links lead somewhere, what is generated is not stale.

A fenced block is one of
    python          run; the blocks of a page share their names, as a reader's session would
    bash            only `megatron-balance …` and comments: every command runs, on small inputs made here
    text            what the block before it prints
    pycon           on the page of Python: doctests, in one session
    python no-run   needs GPUs, another system or minutes; counted below, so that none is marked in passing
    bash no-run     likewise
Indented blocks are formulas in docs/, commands on the adapters' page and in the README.
"""

from __future__ import annotations

import argparse
import ast
import doctest
import importlib
import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tomllib
from make_pages import PAGES as MADE_PAGES
from recorded_runs import run_info, write_record

import megatron_balance
from megatron_balance import CostModel, ModelShape
from megatron_balance.mcore import add_balance_args
from megatron_balance.mcore.telemetry import log_line

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.glob("*.md"))
ADAPTERS = DOCS / "adapters.md"
FIRST_RUN = DOCS / "first-run.md"
GUIDE = DOCS / "read-the-code.md"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
WRITTEN = [*ROOT.glob("*.md"), ROOT / "patches" / "README.md", RESULTS, *PAGES]

NOT_RUN = {
    "adapters.md": 1,
    "quickstart.md": 3,
    "install.md": 6,
    "megatron.md": 4,
    "loops.md": 4,
    "cost-model.md": 1,
    "loaders.md": 2,
    "scripts.md": 2,
}
"""Blocks that are not run: installing, training on GPUs, the quickstart, measuring a GPU, another system."""

FENCED = r"^```(.*)\n((?:.*\n)*?)```$"
LANGUAGES = {"python", "bash", "text", "pycon", "python no-run", "bash no-run"}


class Block(NamedTuple):
    language: str
    code: str


def blocks(page):
    return [Block(*found) for found in re.findall(FENCED, page.read_text(), flags=re.MULTILINE)]


def without_code(page):
    return re.sub(FENCED, "", page.read_text(), flags=re.MULTILINE)


def name_of(page):
    return str(page.relative_to(ROOT))


def printed_by(code, *, folder):
    """Lines that the commands of a block print."""
    printed = []
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            assert words[0] == "megatron-balance", f"mark the block no-run, or leave out {line}"
            command = [sys.executable, "-m", "megatron_balance", *words[1:]]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            printed += done.stdout.splitlines()
    return printed


def figures_of(line):
    """A line of output as it is compared: spaces collapsed, without the milliseconds that end a row of a table."""
    return re.sub(r"(\d\.\d) \d+\.\d$", r"\1", " ".join(line.split()))


def with_code():
    """Pages whose blocks run; `doctor` imports Megatron, which takes five seconds."""
    for page in [*PAGES, README]:
        if any(block.language in ("python", "bash", "text") for block in blocks(page)):
            slow = any(re.match("megatron-balance doctor", block.code) for block in blocks(page))
            yield pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("page", [*with_code()])
def test_code_blocks_run(page, tmp_path, monkeypatch):
    """In a folder with the files that commands in the documentation name, small."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.save(tmp_path / "lengths.npy", np.clip(rng.lognormal(6.5, 1.1, 600).astype(np.int64), 16, 7900))
    info = run_info(cost_model=CostModel.from_shape(ModelShape.preset("Qwen2.5-0.5B")))
    write_record(tmp_path / "record", info, num_steps=5, num_samples=24)
    chats = write_chats(tmp_path) if "chats.jsonl" in page.read_text() else None
    names = {"__name__": name_of(page)}
    printed = []
    for language, code in blocks(page):
        assert language in LANGUAGES
        if language == "python":
            exec(compile(code, name_of(page), "exec"), names)
        elif language == "bash":
            printed = printed_by(code, folder=tmp_path)
        elif language == "text":
            got = [figures_of(line) for line in printed]
            missing = [line for line in code.splitlines() if figures_of(line) not in got]
            assert not missing, "not printed today:\n{}\nbut:\n{}".format("\n".join(missing), "\n".join(printed))
    if chats is not None:  # fault: 2 for every chat, the number of keys of what a tokenizer returns
        assert np.load(tmp_path / "lengths.npy").tolist() == chats


def write_chats(folder):
    """Chats, and where the page names a tokenizer of the Hub one whose tokens are words. Returns the tokens of each."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    model = tokenizers.models.WordLevel({"word": 0, "user": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.role }} {{ message.content }}{% endfor %}"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", chat_template=template)
    fast.save_pretrained(folder / "Qwen" / "Qwen3-8B")
    words = [5, 50, 500]
    chats = [{"messages": [{"role": "user", "content": "word " * count}]} for count in words]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return [1 + count for count in words]


def test_blocks_that_do_not_run_are_few_and_known():
    marked = {page.name: sum(block.language.endswith("no-run") for block in blocks(page)) for page in PAGES}
    assert {name: count for name, count in marked.items() if count} == NOT_RUN


def test_the_adapters_page_names_what_exists():
    """Some blocks need the other system; that what they import is there needs nothing."""
    for block in blocks(ADAPTERS):
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_balance"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_links_lead_somewhere(page):
    """On a code host and on the site: on both the anchor of a heading must be the same."""
    in_tags = r'src(?:set)?="((?!https?://)[^"]+)"'
    for link in re.findall(r"\]\(((?!https?://)[^)\s]+)\)", text := without_code(page)) + re.findall(in_tags, text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} leads nowhere"
        for anchors in (github_anchors, site_anchors):
            assert not anchor or anchor in anchors(without_code(target)), (
                f"{link}: no such heading by {anchors.__name__}"
            )


def headings_of(text):
    """Words of the headings, without marks of Markdown."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return [re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]


def github_anchors(text):
    """As GitHub makes them: each space a hyphen; a heading that comes again gets a number."""
    found = set()
    for heading in headings_of(text):
        plain = re.sub(r"[^\w -]", "", heading).replace(" ", "-")
        numbered = itertools.chain([plain], (f"{plain}-{number}" for number in itertools.count(1)))
        found.add(next(name for name in numbered if name not in found))
    return found


def site_anchors(text):
    """As Python-Markdown makes them: hyphens and spaces in a row are one hyphen."""
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading)) for heading in headings_of(text)}


@pytest.mark.parametrize("name", MADE_PAGES)
def test_pages_made_from_code_are_todays(name):
    assert (DOCS / name).read_text() == MADE_PAGES[name](), "stale: run python .ci/make_pages.py"


def test_the_notebook_imports_numpy_and_this_package_alone():
    cells = json.loads((ROOT / "examples" / "lengths.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert set(re.findall(r"^(?:import|from) (\w+)", code, flags=re.MULTILINE)) == {"numpy", "megatron_balance"}
    assert all(cell["outputs"] for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_flags_that_are_named_exist(page):
    """R55, R58: the example for AReaL is one."""
    text = page.read_text()
    named = re.findall(r"`((?:scripts|\.ci|docs|tests|benchmarks|patches|megatron_balance)/[\w./-]+)", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    known = set(add_balance_args(argparse.ArgumentParser())._option_string_actions)
    assert page == ADAPTERS or set(re.findall(r"--(?:no-)?balance-[a-z-]*[a-z]", text)) <= known


def names_bound_by(node):
    """What a definition, an assignment or an import binds."""
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    names = {name.id for name in targets if isinstance(name, ast.Name)} | {getattr(node, "name", "")}
    return names | ({alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set())


def test_functions_that_the_guide_to_the_code_names_are_where_it_says():
    """A stranger opens the file and looks for the name; a row without a file is about the one above."""
    rows = re.findall(r"^\| (?:\[[^]]*\]\(\.\./([^)]*)\))? ?\| `([\w.]+)`", GUIDE.read_text(), flags=re.MULTILINE)
    rows += re.findall(r"\[[^]]*\]\(\.\./([^)]*)\), `(\w+)`", GUIDE.read_text())
    assert len(rows) > 20
    path = ""
    for file, name in rows:
        path = file or path
        nodes = [ast.parse((ROOT / path).read_text())]
        for part in name.split("."):
            nodes = [node for outer in nodes for node in getattr(outer, "body", []) if part in names_bound_by(node)]
        assert nodes, f"{path} has no {name}"


def test_lines_of_the_log_are_todays():
    """Numbers apart."""
    figures = dict.fromkeys((f"{name}_seconds" for name in ("plan", "exchange", "exposed", "busiest_rank")), 0.0)
    figures |= dict.fromkeys(("planned_imbalance", "measured_imbalance", "over_bound", "unavoidable_waiting"), 1.0)
    figures |= {"num_microbatches": 1.0, "padding_fraction": 0.0, "oversized_samples": 0.0}
    shown = re.findall(
        r"^    megatron_balance: iteration \d+ \| step \| (.*)$", FIRST_RUN.read_text(), flags=re.MULTILINE
    )
    assert len(shown) == 3

    def words(line):
        return re.sub(r"[\d.]+", "#", re.sub(r"measured [^|]*\|", "measured |", line))

    assert {words(line) for line in shown} == {words(log_line(figures))}


FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-\d+)?")
WITH_FIGURES = [README, DOCS / "evidence.md", DOCS / "dynamic-cp.md", DOCS / "planner.md"]


def section_of_results(anchor):
    """The text below a heading of RESULTS.md, up to the next of its level or above."""
    lines = RESULTS.read_text().splitlines()
    (start,) = (index for index, line in enumerate(lines) if line.startswith("#") and site_anchors(line) == {anchor})
    level = len(lines[start].split()[0])
    rest = itertools.takewhile(lambda line: not re.match(rf"#{{1,{level}}} ", line), lines[start + 1 :])
    return "\n".join(rest)


@pytest.mark.parametrize("page", WITH_FIGURES, ids=name_of)
def test_figures_are_those_of_the_results(page):
    """In a row of a table or a sentence with links to sections of RESULTS.md every figure is one of theirs.

    Numbers in words, in code, in names of layouts and versions are no figures.
    """
    found = 0
    for part in re.split(r"\n(?=\|)|\n\n|(?<=[.:;)])\s(?!\|)", without_code(page)):
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


def test_the_picture_of_the_quickstart_is_of_the_published_run():
    published = json.loads(RESULTS.with_name("results.json").read_text())["quickstart"]["policies"]
    picture = (DOCS / "pictures" / "before_after_dark.svg").read_text()
    for name, figures in published.items():
        assert f"{figures['cpu_speedup']:.2f}×" in section_of_results("quickstart"), name
        if name in ("stock", "dynamic-cp"):
            assert f"{figures['busiest_cpu_seconds']:.2f} s a step" in picture, name


def test_every_dependency_of_a_user_has_a_licence():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *itertools.chain(*(extras[name] for name in extras if name != "dev"))]
    section = (DOCS / "index.md").read_text().partition("## Licences")[2]
    for requirement in needed:
        name = re.split(r"[^\w.-]", requirement)[0]
        assert re.search(rf"`{name}`[^|]*\([A-Z]", section), f"{name} has no licence in docs/index.md"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_plans_in_pictures_are_todays(monkeypatch):
    """matplotlib writes a title as text; its figure is in the words beside the picture too."""
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    dynamic_cp, planner, steps = map(importlib.import_module, ("dynamic_cp", "planner", "plan_steps"))
    assert steps.PICTURE.read_text() == steps.picture(), "stale: run python docs/pictures/plan_steps.py"
    drawn = [(dynamic_cp.PICTURE, DOCS / "dynamic-cp.md", dynamic_cp.panels())]
    for one in planner.pictures():
        drawn.append((DOCS / "pictures" / f"objective_{one.name}.svg", DOCS / "planner.md", one.panels))
    for picture, page, panels in drawn:
        figures = [panel.title.rsplit(" ", 1)[1] for panel in panels]
        for panel, figure in zip(panels, figures, strict=True):
            assert panel.title in picture.read_text(), f"stale: run its script in docs/pictures ({panel.title})"
            assert figure in page.read_text()
        assert float(figures[1]) < float(figures[0])


PACKAGE = Path(megatron_balance.__path__[0])
WITH_EXAMPLES = [path for path in sorted(PACKAGE.rglob("*.py")) if ">>>" in path.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings(path):
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


API = DOCS / "api.md"
SESSION = """
import doctest, sys, cpu_shim
cpu_shim.enable_cpu()
sys.exit(doctest.testfile(sys.argv[1], module_relative=False, optionflags=doctest.ELLIPSIS).failed)
"""


def test_examples_of_the_python_page(tmp_path):
    """Each public name has one, in its docstring or below it. In a process of its own: they make a group and hooks."""
    for part in API.read_text().split("::: megatron_balance.")[1:]:
        home, _, name = part.split()[0].rpartition(".")
        item = getattr(importlib.import_module(f"megatron_balance.{home}".rstrip(".")), name)
        examples = [inspect.getdoc(member) or "" for member in (item, *vars(item).values())]
        assert ">>>" in part or any(">>>" in example for example in examples), f"{name} has no example"
    page = tmp_path / "api.md"
    page.write_text(re.sub(r"^```.*$", "", API.read_text(), flags=re.MULTILINE))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "kit")])
    command = [sys.executable, "-W", "ignore", "-c", SESSION, str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout


def test_python_page_has_every_public_name_where_it_is():
    """Fault: a class moved, and only a build of the site, which no test makes, found it."""
    named = re.findall(r"^::: megatron_balance\.([\w.]+)$", API.read_text(), flags=re.MULTILINE)
    assert {name.rpartition(".")[2] for name in named} >= set(megatron_balance.__all__) - {"__version__"}
    for name in named:
        home, _, attribute = name.rpartition(".")
        folder = PACKAGE / home.replace(".", "/")
        source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        text = source.read_text()
        assert re.search(rf'^(class|def) {attribute}\b|"{attribute}"', text, flags=re.MULTILINE), name
