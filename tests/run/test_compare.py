"""Runs beside each other: the figures are those that the runs themselves measured, differences are paired."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.finished import finished
from support.presets import SMALL
from support.report_pages import undrawn

from fedvlp.core.method import Method
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation import metric_names as names
from fedvlp.evaluation.intervals import Bootstrap
from fedvlp.federation.loop import Rounds
from fedvlp.methods import CARMFL, Centralized, CreamFL, FedAvg, FedMOON, Local
from fedvlp.run import compare as room
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.compare import INITIAL, Comparison, FinishedRun, compare
from fedvlp.run.evaluate import last_server, own_models
from fedvlp.run.experiment import Experiment, Partition
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import summary

STEPS = 8
COHORT = SyntheticCohort(sites=2, size=160, image_size=36, test_rows=36)
BASE = replace(
    SMALL, data=COHORT, rounds=Rounds(rounds=1),
    training=replace(SMALL.training, lr=0.01, batch_size=8),
)  # fmt: skip


def run(root: Path, name: str, method: Method, base: Experiment = BASE) -> RunFolder:
    return finished(root, replace(base, name=name, method=method))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def three(root: Path) -> list[RunFolder]:
    """Sites alone, all records together, and FedAvg."""
    return [
        run(root, "local", Local(local_steps=STEPS)), run(root, "pooled", Centralized(local_steps=STEPS)),
        run(root, "fedavg", FedAvg(local_steps=STEPS)),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def compared(three: list[RunFolder]) -> Comparison:
    return compare(three, 5)


def measured(folder: RunFolder, model: str, scope: str) -> list[float]:
    """Average and worst test R@5 that the run itself measured."""
    figures = summary(folder.history())[model]
    return [figures[names.over_sites(names.recall("test", 5, scope), kind)] for kind in (names.AVERAGE, names.WORST)]


def test_figures_are_those_that_the_runs_measured(three: list[RunFolder], compared: Comparison) -> None:
    """Of the initial model, of models that stayed at their sites, of one for all; not of a model that nobody has."""
    assert compared.in_batch
    shown = {row.name: [row.average.value, row.worst.value] for row in compared.models}
    expected = {INITIAL: measured(three[0], "initial", names.IN_BATCH)}
    expected |= {of.experiment().name: measured(of, "trained", names.IN_BATCH) for of in three}
    assert shown == {name: pytest.approx(values) for name, values in expected.items()}
    assert shown["local"] not in (shown[INITIAL], shown["fedavg"]), "or the wrong model could pass for it"
    assert shown["fedavg"] != shown[INITIAL]
    assert all(row.average.low <= row.average.value <= row.average.high for row in compared.models)


def test_the_last_one_is_compared_with_each_of_the_others(compared: Comparison) -> None:
    average = {row.name: row.average.value for row in compared.models}
    assert compared.last == "fedavg"
    assert {row.name: row.average.value for row in compared.ahead} == pytest.approx(
        {name: average["fedavg"] - average[name] for name in ("local", "pooled")}
    )
    assert compared.seed == 0
    assert compared.queries == {"site-1": 32, "site-2": 32}
    assert compared.steps["fedavg"] == f"{STEPS} / {STEPS}"


def test_who_is_behind_is_behind_by_as_much_as_the_other_is_ahead(three: list[RunFolder]) -> None:
    """Both ends of both intervals, with the sign turned: nothing is cut, as a figure is, where it is a difference."""
    (ahead,), (behind,) = compare(three[1:], 5).ahead, compare(three[:0:-1], 5).ahead
    for one, other in ((ahead.average, behind.average), (ahead.worst, behind.worst)):
        assert (one.value, one.low, one.high) == pytest.approx((-other.value, -other.high, -other.low))
        assert min(one.low, other.low) < 0


def test_patients_are_drawn_and_not_their_records(three: list[RunFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those test pairs that were measured, which are whole batches."""
    given = []

    class Noted(Bootstrap):
        def __init__(self, patients: Mapping[str, Sequence[str]]) -> None:
            given.append(patients)
            super().__init__(patients)

    monkeypatch.setattr(room, "Bootstrap", Noted)
    compare(three[1:])
    cohort = Assembly(BASE).cohort
    expected = {site: [cohort.patients[row] for row in cohort.rows("test", site)[:32]] for site in ("site-1", "site-2")}
    assert given == [expected]
    assert all(len(set(patients)) < 32 for patients in expected.values()), "or records would do as well"


