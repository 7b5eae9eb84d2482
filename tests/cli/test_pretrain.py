"""`fedvlp pretrain`: towers for others to start from, and the check that they are made again."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support import programs
from support.presets import MODEL

from fedvlp.cli import main
from fedvlp.models.initial import InitialWeightsError, parse, pinned, save_initial
from fedvlp.run.config import override
from fedvlp.run.folder import RunFolder
from fedvlp.run.presets import PRESETS
from fedvlp.run.pretrain import Comparison, compare, pretrainable, write_towers
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


@pytest.mark.parametrize(
    ("now", "said"),
    [(62.0, ""), (58.6, ""), (58.4, "more than three standard errors"), (65.6, "more than three standard errors")],
)
def test_on_another_machine_the_recall_must_be_that_which_is_recorded(now: float, said: str) -> None:
    """Three standard errors of 1.2 points around 62 are 58.4 to 65.6."""
    found = Comparison(False, False, (62.0, now + (0.01 if now > 62 else -0.01)), 1.2, {})
    assert said in found.problem
    assert bool(found.problem) == bool(said)
    assert replace(found, same_bytes=True).problem == ""


MISTAKES = {
    "pretrain towers --preset fedavg": "the method of fedavg trains at sites; pre-training takes one that",
    "pretrain towers --preset centralized --check": "no weights ship under the name centralized; there are: tiny-pool",
    "pretrain towers --resume runs/x --set rounds.rounds=2": "--resume goes on with the run's own configuration",
    "simulate fedavg --set model.init=nowhere": "model.init 'nowhere': model.safetensors cannot be read there (No such",
    "jobs export fedavg job --set model.init=nowhere": "for a folder of another machine NAME@SHA256",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedvlp", *arguments.split()])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert MISTAKES[arguments] in error
    assert list(tmp_path.iterdir()) == []


def test_only_a_finished_run_of_a_method_that_pools_has_towers(tmp_path: Path) -> None:
    pretrainable(PRESETS["centralized"])
    run = RunFolder.create(tmp_path / "runs", PRESETS["tiny-pool"])
    with pytest.raises(ValueError, match="the run has not finished; go on with --resume"):
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
