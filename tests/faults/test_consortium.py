"""Spec faults, rows 9, 23 and 35, with provisioned processes: abort, a server killed, a site killed; nothing is lost.

Every task trains in a child process, as at hospitals.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from support.provisioned import BIN, Consortium, ended, processes, until
from support.short_runs import GRACE, experiment, job, kill, last_round, new_run, phases

from fedvlp.core.types import Broadcast, Reply
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation
from fedvlp.flare.job_status import ResubmitError, judge, read_status, resubmit, session
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

pytestmark = pytest.mark.slow(seconds=380)


def test_rows_23_and_35_aborted_then_its_server_killed_it_still_ends_with_the_same_bytes(
    here: Consortium, tmp_path: Path
) -> None:
    chosen = experiment(rounds=3)
    engine = RunFolder.create(tmp_path / "engine", chosen)
    simulate(chosen, engine)
    folder = new_run(here)
    with session(here.lead) as opened:
        first = opened.submit_job(job(here, chosen, "fedavg"))
        until(lambda: phases(folder) == 1 and processes("fedvlp.flare.child", "site-1"), "round 1 trains")
        with pytest.raises(ResubmitError, match=r"runs \(RUNNING\)"):
            resubmit(opened, first)
        opened.abort_job(first)
        assert ended(opened, first) == "FINISHED:ABORTED"
        assert read_status(folder.path)["status"] == "aborted"
        until(lambda: not processes("fedvlp.flare.child", str(here.folder)), "no child is left", 90)
        verdict, second = resubmit(opened, first)
        assert "FINISHED:ABORTED. The run says: aborted" in verdict.finding
        until(lambda: phases(folder) == 2 and processes("fedvlp.flare.child", "site-2"), "it goes on: round 2 trains")

    kill(here, "localhost")
    assert phases(folder) == 2
    command = [BIN / "fedvlp", "jobs", "resubmit", second, "--kit", here.lead]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "says RUNNING, but the server runs no such job" in done.stdout
    third = done.stdout.split()[-1]
    with session(here.lead) as opened:
        assert ended(opened, third) == "FINISHED:COMPLETED"
        with pytest.raises(ResubmitError, match="the results are complete"):
            resubmit(opened, third)
    assert [record["dropped"] for record in folder.history()] == [{}] * 4
    assert folder.model.read_bytes() == engine.model.read_bytes()


def test_row_9_a_site_killed_mid_round_comes_back_by_resubmission(here: Consortium) -> None:
    """FLARE does not take the restarted site into the running job again; the others go on, a new job has it back.

    Killed in the last round it is missing at the end, which FLARE may call abnormal: the run itself says finished.
    """
    folder = new_run(here)
    with session(here.lead) as opened:
        first = opened.submit_job(job(here, override(experiment(rounds=5), "rounds.seed", "1"), "fedavg"))
        until(lambda: phases(folder) == 1 and processes("fedvlp.flare.child", "site-2"), "site-2 trains in round 1")
        kill(here, "site-2")
        until(lambda: phases(folder) >= 2, "round 1 is complete without the site")
        _, second = resubmit(opened, first, abort=True)
        until(lambda: last_round(folder) == 3 and processes("fedvlp.flare.child", "site-2"), "and in the last round")
        kill(here, "site-2")
        status = ended(opened, second)
        verdict = judge(opened, second)
    asked = [sorted(record["sites"]) for record in folder.history()]
    both, one = ["site-1", "site-2"], ["site-1"]
    assert asked[:2] == [both, one]
    assert asked[-3:] == [both, one, one]
    assert f"no reply within {GRACE:g} s of the quorum" in folder.history()[1]["dropped"]["site-2"]
    assert folder.model.exists()
    assert not verdict.resume, f"FLARE says {status}, but the results are complete"
    done = subprocess.run([BIN / "fedvlp", "jobs", "status", folder.path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:15]) == (0, "status=finished")


def test_rows_9_and_36_a_child_that_is_killed_or_hangs_costs_its_site_that_phase(
    here: Consortium, tmp_path: Path
) -> None:
    """site-2's training process is killed in round 1, as for lack of memory; site-1's stops in round 2.

    The bytes are those of a run in which those two did not answer then, so all that others did was kept.
    """
    chosen = override(experiment(rounds=3), "rounds.seed", "2")
    folder = new_run(here)
    path = Path(job(here, chosen, "fedavg"))
    client = path / "app" / "config" / "config_fed_client.json"
    client.write_text(client.read_text().replace('"task_timeout"', '"silence": 20.0, "task_timeout"'))
    with session(here.lead) as opened:
        submitted = opened.submit_job(str(path))
        child(here, "site-2", submitted, 2).kill()
        child(here, "site-1", submitted, 3).suspend()
        assert ended(opened, submitted) == "FINISHED:COMPLETED"
    dropped = [record["dropped"] for record in folder.history()]
    assert [sorted(names) for names in dropped[:3]] == [[], ["site-2"], ["site-1"]]
    assert "the training process ended or fell silent" in dropped[1]["site-2"]
    assert folder.model.read_bytes() == without(chosen, {("site-2", 1), ("site-1", 2)}, tmp_path).model.read_bytes()


def child(here: Consortium, site: str, submitted: str, number: int) -> psutil.Process:
    """The training process of a site's task, as soon as it has connected; those before it may still be ending."""
    log = here.kits / site / submitted / "log.txt"
    until(lambda: log.exists() and f"launch={number} fqcn" in log.read_text(), f"{site} trains the task {number}")
    return max(processes("fedvlp.flare.child", site), key=lambda process: process.create_time())


def without(chosen: Experiment, silent: set[tuple[str, int]], tmp_path: Path) -> RunFolder:
    """The engine's run in which a site does not answer in a round."""
    folder = RunFolder.create(tmp_path / "engine", chosen)
    assembly = Assembly(chosen, folder.path)
    inner = SequentialExchange(assembly.site)

    def exchange(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, reply in inner(messages):
            yield site, TimeoutError() if (site, messages[site].round) in silent else reply

    server = assembly.server(assembly.sites())
    state = Federation(chosen.method, server, chosen.rounds, exchange).run()
    folder.finish(chosen, state, server.history)
    return folder
