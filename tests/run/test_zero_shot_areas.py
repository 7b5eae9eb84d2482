"""Zero-shot areas by finding and site: their mean is the macro AUC that `--what zero-shot` measures."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from support.presets import SMALL
from support.report_pages import page_of

from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation.zero_shot import ZeroShot, class_texts
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run import zero_shot_areas as areas
from fedvlp.run.beside import measure_unasked
from fedvlp.run.compare import INITIAL, FinishedRun
from fedvlp.run.evaluate import Choices, zero_shot
from fedvlp.run.folder import RunFolder
from fedvlp.run.recalls import TRAINED
from fedvlp.run.simulate import simulate
from fedvlp.run.zero_shot_areas import Area

BASE = replace(
    SMALL, data=SyntheticCohort(sites=2, size=160, image_size=36, test_rows=36), rounds=Rounds(rounds=1),
    method=FedAvg(local_steps=4), training=replace(SMALL.training, lr=0.01, batch_size=8),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder.create(tmp_path_factory.mktemp("areas"), BASE)
    simulate(BASE, folder)
    measure_unasked(folder)
    return folder


@pytest.fixture(scope="module")
def measured(folder: RunFolder) -> list[Area]:
    return areas.read(folder)


def test_their_mean_is_the_macro_auc(folder: RunFolder, measured: list[Area]) -> None:
    """Uncertain films are left out and findings that are not mentioned are absent, there and here."""
    file, _ = zero_shot(folder, Choices())
    with open(file, newline="", encoding="utf-8") as lines:
        macro = {row["site"]: float(row["macro_auc"]) for row in csv.DictReader(lines) if row["model"] == "global"}
    for site in ("site-1", "site-2"):
        here = [one for one in measured if (one.model, one.site) == (TRAINED, site)]
        assert [one.finding for one in here] == list(FINDINGS)
        assert fmean(one.area.value for one in here) == pytest.approx(macro[site])
        for one in here:
            assert 0 < one.positive < one.films
            assert one.area.low <= one.area.value <= one.area.high


@pytest.mark.slow(seconds=3)
def test_an_area_whose_negatives_are_of_one_patient_has_no_interval() -> None:
    """Else it would be exact: every resample with an AUC has that patient."""
    scores = torch.tensor([[[0.1, 0.1], [0.2, 0.2], [0.3, 0.3], [0.4, 0.4]]])
    labels = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    one, two = areas._of_site("trained", "a", ("x", "y"), scores, labels, "abcd")
    assert (one.area.value, math.isnan(one.area.low), one.area.unsigned(2)) == (0.0, True, "0.00")
    assert not math.isnan(two.area.low)


def test_kept_features_of_frozen_towers_give_the_same(tmp_path: Path) -> None:
    """Whose batches have no films."""
    frozen = ModelConfig(init="tiny-pool", head_norm="layer", alignment=False, adapters="lora", adapter_rank=0)
    experiment = replace(BASE, model=frozen, data=replace(BASE.data, image_size=72), method=FedAvg(local_steps=1))
    values = {}
    for kept in (True, False):
        training = replace(experiment.training, cache_features=kept)
        run = RunFolder.create(tmp_path / str(kept), replace(experiment, training=training))
        simulate(run.experiment(), run)
        areas.measure(run)
        values[kept] = [one.area.value for one in areas.read(run) if one.model == INITIAL]
    assert len(values[True]) == 2 * len(FINDINGS)
    assert values[True] == pytest.approx(values[False])


def test_the_initial_model_stands_beside(measured: list[Area]) -> None:
    of = {model: [one.area.value for one in measured if one.model == model] for model in (INITIAL, TRAINED)}
    assert len(of[INITIAL]) == len(of[TRAINED]) == 10
    assert of[INITIAL] != of[TRAINED]


def test_prompts_are_embedded_once_for_one_model_and_by_each_of_sites_own(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sites with models of their own have the areas that these have where all sites share them."""
    run, protocol = FinishedRun(folder, "run"), ZeroShot(tuple(FINDINGS))
    models = {"site-1": run.trained()[1], "site-2": run.assembly.initial()}
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return class_texts(*arguments)

    monkeypatch.setattr(areas, "class_texts", counted)
    shared = {site: list(areas._areas(run, protocol, TRAINED, {}, model)) for site, model in models.items()}
    assert len(calls) == len(models) * len(protocol.seeds)
    expected = [one for site, found in shared.items() for one in found if one.site == site]
    assert list(areas._areas(run, protocol, TRAINED, models, models["site-1"])) == expected
    assert len(expected) == 10


def test_the_report_shows_them(folder: RunFolder, measured: list[Area]) -> None:
    page = page_of(folder)
    table = page.tables["Zero-shot by finding and site"]
    one = next(one for one in measured if (one.model, one.site, one.finding) == (TRAINED, "site-2", "Edema"))
    (row,) = [row for row in table if row[0] == "Edema"]
    shown = f"{one.area.value:.2f} [{one.area.low:.2f}, {one.area.high:.2f}], {one.positive} / {one.films}"
    assert row[2].endswith(shown)
    drawn = page.tables["Zero-shot AUC of the trained model; dashed line: chance 0.5"]
    assert [row[0] for row in drawn[1:]] == list(FINDINGS)
    curve = page.tables["ROC, Edema"]
    (column,) = [index for index, name in enumerate(curve[0]) if name == "site-2, sensitivity"]
    shown = [float(row[column]) for row in curve[1:]]
    assert shown == pytest.approx(one.sensitivities, abs=1e-3)
    assert shown == sorted(shown)
    assert np.trapezoid(one.sensitivities, areas.RATES) == pytest.approx(one.area.value, abs=0.03)


def test_what_was_measured_stays_and_a_damaged_file_is_named(tmp_path: Path, folder: RunFolder) -> None:
    before = areas.file_of(folder).stat().st_mtime_ns
    measure_unasked(folder)
    assert areas.file_of(folder).stat().st_mtime_ns == before
    assert areas.read(RunFolder(tmp_path)) == []
    areas.file_of(RunFolder(tmp_path)).parent.mkdir()
    areas.file_of(RunFolder(tmp_path)).write_text("model,site\ninitial,site-1\n")
    with pytest.raises(ValueError, match=r"zero-shot-findings.csv is not what fedvlp wrote there; remove it"):
        areas.read(RunFolder(tmp_path))
