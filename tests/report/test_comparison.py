"""The page of several runs: the verdict first, every figure with its interval, what differs between the runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.report_pages import Page, robust, run_of

from fedvlp.evaluation.intervals import Interval
from fedvlp.report.comparison_page import _settings, verdict, write
from fedvlp.report.figures import look, ranges
from fedvlp.report.html import ABSENT
from fedvlp.run.compare import Comparison, Row

FEDAVG, FEDDRA = Interval(20, 18, 22), Interval(24, 22, 26)
COMPARED = Comparison(
    1, True, {"site-1": 64, "site-2": 64}, 0,
    (Row("initial", Interval(4, 3, 5), Interval(3, 1, 5)), Row("fedavg", FEDAVG, Interval(10, 8, 12)),
     Row("feddra", FEDDRA, Interval(15, 13, 17))),
    (Row("fedavg", Interval(4, 1, 7), Interval(5, 2, 8)),),
    {"fedavg": "30 / 30", "feddra": "20 / 30"},
    {name: {"site-1": interval, "site-2": interval} for name, interval in (("fedavg", FEDAVG), ("feddra", FEDDRA))},
)  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    root = tmp_path_factory.mktemp("compared")
    folders = [run_of(root, robust(), preset) for preset in ("fedavg", "feddra")]
    return Page(write(COMPARED, folders, root / "page.html"))


def test_the_verdict_comes_first(page: Page) -> None:
    verdict = "feddra is ahead of fedavg here: average ahead, worst site ahead (one seed)."
    assert page.text.index(verdict) < page.text.index("Recall is on held-out test studies")


def test_the_verdict_is_on_the_run_before_the_last() -> None:
    behind = Row("local", Interval(-4, -7, -1), Interval(-5, -8, -2))
    three = replace(COMPARED, ahead=(behind, *COMPARED.ahead))
    assert verdict(three).startswith("feddra is ahead of fedavg here")


def test_a_setting_that_any_of_the_runs_has_alone_is_shown() -> None:
    """The first, one in the middle, the last; and none that all have."""
    for odd in range(3):
        runs: dict[str, Any] = {
            name: SimpleNamespace(config={"args": {"lr": 0.1 * (1 + (index == odd)), "seed": 0}})
            for index, name in enumerate("abc")
        }
        shown = _settings(runs)
        assert shown.count("<td>0.1</td>") == 2, odd
        assert shown.count("<td>0.2</td>") == 1, odd
        assert "seed" not in shown


def test_every_figure_has_its_interval_and_chance(page: Page) -> None:
    models = page.tables["R@1 on the test split, in batches of 32, %, 95 % intervals, chance 3.1"]
    assert models[3] == ["feddra", "24.0 [22.0, 26.0]", "15.0 [13.0, 17.0]", "20 / 30"]
    assert page.tables["Paired differences, 64 test pairs a site"][1] == [
        "fedavg",
        "+4.0 [+1.0, +7.0]",
        "+5.0 [+2.0, +8.0]",
    ]
    drawn = page.tables["R@1 of every model, test (%); dashed line: chance 3.125"]
    assert drawn[0] == ["", *(f"{over}{end}" for over in ("average", "worst site") for end in ("", ", low", ", high"))]
    assert drawn[2] == ["fedavg", "20", "18", "22", "10", "8", "12"]
    by_site = page.tables["R@1 by site, test (%); dashed line: chance 3.125"]
    assert by_site[1] == ["site-1", "20", "18", "22", "24", "22", "26"]


def test_an_interval_that_leaves_its_value_out_or_has_no_bounds_is_drawn() -> None:
    """Percentiles may lie beside the value: a bar to that side has length 0, where matplotlib refuses a negative one.

    A value without bounds has no bar, and dashes in the table.
    """
    groups = {"fedavg": {"a": Interval(50, 40, 48), "b": Interval(50, 52, 60), "c": Interval(50, math.nan, math.nan)}}
    drawn = ranges("R@1", groups, {"fedavg": look(0)})
    assert "<td>52</td><td>60</td>" in drawn
    assert f"<td>50</td><td>{ABSENT}</td><td>{ABSENT}</td>" in drawn


def test_curves_costs_and_what_differs(page: Page) -> None:
    curve = page.tables["R@1 on val, in batches of 32, worst site (%); dashed line: chance 3.125"]
    assert curve == [["rounds completed", "fedavg", "feddra"], ["0", "3", "3"], ["1", "4", "4"], ["2", "6", "6"]]
    assert page.tables["Bytes and seconds"][1] == ["fedavg", "2", "3", "15.0", "8.0", "7.5"]
    differ = {row[0]: row[1:] for row in page.tables["Settings that differ"]}
    assert differ["method"] == ["FedAvg", "FedDRA"]
    assert differ["method.gamma"] == [ABSENT, "0.5"]
    assert not any(name.startswith("data.") for name in differ), "the records are the same"


def test_the_page_needs_nothing_from_outside(page: Page) -> None:
    assert page.source.count("<script") == 0
    assert all("href" not in attrs for _, attrs in page.tags)
    assert all((attrs["src"] or "").startswith("data:") for tag, attrs in page.tags if tag == "img")


def test_sets_of_different_sizes_have_no_common_chance(tmp_path: Path) -> None:
    folders = [run_of(tmp_path, robust(), preset) for preset in ("fedavg", "feddra")]
    page = Page(write(replace(COMPARED, in_batch=False, sites={}), folders, tmp_path / "page.html"))
    assert "R@1 of every model, test (%)" in page.alts()
    assert not any(title.startswith("R@1 by site") for title in page.alts())
