"""Recalls measured again: those that the sites sent, with intervals, and only where that is possible."""

from __future__ import annotations

import logging
import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from support.presets import SMALL
from support.report_pages import undrawn

from fedvlp.core.server_state import Server
from fedvlp.data.cohort import Cohort
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation import metric_names as names
from fedvlp.evaluation.intervals import Bootstrap, of_worst
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg, Local
from fedvlp.report.run_page import write
from fedvlp.run import beside, measurements, recalls
from fedvlp.run.compare import INITIAL
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import by_site, overall
from fedvlp.run.recalls import FROM_AVERAGE, GAIN, SITE, TOGETHER, TRAINED, Recall
from fedvlp.run.simulate import simulate

BASE = replace(
    SMALL, data=SyntheticCohort(sites=2, size=160, image_size=36, test_rows=36), rounds=Rounds(rounds=1),
    training=replace(SMALL.training, lr=0.01, batch_size=8),
)  # fmt: skip
SITES = ("site-1", "site-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    experiment = replace(BASE, method=FedAvg(local_steps=4))
    folder = RunFolder.create(tmp_path_factory.mktemp("recalls"), experiment)
    simulate(experiment, folder)
    return folder


@pytest.fixture(scope="module")
def rows(folder: RunFolder) -> list[Recall]:
    beside.measure_unasked(folder)
    return recalls.read(folder)


def one(rows: list[Recall], figure: str, over: str, site: str, scope: str, k: int) -> Recall:
    (row,) = [r for r in rows if (r.figure, r.over, r.site, r.scope, r.k) == (figure, over, site, scope, k)]
    return row


def test_the_figures_are_those_that_the_sites_sent(folder: RunFolder, rows: list[Recall]) -> None:
    history = folder.history()
    for figure, record in ((INITIAL, history[0]), (TRAINED, history[-1])):
        for site, metrics in by_site(record).items():
            for scope in (names.IN_BATCH, names.WHOLE_SET):
                for k in (1, 5):
                    row = one(rows, figure, SITE, site, scope, k)
                    assert row.recall.value == pytest.approx(metrics[names.recall("test", k, scope)])
                    assert row.recall.low <= row.recall.value <= row.recall.high


def test_differences_and_chance(rows: list[Recall]) -> None:
    """In batches of 32, R@5 is 500 / 32 by chance, in a whole set of 36 it is 500 / 36."""
    of = {site: one(rows, TRAINED, SITE, site, names.WHOLE_SET, 5) for site in SITES}
    average = one(rows, TRAINED, names.AVERAGE, "", names.WHOLE_SET, 5)
    start = one(rows, INITIAL, names.AVERAGE, "", names.WHOLE_SET, 5)
    assert average.recall.value == pytest.approx(sum(row.recall.value for row in of.values()) / 2)
    for site, row in of.items():
        away = one(rows, FROM_AVERAGE, SITE, site, names.WHOLE_SET, 5)
        assert away.recall.value == pytest.approx(row.recall.value - average.recall.value)
        assert math.isnan(away.chance)
    gain = one(rows, GAIN, names.AVERAGE, "", names.WHOLE_SET, 5)
    assert gain.recall.value == pytest.approx(average.recall.value - start.recall.value)
    assert one(rows, TRAINED, names.AVERAGE, "", names.IN_BATCH, 5).chance == 15.625
    chance = [500 / row.queries for row in of.values()]
    assert [row.chance for row in of.values()] == pytest.approx(chance)
    assert average.chance == pytest.approx(sum(chance) / 2)
    assert average.queries == sum(row.queries for row in of.values())


def test_the_worst_sites_gain_is_between_two_sites_where_another_is_the_worst() -> None:
    """Initial 20, 60, 70, trained 50, 40, 80: the worst rises from 20 to 40, of sites that gain 30, -20 and 10.

    So too in every resample, whichever site is the worst in it. Eight patients a site; k = 2 of 10, 20 and 40 pairs.
    """
    before, after = {"a": 20.0, "b": 60.0, "c": 70.0}, {"a": 50.0, "b": 40.0, "c": 80.0}
    spread = np.linspace(-18, 18, 8)
    hits = {INITIAL: {s: v + spread for s, v in before.items()}, TRAINED: {s: v - spread for s, v in after.items()}}
    bootstrap = Bootstrap({site: [f"{site}{n}" for n in range(8)] for site in before}, draws=200)
    queries = {"a": 10, "b": 20, "c": 40}
    rows = list(recalls._lines(bootstrap, hits, names.WHOLE_SET, 2, queries))

    figures = {(row.figure, row.over, row.site): round(row.recall.value, 9) for row in rows}
    expected = {(INITIAL, SITE, site): value for site, value in before.items()}
    expected |= {(TRAINED, SITE, site): value for site, value in after.items()}
    expected |= {(GAIN, SITE, "a"): 30, (GAIN, SITE, "b"): -20, (GAIN, SITE, "c"): 10}
    expected |= {(FROM_AVERAGE, SITE, site): round(value - 170 / 3, 9) for site, value in after.items()}
    expected |= {(INITIAL, names.AVERAGE, ""): 50, (TRAINED, names.AVERAGE, ""): round(170 / 3, 9)}
    expected |= {(GAIN, names.AVERAGE, ""): round(20 / 3, 9)}
    expected |= {(INITIAL, names.WORST, ""): 20, (TRAINED, names.WORST, ""): 40, (GAIN, names.WORST, ""): 20}
    assert figures == expected
    assert len(rows) == len(expected)
    assert {row.queries for row in rows if row.over != SITE} == {70}
    assert {(row.site, row.queries) for row in rows if row.site} == set(queries.items())
    chances = {row.site: row.chance for row in rows if row.figure == TRAINED}
    assert {site: chances[site] for site in queries} == {"a": 20.0, "b": 10.0, "c": 5.0}

    drawn = {figure: bootstrap.by_site(of).min(axis=0) for figure, of in hits.items()}
    (gain,) = (row.recall for row in rows if (row.figure, row.over) == (GAIN, names.WORST))
    assert gain == of_worst(drawn[TRAINED] - drawn[INITIAL], -100.0)


def test_a_worst_site_that_falls_loses_what_it_lost() -> None:
    """Initial 80 and 70, trained 30 and 60, without a spread: the worst falls from 70 to 30, and no bound is 0."""
    hits = {
        INITIAL: {"a": np.full(8, 80.0), "b": np.full(8, 70.0)},
        TRAINED: {"a": np.full(8, 30.0), "b": np.full(8, 60.0)},
    }
    bootstrap = Bootstrap({site: [f"{site}{n}" for n in range(8)] for site in "ab"}, draws=50)
    rows = list(recalls._lines(bootstrap, hits, names.WHOLE_SET, 1, {"a": 8, "b": 8}))
    gains = {row.over + row.site: row.recall for row in rows if row.figure == GAIN}
    fell = {name: (gain.value, gain.low, gain.high) for name, gain in gains.items()}
    worst, average = fell[names.WORST], fell[names.AVERAGE]
    assert worst == (-40, -40, -40)
    assert average == (-30, -30, -30)
    assert fell[f"{SITE}a"] == (-50, -50, -50)


def test_a_batch_has_the_patients_of_its_own_records(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 36 test records 32 are in a batch: the first, whose patients are resampled, and not the last."""
    given: list[dict[str, list[str]]] = []
    made = recalls.Bootstrap

    def noted(patients: dict[str, list[str]]) -> Bootstrap:
        given.append(patients)
        return made(patients)

    monkeypatch.setattr(recalls, "Bootstrap", noted)
    copy = RunFolder(tmp_path / "small" / "001")  # the others read what is measured in the folder
    shutil.copytree(folder.path, copy.path)
    run = recalls.FinishedRun(copy, "run")
    for site, of_site in run.patients.items():
        run.patients[site] = [f"{site}-{number}" for number in range(len(of_site))]
    recalls.measure(copy, run)
    batch, whole = given
    assert batch == {site: [f"{site}-{number}" for number in range(32)] for site in SITES}
    assert whole == run.patients


def test_the_start_of_sites_with_own_models_is_the_initial_model(tmp_path: Path) -> None:
    """Sites that train alone: what each measured in round 0, and not what its own model reaches at the end."""
    experiment = replace(BASE, name="local", method=Local(local_steps=6), training=replace(BASE.training, lr=0.05))
    alone = RunFolder.create(tmp_path, experiment)
    first, *_, last = simulate(experiment, alone)
    recalls.measure(alone)
    rows = recalls.read(alone)
    for figure, record in ((INITIAL, first), (TRAINED, last)):
        for site, metrics in by_site(record).items():
            own = one(rows, figure, SITE, site, names.WHOLE_SET, 5)
            assert own.recall.value == pytest.approx(metrics[names.recall("test", 5, names.WHOLE_SET)])
    assert one(rows, GAIN, SITE, "site-1", names.WHOLE_SET, 5).recall.value != 0


def test_all_records_together_beside_the_source_oracle(rows: list[Recall]) -> None:
    """N pairs in all, n of them at a site: chance is 100 / N; who knows the site has 100 / n, in the mean 200 / N."""
    together = one(rows, TRAINED, TOGETHER, "", names.WHOLE_SET, 1)
    counts = [one(rows, TRAINED, SITE, site, names.WHOLE_SET, 1).queries for site in SITES]
    assert together.queries == sum(counts)
    assert together.chance == pytest.approx(100 / sum(counts))
    assert together.oracle == pytest.approx(100 * len(SITES) / sum(counts))
    assert together.recall.low <= together.recall.value <= together.recall.high


def test_only_finished_runs_on_the_built_in_cohort_are_measured_unasked(
    tmp_path: Path, folder: RunFolder, rows: list[Recall], caplog: pytest.LogCaptureFixture
) -> None:
    begun = RunFolder.create(tmp_path, BASE)
    other = RunFolder.create(tmp_path, replace(BASE, data=TableSource(path="pairs.csv")))
    other.model.parent.mkdir()
    other.model.touch()
    large = RunFolder.create(tmp_path, replace(BASE, data=SyntheticCohort(size=recalls.UNASKED + 1)))
    large.model.parent.mkdir()
    large.model.touch()
    for run in (begun, other, large):
        beside.measure_unasked(run)
        assert recalls.read(run) == []
    assert rows
    before = recalls.file_of(folder).stat().st_mtime_ns
    beside.measure_unasked(folder)
    assert recalls.file_of(folder).stat().st_mtime_ns == before, "measured once"

    experiment = replace(BASE, name="local", method=Local(local_steps=1))
    alone = RunFolder.create(tmp_path, experiment)
    simulate(experiment, alone)
    shutil.rmtree(alone.path / "sites")  # as FLARE leaves it at the server
    with caplog.at_level(logging.WARNING):
        beside.measure_unasked(alone)
    assert "the models of local stayed at its sites" in caplog.text
    assert recalls.read(alone) == []


@dataclass(frozen=True)
class FewTests:
    """The built-in cohort, whose second site has ``left`` test records."""

    data: SyntheticCohort
    left: int

    def build(self) -> Cohort:
        cohort = self.data.build()
        return cohort.take(np.setdiff1d(np.arange(len(cohort)), cohort.rows("test", "site-2")[self.left :]))


@pytest.mark.parametrize("left", [0, 1])
def test_a_site_with_fewer_than_two_test_pairs_is_left_out_and_named(
    tmp_path: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Without one there was nothing to join; a pair alone found itself: 100.0 [100.0, 100.0].

    The other site's averages on test stay, and the run's notes say of how many sites they are.
    """
    data = FewTests(SyntheticCohort(sites=2, size=80, image_size=36), left)
    experiment = replace(BASE, method=FedAvg(local_steps=1), data=data)
    folder = RunFolder.create(tmp_path, experiment)
    simulate(experiment, folder)
    measured = recalls.read(folder) if recalls.measure(folder) else []
    assert {row.site for row in measured if row.over == SITE} == {"site-1"}
    assert "left out, with fewer than 2 test pairs: site-2" in caplog.text
    own = one(measured, TRAINED, SITE, "site-1", names.WHOLE_SET, 1)
    worst = one(measured, TRAINED, names.WORST, "", names.WHOLE_SET, 1)
    assert worst.recall.value == own.recall.value
    with undrawn():
        page = write(folder).read_text(encoding="utf-8")
    assert "Left out, with fewer than 2 test pairs: site-2." in page
    assert f"average and worst site on test are without site-2 ({left} records)" in page
    recall = names.recall("test", 1, names.WHOLE_SET)
    figures = by_site(folder.history()[-1])
    assert recall not in figures["site-2"]
    assert overall(folder.history()[-1])[names.over_sites(recall, names.AVERAGE)] == figures["site-1"][recall]


def test_what_was_measured_of_another_model_is_measured_again(tmp_path: Path, folder: RunFolder) -> None:
    """An older fedvlp put the run back and left the files; noted for another model they are not shown.

    Without a note they count, unless the model is newer.
    """
    run = RunFolder(tmp_path / "small" / "001")
    shutil.copytree(folder.path, run.path)
    beside.measure_unasked(run)
    before = recalls.file_of(run).read_text()
    assert recalls.read(run)
    server, _ = Server.load(run.checkpoint)
    server.history = [*server.history, {**server.history[-1], "seconds": 0.25}]
    server.save(run.checkpoint, 0)
    assert recalls.read(run) == []
    beside.measure_unasked(run)
    assert recalls.read(run)
    assert recalls.file_of(run).read_text() == before, "the weights are the same"
    (measurements.folder_of(run) / measurements.NOTE).unlink()
    lines = before.splitlines()
    recalls.file_of(run).write_text("\n".join(lines[:2]) + "\n")
    beside.measure_unasked(run)
    assert len(recalls.read(run)) == 1, "it is no older than the model"
    os.utime(recalls.file_of(run), (0, 0))
    assert len(recalls.read(run)) == 1, "shown all the same: it may have been copied"
    beside.measure_unasked(run)
    assert recalls.file_of(run).read_text() == before
