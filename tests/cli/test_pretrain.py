"""`fedvlp pretrain`: towers for others to start from, and the check that they are made again."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support import programs
from support.mistakes import taken_otherwise
from support.presets import MODEL
from typer.testing import CliRunner

from fedvlp.cli import app, stopping
from fedvlp.cli.overrides import configured
from fedvlp.cli.start_commands import _recall, _told
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.models.initial import InitialWeightsError, parse, pinned, refuse_other_folder, save_initial, settled
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.presets import PRESETS
from fedvlp.run.pretrain import (
    COMMAND,
    TowerComparison,
    checkable,
    compare,
    held_out,
    note_command,
    noted_command,
    pretrainable,
    write_towers,
)
from fedvlp.run.simulate import simulate

FEW = {
    "data.size": "300", "rounds.rounds": "2", "method.local_steps": "2", "training.batch_size": "8",
    "training.checkpoint_steps": "0", "rounds.evaluate_every": "0",
}  # fmt: skip


def small(**changes: str) -> list[str]:
    return [word for key, value in {**FEW, **changes}.items() for word in ("--set", f"{key}={value}")]


def made_here(folder: Path, seed: int = 0) -> Path:
    """Towers of a short run, made in this process."""
    experiment = PRESETS["tiny-pool"]
    for key, value in {**FEW, "rounds.seed": str(seed)}.items():
        experiment = override(experiment, key, value)
    run = RunFolder.create(folder / "runs", experiment)
    simulate(experiment, run)
    write_towers(run, folder / "towers", "a command")
    return folder / "towers"


@dataclass(frozen=True)
class Commanded:
    """What `fedvlp pretrain towers` left in its folder, and printed."""

    folder: Path
    output: str

    @property
    def towers(self) -> Path:
        return self.folder / "towers"


@pytest.fixture(scope="module")
def commanded(tmp_path_factory: pytest.TempPathFactory) -> Commanded:
    folder = tmp_path_factory.mktemp("commanded")
    done = programs.forked(["fedvlp", "pretrain", "towers", *small()], folder, os.environ)
    assert done.returncode == 0, done.stderr
    return Commanded(folder, done.stdout)


@pytest.mark.slow(seconds=15)
def test_towers_are_pretrained_and_a_run_starts_from_them(commanded: Commanded, tmp_path: Path) -> None:
    wrote = commanded.output.splitlines()[-1].removeprefix("wrote ")
    assert wrote == pinned(str(commanded.towers)).replace(f"{commanded.folder}/", "")
    described = json.loads((commanded.towers / "config.json").read_text())
    made, weights = described["made"], described["weights"]
    assert weights["sha256"] == parse(wrote).digest
    assert weights["numbers"] == 1_109_504
    assert (made["seed"], made["steps"], made["records"]) == (0, 4, 300)
    assert made["command"].startswith("fedvlp pretrain OUT --preset tiny-pool --set data.size=300 ")
    assert made["held_out"]["queries"] % 64 == 0
    assert made["held_out"]["chance_r1"] == 3.125
    assert f"R@1 {made['held_out']['r1']}" in commanded.output
    start = ["fedvlp", "simulate", "fedavg", "--set", f"model.init={commanded.towers}"]
    begun = programs.forked([*start, *small(**{"rounds.rounds": "0"})], tmp_path, os.environ)
    assert begun.returncode == 0, begun.stderr
    saved = json.loads((tmp_path / "runs" / "fedavg" / "001" / "config.json").read_text())
    assert saved["args"]["model"]["args"]["init"] == f"{commanded.towers}@{weights['sha256']}"


@pytest.mark.slow(seconds=30)
def test_made_again_on_this_machine_they_have_the_same_bytes(commanded: Commanded, tmp_path: Path) -> None:
    """Here in this process, without the command."""
    found = compare(PRESETS["tiny-pool"], pinned(str(commanded.towers)), made_here(tmp_path))
    assert found.same_bytes
    assert found.same_machine
    assert found.problem == ""
    assert found.cosine == pytest.approx({"image": 1.0, "text": 1.0}, abs=1e-5)


@pytest.mark.slow(seconds=25)
def test_others_are_told_by_bytes_recall_and_features(commanded: Commanded, tmp_path: Path) -> None:
    found = compare(PRESETS["tiny-pool"], pinned(str(commanded.towers)), made_here(tmp_path, seed=1))
    assert not found.same_bytes
    assert found.problem == "this machine, with this torch, should have made the same bytes"
    assert all(value < 0.9 for value in found.cosine.values())


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
    found = held_out(assembly, assembly.modules()[0])
    assert found == {"queries": 0, "candidates": 32, "chance_r1": 3.125}
    assert _recall(found) == "fewer than 32 with images and reports, so no recall is measured"


def test_pairs_that_are_held_out_are_measured(films: Path) -> None:
    assembly = Assembly(of_table(films, "test", None), accept_phi_risk=True)
    found = held_out(assembly, assembly.modules()[0])
    assert found["queries"] == 64
    assert {"r1", "r5"} <= found.keys()
    assert _recall(found).startswith(f"R@1 {found['r1']}, R@5 ")


@pytest.mark.parametrize("held", [{}, {"r1": 50.0}])
def test_a_recall_that_was_not_measured_is_a_problem_in_words(
    held: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedvlp.run.pretrain._features", lambda *_: {})
    save_initial(MODEL.build(0), tmp_path / "towers", {"held_out": {"queries": 0, **held}, "machine": {}})
    found = compare(PRESETS["tiny-pool"], settled("tiny-pool"), tmp_path / "towers")
    assert bool(found.problem) is True
    assert ("too few records are held out" in found.problem) is (not held)
    assert "held-out R@1 65.36 then" in _told("tiny-pool", found)


def test_the_shipped_are_made_by_their_preset_alone_wherever_it_runs(tmp_path: Path) -> None:
    """With other data or settings the check could only fail, which was said after the whole training."""
    preset = PRESETS["tiny-pool"]
    run = RunFolder.create(tmp_path / "runs", configured("tiny-pool", None, None, ["training.threads=2"]))
    assert checkable(run.experiment()) == settled("tiny-pool")
    with pytest.raises(ValueError, match="leave --set and --data, or --check, out"):
        checkable(replace(preset, data=TableSource(str(tmp_path / "pairs.csv"))))
    for setting in ("rounds.seed", "rounds.rounds", "data.size", "training.batch_size"):
        with pytest.raises(ValueError, match="--check compares with towers that the preset tiny-pool makes as it is"):
            checkable(override(preset, setting, "77"))


@pytest.mark.parametrize(
    ("now", "said"),
    [(62.0, ""), (58.6, ""), (58.4, "more than three standard errors"), (65.6, "more than three standard errors")],
)
def test_on_another_machine_the_recall_must_be_that_which_is_recorded(now: float, said: str) -> None:
    """Three standard errors of 1.2 points around 62 are 58.4 to 65.6."""
    found = TowerComparison(False, False, (62.0, now + (0.01 if now > 62 else -0.01)), 1.2, {})
    assert said in found.problem
    assert bool(found.problem) == bool(said)
    assert replace(found, same_bytes=True).problem == ""
    unmeasured = replace(found, recall=(62.0, None))
    assert unmeasured.problem == "too few records are held out to measure the recall of these"


MISTAKES = {
    "pretrain towers --preset fedavg": "the method of fedavg trains at sites; pre-training takes one that",
    "pretrain towers --preset centralized --check": "no weights ship under the name centralized; there are: tiny-pool",
    "pretrain towers --resume runs/x --set rounds.rounds=2": "--resume takes the run's own configuration",
    "pretrain towers --resume runs/x --runs elsewhere": "own configuration; leave --runs out",
    "pretrain towers --check --set data.size=60": "make others; leave --set and --data, or --check, out",
    "simulate fedavg --set model.init=nowhere": "model.init 'nowhere': model.safetensors cannot be read there (No such",
    "jobs export fedavg job --set model.init=nowhere": "for a folder of another machine NAME@SHA256",
}


def test_a_mistake_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert taken_otherwise(MISTAKES, monkeypatch, capsys) == {}
    assert list(tmp_path.iterdir()) == []


def refused(arguments: list[str]) -> str:
    """What is said of a command that is refused before anything is trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedvlp.run.simulate.simulate", lambda *_, **__: pytest.fail("it was trained"))
        return str(CliRunner().invoke(app, ["pretrain", *arguments]).exception)


