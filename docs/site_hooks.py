"""Steps of mkdocs beside building pages (`hooks` in mkdocs.yml).

    results      benchmarks/RESULTS.md becomes a part of the site, so that a figure links to its section
    code blocks  the mark `no-run` of a block that the tests do not run is left out: it is not for readers

In the pages links to results lead out of docs/, as they must on a code host; here they are turned round.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "RESULTS.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the results in the navigation."""
    assert config.nav is not None
    config.nav.append({"Results": "results.md"})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Take in the results and their figures."""
    files.append(File.generated(config, "results.md", abs_src_path=str(RESULTS)))
    files.append(File.generated(config, "results.json", abs_src_path=str(RESULTS.with_name("results.json"))))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to results round, and take marks out."""
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+benchmarks/RESULTS\.md", f"]({up}results.md", markdown)
    return re.sub(r"^(```\w+) no-run$", r"\1", markdown, flags=re.MULTILINE)
