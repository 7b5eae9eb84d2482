"""FLARE in memory: its own Controller and WFCommServer, one thread, and a clock that moves only when somebody waits.

FLARE's own: scheduling of tasks, fetching, resending, submissions, time limits, dead sites, contexts, events. Faked:
the engine (who the sites are, where their folders lie), the network (a ``Fate`` for every task that a site fetches) and
the time. A site is fedvlp's own executor over the toys of tests/support/toy.py.

Whatever waits (the controller for replies, FLARE's monitor between two passes) lets the clock run, and what falls due
meanwhile happens then: a site asks, trains, answers, dies, comes back. So a run of hours takes milliseconds, and the
same fates give the same run. What this cannot show is a race between two threads of one process.
"""

from __future__ import annotations

import copy
import functools
import heapq
import itertools
import queue
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis import controller_spec
from nvflare.apis.client import Client
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.impl import send_manager, wf_comm_server
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.utils.event import fire_event_to_components
from nvflare.fuel.f3.cellnet.defs import CellChannel, CellChannelTopic
from nvflare.fuel.f3.message import Message
from nvflare.fuel.utils import fobs
from nvflare.private.aux_runner import AuxRunner
from nvflare.private.defs import CellMessageHeaderKeys, JobFailureMsgKey
from nvflare.widgets.info_collector import InfoCollector
from nvflare.widgets.widget import WidgetID
from torch import nn

from fedvlp.core.checkpoint import save_json, save_tensors
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, Reply, Update
from fedvlp.federation.exchange import answer
from fedvlp.federation.loop import Federation, Rounds
from fedvlp.federation.site import Site
from fedvlp.flare import controller as controller_module
from fedvlp.flare import messages, task_handler
from fedvlp.flare.controller import FederatedController
from fedvlp.flare.job_failures import pass_on
from fedvlp.flare.site_executor import SiteExecutor
from fedvlp.objectives.convirt import ConVIRT
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from support.toy import SGD, Toy, World, clone

ASK_AGAIN = 0.5
"""Seconds after which a site that got no task asks again."""

ASK_AGAIN_AFTER_LOSS = 5.0
"""Seconds after which a site takes a task that never came for lost, and asks again."""

PATIENCE = 20_000.0
"""Virtual seconds after which a run that has not ended is taken to hang."""

DEAD_AFTER = 60.0
"""Seconds from the report of a dead site until FLARE believes it (its dead_client_grace_period)."""


# --- the time ----------------------------------------------------------------------------------------------------


class Clock:
    """Virtual seconds. What is planned happens in the order of its time, and of planning where that is the same."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._planned: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def plan(self, delay: float, action: Callable[[], None]) -> None:
        """``action`` happens in ``delay`` seconds, if anybody waits that long."""
        heapq.heappush(self._planned, (self.now + delay, next(self._order), action))

    def wait(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Lets that time pass, or less when ``enough`` says so."""
        end = self.now + seconds
        if self.now > PATIENCE:
            pytest.fail(f"still waiting after {self.now:.0f} virtual seconds: the run hangs")
        while not enough():
            if not self._planned or self._planned[0][0] > end:
                self.now = end
                return
            self.now, _, action = heapq.heappop(self._planned)
            try:
                action()
            except Exception as error:  # else the product, which waits, would take it for its own
                raise pytest.fail.Exception(f"at {self.now:.2f} s: {error!r}") from error


class Arrivals:
    """The controller's queue: waiting for a reply lets the clock run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, timeout: float) -> Any:
        self._clock.wait(timeout, lambda: bool(self._items))
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class OnePassError(Exception):
    """Ends one pass of FLARE's monitor where it would sleep."""


def _end_pass(seconds: float) -> None:
    raise OnePassError


