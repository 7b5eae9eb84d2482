"""Following a job to its end: what makes it be submitted again, what does not, and when it stops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.fuel.flare_api.api_spec import (
    AuthenticationError,
    InternalError,
    JobTimeout,
    NoClientsAvailable,
    NoConnection,
    NoReply,
    SessionClosed,
)
from typer.testing import CliRunner

from fedvlp.cli import app, main
from fedvlp.flare import job_supervisor as module
from fedvlp.flare.job_status import ResubmitError, UnreachableError, Verdict
from fedvlp.flare.job_supervisor import GaveUpError, supervise

RUNNING = "RUNNING"
DEPLOYED = ["server: OK", "site-1: OK", "site-2: OK", "site-3: no reply (deployment timeout)"]
Sites = dict[str, str | None]  # the job of every site; None: it has none, "silent": no reply
DONE: tuple[str, Sites] = ("FINISHED:COMPLETED", {})
BOTH: Sites = {"site-1": "j", "site-2": "j"}
COPY: Sites = {"site-1": "j+", "site-2": "j+"}


class Server:
    """A FLARE session whose server says the next of ``looks`` at every look: the status, and the job of every site."""

    def __init__(self, *looks: tuple[str, Sites]) -> None:
        self.looks, self.asked, self.downs = list(looks), list[str](), 0
        self.job = "j"
        self.jobs = list[dict[str, str]]()  # that were made, the newest last
        self.started = 1.0  # after every job: each that says RUNNING and is not there has lost its server

    def list_jobs(self, detailed: bool) -> list[dict[str, str]]:
        assert detailed, "without it FLARE does not say of which job a job is a copy"
        return self.jobs

    def get_job_meta(self, job_id: str) -> dict[str, Any]:
        return {"status": self.looks[0][0], "job_deploy_detail": DEPLOYED, "start_time": "1970-01-01T00:00:00+00:00"}

    def get_system_info(self) -> Any:
        running = [SimpleNamespace(job_id=self.job)] if self.looks[0][1] else []
        return SimpleNamespace(job_info=running, server_info=SimpleNamespace(start_time=self.started))

    def get_client_job_status(self) -> list[dict[str, Any]]:
        kinds = {"silent": "no_reply", None: "no_jobs"}
        return [
            {"client_name": site, "status": kinds[job]} if job in kinds
            else {"client_name": site, "job_id": job, "status": "started"}
            for site, job in self.looks[0][1].items()
        ]  # fmt: skip

    def download_job_result(self, job_id: str, folder: str) -> str:
        return folder

    def abort_job(self, job_id: str) -> None:
        self.asked.append(f"abort {job_id}")
        self.looks[0] = ("FINISHED:ABORTED", {})

    def wait_for_job(self, job_id: str, timeout: float) -> None:
        pass

    def clone_job(self, job_id: str) -> str:
        self.asked.append(f"clone {job_id}")
        self.job = job_id + "+"
        self.jobs.append({"job_id": self.job, "cloned_from": job_id, "status": "SUBMITTED"})
        return self.job


def kept(monkeypatch: pytest.MonkeyPatch, server: Any, attempts: int = 5) -> tuple[Verdict, list[str]]:
    """The last verdict and what was said, a look being over at once."""

    @contextmanager
    def session(kit: Path) -> Iterator[Any]:
        if server.downs:
            server.downs -= 1
            raise UnreachableError("no server answered")
        yield server

    def sleep(seconds: float) -> None:
        server.looks.pop(0)

    said: list[str] = []
    monkeypatch.setattr(module, "session", session)
    monkeypatch.setattr(module.time, "sleep", sleep)
    return supervise(Path("kit"), "j", said.append, attempts=attempts, every=1.0, patience=0.0), said


def test_a_job_that_goes_well_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a site is away, has another job, was never given this one, or comes back for one look only."""
    looks: list[Sites] = [BOTH, {"site-1": "j", "site-2": "silent"}, {"site-1": "j", "site-3": None}, {"site-1": "j"}]
    back: list[Sites] = [{"site-1": "j", "site-2": None}, BOTH]
    server = Server(("SUBMITTED", {}), *((RUNNING, sites) for sites in [*looks, *back]), DONE)
    verdict, said = kept(monkeypatch, server)
    assert (verdict.complete, said, server.asked) == (True, [], [])


