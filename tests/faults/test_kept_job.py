"""Spec faults, rows 9 and 23, with `fedvlp jobs keep`: a site that was killed is back in the run, a server goes on."""

from __future__ import annotations

import subprocess

import pytest
from support.provisioned import BIN, Consortium, processes, until
from support.short_runs import experiment, job, kill, new_run, phases

from fedvlp.flare.job_status import session
from fedvlp.run.config import override


@pytest.mark.slow(seconds=300)
@pytest.mark.timeout(1500)
def test_rows_9_and_23_a_kept_job_has_its_site_back_and_survives_its_server(here: Consortium) -> None:
    """``jobs keep`` takes a site that was killed back into the run, then goes on after the server was killed."""
    folder, log = new_run(here), here.folder / "keep.log"
    with session(here.lead) as opened:
        first = opened.submit_job(job(here, override(experiment(rounds=5), "rounds.seed", "2"), "fedavg"))
    command = [BIN / "fedvlp", "jobs", "keep", first, "--kit", here.lead, "--every", "1", "--patience", "4"]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as keeper:
        until(lambda: phases(folder) == 1 and processes("fedvlp.flare.child", "site-2"), "site-2 trains in round 1")
        kill(here, "site-2")
        until(lambda: "submitted again" in log.read_text(), "the job is submitted again")
        before = phases(folder)
        until(lambda: phases(folder) == before + 1, "it goes on")
        kill(here, "localhost")
        until(lambda: keeper.poll() is not None, "it ends", 700)
    said = log.read_text()
    assert keeper.returncode == 0, said
    assert "goes on without site-2, which came back" in said
    assert "the server died under it" in said
    assert said.rstrip().endswith("the results are complete")
    records = folder.history()
    assert [record["round"] for record in records] == list(range(6)), "no phase was lost or run twice"
    asked = [sorted(record["sites"]) for record in records]
    assert ["site-1", "site-2"] in asked[before:]
