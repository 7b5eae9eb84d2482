"""What became of a job, judged from FLARE's status, what the server runs, and what the run says of itself."""

from __future__ import annotations

import json
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.flare_api.api_spec import JobNotDone, JobNotFound, JobNotRunning, NoConnection
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.flare import job_status as module
from fedvlp.flare.job_status import (
    ResubmitError,
    UnreachableError,
    all_jobs,
    job_status,
    judge,
    read_status,
    resubmit,
    session,
)
from fedvlp.run.lock import only_writer

STARTED = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)  # when the server was
DIED = {"status": "stopped", "reason": "Submit it.", "cause": "a's job process died in round 3, train"}
SAID = {"status": "stopped", "reason": "2 valid updates, 4 needed.", "round": 3}


class Server:
    """A FLARE session with a server that has one job."""

    def __init__(self, status: str, *, runs: bool = False, said: dict[str, Any] | None = None) -> None:
        self.status, self.runs, self.said = status, runs, said
        self.asked: list[str] = []
        self.began = ""  # when the job was started, as FLARE writes it

    def get_job_meta(self, job_id: str) -> dict[str, str]:
        if job_id != "j":
            raise JobNotFound(job_id)
        return {"status": self.status, "start_time": self.began} if self.began else {"status": self.status}

    def get_system_info(self) -> Any:
        running = [SimpleNamespace(job_id="j")] if self.runs else []
        return SimpleNamespace(job_info=running, server_info=SimpleNamespace(start_time=STARTED.timestamp()))

    def download_job_result(self, job_id: str, folder: str) -> str:
        if self.said:
            (Path(folder) / "workspace" / "fedvlp").mkdir(parents=True)
            (Path(folder) / "workspace" / "fedvlp" / "run_status.json").write_text(json.dumps(self.said))
        return folder

    def abort_job(self, job_id: str) -> None:
        self.status, self.runs = "FINISHED:ABORTED", False
        self.asked.append("abort")

    def wait_for_job(self, job_id: str, timeout: float) -> None:
        self.asked.append("wait")

    def clone_job(self, job_id: str) -> str:
        self.asked.append("clone")
        return "new"

    def submit_job(self, folder: str) -> str:
        self.asked.append(folder)
        return "new"


@pytest.mark.parametrize(
    ("status", "runs", "said", "resume", "finding"),
    [
        ("RUNNING", True, None, False, "runs"),
        ("SUBMITTED", False, None, False, "waits to be started"),
        ("RUNNING", False, None, True, "the server died under it"),
        ("FINISHED:COMPLETED", False, None, False, "complete"),
        ("FINISHED:ABNORMAL", False, {"status": "finished", "reason": ""}, False, "complete"),
        ("FINISHED:ABNORMAL", False, SAID, True, "stopped. 2 valid updates, 4 needed."),
        (
            "FINISHED:EXECUTION_EXCEPTION",
            False,
            None,
            True,
            "EXECUTION_EXCEPTION. Its process at the server left no word",
        ),
        ("FINISHED:EXECUTION_EXCEPTION", False, DIED, True, "says: a's job process died in round 3, train. Submit it."),
        ("FINISHED:ABORTED", False, {"status": "aborted", "reason": ""}, True, "aborted"),
    ],
)
def test_verdicts(status: str, runs: bool, said: dict[str, Any] | None, resume: bool, finding: str) -> None:
    server: Any = Server(status, runs=runs, said=said)
    verdict = judge(server, "j")
    assert verdict.resume == resume
    assert finding in verdict.finding
    if resume:
        assert resubmit(server, "j")[1] == "new"
        assert server.asked == ["clone"]
    else:
        with pytest.raises(ResubmitError):
            resubmit(server, "j")
        assert server.asked == []


