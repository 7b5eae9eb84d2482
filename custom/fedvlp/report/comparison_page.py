"""Runs beside each other: tables, the sentence that says what they show, and one page in the style of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvlp.core.checkpoint import save_text
from fedvlp.core.metric_keys import BYTES_DOWN, BYTES_UP
from fedvlp.evaluation import metric_names as names
from fedvlp.report import figures, html
from fedvlp.report.html import text
from fedvlp.report.run import SCOPES, Run
from fedvlp.run.compare import BATCH, Comparison, Row
from fedvlp.run.folder import RunFolder

Content = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, columns and rows of a table."""


EXPLANATION = (
    "Recall is on held-out test studies, in percent, mean of both directions; average and worst are over sites. In "
    "brackets and as bars: 95 % intervals by a bootstrap over the test patients, the same resamples for every run; for "
    "the worst site the union of the percentile and the basic interval. They do not cover other training seeds. Steps "
    "are a site's in a mean round: those that train the encoders, at the full rate (of warm-up a part), and all."
)


def tables(compared: Comparison) -> list[Content]:
    """The models with their figures, and by how much the last one is ahead of each of the other runs."""
    least, most = min(compared.queries.values()), max(compared.queries.values())
    counted = f"{least}" if least == most else f"{least} to {most}"
    scope = SCOPES[names.IN_BATCH if compared.in_batch else names.WHOLE_SET]
    chance = f", chance {100 * compared.k / BATCH:.1f}" if compared.in_batch else ""
    title = f"R@{compared.k} on the test split, {scope}, %, 95 % intervals{chance}"
    columns = ("model", "average", "worst site", "encoder / all steps")
    models: list[tuple[str, ...]] = [
        (*_of_row(row, False), compared.steps.get(row.name, "")) for row in compared.models
    ]
    pairs: list[tuple[str, ...]] = [_of_row(row, True) for row in compared.ahead]
    return [
        (title, columns, models),
        (
            f"Paired differences, {counted} test pairs a site",
            (f"{compared.last} minus", "average", "worst site"),
            pairs,
        ),
    ]


def _of_row(row: Row, signed: bool) -> tuple[str, ...]:
    shown = [str(of) if signed else of.unsigned() for of in (row.average, row.worst)]
    return row.name, shown[0], shown[1]


SIDES = {1: "ahead", -1: "behind", 0: "no significant difference"}
"""What is said of a difference whose interval is above 0, below it, or around it."""


def verdict(compared: Comparison) -> str:
    """One line: whether the last run is ahead of the one before it, and on how many seeds that rests.

    It is where one of average and worst site is ahead and neither is behind.
    """
    other = compared.ahead[-1]
    sides = other.average.side, other.worst.side
    ahead = "ahead" if max(sides) > 0 <= min(sides) else "not ahead"
    seeds = "one seed" if compared.seed is not None else "seeds that differ"
    said = f"average {SIDES[sides[0]]}, worst site {SIDES[sides[1]]}"
    return f"{compared.last} is {ahead} of {other.name} here: {said} ({seeds})"


def write(compared: Comparison, folders: Sequence[RunFolder], path: Path) -> Path:
    """Writes the page of the compared runs, in the order of ``compared``, and returns its path.

    Raises CheckpointError for a damaged run.
    """
    import matplotlib

    runs = dict(zip(compared.runs, map(Run.read, folders), strict=True))
    with matplotlib.rc_context(figures.RC):
        sections = {
            "": f'<p class="lead">{text(verdict(compared))}.</p><p>{text(EXPLANATION)}</p>{_tables(compared)}',
            "By model and by site": html.grid(_over_sites(compared) + _by_site(compared)),
            "Over rounds": html.grid(_over_rounds(runs)),
            "Bytes and seconds": _costs(runs),
            "Settings that differ": _settings(runs),
        }
    body = ""
    for title, content in sections.items():
        heading = f"<h2>{title}</h2>\n" if title else ""
        body += f"{heading}{content}\n" if content else ""
    save_text(path, html.page(f"fedvlp: {', '.join(runs)} compared", body))
    return path


