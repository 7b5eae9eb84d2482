"""Whole tables of the recalls with intervals: every cell is the figure of its own row, among many that differ."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from support.report_pages import SITES, Page, robust, run_of

from fedvlp.evaluation import metric_names as names
from fedvlp.evaluation.intervals import Interval
from fedvlp.report.html import ABSENT
from fedvlp.report.retrieval_section import OVER, at_a_glance, recall_tables
from fedvlp.report.run import Run
from fedvlp.run.compare import INITIAL
from fedvlp.run.recalls import FROM_AVERAGE, GAIN, SITE, TOGETHER, TRAINED, Recall

SCOPES = (names.IN_BATCH, names.WHOLE_SET)
KS = (1, 5)
FIGURES = (INITIAL, TRAINED, GAIN, FROM_AVERAGE)
ROWS = [(SITE, site) for site in SITES] + [(names.AVERAGE, ""), (names.WORST, "")]


def made_up(figure: str, over: str, site: str, scope: str, k: int) -> Recall:
    """A recall of which no other has the value, a bound, the number of pairs or the chance."""
    value = 1.0 + 20 * FIGURES.index(figure) + 4 * ROWS.index((over, site)) + 2 * SCOPES.index(scope) + KS.index(k)
    interval = Interval(value, value - 0.25, value + 0.5)
    pairs = 100 * (1 + ROWS.index((over, site))) + 10 * SCOPES.index(scope)
    chance = math.nan if figure in (GAIN, FROM_AVERAGE) else k + ROWS.index((over, site)) / 10
    return Recall(figure, over, site, scope, k, pairs, interval, chance)


def measured() -> list[Recall]:
    """Those of three sites and over them; FROM_AVERAGE of sites alone, and site-10 has none of the initial model."""
    kinds = product(FIGURES, ROWS, SCOPES, KS)
    rows = [made_up(figure, *row, scope, k) for figure, row, scope, k in kinds if figure != FROM_AVERAGE or row[1]]
    return [row for row in rows if (row.figure, row.site) != (INITIAL, "site-10")]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.read(run_of(tmp_path, robust()))


def read(run: Run) -> list[list[list[str]]]:
    """The table at the top of the page and that of the other recalls, as a browser reads them."""
    page = run.folder.path / "recalls.html"
    page.write_text(at_a_glance(run) + recall_tables(run), encoding="utf-8")
    return list(Page(page).tables.values())


def shown(figure: str, over: str, site: str, scope: str, k: int) -> str:
    """What stands of a made-up recall: the sign is that of a difference alone."""
    recall = made_up(figure, over, site, scope, k).recall
    sign = "+" if figure in (GAIN, FROM_AVERAGE) else ""
    return f"{recall.value:{sign}.1f} [{recall.low:{sign}.1f}, {recall.high:{sign}.1f}]"


@pytest.mark.parametrize("backwards", [False, True])
def test_every_cell_is_of_its_own_row(run: Run, backwards: bool) -> None:
    """Whatever the order in the file; the oracle stands in its own row."""
    rows = measured()
    together = replace(made_up(TRAINED, names.AVERAGE, "", names.WHOLE_SET, 1), over=TOGETHER, chance=0.5, oracle=2.25)
    run = replace(run, recalls=[*rows, together][:: -1 if backwards else 1])
    first, over = read(run)
    assert over[0] == ["", "test pairs", "initial", "trained", "gained", "chance", "source oracle"]
    expected = []
    for (kind, said), scope, k in product(
        ((names.AVERAGE, "average over sites"), (names.WORST, "worst site")), SCOPES, KS
    ):
        title = f"R@{k}, {'whole set' if scope == names.WHOLE_SET else 'in batches of 32'}, {said}"
        if (scope, k) == (names.IN_BATCH, 1):
            continue  # at the top of the page
        trained = made_up(TRAINED, kind, "", scope, k)
        cells = [shown(figure, kind, "", scope, k) for figure in (INITIAL, TRAINED, GAIN)]
        expected.append([title, str(trained.queries), *cells, f"{trained.chance:.1f}", ABSENT])
    value = together.recall.unsigned()
    title = "R@1, whole set, studies of all sites in one set"
    expected.append([title, str(together.queries), ABSENT, value, ABSENT, "0.5", "2.2"])
    assert sorted(over[1:]) == sorted(expected)

    assert first[0] == ["", "test pairs", "initial", "trained", "gained", "from the average", "chance"]
    expected = []
    for over_sites, site in ROWS:
        key = (over_sites, site, names.IN_BATCH, 1)
        trained = made_up(TRAINED, *key)
        initial = ABSENT if site == "site-10" else shown(INITIAL, *key)
        differences = [shown(figure, *key) if site or figure == GAIN else ABSENT for figure in (GAIN, FROM_AVERAGE)]
        cells = [initial, shown(TRAINED, *key), *differences]
        expected.append([site or OVER[over_sites], str(trained.queries), *cells, f"{trained.chance:.1f}"])
    assert sorted(first[1:]) == sorted(expected)
    assert {row[0] for row in first[1:3]} == {OVER[names.AVERAGE], OVER[names.WORST]}


def test_sites_of_sets_smaller_than_a_batch_have_the_figures_of_the_whole_set(run: Run) -> None:
    run = replace(run, recalls=[row for row in measured() if row.scope == names.WHOLE_SET])
    sites = read(run)[0][3:]
    assert [row[3] for row in sites] == [shown(TRAINED, SITE, site, names.WHOLE_SET, 1) for site in SITES]
