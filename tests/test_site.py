"""The site that `make docs` builds: without a warning, with all documents and the API, and from no other machine."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.browser import chromium, needs_browser
from support.checkout import copied
from test_tutorials import NAMES

from fedvlp.core.names import PUBLIC

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow(seconds=10)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds in a copy of the project. It finds the written page and the picture as they are."""
    folder = copied(tmp_path_factory.mktemp("checkout") / "fedvlp")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "docs", "VENV=environment", "NOTEBOOKS="],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for written in ("docs/feddra.md", "docs/pictures/rooms.svg"):
        assert (folder / written).read_bytes() == (ROOT / written).read_bytes()
    return folder / "build" / "docs"


def test_every_document_is_a_page_in_the_menu(site: Path) -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    documents = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(path for path in documents if f" {path}\n" not in menu) == []
    pages = {path.replace("README.md", "index.md").replace(".md", ".html") for path in documents}
    made = {"docs/api.html", "docs/evidence.html"} | {f"docs/tutorials/{name}.html" for name in NAMES}
    found = {page.relative_to(site).as_posix() for page in (site / "docs").rglob("*.html")}
    assert pages | made == {path for path in found if not path.startswith("docs/api/")}
    assert (site / "studies" / "results" / "claims.html").exists()
    assert 'href="../tutorials/' not in (site / "docs" / "runs.html").read_text(encoding="utf-8")
    assert "image-text model from X-rays and reports" in (site / "index.html").read_text(encoding="utf-8")


def test_the_api_has_every_public_name_and_what_its_fields_mean(site: Path) -> None:
    page = "".join(path.read_text(encoding="utf-8") for path in (site / "docs" / "api").glob("*.html"))
    assert {path for path in PUBLIC.values() if f'id="{path}"' not in page} == set()
    assert "E1, steps of the align phase" in page, "the comment behind FedDRA.align_steps"
    assert "z*_x" in page


def test_no_page_is_longer_than_62_kb(site: Path) -> None:
    long = {page.relative_to(site).as_posix(): page.stat().st_size for page in site.rglob("*.html")}
    assert {path: size for path, size in long.items() if size > 62_000} == {}


def test_nothing_is_loaded_from_another_machine(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe)[^>]*src=\"?https?:|<link[^>]*stylesheet[^>]*https?:")
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    assert [page.name for page in pages if loads.search(page.read_text(encoding="utf-8"))] == []
    assert (site / "search" / "search_index.js").exists(), "what the search reads from file://"
    assert (site / "docs" / "iframe-worker.js").exists()


@needs_browser
def test_a_query_is_answered_from_the_disk(site: Path) -> None:
    """As a reader types it, without a server and without the network."""
    from selenium.webdriver.support.wait import WebDriverWait

    with chromium() as browser:
        browser.get((site / "index.html").as_uri())
        field = browser.find_element("css selector", "input.md-search__input")
        browser.execute_script("arguments[0].focus()", field)
        field.send_keys("membership")
        links = "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        found = WebDriverWait(browser, 40).until(lambda browser: browser.execute_script(links))
        assert any(link.partition("#")[0].endswith("docs/runs.html") for link in found)
