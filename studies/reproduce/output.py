"""A reproduced table as Markdown, CSV and a page with figures: the paper's value beside ours."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median

from fedvlp.core.checkpoint import save_text
from fedvlp.evaluation.intervals import Interval
from fedvlp.report import figures, html
from studies.claims.cell_results import origin
from studies.claims.page import CLAIMS, claim_rows_of
from studies.reproduce.run import Reproduced
from studies.reproduce.table import UNPRINTED, Entry, Row

DOUBTFUL = "*"
"""After a printed value that may be a misprint or misread."""

SPREAD = "\N{PLUS-MINUS SIGN}"
READING = (
    "Ours: mean over seeds [95 % interval, Student's t, of two seeds or more]; in brackets the paper's printed value; "
    f"{html.ABSENT}: not measured, in brackets {UNPRINTED}."
)
NO_SCENARIO = (
    "A verdict here is of these runs: the preconditions under which a claim can show are those of `fedvlp claims`, at "
    "its sizes."
)
OTHER_DATA = (
    "These are not the paper's data: methods compare within the column of ours, and not with the paper's value."
)


NO_SIZE = (
    "Tiny towers, fewer sites and a step or two a cell: that these data are read and every cell runs, and nothing more."
)


def number(measured: Interval | None, digits: int, spread: float | None = None) -> str:
    """Mean and interval, and a spread over prompts; a dash where nothing was measured."""
    if measured is None:
        return html.ABSENT
    return measured.unsigned(digits) + ("" if spread is None else f" {SPREAD} {spread:.{digits}f}")


def head(entry: Entry) -> tuple[str, ...]:
    """Names of the columns."""
    return ("", *(column.title for column in entry.columns))


def rows(done: Reproduced) -> list[tuple[str, ...]]:
    """One row a row of the paper: its title, and ours with the paper's."""
    entry = done.entry
    return [
        (
            one.title,
            *(
                f"{number(done.value(row, column), entry.digits, _spread(done, row, column))} "
                f"({_printed(entry, one, column)})"
                for column in range(len(entry.columns))
            ),
        )
        for row, one in enumerate(entry.rows)
    ]


def _spread(done: Reproduced, row: int, column: int) -> float | None:
    """That of ours, where the paper prints one."""
    entry = done.entry
    return done.spread(row, column) if entry.spread(entry.rows[row], column) else None


def _printed(entry: Entry, row: Row, column: int) -> str:
    value = entry.printed(row, column)
    if value == UNPRINTED:
        return html.ABSENT
    spread = entry.spread(row, column)
    return value + (f" {SPREAD} {spread}" if spread else "") + (DOUBTFUL if entry.doubt(row, column) else "")


def title(entry: Entry) -> str:
    """Paper, table and what it shows."""
    return f"{entry.key}: {entry.title}"


def remarks(done: Reproduced) -> list[str]:
    """What to know of the table, a sentence or two each."""
    entry, study = done.entry, done.entry.study
    seeds = done.table.seeds
    said = [f"Seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds))}. {READING}"]
    said += [NO_SIZE] if done.size.quick else []
    if done.size.demo:
        said += [OTHER_DATA]
        said += [study.stands_in] if study and study.stands_in else []
    else:
        said += [study.differs] if study and study.differs else []
    if any(entry.spread(row, index) for row in entry.rows for index in range(len(entry.columns))):
        said += [f"{SPREAD}: standard deviation, ours over the seeds of the prompts; the paper does not say over what."]
    said += [entry.note] if entry.note else []
    said += [f"{row.title} does not run: {row.why_not}." for row in entry.rows if row.why_not]
    said += [f"Not measured: {'; '.join(absent)}."] if (absent := unmeasured(done)) else []
    doubts: dict[str, list[str]] = {}
    for row in entry.rows:
        for index, column in enumerate(entry.columns):
            if doubt := entry.doubt(row, index):
                doubts.setdefault(doubt, []).append(f"{row.title}: {column.title}")
    said += [
        f"{DOUBTFUL} as printed ({'; '.join(places[:3])}{', ...' * (len(places) > 3)}): {doubt}."
        for doubt, places in doubts.items()
    ]
    return [*said, origin(done.table)]


