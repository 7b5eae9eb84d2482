"""The report's section on the loss terms of every phase."""

from __future__ import annotations

from fedvlp.report import figures
from fedvlp.report.figures import AVERAGE, Points
from fedvlp.report.html import grid
from fedvlp.report.run import Run

MOST = 12  # loss terms drawn for a phase


def section(run: Run) -> str:
    """Every term of every phase: the average over the sites that answered, and each site."""
    out = ""
    for phase in dict.fromkeys(record["phase"] for record, _ in run.training):
        sites = [(record["round"], metrics) for record, metrics in run.training if record["phase"] == phase]
        terms = dict.fromkeys(n for _, m in sites for values in m.values() for n in values if n.startswith("loss/"))
        for term in list(terms)[:MOST]:
            average: Points = {}
            for x, metrics in sites:
                present = [values[term] for values in metrics.values() if term in values]
                if present:
                    average[x] = sum(value / len(present) for value in present)
            curves = [(s, {x: m[s][term] for x, m in sites if term in m.get(s, {})}, run.style(s)) for s in run.sites]
            curves = [curve for curve in curves if curve[1]]
            if len(curves) > 1:
                curves.insert(0, ("average", average, AVERAGE))
            out += figures.lines(f"{phase}: {term.removeprefix('loss/')}", curves, "round")
        out += f"<p>{phase}: {len(terms) - MOST} more terms are in metrics.csv.</p>" if len(terms) > MOST else ""
    return grid(out, "No loss has been reported.")
