"""Take the README's pictures of a report: give it the report.html of a `make demo`.

    python assets/shoot_report.py runs/demo/report.html    # with Chromium and ChromeDriver
"""

import base64
import shutil
import sys
from pathlib import Path

from selenium import webdriver

HERE = Path(__file__).parent
WIDTH = 1160  # pixels: three charts beside each other
PICTURES = {  # picture -> it begins at the top of the first element and ends at the bottom of the second
    "report_completions": ("#completions h2", "#groups details table tbody tr:nth-child(5)"),
    "report_pruning": ("[data-section=Pruning] summary", "[data-section=Pruning] .charts"),
}


def edge(chrome: webdriver.Chrome, element: str, side: str) -> float:
    """Measure how far below the top of the page an element begins or ends."""
    script = f"return document.querySelector(arguments[0]).getBoundingClientRect().{side} + scrollY"
    return chrome.execute_script(script, element)


def main() -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(flag)
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    chrome.get(Path(sys.argv[1]).resolve().as_uri())
    chrome.execute_script("document.querySelector('#groups table + details').open = true")
    for name, (first, last) in PICTURES.items():
        top, bottom = edge(chrome, first, "top"), edge(chrome, last, "bottom")
        clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top + 8, "scale": 1}
        whole_page = {"captureBeyondViewport": True, "clip": clip}
        picture = chrome.execute_cdp_cmd("Page.captureScreenshot", whole_page)
        (HERE / f"{name}.png").write_bytes(base64.b64decode(picture["data"]))
    chrome.quit()


if __name__ == "__main__":
    main()
