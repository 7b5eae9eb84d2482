"""The figures of FedRGB's claims on distortion: read from a table by hand, judged by hand, and measured of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from studies.claims.cell_results import Table
from studies.claims.distortion import BEFORE, OWN, PLAIN, change, change_at, change_elsewhere, of_run, of_table
from studies.claims.ledger import SCENARIOS
from studies.claims.page import judge
from studies.claims.scenario import FAILS, HOLDS
from studies.protocols.distortion import Entry, write_table

SCENARIO = SCENARIOS["label-skew-distortion"]


def test_a_table_by_hand(tmp_path: Path) -> None:
    """From 0.5 and 0.3: trained on a they lose 0.1 and 0.2, on b 0.3 and gain 0.1."""
    entries = [
        Entry("a", "a", 0.5, 0.4), Entry("a", "b", 0.3, 0.1), Entry("b", "a", 0.5, 0.2), Entry("b", "b", 0.3, 0.4),
    ]  # fmt: skip
    path = write_table(entries, tmp_path / "distortion", "title")[0]
    assert of_table(path, OWN) == pytest.approx({
        change_at("a", OWN): -20, change_at("b", OWN): -5, change(OWN): -12.5, change_elsewhere(OWN): -25, BEFORE: 40,
    })  # fmt: skip


def cells(plain: float, own: float) -> Table:
    """Three seeds; FedAvg's model loses 10 by plain training, FedRGB's as much as is said."""
    table = {("fedavg", seed): {change(PLAIN): -10.0 - seed / 10} for seed in range(3)}
    fedrgb = {("fedrgb", seed): {change(PLAIN): plain, change(OWN): own} for seed in range(3)}
    return Table(table | fedrgb)


@pytest.mark.parametrize(("plain", "own", "verdicts"), [(-12.0, -8.0, [HOLDS, FAILS]), (-9.0, -13.0, [FAILS, HOLDS])])
def test_fedrgbs_own_training_is_compared_with_fedavgs(plain: float, own: float, verdicts: list[str]) -> None:
    results = judge(SCENARIO, cells(plain, own), ["fedrgb"])
    assert [held for _, held in results.preconditions] == [True]
    assert [outcome.verdict for outcome in results.outcomes] == verdicts


def test_where_training_distorts_nothing_nothing_is_ranked() -> None:
    table = Table({("fedavg", 0): {change(PLAIN): 1.0}, ("fedrgb", 0): {change(PLAIN): 2.0, change(OWN): 3.0}})
    results = judge(SCENARIO, table, ["fedrgb"])
    assert [held for _, held in results.preconditions] == [False]
    assert {outcome.verdict for outcome in results.outcomes} == {"not ranked"}


@pytest.mark.slow(seconds=30)
def test_runs_figures(tmp_path: Path) -> None:
    """Of the scenario's own experiments made small. FedRGB's guidance makes its own training another than the plain."""
    figures = {}
    for name, whole in SCENARIO.experiments(0).items():
        data: Any = whole.data
        method: Any = whole.method
        method = replace(method, local_steps=2, **({"aligner_steps": 2} if name == "fedrgb" else {}))
        small = replace(
            whole,
            data=replace(data, size=400, test_rows=0),
            method=method,
            training=replace(whole.training, warmup_steps=1, make_up_warmup=False),
            rounds=replace(whole.rounds, rounds=1),
        )
        folder = RunFolder.create(tmp_path, small)
        simulate(small, folder)
        figures[name] = of_run(folder)
    by_site = {change_at(f"site-{number}", way) for number in range(1, 6) for way in (PLAIN, OWN)}
    assert figures["fedavg"].keys() == figures["fedrgb"].keys() == {*SCENARIO.shown, *by_site}
    assert figures["fedavg"][change(OWN)] == figures["fedavg"][change(PLAIN)]
    assert figures["fedrgb"][change(OWN)] != figures["fedrgb"][change(PLAIN)]