def on_clock(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """From now on the controller and FLARE's tasks know no other time than the clock's."""
    virtual = SimpleNamespace(time=clock.time, monotonic=clock.time, sleep=_end_pass)
    for module in (controller_module, wf_comm_server, send_manager, controller_spec):
        monkeypatch.setattr(module, "time", virtual)
    arrivals = SimpleNamespace(Queue=lambda: Arrivals(clock), Empty=queue.Empty)
    monkeypatch.setattr(controller_module, "queue", arrivals)
    for name in ("return_freed_memory", "cleanup_memory"):  # which would last for this process, and take seconds
        monkeypatch.setattr(controller_module, name, lambda *_: None)


# --- toys in the place of models and data ------------------------------------------------------------------------


class SavedToy(Toy):
    """A toy that can be written, as a DualEncoder can; four weights are enough here, and quick."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__(norm=norm)
        self.image_head = self.text_head = nn.Identity()
        for layer in (*self.image_encoder, *self.text_encoder, self.image_alignment, self.text_alignment):
            layer.register_parameter("bias", None)

    def save(self, folder: Path, statistics: str = "", more: Callable[[Path], object] | None = None) -> None:
        save_tensors(folder / "model.safetensors", self.state_dict(), {"statistics": statistics})


@dataclass(frozen=True)
class ToyModel:
    """A configuration in the place of ModelConfig."""

    norm: bool = False  # batch normalisation in the towers
    init: str = ""
    image_size: int = 16

    def build(self, seed: int) -> SavedToy:
        return SavedToy(self.norm)


def toy_experiment(method: Method | None = None, **settings: Any) -> Experiment:
    """Two rounds of FedAvg with two steps, a quorum of two, and evaluations, unless ``settings`` say otherwise."""
    rounds = {"rounds": 2, "quorum": 2, "evaluate_every": 1, **settings}
    return Experiment("toy", method or Method(local_steps=2), ToyModel(), training=SGD, rounds=Rounds(**rounds))  # type: ignore[arg-type]


class ToyAssembly:
    """experiment.Assembly over toys; a site's records are ``data[site]``."""

    cohort = SimpleNamespace(fingerprint="toys")

    def __init__(self, experiment: Experiment, folder: Path | None, data: Mapping[str, Any]) -> None:
        self._world = toy_world(experiment, data, folder)

    def server(self, sites: tuple[str, ...]) -> Server:
        server = self._world.server()
        server.sites = sites
        return server

    def equip(self, server: Server) -> Server:
        return self._world.equip(server)

    def site(self, name: str) -> Site:
        return self._world.site(name)

    def gate(self) -> None:
        """Toys have no reports."""

    open = Assembly.open


def toy_world(experiment: Experiment, data: Mapping[str, Any], folder: Path | None = None) -> World:
    """The federation that the experiment describes, on toys."""
    norm: bool = experiment.model.norm  # type: ignore[attr-defined]
    return World(experiment.method, data, experiment.training, experiment.rounds, lambda: SavedToy(norm), folder=folder,
                 evaluate=measure, norm_statistics=experiment.norm_statistics, _modules=modules(norm))  # fmt: skip


@functools.cache
def modules(norm: bool) -> tuple[SavedToy, ConVIRT]:
    """One pair for all sites and servers of the process: every task loads its state first."""
    return SavedToy(norm), ConVIRT()


def measure(client: Any, splits: tuple[str, ...]) -> dict[str, float]:
    """An evaluation: a recall in percent from the weights that the site holds."""
    total = sum(float(tensor.double().sum()) for tensor in client.state().values())
    return {f"{split}/mean/r1": abs(total) % 100 for split in splits}


def on_toys(monkeypatch: pytest.MonkeyPatch, data: Mapping[str, Any]) -> None:
    """The controller and the sites build toys."""

    def assembly(experiment: Experiment, folder: Path | None = None, accept_phi_risk: bool = False) -> ToyAssembly:
        return ToyAssembly(experiment, folder, data)

    for module in (controller_module, task_handler):
        monkeypatch.setattr(module, "Assembly", assembly)


# --- the engine --------------------------------------------------------------------------------------------------


class CoreCell:
    """One process's end of FLARE's network: who answers which request, and what looks at it before."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], Callable[[Message], Message]] = {}
        self.filters: dict[tuple[str, str], Callable[[Message], Message | None]] = {}

    def register_request_cb(self, channel: str, topic: str, cb: Callable[[Message], Message]) -> None:
        self.answers[channel, topic] = cb

    def add_incoming_request_filter(self, channel: str, topic: str, cb: Callable[[Message], Message | None]) -> None:
        self.filters[channel, topic] = cb


@dataclass
class Engine:
    """What fedvlp and FLARE's own components ask an engine for; it is its own workspace."""

    name: str
    root: Path
    job_id: str
    clients: Sequence[Client] = ()
    components: list[FLComponent] = field(default_factory=list)
    fired: list[tuple[str, Any]] = field(default_factory=list)
    collector: InfoCollector = field(default_factory=InfoCollector)  # FLARE's widget behind show_stats and show_errors

    def __post_init__(self) -> None:
        self._contexts = FLContextManager(self, self.name, self.job_id)
        self.run_manager = SimpleNamespace(aux_runner=AuxRunner(self))
        self.cell = SimpleNamespace(core_cell=CoreCell())

    def get_cell(self) -> SimpleNamespace:
        return self.cell

    def new_context(self) -> FLContext:
        context: FLContext = self._contexts.new_context()
        return context

    def get_clients(self) -> Sequence[Client]:
        return self.clients

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        self.fired.append((event_type, fl_ctx.get_prop(FLContextKey.EVENT_DATA)))
        fire_event_to_components(event_type, self.components, fl_ctx)

    def get_workspace(self) -> Engine:
        return self

    def get_widget(self, widget: str) -> InfoCollector | None:
        return self.collector if widget == WidgetID.INFO_COLLECTOR else None

    def get_root_dir(self) -> str:
        return str(self.root)

    def get_site_config_dir(self) -> str:
        return str(self.root / "local")

    def get_run_dir(self, job_id: str) -> str:
        return str(self.root / job_id)


# --- the network and the sites -----------------------------------------------------------------------------------


def unchanged(reply: Shareable) -> Shareable:
    return reply


def told(**header: Any) -> Callable[[Shareable], Shareable]:
    """Puts other values into the header of a reply."""

    def change(reply: Shareable) -> Shareable:
        dxo = from_shareable(reply)
        dxo.meta[messages.KEY] |= header
        return dxo.update_shareable(reply)

    return change


@dataclass(frozen=True)
class Fate:
    """What becomes of one task that a site fetched; the numbers are seconds."""

    down: float | None = 0.1  # until the task has come; None: it is lost, and the site asks again
    train: float = 1.0
    up: float | None = 0.1  # until the reply has come; None: it is lost, and the site goes on
    again: float | None = None  # the reply comes a second time, so much later
    dies: bool = False  # the site's process dies while it trains
    back: float | None = None  # and is started anew so much later; None: never
    change: Callable[[Shareable], Shareable] = unchanged  # what comes instead of the update


@dataclass(frozen=True)
class Task:
    """One task that a site fetched: ``attempt`` counts how often it has fetched this one, from 0."""

    site: str
    round: int
    phase: str
    attempt: int
    job: int  # in which it was fetched

    @property
    def key(self) -> tuple[str, int, str]:
        return self.site, self.round, self.phase


@dataclass(frozen=True)
class Arrival:
    """A reply as it reached the server."""

    time: float
    job: int
    task: Task
    usable: bool  # it can be read as an update, and does not say why there is none
    valid: bool  # and nobody changed it on its way


Fates = Callable[[Task], Fate]


class MemorySite:
    """A site: asks, trains, answers, one task after the other, as FLARE's client runner does."""

    def __init__(self, flare: MemoryFlare, name: str) -> None:
        self.flare = flare
        self.client = Client(name, token=f"token of {name}")
        self.name = name
        self._life = 0  # what was planned in an earlier life does not happen

    def start(self) -> None:
        """A new process: it remembers nothing, and asks for a task."""
        self._life += 1
        flare = self.flare
        self.abort = Signal()
        self.engine = Engine(self.name, flare.folder / self.name, flare.job.engine.job_id)
        self.executor: Executor = flare.make_executor(flare.experiment)
        self._soon(0.0, self._ask)

    def die(self, back: float | None = None) -> None:
        """The process is gone; another one starts in ``back`` seconds."""
        self._life += 1
        if back is not None:
            self._soon(back, self.start)

    def _soon(self, delay: float, action: Callable[[], None]) -> None:
        life = self._life
        self.flare.clock.plan(delay, lambda: action() if life == self._life else None)

    def _ask(self) -> None:
        job = self.flare.job
        if job.over:
            return
        with job.engine.new_context() as context:
            name, number, data = job.communicator.process_task_request(self.client, context)
        if not name:
            self._soon(ASK_AGAIN, self._ask)
            return
        header = from_shareable(data).get_meta_prop(messages.KEY)
        key = (self.name, header["round"], header["phase"])
        task = Task(*key, attempt=self.flare.fetched[key], job=job.number)
        self.flare.fetched[key] += 1
        self._receive(task, number, data, self.flare.fates(task))

    def _receive(self, task: Task, number: str, data: Shareable, fate: Fate) -> None:
        if fate.down is None:
            self._soon(ASK_AGAIN_AFTER_LOSS, self._ask)
            return
        came = self.flare.carry(data)
        if fate.dies:
            self._soon(fate.down + fate.train / 2, lambda: self.die(fate.back))
        self._soon(fate.down + fate.train, lambda: self._work(task, number, came, fate))

    def _work(self, task: Task, number: str, data: Shareable, fate: Fate) -> None:
        self.flare.at_a_site = True
        with self.engine.new_context() as context:
            reply = self.executor.execute(task.phase, data, context, self.abort)
        self.flare.at_a_site = False
        if messages.failure(reply) is None:
            self.flare.trained.add(task.key)
        whole = fate.change is unchanged and messages.failure(reply) is None
        reply = self.flare.carry(reply)
        if messages.failure(reply) is None:
            reply = fate.change(reply)
        if fate.up is None:
            self._soon(ASK_AGAIN_AFTER_LOSS, self._ask)
            return
        self._send(fate.up, task, number, reply, whole)
        if fate.again is not None:
            self._send(fate.up + fate.again, task, number, self.flare.carry(reply), whole)
        self._soon(fate.up, self._ask)

    def _send(self, delay: float, task: Task, number: str, reply: Shareable, whole: bool) -> None:
        """What is under way arrives even if its sender dies meanwhile."""
        self.flare.clock.plan(delay, lambda: self.flare.deliver(self.client, task, number, reply, whole))


# --- the server and its jobs -------------------------------------------------------------------------------------


class ServerKilled(BaseException):
    """The server's process ends here: no handler of the product runs but ``finally``."""


class Job(FLComponent):
    """One submission of the job: a controller from its start to its end, as FLARE's server runner leads it."""

    def __init__(self, flare: MemoryFlare, number: int, components: Sequence[FLComponent], options: Any) -> None:
        super().__init__()
        self.number, self.flare = number, flare
        self.communicator = WFCommServer()
        self.communicator._task_monitor = SimpleNamespace(start=self._watch)
        arguments = {f.name: getattr(flare.experiment, f.name) for f in fields(flare.experiment)}
        self.controller = flare.make_controller(**{"task_check_period": 0.5, **options, **arguments})
        self.controller.set_communicator(self.communicator)
        clients = [site.client for site in flare.sites.values()]
        self.engine = Engine("server", flare.folder / "server", f"job-{number}", clients)
        self.engine.components = [self, self.communicator, self.controller, self.engine.collector, *components]
        self.abort = Signal()
        self.over = False
        self.killed = False
        self.panic = ""  # why FLARE was told to end the job
        self.died: Exception | None = None  # what ended FLARE's monitor, and with it every time limit

    def run(self) -> None:
        """From START_RUN to END_RUN; a killed server leaves everything as it is."""
        with self.engine.new_context() as context:
            meta = {JobMetaKey.MIN_CLIENTS: 1, **self.flare.meta}
            context.set_prop(FLContextKey.JOB_META, meta, private=True, sticky=True)
            self.fire_event(EventType.START_RUN, context)
            self.communicator.initialize_run(context)
            self.controller.initialize(context)
            try:
                self.controller.control_flow(self.abort, context)
                self.controller.stop_controller(context)
                self.communicator.finalize_run(context)
                self.fire_event(EventType.END_RUN, context)
            except ServerKilled:
                self.killed = True
            finally:
                self.over = True
                for site in self.flare.sites.values():
                    site.die()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.FATAL_SYSTEM_ERROR:
            self.panic = self.panic or str(fl_ctx.get_prop(FLContextKey.EVENT_DATA))
            self.abort_now()

    def abort_now(self) -> None:
        """As ``nvflare job abort`` does at the server and at the sites."""
        self.abort.trigger(True)
        for site in self.flare.sites.values():
            site.abort.trigger(True)

    def site_reports(self, site: str, code: int, *, expected: bool = True) -> None:
        """A site's process has ended with that code, and FLARE's parent process at the server hears of it.

        It tells the job, and then ends it as FLARE's ``fail_run`` does. What is not ``expected`` FLARE drops.
        """
        parent, job = CoreCell(), self.engine.get_cell().core_cell

        def send(channel: str, topic: str, target: str, request: Message, **_: Any) -> Message:
            assert target == f"server.{self.engine.job_id}"
            reply: Message = job.answers[channel, topic](request)
            return reply

        parent.send_request = send  # type: ignore[attr-defined]
        runner = SimpleNamespace(is_client_outcome_pending=lambda job, name: expected)
        pass_on(SimpleNamespace(cell=SimpleNamespace(core_cell=parent), engine=SimpleNamespace(job_runner=runner)))
        said = {JobFailureMsgKey.JOB_ID: self.engine.job_id, JobFailureMsgKey.CODE: code}
        report = Message({CellMessageHeaderKeys.CLIENT_NAME: site}, said)
        assert parent.filters[CellChannel.SERVER_MAIN, CellChannelTopic.REPORT_JOB_FAILURE](report) is None
        if expected and code:
            self.abort_now()

    def _watch(self) -> None:
        """One pass of FLARE's own monitor; an error ends it for good, as it would end its thread."""
        if self.over:
            return
        try:
            self.communicator._monitor_tasks()
        except OnePassError:
            self.flare.clock.plan(self.communicator.task_check_period, self._watch)
        except Exception as error:
            self.died = error


class MemoryFlare:
    """A consortium in this process. Its folders, its sites' memories and its clock outlive the jobs."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, experiment: Experiment, data: Mapping[str, Any],
        fates: Fates = lambda task: Fate(),
    ) -> None:  # fmt: skip
        self.folder, self.experiment, self.data, self.fates = folder, experiment, data, fates
        self.clock = Clock()
        self.meta: dict[str, Any] = {}  # more of the next jobs' meta.json
        self.make_controller: Callable[..., FederatedController] = FederatedController
        self.make_executor: Callable[[Experiment], Executor] = site_executor
        self.carry: Callable[[Shareable], Shareable] = copy.deepcopy  # what serialising a message does to it
        self.sites = {name: MemorySite(self, name) for name in sorted(data)}
        self.arrivals: list[Arrival] = []
        self.fetched: Counter[tuple[str, int, str]] = Counter()
        self.trained: set[tuple[str, int, str]] = set()
        self.jobs: list[Job] = []
        self.at_a_site = False  # a site works at this moment, and not the server
        on_clock(monkeypatch, self.clock)
        on_toys(monkeypatch, data)

    @property
    def job(self) -> Job:
        """The job that runs, or the last one."""
        return self.jobs[-1]

    def submit(self, components: Sequence[FLComponent] = (), **options: Any) -> Job:
        """Submits the job and returns when it has ended; ``options`` are the controller's."""
        job = Job(self, len(self.jobs) + 1, components, options)
        self.jobs.append(job)
        for site in self.sites.values():
            site.start()
        job.run()
        return job

    def deliver(self, client: Client, task: Task, number: str, reply: Shareable, whole: bool) -> None:
        """A reply reaches the server, where another job may run by now, or none."""
        job = self.job
        if job.over:
            return
        usable = isinstance(FederatedController._reply(reply, client.name), Update)
        self.arrivals.append(Arrival(self.clock.now, job.number, task, usable, whole))
        with job.engine.new_context() as context:
            job.communicator.process_submission(client, task.phase, number, reply, context)

    @property
    def run(self) -> RunFolder:
        """The folder of the run that the last job worked on."""
        return RunFolder(max((self.folder / "server" / "runs" / self.experiment.name).iterdir()))

    @property
    def records(self) -> list[dict[str, Any]]:
        """What the server noted of the phases that are complete."""
        return self.run.history()


def site_executor(experiment: Experiment) -> SiteExecutor:
    return SiteExecutor(**{f.name: getattr(experiment, f.name) for f in fields(experiment)})


def serialised(message: Shareable) -> Shareable:
    """The message as FLARE's own serialiser brings it.

    A tensor that it meets before it is taught tensors arrives without its values, for the rest of the process.
    """
    messages.register()
    out: Shareable = fobs.loads(fobs.dumps(message))
    return out


# --- what must come out ------------------------------------------------------------------------------------------


def in_engine(
    experiment: Experiment, data: Mapping[str, Any], folder: Path,
    heard: Callable[[str, Broadcast], bool] = lambda site, message: True,
    trained: Callable[[str, Broadcast], bool] = lambda site, message: True,
) -> tuple[Server, Path]:  # fmt: skip
    """The plain round loop, without FLARE, on the same toys: the server at its end, and its model file.

    A site's reply counts where ``heard`` says so; where ``trained`` does not, it never worked on the task.
    """
    world = toy_world(experiment, data, folder)
    sites: dict[str, Site] = {}

    def exchange(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for name, message in messages.items():
            if name not in sites:
                sites[name] = world.site(name)
            reply: Reply = RuntimeError("silent")
            if trained(name, message):
                reply = answer(sites[name], message)
            yield name, reply if heard(name, message) else RuntimeError("not heard")

    server = world.server()
    state = Federation(experiment.method, server, experiment.rounds, exchange).run()
    run = RunFolder(folder / "engine")
    save_json(run.config, {})
    run.finish(experiment, clone(state), server.history)
    return server, run.model
