"""Tables of the recalls that were measured again: with intervals, and beside them chance and the source oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedvlp.evaluation import metric_names as names
from fedvlp.report.html import ABSENT, table, text
from fedvlp.report.run import SCOPES, Run
from fedvlp.run.beside import lacking
from fedvlp.run.compare import INITIAL
from fedvlp.run.experiment import POOLED
from fedvlp.run.recalls import FROM_AVERAGE, GAIN, SITE, TOGETHER, TRAINED, Recall

OVER = {
    names.AVERAGE: "average over sites",
    names.WORST: "worst site",
    TOGETHER: "records of all sites in one set",
}
EXPLANATION = (
    "Each cell is the recall, or a difference of two, in percent, with its 95 % interval over resamples of the test "
    "patients; candidates stay. The interval of the worst site holds the percentiles and twice the figure minus "
    "the percentiles. How far another seed of the training would move a figure the intervals do not say, and "
    "each of them is of one site by itself: of many sites, one may lie apart by chance. A source oracle knows only "
    "which site a film and a report come from, and guesses among that site's records."
)
MISSING = (
    "There are no intervals over patients yet. They can be measured where the run's records are, with "
    "fedvlp report RUN --intervals."
)
UNMEASURABLE = (
    "There are no intervals over patients: what each site measured is its own model, beside the server's, and such "
    "models are not measured again."
)
OF_SERVER = " These figures are of the server's model; those that the sites sent are not."


def tables(run: Run) -> str:
    """Recalls over sites and by site, as HTML; without a measurement, the sentence that says how to get it."""
    if not run.recalls:
        return f"<p>{text(MISSING if run.measurable else UNMEASURABLE)}</p>"
    beside = _beside(run)
    explanation = EXPLANATION + OF_SERVER * bool(run.evaluated and run.sends)
    head = ("", "test pairs", "initial", "trained", "gained", "chance", "source oracle")
    over = [_over(run.recalls, row) for row in _trained(run.recalls) if row.over != SITE]
    out = f"{beside}<h3>Test split with intervals</h3><p>{text(explanation)}</p>{table(head, over)}"
    scope = names.IN_BATCH if any(row.scope == names.IN_BATCH for row in run.recalls) else names.WHOLE_SET
    head = ("site", "test pairs", "initial", "trained", "gained", "from the average", "chance")
    sites = [
        _of_site(run.recalls, row) for row in _trained(run.recalls) if (row.over, row.k, row.scope) == (SITE, 1, scope)
    ]
    return f"{out}<h3>R@1 by site, test, {SCOPES[scope]}, with intervals</h3>{table(head, sites)}{_left_out(run)}"


def _beside(run: Run) -> str:
    """What the run is held against, and the commands of what is not there, as HTML."""
    if not run.beside:
        return ""
    rows = [[row.what, row.of_run, row.other, row.of_other] for row in run.beside]
    shown = table(["", "this run", "held against", "its figure"], rows)
    missing = "".join(f"<p>Not measured: {text(command)}.</p>" for command in lacking(run.folder))
    return f"<h3>What it is worth</h3>{shown}{missing}"


def _left_out(run: Run) -> str:
    """Which sites that took part were not measured, as HTML."""
    elsewhere = {POOLED, *(run.setting("partition.left_out") or "").split(",")}
    measured = {row.site for row in run.recalls}
    few = [site for site in run.sites if site not in measured | elsewhere]
    return f"<p>Left out, with fewer than 2 test pairs: {text(', '.join(few))}.</p>" if few else ""


def _trained(recalls: Sequence[Recall]) -> list[Recall]:
    return [row for row in recalls if row.figure == TRAINED]


def _over(recalls: Sequence[Recall], row: Recall) -> list[str]:
    """The cells of a recall over sites."""
    title = f"R@{row.k}, {SCOPES[row.scope]}, {OVER[row.over]}"
    figures = [_cell(recalls, row, figure) for figure in (INITIAL, TRAINED, GAIN)]
    return [title, f"{row.queries:,}", *figures, _percent(row.chance), _percent(row.oracle)]


def _of_site(recalls: Sequence[Recall], row: Recall) -> list[str]:
    """The cells of a site's recall."""
    figures = [_cell(recalls, row, figure) for figure in (INITIAL, TRAINED, GAIN, FROM_AVERAGE)]
    return [row.site, f"{row.queries:,}", *figures, _percent(row.chance)]


def _cell(recalls: Sequence[Recall], row: Recall, figure: str) -> str:
    """Another figure of the same site, scope and k, with its interval."""
    same = (row.over, row.site, row.scope, row.k)
    for other in recalls:
        if other.figure == figure and (other.over, other.site, other.scope, other.k) == same:
            return str(other.recall) if figure in (GAIN, FROM_AVERAGE) else other.recall.unsigned()
    return ABSENT


def _percent(value: float) -> str:
    return ABSENT if math.isnan(value) else f"{value:.1f}"
