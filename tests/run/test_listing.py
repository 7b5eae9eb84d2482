"""What `fedvlp runs` lists of every run in a folder."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from support.plugins import fresh, pulled
from support.presets import SMALL

from fedvlp.core.types import EVALUATE
from fedvlp.evaluation import metric_names as names
from fedvlp.federation.loop import Rounds
from fedvlp.run import plugins
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.listing import _recall, listed
from fedvlp.run.lock import in_use, only_writer
from fedvlp.run.metrics import overall, summary
from fedvlp.run.simulate import simulate


class Stopped(BaseException):
    """Ends a run."""


def named(name: str, experiment: Experiment = SMALL) -> Experiment:
    return replace(experiment, name=name, rounds=Rounds(rounds=1, evaluate_every=1))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, one that was stopped after a phase, one that never began, and one whose file is damaged."""
    folder = tmp_path_factory.mktemp("runs")
    whole = named("whole")
    simulate(whole, RunFolder.create(folder, whole))

    def stop(record: object) -> None:
        raise Stopped

    cut = named("cut")
    with pytest.raises(Stopped):
        simulate(cut, RunFolder.create(folder, cut), report=stop)
    RunFolder.create(folder, named("idle"))
    RunFolder.create(folder, named("torn")).config.write_text("{")
    (folder / "notes").mkdir()
    return folder


def test_each_is_listed_with_how_far_it_came(root: Path) -> None:
    runs = {run.name: run for run in listed(root)}
    assert list(runs) == ["cut/001", "idle/001", "torn/001", "whole/001"]
    assert [run.state for run in runs.values()] == ["stopped", "not begun", "unreadable", "finished"]
    assert runs["whole/001"].phases == "all 1 round"
    assert runs["cut/001"].phases == "round 1 of 1, train"
    assert runs["idle/001"].phases == ""


def test_a_run_of_a_plugin_is_listed_without_it(tmp_path: Path) -> None:
    """It need not be named, since nothing of it is imported: a run with which nothing is wrong was "unreadable"."""
    with fresh():
        method = plugins.use(pulled(tmp_path)).module.Pulled(local_steps=1)
        experiment = named("theirs", replace(SMALL, method=method))
        simulate(experiment, RunFolder.create(tmp_path / "runs", experiment))
    with pytest.raises(plugins.PluginError):
        RunFolder(tmp_path / "runs" / "theirs" / "001").experiment()
    (run,) = listed(tmp_path / "runs")
    assert (run.name, run.state, run.phases) == ("theirs/001", "finished", "all 1 round")
    assert run.average >= 0


def test_recall_is_that_of_the_runs_summary(root: Path) -> None:
    whole = next(run for run in listed(root) if run.name == "whole/001")
    summed = RunFolder(root / "whole" / "001").path / "summary.json"
    assert f'"test/all/mean/r1/average": {whole.average}' in summed.read_text(), "sites are smaller than a batch"
    assert f'"test/all/mean/r1/worst": {whole.worst}' in summed.read_text()
    assert 0 <= whole.worst <= whole.average <= 100
    assert math.isnan(next(run for run in listed(root) if run.name == "idle/001").average)


def test_recall_in_batches_goes_before_that_of_the_whole_set() -> None:
    whole = {names.over_sites(names.recall("test", 1, names.WHOLE_SET), names.WORST): 2.0}
    in_batch = {names.over_sites(names.recall("test", 1), names.WORST): 30.0}
    assert [_recall(figures, names.WORST) for figures in (whole | in_batch, whole)] == [30.0, 2.0]
    assert math.isnan(_recall(in_batch, names.AVERAGE))


def test_the_last_evaluation_of_a_run_of_no_rounds_is_of_the_trained_model() -> None:
    record = {"round": 0, "phase": EVALUATE, "members": ["a"], "sites": {"a": {names.recall("test", 1): 50.0}}}
    assert summary([record]).keys() == {"initial", "trained"}
    assert summary([{**record, "phase": "train"}]).keys() == {"initial"}


def test_a_run_that_has_not_trained_yet_has_no_recall_of_a_trained_model(root: Path) -> None:
    """It was stopped after round 0: the one evaluation so far is of the model from which that round began."""
    history = RunFolder(root / "cut" / "001").history()
    assert overall(history[0])
    assert summary(history) == {"initial": overall(history[0])}
    assert math.isnan(next(run for run in listed(root) if run.name == "cut/001").average)


def test_the_size_is_of_all_files(root: Path) -> None:
    folder = root / "idle" / "001"
    before = next(run for run in listed(root) if run.name == "idle/001").bytes
    (folder / "deep").mkdir()
    (folder / "deep" / "more").write_bytes(bytes(12345))
    assert next(run for run in listed(root) if run.name == "idle/001").bytes == before + 12345


def test_one_that_is_being_written_is_running(root: Path) -> None:
    folder = root / "cut" / "001"
    assert not in_use(folder)
    with only_writer(folder):
        assert in_use(folder)
        assert next(run for run in listed(root) if run.name == "cut/001").state == "running"
    assert not in_use(folder)
    assert not in_use(root / "notes")


def test_a_file_that_goes_while_it_is_counted_is_no_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is being written renames its files into place."""
    before = {run.name: run.bytes for run in listed(root)}
    gone, found, is_file = root / "whole" / "001" / "summary.json.new", Path.rglob, Path.is_file
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: [*found(self, pattern), gone])
    monkeypatch.setattr(Path, "is_file", lambda self: self == gone or is_file(self))
    assert {run.name: run.bytes for run in listed(root)} == before
    assert before["whole/001"] > (root / "whole" / "001" / "config.json").stat().st_size
