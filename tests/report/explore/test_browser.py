"""The page in a real browser: each tab is used as a person would, nothing is asked of another machine, nothing stays.

A screenshot of each tab lies in the test's folder: ``pytest --basetemp FOLDER`` says where that is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.browser import chromium, needs_browser
from support.presets import MODEL, SMALL

from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.run.folder import RunFolder

pytestmark = [
    pytest.mark.slow(seconds=25),
    pytest.mark.skipif(find_spec("gradio") is None, reason="pip install 'fedvlp[app]'"),
    needs_browser,
]

HOSTILE = "<img src=x onerror=\"document.title='a'\">${document.title='b'}{{value}}<script>document.title='c'</script>"

WATCHED = """
import sys

def watch(event, given):
    if event == "socket.connect" and isinstance(given[1], tuple) and given[1][0] not in ("127.0.0.1", "::1"):
        print("ASKED ELSEWHERE", given[1][0], file=sys.stderr, flush=True)
    if event == "socket.getaddrinfo" and given[0] not in ("127.0.0.1", "localhost", None):
        print("ASKED ELSEWHERE", given[0], file=sys.stderr, flush=True)

sys.addaudithook(watch)
from fedvlp.cli import main
main()
"""
"""`fedvlp`, which says of each connection to another machine."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 40 films with reports at three sites, and a finished run."""
    folder = tmp_path_factory.mktemp("home")
    write(SyntheticCohort(sites=3, size=40, image_size=36), folder)
    experiment = replace(SMALL, name="run", data=TableSource("pairs.csv", image_size=36))
    RunFolder.create(folder / "runs", experiment).finish(experiment, dict(MODEL.build(3).state_dict()), [])
    (folder / "DOE_JANE.txt").write_text("no film")
    (folder / "temporary").mkdir()
    return folder


@pytest.fixture
def program(home: Path) -> Iterator[subprocess.Popen[str]]:
    """`fedvlp explore`, which has said where its page is."""
    command = ["explore", "runs/run/001", "--data", "table:pairs.csv", "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(home / "temporary"), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED, *command], cwd=home, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


class Person:
    """Who uses the page: waits for what should appear, types and clicks."""

    def __init__(self, browser: Any, shots: Path) -> None:
        self.browser, self.shots = browser, shots

    def sees(self, selector: str, words: str = "", count: int = 1) -> Any:
        """The first of at least ``count`` visible elements that have the words, once they are there."""
        from selenium.webdriver.support.wait import WebDriverWait

        def there(browser: Any) -> Any:
            script = "return [...document.querySelectorAll(arguments[0])].filter(e => e.textContent.includes("
            script += "arguments[1]) && e.checkVisibility({visibilityProperty: true, opacityProperty: true}))"
            elements = browser.execute_script(script, selector, words)
            return elements[0] if len(elements) >= count else False

        return WebDriverWait(self.browser, 40, ignored_exceptions=()).until(there, f"{count} x {selector}: {words!r}")

    def waits(self, condition: Callable[[], bool]) -> None:
        """Returns once the condition holds."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.browser, 40).until(lambda _: condition())

    def disappears(self, selector: str) -> None:
        """Returns once no element is there any more."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.browser, 40).until_not(lambda browser: browser.find_elements("css selector", selector))

    def types(self, label: str, words: str) -> None:
        field = self.sees("label", label).find_element("css selector", "input,textarea")
        field.clear()
        field.send_keys(words)

    def clicks(self, words: str) -> None:
        self.sees("button:not([tabindex='-1'])", words).click()  # Gradio measures tabs by copies of them

    def shows(self, name: str) -> None:
        """A screenshot of the whole page."""
        self.browser.set_window_size(1400, 900)
        height = self.browser.execute_script("return document.documentElement.scrollHeight")
        self.browser.set_window_size(1400, max(900, int(height) + 140))
        assert self.browser.save_screenshot(str(self.shots / f"{name}.png"))


def asked(browser: Any) -> set[str]:
    """The addresses of all requests of the browser."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}


def stored(home: Path) -> list[Path]:
    """What of images is on disk while the page is open. (Gradio makes an empty file beside each that is dropped.)"""
    return [path for path in (home / "temporary").rglob("*") if path.is_file() and path.stat().st_size]


def test_a_person_uses_every_tab(home: Path, program: subprocess.Popen[str], browser: Any, tmp_path: Path) -> None:
    assert program.stdout is not None
    said = [program.stdout.readline() for _ in range(2)]  # the second when the page is there
    address = said[-1].partition(" ")[0]
    assert address.startswith("http://127.0.0.1:"), "".join(said)
    browser.get(address)
    person = Person(browser, tmp_path)

    person.types("What to look for", "left basal effusion")
    person.clicks("Search")
    person.sees(".fx .card img", count=8)
    assert browser.execute_script("return document.documentElement.lang") == "en"
    person.sees(".fx .card .key", ".png")  # the name of the file
    person.sees(".fx .card img").send_keys("\n")  # by keyboard, as by a click
    large = person.sees(".fx img.large")
    person.sees(".fx .note", ".png, ")
    in_view = "const box = arguments[0].getBoundingClientRect(); return box.top >= -1 && box.top < innerHeight"
    person.waits(lambda: browser.execute_script(in_view, large))
    person.clicks("Where does the model look for the phrase?")
    person.sees(".fx p", "left basal effusion")
    person.sees(".fx img.map")
    person.shows("phrase")

    person.types("What to look for", HOSTILE)
    person.clicks("Search")
    person.disappears(".fx img.map")
    person.clicks("Where does the model look for the phrase?")
    person.sees(".fx b", HOSTILE)
    assert browser.title == "fedvlp explore", "what a person or a record says is shown, and not run"

    person.clicks("An image")
    person.sees("button", "Ask")
    drop = browser.find_element("css selector", "input[type=file]")
    drop.send_keys(str(home / "images" / "000005.png"))
    person.sees(".fx td", "Pleural Effusion")
    person.sees(".fx .card", "cosine +1.000")
    person.sees(".fx img.map")
    person.shows("film")
    assert stored(home) == []

    drop = browser.find_element("css selector", "input[type=file]")
    drop.send_keys(str(home / "DOE_JANE.txt"))
    error = person.sees(".toast-body, .toast-wrap", "the image cannot be used: unsupported image format")
    assert "DOE" not in error.text
    person.sees("button", "Drop File Here")
    for secret in ("DOE", str(home)):
        assert secret not in browser.page_source
    assert stored(home) == []

    person.clicks("Embeddings")
    person.sees(".fx p", "Images by site")
    assert len(browser.find_elements("css selector", ".fx svg title")) == 40
    person.sees(".fx text", "of the variance", count=2)
    point = person.sees(".fx [data-index='5']")
    browser.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", point)
    person.sees(".fx .card .report")
    person.sees(".fx img.large")
    person.shows("space")

    elsewhere = {url for url in asked(browser) if not url.startswith((address, "data:", "blob:"))}
    assert elsewhere == set()
    blocked = [entry["message"] for entry in browser.get_log("browser") if "Content Security" in entry["message"]]
    assert blocked == []

    os.kill(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 130
    assert "Traceback" not in errors
    assert "ASKED ELSEWHERE" not in errors
    assert list((home / "temporary").iterdir()) == []