@pytest.mark.parametrize("other", [None, "k"])
def test_a_site_that_came_back_is_taken_in_by_a_new_submission(
    monkeypatch: pytest.MonkeyPatch, other: str | None
) -> None:
    lost: Sites = {"site-1": "j", "site-2": other}
    server = Server((RUNNING, lost), (RUNNING, lost), ("SUBMITTED", {}), (RUNNING, COPY), (RUNNING, COPY), DONE)
    verdict, said = kept(monkeypatch, server)
    assert verdict.complete
    assert server.asked == ["abort j", "clone j"]
    assert said == ["job j continues without site-2, which came back\nsubmitted again as j+"]


def test_a_job_that_ends_is_left_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE ends it at the sites first, and calls it running at the server for as long as the results are copied."""
    ended: Sites = {"site-1": None, "site-2": None}
    server = Server((RUNNING, BOTH), *[(RUNNING, ended)] * 4, DONE)
    verdict, said = kept(monkeypatch, server)
    assert (verdict.complete, said, server.asked) == (True, [], [])


def test_a_server_that_died_is_waited_for_and_its_job_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(*[(RUNNING, {})] * 4, DONE)
    server.downs = 2
    verdict, said = kept(monkeypatch, server)
    assert verdict.complete
    assert server.asked == ["clone j"]
    assert said[0] == "the server does not answer; waiting for it"
    assert "the server died under it" in said[1]
    assert len(said) == 2


def test_a_session_that_the_server_closed_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = Server((RUNNING, BOTH), (RUNNING, BOTH), DONE)
    status, calls = server.get_client_job_status, []

    def closed_once() -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise SessionClosed("session closed")
        return status()

    server.get_client_job_status = closed_once
    assert kept(monkeypatch, server)[0].complete


@pytest.mark.parametrize("error", [NoClientsAvailable, NoReply, InternalError])
def test_a_server_that_has_no_site_yet_or_much_to_do_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """A server that was started again knows no site for some seconds, and FLARE has an error for that."""
    server: Any = Server(*[(RUNNING, BOTH)] * 3, DONE)
    status, left = server.get_client_job_status, [error("no clients available"), error("no clients available")]

    def asked() -> Any:
        if left:
            raise left.pop()
        return status()

    server.get_client_job_status = asked
    verdict, said = kept(monkeypatch, server)
    assert verdict.complete
    assert said == [f"the server answers {error.__name__}: no clients available; asking again"], (
        "once, and in its words"
    )
    assert server.asked == []


def test_a_job_that_ended_at_the_server_is_not_submitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE calls it running until all its sites have told their end, or for 15 minutes where one of them died.

    Seen in a provisioned system: a complete run was taken for one whose server had died, and trained a second time.
    """
    server: Any = Server((RUNNING, BOTH), *[(RUNNING, {})] * 5, DONE)
    server.started = 0.0
    verdict, said = kept(monkeypatch, server)
    assert (verdict.complete, server.asked) == (True, [])
    assert len(said) == 1
    assert said[0].startswith("job j has ended at the server")