@pytest.mark.parametrize(
    ("file", "text"),
    [("notes.txt", "x"), ("config.json", '{"format": 2}'), ("config.json", "[]"), ("config.json", "{")],
)
def test_a_folder_of_something_else_is_refused_before_anything_is_trained(file: str, text: str, tmp_path: Path) -> None:
    """A trained model has a config.json and a model.safetensors too, which were replaced."""
    (tmp_path / file).write_text(text)
    for arguments in (small(), ["--resume", "runs/x"]):
        said = refused([str(tmp_path), *arguments])
        assert "is not empty and its config.json is not that of weights to start from" in said
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [(file, text)]


def test_towers_may_be_written_anew(tmp_path: Path) -> None:
    refuse_other_folder(tmp_path / "new")
    refuse_other_folder(tmp_path)
    save_initial(MODEL.build(0), tmp_path / "towers", {})
    refuse_other_folder(tmp_path / "towers")


def test_stopped_it_says_the_command_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the answers that would be asked for again; it named no command before."""

    def stop(*_: object, **__: object) -> None:
        raise stopping.Stopped

    monkeypatch.setattr(stopping, "_again", [])
    monkeypatch.setattr("fedvlp.run.simulate.simulate", stop)
    runs = str(tmp_path / "runs")
    with pytest.raises(stopping.Stopped):
        CliRunner().invoke(app, ["pretrain", "my towers", "--runs", runs, "--check", "--accept-phi-risk"])
    run = f"{runs}/tiny-pool/001"
    again = f"fedvlp pretrain 'my towers' --resume {run} --accept-phi-risk --check"
    assert stopping.said() == f"stopped; resume with: {again}"
    assert "--resume is a run of tiny-pool, not of feddra; leave --preset out" in refused(
        ["towers", "--resume", run, "--preset", "feddra"]
    )


def test_the_command_that_is_noted_has_every_setting_and_no_path(tmp_path: Path) -> None:
    """It stands in the towers' config.json, after a resumption too; the folder may be handed on."""
    write(SyntheticCohort(sites=2, size=20, image_size=72), tmp_path)
    table = tmp_path / "pairs.csv"
    experiment = override(override(PRESETS["tiny-pool"], "model.init", "random"), "rounds.seed", "3")
    run = RunFolder.create(tmp_path / "runs", replace(experiment, data=TableSource(str(table))))
    settings = ["rounds.seed=3", f"data.root={tmp_path}", "data.sentence_table=s.csv"]
    settings += [f"model.image_tower={tmp_path}"]
    note_command(run, "tiny-pool", f"table:{table},cache={tmp_path}", settings)
    assert noted_command(RunFolder(run.path)) == (
        "fedvlp pretrain OUT --preset tiny-pool --data table:... --set rounds.seed=3 --set data.root=... "
        "--set data.sentence_table=... --set model.image_tower=..."
    )
    (run.path / COMMAND).unlink()
    assert noted_command(run) == "fedvlp pretrain OUT --preset tiny-pool"


def test_only_a_finished_run_of_a_method_that_pools_has_towers(tmp_path: Path) -> None:
    pretrainable(PRESETS["centralized"])
    run = RunFolder.create(tmp_path / "runs", PRESETS["tiny-pool"])
    with pytest.raises(ValueError, match="the run has not finished; resume it with --resume"):
        write_towers(run, tmp_path / "towers", "")
    with pytest.raises(ValueError, match="the method of fedavg trains at sites"):
        write_towers(RunFolder.create(tmp_path / "runs", PRESETS["fedavg"]), tmp_path / "towers", "")


def test_weights_of_another_model_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    save_initial(MODEL.build(0), tmp_path / "towers", {})
    experiment = override(PRESETS["fedavg"], "model.init", str(tmp_path / "towers")).pinned()
    run = RunFolder.create(tmp_path / "runs", experiment)
    with pytest.raises(InitialWeightsError, match=r"model\.init 'towers' does not fit this model: "):
        simulate(experiment, run)
    assert run.history() == []
