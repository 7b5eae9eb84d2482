"""The server's side of FLARE: sends the messages of the round loop as tasks. No line here knows a method's name."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client as FLClient
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.job_def import ALL_SITES, SERVER_SITE_NAME, JobMetaKey
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.utils.memory_utils import cleanup_memory
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector
from nvflare.widgets.widget import WidgetID

from fedvlp.core.checkpoint import CheckpointError
from fedvlp.core.method import Method
from fedvlp.core.tensor_file import PARK_BYTES
from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply, State, total_size
from fedvlp.core.validate import is_number, require
from fedvlp.deploy.site_config import accepts_phi_risk, at_server, is_server, with_own_towers
from fedvlp.federation.loop import Federation, QuorumLostError, Rounds
from fedvlp.federation.site import reason
from fedvlp.flare import messages
from fedvlp.flare.curves import only_figures
from fedvlp.flare.job_failures import hear
from fedvlp.flare.paths import refuse_split_workspace, runs_root
from fedvlp.flare.tensor_stream import MAPPED_BYTES_SMALL, PieceDecomposer, UndeliveredError, return_freed_memory
from fedvlp.flare.tracking import RUN_FOLDER, announce_record
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import identity
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.lock import only_writer
from fedvlp.run.metrics import Record
from fedvlp.run.status import ABORTED, FINISHED, STOPPED, in_words, rounded
from fedvlp.run.status_writer import RunStatus, write_end
from fedvlp.training.local_training import Aborted

RESUME = "Submit the job again: it resumes after the last complete phase."
ABORTED_BY_HAND = (
    "Somebody aborted the job or shut the server down, whom the server's audit.log names; if it names nobody, a site "
    f"did not start the job. {RESUME}"
)

SHORT_GRACE = 10.0
"""Seconds after the quorum for a site that the last phase was without. One that is up fetches its task within two."""

LAST_ONE_ENDS = 30.0
"""Seconds that a job waits for the process of the job before it, which ends soon after its server did."""


class SentOnce(list[ClientTask]):
    """FLARE's list of the sites that were sent a task, without repetitions.

    FLARE lists a site again when it fetches its task a second time (it lost the first copy, or was restarted) while
    tasks of other sites wait behind it. Its monitor, which enforces every time limit, dies of the second entry.
    """

    def append(self, client_task: ClientTask) -> None:
        if client_task not in self:
            super().append(client_task)


class FederatedController(Controller):
    """Runs an experiment over FLARE's sites: checkpoints after every phase, resumes where a stopped run ended.

    ``experiment`` are the fields of ``presets.Experiment``. ``task_timeout`` seconds bound every task; once the valid
    replies make the quorum, the others get ``grace`` seconds more. Raises ValueError for values that bound nothing.
    """

    def __init__(
        self,
        task_timeout: int = 3600,
        grace: float = 60.0,
        task_check_period: float = 0.05,
        **experiment: Any,
    ) -> None:
        require(
            type(task_timeout) is int and task_timeout > 0,
            f"task_timeout is {task_timeout!r}; it takes whole seconds, at least 1, e.g. 7200",
        )
        require(is_number(grace) and 0 <= grace < math.inf, f"grace is {grace!r}; it takes seconds, 0 or more, e.g. 60")
        require(
            is_number(task_check_period) and 0 < task_check_period < math.inf,
            f"task_check_period is {task_check_period!r}; it takes seconds above 0, e.g. 0.05",
        )
        refuse_split_workspace()
        super().__init__(task_check_period=task_check_period)
        self.experiment = Experiment(**experiment)
        self.task_timeout = task_timeout
        self.grace = grace
        self._status: RunStatus | None = None  # of the run, once its folder is known
        self._abort: Signal = Signal()
        self._fl_ctx: FLContext | None = None
        self._run: dict[str, str] = {}
        self._ended_by_flare: tuple[str, str] | None = None  # the cause, and the site that it is for, if it is one
        self._spool: Path | None = None
        self._federation: Federation | None = None
        self._silent: set[str] = set()  # sites that gave no reply in the last phase, of those that this job asked
        self._quorum_took = 0.0  # seconds, in the phase that was last asked for
        self._tensors = PieceDecomposer(at_server=True)

    def start_controller(self, fl_ctx: FLContext) -> None:
        messages.register(self._tensors)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        self.cancel_all_tasks()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            only_figures(fl_ctx.get_engine())
            hear(fl_ctx.get_engine(), self._flare_ends)
        if event_type == EventType.FATAL_SYSTEM_ERROR:
            said = fl_ctx.get_prop(FLContextKey.EVENT_DATA)
            self._flare_ends(said if isinstance(said, str) else "the server's log says why")
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if isinstance(collector, GroupInfoCollector):
                collector.add_info("progress", self._status.content() if self._status else {})

    def _flare_ends(self, cause: str, site: str = "") -> None:
        """Notes the first cause for which FLARE ends the job."""
        if self._ended_by_flare is None:
            self._ended_by_flare = cause, site
            self.logger.error("FLARE ends the job: %s", cause)
            if self._status:
                self._status.ends(cause, site)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """FLARE's entry: finds the run's folder and holds it for this job; a run that cannot begin is a panic."""
        self._abort, self._fl_ctx = abort_signal, fl_ctx
        root = runs_root(fl_ctx)
        try:
            self.experiment.refuse_unpinned()
            folder = self._finished_before(root, fl_ctx) or RunFolder.open(root, self.experiment)
            with only_writer(folder.path, LAST_ONE_ENDS):
                self._conduct(folder, root, fl_ctx)
        except (ValueError, CheckpointError) as error:
            self.system_panic(reason(error), fl_ctx)

    def _finished_before(self, root: Path, fl_ctx: FLContext) -> RunFolder | None:
        """The run that this job was cloned to resume, where that has finished meanwhile, or None.

        FLARE calls a job running for some time after its end. If its server is restarted then, the job looks as if the
        server had died under it, and `fedvlp jobs` clones it. To begin anew would train a complete run once more.
        """
        if not job_meta(fl_ctx).get(JobMetaKey.CLONED_FROM.value):
            return None
        folder = RunFolder.newest(root, self.experiment)
        return folder if folder and folder.finished else None

    def _conduct(self, folder: RunFolder, root: Path, fl_ctx: FLContext) -> None:
        """The run, from its beginning or from where it was stopped; says how it ended."""
        # 1. What every task says of the run, and who else must know its folder.
        self._spool = folder.path / "spool"
        fl_ctx.set_prop(RUN_FOLDER, str(folder.path), private=True, sticky=True)
        self._run = identity(self.experiment, str(folder.path.relative_to(root)))
        if folder.id:
            self._run["id"] = folder.id

        # 2. A clone of a job whose run has finished meanwhile has nothing to do.
        if folder.finished:
            write_end(folder.status_file, FINISHED, known=folder.status())
            said = f"run {folder.path} has finished, and this job is a clone to resume it: nothing is trained"
            self.log_info(fl_ctx, f"{said}. To run it once more, submit the job's folder")
            return

        # 3. The rounds, and how they ended: in the run's status, and for FLARE as a panic unless somebody aborted.
        self._status = status = RunStatus(folder.status_file, lambda: time.monotonic())
        if self._ended_by_flare:  # while the job began
            status.ends(*self._ended_by_flare)
        status.note()
        try:
            self._federate(folder, status)
            status.end(FINISHED)
        except (Aborted, QuorumLostError) as stop:
            # FLARE ends a job at the sites first. That all of them fail then is no cause of its own.
            if self._ended_by_flare:
                status.end(STOPPED, RESUME)
            elif isinstance(stop, Aborted):
                status.end(ABORTED, ABORTED_BY_HAND)
            else:
                status.end(STOPPED, str(stop))
                self.system_panic(f"{stop} Submit the same job again to resume {folder.path.name}.", fl_ctx)
        except Exception as error:
            status.fail(error)
            self.log_exception(fl_ctx, f"run {folder.path.name} failed")  # FLARE's secure logging decides what it shows
            self.system_panic(reason(error), fl_ctx)

    def _federate(self, folder: RunFolder, status: RunStatus) -> None:
        """Runs the round loop to its end and writes the model."""
        # 1. The server's own part: its towers, its consents, its public records.
        fl_ctx, experiment = self._fl_ctx, self.experiment
        assert fl_ctx is not None
        local = Path(fl_ctx.get_engine().get_workspace().get_site_config_dir()).absolute()
        if is_server(local.parent):  # a job names towers and no path of the server
            self.experiment = experiment = with_own_towers(experiment, local.parent)
        assembly = Assembly(at_server(experiment, local), accept_phi_risk=accepts_phi_risk(local))
        if experiment.method.uses_public:
            assembly.gate()

        # 2. The run as it was left, or a new one, and who is here for it.
        resumed = folder.checkpoint.exists()
        names = sorted(client.name for client in fl_ctx.get_engine().get_clients())
        server, next_phase = assembly.open(folder, tuple(names))
        self._note_attendance(server.sites, names, status, fl_ctx)

        # 3. Room for models, and an end when FLARE wants one.
        del assembly  # and the untrained model with it, unless the server trains
        if self._spool and total_size(server.state) > PARK_BYTES:
            self._tensors.spool_to(self._spool)
        elif not server.trainer:  # whose every step would map and unmap its tensors
            return_freed_memory(MAPPED_BYTES_SMALL)
        if server.trainer:
            server.trainer.stop_when(lambda: self._abort.triggered)
        said = f"resumes at round {server.round}" if resumed else "begins"
        self.log_info(fl_ctx, f"run {folder.path} {said}: {experiment.name}, sites {', '.join(server.sites)}")

        # 4. The rounds, whose messages travel by FLARE.
        method, rounds = self._method(), self._rounds()
        status.begin(method, rounds, server, next_phase)
        folder.note_all(server.history)

        def report(record: dict[str, Any]) -> None:
            folder.note(record)
            announce_record(self, fl_ctx, record)
            self._tell(status, record)
            if self._tensors.root:
                server.spare = {}  # room for a model that the next transfers may need
            cleanup_memory()  # FLARE's transfers leave cycles that hold their bytes

        self._federation = federation = Federation(
            method,
            server,
            rounds,
            status.watched(self._exchange),
            wire=experiment.wire,
            checkpoint=folder.checkpoint,
            report=report,
            present=names,
        )
        state = federation.run(next_phase)
        self._finish(folder, state, server.history)

    def _note_attendance(self, sites: Sequence[str], here: Sequence[str], status: RunStatus, fl_ctx: FLContext) -> None:
        """Says which sites of the job or of its run are not ``here``, and which are no ``sites`` of the run.

        Raises QuorumLostError where too few of the run's sites are here, rather than wait for them in vain.
        """
        absent = sorted((deployed(job_meta(fl_ctx)) | set(sites)) - set(here))
        strangers = sorted(set(here) - set(sites))
        status.attend(absent, strangers)
        needed, there = self._rounds().needed(len(sites)), len(set(sites) & set(here))
        if there < needed:
            raise QuorumLostError(
                f"run {self._run['folder']} continues with the sites that it began with, {', '.join(sites)}: {there} "
                f"of them are here, {needed} needed. Absent: {', '.join(absent)}; here: {', '.join(here)}. Start the "
                f"absent ones; for a new run of other sites, move {self._run['folder']} out of the server's runs."
            )
        if absent:
            self.log_warning(fl_ctx, f"not here, though the job or its run names them: {', '.join(absent)}")
        if strangers:
            self.log_warning(fl_ctx, f"not asked, as the run began without them: {', '.join(strangers)}")

    def _method(self) -> Method:
        """Whose server half is run."""
        return self.experiment.method

    def _rounds(self) -> Rounds:
        """How long the run is, and what it tolerates."""
        return self.experiment.rounds

    def _finish(self, folder: RunFolder, state: State, history: list[Record]) -> None:
        """Writes the results of the run."""
        folder.finish(self.experiment, state, history)
        assert self._fl_ctx is not None
        self.log_info(self._fl_ctx, f"trained model: {folder.model}")

    def _tell(self, status: RunStatus, record: Record) -> None:
        """A phase is complete: the file, the log, and ``show_errors`` of FLARE's console say who was missing in it."""
        assert self._fl_ctx is not None
        status.add(record)
        self.log_info(self._fl_ctx, "; ".join(in_words(status.content())))
        collector = self._fl_ctx.get_engine().get_widget(WidgetID.INFO_COLLECTOR)
        for site, why in record["dropped"].items():
            said = f"{site} dropped in round {record['round']}, {record['phase']}: {rounded(why)}"
            self.log_warning(self._fl_ctx, said, fire_event=False)
            if isinstance(collector, InfoCollector):
                collector.add_error("sites", site, said)

    def _exchange(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        """Sends every site its task and yields the replies as they come; the federation says which ones are valid.

        Sites that are asked again in a phase whose quorum holds have as much time as that took, and the grace. One that
        gave no reply in the last phase has ``SHORT_GRACE`` of it to fetch its task: a site that is down fetches none,
        and every later phase would wait for it. Once it has fetched one, it has the whole grace again.
        """
        # 1. A task for every site; its callbacks put the reply into a queue.
        arrived: queue.Queue[tuple[str, Reply]] = queue.Queue()
        tasks = {site: self._task(site, message, arrived) for site, message in messages.items()}
        for site, task in tasks.items():
            self.send(task, self._fl_ctx, targets=[site])

        # 2. The replies as they come, until all are here or the grace after the quorum is over.
        waiting, lost = set(tasks), set[str]()
        assert self._federation is not None
        began = time.monotonic()
        quorum = math.inf if self._federation.missing() > 0 else began + self._quorum_took
        try:
            while waiting:
                if self._abort.triggered:
                    raise Aborted("the job was aborted")
                self._tensors.tidy()
                down = all(site in self._silent and not tasks[site].client_tasks for site in waiting)
                grace = min(self.grace, SHORT_GRACE) if down else self.grace
                over = time.monotonic() >= quorum + grace
                try:  # what came while the federation was busy with another reply came in time
                    site, reply = arrived.get_nowait() if over else arrived.get(timeout=0.1)
                except queue.Empty:
                    if over:
                        break
                    continue
                if site not in waiting:
                    continue
                came = time.monotonic()
                waiting.remove(site)
                lost |= {site} if isinstance(reply, Failure) and reply.kind == FailureKind.LOST else set()
                yield site, reply
                del reply  # one is resident at a time
                if quorum == math.inf and self._federation.missing() <= 0:
                    self._quorum_took = came - began
                    quorum = came
        finally:
            # 3. The tasks of sites that are late end, also when the run does.
            for site in waiting:
                self.cancel_task(tasks[site], fl_ctx=self._fl_ctx)
        self._silent = (self._silent - messages.keys()) | lost | waiting
        for site in sorted(waiting):
            yield site, Failure(FailureKind.LOST, f"no reply within {grace:g} s of the quorum")

    def _task(self, site: str, message: Broadcast, arrived: queue.Queue[tuple[str, Reply]]) -> Task:
        """One site's task. Its callbacks run under FLARE's lock, so they only pass the reply on."""

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            result, client_task.result = client_task.result, None
            arrived.put((site, self._reply(result, site)))

        def done(task: Task, fl_ctx: FLContext) -> None:
            if task.completion_status != TaskCompletionStatus.OK:
                why = {
                    TaskCompletionStatus.TIMEOUT: f"no reply within the task's {self.task_timeout} s",
                    TaskCompletionStatus.CLIENT_DEAD: "its FLARE process died, or the server cannot reach it",
                }.get(task.completion_status, f"task ended as {task.completion_status}")
                arrived.put((site, Failure(FailureKind.LOST, why)))

        task = Task(
            name=message.phase,
            data=messages.send_broadcast(message, self._run),
            timeout=self.task_timeout,
            result_received_cb=received,
            task_done_cb=done,
        )
        task.client_tasks = SentOnce()
        return task

    @staticmethod
    def _reply(result: Shareable, site: str) -> Reply:
        try:
            return messages.failure(result) or messages.receive_update(result, site)
        except UndeliveredError as error:
            return Failure(FailureKind.LOST, str(error))
        except Exception as error:  # garbage may be wrong in any way, and FLARE swallows what a callback raises
            text = f"unreadable reply: {type(error).__name__}; site and server must run one fedvlp"
            return Failure(FailureKind.UNREADABLE, text)

    def process_result_of_unknown_task(
        self, client: FLClient, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.log_info(fl_ctx, f"late reply of {client.name} to {task_name} dropped")


def job_meta(fl_ctx: FLContext) -> dict[str, Any]:
    """FLARE's description of the job that this process runs; empty where it gives none."""
    meta: dict[str, Any] = fl_ctx.get_prop(FLContextKey.JOB_META) or {}
    return meta


def deployed(meta: Mapping[str, Any]) -> set[str]:
    """The sites that a job names; none where it is for all."""
    named = (meta.get(JobMetaKey.DEPLOY_MAP.value) or {}).values()
    return {name for names in named for name in names if isinstance(name, str)} - {SERVER_SITE_NAME, ALL_SITES}