def test_a_copy_whose_making_was_not_answered_is_followed_and_no_second_one_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two copies would keep each other from the run, and the job that is followed would fail again and again."""
    server: Any = Server(*[(RUNNING, {})] * 4, (RUNNING, COPY), DONE)
    clone = server.clone_job

    def lost(job_id: str) -> str:
        clone(job_id)
        raise NoConnection("cannot connect to server")

    server.clone_job = lost
    server.jobs = [{"job_id": "old", "cloned_from": "j", "status": "FINISHED:ABORTED"}]  # it ended: nothing to follow
    verdict, said = kept(monkeypatch, server, attempts=1)
    assert verdict.complete
    assert server.asked == ["clone j"]
    assert said[0] == "the server does not answer; waiting for it"
    assert said[1].endswith("submitted again as j+")


def test_what_the_server_did_not_answer_is_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = Server(*[(RUNNING, {})] * 8, (RUNNING, COPY), DONE)
    clone, left = server.clone_job, [NoConnection("down")] * 3

    def answers_late(job_id: str) -> str:
        if left:
            raise left.pop()
        return clone(job_id)

    server.clone_job = answers_late
    assert kept(monkeypatch, server, attempts=1)[0].complete
    assert server.asked == ["clone j"]


def test_what_somebody_aborted_stays_aborted_but_an_abort_of_its_own_is_followed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server: Any = Server((RUNNING, BOTH), ("FINISHED:ABORTED", {}))
    verdict, said = kept(monkeypatch, server)
    assert (verdict.aborted, verdict.complete, said, server.asked) == (True, False, [], [])
    assert verdict.finding == "job j is FINISHED:ABORTED. Gave up: somebody aborted it."

    lost: Sites = {"site-1": "j", "site-2": None}
    slow: Any = Server(*[(RUNNING, lost)] * 2, *[("FINISHED:ABORTED", {})] * 2, (RUNNING, {"site-1": "j+"}), DONE)

    def late(job_id: str, timeout: float) -> None:
        raise JobTimeout("not yet")

    slow.wait_for_job = late
    assert kept(monkeypatch, slow)[0].complete
    assert slow.asked == ["abort j", "clone j"]


def test_it_gives_up_after_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(*[("FINISHED:EXECUTION_EXCEPTION", {})] * 9)
    verdict, said = kept(monkeypatch, server, attempts=2)
    assert (verdict.resume, verdict.complete, len(said)) == (True, False, 2)
    assert server.asked == ["clone j", "clone j+"]
    assert verdict.finding.startswith("job j++ is FINISHED:EXECUTION_EXCEPTION")
    assert verdict.finding.endswith("Gave up: it was submitted again as often as --attempts allows.")


def test_a_job_that_runs_without_a_site_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an attempt left it goes on as it is, which is said once."""
    server = Server(*[(RUNNING, {"site-1": "j", "site-2": None})] * 5, DONE)
    verdict, said = kept(monkeypatch, server, attempts=0)
    assert (verdict.complete, server.asked) == (True, [])
    left = "it is left to run, as --attempts allows no more"
    assert said == [f"job j continues without site-2, which came back; {left}"]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (AuthenticationError("no such user"), "AuthenticationError: no such user"),
        (ResubmitError("the server knows no job j"), "the server knows no job j"),
    ],
)
def test_an_error_that_does_not_pass_is_said_in_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, why: str
) -> None:
    """With the job that is followed by then, and the command that goes on with it."""
    server: Any = Server(*[(RUNNING, {})] * 4)
    meta = server.get_job_meta

    def refused(job_id: str) -> Any:
        if job_id != "j":
            raise error
        return meta(job_id)

    server.get_job_meta = refused
    with pytest.raises(GaveUpError) as caught:
        kept(monkeypatch, server)
    line = f"gave up following job j+: {why}; to resume: fedvlp jobs keep j+ --kit kit"
    assert str(caught.value) == line

    def gives_up(*_: Any, **__: Any) -> Verdict:
        raise caught.value

    monkeypatch.setattr(module, "supervise", gives_up)
    monkeypatch.setattr("sys.argv", ["fedvlp", "jobs", "keep", "j", "--kit", "kit"])
    with pytest.raises(SystemExit) as left:
        main()
    assert (left.value.code, capsys.readouterr().err) == (2, f"fedvlp: {line}\n")


def test_the_command_says_how_it_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for complete, code in ((True, 0), (False, 1)):
        verdict = Verdict(False, "job j is done", complete=complete)
        monkeypatch.setattr(module, "supervise", lambda *_, verdict=verdict, **__: verdict)
        done = CliRunner().invoke(app, ["jobs", "keep", "j", "--kit", str(tmp_path)])
        assert (done.exit_code, done.output) == (code, "job j is done\n")
