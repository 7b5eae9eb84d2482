"""A site's side of counting shared patients: FLARE's private set intersection over keyed hashes of its patients.

FLARE's own handler of these tasks (``DhPSITaskHandler``) is not used: it writes the intersection to a file at the site,
names duplicates in errors, and goes on with all items where the intersection is empty.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.sec.audit import AuditService

from fedvlp.data.patients import keyed, patient_names
from fedvlp.deploy.overlap import Overlap, OverlapError, note_job, read_key
from fedvlp.deploy.site_config import NamedData, is_provisioned, overlap_at, own_source
from fedvlp.federation.site import reason
from fedvlp.flare import messages
from fedvlp.flare.overlap_messages import (
    COUNTED,
    PREPARE,
    REQUEST,
    RESPONSE,
    SETUP,
    Answer,
    Count,
    Sealed,
    Size,
    Task,
    read_task,
    seal,
    to_reply,
)
from fedvlp.flare.paths import SitePaths

if TYPE_CHECKING:
    from fedvlp.flare.psi_ends import CountingClient, CountingServer

NO_SECRET = bytes(32)
"""The key where all sites are one person's machine."""

ACTION = "patients_counted"
"""Of the audit lines."""


class Party:
    """One site in one job: its patients as keyed hashes, and the protocol's ends towards each other site.

    An end is used once: its secret is new for each pair, and is gone with the answer. A task that FLARE sends a second
    time has the same answer once more; any other comes too late.
    """

    def __init__(self, site: str, job: str, names: Sequence[str], rules: Overlap, key: bytes) -> None:
        self.site, self.job, self.rules = site, job, rules
        self.items = keyed(names, _derived(key, "items"))
        self._seal_key = _derived(key, "seal")
        self._servers: dict[str, CountingServer] = {}
        self._clients: dict[str, CountingClient] = {}
        self._begun: set[str] = set()  # sites towards which there was an end in this job
        self._last: tuple[Task, Answer] | None = None
        rules.admit_size(len(self.items), "this site")

    def answer(self, task: Task) -> Answer:
        """The site's part in one stage. Raises OverlapError, and nothing else, where it takes none."""
        if self._last is None or self._last[0] != task:
            self._last = (task, self._answer(task))
        return self._last[1]

    def _answer(self, task: Task) -> Answer:
        if task.stage == PREPARE:
            return Size(len(self.items))
        self.rules.admit_site(task.peer)
        with _only_ours(task.peer):
            if task.stage == SETUP:
                self.rules.admit_size(task.patients, task.peer)
                return self._setup(task.peer, task.patients)
            message = self._opened(task)
            if task.stage == REQUEST:
                return self._request(task.peer, message)
            return self._respond(task.peer, message) if task.stage == RESPONSE else self._count(task.peer, message)

    def _setup(self, peer: str, patients: int) -> Sealed:
        from fedvlp.flare.psi_ends import CountingServer

        self._begin(peer)
        self._servers[peer] = CountingServer(self.items)
        return self._sealed(peer, SETUP, self._servers[peer].setup(patients))

    def _request(self, peer: str, message: Sealed) -> Sealed:
        from fedvlp.flare.psi_ends import CountingClient

        self._begin(peer)
        self._clients[peer] = CountingClient(self.items)
        self._clients[peer].receive_setup(message.content)
        return self._sealed(peer, REQUEST, self._clients[peer].request())

    def _begin(self, peer: str) -> None:
        if peer in self._begun:
            raise OverlapError(f"this site has counted with {peer} in this job; it does once")
        self._begun.add(peer)

    def _respond(self, peer: str, message: Sealed) -> Sealed:
        end = _pop(self._servers, peer)
        return self._sealed(peer, RESPONSE, end.respond(message.content, message.patients))

    def _count(self, peer: str, message: Sealed) -> Count:
        """The number, unless it tells of fewer patients than the stricter of the two sites lets be told.

        A small number does, and so does one that leaves few of the smaller set out: it names nearly all of them.
        """
        shared = _pop(self._clients, peer).count(message.content)
        least = max(self.rules.least_shared, message.least_shared)
        smaller = min(len(self.items), message.patients)
        if smaller < 2 * least:
            raise OverlapError(
                f"the smaller set has {smaller} patients; where fewer than {least} are not told apart (least_shared), "
                f"it needs at least {2 * least}"
            )
        if shared < least:
            return Count(least, smaller, fewer=True)
        if smaller - shared < least:
            return Count(smaller - least + 1, smaller, more=True)
        return Count(shared, smaller)

    def _sealed(self, peer: str, stage: str, content: bytes) -> Sealed:
        message = Sealed(stage, content, len(self.items), self.rules.least_shared, b"")
        return replace(message, seal=seal(self._seal_key, self.job, self.site, peer, message))

    def _opened(self, task: Task) -> Sealed:
        """The peer's message. Raises OverlapError unless that site wrote it, to this one, in this job."""
        message = task.message
        assert message is not None
        expected = seal(self._seal_key, self.job, task.peer, self.site, message)
        if not hmac.compare_digest(expected, message.seal):
            raise OverlapError(
                f"the seal of the message from {task.peer} is wrong: the sites hold different keys, or the server "
                "altered it"
            )
        self.rules.admit_size(message.patients, task.peer)
        return message


