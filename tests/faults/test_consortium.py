"""Spec faults, rows 9, 23 and 35, with provisioned processes: abort, a server killed, a site killed; nothing is lost.

Every task trains in a child process, as at hospitals.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import psutil
import pytest
from support.provisioned import BIN, Consortium, ended, until
from support.short_runs import GRACE, experiment, job, kill, new_run, phases, without

from fedvlp.flare.job_status import ResubmitError, judge, read_status, resubmit, session
from fedvlp.run.config import override

pytestmark = pytest.mark.slow(seconds=380)

BOTH, ONE = ["site-1", "site-2"], ["site-1"]


@pytest.mark.timeout(1500)
def test_rows_9_23_and_35_aborted_a_site_killed_its_server_killed_it_ends_with_the_same_bytes(
    here: Consortium, tmp_path: Path
) -> None:
    """Somebody aborts the job, and submits it again by hand. Then a site is killed, and ``jobs keep`` called.

    FLARE does not take the restarted site into the running job again, so the round continues without it; ``jobs keep``
    takes it back by a new job, and goes on with another one after the server was killed.
    """
    chosen = experiment(rounds=5)
    folder, log = new_run(here), here.folder / "keep.log"
    with session(here.lead) as opened:
        first = opened.submit_job(job(here, chosen, "fedavg"))
        until(lambda: phases(folder) == 1 and here.children("site-1"), "round 1 trains")
        with pytest.raises(ResubmitError, match=r"runs \(RUNNING\)"):
            resubmit(opened, first)
        opened.abort_job(first)
        assert ended(opened, first) == "FINISHED:ABORTED"
    assert read_status(folder.path)["status"] == "aborted"
    until(lambda: not [child for site in BOTH for child in here.children(site)], "no child is left", 90)
    code, said = fedvlp("jobs", "resubmit", first, "--kit", here.lead)
    assert code == 0, said
    assert "FINISHED:ABORTED. The run says: aborted" in said
    second = said.split()[-1]
    until(lambda: phases(folder) == 1 and here.children("site-2"), "site-2 trains in round 1")
    kill_unanswered(here, "site-2")
    until(lambda: phases(folder) >= 2, "round 1 is complete without the site")
    hung = child(here, "site-1", second, 2)
    hung.suspend()  # the job does not end before the site that came back is seen

    command = [BIN / "fedvlp", "jobs", "keep", second, "--kit", here.lead, "--every", "1", "--patience", "4"]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as keeper:
        until(lambda: "submitted again" in log.read_text(), "the job is submitted again")
        with contextlib.suppress(psutil.NoSuchProcess):
            hung.resume()
        before = phases(folder)
        until(lambda: phases(folder) == before + 1, "it goes on")
        kill(here, "localhost")
        until(lambda: keeper.poll() is not None, "it ends", 700)
    said = log.read_text()
    assert keeper.returncode == 0, said
    assert "continues without site-2, which came back" in said
    assert "the server died under it" in said
    assert said.rstrip().endswith("the results are complete")
    last = said.split("submitted again as ")[-1].split()[0]
    with session(here.lead) as opened, pytest.raises(ResubmitError, match="the results are complete"):
        resubmit(opened, last)

    records = folder.history()
    assert [record["round"] for record in records] == list(range(6)), "no phase was lost or run twice"
    asked = [sorted(record["sites"]) for record in records]
    assert asked[:2] == [BOTH, ONE]
    assert BOTH in asked[before:]
    assert f"no reply within {GRACE:g} s of the quorum" in records[1]["dropped"]["site-2"]
    silent = {(site, record["round"]) for record in records for site in record["dropped"]}
    assert folder.model.read_bytes() == without(chosen, silent, tmp_path).model.read_bytes()


def fedvlp(*words: object) -> tuple[int, str]:
    """The command's exit code, and what it prints."""
    command = [BIN / "fedvlp", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout


def test_rows_9_and_36_a_child_that_is_killed_or_hangs_costs_its_site_that_phase(
    here: Consortium, tmp_path: Path
) -> None:
    """site-2's training process is killed in round 1, as for lack of memory; site-1's stops in round 2.

    It stops while or after it takes its task, whichever is under way when it is seen.
    In the last round site-2 itself is killed. It is missing at the end, which FLARE may call abnormal: the run itself
    says finished. The bytes are those of a run in which those did not answer then, so all that others did was kept.
    """
    chosen = override(experiment(rounds=4), "rounds.seed", "2")
    folder = new_run(here)
    path = Path(job(here, chosen, "fedavg"))
    client = path / "app" / "config" / "config_fed_client.json"
    client.write_text(client.read_text().replace('"task_timeout"', '"silence": 20.0, "delivery": 20.0, "task_timeout"'))
    with session(here.lead) as opened:
        submitted = opened.submit_job(str(path))
        child(here, "site-2", submitted, 2).kill()
        child(here, "site-1", submitted, 3).suspend()
        until(lambda: phases(folder) == 3 and here.children("site-2"), "the last round trains")
        kill_unanswered(here, "site-2")
        status = ended(opened, submitted)
        verdict = judge(opened, submitted)
    records = folder.history()
    assert [sorted(record["dropped"]) for record in records[:4]] == [[], ["site-2"], ["site-1"], ["site-2"]]
    assert "the training process ended or fell silent" in records[1]["dropped"]["site-2"]
    assert [sorted(record["sites"]) for record in records[-2:]] == [ONE, ONE]
    assert not verdict.resume, f"FLARE says {status}, but the results are complete"
    code, said = fedvlp("jobs", "status", folder.path)
    assert (code, said.partition("\n")[0]) == (3, "completed without site-2 from round 3")
    silent = {("site-2", 1), ("site-1", 2), ("site-2", 3)}
    assert folder.model.read_bytes() == without(chosen, silent, tmp_path).model.read_bytes()


def kill_unanswered(here: Consortium, site: str) -> None:
    """Kills FLARE at a site that trains. The job's process outlives it by a moment, in which nothing is answered."""
    training = here.children(site)
    for process in training:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    kill(here, site)
    for process in training:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def child(here: Consortium, site: str, submitted: str, number: int) -> psutil.Process:
    """The training process of a site's task, as soon as it has connected; those before it may still be ending."""
    log = here.kits / site / submitted / "log.txt"
    until(lambda: log.exists() and f"launch={number} fqcn" in log.read_text(), f"{site} trains the task {number}")
    return max(until(lambda: here.children(site), f"{site} trains"), key=lambda process: process.create_time())
