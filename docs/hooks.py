"""A hook of mkdocs: the site has the folders of the repository, so that links lead where they lead there.

Its pages are README, docs/ and the guides of the other folders. Code and pictures that a page links to come along as
they are. Pages that are written from tables or code alone are made here (``MADE``) and are in no commit; a link to the
file that writes one leads to the page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fedvlp.core.names import PUBLIC

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "tests")]

from support import evidence  # noqa: E402

from studies.claims import results_page  # noqa: E402

MADE: dict[str, tuple[str, Callable[[], str]]] = {
    "docs/evidence.md": ("tests/support/evidence.py", evidence.content),
    "studies/results/claims.md": ("studies/claims/results_page.py", results_page.page),
}
"""Page -> the file that writes it, and its function."""

FOLDERS = ("docs", "provisioning", "poc", "studies", "tests")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the site: those of the theme, the repository's pages, and what these link to."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for folder in FOLDERS:
        pages += sorted((ROOT / folder).rglob("*.md"))
    linked = {target for page in pages for target in links(page)}.difference(pages)
    site = [file for file in files if file.src_dir != config.docs_dir]
    own = [ROOT / "docs" / "site.css", ROOT / "docs" / "iframe-worker.js"]
    for path in [*pages, *sorted(linked), *own]:
        site.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    made = {"docs/api.md": api()} | {page: write() for page, (_, write) in MADE.items()}
    return Files([*site, *(File.generated(config, page, content=text) for page, text in made.items())])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of a page, whose links to what writes another lead to that."""
    for page, (source, _written) in MADE.items():
        markdown = re.sub(rf"(\]\((?:\.\./)*){re.escape(source)}", rf"\1{page}", markdown)
    return markdown


def links(page: Path) -> set[Path]:
    """The files that a page links to and that exist."""
    found = re.findall(r"(?:\]\(|src=\")([^)#\s\"]+)", page.read_text(encoding="utf-8"))
    targets = {(page.parent / target).resolve() for target in found if "://" not in target}
    return {target for target in targets if target.is_file() and target.is_relative_to(ROOT)}


def api() -> str:
    """A page with every public name, by package; fedvlp itself comes first."""
    packages: dict[str, list[str]] = {}
    for name in sorted(PUBLIC, key=lambda name: (name.count("."), name)):
        packages.setdefault(name.rpartition(".")[0], []).append(PUBLIC[name])
    lines = ["# API", "", "The public names: what jobs, configurations, policies and your own code may name."]
    for package, paths in packages.items():
        lines += ["", f"## {package}"]
        for path in paths:
            lines += ["", f"::: {path}"]
    return "\n".join(lines) + "\n"
