"""The report's section on retrieval: initial and trained, by site, and over rounds."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

from fedvlp.core.metric_keys import BYTES_UP
from fedvlp.core.types import EVALUATE
from fedvlp.core.validate import counted
from fedvlp.evaluation import metric_names as names
from fedvlp.evaluation.intervals import Interval
from fedvlp.report import figures
from fedvlp.report.figures import AVERAGE, WORST, Curve
from fedvlp.report.html import ABSENT, grid, table, text
from fedvlp.report.run import SCOPES, Run
from fedvlp.run.beside import lacking, siblings, ways_on
from fedvlp.run.compare import BATCH, INITIAL
from fedvlp.run.experiment import POOLED
from fedvlp.run.folder import seen_from_here
from fedvlp.run.metrics import Record, by_site
from fedvlp.run.recalls import FROM_AVERAGE, GAIN, SITE, TOGETHER, TRAINED, Recall

# Tables of the recalls that were measured again: with intervals, and beside them chance and the source oracle.

OVER = {
    names.AVERAGE: "average over sites",
    names.WORST: "worst site",
    TOGETHER: "studies of all sites in one set",
}
EXPLANATION = (
    "Each cell is the recall, or a difference of two, in percent, with its 95 % interval by a bootstrap over the test "
    "patients; candidates stay. For the worst site it is the union of the percentile and the basic interval. The "
    "intervals do not cover other training seeds, and each is of one site by itself: of many sites, one may lie apart "
    "by chance. A source oracle knows only which site an image and a report come from, and guesses among that site's "
    "studies."
)
DEFINITION = (
    "R@1: the share of test images whose own report ranks first, averaged with that of reports whose own image does."
)
CHANCE = "chance"
MISSING = (
    "There are no intervals over patients yet. They can be measured where the run's data are: "
    "fedvlp report {run} --intervals"
)
UNMEASURABLE = (
    "There are no intervals over patients: what each site measured is its own model, beside the server's, and such "
    "models are not measured again."
)
OF_SERVER = "These metrics are of the server's model; those that the sites sent are not."


def at_a_glance(run: Run) -> str:
    """R@1 over sites and by site, and what the run is held against, as HTML; "" where not measured."""
    if not run.recalls:
        return ""
    head = ("", "test pairs", "initial", "trained", "gained", "from the average", "chance")
    rows = [_of_site(run.recalls, row) for row in _chosen(run)]
    title = f"R@1 on the test split, {SCOPES[_scope(run)]} (%), with 95 % intervals"
    whose = f"<p>{text(OF_SERVER)}</p>" if run.evaluated and run.sends else ""
    gone = ("initial", "gained") if run.closed_form else ()
    columns = [[cell for name, cell in zip(head, line, strict=True) if name not in gone] for line in (head, *rows)]
    return f"<h2>{title}</h2>{whose}{table(columns[0], columns[1:])}{_left_out(run)}{_beside(run)}"


def drawing(run: Run) -> str:
    """R@1 over sites and by site before and after training, beside chance, as HTML."""
    shown: dict[str, dict[str, Interval]] = {INITIAL: {}, TRAINED: {}, CHANCE: {}}
    if run.closed_form:
        del shown[INITIAL]
    for row in _chosen(run):
        name = row.site or OVER[row.over]
        for figure in shown.keys() - {CHANCE}:
            if (other := _same(run.recalls, row, figure)) is not None:
                shown[figure][name] = other.recall
        if not math.isnan(row.chance):
            shown[CHANCE][name] = Interval(row.chance, math.nan, math.nan)
    looks = {INITIAL: figures.UNTRAINED, TRAINED: figures.look(0), CHANCE: {"color": "black", "marker": "|"}}
    return figures.ranges(f"R@1, test split, {SCOPES[_scope(run)]} (%)", shown, looks)


def _chosen(run: Run) -> list[Recall]:
    """The recalls at the top of the page, those over sites first."""
    chosen = [row for row in _trained(run.recalls) if _first(run, row)]
    return sorted(chosen, key=lambda row: row.over == SITE)


def _scope(run: Run) -> str:
    """The candidates of the recalls that are shown first."""
    return names.IN_BATCH if any(row.scope == names.IN_BATCH for row in run.recalls) else names.WHOLE_SET


def _first(run: Run, row: Recall) -> bool:
    """Whether the recall stands at the top of the page, and not in the table of the others."""
    return (row.k, row.scope) == (1, _scope(run)) and row.over != TOGETHER


def recall_tables(run: Run) -> str:
    """The other recalls over sites, as HTML; without a measurement, the sentence that says how to get it."""
    if not run.recalls:
        return f"<p>{text(MISSING.format(run=_typed(run)) if run.measurable else UNMEASURABLE)}</p>"
    head = ("", "test pairs", "initial", "trained", "gained", "chance", "source oracle")
    over = [_over(run.recalls, row) for row in _trained(run.recalls) if row.over != SITE and not _first(run, row)]
    others = f"<h3>Test split with intervals</h3>{table(head, over)}" if over else ""
    return f"<p>{text(EXPLANATION)}</p>{others}"


def _beside(run: Run) -> str:
    """What the run is held against, as HTML; "" where nobody measured it."""
    rows = [[row.what, row.of_run, row.other, row.of_other] for row in run.beside]
    return "<h2>What it is worth</h2>" + table(["", "this run", "held against", "its metric"], rows) if rows else ""


def next_steps(run: Run) -> str:
    """The commands of the runs that are not there to compare with, and of the page that shows images, as HTML."""
    steps = [f"Compare with {command}" for command in lacking(run.folder)] if run.method is not None else []
    steps += [f"{way[0].upper()}{way[1:]}" for way in ways_on(run.folder, run.beside)]
    if run.beside and (said := siblings(run.folder).said):
        steps.append(f"{said[0].upper()}{said[1:]}")
    steps += [
        f"See images and reports, for the eyes of their owner alone: fedvlp report {_typed(run)} --films",
        f"Search them, and see what else is near: fedvlp explore {_typed(run)} --data {_typed(run, 'run:')}",
    ]
    items = "".join(f"<li>{text(step)}</li>" for step in steps)
    return f"<h2>What to do next</h2><ul>{items}</ul>"


def _typed(run: Run, before: str = "") -> str:
    """The run's folder as a command takes it."""
    return shlex.quote(f"{before}{seen_from_here(run.folder.path)}")


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
    return [title, f"{row.queries:,}", *figures, _percent_or_absent(row.chance), _percent_or_absent(row.oracle)]


