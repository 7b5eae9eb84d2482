"""Where a run is kept, at the server and at the sites; and that no name leads out of there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.flare_memory import Engine

from fedvlp.flare.paths import HOME, SIMULATED, PathError, SitePaths, runs_root, under


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


@pytest.mark.parametrize("name", STRANGE)
def test_a_name_that_is_no_run_of_this_site_is_refused_and_not_repeated(tmp_path: Path, name: Any) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path)
    with pytest.raises(
        PathError, match=r"^the server names a run folder outside this site's own; the task is refused$"
    ):
        under(tmp_path / "runs", name)


def test_the_name_of_a_run_is_resolved(tmp_path: Path) -> None:
    assert under(tmp_path / "runs", "feddra-paper/001") == (tmp_path / "runs" / "feddra-paper" / "001").resolve()
