"""The page in Chromium without a window, as Debian packages it: readable wide and narrow, light and dark."""

import shutil

import pytest
from recorded_runs import record_writers, run_info, step_of, write_record

from megatron_balance import CostModel, Forest, Topology
from megatron_balance.cli import main

pytest.importorskip("jinja2")
pytest.importorskip("selenium")

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Debian's chromium and chromium-driver: .ci/install_chromium")
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("chromium")
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service(driver))
    chrome.set_page_load_timeout(120)
    yield chrome
    chrome.quit()


def page_of(folder):
    page = folder / "page.html"
    assert main(["report", str(folder / "record"), "--out", str(page)]) == 0
    return page


def show(browser, page, *, width=1280, scheme="light"):
    """Open the page, wait until it is drawn, and see that nothing was reported."""
    from selenium.webdriver.support.ui import WebDriverWait

    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    colours = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", colours)
    browser.get_log("browser")
    browser.get(page.as_uri())
    drawn = "return document.documentElement.dataset.drawn"
    WebDriverWait(browser, 120).until(lambda chrome: chrome.execute_script(drawn))
    assert browser.get_log("browser") == []


def luminance(colour):
    """Of a CSS colour `rgb(r, g, b)`, from 0 to 1, as WCAG defines it."""
    channels = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_record(folder / "record")
    return page_of(folder)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_page_is_readable(browser, page, width, scheme):
    show(browser, page, width=width, scheme=scheme)
    # Nothing sticks out sideways, and every chart holds something.
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    bars = browser.execute_script("return document.querySelectorAll('#timeline .work').length")
    assert bars > 50
    browser.execute_script("document.querySelector('[data-copies]').click()")
    assert browser.execute_script("return window.getSelection().toString()").startswith("--balance-data")
    assert browser.execute_script("return document.querySelectorAll('#imbalance .trace').length") == 3
    # Text against the page: 7 to 1 is WCAG's stricter contrast; headings, captions and numbers in charts.
    back = luminance(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert (back < 0.1) == (scheme == "dark")
    for selector, name, least in (
        ("h1", "color", 7.0),
        ("figcaption", "color", 4.5),
        ("#timeline .xtick", "fill", 7.0),
    ):
        script = f"return getComputedStyle(document.querySelector('{selector}'))['{name}']"
        front = luminance(browser.execute_script(script))
        assert (max(front, back) + 0.05) / (min(front, back) + 0.05) >= least, selector


def test_a_plan_without_seconds(browser, tmp_path):
    info = run_info(Topology(8, pp_size=4), objective="pipeline")
    write_record(tmp_path / "record", info, num_steps=2, measured=False)
    show(browser, page_of(tmp_path))
    panels = "return [...document.querySelectorAll('#timeline .title')].map((title) => title.textContent)"
    before, after = browser.execute_script(panels)
    assert before.startswith("Before: stock sampler, predicted")
    assert after.startswith("After: the plan, predicted")


def test_a_micro_batch_is_drawn_as_a_forest(browser, tmp_path):
    """Two samples of 300 tokens whose first 200 are the same, on one rank: one block over both, and two behind it."""
    info = run_info(Topology(1), cost_model=CostModel(linear=1))
    forest = Forest.from_prompts([300, 300], prompt_tokens=[200, 200], groups=[0, 0])
    with record_writers(tmp_path / "record", info, num_ranks=1) as (writer,):
        writer.add_step(step_of(info, [300, 300], forest=forest))
    show(browser, page_of(tmp_path))
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('#forest rect')].map(({x, y, width, height}) =>"
        " [x, y, width, height].map((size) => size.baseVal.value))"
    )
    shared, *others = sorted(boxes)
    assert shared[2] == pytest.approx(2 * others[0][2])
    assert shared[3] > others[0][3] + others[1][3]
    summary = browser.execute_script("return document.getElementById('forest-summary').textContent")
    assert "600 tokens of 2 samples, of which 400 are computed" in summary


@pytest.mark.slow
def test_a_thousand_steps_of_64_ranks(browser, tmp_path):
    write_record(tmp_path / "record", run_info(Topology(64)), num_steps=1000, num_samples=512, num_plans=20)
    page = page_of(tmp_path)
    assert page.stat().st_size < 1_500_000
    show(browser, page)
