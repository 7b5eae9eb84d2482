"""Where a run is kept, at the server and at the sites; and that no name leads out of there."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.flare_memory import Engine

from fedvlp.core.method import Method
from fedvlp.core.types import Broadcast
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.deploy.machine import HOME
from fedvlp.flare import paths as paths_module
from fedvlp.flare.controller import FederatedController
from fedvlp.flare.paths import (
    SIMULATED,
    TRAINED,
    PathError,
    SitePaths,
    folder_at_site,
    refuse_split_workspace,
    runs_root,
    under,
)
from fedvlp.flare.task_handler import TaskHandler
from fedvlp.methods import FedAvg
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import identity
from fedvlp.run.experiment import Experiment
from fedvlp.run.lock import only_writer
from fedvlp.training.settings import Training


def test_a_site_keeps_its_runs_in_its_own_workspace(tmp_path: Path) -> None:
    fl_ctx = Engine("site-1", tmp_path / "kit", "job-1").new_context()
    assert runs_root(fl_ctx) == tmp_path / "kit" / "runs"
    assert SitePaths.of(fl_ctx) == SitePaths("site-1", str(tmp_path / "kit" / "runs"), str(tmp_path / "kit" / "local"))


def test_the_simulators_runs_lie_beside_the_workspace_that_it_empties(tmp_path: Path) -> None:
    """Its workspace is <given>/server, or <given>/<site>: results are beside <given>."""
    fl_ctx = Engine("site-1", tmp_path / "workspace" / "site-1", SIMULATED).new_context()
    assert runs_root(fl_ctx) == tmp_path / "runs"


@pytest.mark.parametrize("job", [SIMULATED, "job-1"])
def test_fedvlp_home_decides_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(HOME, "mine")
    assert runs_root(Engine("site-1", tmp_path / "kit", job).new_context()) == tmp_path / "mine"


STRANGE = ["..", "../x", "/etc", "fedavg/../../x", "link", "link/001", ".", "", "fedavg", "fedavg/", "fedavg/1/2",
           "fedavg/../feddra/001", "fedavg/001/../../../x", "Fedavg/001", "a b/001", "fedavg/001\x00", "fedavg\n/001",
           "a" * 65 + "/001", "fedavg/" + "1" * 300, "fedavg/-1", 7, None, ["fedavg", "001"]]  # fmt: skip


def test_a_name_that_is_no_run_of_this_site_is_refused_and_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path)
    for name in STRANGE:
        with pytest.raises(
            PathError, match=r"^the server names a run folder outside this site's own; the task is refused$"
        ):
            under(tmp_path / "runs", name)  # type: ignore[arg-type]


def test_the_name_of_a_run_is_resolved(tmp_path: Path) -> None:
    assert under(tmp_path / "runs", "feddra-paper/001") == (tmp_path / "runs" / "feddra-paper" / "001").resolve()


ONE, OTHER = "0" * 32, "f" * 32


def remembering(tmp_path: Path, run: dict[str, str]) -> tuple[SitePaths, Path]:
    """A site that remembers something of a run."""
    paths = SitePaths("a", str(tmp_path / "runs"), "")
    own = folder_at_site(paths, run)
    for name in ("00000-0.safetensors", "forgotten.00000-0", "optimizer/x", "wire/y", TRAINED):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).touch()
    return paths, own


def test_records_that_changed_between_two_processes_of_a_run_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a change, and without a word of them; another run begins with what is there."""
    experiment = Experiment(
        "small", FedAvg(local_steps=1), ModelConfig(), data=SyntheticCohort(sites=2, size=80), training=Training()
    )  # fmt: skip
    state = Assembly(experiment).server(("site-1",)).state

    def warned(seed: int, number: str) -> int:
        """The site's table is another one for each seed."""
        there = replace(experiment, data=replace(experiment.data, seed=seed))
        handler = TaskHandler(
            experiment, SitePaths("site-1", str(tmp_path), ""), lambda _, *others: Assembly(there, *others)
        )
        caplog.clear()
        handler.answer(Broadcast(0, "train", state), {**identity(experiment, "small/001"), "id": number}, bool)
        return sum("the records, or what decodes them, have changed" in line.getMessage() for line in caplog.records)

    assert [warned(0, ONE), warned(0, ONE), warned(1, ONE), warned(1, ONE), warned(2, OTHER)] == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("before", [{"id": ONE}, {}])