def _of_site(recalls: Sequence[Recall], row: Recall) -> list[str]:
    """The cells of a site's recall, or of one over sites."""
    figures = [_cell(recalls, row, figure) for figure in (INITIAL, TRAINED, GAIN, FROM_AVERAGE)]
    return [row.site or OVER[row.over], f"{row.queries:,}", *figures, _percent_or_absent(row.chance)]


def _cell(recalls: Sequence[Recall], row: Recall, figure: str) -> str:
    """Another figure of the same site, scope and k, with its interval."""
    other = _same(recalls, row, figure)
    if other is None:
        return ABSENT
    return str(other.recall) if figure in (GAIN, FROM_AVERAGE) else other.recall.unsigned()


def _same(recalls: Sequence[Recall], row: Recall, figure: str) -> Recall | None:
    """Another figure of the same site, scope and k."""
    same = (figure, row.over, row.site, row.scope, row.k)
    return next((one for one in recalls if (one.figure, one.over, one.site, one.scope, one.k) == same), None)


def _percent_or_absent(value: float) -> str:
    return ABSENT if math.isnan(value) else f"{value:.1f}"


KS, ARROW = (1, 5), " \N{RIGHTWARDS ARROW} "
KINDS = {names.AVERAGE: "average", names.WORST: "worst site", names.DISPARITY: "disparity (population SD)"}


def section(run: Run) -> str:
    """Tables of the initial and the trained model, bars by site and curves over rounds, as HTML; "" without any."""
    if not run.measured:
        return ""
    (first, _), (last, _) = run.measured[0], run.measured[-1]
    notes = _notes(run, first, last)
    ends = {_moment(record): (record, figures) for record, figures in (run.measured[0], run.measured[-1])}
    over_sites = {name: figures for name, (_, figures) in ends.items()}
    spread = {names.DISPARITY: KINDS[names.DISPARITY]}  # alone, where the tables of recalls have the others
    tables = _ends("test", over_sites, spread if run.recalls else KINDS) + _ends("val", over_sites, KINDS)
    drawings = _over_rounds(run)
    if not run.recalls:
        drawings += _by_site(run, {name: record for name, (record, _) in ends.items()})
    return "".join(f"<p>{text(note)}</p>" for note in notes) + recall_tables(run) + tables + grid(drawings)


