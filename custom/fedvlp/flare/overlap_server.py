"""The server's side of counting shared patients: takes messages from site to site, and keeps a table of numbers."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nvflare.apis.client import Client as FLClient
from nvflare.apis.controller_spec import ClientTask, TaskCompletionStatus
from nvflare.apis.controller_spec import Task as FLTask
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedvlp.core.checkpoint import save_json
from fedvlp.core.types import Failure, FailureKind
from fedvlp.core.validate import require, require_name
from fedvlp.deploy.overlap import OverlapError, pairs_of
from fedvlp.federation.site import reason
from fedvlp.flare import messages
from fedvlp.flare.curves import only_figures
from fedvlp.flare.overlap_messages import (
    COUNT,
    PREPARE,
    REQUEST,
    RESPONSE,
    SETUP,
    TASK,
    Answer,
    Count,
    Sealed,
    Size,
    Task,
    read_answer,
    to_task,
)
from fedvlp.flare.paths import SIMULATED, runs_root
from fedvlp.flare.results import HOME
from fedvlp.run.status import ABORTED, FINISHED, STOPPED
from fedvlp.run.status import FILE as STATUS_FILE
from fedvlp.run.status_writer import write_end
from fedvlp.training.loop import Aborted

FILE = "overlap.json"

Reply = Answer | Failure
Ask = Callable[[Mapping[str, Task]], Mapping[str, Reply]]
"""Sends each site its task and brings its answer, or why there is none."""


@dataclass(frozen=True)
class Pair:
    """How many patients two sites share: a number; ``fewer`` than that number, or that or ``more``; or not known.

    Then for that ``reason``.
    """

    first: str
    second: str
    shared: int | None = None
    fewer: bool = False
    reason: str = ""
    more: bool = False


@dataclass
class OverlapTable:
    """All that a job brings."""

    patients: dict[str, int] = field(default_factory=dict)  # of each site that took part
    refused: dict[str, str] = field(default_factory=dict)  # site: why it took no part
    pairs: list[Pair] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every two sites of the job were counted."""
        return not self.refused and all(pair.shared is not None for pair in self.pairs)

    def in_words(self) -> list[str]:
        """A line for each pair, and for each site that took no part."""
        lines = [f"{site} took no part: {why}" for site, why in sorted(self.refused.items())]
        for pair in self.pairs:
            both = f"{pair.first} and {pair.second}"
            if pair.shared is None:
                lines.append(f"{both} were not counted: {pair.reason}")
                continue
            of = " / ".join(str(self.patients[site]) for site in (pair.first, pair.second))
            bound = "fewer than " * pair.fewer + "at least " * pair.more
            lines.append(f"{both} share {bound}{pair.shared} of {of} patients")
        return lines

    def save(self, file: Path) -> None:
        """Writes the table as JSON."""
        save_json(file, asdict(self))


def read_table(folder: Path) -> OverlapTable:
    """The table in a job's results, wherever it lies in them. Raises ValueError where there is none."""
    for file in sorted(folder.rglob(FILE)):
        content = json.loads(file.read_text(encoding="utf-8"))
        pairs = [Pair(**pair) for pair in content["pairs"]]
        return OverlapTable(content["patients"], content["refused"], pairs)
    raise ValueError(f"{folder} holds no {FILE}: no job that counted patients, or one that never ended")


def count_pairs(sites: Sequence[str], ask: Ask, save: Callable[[OverlapTable], None] = lambda _: None) -> OverlapTable:
    """Counts for every two of ``sites``; ``save`` is called with the table after each pair.

    A site that refuses is named and left out; so is a pair of which one site fails.
    """
    table = OverlapTable()
    for site, reply in sorted(ask({site: Task(PREPARE) for site in sites}).items()):
        if isinstance(reply, Size):
            table.patients[site] = reply.patients
        else:
            table.refused[site] = _why_not(reply)
    for first, second in pairs_of(list(table.patients)):
        pair = _pair(first, second, table.patients[second], ask)
        if not pair.fewer and (pair.shared or 0) > min(table.patients[first], table.patients[second]):
            pair = Pair(first, second, reason=f"{second}: says that more are shared than there are")
        table.pairs.append(pair)
        save(table)
    return table


def _pair(first: str, second: str, patients: int, ask: Ask) -> Pair:
    """Four tasks, to one site and the other in turn; each but the first brings what the other answered."""
    message: Sealed | None = None
    for stage, site, peer in ((SETUP, first, second), (REQUEST, second, first), (RESPONSE, first, second)):
        reply = ask({site: Task(stage, peer, patients, message)})[site]
        if not (isinstance(reply, Sealed) and reply.stage == stage):
            return Pair(first, second, reason=f"{site}: {_why_not(reply)}")
        message = reply
    reply = ask({second: Task(COUNT, first, message=message)})[second]
    if not isinstance(reply, Count):
        return Pair(first, second, reason=f"{second}: {_why_not(reply)}")
    return Pair(first, second, reply.shared, reply.fewer, more=reply.more)