def test_the_command_writes_a_page_as_well(tmp_path: Path, three: list[RunFolder]) -> None:
    from typer.testing import CliRunner

    from fedvlp.cli import app

    page = tmp_path / "page.html"
    with undrawn():
        done = CliRunner().invoke(app, ["compare", *(str(of.path) for of in three[1:]), "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert f"page {page}" in done.output.replace("\n", "")
    written = page.read_text(encoding="utf-8")
    assert "R@1 by site, test (%)" in written
    assert next(line for line in done.output.splitlines() if line.startswith("fedavg is ")) in written


def test_a_run_is_not_ahead_of_itself_repeated(root: Path, three: list[RunFolder]) -> None:
    """That a repetition has the same bytes is proved where runs are (run/test_simulate.py)."""
    again = run(root, "fedavg", FedAvg(local_steps=STEPS))
    twice = compare([three[2], again])
    assert [row.name for row in twice.models] == [INITIAL, "fedavg/001", "fedavg/002"]
    (difference,) = twice.ahead
    assert (difference.average.low, difference.average.high, difference.worst.high) == (0.0, 0.0, 0.0)


def test_runs_of_one_name_and_number_are_two_runs(
    root: Path, three: list[RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``first/fedavg/001`` and ``second/fedavg/001``, which trained differently: both are shown, also on the page.

    The path is named as far as it tells them apart. Where both were ``fedavg/001``, one was compared with itself.
    """
    from typer.testing import CliRunner

    from fedvlp.cli import app

    for name, steps in (("first", 1), ("second", STEPS)):
        run(tmp_path / name, "fedavg", FedAvg(local_steps=steps))
    monkeypatch.chdir(tmp_path)
    folders = [RunFolder(Path(name) / "fedavg" / "001") for name in ("first", "second")]
    two = compare(folders, 5)
    assert two.runs == ("first/fedavg/001", "second/fedavg/001")
    average = {row.name: row.average.value for row in two.models}
    assert average["second/fedavg/001"] == pytest.approx(measured(three[2], "trained", names.IN_BATCH)[0])
    assert average["first/fedavg/001"] != average["second/fedavg/001"]
    assert two.ahead[0].average.value == pytest.approx(average["second/fedavg/001"] - average["first/fedavg/001"])
    with undrawn():
        done = CliRunner().invoke(app, ["compare", *(str(of.path) for of in folders), "--html", "page.html"])
    assert done.exit_code == 0, done.output
    written = Path("page.html").read_text(encoding="utf-8")
    assert all(run in written for run in two.runs)


def test_a_run_may_be_called_as_the_start_is(root: Path, three: list[RunFolder]) -> None:
    """A run that is named ``initial`` took the row of the model that both start from."""
    both = compare([run(root, INITIAL, FedAvg(local_steps=1)), three[2]], 5)
    assert [row.name for row in both.models] == [INITIAL, "initial/001", "fedavg"]


def test_the_first_none_are_no_recall(three: list[RunFolder]) -> None:
    """Recall@0 was a table of zeros."""
    with pytest.raises(ValueError, match="--k is 0; Recall@K counts what is among the first K, so give 1 or more"):
        compare(three, 0)


def test_sites_smaller_than_a_batch_are_searched_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "BATCH", 64)
    folders = [run(tmp_path, name, FedAvg(local_steps=steps)) for name, steps in (("one", 1), ("two", 2))]
    whole = compare(folders, 5)
    assert not whole.in_batch
    assert [[row.average.value, row.worst.value] for row in whole.models[1:]] == [
        pytest.approx(measured(folder, "trained", names.WHOLE_SET)) for folder in folders
    ]


def test_starts_that_differ_are_all_shown(tmp_path: Path, three: list[RunFolder]) -> None:
    other = run(tmp_path, "other", FedAvg(local_steps=1), replace(BASE, rounds=replace(BASE.rounds, seed=1)))
    both = compare([three[2], other])
    assert [row.name for row in both.models] == ["initial of fedavg", "initial of other", "fedavg", "other"]
    assert both.seed is None


def test_what_cannot_be_compared_is_refused(tmp_path: Path, three: list[RunFolder]) -> None:
    fedavg = three[2]
    with pytest.raises(ValueError, match="give two or more"):
        compare([fedavg])
    elsewhere = replace(BASE, data=replace(COHORT, seed=1))
    with pytest.raises(ValueError, match="other and fedavg were not measured on the same test records"):
        compare([fedavg, run(tmp_path, "other", FedAvg(local_steps=1), elsewhere)])
    begun = RunFolder.create(tmp_path, replace(BASE, name="begun"))
    with pytest.raises(ValueError, match="begun has not finished"):
        compare([fedavg, begun])
    alone = tmp_path / "local" / "001"
    shutil.copytree(three[0].path, alone)
    shutil.rmtree(alone / "sites")  # as FLARE leaves it at the server
    with pytest.raises(ValueError, match="the models of local stayed at its sites"):
        compare([fedavg, RunFolder(alone)])


def test_models_beside_the_servers_are_refused_for_what_they_are(root: Path) -> None:
    """The folder has the models of CreamFL's sites, and a run that `fedvlp simulate` made is no remedy."""
    method = CreamFL(local_steps=1, local_epochs=1, server_steps=1, distil_steps=1)
    folder = run(root, "creamfl", method, replace(BASE, partition=Partition(public=0.3)))
    assert Assembly(folder.experiment(), folder.path).memory("site-1").newest()
    with pytest.raises(ValueError, match="every site of creamfl has a model of its own beside the server's, and such"):
        FinishedRun(folder, "creamfl").trained()


def test_a_classifier_is_refused(tmp_path: Path) -> None:
    preset = replace(presets.get("car-mfl"), method=CARMFL(local_steps=1))
    folders = [RunFolder.create(tmp_path, preset) for _ in range(2)]
    for folder in folders:
        folder.model.parent.mkdir()
        folder.model.touch()
    with pytest.raises(ValueError, match="is a classifier and retrieves nothing"):
        compare(folders)


def test_a_whole_model_in_a_memory_is_not_what_a_method_that_averages_ends_with(
    root: Path, three: list[RunFolder]
) -> None:
    """Every site of FedMOON remembers the model of its last training, to contrast with; its figures are the mean's."""
    folder = run(root, "moon", FedMOON(local_steps=STEPS))
    state = folder.experiment().method.finish(last_server(folder))
    assembly = Assembly(folder.experiment(), folder.path)
    assert assembly.memory("site-1").newest().keys() == state.keys(), "or it could not pass for the model"
    moon = compare([three[2], folder], 5).models[-1]
    assert [moon.average.value, moon.worst.value] == pytest.approx(measured(folder, "trained", names.IN_BATCH))
    assert own_models(assembly, last_server(folder), state) == {}
