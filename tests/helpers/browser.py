"""Chromium without a window, which loads nothing from elsewhere. Without it tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

OPTIONS = (
    "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
    "disable-background-networking", "disable-component-update", "disable-sync",
)  # fmt: skip


@contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """A driver of Chromium, with an empty folder for its profile."""
    webdriver = pytest.importorskip("selenium.webdriver")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("no browser here: chromium and chromedriver are needed")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for option in (*OPTIONS, f"user-data-dir={profile}", "window-size=1280,1000"):
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(driver))
    started.implicitly_wait(10)
    try:
        yield started
    finally:
        started.quit()


@contextmanager
def phone(browser: Any, *, dark: bool) -> Iterator[None]:
    """A screen of 390 pixels, and the light or dark colors that its owner wants."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    screen = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
