"""The report's section on zero-shot classification, by finding and site."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fedvlp.evaluation.intervals import Interval
from fedvlp.report import figures
from fedvlp.report.html import ABSENT, grid, table, text
from fedvlp.report.run import Run
from fedvlp.run.compare import INITIAL
from fedvlp.run.recalls import TRAINED
from fedvlp.run.zero_shot_areas import Area

ARROW = "\N{RIGHTWARDS ARROW}"
EXPLANATION = (
    "Area under the ROC curve on the test films of every site, 0 to 1: the model ranks the films by sentences that say "
    "the finding, and was trained on no label. Chance is 0.5. In brackets and as bars: 95 % intervals over resamples "
    "of the test patients. A finding that a report does not mention counts as absent, an uncertain one is left out. "
    "Behind a comma: positive films of all."
)


def section(run: Run) -> str:
    """Areas of the trained model beside those of the initial one, as HTML; "" where nobody measured them."""
    areas = [one for one in run.areas if one.site in run.sites]
    if not areas:
        return ""
    findings = list(dict.fromkeys(one.finding for one in areas))
    sites = list(dict.fromkeys(one.site for one in areas))
    rows = [[finding, *(_cell(areas, site, finding) for site in sites)] for finding in findings]
    rows.append(["mean of these", *(_mean(areas, site) for site in sites)])
    shown: dict[str, dict[str, Interval]] = {site: {} for site in sites}
    for one in areas:
        if one.model == TRAINED:
            shown[one.site][one.finding] = one.area
    looks = {site: run.style(site) for site in sites}
    drawing = figures.ranges("Zero-shot AUC of the trained model", shown, looks, ("chance", 0.5))
    head = ("finding", *(f"{site}: initial {ARROW} trained" for site in sites))
    return f"<p>{text(EXPLANATION)}</p>{table(head, rows)}{grid(drawing)}"


def _cell(areas: Sequence[Area], site: str, finding: str) -> str:
    """Both models at one site, with the number of positive films."""
    of = {one.model: one for one in areas if (one.site, one.finding) == (site, finding)}
    if TRAINED not in of:
        return ABSENT
    trained = of[TRAINED]
    before = f"{of[INITIAL].area.value:.2f}" if INITIAL in of else ABSENT
    return f"{before} {ARROW} {trained.area.unsigned(2)}, {trained.positive} of {trained.films}"


def _mean(areas: Sequence[Area], site: str) -> str:
    """The mean over findings of both models at one site."""
    means = []
    for model in (INITIAL, TRAINED):
        values = [one.area.value for one in areas if (one.model, one.site) == (model, site)]
        means.append(f"{fmean(values):.2f}" if values else ABSENT)
    return f" {ARROW} ".join(means)
