"""Resuming a job that ended or whose server died: what became of it, and the same job submitted once more.

FLARE 2.9 cannot resume a job. The controller keeps its checkpoints outside the job (flare/controller.py) and resumes
where the newest unfinished run of the same configuration stands, so submitting the same job again is a resumption.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.fuel.flare_api.api_spec import JobNotDone, JobNotFound, JobNotRunning, NoConnection
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from fedvlp.core.json_file import read_json
from fedvlp.run.status import FAILED, FINISHED, RUNNING, STOPPED
from fedvlp.run.status import FILE as STATUS_FILE

TIMEOUT = 20.0  # seconds to connect to the server
ABORT_TIMEOUT = 120.0  # seconds for an aborted job to end
NO_WORD = (
    "Its process at the server left no word: it was killed (by a person, or for lack of memory), or the job did not "
    "begin. The server's log and `nvflare job meta` say which."
)
BY_ITSELF = (STOPPED, FAILED)
"""What the controller writes of a run that nobody aborted. FLARE calls such a job aborted too, where a word of its
process arrives after FLARE has struck it off."""


class ResubmitError(ValueError):
    """The job is not to be submitted again; the message says why."""


class UnreachableError(ResubmitError):
    """No server answered."""


@dataclass(frozen=True)
class Verdict:
    """What became of a job, and whether submitting it again makes sense."""

    resume: bool
    finding: str
    running: bool = False
    ending: bool = False  # it has ended at the server, and FLARE has not said how
    complete: bool = False  # the results are
    aborted: bool = False  # somebody ended it


@contextmanager
def session(kit: Path) -> Iterator[Session]:
    """A FLARE API session with the admin startup kit ``kit``. Raises ResubmitError when it cannot be opened.

    A server that takes connections and does not answer the login yet, because it comes up or has much to do, counts as
    one that does not answer: FLARE raises FLCommunicationError then, and NoConnection where nothing listens.
    """
    file = kit / "startup" / "fed_admin.json"
    if not file.exists():
        raise ResubmitError(f"{kit} is no admin startup kit: startup/fed_admin.json is missing there")
    user = json.loads(file.read_text(encoding="utf-8"))["admin"]["username"]
    try:
        opened = new_secure_session(user, str(kit.absolute()), timeout=TIMEOUT)
    except (NoConnection, FLCommunicationError) as error:
        raise UnreachableError(f"no server answered {user} within {TIMEOUT:g} s; start it, then try again") from error
    try:
        yield opened
    finally:
        opened.close()


def resubmit(opened: Session, job_id: str, folder: Path | None = None, *, abort: bool = False) -> tuple[Verdict, str]:
    """Submits the job ``job_id`` again, or ``folder`` in its place; returns what was found and the new job's id.

    ``abort`` ends a job that runs first: FLARE does not take a site that was restarted back into a running job, a new
    one does. Raises ResubmitError when the job still runs or has finished: there is nothing to resume.
    """
    verdict = judge(opened, job_id)
    if verdict.running and abort:
        opened.abort_job(job_id)
        opened.wait_for_job(job_id, timeout=ABORT_TIMEOUT)
        verdict = judge(opened, job_id)
    if not verdict.resume:
        raise ResubmitError(verdict.finding)
    return verdict, opened.submit_job(str(folder.absolute())) if folder else opened.clone_job(job_id)


def judge(opened: Session, job_id: str) -> Verdict:
    """What became of the job: FLARE's status, checked against what the server runs and what the run itself says."""
    try:
        meta = opened.get_job_meta(job_id)
    except JobNotFound as error:
        raise ResubmitError(f"the server knows no job {job_id}; `nvflare job list` shows what it has") from error
    status, server = meta.get(JobMetaKey.STATUS.value, ""), opened.get_system_info()
    if any(job.job_id == job_id for job in server.job_info):
        hint = "to take back a site that was restarted, give --abort: it continues after the last complete phase"
        return Verdict(False, f"job {job_id} runs ({status}); {hint}", running=True)
    if status in (RunStatus.SUBMITTED.value, RunStatus.APPROVED.value, RunStatus.DISPATCHED.value):
        tried = "".join(f"; {said}" for said in (meta.get(JobMetaKey.SCHEDULE_HISTORY.value) or [])[-1:])
        return Verdict(
            False,
            f"job {job_id} waits to be started ({status}{tried}); FLARE starts it when its sites are there and have "
            "the GPUs that it asks for (in the console: `report_resources client`)",
        )
    if status == RunStatus.RUNNING.value and _began(meta) >= server.server_info.start_time:
        return Verdict(
            False,
            f"job {job_id} has ended at the server; FLARE says how when all of its sites have told that they ended, or "
            "after 15 minutes. Look again then.",
            ending=True,
        )
    if status == RunStatus.RUNNING.value:
        return Verdict(
            True,
            f"job {job_id} says RUNNING, but the server runs no such job: the server died under it. FLARE can neither "
            "abort nor delete it. It does no harm; to clear it, stop the server and remove the folder "
            f"{job_id} from its job storage (uri_root in the server's local/resources.json).",
        )
    run = own_status(opened, job_id)
    if status == RunStatus.FINISHED_COMPLETED.value or run.get("status") == FINISHED:
        return Verdict(
            False, f"job {job_id} is {status} and its run has finished: the results are complete", complete=True
        )
    if run:
        why = f" The run says: {run.get('cause') or run['status']}. {run['reason']}"
    elif status == RunStatus.FINISHED_ABORTED.value:
        why = ""
    else:
        why = " " + NO_WORD
    aborted = status == RunStatus.FINISHED_ABORTED.value and run.get("status") not in BY_ITSELF
    return Verdict(True, f"job {job_id} is {status}.{why}", aborted=aborted)


