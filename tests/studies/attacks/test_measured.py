"""`fedvlp attack` on finished runs: its controls, its file, and what updates tell."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planted import planted
from typer.testing import CliRunner

from fedvlp.core.server_state import Server
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run import audit as audits
from fedvlp.run import measurements
from fedvlp.run.assembly import Assembly
from fedvlp.run.evaluate import load_shared
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from fedvlp.training.settings import Training
from studies.attacks import measured, updates
from studies.attacks.canaries import PLANTED, UNSEEN
from studies.attacks.command import app

pytestmark = pytest.mark.slow(seconds=60)

START = ModelConfig(init="tiny-pool", head_norm="layer")
"""Towers that have learned: random ones of this size hardly tell one record from another in so few steps."""


def finished(folder: Path, model: ModelConfig, data: Any, **training: Any) -> RunFolder:
    experiment = Experiment(
        "small", FedAvg(local_steps=1), model, data=data, training=Training(batch_size=8, **training),
        rounds=Rounds(rounds=1, evaluate_every=0),
    )  # fmt: skip
    run = RunFolder.create(folder, experiment)
    simulate(experiment, run, accept_phi_risk=True)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return finished(tmp_path_factory.mktemp("runs"), START, SyntheticCohort(sites=2, size=160, image_size=64))


@pytest.fixture(scope="module")
def attacks(run: RunFolder) -> measured.Attacks:
    """With a third of the steps by which leaks are planted."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (measured, updates):
            patch.setattr(module, "LEAK_STEPS", 100)
        return measured.measure(run, invert=1.0, resamples=100)


def test_a_leak_that_is_planted_is_found_by_score_and_by_gradient(attacks: measured.Attacks) -> None:
    """A model that saw a few members alone gives them away; what was learned by heart has a short gradient."""
    areas = {row.attack: row.area.value for row in attacks.leak}
    assert max(areas.values()) > measured.LEAK_ABOVE
    assert areas["gradient"] > 75
    assert "gradient, gained" in areas
    assert "The attack finds it" in attacks.sentences()[0]


def test_canaries_that_nobody_trained_on_are_not_exposed(attacks: measured.Attacks) -> None:
    """And those that were learned by heart are: the controls between which the planted ones lie."""
    of = {row.canaries: row for row in attacks.canaries}
    unseen, alone = of["never trained on"], of["trained on alone"]
    assert unseen.mean.low < unseen.chance < unseen.mean.high
    assert (unseen.times, alone.times) == (0, 100)
    assert alone.mean.value > 7
    assert of["among the records"].times > 0
    assert f"mean exposure of {of['among the records'].mean.value:.2f} of 10 bits" in attacks.sentences()[-1]


def test_the_words_of_an_update_stand_out(attacks: measured.Attacks) -> None:
    """Without a policy: all words of eight reports, and nearly nothing else; of a pass over all, most."""
    few = [words for words in attacks.words if words.reports == updates.FEW]
    assert {words.site for words in few} == {"site-1", "site-2"}
    for words in few:
        assert words.steps == 1
        assert words.recovered > 95
        assert words.right > 95 > 50 > words.guess


def test_the_file_is_read_as_it_was_written_and_forgotten_with_its_model(
    run: RunFolder, attacks: measured.Attacks, tmp_path: Path
) -> None:
    (sites,), (films,) = attacks.sites, attacks.inversion
    assert (sites.count, sites.guess, films.records) == (2, 50, 2)
    assert films.seconds < 30
    for title, head, lines in attacks.tables():
        assert all(len(line) == len(head) for line in lines), title
    assert len(attacks.tables()) == len(measured.KINDS)
    again = measured.read(run)
    assert again is not None
    assert str(asdict(again)) == str(asdict(attacks))
    copy = RunFolder(tmp_path / "small" / "001")
    shutil.copytree(run.path, copy.path)
    measurements.forget(copy, ())
    assert measured.read(copy) is None
    assert not measured.file_of(copy).exists()
    measured.file_of(copy).parent.mkdir()
    measured.file_of(copy).write_text("{}")
    with pytest.raises(ValueError, match="run `fedvlp attack RUN` again"):
        measured.read(copy)


def test_the_command_says_what_it_measured(run: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "small" / "001")
    shutil.copytree(run.path, copy.path)
    done = CliRunner().invoke(app, [str(copy.path), "--no-controls"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "by guessing" in done.output
    assert "attacks.json" in done.output
    assert "Planted leak" not in done.output


def test_of_frozen_towers_whose_features_were_kept_nothing_is_read_that_does_not_travel(tmp_path: Path) -> None:
    """On reports whose risk was accepted when the run was made."""
    frozen = ModelConfig(init="tiny-pool", head_norm="layer", adapters="lora", adapter_rank=0, alignment=False)
    data = TableSource(str(planted(tmp_path / "data")), image_size=64)
    run = finished(tmp_path, frozen, data, cache_features=True)
    found = measured.measure(run, controls=False, invert=0.5, resamples=20)
    assert {row.canaries for row in found.canaries} == {UNSEEN, PLANTED}
    assert len(found.sites) == len(found.inversion) == 1
    assert found.words == found.leak == ()
    state = Server.load(run.checkpoint)[0].state
    of_run = updates.Updates(Assembly(run.experiment(), run.path), state, {}, load_shared)
    assert of_run.shared("image_head.0.weight")
    assert not any(of_run.shared(name) for name in frozen.build().state_dict() if name.startswith("image_encoder"))


def test_the_leak_is_compared_over_patients_and_not_their_records(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(measured, "membership", lambda *arguments: given.append(arguments[6]))
    monkeypatch.setattr(measured, "LEAK_STEPS", 1)
    attacked = audits.Attacked(run)
    patients = attacked.assembly.cohort.patients

    def scored(client: Any, data: Any) -> dict[str, torch.Tensor]:
        return {"loss": torch.zeros(data.sizes[audits.MEMBERS] + data.sizes[audits.OTHERS])}

    monkeypatch.setattr(attacked, "of_model", scored)
    list(measured.planted_leak(attacked, 2))
    assert given[0] in [
        [patients[row] for row in (*rows[audits.MEMBERS][: measured.LEAKED], *rows[audits.OTHERS])]
        for rows in attacked.rows.values()
    ]