@pytest.mark.parametrize(
    ("status", "said"),
    [("SUBMITTED", r"\(SUBMITTED; not enough sites have enough resources\).*GPUs"), ("RUNNING", "FLARE says how when")],
)
def test_the_status_of_a_job_that_waits_or_ends_is_a_sentence(
    status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE has no results of it yet."""
    server: Any = Server(status)
    server.began = (STARTED + timedelta(minutes=1)).isoformat()
    history = {"schedule_history": ["no site is here", "not enough sites have enough resources"]}
    meta = server.get_job_meta("j") | history
    monkeypatch.setattr(server, "get_job_meta", lambda job_id: meta)

    def download(*_: str) -> str:
        raise JobNotDone("job j is still running")

    monkeypatch.setattr(server, "download_job_result", download)
    with pytest.raises(ResubmitError, match=said):
        job_status(server, "j")


@pytest.mark.parametrize(
    ("said", "aborted"),
    [(None, True), ({"status": "aborted", "reason": ""}, True), ({"status": "running", "reason": ""}, True),
     (SAID, False), ({"status": "failed", "reason": "ValueError"}, False)],
)  # fmt: skip
def test_what_ended_by_itself_was_aborted_by_nobody(said: dict[str, Any] | None, aborted: bool) -> None:
    """Whatever FLARE calls it: `jobs keep` leaves alone what somebody aborted, and nothing else."""
    server: Any = Server("FINISHED:ABORTED", said=said)
    verdict = judge(server, "j")
    assert (verdict.aborted, verdict.resume) == (aborted, True)


def test_a_job_that_has_ended_at_the_server_is_no_job_whose_server_died() -> None:
    """FLARE calls both running. A run that is complete, submitted again, would begin anew."""
    server: Any = Server("RUNNING")
    server.began = (STARTED + timedelta(seconds=1)).isoformat()
    verdict = judge(server, "j")
    assert (verdict.resume, verdict.running, verdict.complete, verdict.ending) == (False, False, False, True)
    with pytest.raises(ResubmitError, match="has ended at the server; FLARE says how"):
        resubmit(server, "j")
    assert server.asked == []

    server.began = (STARTED - timedelta(seconds=1)).isoformat()
    verdict = judge(server, "j")
    assert (verdict.resume, verdict.ending) == (True, False)
    assert "the server died under it" in verdict.finding


def test_a_running_job_is_aborted_only_when_asked_and_a_folder_may_take_its_place(tmp_path: Path) -> None:
    server: Any = Server("RUNNING", runs=True)
    resubmit(server, "j", tmp_path, abort=True)
    assert server.asked == ["abort", "wait", str(tmp_path)]


def test_an_unknown_job_and_a_folder_that_is_no_kit_are_refused(tmp_path: Path) -> None:
    server: Any = Server("RUNNING")
    with pytest.raises(ResubmitError, match="knows no job k"):
        judge(server, "k")
    with pytest.raises(ResubmitError, match="no admin startup kit"), session(tmp_path):
        pass


def test_a_session_is_the_kits_user_and_is_closed_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_admin.json").write_text('{"admin": {"username": "lead@lead.org"}}')
    log: list[str] = []

    def connect(user: str, kit: str, timeout: float) -> Any:
        log.append(f"{user} {kit}")
        return SimpleNamespace(close=lambda: log.append("closed"))

    monkeypatch.setattr(module, "new_secure_session", connect)
    with pytest.raises(KeyError), session(tmp_path):
        raise KeyError
    assert log == [f"lead@lead.org {tmp_path}", "closed"]


@pytest.mark.parametrize(
    "error",
    [
        NoConnection("nobody"),
        FLCommunicationError("failed to challenge server: timeout: "),
        FLCommunicationError("error:client_registration", FLCommunicationError("expect payload to be dict")),
    ],
)
def test_a_server_that_comes_up_and_does_not_answer_the_login_yet_counts_as_one_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What FLARE raises for a server that takes the connection and says nothing is no NoConnection."""
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_admin.json").write_text('{"admin": {"username": "lead@lead.org"}}')

    def silence(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(module, "new_secure_session", silence)
    with pytest.raises(UnreachableError, match=r"no server answered lead@lead.org within 20 s"), session(tmp_path):
        pass


def test_a_download_that_breaks_off_is_a_server_that_does_not_answer() -> None:
    """FLARE raises a bare RuntimeError then, which could be anything; here it can be nothing else."""
    server: Any = Server("FINISHED:EXECUTION_EXCEPTION")

    def breaks_off(*_: Any) -> str:
        raise RuntimeError("runtime error encountered: ERROR_RUNTIME: error receiving file")

    server.download_job_result = breaks_off
    with pytest.raises(UnreachableError, match=r"the results of job j did not arrive .*error receiving file"):
        judge(server, "j")


def shown(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["jobs", "status", *arguments])


def test_status_of_a_downloaded_job(tmp_path: Path) -> None:
    assert read_status(tmp_path) == {}
    assert "no run of fedvlp" in str(shown(str(tmp_path)).exception)
    file = tmp_path / "job" / "workspace" / "fedvlp" / "run_status.json"
    file.parent.mkdir(parents=True)
    told = {"schema": 1, "num_rounds": 6, "phase": "train", "phases_done": 3, "phases": 7, **SAID}
    file.write_text(json.dumps(told))
    run = shown(str(tmp_path))
    assert (run.exit_code, run.output.splitlines()) == (
        1, ["stopped in round 3 of 6, train", "2 valid updates, 4 needed.", "3 of 7 phases"],
    )  # fmt: skip
    file.write_text(json.dumps({**told, "schema": 2}))
    assert "the status has form 2, this fedvlp reads 1" in str(shown(str(tmp_path)).exception)


def test_the_board_of_a_server_has_what_runs_and_what_flare_says_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    states = ("FINISHED:COMPLETED", "FINISHED:ABORTED", "SUBMITTED", "RUNNING", "RUNNING")
    jobs = [{"job_id": str(number), "job_name": "a", "status": status} for number, status in enumerate(states)]
    server: Any = SimpleNamespace(list_jobs=lambda: jobs)

    def stats(job: str, target: str) -> Any:
        if job == "4":
            raise JobNotRunning
        return {"server": {"progress": SAID}}

    server.show_stats = stats
    shown = all_jobs(server)
    assert list(shown) == ["a 4", "a 3", "a 2", "a 1", "a 0"]
    assert shown["a 3"] == SAID
    assert [shown[f"a {n}"]["status"] for n in (0, 1, 2, 4)] == ["finished", "FINISHED:ABORTED", "running", "running"]
    assert shown["a 1"]["summary"] == "FINISHED:ABORTED; why: fedvlp jobs status 1 --kit KIT"


ABSENT = {"state": "dropped", "dropped": 2, "reason": "no reply\x1b[2J", "absent_since": 2}


@pytest.mark.parametrize(
    ("status", "told", "code"),
    [
        ("finished", {}, 0),
        ("finished", {"sites": {"a": ABSENT, "b": {"state": "answered", "dropped": 0}}}, 3),
        ("finished", {"absent": ["d"]}, 3),
        ("stopped", {}, 1),
        ("aborted", {"sites": {"a": ABSENT}}, 1),
        ("failed", {}, 1),
        ("running", {}, 1),  # a copy: nobody writes it
        ("anything", {}, 1),
    ],
)
def test_the_exit_code_and_the_fields_are_for_a_monitor(
    tmp_path: Path, status: str, told: dict[str, Any], code: int
) -> None:
    written = {"schema": 1, "status": status, "reason": "", **told}
    (tmp_path / "run_status.json").write_text(json.dumps(written))
    run = shown(str(tmp_path), "--json")
    assert run.exit_code == code
    assert written.items() <= json.loads(run.output).items()
    words = shown(str(tmp_path))
    assert words.exit_code == code
    assert "\x1b" not in words.output
    assert ("without a from round 2" in words.output) == ("sites" in told)


def test_a_run_that_goes_on_is_no_alarm_while_its_process_lives(tmp_path: Path) -> None:
    (tmp_path / "run_status.json").write_text(json.dumps({"schema": 1, "status": "running", "reason": ""}))
    with only_writer(tmp_path):
        assert shown(str(tmp_path)).exit_code == 0
    killed = shown(str(tmp_path))
    assert (killed.exit_code, "no process writes this run" in killed.output) == (1, True)


@pytest.mark.parametrize("runs", [True, False])
def test_the_server_is_asked_for_the_status_of_a_job(monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    """While it runs from its memory, with the phase under way; later from its results."""
    live = {"schema": 1, "status": "running", "under_way": {"round": 2, "phase": "train", "waits_for": ["a"]}}
    ended = {"schema": 1, "status": "finished", "reason": ""}
    server: Any = Server("RUNNING" if runs else "FINISHED:COMPLETED", runs=runs, said=ended)
    server.show_stats = lambda job, target: {"server": {"progress": live}}
    monkeypatch.setattr(module, "session", lambda kit: nullcontext(server))
    asked = shown("j", "--kit", "kit", "--json")
    assert (asked.exit_code, json.loads(asked.output)) == (0, live if runs else ended)
    server.said = live  # its process was killed before it could say how it ended
    assert shown("j", "--kit", "kit").exit_code == (0 if runs else 1)
    if runs:
        server.show_stats = lambda job, target: None
        assert "has told nothing yet" in str(shown("j", "--kit", "kit").exception)
