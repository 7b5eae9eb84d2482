"""Films in a report: the synthetic cohort's unasked, patients' only on a page of their own that was asked for."""

from __future__ import annotations

import csv
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.browser import chromium, needs_browser
from support.presets import SMALL
from support.report_pages import Page, undrawn
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.evaluation.linear_probe import LinearProbe
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg, Local
from fedvlp.report.records import OWNERS_EYES, _marked, _saliency
from fedvlp.run import experiment as experiments
from fedvlp.run.compare import FinishedRun
from fedvlp.run.evaluate import Choices, linear_probe
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
        (said, [(int(n), bool(own), re.sub("</?mark.*?>", "", t)) for n, own, t in re.findall(item, items, re.DOTALL)])
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


def test_negated_findings_are_marked_as_such() -> None:
    """To the end of the clause: a list behind one "no" is negated, what follows "but" or a full stop is not."""
    report = "No pulmonary edema, effusion or pneumothorax but a mass. Edema. Without effusion; edema: not free of mass"
    marked = re.findall("<mark(.*?)>(.*?)</mark>", _marked(report, {"edema", "effusion", "pneumothorax", "mass"}))
    assert [(word, "negated" in kind) for kind, word in marked] == [
        ("edema", True), ("effusion", True), ("pneumothorax", True), ("mass", False), ("Edema", False),
        ("effusion", True), ("edema", False), ("mass", True),
    ]  # fmt: skip


def test_words_of_findings_are_marked_and_no_others(page: Page) -> None:
    marked = {word.lower() for word in re.findall("<mark.*?>(.*?)</mark>", page.source)}
    assert marked & {"effusion", "pneumonia", "pneumothorax", "edema", "consolidation", "atelectasis"}
    assert not marked & {"no", "the", "lung", "heart", "left", "right"}


def test_a_saliency_map_of_each_site_says_its_share_of_the_lungs(page: Page) -> None:
    said = re.findall(
        r"<p>(site-\d), ([^<:]+): cosine[^<]*lungs: of the strongest tenth of the map \d+ % lies", page.source
    )
    assert [site for site, _ in said] == ["site-1", "site-2"]
    assert all(finding in COHORT.build().label_names for _, finding in said)


def test_a_saliency_map_is_of_an_image_with_masks_where_there_is_one(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each site the second image with a finding alone has masks."""
    run = FinishedRun(folder, "run")
    cohort = run.assembly.cohort
    masks = cohort.masks
    assert masks is not None
    masked = []
    for site in ("site-1", "site-2"):
        rows = cohort.rows("test", site)
        masked.append(rows[(cohort.labels[rows] == 1).any(1)][1])

    def some(rows: np.ndarray) -> dict[str, np.ndarray]:
        return {name: mask & np.isin(rows, masked)[:, None, None] for name, mask in masks(rows).items()}

    changed = replace(cohort, masks=some)
    monkeypatch.setattr(type(run.assembly), "cohort", property(lambda _: changed))
    assert _saliency(run, ["site-1", "site-2"]).count("lungs: of the strongest tenth") == 2


def test_images_come_before_the_tables_and_headings_leave_no_level_out(page: Page) -> None:
    assert page.text.index("Test images and the reports") < page.text.index("Recall@K (R@K)")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))


def test_a_site_without_images_has_no_saliency_map(tmp_path: Path) -> None:
    run = FinishedRun(simulated(tmp_path, replace(BASE, partition=experiments.Partition(text_only=1))), "run")
    assert run.assembly.cohort.masks is not None
    assert re.findall(r"<p>(site-\d), ", _saliency(run, ["site-1", "site-2"])) == ["site-1"]


def test_what_a_probe_measured_is_shown_until_the_model_changes(folder: RunFolder, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(folder.path, tmp_path / "run"))
    assert "Linear probe" not in reported(run).text
    linear_probe(run, Choices(steps=2, probe=LinearProbe(fractions=(0.1, 1.0))))
    page = reported(run)
    with open(run.path / "evaluation" / "linear-probe.csv", newline="", encoding="utf-8") as lines:
        measured = [f"{float(line['calibration_error']):.3f}" for line in csv.DictReader(lines)]
    assert [row[-1] for row in page.tables["Linear probe and calibration"][1:]] == measured
    drawn = page.tables["Calibration, trained on 100 %"]
    assert "Edema, share present" in drawn[0]
    noted = run.path / "evaluation" / "measured.json"
    noted.write_text(re.sub('"linear-probe([^"]*)": "[^"]*"', r'"linear-probe\1": "of another"', noted.read_text()))
    assert "Linear probe" not in reported(run).text


def test_subgroups_of_an_evaluation_are_one_table(folder: RunFolder, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(folder.path, tmp_path / "run"))
    head = "train_on,by,subgroup,test_records,test_patients,accuracy,accuracy_low,accuracy_high,macro_auc,macro_auc_low"
    line = "100 %,sex,F,30,20,70,60,80,,,"
    (run.path / "evaluation" / "linear-probe-subgroups.csv").write_text(f"{head},macro_auc_high\n{line}\n")
    (row,) = reported(run).tables["Subgroups"][1:]
    absent = "\N{EN DASH}"
    assert row == ["sex: F", "linear probe, 100 %", "30", absent, "70.0 [60.0, 80.0]"]


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
    """A run on a table of images with reports."""
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
    written = set(patients.experiment().data.written().values()) - reports
    assert any(report in asked.text for report in written), "as the table has them, and not as the text tower does"
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
    assert "\nno recall left the sites (their policy), or none was measured\nreport " in done.output


@needs_browser
def test_on_a_phone_the_page_is_as_wide_as_the_screen(page: Page, folder: RunFolder) -> None:
    """Wide tables scroll within themselves; figures and images shrink."""
    with chromium() as browser:
        phone = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        browser.get(folder.page(False).as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
        wide = "return [...document.querySelectorAll('table')].filter(table => table.scrollWidth > 390).length"
        assert browser.execute_script(wide) > 0, "there is a table to scroll"
