"""The report's section on all settings and versions."""

from __future__ import annotations

from fedvlp.report import html
from fedvlp.report.html import ABSENT, grid, text
from fedvlp.report.run import Run


def section(run: Run) -> str:
    """All settings by group, and the versions, as HTML."""
    groups = [(key, value) for key, value in run.config.get("args", {}).items() if isinstance(value, dict)]
    cards = {
        f"{key}: {html.kind(of)}": {name: html.shown(value, name) for name, value in of.get("args", {}).items()}
        for key, of in groups
    }
    cards["versions"] = {"python": run.environment.get("python", ABSENT), **run.environment.get("packages", {})}
    cells = [f"<div><h3>{text(title)}</h3>{html.pairs(items)}</div>" for title, items in cards.items()]
    return grid("".join(cells), kind="cards")
