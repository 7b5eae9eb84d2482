"""`make towers`: the encoders that ship, and the check that they are made again."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.presets import MODEL

from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.models.initial import pinned, save_initial, settled
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.presets import PRESETS
from fedvlp.run.simulate import simulate

pytestmark = pytest.mark.slow(seconds=15)

sys.path.append(str(Path(__file__).parents[2] / "studies" / "programs"))
towers: Any = importlib.import_module("towers")

FEW = {
    "data.size": "300", "rounds.rounds": "2", "method.local_steps": "2", "training.batch_size": "8",
    "training.checkpoint_steps": "0", "rounds.evaluate_every": "0",
}  # fmt: skip


def made_here(folder: Path, seed: int = 0) -> tuple[RunFolder, Path]:
    """Towers of a short run, made in this process."""
    experiment = PRESETS["tiny-pool"]
    for key, value in {**FEW, "rounds.seed": str(seed)}.items():
        experiment = override(experiment, key, value)
    run = RunFolder.create(folder / "runs", experiment)
    simulate(experiment, run)
    towers.write_towers(run, folder / "towers")
    return run, folder / "towers"


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    write(SyntheticCohort(sites=1, size=160, image_size=72), folder)
    return folder


def of_table(folder: Path, split: str, report: str | None) -> Experiment:
    """On a table of which 1 of 4 patients is in ``split`` with the same ``report`` (None: each its own)."""
    table = folder / "pairs.csv"
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    patients = sorted({row["patient_id"] for row in rows})
    for row in rows:
        held = patients.index(row["patient_id"]) % 4 == 0
        row |= {"split": split if held else "train"} | ({"report": report} if held and report is not None else {})
    table = folder / f"{split}-{report}.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    data = TableSource(
        str(table), root=str(folder), image_size=72, split_column="split", min_report_words=0, burned_in="header"
    )
    return replace(PRESETS["tiny-pool"], data=data)


@pytest.mark.parametrize(("split", "report"), [("val", None), ("test", "")])
def test_without_pairs_that_are_held_out_there_is_no_recall(split: str, report: str | None, films: Path) -> None:
    """It ended with an error after the whole training, and so did --resume."""
    assembly = Assembly(of_table(films, split, report), accept_phi_risk=True)
    found = towers.held_out(assembly, assembly.modules()[0])
    assert found == {"queries": 0, "candidates": 32, "chance_r1": 3.125}


def test_pairs_that_are_held_out_are_measured(films: Path) -> None:
    assembly = Assembly(of_table(films, "test", None), accept_phi_risk=True)
    found = towers.held_out(assembly, assembly.modules()[0])
    assert found["queries"] == 64
    assert {"r1", "r5"} <= found.keys()


@pytest.mark.parametrize("held", [{}, {"r1": 50.0}])
def test_a_recall_that_was_not_measured_is_a_problem_in_words(
    held: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(towers, "_features", lambda *_: {})
    save_initial(MODEL.build(0), tmp_path / "towers", {"held_out": {"queries": 0, **held}, "machine": {}})
    found = towers.compare(PRESETS["tiny-pool"], settled("tiny-pool"), tmp_path / "towers")
    assert bool(found.problem) is True
    assert ("too few records are held out" in found.problem) is (not held)
    assert "held-out R@1 65.36 then" in towers.told("tiny-pool", found)


@pytest.mark.parametrize(
    ("now", "said"),
    [(62.0, ""), (58.6, ""), (58.4, "more than three standard errors"), (65.6, "more than three standard errors")],
)
def test_on_another_machine_the_recall_must_be_that_which_is_recorded(now: float, said: str) -> None:
    """Three standard errors of 1.2 points around 62 are 58.4 to 65.6."""
    found = towers.TowerComparison(False, False, (62.0, now + (0.01 if now > 62 else -0.01)), 1.2, {})
    assert said in found.problem
    assert bool(found.problem) == bool(said)
    assert replace(found, same_bytes=True).problem == ""
    unmeasured = replace(found, recall=(62.0, None))
    assert unmeasured.problem == "too few records are held out to measure the recall of these"


def test_made_again_on_this_machine_they_have_the_same_bytes_and_others_do_not(tmp_path: Path) -> None:
    """Two runs of one seed, and one of another seed; a run starts from the folder of the first."""
    (run, first), (_, second), (_, other) = (made_here(tmp_path / str(n), seed) for n, seed in enumerate((0, 0, 1)))
    made = json.loads((first / "config.json").read_text())["made"]
    assert (made["seed"], made["steps"], made["records"], made["command"]) == (0, 4, 300, "fedvlp simulate tiny-pool")
    assert made["held_out"]["chance_r1"] == 3.125
    found = towers.compare(PRESETS["tiny-pool"], pinned(str(first)), second)
    assert found.same_bytes
    assert found.same_machine
    assert found.problem == ""
    assert found.cosine == pytest.approx({"image": 1.0, "text": 1.0}, abs=1e-5)
    found = towers.compare(PRESETS["tiny-pool"], pinned(str(first)), other)
    assert not found.same_bytes
    assert found.problem == "this machine, with this torch, should have made the same bytes"
    assert all(value < 0.9 for value in found.cosine.values())
    begun = override(PRESETS["fedavg"], "model.init", str(run.path)).pinned()
    state = Assembly(begun).initial()
    trained = Assembly(run.experiment(), run.path).initial()
    assert state.keys() >= {name for name in trained if "_encoder" in name}


def test_only_a_finished_run_of_the_preset_as_it_is_has_towers_that_ship(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.create(tmp_path / "runs", PRESETS["tiny-pool"])
    with pytest.raises(ValueError, match="the run has not finished; resume it with `fedvlp simulate --resume`"):
        towers.write_towers(run, tmp_path / "towers")
    with pytest.raises(ValueError, match="the method of fedavg trains at sites"):
        towers.write_towers(RunFolder.create(tmp_path / "runs", PRESETS["fedavg"]), tmp_path / "towers")
    for experiment, said in (
        (PRESETS["fedavg"], "no weights ship under the name fedavg; there are: tiny-pool"),
        (override(PRESETS["tiny-pool"], "rounds.seed", "77"), "the run is not of the preset tiny-pool as it is"),
    ):
        folder = RunFolder.create(tmp_path / "others", experiment)
        monkeypatch.setattr("sys.argv", ["towers.py", str(folder.path), str(tmp_path / "out")])
        with pytest.raises(SystemExit, match="2"):
            towers.main()
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
