"""Chromium without a screen: pages at several sizes, in light and dark, and what they requested."""

import base64
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

# Chromium asks Google's hosts for updates unless it is told not to.
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)
# How long the machine may take for a picture; far more than it does.
PATIENCE_SECONDS = 60


def find_browser() -> tuple[Path, Path, dict[str, str]]:
    """Return the programs of Chromium and its driver, and the environment that they need."""
    root = Path(os.environ["ONNXPLACE_TEST_BROWSER"])
    if (program := root / "lib/chromium/chromium").exists() and root != Path("/usr"):
        libraries = root / "lib/x86_64-linux-gnu"
        return program, root / "bin/chromedriver", {"LD_LIBRARY_PATH": f"{libraries}:{libraries}/pulseaudio"}
    return root / "bin/chromium", root / "bin/chromedriver", {}


class Browser:
    """A browser with one page."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Path, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        """Open a page, and wait until its timeline is drawn."""
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        self.resize(width, height)
        self.set_scheme(dark=dark)
        self.driver.get(page.as_uri())
        self.wait(lambda: self.run("return document.querySelector('[data-chart=timeline]').dataset.ready === 'true'"))

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window; narrow ones are those of a phone, whose pointer is a finger."""
        is_phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if is_phone else 1, "mobile": is_phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": is_phone})

    def set_scheme(self, *, dark: bool) -> None:
        """Prefer light or dark."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page; return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, is_ready: Callable[[], object]) -> None:
        """Wait until something holds; raises AssertionError if it never does."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not is_ready():
            assert time.monotonic() < end, "the page did not get there"
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait until the page has drawn what it was asked to."""
        self.driver.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 50))")

    def capture(self, path: Path, height: int | None = None, *, begin: str = "body", scale: float = 1) -> None:
        """Write a picture of the page from the top of an element, of the whole page by default."""
        width = self.run("return window.innerWidth")
        height = height or self.run("return document.documentElement.scrollHeight")
        top = self.run("return document.querySelector(arguments[0]).getBoundingClientRect().top + scrollY", begin)
        self.resize(width, height + int(top))
        self.wait(lambda: self.run("return [...document.querySelectorAll('[data-chart]')]"
                                   ".filter((e) => e.checkVisibility())"
                                   ".filter((e) => e.getBoundingClientRect().top < window.innerHeight)"
                                   ".every((e) => e.dataset.ready === 'true')"))  # fmt: skip
        self.settle()
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": scale}
        data = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))

    def list_console_problems(self) -> list[str]:
        """Return warnings and errors of the console, violations of the page's policy among them."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]

    def list_requests(self) -> list[str]:
        """Return the addresses that were requested since the page was opened."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser that ends with the block."""
    program, driver_program, environment = find_browser()
    options = webdriver.ChromeOptions()
    options.binary_location = str(program)
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(str(driver_program), env={**os.environ, **environment}))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
