"""Following a job to its end, whatever dies on the way: what a person would do by hand with ``jobs resubmit``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from nvflare.apis.job_def import JobMetaKey
from nvflare.fuel.flare_api.api_spec import InternalError, JobNotRunning, JobTimeout, NoConnection, SessionClosed
from nvflare.fuel.flare_api.flare_api import Session
from nvflare.fuel.hci.proto import MetaKey, MetaStatusValue

from fedvlp.flare.job_status import ResubmitError, UnreachableError, Verdict, judge, resubmit, session

NAME, SILENT = MetaKey.CLIENT_NAME, (MetaStatusValue.NO_REPLY, MetaStatusValue.ERROR)
PASSING = (UnreachableError, NoConnection, SessionClosed, InternalError)
"""What a server that is down, or comes up, answers with."""


def supervise(
    kit: Path, job_id: str, say: Callable[[str], None], *, attempts: int, every: float, patience: float
) -> Verdict:
    """Looks at the job ``every`` seconds and submits it again when it ended early, its server died or a site is back.

    Such a finding must stay the same for ``patience`` seconds: FLARE calls a job running a while after its processes
    have gone. A server that does not answer is waited for. Returns the last verdict: the results are complete, somebody
    aborted the job, or it was submitted again ``attempts`` times and ended early once more.
    """
    trouble, since, answers, ended = "", 0.0, True, ""
    while True:
        try:
            with session(kit) as opened:
                while True:
                    verdict, answers = judge(opened, job_id), True
                    if verdict.complete or (verdict.aborted and ended != job_id):
                        return verdict
                    problem = finding(opened, job_id, verdict)
                    if problem != trouble:
                        trouble, since = problem, time.monotonic()
                    elif problem and time.monotonic() - since >= patience:
                        if not attempts:
                            return verdict
                        attempts, trouble, ended = attempts - 1, "", job_id
                        job_id = again(opened, job_id)
                        say(problem if ended == job_id else f"{problem}\nsubmitted again as {job_id}")
                    time.sleep(every)
        except PASSING:
            if answers:
                say("the server does not answer; waiting for it")
            answers = False
            time.sleep(every)


def finding(opened: Session, job_id: str, verdict: Verdict) -> str:
    """Why the job is to be submitted again; empty when it is not."""
    if verdict.resume:
        return verdict.finding
    back = returned(opened, job_id) if verdict.running else []
    return f"job {job_id} goes on without {', '.join(back)}, which came back" if back else ""


def returned(opened: Session, job_id: str) -> list[str]:
    """Sites that were given this job and answer, but run it no more: they were started anew."""
    deployed = opened.get_job_meta(job_id).get(JobMetaKey.JOB_DEPLOY_DETAIL.value) or []
    said = opened.get_client_job_status() or []
    answer = {entry[NAME] for entry in said if entry[MetaKey.STATUS] not in SILENT}
    runs = {entry[NAME] for entry in said if entry.get(MetaKey.JOB_ID) == job_id}
    return sorted((answer - runs) & {entry.removesuffix(": OK") for entry in deployed})


def again(opened: Session, job_id: str) -> str:
    """Submits the job again; one that has ended well meanwhile stays. Returns the id of the job to follow."""
    try:
        return resubmit(opened, job_id, abort=True)[1]
    except (ResubmitError, JobNotRunning, JobTimeout):  # it ended just now, or takes longer to end: the next look tells
        return job_id
