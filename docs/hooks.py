"""A hook of mkdocs: the site has the folders of the repository, so that links lead where they lead there.

Its pages are README, docs/ and the guides of the other folders. Code and pictures that a page links to come along as
they are. Pages that are written from code, tables or notebooks are made here and are in no commit (``made``): a link to
the file that writes one leads to the page. With NOTEBOOKS=run in the environment the notebooks show what they print.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fedvlp.core.names import PUBLIC

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "tests")]

from support import evidence, notebooks  # noqa: E402

from studies.claims import results_page  # noqa: E402

FOLDERS = ("docs", "provisioning", "poc", "studies", "tests")
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))

WRITTEN_BY = {
    "tests/support/evidence.py": "docs/evidence.md",
    "studies/claims/results_page.py": "studies/results/claims.md",
    **{f"docs/tutorials/{path.name}": f"docs/tutorials/{path.stem}.md" for path in TUTORIALS},
}
"""File -> the page that is made of it."""


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
    return Files([*site, *(File.generated(config, path, content=content) for path, content in made().items())])


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The text of a page, whose links to what writes another page lead to that."""
    folder = posixpath.dirname(page.file.src_uri)

    def led(link: re.Match[str]) -> str:
        target = WRITTEN_BY.get(posixpath.normpath(posixpath.join(folder, link[1])))
        return f"]({posixpath.relpath(target, folder or '.')}" if target else link[0]

    return re.sub(r"\]\(([^)#\s]+)", led, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """The page with its formulas as MathML, which browsers draw themselves, and less markup of code.

    Names, numbers, operators and spaces need no colour.
    """
    html = re.sub(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', drawn, html, flags=re.DOTALL)
    return re.sub(r'<span class="(?:w|n|p|o|nn|bp|fm|nc|nf|nd|nb|mi|mf|kc|ow|gp)">([^<]*)</span>', r"\1", html)


def drawn(formula: re.Match[str]) -> str:
    """A formula of a page, in LaTeX between ``$`` or ``$$``, as MathML; one on a line of its own scrolls if it is wide.

    A bar of a norm is as high as a letter, and a little space follows log.
    """
    block = formula[1] == "div"
    made = convert(unescape(formula[2]), display="block" if block else "inline")
    made = made.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")  # HTML knows it
    made = made.replace("<mo>&#x02016;", '<mo stretchy="false">&#x02016;')
    made = made.replace("<mi>log</mi>", '<mi>log</mi><mspace width="0.17em" />')
    return f'<div class="formula">{made}</div>' if block else made


def links(page: Path) -> set[Path]:
    """The files that a page links to and that exist."""
    found = re.findall(r"(?:\]\(|src=\")([^)#\s\"]+)", page.read_text(encoding="utf-8"))
    targets = {(page.parent / target).resolve() for target in found if "://" not in target}
    return {target for target in targets if target.is_file() and target.is_relative_to(ROOT)}


def made() -> dict[str, str]:
    """The pages that are made here, each with its Markdown: no one of them is too long for a browser or a reader."""
    run = os.environ.get("NOTEBOOKS") == "run"
    pages = {"docs/evidence.md": evidence.content()}
    pages |= {f"studies/results/{name}.md": text for name, text in results_page.pages().items()}
    pages |= {f"docs/tutorials/{path.stem}.md": notebooks.page(path, run) for path in TUTORIALS}
    pages |= {f"docs/api/{name}.md": f"# {name}\n\n::: {path}\n" for name, path in PUBLIC.items()}
    return pages | {"docs/api.md": api()}


def api() -> str:
    """A list of every public name, by package; fedvlp itself comes first."""
    packages: dict[str, list[str]] = {}
    for name in sorted(PUBLIC, key=lambda name: (name.count("."), name)):
        packages.setdefault(name.rpartition(".")[0], []).append(name)
    lines = ["# API", "", "The public names: what jobs, configurations, policies and your own code may name."]
    for package, names in packages.items():
        lines += ["", f"## {package}", ""]
        lines += [f"- [{name.rpartition('.')[2]}](api/{name}.md)" for name in names]
    return "\n".join(lines) + "\n"