def unmeasured(done: Reproduced) -> list[str]:
    """What has no value of ours though cells have run: rows and columns without any, then single places."""
    rows, columns = done.entry.rows, done.entry.columns
    there = {
        (row, column)
        for row, column in product(range(len(rows)), range(len(columns)))
        if not done.table.cells or done.value(row, column)
    }
    some_row, some_column = {row for row, _ in there}, {column for _, column in there}
    return [
        *(one.title for row, one in enumerate(rows) if row not in some_row),
        *(one.title for column, one in enumerate(columns) if column not in some_column),
        *(
            f"{rows[row].title}: {columns[column].title}"
            for row, column in product(sorted(some_row), sorted(some_column))
            if (row, column) not in there
        ),
    ]


def markdown(done: Reproduced) -> str:
    """The table, its claims, and what to know of them."""
    entry = done.entry
    text = [f"## {title(entry)}", "", *_piped([head(entry), *rows(done)]), ""]
    if done.outcomes:
        text += [*_piped([CLAIMS, *claim_rows_of(done.outcomes)]), "", NO_SCENARIO, ""]
    return "\n".join([*text, *(f"- {sentence}" for sentence in remarks(done))]) + "\n"


def _piped(lines: Sequence[Sequence[str]]) -> list[str]:
    first, *rest = lines
    return [f"| {' | '.join(cells)} |" for cells in (first, ["---"] * len(first), *rest)]


CSV = ("paper", "table", "row", "column", "cell", "ours", "low", "high", "papers_value", "seeds", "by_seed")
"""Columns of the CSV file: one line for each value of the table."""


def as_csv(done: Reproduced) -> str:
    """One line a value; a value that the paper does not print, or that was not measured, is empty."""
    entry, text = done.entry, io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV)
    for row, one in enumerate(entry.rows):
        for index, column in enumerate(entry.columns):
            ours, printed, by_seed = done.value(row, index), entry.printed(one, index), done.by_seed(row, index)
            writer.writerow(
                [
                    entry.paper,
                    entry.ids[0],
                    one.title,
                    column.title,
                    one.cell + column.cell,
                    *_bounds(ours),
                    "" if printed == UNPRINTED else printed,
                    " ".join(map(str, by_seed)),
                    " ".join(f"{value:.4f}" for value in by_seed.values()),
                ]
            )
    return text.getvalue()


def _bounds(measured: Interval | None) -> list[str]:
    values = (measured.value, measured.low, measured.high) if measured else (math.nan,) * 3
    return ["" if math.isnan(value) else f"{value:.4f}" for value in values]


def as_page(every: Sequence[Reproduced], heading: str) -> str:
    """The page as HTML, with a figure for each column; it loads nothing."""
    body = ""
    for done in every:
        entry = done.entry
        body += f"<h2>{html.text(title(entry))}</h2>" + html.table(head(entry), rows(done))
        if done.outcomes:
            body += html.table(CLAIMS, claim_rows_of(done.outcomes), "text") + f"<p>{html.text(NO_SCENARIO)}</p>"
        body += "".join(f"<p>{html.text(sentence)}</p>" for sentence in remarks(done)) + html.grid(drawings(done))
    return html.page(heading, body)


def drawings(done: Reproduced) -> str:
    """Bars of each column, ours beside the paper's, as HTML."""
    entry, drawn = done.entry, ""
    for index, column in enumerate(entry.columns):
        ours: dict[str, float] = {}
        printed: dict[str, float] = {}
        for row, one in enumerate(entry.rows):
            measured, value = done.value(row, index), entry.printed(one, index)
            ours |= {one.title: measured.value} if measured else {}
            printed |= {one.title: float(value)} if value != UNPRINTED else {}
        for doubtful in [one for one in entry.rows if entry.doubt(one, index)]:
            # a misprint of 2595 for 25.95 would leave no length to the other bars
            if printed[doubtful.title] > 10 * median(printed.values()):
                del printed[doubtful.title]
        groups = ({"the paper": printed} if printed else {}) | {"ours": ours}
        colours = {one.title: figures.COLOURS[row % 6] for row, one in enumerate(entry.rows)}
        drawn += figures.bars(column.title, groups, colours) if ours else ""
    return drawn


def write(folder: Path, name: str, every: Sequence[Reproduced], heading: str) -> list[Path]:
    """Writes ``<name>.md``, ``.csv`` and ``.html`` into ``folder``, and returns their paths."""
    tables = [as_csv(done) for done in every]
    lines = [tables[0], *(table.partition("\n")[2] for table in tables[1:])]
    content = {
        "md": "\n".join(markdown(done) for done in every),
        "csv": "".join(lines),
        "html": as_page(every, heading),
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{name}.{suffix}": text for suffix, text in content.items()}
    for file, text in files.items():
        save_text(file, text)
    return list(files)