def _notes(run: Run, first: Record, last: Record) -> list[str]:
    """What a reader must know of the figures: their definition, and what sets this run apart."""
    notes = [
        "Recall@K (R@K) on held-out studies, in percent, mean of both directions. Average and worst are over sites; "
        "disparity is the population SD over sites, as the papers do not define theirs. Chance is "
        f"100 K / {BATCH} in batches and 100 K / N in a whole set of N studies, which differs by site."
    ]
    if first is last and not run.closed_form:
        notes.append(f"Only one evaluation so far ({_moment(first)}).")
    one_sided = _measured_sites(first) ^ _measured_sites(last)
    if one_sided:
        listed = ", ".join(site for site in run.sites if site in one_sided)
        notes.append(f"Not the same sites were measured at both ends ({listed}), so compare the averages with care.")
    if run.training and not any(record.get("bytes", {}).get(BYTES_UP, 1) for record, _ in run.training):
        notes.append("No site sent a tensor: each was measured with the model that it trained alone.")
    if any(record["members"] == [POOLED] for record in run.history):
        notes.append("All studies train at one place (pooled); its model is measured on the studies of every site.")
    if run.left_out:
        notes.append(run.left_out)
    return notes


def _measured_sites(record: Record) -> set[str]:
    """The sites with a recall in this record."""
    return {site for site, metrics in by_site(record).items() if any(map(names.is_recall, metrics))}


def _moment(record: Record) -> str:
    """Which model a record measured: the one that its round starts from."""
    if record["round"] == 0:
        return "initial"
    return f"{'trained,' if record['phase'] == EVALUATE else 'after'} {counted(record['round'], 'round')}"


def _ends(split: str, ends: dict[str, dict[str, float]], kinds: Mapping[str, str]) -> str:
    """Table of one split with the initial and the trained model in each cell; "" where there is nothing.

    ``ends``: which model -> name -> figure over sites; ``kinds``: which of these, with their columns' heads.
    """
    rows = []
    for scope, described in SCOPES.items():
        for k in KS:
            name = names.recall(split, k, scope)
            values = [[of.get(names.over_sites(name, kind)) for of in ends.values()] for kind in kinds]
            if any(value is not None for of_kind in values for value in of_kind):
                cells = [ARROW.join(map(_percent, of_kind)) for of_kind in values]
                chance = f"{100 * k / BATCH:g}" if scope == names.IN_BATCH else ABSENT
                rows.append([f"R@{k}, {described}", *cells, chance])
    title = f"{split.capitalize()} split: {ARROW.join(ends)}"
    return f"<h3>{text(title)}</h3>{table(['', *kinds.values(), 'chance'], rows)}" if rows else ""


def _percent(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"


def _by_site(run: Run, ends: dict[str, Record]) -> str:
    """R@1 of every site, initial and trained: of the split and scope that most sites have, test in batch first."""
    measured = {name: by_site(record) for name, record in ends.items()}
    choices = [(split, scope) for scope in SCOPES for split in ("test", "val")]
    counts = [
        sum(names.recall(split, 1, scope) in metrics for of in measured.values() for metrics in of.values())
        for split, scope in choices
    ]
    if not any(counts):
        return ""
    split, scope = choices[counts.index(max(counts))]
    key = names.recall(split, 1, scope)
    values = {
        name: {site: metrics[key] for site, metrics in of.items() if key in metrics} for name, of in measured.items()
    }
    colours = {site: run.style(site)["color"] for site in run.sites if any(site in of for of in values.values())}
    level = ("chance", 100 / BATCH) if scope == names.IN_BATCH else None
    return figures.bars(f"R@1 by site, {split}, {SCOPES[scope]} (%)", values, colours, level)


def _over_rounds(run: Run) -> str:
    """Curves of the validation recall: the average, the worst site, and every site."""
    first = names.over_sites(names.recall("val", 1), names.AVERAGE)
    scope = names.IN_BATCH if any(first in figures for _, figures in run.measured) else names.WHOLE_SET
    sites = [(record["round"], by_site(record)) for record, _ in run.measured]
    out = ""
    for k in KS:
        key = names.recall("val", k, scope)
        curves: list[Curve] = []
        for kind, style in ((names.AVERAGE, AVERAGE), (names.WORST, WORST)):
            name = names.over_sites(key, kind)
            points = {record["round"]: figures[name] for record, figures in run.measured if name in figures}
            curves.append((KINDS[kind], points, style))
        for site in run.sites:
            points = {round: metrics[site][key] for round, metrics in sites if key in metrics.get(site, {})}
            curves.append((site, points, run.style(site)))
        level = ("chance", 100 * k / BATCH) if scope == names.IN_BATCH else None
        out += figures.lines(f"R@{k} over rounds, val, {SCOPES[scope]} (%)", curves, "rounds completed", level)
    return out
