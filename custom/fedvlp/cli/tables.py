"""What the command line shows: a line per phase of a run, tables of the initial and trained model, of a data set."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedvlp.cli.panels import plain_table
from fedvlp.core.metric_keys import loss_term
from fedvlp.core.types import EVALUATE
from fedvlp.core.validate import counted, printable
from fedvlp.data.overview import label_counts, ranges, report_lengths, split_counts
from fedvlp.evaluation import metric_names as names
from fedvlp.run.metrics import SERVER, by_site, of_server, overall

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from fedvlp.data.cohort import Cohort
    from fedvlp.data.deid import IdentifierFinding
    from fedvlp.run.audit import Audit
    from fedvlp.run.dry_run import DryRun
    from fedvlp.run.folder import RunFolder
    from fedvlp.run.status_writer import Progress


MOST_COLUMNS, MOST_ROWS = 6, 40
"""Of a table that is shown on a terminal."""


def upright(lines: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """A table's lines, its heading the first; a wide table is turned, so that its columns become rows."""
    wide = len(lines[0]) > MOST_COLUMNS and len(lines) <= MOST_COLUMNS
    return list(zip(*lines, strict=True)) if wide else lines


def table_of_file(file: Path) -> Table | None:
    """A CSV that was written, with four digits of a number; None for another file, and for one of too many rows."""
    if file.suffix != ".csv":
        return None
    with file.open(encoding="utf-8", newline="") as stream:
        lines = [[_short(cell) for cell in line] for line in csv.reader(stream)]
    if len(lines) < 2 or len({len(line) for line in lines}) != 1 or len(lines) > MOST_ROWS:
        return None
    heading, *rows = upright(lines)
    return plain_table(file.stem, [name.replace("_", " ") for name in heading], rows)  # may break at a blank


def _short(cell: str) -> str:
    try:
        return cell if float(cell).is_integer() else f"{float(cell):.4g}"
    except (ValueError, OverflowError):
        return cell


