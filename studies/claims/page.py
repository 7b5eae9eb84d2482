"""The page of the claims: what each paper says, what paired seeds say here, and every figure behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from fedvlp.evaluation.intervals import Interval, holm, over_seeds
from fedvlp.report import html
from studies.claims.cell_results import NotRunError, Table, UnlikeError, origin
from studies.claims.scenario import FAILS, HOLDS, UNDECIDED, Claim, Precondition, Scenario, p_value, verdict

INVALID, MISSING, UNLIKE = "not ranked", "not run", "no verdict: run on unlike machines"
"""The verdict where a precondition of the scenario does not hold, and where no seed has both methods, or both alike."""


@dataclass(frozen=True)
class Outcome:
    """One claim after the runs."""

    claim: Claim
    measured: Interval | None  # None: no seed has both methods
    seeds: int
    verdict: str  # by its own interval
    p: float | None = None  # of the paired differences; None: not run, or one seed
    corrected: str = ""  # the verdict after Holm's correction over all claims of its paper; "": nothing to correct

    @property
    def ranked(self) -> bool:
        """Whether there is a verdict."""
        return self.verdict in (HOLDS, FAILS, UNDECIDED)


@dataclass(frozen=True)
class Results:
    """A scenario after the runs."""

    scenario: Scenario
    table: Table
    preconditions: tuple[tuple[Precondition, bool | None], ...]  # None: its methods have not run
    outcomes: tuple[Outcome, ...]


def judge(scenario: Scenario, table: Table, papers: Sequence[str]) -> Results:
    """Preconditions first; where one does not hold, no claim is ranked."""
    checked = tuple((one, _checked(one, table)) for one in scenario.preconditions)
    valid = all(held for _, held in checked)
    outcomes = (_outcome(claim, table, valid) for claim in scenario.claims if claim.paper in papers)
    return Results(scenario, table, checked, tuple(outcomes))


def _checked(condition: Precondition, table: Table) -> bool | None:
    try:
        return condition.check(table)
    except NotRunError:
        return None


def _outcome(claim: Claim, table: Table, valid: bool) -> Outcome:
    try:
        differences = table.difference(claim.method, claim.other, claim.figure, claim.other_figure)
    except UnlikeError:
        return Outcome(claim, None, 0, UNLIKE)
    except NotRunError:
        return Outcome(claim, None, 0, MISSING)
    measured = over_seeds(differences)
    said = verdict(measured) if valid else INVALID
    return Outcome(claim, measured, len(differences), said, p_value(differences))


def corrected(every: Sequence[Results], claims: Mapping[str, int] | None = None) -> list[Results]:
    """The same with the verdicts after Holm's correction: the claims of a paper, of all scenarios, are one family.

    The family is what the ledger has: ``claims``, their number by paper. One that is not ranked, or has not run, stays
    in it, as one that shows nothing; else a scenario that fails would make the others' claims easier.
    """
    family: dict[str, list[float]] = {}
    for results in every:
        for one in results.outcomes:
            family.setdefault(one.claim.paper, []).append(1.0 if one.p is None else one.p)
    adjusted = {}
    for paper, values in family.items():
        whole = values + [1.0] * ((claims or {}).get(paper, 0) - len(values))
        adjusted[paper] = dict(zip(whole, holm(whole), strict=True))

    def judged(one: Outcome) -> Outcome:
        if one.p is None or not one.ranked:
            return one
        return replace(one, corrected=one.verdict if adjusted[one.claim.paper][one.p] < 0.05 else UNDECIDED)

    return [replace(results, outcomes=tuple(map(judged, results.outcomes))) for results in every]


HELD = {True: "holds", False: "DOES NOT HOLD", None: "NOT RUN, or on unlike machines"}
"""What is said of a precondition."""

CLAIMS = ("paper", "claim", "the paper's difference", "ours [95 %]", "seeds", "verdict")
CORRECTED = (*CLAIMS, "after Holm")


def claim_rows(results: Results) -> list[tuple[str, ...]]:
    """One row a claim, as ``CORRECTED`` names its columns."""
    rows = claim_rows_of(results.outcomes)
    return [(*row, one.corrected or html.ABSENT) for row, one in zip(rows, results.outcomes, strict=True)]


def claim_rows_of(outcomes: Iterable[Outcome]) -> list[tuple[str, ...]]:
    """One row an outcome, as ``CLAIMS`` names its columns."""
    return [
        (
            one.claim.paper,
            one.claim.text,
            one.claim.papers_value,
            html.ABSENT if one.measured is None else str(one.measured),
            str(one.seeds),
            one.verdict,
        )
        for one in outcomes
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
    "Differences are paired by seed: both methods see the same records, splits and start. Pairs of unlike runs "
    "(another torch or device, or other figures before training) are left out, and without any other there is no "
    "verdict. A claim holds or fails where the 95 % interval (Student's t over seeds) leaves 0 out. After Holm: where "
    "it still does when all claims of a paper are tested together, with 5 % for the family; those that are not ranked "
    "or have not run stay in it. A scenario whose preconditions do not hold ranks nothing."
)


def as_page(every: Sequence[Results]) -> str:
    """The page as HTML; it loads nothing."""
    body = f"<p>{EXPLANATION}</p>"
    for results in every:
        scenario, seeds = results.scenario, results.table.seeds
        body += f"<h2>{html.text(scenario.name)}</h2><p>{html.text(scenario.text)} Seeds {html.text(seeds)}.</p>"
        body += f"<p>{html.text(origin(results.table))}</p>"
        body += html.table(CORRECTED, claim_rows(results), "text")
        stated = [(one.text, HELD[held]) for one, held in results.preconditions]
        body += "<h3>Before anything is ranked</h3>" + html.table(("precondition", ""), stated, "text")
        body += "<h3>Mean (deviation) over seeds</h3>"
        body += html.table(("method", *scenario.shown), figure_rows(results))
    return html.page("The papers' claims", body)
