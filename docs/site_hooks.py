"""Steps of mkdocs beside building pages (`hooks` in mkdocs.yml).

    results      benchmarks/results/ becomes a part of the site, so that a figure links to the file it comes from
    code blocks  the mark `no-run` of a block that the tests do not run is left out: it is not for readers

In the pages links to results lead out of docs/, as they must on a code host; here they are turned round.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the results in the navigation."""
    assert config.nav is not None
    config.nav.append({"Results": [f"results/{path.name}" for path in sorted(RESULTS.glob("*.md"))]})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Take the results and their plots in."""
    for path in sorted([*RESULTS.glob("*.md"), *RESULTS.glob("*.svg")]):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to results round, and take marks out."""
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+benchmarks/results/", f"]({up}results/", markdown)
    return re.sub(r"^(```\w+) no-run$", r"\1", markdown, flags=re.MULTILINE)
