"""`fedvlp audit` on finished runs: its controls, its file, what report and card say, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planted import planted
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.core.metric_keys import RECORD_EPSILON, SITE_EPSILON
from fedvlp.core.server_state import Server
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg, Local
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.report.run import Run
from fedvlp.report.sections import attacks
from fedvlp.run import audit as audits
from fedvlp.run import presets
from fedvlp.run.audit import travelling
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.model_card import CLASSES, with_block
from fedvlp.run.simulate import simulate
from fedvlp.training.settings import Training

DATA = SyntheticCohort(sites=2, size=160, image_size=64)
START = ModelConfig(init="tiny-pool", head_norm="layer")
"""Towers that have learned: random ones of this size hardly tell one record from another in so few steps."""


def finished(folder: Path, method: Any, **changes: Any) -> RunFolder:
    experiment = Experiment(
        "small", method, START, data=DATA, training=Training(batch_size=8),
        rounds=Rounds(rounds=1, evaluate_every=0), **changes,
    )  # fmt: skip
    run = RunFolder.create(folder, experiment)
    simulate(experiment, run)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return finished(tmp_path_factory.mktemp("runs"), FedAvg(local_steps=1))


@pytest.fixture(scope="module")
def audit(run: RunFolder) -> audits.Audit:
    return audits.measure(run, resamples=100)


@dataclass(frozen=True)
class Told:
    """The command on a copy of the run: what it printed, and what was measured."""

    run: RunFolder
    output: str
    measured: audits.Audit


@pytest.fixture(scope="module")
def told(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """With fewer resamples than the command takes."""
    copy = RunFolder(tmp_path_factory.mktemp("copy") / "small" / "001")
    shutil.copytree(run.path, copy.path)
    measure, measured = audits.measure, []

    def fewer(*arguments: Any, **options: Any) -> audits.Audit:
        measured.append(measure(*arguments, **options, resamples=20))
        return measured[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audits, "measure", fewer)
        done = CliRunner().invoke(app, ["audit", str(copy.path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return Told(copy, done.output, *measured)


def test_members_were_trained_on_and_others_were_not(run: RunFolder) -> None:
    """No patient is on two sides, and no member is held out."""
    attacked = audits.Attacked(run)
    cohort = attacked.assembly.cohort
    for site, rows in attacked.rows.items():
        patients = {name: {cohort.patients[row] for row in of} for name, of in rows.items()}
        assert patients[audits.MEMBERS].isdisjoint(patients[audits.OTHERS] | patients[audits.POOL])
        assert patients[audits.OTHERS].isdisjoint(patients[audits.POOL])
        assert set(rows[audits.MEMBERS]) == set(cohort.rows("train", site))
        assert not set(rows[audits.OTHERS]) & set(cohort.rows("train"))


def test_intervals_are_over_patients_and_not_their_records(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """At all sites together and at each."""
    given: dict[str, list[list[str]]] = {}

    def noted(model: str, attack: str, site: str, *arguments: Any) -> None:
        given.setdefault(model, []).append(arguments[3])

    monkeypatch.setattr(audits, "membership", noted)
    attacked = audits.Attacked(run)
    patients = attacked.assembly.cohort.patients

    def whose(rows: Any) -> list[str]:
        return [patients[row] for row in (*rows[audits.MEMBERS], *rows[audits.OTHERS])]

    one, other = map(whose, attacked.rows.values())
    scores = {
        site: {"loss": torch.arange(float(len(of)))} for site, of in zip(attacked.rows, (one, other), strict=True)
    }
    list(attacked._measured("model", scores, attacked._weights(attacked.rows), 2))
    assert given["model"] == [one + other, one, other]
    assert all(len(set(of)) < len(of) for of in given["model"]), "or records would do as well"


@pytest.mark.slow(seconds=30)
def test_the_control_is_at_chance_and_the_trained_model_is_attacked(audit: audits.Audit) -> None:
    """Before training members are like others; that no leak was planted is said."""
    for row in audit.of(audits.UNTRAINED):
        assert row.area.low - 3 <= 50 <= row.area.high + 3
    untrained, planted = audit.controls()
    assert "as it must be" in untrained
    assert "No leak was planted" in planted
    assert {row.site for row in audit.rows} == {"", "site-1", "site-2"}
    assert {row.attack for row in audit.of(audits.TRAINED)} == {
        "loss", "cosine", "gradient", "loss, gained", "cosine, gained", "gradient, gained",
    }  # fmt: skip


@pytest.mark.slow(seconds=30)
def test_the_file_is_read_as_it_was_written(run: RunFolder, audit: audits.Audit) -> None:
    again = audits.read(run)
    assert again is not None
    assert json.dumps(audits.plain(again.rows), default=vars) == json.dumps(audits.plain(audit.rows), default=vars)
    assert (again.round, again.dropped, again.bounds) == (audit.round, audit.dropped, audit.bounds)
    damaged = RunFolder(run.path.parent / "damaged")
    audits.file_of(damaged).parent.mkdir(parents=True)
    audits.file_of(damaged).write_text("{}")
    with pytest.raises(ValueError, match="run `fedvlp audit RUN` again"):
        audits.read(damaged)
    assert audits.read(RunFolder(run.path.parent / "none")) is None


@pytest.mark.slow(seconds=30)
def test_report_and_card_say_it_once(run: RunFolder, audit: audits.Audit) -> None:
    card = (run.path / "model" / "README.md").read_text(encoding="utf-8")
    assert card.count("<!-- audit -->") == 1
    assert "Stronger attacks may exist." in card
    again = with_block(card, "anew", "audit", CLASSES)
    assert again.count("<!-- audit -->") == again.count("anew") == 1
    page = attacks(Run.read(run))
    assert "No leak was planted" in page


def test_the_command(told: Told) -> None:
    assert "No leak was planted" in told.output
    assert "audit.json" in told.output


def test_a_site_sees_what_its_limit_would_measure(run: RunFolder) -> None:
    """One more update of each site; nothing of the run changes."""
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    done = CliRunner().invoke(app, ["audit", str(run.path), "--outgoing"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for site in ("site-1", "site-2"):
        (line,) = [line for line in done.output.splitlines() if line.startswith(f"{site}: AUC ")]
        assert 0 <= float(line.split()[2]) <= 100
    assert "envelope.most_membership" in done.output
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("kind", ["classifier", "local"])
def test_classifiers_and_sites_own_models_are_attacked_too(kind: str, tmp_path: Path) -> None:
    if kind == "local":
        measured = audits.measure(finished(tmp_path, Local(local_steps=1)), resamples=20)
        assert {row.model for row in measured.rows} == {audits.UNTRAINED, audits.OWN}
        return
    experiment = presets.get("mfedavg")
    config: Any = experiment.model
    assert isinstance(config, MultimodalConfig)
    small = replace(
        experiment, data=replace(experiment.data, size=300), method=replace(experiment.method, local_steps=1),
        rounds=Rounds(rounds=1, evaluate_every=0),
    )  # fmt: skip
    run = RunFolder.create(tmp_path, small)
    simulate(small, run)
    measured = audits.measure(run, resamples=20)
    assert {row.attack for row in measured.of(audits.UNTRAINED)} == {"loss", "gradient"}


@pytest.mark.slow(seconds=60)
def test_representations_are_attacked_where_no_weights_travel(tmp_path: Path) -> None:
    """At the sites with images and reports, of their models before and after training; no other attack on updates."""
    preset: Any = presets.get("creamfl")
    small = replace(
        preset, data=replace(preset.data, size=600), method=replace(preset.method, local_steps=1),
        rounds=Rounds(rounds=1, evaluate_every=0),
    )  # fmt: skip
    run = RunFolder.create(tmp_path, small)
    simulate(small, run)
    measured = audits.measure(run, resamples=20)
    for whose in ("representations, untrained", "representations"):
        (row,) = measured.of(whose)
        assert row.attack == "cosine, guessed"
        assert 0 <= row.area.low <= row.area.high <= 100
    paired = {row.site for row in measured.rows if row.model == "representations"} - {""}
    assert paired <= {row.site for row in measured.rows if row.model == audits.UNTRAINED}


@pytest.mark.slow(seconds=30)
def test_frozen_towers_whose_features_were_kept_are_attacked_too(tmp_path: Path) -> None:
    """On reports whose risk was accepted when the run was made."""
    frozen = replace(START, adapters="lora", adapter_rank=0, alignment=False)
    experiment = Experiment(
        "frozen", FedAvg(local_steps=1), frozen, data=TableSource(str(planted(tmp_path / "data")), image_size=64),
        training=Training(batch_size=8, cache_features=True), rounds=Rounds(rounds=1, evaluate_every=0),
    )  # fmt: skip
    run = RunFolder.create(tmp_path, experiment)
    simulate(experiment, run, accept_phi_risk=True)
    measured = audits.measure(run, resamples=20)
    assert {row.model for row in measured.rows} == {audits.UNTRAINED, audits.TRAINED}
    assert travelling(experiment.method, Server.load(run.checkpoint)[0].state)


def test_epsilon_has_its_bound(run: RunFolder) -> None:
    """Of the epsilons that a site told the largest counts, for each unit."""
    sites = [{"site-1": {SITE_EPSILON: 0.5}}, {"site-1": {SITE_EPSILON: 1.0}, "site-2": {RECORD_EPSILON: 2.0}}]
    attacked = audits.Attacked(run)
    attacked.history = [{"round": round, "phase": "train", "sites": told} for round, told in enumerate(sites)]
    of_record, of_set = attacked._bounds(1e-5)
    assert (of_set.site, of_set.epsilon, of_set.unit) == ("site-1", 1.0, audits.DATA_SET)
    assert of_set.rates[0] == pytest.approx(100 * (2.718281828 * 0.01 + 1e-5))
    assert (of_record.site, of_record.epsilon, of_record.unit) == ("site-2", 2.0, audits.RECORD)
    assert of_record.delta == run.experiment().training.dp_delta


def test_a_run_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        audits.measure(RunFolder(tmp_path))
