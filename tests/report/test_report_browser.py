"""The page in a real browser: nothing goes wrong, hovering lists samples, readable wide and narrow, light and dark."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from report_runs import large_record, run_info, run_record, unmeasured

from megatron_balance import Topology
from megatron_balance.report.page import write_report

pytest.importorskip("plotly")
pytest.importorskip("selenium")
if TYPE_CHECKING:
    from selenium.webdriver import Chrome

MAX_PAGE_BYTES = 10_000_000


def show(browser: Chrome, page: Path, *, width: int = 1280, scheme: str = "light") -> None:
    """Open the page and wait until it is drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    colours = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", colours)
    browser.get_log("browser")
    browser.get(page.as_uri())
    drawn = "return document.documentElement.dataset.drawn"
    WebDriverWait(browser, 120).until(lambda chrome: chrome.execute_script(drawn))


def pixels(png: bytes) -> tuple[int, set[bytes]]:
    """Width of a picture, and its different rows of pixels."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    data, place = b"", 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            data += png[place + 8 : place + 8 + length]
        place += 12 + length
    raw = zlib.decompress(data)
    stride = len(raw) // height
    return width, {raw[row * stride : (row + 1) * stride] for row in range(height)}


def luminance(colour: str) -> float:
    """Of a CSS colour `rgb(r, g, b)`, from 0 to 1, as WCAG defines it."""
    channels = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(run_record(), out=tmp_path_factory.mktemp("report") / "report.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_page_is_readable(browser: Chrome, page: Path, width: int, scheme: str) -> None:
    show(browser, page, width=width, scheme=scheme)
    assert browser.get_log("browser") == []
    # Nothing sticks out sideways, and every chart holds something.
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    bars = browser.execute_script("return document.querySelectorAll('#timeline .bars .point path').length")
    assert bars > 50
    for chart in ("imbalance", "lengths", "fit", "packing"):
        assert browser.execute_script(f"return document.querySelectorAll('#{chart} .trace').length") >= 1
    # Text against the page: 7 to 1 is WCAG's stricter contrast; headings, captions and numbers in charts.
    back = luminance(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert (back < 0.1) == (scheme == "dark")
    for selector, property_name, least in (
        ("h1", "color", 7.0),
        ("figcaption", "color", 4.5),
        ("#timeline .xtick text", "fill", 7.0),
    ):
        script = f"return getComputedStyle(document.querySelector('{selector}'))['{property_name}']"
        front = luminance(browser.execute_script(script))
        assert (max(front, back) + 0.05) / (min(front, back) + 0.05) >= least, selector
    picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})["data"]
    shown_width, rows = pixels(base64.b64decode(picture))
    assert width - 20 <= shown_width <= width  # a scroll bar is no part of it
    assert len(rows) > 100


@pytest.mark.parametrize("width", [1280, 400])
def test_hovering_tells_samples_and_lengths(browser: Chrome, page: Path, width: int) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    show(browser, page, width=width)
    # The longest bar of the second timeline, the plan's; waiting is drawn before the micro-batches.
    find = """
      const bars = document.querySelectorAll('#timeline .subplot.xy2 .trace.bars:last-child .point path');
      const widest = [...bars].sort((a, b) => b.getBBox().width - a.getBBox().width)[0];
      widest.scrollIntoView({block: 'center'});
      return widest;
    """
    bar = browser.execute_script(find)
    ActionChains(browser).move_to_element(bar).perform()
    text = WebDriverWait(browser, 20).until(
        lambda chrome: " ".join(
            each.text for each in chrome.find_elements(By.CSS_SELECTOR, "#timeline .hovertext text")
        )
    )
    assert "micro-batch" in text
    assert "tokens" in text
    assert "sample" in text
    timelines = browser.execute_script("return JSON.parse(document.getElementById('timelines').textContent)")
    step = timelines["steps"][timelines["first"]]
    assert any(f"{length:,}" in text for length in step["batches"][0])


def test_picker_walks_through_the_steps(browser: Chrome, page: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    show(browser, page)
    select = Select(browser.find_element(By.ID, "step"))
    labels = [option.text for option in select.options]
    assert len(labels) == 6
    assert any("worst measured imbalance" in label for label in labels)
    summary = browser.find_element(By.ID, "step-summary")
    select.select_by_index(0)
    first = summary.get_attribute("textContent") or ""
    assert first.startswith("Step 1. Before: stock sampler")
    assert not browser.find_element(By.ID, "previous").is_enabled()
    browser.find_element(By.ID, "next").click()
    assert (summary.get_attribute("textContent") or "").startswith("Step 2.")
    cells = browser.execute_script(
        "return [...document.querySelectorAll('#step-table td')].map((cell) => cell.textContent)"
    )
    assert len(cells) == 4 * 3
    assert all(cell.endswith("s") for cell in cells)
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("topology", [Topology(8, ep_size=4), Topology(8, pp_size=4)])
def test_other_objectives_and_plans_without_seconds(browser: Chrome, tmp_path: Path, topology: Topology) -> None:
    record = unmeasured(run_record(run_info(topology), num_steps=2))
    show(browser, write_report(record, out=tmp_path / "report.html"))
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.querySelectorAll('#fit').length") == 0
    panels = "return [...document.querySelectorAll('#timeline .annotation-text')].map((title) => title.textContent)"
    before, after = browser.execute_script(panels)
    assert before.startswith("Before: stock sampler, predicted")
    assert after.startswith("After: the plan, predicted")
    assert "FLOP, imbalance" in after


def test_a_thousand_steps_of_64_ranks(browser: Chrome, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = write_report(large_record(), out=tmp_path / "report.html")
    assert page.stat().st_size < MAX_PAGE_BYTES
    show(browser, page)
    assert browser.get_log("browser") == []
    times: dict[str, Any] = browser.execute_script(
        "const page = performance.getEntriesByType('navigation')[0];"
        "return {loaded: page.loadEventEnd, drawn: Number(document.documentElement.dataset.drawn)}"
    )
    with capsys.disabled():
        print(
            f"\n1,000 steps of 64 ranks: {page.stat().st_size / 1e6:.1f} MB, "
            f"loaded after {times['loaded'] / 1e3:.2f} s, drawn after {times['drawn'] / 1e3:.2f} s"
        )
