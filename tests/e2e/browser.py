"""Drive a headless browser that can reach only this machine."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionBuilder
from selenium.webdriver.common.actions.pointer_input import PointerInput
from selenium.webdriver.common.by import By
from waiting import limit

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--window-size=1400,1000",
)
_RELOAD_SECONDS = limit(60)
# TensorBoard's page is made of elements whose children are in shadow trees.
_DEEP = """
function deep(root, selector) {
  const matches = [...root.querySelectorAll(selector)];
  for (const element of root.querySelectorAll('*'))
    if (element.shadowRoot) matches.push(...deep(element.shadowRoot, selector));
  return matches;
}
function above(element, name) {
  while (element && element.localName !== name) element = element.parentElement || element.getRootNode().host;
  return element;
}
"""


class Browser:
    """Chromium or Chrome with an empty profile in `folder`; the context ends it."""

    def __init__(self, folder: Path) -> None:
        names = ("chromium", "google-chrome", "chrome")
        binary, driver = next(filter(None, map(shutil.which, names)), None), shutil.which("chromedriver")
        if binary is None or driver is None:
            pytest.fail("there is no Chromium or Chrome with its chromedriver on PATH: run make browser")
        options = webdriver.ChromeOptions()
        options.binary_location = binary
        for flag in (*_FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self._driver = webdriver.Chrome(options=options, service=Service(driver))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._driver.quit()

    def open(self, url: str) -> None:
        """Open a page from its beginning, even if only the fragment differs."""
        self._driver.get("about:blank")
        self._driver.get(url)

    def emulate(self, width: int, height: int, scheme: str = "light", media: str = "screen", bars: bool = True) -> None:
        """Set the viewport of pages that are opened later, in CSS pixels; a width below 600 is a phone's.

        Args:
            scheme: the preferred colour scheme, `light` or `dark`.
            media: `screen` or `print`.
            bars: whether scroll bars are shown.
        """
        self._driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": not bars})
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})

    def value(self, script: str) -> Any:
        """Return the result of a script on the open page."""
        return self._driver.execute_script(_DEEP + script)

    def draw(
        self, selector: str, points: Sequence[tuple[float, float]], kind: str = "mouse", until: Callable[[], bool] | None = None
    ) -> None:
        """Draw a line over an element by `mouse`, `pen` or `touch`, with `until` repeatedly until that returns True.

        Points are fractions of its width and height, from its upper left.
        """
        element = self._driver.find_element(By.CSS_SELECTOR, selector)
        self._driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        box = self._driver.execute_script(
            "const b = arguments[0].getBoundingClientRect(); return [b.x, b.y, b.width, b.height]", element
        )

        def follow(down: bool) -> ActionBuilder:
            actions = ActionBuilder(self._driver, mouse=PointerInput(kind, kind), duration=5)
            for index, (x, y) in enumerate(points):
                actions.pointer_action.move_to_location(round(box[0] + x * box[2]), round(box[1] + y * box[3]))
                if down and index == 0:
                    actions.pointer_action.pointer_down()
            return actions

        actions = follow(down=True)
        while until:
            actions.perform()
            actions = follow(down=False)
            if until():
                break
        actions.pointer_action.pointer_up()
        actions.perform()

    def press(self, selector: str, key: str) -> None:
        """Focus an element and press a key on it."""
        self._driver.find_element(By.CSS_SELECTOR, selector).send_keys(key)

    def await_script(self, script: str, is_expected: Callable[[Any], bool], seconds: float = 60) -> Any:
        """Run a script on the open page until its result is as expected, and return that."""
        deadline = time.monotonic() + limit(seconds)
        while not is_expected(value := self.value(script)):
            assert time.monotonic() < deadline, f"after {limit(seconds):.0f} s still {value!r}: {script}"
            time.sleep(0.05)
        return value

    def picture(self, path: Path, full_page: bool = True) -> None:
        """Write the page, or its visible part, as a PNG."""
        screenshot = self._driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"captureBeyondViewport": full_page, **self._clip(full_page)}
        )
        path.write_bytes(base64.b64decode(screenshot["data"]))

    def _clip(self, full_page: bool) -> dict[str, Any]:
        if not full_page:
            return {}
        size = self._driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def read_logs(self) -> tuple[list[str], list[str]]:
        """Return console messages and requested URLs since the last call."""
        messages = [entry["message"] for entry in self._driver.get_log("browser")]
        events = [json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")]
        return messages, [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]

    def check_no_messages(self, *urls: str) -> None:
        """Check that since the last read the console is empty and each requested URL has one of these prefixes."""
        console, requested = self.read_logs()
        assert console == [], "the console is empty"
        assert all(url == "about:blank" or url.startswith(urls) for url in requested), requested

    def await_value(self, url: str, script: str, is_expected: Callable[[Any], bool], seconds: float = 300) -> Any:
        """Open a page until a script's result on it is as expected, and return that.

        The script may use deep(root, selector) and above(element, name). The page is reloaded at intervals, as TensorBoard
        lists its data once, possibly before it has read all of it.
        """
        deadline = time.monotonic() + limit(seconds)
        while True:
            self.open(url)
            reload_time = time.monotonic() + _RELOAD_SECONDS
            while time.monotonic() < reload_time:
                if is_expected(value := self._driver.execute_script(_DEEP + script)):
                    return value
                time.sleep(0.5)
            if time.monotonic() > deadline:
                raise AssertionError(f"after {limit(seconds):.0f} s {url} still returns {value!r} for {script}")