def _began(meta: dict[str, Any]) -> float:
    """When the job was started, in seconds since 1970; 0 where FLARE does not say.

    A server that was started after the job is another one than the job had: it knows nothing of it, and will not say
    how it ended. The same server will; meanwhile it calls the job running, although no process of it is left, and the
    run may be complete: submitted again, it would begin anew.
    """
    began = meta.get(JobMetaKey.START_TIME.value)
    return datetime.fromisoformat(began).timestamp() if began else 0.0


def own_status(opened: Session, job_id: str) -> dict[str, Any]:
    """The run's own ``run_status.json`` out of the job's results; empty when there is none.

    Raises UnreachableError when the server goes while they are downloaded: FLARE has a bare RuntimeError for that.
    """
    with TemporaryDirectory() as folder:
        try:
            return read_status(Path(opened.download_job_result(job_id, folder)))
        except RuntimeError as error:
            raise UnreachableError(f"the results of job {job_id} did not arrive ({error}); try again") from error


def job_status(opened: Session, job_id: str) -> tuple[dict[str, Any], bool]:
    """The status of a job's run as it is now, or as it ended, and whether the server runs the job.

    It is empty where a run has told nothing yet. Raises ResubmitError for a job that the server does not know, and for
    one that does not run and has no results: it waits, ends, or left no word.
    """
    verdict = judge(opened, job_id)
    if verdict.running:
        with suppress(JobNotRunning, JobNotFound):  # it has just ended
            told = (opened.show_stats(job_id, "server") or {}).get("server", {}).get("progress", {})
            return (dict(told) if told else {}), True
    with suppress(JobNotDone):
        if told := own_status(opened, job_id):
            return told, False
    raise ResubmitError(verdict.finding)


def all_jobs(opened: Session) -> dict[str, dict[str, Any]]:
    """Every job of the server by name and id, the newest first, as ``fedvlp jobs board`` shows it.

    What a job that has ended says of itself is in its results, which are not fetched: `fedvlp jobs status` does.
    """
    jobs = {}
    for job in reversed(opened.list_jobs()):
        status = job.get(JobMetaKey.STATUS.value, "")
        told: dict[str, Any] = {"status": RUNNING, "summary": status}
        if status == RunStatus.FINISHED_COMPLETED.value:
            told["status"] = FINISHED
        elif status.startswith("FINISHED"):
            told = {"status": status, "summary": f"{status}; why: fedvlp jobs status {job['job_id']} --kit KIT"}
        if status == RunStatus.RUNNING.value:
            with suppress(JobNotRunning, JobNotFound):
                told = (opened.show_stats(job["job_id"], "server") or {}).get("server", {}).get("progress") or told
        jobs[f"{job.get('job_name', '')} {job['job_id']}"] = told
    return jobs


def read_status(folder: Path) -> dict[str, Any]:
    """The ``run_status.json`` of a run's folder, or somewhere in a downloaded job; empty when there is none."""
    for file in sorted(folder.rglob(STATUS_FILE)):
        status: dict[str, Any] = read_json(file)
        return status
    return {}
