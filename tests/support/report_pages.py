"""Report pages of runs whose records are made up, read as a browser reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from fedvlp.core.server_state import Server
from fedvlp.report import figures
from fedvlp.report.run_page import write
from fedvlp.run import presets
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import Record

SITES = ("site-1", "site-2", "site-10")
NAN = math.nan


class Page(HTMLParser):
    """The page as a browser sees it: tags with attributes, figures with their tables, all text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = self._title = self._inside = ""
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "img":
            self._title = dict(attrs)["alt"] or ""
        elif tag == "table":
            self.tables[self._title] = []
        elif tag == "tr":
            self.tables[self._title].append([])
        elif tag in ("td", "th"):
            self.tables[self._title][-1].append("")
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._inside in ("h2", "h3"):
            self._title = data
        if self._inside in ("td", "th"):
            self.tables[self._title][-1][-1] += data

    def alts(self) -> list[str]:
        return [attrs["alt"] or "" for tag, attrs in self.tags if tag == "img"]


def recalls(r1: float, *splits: str, scopes: tuple[str, ...] = ("", "all/")) -> dict[str, float]:
    return {f"{split}/{scope}mean/r{k}": r1 * k for split in splits for scope in scopes for k in (1, 5)}


def record(round: int, phase: str, sites: dict[str, dict[str, float]], **more: Any) -> Record:
    usual: Record = {
        "round": round, "phase": phase, "seconds": 1.5, "dropped": {}, "sites": sites, "members": sorted(SITES),
        "bytes": {"bytes_down": 3_000_000, "bytes_up": 0 if phase == "evaluate" else 2_000_000}, "memory": {},
    }  # fmt: skip
    return usual | more


def robust() -> list[Record]:
    """Two rounds of two phases and the last evaluation; weights move in round 1."""
    history = []
    for r in (0, 1):
        # by asked, that is site-1, site-10, site-2
        memory = {"dro_weights": [1 / 3] * 3, "dro_losses": [NAN] * 3}
        if r:
            memory = {"dro_weights": [0.5, 0.125, 0.375], "dro_losses": [4.25, 2.5, 3.0]}
        splits = ("val",) if r else ("val", "test")
        align = {s: {"loss/contrastive": 6.0 - r + i, **recalls(3 + r + i, *splits)} for i, s in enumerate(SITES)}
        for s, error in (("site-1", 0.25), ("site-2", 0.125)):  # site-10 has one batch, whose spread is not known
            align[s]["probe/loss_error"] = error
        joint = {s: {"loss/contrastive": 5.0 - r + i, "loss/constraint": 0.25} for i, s in enumerate(SITES)}
        history += [record(r, "align", align, memory=memory), record(r, "joint", joint, memory=memory)]
    last = {s: recalls(6 + 2.0 * i, "val", "test") for i, s in enumerate(SITES)}
    return [*history, record(2, "evaluate", last, memory=memory)]


def run_of(tmp_path: Path, history: list[Record], preset: str = "feddra", **header: Any) -> RunFolder:
    folder = RunFolder.create(tmp_path, presets.get(preset))
    server = Server(tuple(header.pop("sites", SITES)), {"weight": torch.zeros(2)}, history=history)
    server.memory = header.pop("memory", {})
    server.samples = header.pop("samples", {"site-1": 100, "site-2": 1200, "site-10": 300})
    server.save(folder.checkpoint, 0)
    return folder


@contextmanager
def undrawn() -> Iterator[None]:
    """Leaves curves and bars out of pages, which take most of their time; their titles and tables of values stay."""
    with patch.object(figures, "_axes", lambda *_, **__: (MagicMock(), MagicMock())):
        yield


def page_of(folder: RunFolder, drawn: bool = False) -> Page:
    """The page of a run, with drawings only where a test looks at them."""
    with nullcontext() if drawn else undrawn():
        path = write(folder)
    assert path == folder.path / "report.html"
    return Page(path)
