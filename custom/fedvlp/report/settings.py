"""The report's section on all settings and versions."""

from __future__ import annotations

from fedvlp.report import html
from fedvlp.report.html import ABSENT, grid, text
from fedvlp.report.run import Run


def section(run: Run) -> str:
    """Everything that was set, and the versions."""
    groups = [(key, value) for key, value in run.config.get("args", {}).items() if isinstance(value, dict)]
    cards = {f"{key}: {html.kind(of)}": {n: html.shown(v) for n, v in of.get("args", {}).items()} for key, of in groups}
    cards["versions"] = {"python": run.environment.get("python", ABSENT), **run.environment.get("packages", {})}
    parts = [f"<div><h3>{text(title)}</h3>{html.pairs(items)}</div>" for title, items in cards.items()]
    return grid("".join(parts), kind="cards")
