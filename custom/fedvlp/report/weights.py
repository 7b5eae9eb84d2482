"""The report's section on the robust weights of the sites."""

from __future__ import annotations

from fedvlp.methods.robust import LOSSES, WEIGHTS
from fedvlp.report import figures
from fedvlp.report.figures import Points
from fedvlp.report.html import grid
from fedvlp.report.run import Run


def section(run: Run) -> str:
    """Curves of the robust weights after each round, and of the losses that moved them, as HTML."""
    out = ""
    for name, title in ((WEIGHTS, "DRO weight w"), (LOSSES, "Loss v that moves the weights")):
        sites: dict[str, Points] = {}
        for record, _ in run.training:
            for site, value in zip(record["members"], record["memory"].get(name, ()), strict=False):
                sites.setdefault(site, {})[record["round"]] = value
        level = ("uniform", 1 / len(sites)) if sites and name == WEIGHTS else None
        curves = [(site, sites[site], run.style(site)) for site in run.sites if site in sites]
        out += figures.lines(f"{title}, at the end of the round", curves, "round", level)
    return grid(out, "The records have no robust site weights.")
