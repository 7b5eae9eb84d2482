"""The report's sections on what the sites sent: how far each update is from the model, and which were not used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedvlp.report import figures, html
from fedvlp.run.metrics import Record


def changes(history: Sequence[Record], sites: Sequence[str], style: Callable[[str], dict[str, Any]]) -> str:
    """The length of every site's change, by phase. One far above the others is a reason to look at that site."""
    drawn = ""
    for phase in dict.fromkeys(record["phase"] for record in history):
        norms = [(record["round"], record.get("server", {})) for record in history if record["phase"] == phase]
        keys = {site: f"update_norm/{site}" for site in sites}
        curves = [(site, {x: m[key] for x, m in norms if key in m}, style(site)) for site, key in keys.items()]
        drawn += figures.lines(f"{phase}: L2 norm of the change, as sent", curves, "round")
    return html.grid(drawn, "No change of the model's weights is on record.")


def dropped(history: Sequence[Record]) -> str:
    """Which updates were not used, and why."""
    rows = [[r["round"], r["phase"], site, why] for r in history for site, why in sorted(r["dropped"].items())]
    if not rows:
        return "<p>No update was dropped.</p>"
    return html.table(["round", "phase", "site", "reason"], rows, "text")
