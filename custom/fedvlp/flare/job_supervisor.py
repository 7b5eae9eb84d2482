"""Following a job to its end, whatever dies on the way: what a person would do by hand with ``jobs resubmit``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from nvflare.apis.job_def import JobMetaKey
from nvflare.fuel.flare_api.api_spec import (
    InternalError,
    JobNotDone,
    JobNotRunning,
    JobTimeout,
    NoClientsAvailable,
    NoConnection,
    NoReply,
    SessionClosed,
)
from nvflare.fuel.flare_api.flare_api import Session
from nvflare.fuel.hci.proto import MetaKey, MetaStatusValue

from fedvlp.flare.job_status import ResubmitError, UnreachableError, Verdict, judge, resubmit, session

NAME, SILENT = MetaKey.CLIENT_NAME, (MetaStatusValue.NO_REPLY, MetaStatusValue.ERROR)
DOWN = (UnreachableError, NoConnection, SessionClosed)
"""How FLARE says that a server is down, or comes up."""
PASSING = (*DOWN, InternalError, JobNotDone, NoClientsAvailable, NoReply)
"""Those, and what a server answers that has no site yet or is busy: all of it passes."""


class GaveUpError(ValueError):
    """The job is followed no more, although it has not ended; the message says which job, why, and what to do."""


def supervise(
    kit: Path, job_id: str, say: Callable[[str], None], *, attempts: int, every: float, patience: float
) -> Verdict:
    """Looks at the job ``every`` seconds and submits it again when it ended early, its server died or a site is back.

    Such a finding must stay the same for ``patience`` seconds: FLARE calls a job running a while after its processes
    have gone. A server that does not answer is waited for. Returns the last verdict: the results are complete, somebody
    aborted the job, or it was submitted again ``attempts`` times and ended early once more. Its ``finding`` says which.
    Raises GaveUpError for anything else that ends this, an error that is not known to pass.
    """
    following = Following(job_id, say, attempts, patience)
    while True:
        try:
            with session(kit) as opened:
                while (end := following.look(opened)) is None:
                    time.sleep(every)
                return end
        except PASSING as error:
            following.wait(error)
            time.sleep(every)
        except Exception as error:
            why = str(error) if isinstance(error, ResubmitError) else f"{type(error).__name__}: {error}"
            job = following.job_id
            raise GaveUpError(
                f"gave up following job {job}: {why}; to resume: fedvlp jobs keep {job} --kit {kit}"
            ) from error


@dataclass
class Following:
    """What is remembered from look to look: the job of now, and since when it is in which trouble."""

    job_id: str
    say: Callable[[str], None]
    attempts: int
    patience: float
    trouble: str = ""
    since: float = 0.0
    ended: str = ""  # the last job that was submitted again, which this itself may have aborted
    waits: str = ""  # what was said of a server that does not answer; empty while it does
    told: set[str] = field(default_factory=set)  # what is said once

    def look(self, opened: Session) -> Verdict | None:
        """One look at the job; a verdict if it is the last one."""
        end = self._judged(opened, judge(opened, self.job_id))
        self.waits = ""  # now: a look may break off at any of its questions
        return end

    def _judged(self, opened: Session, verdict: Verdict) -> Verdict | None:
        """What follows from the verdict on the job."""
        if verdict.complete:
            return verdict
        if verdict.aborted and self.ended != self.job_id:
            return _given_up(verdict, "somebody aborted it")
        if verdict.ending:
            self._tell(verdict.finding)
        problem = finding(opened, self.job_id, verdict)
        if problem != self.trouble:
            self.trouble, self.since = problem, time.monotonic()
        elif problem and time.monotonic() - self.since >= self.patience:
            return self._act(opened, verdict, problem)
        return None

    def _act(self, opened: Session, verdict: Verdict, problem: str) -> Verdict | None:
        """Submits the job again; without an attempt left only a job that still runs is followed on."""
        if self.attempts:
            self.trouble, self.ended = "", self.job_id
            self.job_id = again(opened, self.job_id)
            self.attempts -= 1  # now: what the server did not answer is no attempt
            self.say(problem if self.ended == self.job_id else f"{problem}\nsubmitted again as {self.job_id}")
        elif verdict.resume:
            return _given_up(verdict, "it was submitted again as often as --attempts allows")
        else:
            self._tell(f"{problem}; it is left to run, as --attempts allows no more")
        return None

    def _tell(self, words: str) -> None:
        """Says it, unless it was said."""
        if words not in self.told:
            self.told.add(words)
            self.say(words)

    def wait(self, error: Exception) -> None:
        """Says once why there is nothing to see now."""
        down = "the server does not answer; waiting for it"
        words = down if isinstance(error, DOWN) else f"the server answers {type(error).__name__}: {error}; asking again"
        if words != self.waits:
            self.say(words)
        self.waits = words


def _given_up(verdict: Verdict, why: str) -> Verdict:
    return replace(verdict, finding=f"{verdict.finding} Gave up: {why}.")


def finding(opened: Session, job_id: str, verdict: Verdict) -> str:
    """Why the job is to be submitted again; empty when it is not."""
    if verdict.resume:
        return verdict.finding
    back = returned(opened, job_id) if verdict.running else []
    return f"job {job_id} continues without {', '.join(back)}, which came back" if back else ""


def returned(opened: Session, job_id: str) -> list[str]:
    """Sites that were given this job and answer, but run it no more, although another does: they were started anew.

    Where no site runs it, it is ending: FLARE tells the sites first, and the server's process runs until the results
    are in place. If all sites were started anew, their tasks time out and the job ends early.
    """
    deployed = opened.get_job_meta(job_id).get(JobMetaKey.JOB_DEPLOY_DETAIL.value) or []
    said = opened.get_client_job_status() or []
    answer = {entry[NAME] for entry in said if entry[MetaKey.STATUS] not in SILENT}
    runs = {entry[NAME] for entry in said if entry.get(MetaKey.JOB_ID) == job_id}
    return sorted((answer - runs) & {entry.removesuffix(": OK") for entry in deployed}) if runs else []


def again(opened: Session, job_id: str) -> str:
    """Submits the job again; one that has ended well meanwhile stays. Returns the id of the job to follow.

    A copy that is under way is followed, and no second one made: the server may have died, or have been too slow, after
    it had made the first one and before it said so. Two copies would keep each other from the run.
    """
    if copies := under_way(opened, job_id):
        return copies[-1]
    try:
        return resubmit(opened, job_id, abort=True)[1]
    except UnreachableError:
        raise  # waited for, as everywhere
    except (ResubmitError, JobNotRunning, JobTimeout):  # it ended just now, or takes longer to end: the next look tells
        return job_id


def under_way(opened: Session, job_id: str) -> list[str]:
    """The copies of the job that have not ended, the newest last."""
    return [
        meta[JobMetaKey.JOB_ID.value]
        for meta in opened.list_jobs(detailed=True)
        if meta.get(JobMetaKey.CLONED_FROM.value) == job_id
        and not meta.get(JobMetaKey.STATUS.value, "").startswith("FINISHED")
    ]