def markdown(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The same as Markdown, its title in a line above it."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([printable(str(cell)) for cell in line] for line in lines)
    return "\n".join([printable(title), "", *(f"| {' | '.join(line)} |" for line in cells)])


def dry_run_lines(plan: DryRun, workers: int) -> list[str]:
    """Steps, traffic, memory and time of a run, a line each."""
    steps = ", ".join(f"{phase.name} {phase.steps}" for phase in plan.phases if phase.name != EVALUATE)
    spent = plan.seconds(workers)
    shown = f"{spent:.0f} s" if spent < 120 else f"{spent / 60:.0f} min" if spent < 7200 else f"{spent / 3600:.1f} h"
    return [
        *([f"data: {plan.used}"] if plan.used else []),
        f"steps: {counted(plan.rounds, 'round')}, at each site {steps}",
        f"traffic: {plan.bytes / 1e6:,.1f} MB of tensors to and from all sites",
        f"memory: {plan.peak_bytes / 2**30:.1f} GiB at the peak of one process; up to {workers} train side by side",
        f"time: about {shown}, if every site takes as long as {plan.probed}, of which a few steps were timed",
        *([f"of these about {plan.measuring:.0f} s to measure the test records"] if plan.measuring >= 1 else []),
        *([f"this dry run: {plan.processor_seconds:.0f} s of processor"] if plan.processor_seconds >= 1 else []),
        *([] if math.isnan(plan.reach) else [_reach_line(plan)]),
    ]


def _reach_line(plan: DryRun) -> str:
    """How wide the interval of the result will be."""
    from fedvlp.run.dry_run import TYPICAL

    return (
        f"precision: with {sum(plan.test_patients.values())} test patients an R@1 of {TYPICAL} % will have a 95 % "
        f"interval of about +- {plan.reach:.1f}: a smaller difference between two models is not significant"
    )


def progress_line(record: dict[str, Any]) -> str:
    """One line for a phase: seconds, loss, recall of the model it started from, dropped sites."""
    terms = [[v for name, v in metrics.items() if loss_term(name) is not None] for metrics in by_site(record).values()]
    losses = [sum(values) for values in terms if values]  # a pooled site reports about others, which have none
    texts = [f"round {record['round']:>3} {record['phase']:<9} {record['seconds']:6.1f} s"]
    if any(losses):
        texts.append(f"loss {sum(losses) / len(losses):.3f}")
    measured = overall(record)
    recall = names.recall("val", 1)
    average, worst = names.over_sites(recall, names.AVERAGE), names.over_sites(recall, names.WORST)
    if average in measured:
        texts.append(f"val R@1 {measured[average]:.1f} (worst {measured[worst]:.1f})")
    own = record.get("server", {}).get(names.recall("val", 1, names.WHOLE_SET))
    if own is not None:
        texts.append(f"server on the public set, val R@1 {own:.1f}")
    if record["dropped"]:
        reasons = [f"{site}: {reason}" for site, reason in sorted(record["dropped"].items())]
        texts.append(f"dropped: {'; '.join(reasons)}")
    return printable("  ".join(texts))


def prepared_tables(cohort: Cohort, summary: dict[str, int], built: dict[str, str]) -> list[Table]:
    """Tables of a prepared data set: counts, splits, labels, lengths of reports, cache. No text or id of a record.

    ``summary`` and ``built`` are those of ``deploy.prepare.Prepared``.
    """
    splits, labels, lengths = split_counts(cohort), label_counts(cohort), report_lengths(cohort)
    counted = summary | {f"reports with {kind}": count for kind, count in cohort.phi.items()}
    tables = [
        plain_table("rows", ("what", "count"), counted.items()),
        plain_table(
            "splits", ("split", *splits["train"]), ((name, *counts.values()) for name, counts in splits.items())
        ),
    ]
    if labels:
        columns = ("label", "positive", "negative", "uncertain", "blank")
        tables.append(plain_table("labels", columns, ((name, *counts.values()) for name, counts in labels.items())))
    if lengths:
        quantiles = [f"{quantile:.0%}" for quantile in lengths]
        tables.append(plain_table("words in a report", quantiles, [[f"{words:.0f}" for words in lengths.values()]]))
    return [*tables, plain_table("images", ("what", "value"), built.items())]


def finding_lines(phi: Mapping[str, int]) -> list[Text]:
    """What the scan of the reports found, a line each with the words in question: for its owner's terminal alone."""
    from rich.text import Text

    from fedvlp.data.deid import SHOWN, Findings

    if not phi:
        return [Text("no report seems to identify anybody")]
    if not isinstance(phi, Findings):  # its words were left behind
        return [Text(f"{reports} reports with {kind}") for kind, reports in phi.items()]
    lines = [Text("reports that seem to identify people: row, kind, words")]
    alike: dict[tuple[str, str], list[IdentifierFinding]] = {}
    for finding in phi.shown:
        alike.setdefault(finding.same, []).append(finding)
    for same, findings in sorted(alike.items(), key=lambda item: -phi.reports.get(item[0], 1)):  # ties as they were
        rows = ", ".join(dict.fromkeys(finding.where for finding in findings))
        more = f", ...: {phi.reports[same]} reports" if phi.reports.get(same, 1) > len(findings) else ""
        one = findings[0]
        before, words, after = (printable(text) for text in (one.before, one.words, one.after))
        lines.append(Text.assemble(f"{rows}{more}  {one.kind}  ...{before}", (words, "bold reverse"), f"{after}..."))
    for kind, reports in phi.items():
        if (distinct := sum(of == kind for of, _ in alike)) >= SHOWN:
            lines.append(Text(f"{distinct} different words with {kind} are shown, of {reports} reports that hold any"))
    return lines


def unused_lines(skipped: Mapping[str, Sequence[str]]) -> list[str]:
    """The rows that are not used, by reason: "duplicate image: row 3, 7-9"."""
    return [printable(f"{reason}: row {', '.join(ranges(rows))}") for reason, rows in sorted(skipped.items())]


def summary_tables(name: str, figures: dict[str, dict[str, float]]) -> list[Table]:
    """Tables of held-out recalls over sites, and of the areas under the ROC curve on the public set, as measured.

    ``figures``: as ``run.metrics.summary`` gives them.
    """
    tables: list[Table] = []
    if not figures:
        return tables
    if any(not key.startswith(SERVER) for key in _newest(figures)):
        tables.append(_retrieval(name, figures))
    if any(_area(key) for key in _newest(figures)):
        tables.append(_areas(name, figures))
    return tables


def show_beside(console: Console, folder: RunFolder) -> None:
    """What a run on a user's own records is held against, the verdict, and the commands of what is not there."""
    from fedvlp.run import beside

    if not (rows := beside.rows(folder)):
        return
    columns = ("figure on the test split", "this run", "held against", "its figure")
    lines = [(row.what, row.of_run, row.other, row.of_other) for row in rows]
    console.print(plain_table("what it is worth", columns, lines, right=False))
    lacking = [f"not measured: {command}" for command in beside.lacking(folder)]
    ways = beside.ways_on(folder, rows)
    for line in filter(None, (beside.verdict(rows), *ways, beside.siblings(folder).said, *lacking)):
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _newest(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    """The figures of the trained model, or of the initial one while there are no others."""
    return figures["trained"] if "trained" in figures else figures["initial"]


def _models(name: str, figures: dict[str, dict[str, float]]) -> list[tuple[str, dict[str, float]]]:
    """The lines of a table: what the model is called, and its figures."""
    return [("initial" if key == "initial" else name, of_model) for key, of_model in figures.items()]


def _retrieval(name: str, figures: dict[str, dict[str, float]]) -> Table:
    """Recalls over sites, in batch where every site has a batch; below, those of the server on the public set."""
    from rich.table import Table

    keys = _newest(figures)
    split = "test" if any(key.startswith("test/") for key in keys) else "val"
    in_batch = names.over_sites(names.recall(split, 1), names.AVERAGE) in keys
    scope = names.IN_BATCH if in_batch else names.WHOLE_SET
    described = "in batches of 32" if in_batch else "whole set"
    table = Table(title=f"{name}: retrieval on the {split} split, {described}, both directions, %")
    for column in ("model", "R@1 average", "R@1 worst site", "R@5 average", "R@5 worst site"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for label, of_model in _models(name, figures):
        cells = [
            of_model.get(names.over_sites(names.recall(split, k, scope), kind))
            for k in (1, 5)
            for kind in (names.AVERAGE, names.WORST)
        ]
        table.add_row(label, *("n/a" if cell is None else f"{cell:.2f}" for cell in cells))
    own = [of_server(names.recall(split, k, names.WHOLE_SET)) for k in (1, 5, 10)]
    if all(key in of for of in figures.values() for key in own):
        ends = ["/".join(f"{of_model[key]:.2f}" for key in own) for of_model in figures.values()]
        table.caption = f"server's model on the public set, whole set, R@1/5/10: {' to '.join(ends)}"
    return table


def _area(key: str) -> tuple[str, str] | None:
    """(split, finding) of an AUC of the server's; None for any other key."""
    parsed = names.parse_auc(key)
    for split in ("test", "val"):
        if parsed and parsed[0] == of_server(split):
            return split, parsed[1]
    return None


def _areas(name: str, figures: dict[str, dict[str, float]]) -> Table:
    """AUCs of the server's model on the public set, on the test split where that was measured."""
    from rich.table import Table
    from rich.text import Text

    areas = {key: area for key in _newest(figures) if (area := _area(key))}
    split = "test" if any(of == "test" for of, _ in areas.values()) else "val"
    findings = {key: finding for key, (of, finding) in areas.items() if of == split}
    table = Table(title=f"{name}: area under the ROC curve on the public set's {split} split, %")
    table.add_column("model")
    for finding in findings.values():
        table.add_column(Text(printable(finding)), justify="right")
    for label, of_model in _models(name, figures):
        cells = [of_model.get(key) for key in findings]
        table.add_row(label, *("n/a" if cell is None else f"{100 * cell:.1f}" for cell in cells))
    return table


def audit_tables(audit: Audit) -> list[Table]:
    """What the attacks reach: on every model at all sites together; what epsilon allows at most."""
    from fedvlp.run.audit import BOUNDS, COLUMNS, bound_cells, row_cells

    title = "membership at all sites: 50 is chance; in brackets 95 % intervals over patients"
    tables = [plain_table(title, COLUMNS, [row_cells(row) for row in audit.rows if not row.site])]
    if audit.bounds:
        title = "what epsilon leaves to any attack at most"
        tables.append(plain_table(title, BOUNDS, [bound_cells(one) for one in audit.bounds]))
    return tables


# The bar below the lines of a run on a terminal: how far it is, the time left, its speed, the worst site so far.


class RunBar:
    """Nothing is shown where ``console`` is no terminal."""

    def __init__(self, console: Console, rounds: int) -> None:
        self.console, self.rounds = console, rounds
        self.worst = ""

    def note(self, record: dict[str, Any]) -> None:
        """Remembers the worst site of a record, if the record measured any."""
        recall = names.recall("val", 1)
        measured = {site: values[recall] for site, values in by_site(record).items() if recall in values}
        if measured:
            site = min(measured, key=lambda name: (measured[name], name))
            self.worst = f"worst site so far: {site}, R@1 {measured[site]:.1f}"

    @contextmanager
    def showing(self, progress: Progress) -> Iterator[None]:
        """The bar, while ``progress`` runs."""
        if not self.console.is_terminal:
            yield
            return
        from rich.live import Live
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            TimeRemainingColumn(),
            TextColumn("{task.fields[more]}", markup=False),  # names of sites
        )
        bar, speed = Bar(*columns, console=self.console, speed_estimate_period=600), _Speed()
        task = bar.add_task("", total=progress.total, more="")

        def drawn() -> RenderableType:
            now = speed(progress.steps())
            more = ", ".join(filter(None, (f"{now:.1f} steps/s" if now else "", self.worst)))
            bar.update(task, completed=progress.done(), description=self.said(progress), more=more)
            return bar.get_renderable()

        with Live(get_renderable=drawn, console=self.console, transient=True, refresh_per_second=2):
            yield

    def said(self, progress: Progress) -> str:
        """Where the run is, in words."""
        if not progress.phase:
            return "beginning"
        return (
            f"round {min(progress.round + 1, self.rounds)} of {self.rounds}, {progress.phase}: {progress.answered} of "
            f"{progress.asked} sites"
        )


class _Speed:
    """Steps a second of the phase under way."""

    def __init__(self) -> None:
        self._began, self._first, self._last = time.monotonic(), 0, 0

    def __call__(self, steps: int) -> float:
        """The speed since the phase began, at ``steps`` steps; 0 at its beginning."""
        now = time.monotonic()
        if steps < self._last:  # another phase
            self._began, self._first = now, steps
        self._last = steps
        return (steps - self._first) / (now - self._began) if now > self._began else 0.0
