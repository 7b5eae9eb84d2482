"""The report's section on the loss terms of every phase."""

from __future__ import annotations

from fedvlp.core.metric_names import loss_term
from fedvlp.report import figures
from fedvlp.report.figures import AVERAGE, Curve, Points
from fedvlp.report.html import grid
from fedvlp.report.run import Run

MOST = 12  # loss terms drawn for a phase


def section(run: Run) -> str:
    """Curves of every term in every phase, as HTML: the average over the sites that answered, and each site."""
    out = ""
    for phase in dict.fromkeys(record["phase"] for record, _ in run.training):
        sites = [(record["round"], metrics) for record, metrics in run.training if record["phase"] == phase]
        reported = (name for _, metrics in sites for values in metrics.values() for name in values)
        names = [name for name in dict.fromkeys(reported) if loss_term(name) is not None]
        for name in names[:MOST]:
            average: Points = {}
            for round, metrics in sites:
                present = [values[name] for values in metrics.values() if name in values]
                if present:
                    average[round] = sum(value / len(present) for value in present)
            curves: list[Curve] = []
            for site in run.sites:
                points = {round: metrics[site][name] for round, metrics in sites if name in metrics.get(site, {})}
                if points:
                    curves.append((site, points, run.style(site)))
            if len(curves) > 1:
                curves.insert(0, ("average", average, AVERAGE))
            out += figures.lines(f"{phase}: {loss_term(name)}", curves, "round")
        if len(names) > MOST:
            out += f"<p>{phase}: {len(names) - MOST} more terms are in metrics.csv.</p>"
    return grid(out)