def test_what_a_site_remembers_of_another_run_of_that_name_goes_and_a_trained_model_stays(
    tmp_path: Path, before: dict[str, str]
) -> None:
    paths, own = remembering(tmp_path, {"folder": "fedavg/001", **before})
    assert folder_at_site(paths, {"folder": "fedavg/001", "id": OTHER}) == own
    assert sorted(file.name for file in own.iterdir()) == ["run_id.txt", TRAINED, "writer.lock"]


def test_processes_of_a_site_that_come_at_once_begin_anew_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One removed what another was about to rename."""
    paths, _ = remembering(tmp_path, {"folder": "fedavg/001", "id": ONE})
    begun: list[str] = []

    def slowly(own: Path, number: str) -> None:
        time.sleep(0.1)
        begin_anew(own, number)
        begun.append(number)

    begin_anew = paths_module._begin_anew
    monkeypatch.setattr(paths_module, "_begin_anew", slowly)
    run = {"folder": "fedavg/001", "id": OTHER}
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: folder_at_site(paths, run), range(4)))
    assert begun == [OTHER]
    assert (folders[0] / "run_id.txt").read_text() == OTHER


def test_a_process_of_another_run_that_stays_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, own = remembering(tmp_path, {"folder": "fedavg/001", "id": ONE})
    monkeypatch.setattr(paths_module, "LAST_ONE_ENDS", 0.3)
    with only_writer(own), pytest.raises(PathError, match="another process at a still works on a run of this name"):
        folder_at_site(paths, {"folder": "fedavg/001", "id": OTHER})
    assert (own / "00000-0.safetensors").exists()


def test_a_process_comes_in_while_the_one_that_began_the_run_works_on_it(tmp_path: Path) -> None:
    """As several processes that train together do: rank 0 begins, and keeps the folder for its whole task."""
    paths, own = remembering(tmp_path, {"folder": "fedavg/001", "id": ONE})
    run = {"folder": "fedavg/001", "id": OTHER}
    with only_writer(own), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(folder_at_site, paths, run)
        time.sleep(0.2)
        assert not waiting.done(), "the folder is still the other run's"
        paths_module._begin_anew(own, OTHER)
        assert waiting.result(timeout=10) == own


@pytest.mark.parametrize(("before", "now"), [({"id": ONE}, {"id": ONE}), ({"id": ONE}, {}), ({}, {})])
def test_a_site_keeps_what_it_remembers_of_the_same_run_and_where_the_server_gives_no_id(
    tmp_path: Path, before: dict[str, str], now: dict[str, str]
) -> None:
    paths, own = remembering(tmp_path, {"folder": "fedavg/001", **before})
    folder_at_site(paths, {"folder": "fedavg/001", **now})
    assert (own / "00000-0.safetensors").exists()
    assert (own / "wire" / "y").exists()


@pytest.mark.parametrize("number", ["", "../x", "F" * 32, 7])
def test_an_id_of_another_form_is_refused_and_nothing_goes(tmp_path: Path, number: Any) -> None:
    paths, own = remembering(tmp_path, {"folder": "fedavg/001", "id": ONE})
    with pytest.raises(PathError, match="32 hexadecimal digits"):
        folder_at_site(paths, {"folder": "fedavg/001", "id": number})
    assert (own / "00000-0.safetensors").exists()


@pytest.mark.parametrize("name", ["Eigene Dateien", "tab\tbed", "Jim's", 'a"b', "#1", "back\\slash"])
def test_a_simulator_whose_sites_could_not_start_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE would wait minutes for sites that do not come, and end with 0; other folders of the same form are fine."""
    for folder, refused in ((tmp_path / name, True), (tmp_path / "Köln-1,2", False)):
        (folder / "server" / SIMULATED).mkdir(parents=True)
        monkeypatch.chdir(folder / "server")
        with pytest.raises(ValueError, match="another workspace") if refused else nullcontext():
            FederatedController(name="fedavg", method=Method())
        monkeypatch.chdir(folder)
        refuse_split_workspace()
