"""Takes the report of `make quickstart` in Chromium, light and dark: `python docs/pictures/page.py [PAGE]` after it.

Needs Debian's chromium and chromium-driver (.ci/install_chromium).
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT = 1040, 1660  # the figures, and one step rank by rank
NUM_COLOURS = 128  # keeps a picture below 200 KB


def main() -> None:
    """Write report_light.png and report_dark.png beside this file."""
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "quickstart" / "report.html"
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]:
        options.add_argument(flag)
    chrome = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for scheme in ("light", "dark"):
        colours = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", colours)
        chrome.get(page.resolve().as_uri())
        WebDriverWait(chrome, 60).until(
            lambda driver: driver.execute_script("return document.documentElement.dataset.drawn")
        )
        picture = Image.open(io.BytesIO(chrome.get_screenshot_as_png())).convert("RGB").quantize(NUM_COLOURS)
        picture.save(Path(__file__).with_name(f"report_{scheme}.png"), optimize=True)
    chrome.quit()


if __name__ == "__main__":
    main()
