"""Films in a report: the built-in cohort's unasked, patients' only on a page of their own that was asked for."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.presets import SMALL
from support.report_pages import Page, undrawn
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg, Local
from fedvlp.report.records import OWNERS_EYES
from fedvlp.run import experiment as experiments
from fedvlp.run.compare import FinishedRun
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

COHORT = SyntheticCohort(sites=2, size=160, image_size=36, test_rows=36)
BASE = replace(
    SMALL, data=COHORT, rounds=Rounds(rounds=1), method=FedAvg(local_steps=4),
    training=replace(SMALL.training, lr=0.01, batch_size=8),
)  # fmt: skip


def simulated(root: Path, experiment: experiments.Experiment) -> RunFolder:
    folder = RunFolder.create(root, experiment)
    simulate(experiment, folder)
    return folder


def reported(folder: RunFolder, *options: str) -> Page:
    """The page that `fedvlp report` names."""
    with undrawn():
        done = CliRunner().invoke(app, ["report", str(folder.path), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return Page(Path(done.output.replace("\n", "").rpartition("report ")[2]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return simulated(tmp_path_factory.mktemp("films"), BASE)


@pytest.fixture(scope="module")
def page(folder: RunFolder) -> Page:
    return reported(folder)


def listed(page: Page) -> list[tuple[str, list[tuple[int, bool, str]]]]:
    """By film: what is said of it, and (number, whether its own, text) of the reports beside it."""
    films = re.findall(r"<h3>([^<]*its own report is number[^<]*)</h3><ol>(.*?)</ol>", page.source, re.DOTALL)
    item = r'<li value="(\d+)"( class="own")?>(.*?) <span>'
    return [
        (said, [(int(n), bool(own), re.sub("</?mark>", "", t)) for n, own, t in re.findall(item, items, re.DOTALL)])
        for said, items in films
    ]


def test_the_reports_beside_a_film_are_the_nearest_ones(folder: RunFolder, page: Page) -> None:
    """Of each site a film whose own report is first and one whose own is not, where it has both."""
    run = FinishedRun(folder, "run")
    vectors, cohort = run.embedded(*run.trained()), run.assembly.cohort
    films = listed(page)
    assert {said.partition(":")[0] for said, _ in films} == {"site-1", "site-2"}
    for said, reports in films:
        site = said.partition(":")[0]
        image, text = vectors[site]
        of_site = [cohort.reports[row] for row in cohort.rows("test", site)]
        (own,) = [number for number, own, _ in reports if own]
        assert f"number {own} of {len(of_site)}" in said
        orders = (image @ text.T).argsort(dim=1, descending=True, stable=True)
        three = [shown.rstrip("\N{HORIZONTAL ELLIPSIS}") for _, _, shown in reports[:3]]
        fitting = [
            query
            for query, order in enumerate(orders.tolist())
            if order[own - 1] == query
            and all(of_site[row].startswith(shown) for row, shown in zip(order, three, strict=False))
        ]
        assert fitting, said


def test_words_of_findings_are_marked_and_no_others(page: Page) -> None:
    marked = {word.lower() for word in re.findall("<mark>(.*?)</mark>", page.source)}
    assert marked & {"effusion", "pneumonia", "pneumothorax", "edema", "consolidation", "atelectasis"}
    assert not marked & {"no", "the", "lung", "heart", "left", "right"}


def test_the_map_has_a_cloud_for_every_site(page: Page) -> None:
    for what in ("Images", "Reports"):
        table = page.tables[f"{what} of the test split by site (PCA)"]
        assert [row[0] for row in table] == ["site", "site-1", "site-2"]


def test_models_of_their_own_have_no_common_map(tmp_path: Path) -> None:
    page = reported(simulated(tmp_path, replace(BASE, name="alone", method=Local(local_steps=2))))
    assert listed(page)
    assert not any("(PCA)" in title for title in page.alts())


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run on a table of films with reports."""
    root = tmp_path_factory.mktemp("patients")
    write(COHORT, root / "data")
    table = TableSource(str(root / "data" / "pairs.csv"), image_size=36, burned_in="header")
    return simulated(root, replace(BASE, data=table))


def test_patients_are_in_no_page_that_nobody_asked_for(patients: RunFolder) -> None:
    cohort = FinishedRun(patients, "run").assembly.cohort
    reports = {report for report in cohort.reports if report}
    page = reported(patients, "--intervals")
    assert page.source.count("data:image/png") == 0
    assert not any(report in page.text for report in reports)
    assert OWNERS_EYES not in page.text
    assert page.tables["Test split with intervals"], "figures alone"
    asked = reported(patients, "--films")
    assert OWNERS_EYES in asked.text
    assert asked.source.count("data:image/png") == len(listed(asked)) > 1
    assert any(report in asked.text for report in reports)
    assert (patients.path / "report-films.html").exists()
    assert OWNERS_EYES not in (patients.path / "report.html").read_text(encoding="utf-8")


def test_a_copy_without_the_models_of_the_sites_still_has_a_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its recalls were measured before; its films cannot be drawn, which matters to who asked for them alone."""
    alone = simulated(tmp_path, replace(BASE, name="alone", method=Local(local_steps=2)))
    assert listed(reported(alone))
    shutil.rmtree(alone.path / "sites")
    page = reported(alone)
    assert listed(page) == []
    assert page.tables["Test split with intervals"]
    assert "no images: the models of 001 stayed at its sites" in caplog.text
    asked = CliRunner().invoke(app, ["report", str(alone.path), "--films"])
    assert "stayed at its sites" in str(asked.exception)


def test_films_need_a_trained_model(tmp_path: Path, folder: RunFolder) -> None:
    begun = RunFolder(tmp_path / "begun")
    begun.checkpoint.parent.mkdir(parents=True)
    for file in ("config.json", "environment.json"):
        (begun.path / file).write_bytes((folder.path / file).read_bytes())
    for file in folder.checkpoint.parent.glob("*.*"):
        (begun.checkpoint.parent / file.name).write_bytes(file.read_bytes())
    done = CliRunner().invoke(app, ["report", str(begun.path), "--films"])
    assert isinstance(done.exception, ValueError)
    assert "has not finished, so there is no model to show images with" in str(done.exception)


def test_a_run_without_recalls_says_so(tmp_path: Path) -> None:
    """As at hospitals whose policy lets none leave: a sentence, in the place of a table that would be empty."""
    folder = simulated(tmp_path, SMALL)
    done = CliRunner().invoke(app, ["report", str(folder.path)], catch_exceptions=False)
    assert done.output.startswith("no recall left the sites (their policy), or none was measured\nreport ")