def _tables(compared: Comparison) -> str:
    """The tables, each with its title, as HTML."""
    return "".join(f"<h2>{text(title)}</h2>{html.table(columns, rows)}" for title, columns, rows in tables(compared))


def _level(compared: Comparison) -> tuple[str, float] | None:
    """Chance, where it is the same at every site."""
    return ("chance", 100 * compared.k / BATCH) if compared.in_batch else None


def _over_sites(compared: Comparison) -> str:
    """Average and worst site of every model."""
    groups = {
        "average": {row.name: row.average for row in compared.models},
        "worst site": {row.name: row.worst for row in compared.models},
    }
    looks = {name: figures.look(index) for index, name in enumerate(groups)}
    return figures.ranges(f"R@{compared.k} of every model, test (%)", groups, looks, _level(compared))


def _by_site(compared: Comparison) -> str:
    """Every model at every site."""
    looks = dict.fromkeys(compared.sites, figures.UNTRAINED) | _looks(compared.runs)
    return figures.ranges(f"R@{compared.k} by site, test (%)", compared.sites, looks, _level(compared))


def _looks(runs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """matplotlib's settings of every run, the same in every figure."""
    return {name: figures.look(index) for index, name in enumerate(runs)}


def _over_rounds(runs: Mapping[str, Run]) -> str:
    """Curves of R@1 on val, a line for each run: the average over sites, and the worst site."""
    out = ""
    for kind, title in ((names.AVERAGE, "average over sites"), (names.WORST, "worst site")):
        for scope in SCOPES:
            name = names.over_sites(names.recall("val", 1, scope), kind)
            curves: list[figures.Curve] = []
            for run, look in _looks(list(runs)).items():
                measured = runs[run].measured
                points = {record["round"]: recalls[name] for record, recalls in measured if name in recalls}
                curves.append((run, points, look))
            level = ("chance", 100 / BATCH) if scope == names.IN_BATCH else None
            drawing = figures.lines(f"R@1 on val, {SCOPES[scope]}, {title} (%)", curves, "rounds completed", level)
            out += drawing
            if drawing:
                break
    return out


def _costs(runs: Mapping[str, Run]) -> str:
    """Table of what every run sent and how long its phases took."""
    rows = []
    for name, run in runs.items():
        traffic = [record.get("bytes", {}) for record in run.history]
        down, up = (sum(of.get(way, 0) for of in traffic) / 1e6 for way in (BYTES_DOWN, BYTES_UP))
        seconds = sum(record["seconds"] for record in run.history)
        rounds = len({record["round"] for record, _ in run.training})
        rows.append([name, rounds, len(run.samples), f"{down:,.1f}", f"{up:,.1f}", f"{seconds:,.1f}"])
    return html.table(("run", "rounds", "sites", "MB to sites", "MB from sites", "seconds"), rows)


def _settings(runs: Mapping[str, Run]) -> str:
    """Table of the settings that are not the same in every run; "" where all are."""
    flat = {name: dict(_flat(run.config.get("args", {}))) for name, run in runs.items()}
    every = dict.fromkeys(setting for of in flat.values() for setting in of)
    rows = []
    for setting in every:
        values = [of.get(setting, html.ABSENT) for of in flat.values()]
        if len(set(values)) > 1:
            rows.append([setting, *values])
    return html.table(("setting", *flat), rows, "text") if rows else ""


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted name, value as text) of every setting; a class is the value of the setting that it fills."""
    out: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, dict) and "path" in value:
            out.append((f"{prefix}{name}", html.kind(value)))
            out += _flat(value.get("args", {}), f"{prefix}{name}.")
        else:
            out.append((f"{prefix}{name}", html.shown(value, name)))
    return out
