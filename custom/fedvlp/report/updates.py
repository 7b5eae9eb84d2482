"""The report's sections on updates: how much each one changes the model, and which were not used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedvlp.core.metric_names import update_norm
from fedvlp.report import figures, html
from fedvlp.run.metrics import Record


def changes(history: Sequence[Record], sites: Sequence[str], style: Callable[[str], dict[str, Any]]) -> str:
    """Curves of the L2 norm of every site's change, by phase, as HTML; ``style`` gives the line of a site.

    A norm far above the others is a reason to look at that site.
    """
    drawings = ""
    for phase in dict.fromkeys(record["phase"] for record in history):
        norms = [(record["round"], record.get("server", {})) for record in history if record["phase"] == phase]
        curves: list[figures.Curve] = []
        for site in sites:
            name = update_norm(site)
            curves.append((site, {round: metrics[name] for round, metrics in norms if name in metrics}, style(site)))
        drawings += figures.lines(f"{phase}: L2 norm of the change, as sent", curves, "round")
    return html.grid(drawings)


def dropped(history: Sequence[Record]) -> str:
    """Table of the updates that were not used, with the reasons, as HTML; "" where all were."""
    rows = [
        [record["round"], record["phase"], site, reason]
        for record in history
        for site, reason in sorted(record["dropped"].items())
    ]
    if not rows:
        return ""
    return html.table(["round", "phase", "site", "reason"], rows, "text")