def _why_not(reply: Reply) -> str:
    return reply.text if isinstance(reply, Failure) else "answered with a message of another stage"


class OverlapController(Controller):
    """Counts the patients that every two of ``sites`` share, and writes ``overlap.json``: numbers, names of sites.

    ``name`` is that of the job. A site that does not answer within ``task_timeout`` seconds is named and left out.
    """

    def __init__(self, name: str, sites: Sequence[str], task_timeout: int = 3600) -> None:
        super().__init__(task_check_period=0.05)
        require_name("the name of the job", name)
        require(len(set(sites)) >= 2, "patients are counted between two sites or more; name them with --at")
        self.run_name = name  # FLARE's components have a name of their own
        self.sites = tuple(sites)
        self.task_timeout = task_timeout
        self._abort = Signal()
        self._fl_ctx: FLContext | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            only_figures(fl_ctx.get_engine())

    def start_controller(self, fl_ctx: FLContext) -> None:
        """FLARE's hook; nothing is needed."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        self.cancel_all_tasks()

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        self._abort, self._fl_ctx = abort_signal, fl_ctx
        file = self._folder(fl_ctx) / FILE
        here = {client.name for client in fl_ctx.get_engine().get_clients()}
        try:
            table = count_pairs(self.sites, lambda tasks: self._ask(tasks, here), lambda table: table.save(file))
            self._ended(table, file, fl_ctx)
        except Aborted as stop:
            write_end(file.with_name(STATUS_FILE), ABORTED, str(stop))
        except Exception as error:
            self.system_panic(f"no patients counted: {reason(error)}", fl_ctx)

    def _ended(self, table: OverlapTable, file: Path, fl_ctx: FLContext) -> None:
        table.save(file)
        for line in table.in_words():
            self.log_info(fl_ctx, line)
        if table.complete:
            write_end(file.with_name(STATUS_FILE), FINISHED)
        else:
            write_end(file.with_name(STATUS_FILE), STOPPED, "not every two sites were counted")
        if not table.pairs:
            self.system_panic(f"no patients counted: {'; '.join(table.in_words())}", fl_ctx)

    def _folder(self, fl_ctx: FLContext) -> Path:
        """In the job's own folder, which is downloaded; in a simulation beside FLARE's, which it empties."""
        if fl_ctx.get_job_id() != SIMULATED:
            return Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id())) / HOME
        root = runs_root(fl_ctx) / self.run_name
        root.mkdir(parents=True, exist_ok=True)
        taken = [int(entry.name) for entry in root.iterdir() if entry.name.isdigit()]
        folder = root / f"{max(taken, default=0) + 1:03d}"
        folder.mkdir()
        return folder

    def _ask(self, tasks: Mapping[str, Task], here: Iterable[str]) -> dict[str, Reply]:
        replies: dict[str, Reply] = {site: Failure(FailureKind.LOST, "not in this job") for site in tasks}
        arrived: queue.Queue[tuple[str, Reply]] = queue.Queue()
        waiting = {site for site in tasks if site in here}
        for site in waiting:
            replies[site] = Failure(FailureKind.LOST, f"no answer within {self.task_timeout} s")
            self.send(self._task(site, tasks[site], arrived), self._fl_ctx, targets=[site])
        deadline = time.monotonic() + self.task_timeout + 60.0  # FLARE's own limit is first
        while waiting and time.monotonic() < deadline and not self._abort.triggered:
            try:
                site, reply = arrived.get(timeout=0.1)
            except queue.Empty:
                continue
            if site in waiting:
                waiting.remove(site)
                replies[site] = reply
        if self._abort.triggered:
            raise Aborted("the job was aborted")
        return replies

    def _task(self, site: str, task: Task, arrived: queue.Queue[tuple[str, Reply]]) -> FLTask:
        """One site's task. Its callbacks run under FLARE's lock, so they only pass the reply on."""

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            result, client_task.result = client_task.result, None
            arrived.put((site, read_reply(result)))

        def done(ended: FLTask, fl_ctx: FLContext) -> None:
            if ended.completion_status != TaskCompletionStatus.OK:
                arrived.put((site, Failure(FailureKind.LOST, f"task ended as {ended.completion_status}")))

        return FLTask(
            name=TASK,
            data=to_task(task),
            timeout=self.task_timeout,
            result_received_cb=received,
            task_done_cb=done,
        )

    def process_result_of_unknown_task(
        self, client: FLClient, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.log_info(fl_ctx, f"late reply of {client.name} dropped")


def read_reply(result: Shareable) -> Reply:
    """What a site answered, or why not. Raises nothing, whatever the site sent."""
    try:
        return messages.failure(result) or read_answer(result)
    except OverlapError as error:
        return Failure(FailureKind.UNREADABLE, str(error))
    except Exception as error:
        return Failure(FailureKind.UNREADABLE, f"unreadable reply: {type(error).__name__}")
