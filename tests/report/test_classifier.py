"""A classifier's part of the report: its areas, what was skipped, and pictures of public items alone."""

from __future__ import annotations

import base64
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import report_pages
from support.report_pages import page_of, run_of, undrawn

from fedvlp.data.cohort import PUBLIC
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.files import write
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods.car_mfl import PARTNERS
from fedvlp.report import run_page as report
from fedvlp.report.classifier import section
from fedvlp.report.run import Run
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate


def small() -> Experiment:
    experiment = presets.get("car-mfl")
    settings = {
        "data.size": 240, "data.sites": 3, "partition.image_only": 1, "partition.text_only": 1, "rounds.rounds": 2,
        "method.local_steps": 1, "training.batch_size": 8, "model.image_size": 32, "data.image_size": 36,
    }  # fmt: skip
    for key, value in settings.items():
        experiment = override(experiment, key, str(value))
    return experiment


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), small())
    simulate(folder.experiment(), folder)
    return folder


def page(folder: RunFolder) -> str:
    with undrawn():
        text = report.write(folder).read_text(encoding="utf-8")
    return text.partition("<h2>Classifier</h2>")[2].partition("<h2>")[0]


def test_the_table_has_the_servers_areas_before_and_after(run: RunFolder) -> None:
    text = page(run)
    first, last = run.history()[0]["server"], run.history()[-1]["server"]
    for name in ("macro", "Edema"):
        cells = "".join(
            f"<td>{value}</td>" for value in (name, "test", *(f"{f[f'test/auc/{name}']:.4g}" for f in (first, last)))
        )
        assert cells in text
    for curve in (
        "Macro AUC, val",
        "Share of classifier weight on the image",
        "Different public items a record has had",
    ):
        assert f'alt="{curve}' in text


def test_the_model_of_the_best_round_is_called_that_and_is_no_point_after_the_last(tmp_path: Path) -> None:
    """val 0.5, 0.8, 0.6 and, after round 3, that of round 1 once more: the curve ends with what was measured there."""
    areas = {0: 0.5, 1: 0.8, 2: 0.6, 3: 0.8}
    history = [
        report_pages.record(
            r, "train" if r < 3 else "evaluate", {"site-1": {"probe/distinct_partners": 1.0 + r}},
            server={"val/auc/macro": area, "test/auc/macro": area},
        )
        for r, area in areas.items()
    ]  # fmt: skip
    best_first, best_last, unknown = (
        page_of(run_of(tmp_path / name, history, "car-mfl", memory=memory)).tables
        for name, memory in (
            ("first", {"best_round": torch.tensor(1)}), ("last", {"best_round": torch.tensor(3)}), ("older", {}),
        )
    )  # fmt: skip
    assert best_first["Classifier"][0] == ["AUC on the public set", "split", "initial", "best round on val (1)"]
    assert best_first["Classifier"][1] == ["macro", "test", "0.5", "0.8"]
    assert best_last["Classifier"][0][-1] == "best round on val (3)"
    assert unknown["Classifier"][0][-1] == "last"
    for tables, rounds in ((best_first, "012"), (best_last, "0123"), (unknown, "0123")):
        (curve,) = (rows for title, rows in tables.items() if title.startswith("Macro AUC, val"))
        assert [row[0] for row in curve[1:]] == list(rounds)
        (partners,) = (rows for title, rows in tables.items() if title.startswith("Different public items"))
        assert [row[0] for row in partners[1:]] == list("0123"), "they are the sites' own, whatever the model"


def test_the_pictures_show_the_public_items_of_the_memory(run: RunFolder) -> None:
    text = page(run)
    shown = re.findall(r'alt="Public items retrieved for record (\d+) of (site-\d)"', text)
    assert [site for _, site in shown] == ["site-2", "site-3"], "the paired site retrieves nothing"
    for record, site in shown:
        items = SiteMemory(run.path / "sites" / site).newest()[PARTNERS][:, int(record)].tolist()
        rows = "".join(f"<tr><td>{round}</td><td>{item}</td></tr>\n" for round, item in enumerate(items)).strip()
        assert rows in text


