"""Chromium, driven as a person would use it; it reaches this machine alone, and notes every request."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

needs_browser = pytest.mark.skipif(
    find_spec("selenium") is None or not (BROWSER and DRIVER),
    reason="pip install selenium, and chromium with its chromedriver",
)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser that is open within."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1300",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    try:
        yield started
    finally:
        started.quit()
