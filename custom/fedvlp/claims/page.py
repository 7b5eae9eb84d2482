"""The page of the claims: what each paper says, what paired seeds say here, and every figure behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedvlp.claims.scenario import Claim, Interval, Precondition, Scenario, Table, interval
from fedvlp.report import html

INVALID = "not ranked"
"""The verdict where a precondition of the scenario does not hold."""


@dataclass(frozen=True)
class Outcome:
    """One claim after the runs."""

    claim: Claim
    measured: Interval
    verdict: str


@dataclass(frozen=True)
class Results:
    """A scenario after the runs."""

    scenario: Scenario
    table: Table
    preconditions: tuple[tuple[Precondition, bool], ...]
    outcomes: tuple[Outcome, ...]


def judge(scenario: Scenario, table: Table, papers: Sequence[str]) -> Results:
    """Preconditions first; where one does not hold, no claim is ranked."""
    checked = tuple((one, one.check(table)) for one in scenario.preconditions)
    valid = all(held for _, held in checked)
    outcomes = []
    for claim in scenario.claims:
        if claim.paper in papers:
            measured = interval(table.difference(claim.method, claim.other, claim.figure, claim.other_figure))
            outcomes.append(Outcome(claim, measured, measured.verdict if valid else INVALID))
    return Results(scenario, table, checked, tuple(outcomes))


CLAIMS = ("paper", "claim", "the paper's difference", "ours [95 %]", "verdict")


def claim_rows(results: Results) -> list[tuple[str, ...]]:
    """One row a claim, as ``CLAIMS`` names its columns."""
    return [
        (one.claim.paper, one.claim.text, one.claim.papers_value, str(one.measured), one.verdict)
        for one in results.outcomes
    ]


def figure_rows(results: Results) -> Iterable[tuple[str, ...]]:
    """One row a method: mean and deviation over seeds of every figure that the scenario shows and the method has."""
    methods = list(dict.fromkeys(method for method, _ in results.table.cells))
    for method in methods:
        row = [method]
        for figure in results.scenario.shown:
            if not results.table.has(method, figure):
                row.append("")
                continue
            values = results.table.values(method, figure)
            spread = f" ({stdev(values):.2f})" if len(values) > 1 else ""
            row.append(f"{fmean(values):.2f}{spread}")
        yield tuple(row)


EXPLANATION = (
    "Differences are paired by seed: both methods see the same records, splits and start. A claim holds or fails where "
    "the 95 % interval (Student's t over seeds) leaves 0 out; a scenario whose preconditions do not hold ranks nothing."
)


def as_page(every: Sequence[Results]) -> str:
    """The page as HTML; it loads nothing."""
    body = f"<p>{EXPLANATION}</p>"
    for results in every:
        scenario, seeds = results.scenario, results.table.seeds
        body += f"<h2>{html.text(scenario.name)}</h2><p>{html.text(scenario.text)} Seeds {html.text(seeds)}.</p>"
        body += html.table(CLAIMS, claim_rows(results), "text")
        stated = [(one.text, "yes" if held else "NO") for one, held in results.preconditions]
        body += "<h3>Before anything is ranked</h3>" + html.table(("precondition", "holds"), stated, "text")
        body += "<h3>Mean (deviation) over seeds</h3>"
        body += html.table(("method", *scenario.shown), figure_rows(results))
    return html.page("The papers' claims", body)