def test_only_public_images_are_drawn(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever draws the report reads the pixels of public rows and of no other."""
    read: list[int] = []
    real = Assembly.cohort.fget  # type: ignore[attr-defined]

    def watched(self: Assembly) -> object:
        cohort = real(self)
        return replace(cohort, images=lambda rows: read.extend(rows.tolist()) or cohort.images(rows))

    monkeypatch.setattr(Assembly, "cohort", property(watched))
    page(run)
    cohort = Assembly(run.experiment()).cohort
    assert read
    assert {cohort.sites[row] for row in read} == {PUBLIC}


def drawn(folder: RunFolder, films: bool = False) -> int:
    """Films in the drawings of a page: they are base64 within base64."""
    with undrawn():
        source = report.write(folder, films).read_text(encoding="utf-8")
    drawings = re.findall(r"data:image/svg\+xml;base64,([^\"]*)", source)
    return source.count("data:image/png") + sum(base64.b64decode(one).count(b"data:image/png") for one in drawings)


def test_patients_of_a_public_set_are_in_no_page_that_nobody_asked_for(run: RunFolder, tmp_path: Path) -> None:
    """The public set of a table is that hospital's patients; the synthetic cohort's is nobody."""
    assert drawn(run) == 4, "two rounds at two sites"
    experiment = run.experiment()
    write(experiment.data, tmp_path / "data")
    table = TableSource(
        str(tmp_path / "data" / "pairs.csv"), image_size=36, label_columns=experiment.model.labels, burned_in="header"
    )
    folder = RunFolder.create(tmp_path, replace(experiment, data=table))
    for name in ("checkpoints", "sites"):
        shutil.copytree(run.path / name, folder.path / name)
    shutil.copytree(run.model.parent, folder.model.parent)
    assert drawn(folder) == 0
    assert drawn(folder, films=True) == 4
    (tmp_path / "data" / "pairs.csv").unlink()
    assert drawn(folder) == 0
    with pytest.raises(ValueError, match="table"):
        drawn(folder, films=True)


def test_the_built_in_cohorts_films_that_cannot_be_drawn_cost_no_page(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def elsewhere(self: Assembly) -> object:
        raise ValueError("other labels")

    monkeypatch.setattr(Assembly, "cohort", property(elsewhere))
    assert drawn(run) == 0
    assert "no images of the public set: other labels" in caplog.text


def test_a_run_without_a_classifier_has_no_such_chapter(tmp_path: Path) -> None:
    plain = replace(presets.get("fedavg"), name="plain")
    assert page(RunFolder.create(tmp_path, plain)) == ""


def test_findings_of_one_class_are_named(run: RunFolder) -> None:
    """The public val split is small; a finding that it lacks is in no row and is named below the table."""
    read = Run.read(run)
    for record in read.history:
        record["server"] = {name: value for name, value in record["server"].items() if name != "test/auc/Edema"}
    text = section(read)
    assert "Skipped, as all known labels are alike: " in text
    assert "Edema (test)" in text


def test_a_split_that_nobody_measured_is_called_that(run: RunFolder) -> None:
    """Every finding of it was said to have labels that are all alike."""
    read = Run.read(run)
    for record in read.history:
        record["server"] = {name: value for name, value in record["server"].items() if not name.startswith("test/")}
    text = section(read)
    assert "The server&#x27;s model was not measured on test." in text
    assert "(test)" not in text.partition("Skipped")[2].partition("</p>")[0]


def test_a_server_without_areas_has_no_table_of_them(tmp_path: Path) -> None:
    """As where there is no public set: the sites' own areas are drawn, and nothing is said of labels."""
    history = [
        report_pages.record(round, phase, {site: {"val/auc/macro": 0.6, "test/auc/macro": 0.7} for site in "ab"})
        for round, phase in ((0, "train"), (1, "evaluate"))
    ]
    text = page(run_of(tmp_path, history, "car-mfl"))
    assert "AUC on the public set" not in text
    assert "Skipped" not in text
    assert 'alt="Macro AUC, val' in text


def test_areas_that_cannot_be_are_left_out_and_counted(tmp_path: Path) -> None:
    sites = {"a": {"val/auc/macro": 0.6}, "b": {"val/auc/macro": 1e9}}
    read = page_of(run_of(tmp_path, [report_pages.record(0, "train", sites)], "car-mfl"))
    assert "Left out, as no model has such metrics: 1 recalls or AUCs out of their range." in read.text
    assert "the sites' mean macro AUC (val; chance 0.5) is 0.600" in read.text
    assert "1000000000" not in read.text


def test_the_drawing_is_an_svg_with_as_many_films_as_rounds(run: RunFolder) -> None:
    source = re.search(r'alt="Public items retrieved[^"]*" src="data:image/svg\+xml;base64,([^"]*)"', page(run))
    assert source is not None
    drawing = base64.b64decode(source[1]).decode()
    assert drawing.count("<image") == 2
    assert torch.is_tensor(SiteMemory(run.path / "sites" / "site-2").newest()[PARTNERS])
