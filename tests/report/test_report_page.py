"""The page as text: whole in one file, safe, and with its figures for those who do not see charts."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import run_record, unmeasured

from megatron_balance import BalanceError
from megatron_balance.cost.calibration import Calibration
from megatron_balance.report.page import render, write_report
from megatron_balance.report.run_figures import run_figures

pytest.importorskip("plotly")


class Elements(HTMLParser):
    """Tags with their attributes, and the text of headings, cells and captions."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data


@pytest.fixture(scope="module")
def page() -> str:
    return render(run_figures(run_record()))


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    for tag, attributes in Elements(page).found:
        assert not attributes.get("src"), tag
        assert attributes.get("href") in (None, "data:,"), tag
    assert "default-src 'none'" in page


def test_text_of_the_run_is_escaped(page: str) -> None:
    elements = Elements(page)
    assert elements.texts["h1"] == ["--balance-data --balance-by-flops on a test's <device>"]
    assert "<device>" not in page


def test_every_chart_has_a_heading_and_a_text(page: str) -> None:
    elements = Elements(page)
    ids = {attributes["id"] for _, attributes in elements.found if "id" in attributes}
    charts = [attributes for _, attributes in elements.found if attributes.get("class") == "chart"]
    assert [chart["id"] for chart in charts] == ["timeline", "imbalance", "lengths", "fit", "packing"]
    for chart in charts:
        assert {chart["aria-labelledby"], chart["aria-describedby"]} <= ids
    assert all(len(caption) > 40 for caption in elements.texts["figcaption"])
    assert len(elements.texts["h1"]) == 1


def test_the_table_holds_what_was_planned_and_measured(page: str) -> None:
    figures = run_figures(run_record())
    table = re.search(r"<table>(.*?)</table>", page)
    assert table is not None
    row = re.search(r'<th scope="row">imbalance \(slowest / mean\), mean</th>(.*?)</tr>', table[1])
    assert row is not None
    cells = re.findall(r"<td>(.*?)</td>", row[1])
    means = figures.stock.imbalance.mean(), figures.planned.imbalance.mean(), figures.measured_imbalance.mean()
    assert cells == [f"{mean:.3f}" for mean in means]
    assert f"{figures.speed_up:.2f}×" in page


def test_a_calibration_is_drawn_with_its_own_measurements() -> None:
    measurements = tuple(
        {"lengths": [size], "seconds": 1e-3 * size, "predicted": 1.01e-3 * size, "held_out": size % 2 == 0}
        for size in range(1, 9)
    )
    calibration = Calibration(linear=1e-3, held_out_error=0.01, measurements=measurements)
    page = render(run_figures(run_record()), calibration=calibration)
    figures = json.loads(re.findall(r'id="figures">(.*?)</script>', page)[0])
    (chart,) = [figure for figure in figures if figure["name"] == "calibration"]
    assert [trace["name"] for trace in chart["figure"]["data"]] == ["equal", "fitted", "held out"]
    assert "held out it is off by 1.0%" in page


def test_a_plan_shows_no_measurements() -> None:
    page = render(run_figures(unmeasured(run_record())))
    assert "measured</th>" not in page
    assert 'id="fit"' not in page


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BalanceError, match=r"--out is .*cannot be written"):
        write_report(run_record(), out=tmp_path)
