"""FLARE's report of a failed job process, on its way to the job; with real processes that are killed, how each end is
named.

How the run's status has it is in test_controller.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.fuel.f3.message import Message
from nvflare.private.defs import CellMessageHeaderKeys, JobFailureMsgKey
from support.flare_memory import CoreCell
from support.provisioned import PROJECT, Consortium, connected, ended, processes, until
from support.short_runs import experiment, job, new_run, phases
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.flare.job_failures import CHANNEL, FAILURES, TOPIC, hear, pass_on
from fedvlp.flare.job_status import read_status, resubmit, session

STATIC = "nvflare.lighter.impl.static_file.StaticFileBuilder, args: {{config_folder: config}}}}\n"


def told(payload: Any, pending: bool = True, site: str = "a") -> list[tuple[str, Any]]:
    """Whom the server's parent process tells what, when that report comes."""
    core, sent = CoreCell(), []
    core.send_request = lambda channel, topic, target, request, **_: sent.append((target, request.payload))  # type: ignore[attr-defined]
    runner = SimpleNamespace(is_client_outcome_pending=lambda job, name: pending and (job, name) == ("j", "a"))
    pass_on(SimpleNamespace(cell=SimpleNamespace(core_cell=core), engine=SimpleNamespace(job_runner=runner)))
    (look,) = core.filters.values()
    assert look(Message({CellMessageHeaderKeys.CLIENT_NAME: site}, payload)) is None, "FLARE's own handler comes next"
    return sent


@pytest.mark.parametrize("code", FAILURES)
def test_a_failure_that_flare_ends_the_job_for_is_told_the_job_first(code: int) -> None:
    report = {JobFailureMsgKey.JOB_ID: "j", JobFailureMsgKey.CODE: code}
    assert told(report) == [("server.j", {"site": "a", "code": code})]
    assert told(report, pending=False) == told(report, site="b") == [], "FLARE drops it"
    assert told({**report, JobFailureMsgKey.JOB_ID: "other"}) == []


@pytest.mark.parametrize("payload", [None, "text", {}, {"code": 0, "job_id": "j"}, {"code": [101], "job_id": "j"}])
def test_what_is_no_failure_is_told_nobody(payload: Any) -> None:
    assert told(payload) == []


def test_a_job_believes_its_own_sites() -> None:
    core, heard = CoreCell(), []
    engine = SimpleNamespace(
        get_clients=lambda: [SimpleNamespace(name="a")], get_cell=lambda: SimpleNamespace(core_cell=core)
    )
    hear(engine, lambda cause, site: heard.append((cause, site)))
    for site in ("stranger", "a"):
        core.answers[CHANNEL, TOPIC](Message({}, {"site": site, "code": 101}))
    assert heard == [("a's job process died", "a")]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    project = PROJECT.replace(STATIC, STATIC + "  - path: fedvlp.flare.GuardedKits\n")
    with Consortium(tmp_path_factory.mktemp("ends") / "consortium", project=project) as consortium:
        until(lambda: connected(consortium), "both sites are connected")
        yield consortium


@pytest.mark.slow(seconds=150)
@pytest.mark.timeout(900)
def test_each_end_is_named(guarded: Consortium) -> None:
    """A site's job process is killed, then that of the server, then an operator aborts: each time it is resubmitted."""
    folder = new_run(guarded)
    with session(guarded.lead) as opened:
        first = opened.submit_job(job(guarded, experiment(rounds=50), "ends"))
        until(lambda: phases(folder) >= 1, "the first round is complete")
        kill("worker_process", str(guarded.kits / "site-1"), first)
        assert ended(opened, first) == "FINISHED:EXECUTION_EXCEPTION"
        said = read_status(folder.path)
        round = said["under_way"]["round"]
        assert said["summary"] == f"ended by FLARE: site-1's job process died in round {round}, train"
        assert (said["status"], said["sites"]["site-1"]["state"]) == ("stopped", "job process failed")
        assert status(guarded, first).startswith(said["summary"])

        verdict, second = resubmit(opened, first)
        assert f"The run says: {said['cause']}. Submit the job again" in verdict.finding
        until(lambda: phases(folder) > round, "it goes on")
        kill("runner_process", str(guarded.kits / "localhost"), second)
        assert ended(opened, second).startswith("FINISHED:")
        assert "Its process at the server left no word: it was killed" in status(guarded, second)

        before = phases(folder)
        _, third = resubmit(opened, second)
        until(lambda: phases(folder) > before, "it goes on")
        opened.abort_job(third)
        assert ended(opened, third) == "FINISHED:ABORTED"
    said = read_status(folder.path)
    assert (said["status"], "cause" in said) == ("aborted", False)
    assert said["reason"].startswith("Somebody aborted the job or shut the server down")
    assert f"[U:{guarded.lead.name}][A:abort_job" in (guarded.kits / "localhost" / "audit.log").read_text()


def kill(program: str, kit: str, job: str) -> None:
    """Kills the process of a job in that kit."""
    until(lambda: processes(program, kit, job), f"{program} runs")[0].kill()


def status(here: Consortium, job: str) -> str:
    """What the command says of a job."""
    done = CliRunner().invoke(app, ["jobs", "status", job, "--kit", str(here.lead)])
    assert done.exit_code == 1, done.output
    return done.output if done.output and not isinstance(done.exception, ValueError) else str(done.exception)
