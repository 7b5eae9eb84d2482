"""A site's executor in the simulator and in a POC: a task is answered in the job's own process, or by a worker.

With fewer threads than sites, FLARE's simulator starts a process for every single task of a site. What such a process
costs before its first step is imports, data drawn and tokenised again, and a cold library. So there it imports no
torch: it hands its task on (flare/relay.py) to a worker that stays (flare/worker.py), with the same bytes.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from fedvlp.core.types import Failure, FailureKind
from fedvlp.flare import messages
from fedvlp.flare.messages import BEHIND, CHILD_LOST, COUNTED, MOST_SAMPLES
from fedvlp.flare.paths import SIMULATED, SitePaths
from fedvlp.flare.retrying_cell import send_again
from fedvlp.flare.worker import Worker, WorkerLostError, worker_of

if TYPE_CHECKING:
    from fedvlp.flare.task_handler import TaskHandler
    from fedvlp.run.experiment import Experiment

OWN_FILTERS = "privacy.json"
"""A site's own filters see a reply's tensors, so where it has some, its process holds them as torch does."""


class SiteExecutor(Executor):
    """Answers the tasks of a site. What a site remembers is on disk, so a restarted process continues."""

    def __init__(self, settings: dict[str, Any] | None = None, **experiment: Any) -> None:
        """``experiment`` are the fields of ``presets.Experiment``, the same as the controller's.

        ``settings`` in their place are the same as plain JSON (run/config.py), which takes no class to be imported.
        """
        super().__init__()
        self._settings = settings
        self._experiment: Experiment | None = None
        self._handler: TaskHandler | None = None
        self._worker: Worker | None = None
        if settings is None:
            messages.register()  # before the first task is fetched
            self._experiment = _experiment(experiment)

    @property
    def experiment(self) -> Experiment:
        """What this site is asked to run. Raises ValueError for settings that describe none."""
        if self._experiment is None:
            from fedvlp.run.config import from_config

            self._experiment = _experiment({name: from_config(value) for name, value in (self._settings or {}).items()})
        return self._experiment

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Before the first task is fetched: decides whether a worker answers, and teaches FLARE tensors."""
        if event_type != EventType.START_RUN:
            return
        send_again(fl_ctx)
        if self._settings is None:
            return
        if fl_ctx.get_job_id() == SIMULATED and not (Path(SitePaths.of(fl_ctx).local) / OWN_FILTERS).exists():
            # The simulator gives each of its groups of GPUs to other processes, and so to another worker.
            self._worker = worker_of(os.getppid(), os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        if self._worker is None:
            messages.register()
        else:
            from fedvlp.flare.relay import HeldDecomposer

            messages.register(HeldDecomposer())

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        answer = self._trained_here if self._worker is None else self._handed_on
        try:
            reply = answer(shareable, fl_ctx, abort_signal)
        except Exception as error:
            from fedvlp.federation.site import failure

            reply = failure(error)
        if isinstance(reply, Failure):
            self.log_error(fl_ctx, f"{task_name} failed: {reply.text}")
            return messages.send_failure(reply)
        return make_reply(ReturnCode.TASK_ABORTED) if reply is None else reply

    def _trained_here(self, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable | None:
        from fedvlp.flare.task_handler import TaskHandler
        from fedvlp.training.local_training import Aborted

        message, run = messages.receive_broadcast(shareable)
        self._handler = self._handler or TaskHandler(self.experiment, SitePaths.of(fl_ctx))
        most = fl_ctx.get_prop(MOST_SAMPLES)
        try:
            update = self._handler.answer(message, run, lambda: abort_signal.triggered, most)
        except Aborted:
            return None
        fl_ctx.set_prop(BEHIND, self._handler.behind, private=True, sticky=False)
        return messages.send_update(update)

    def _handed_on(self, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable | Failure | None:
        """The worker's answer. One that was lost is followed by another, once: what killed it may kill that too."""
        from fedvlp.flare.relay import handed_on

        assert self._worker is not None
        own = {
            "experiment": {"settings": self._settings, "plugins": []},
            "paths": asdict(SitePaths.of(fl_ctx)),
            "most_samples": fl_ctx.get_prop(MOST_SAMPLES),
        }
        for last in (False, True):
            try:
                said = handed_on(from_shareable(shareable), own, self._worker, lambda: abort_signal.triggered)
                break
            except WorkerLostError as lost:
                if last:
                    return Failure(FailureKind.LOST, CHILD_LOST, CHILD_LOST)
                self.log_info(fl_ctx, f"the task is given to another worker: {lost}")
        if said is None or isinstance(said, Failure):
            return said
        counted = said.meta.pop(COUNTED)
        if counted is not None:
            from fedvlp.deploy.envelope import Behind

            fl_ctx.set_prop(BEHIND, Behind(**counted), private=True, sticky=False)
        return said.to_shareable()


def _experiment(fields: dict[str, Any]) -> Experiment:
    from fedvlp.run.experiment import Experiment

    return Experiment(**fields)
