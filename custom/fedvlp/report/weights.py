"""The report's section on the robust weights of the sites."""

from __future__ import annotations

from fedvlp.core import metric_names
from fedvlp.methods.robust import ERROR, LOSSES, WEIGHTS
from fedvlp.report import figures
from fedvlp.report.figures import Points
from fedvlp.report.html import grid
from fedvlp.report.run import Run


def section(run: Run) -> str:
    """Curves of the robust weights after each round, and of the losses that moved them, as HTML; "" without any."""
    weights = _by_site(run, WEIGHTS)
    level = ("uniform", 1 / len(weights)) if weights else None
    out = figures.lines("DRO weight w, at the end of the round", _curves(run, weights), "round", level)
    losses = _curves(run, _by_site(run, LOSSES))
    title = "Loss v that moves the weights, at the end of the round"
    out += figures.lines(title, losses, "round", errors=_errors(run))
    return grid(out)


def _by_site(run: Run, name: str) -> dict[str, Points]:
    """Site -> round -> value of a tensor of the server's memory that holds one number for each site."""
    sites: dict[str, Points] = {}
    for record, _ in run.training:
        for site, value in zip(record["members"], record["memory"].get(name, ()), strict=False):
            sites.setdefault(site, {})[record["round"]] = value
    return sites


def _curves(run: Run, sites: dict[str, Points]) -> list[figures.Curve]:
    return [(site, sites[site], run.style(site)) for site in run.sites if site in sites]


def _errors(run: Run) -> dict[str, Points]:
    """Site -> round -> standard error of the loss that it sent in the round."""
    sites: dict[str, Points] = {}
    for record, by_site in run.training:
        for site, metrics in by_site.items():
            if metric_names.probe(ERROR) in metrics:
                sites.setdefault(site, {})[record["round"]] = metrics[metric_names.probe(ERROR)]
    return sites