def _derived(key: bytes, purpose: str) -> bytes:
    return hmac.new(key, purpose.encode(), hashlib.sha256).digest()


def _pop(ends: dict[str, Any], peer: str) -> Any:
    if peer not in ends:
        raise OverlapError(f"this site did not begin to count with {peer}")
    return ends.pop(peer)


@contextmanager
def _only_ours(peer: str) -> Iterator[None]:
    """Whatever the protocol raises at a message, as an OverlapError that repeats nothing of it."""
    try:
        yield
    except OverlapError:
        raise
    except Exception as error:
        raise OverlapError(f"the message from {peer} is none of the protocol ({type(error).__name__})") from None


class OverlapExecutor(Executor):
    """Counts patients that this site shares with others, if its own ``local/fedvlp.json`` says so. Never trains.

    ``data``: the data set by its name; in a simulation also a source. ``sites``: those of the job.
    """

    def __init__(self, data: Any, sites: Sequence[str]) -> None:
        super().__init__()
        self.data = data
        self.sites = tuple(sites)
        self._party: Party | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        fl_ctx.set_prop(COUNTED, True, private=True, sticky=False)
        stage = ""
        try:
            task = read_task(shareable)
            stage = task.stage
            if task.stage == PREPARE and self._party is None:
                self._party = self._prepared(fl_ctx)
            if self._party is None:
                raise OverlapError(
                    "this site's process was started anew in the middle; in a simulation give -t as many threads as "
                    "there are sites"
                )
            answer = self._party.answer(task)
        except Exception as error:
            self.log_error(fl_ctx, f"no patients counted: {reason(error)}")
            _audit(fl_ctx, f"refused: {reason(error)}")
            return messages.send_failure(error)
        if stage != PREPARE:
            _audit(fl_ctx, f"{stage} with {task.peer}")
        return to_reply(answer)

    def _prepared(self, fl_ctx: FLContext) -> Party:
        """Reads the patients, once a job. Raises OverlapError where the site does not let them be counted."""
        _require_package()
        paths = SitePaths.of(fl_ctx)
        local, job = Path(paths.local), fl_ctx.get_job_id()
        kit = local.parent
        rules, key = overlap_at(kit), NO_SECRET
        if is_provisioned(kit):
            if not isinstance(self.data, NamedData):
                raise OverlapError("the job brings a data set of its own; a site opens only what its own file names")
            rules.admit(self.data.name)
            key = read_key(local)
        else:
            rules = replace(rules, sites=self.sites)
        party = Party(paths.site, job, self._names(paths.site, local, rules.column), rules, key)
        number = len(party.items)
        if is_provisioned(kit):
            nth = note_job(kit, job, self.data.name, number, rules.jobs)
            _audit(fl_ctx, f"{number} patients of data set {self.data.name}, job {nth} of {rules.jobs}")
        return party

    def _names(self, site: str, local: Path, column: str) -> list[str]:
        named = isinstance(self.data, NamedData)
        try:
            source = own_source(self.data, site, local) if named else self.data
            return patient_names(source, None if named else site, column)
        except Exception as error:
            raise OverlapError(
                f"the patients of the data set cannot be read here ({type(error).__name__}); "
                "`fedvlp doctor --site` says why"
            ) from None


def _require_package() -> None:
    try:
        import fedvlp.flare.psi_ends  # noqa: F401
    except ImportError:
        raise OverlapError(
            "the package for private set intersection is missing here: openmined-psi (provisioning/psi.txt)"
        ) from None


def _audit(fl_ctx: FLContext, text: str) -> None:
    job = fl_ctx.get_job_id()
    AuditService.add_event(user=fl_ctx.get_identity_name(), action=ACTION, ref=job, msg=f"job {job} {text}")
