"""A site's executor in the simulator and in a POC: a task is answered in the job's own process, or by its trainer.

With fewer threads than sites, FLARE's simulator starts a process for every single task of a site. What such a visit
costs before its first step is imports, data drawn and tokenised again, and a cold library. So there a visit imports no
torch: it hands its task to a trainer (flare/trainer.py) that stays between the visits, and passes the answer on. The
trainer only keeps what can be made again. Whatever happens to it, the visit answers by itself, with the same bytes.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from fedvlp.core.types import Failure, FailureKind
from fedvlp.flare import messages, raw_tensors, trainer_link
from fedvlp.flare.messages import BEHIND, MOST_SAMPLES
from fedvlp.flare.paths import SIMULATED, SitePaths
from fedvlp.flare.retrying_cell import send_again
from fedvlp.flare.trainer_link import TrainerLink

if TYPE_CHECKING:
    from fedvlp.core.types import Update
    from fedvlp.deploy.envelope import Behind
    from fedvlp.flare.task_handler import TaskHandler
    from fedvlp.run.experiment import Experiment

OWN_FILTERS = "privacy.json"
"""A site's own filters see a reply's tensors, so where it has some, its process holds them as torch does."""


class SiteExecutor(Executor):
    """Answers the tasks of a site. What a site remembers is on disk, so a restarted process goes on."""

    def __init__(self, settings: dict[str, Any] | None = None, **experiment: Any) -> None:
        """``experiment`` are the fields of ``presets.Experiment``, the same as the controller's.

        ``settings`` in their place are the same as plain JSON (run/config.py), which takes no class to be imported.
        """
        super().__init__()
        self._settings = settings
        self._experiment: Experiment | None = None
        self._handler: TaskHandler | None = None
        self._trainer: TrainerLink | None = None
        if settings is None:
            messages.register()  # before the first task is fetched
            self._experiment = _experiment(experiment)

    @property
    def experiment(self) -> Experiment:
        """What this site is asked to run. Raises ValueError for settings that describe none."""
        if self._experiment is None:
            from fedvlp.run.config import from_config

            described = {name: from_config(value) for name, value in (self._settings or {}).items()}
            self._experiment = _experiment(described)
        return self._experiment

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Before the first task is fetched: decides whether this process is a mere visit, and teaches FLARE tensors."""
        if event_type == EventType.START_RUN:
            send_again(fl_ctx)
        if event_type != EventType.START_RUN or self._settings is None:
            return
        simulated = fl_ctx.get_job_id() == SIMULATED
        if simulated and not (Path(SitePaths.of(fl_ctx).local) / OWN_FILTERS).exists():
            self._trainer = trainer_link.of_simulator(os.getppid())
        messages.register(raw_tensors.RawDecomposer() if self._trainer else None)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        if self._trainer is not None:
            said = self._trained(shareable, fl_ctx, abort_signal)
            if said is not None:
                return self._reply_of_trainer(task_name, said, fl_ctx)
            self._trainer = None  # this process has all it needs from now on
        from fedvlp.federation.site import reason
        from fedvlp.training.loop import Aborted

        try:
            update = self._update(shareable, fl_ctx, abort_signal)
        except Aborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        except Exception as error:
            self.log_error(fl_ctx, f"{task_name} failed: {reason(error)}")
            return messages.send_failure(error)
        return messages.send_update(update)

    def _update(self, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Update:
        from fedvlp.flare.task_handler import TaskHandler

        message, run = messages.receive_broadcast(_with_torch(shareable))
        self._handler = self._handler or TaskHandler(self.experiment, SitePaths.of(fl_ctx))
        most = fl_ctx.get_prop(MOST_SAMPLES)
        update = self._handler.answer(message, run, lambda: abort_signal.triggered, most)
        fl_ctx.set_prop(BEHIND, self._handler.behind, private=True, sticky=False)
        return update

    def _trained(self, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> trainer_link.Answer | None:
        """What the trainer answers; None where it cannot be asked, or ended before it had answered."""
        assert self._trainer is not None
        try:
            dxo = from_shareable(shareable)
            asked = {
                "settings": self._settings,
                "paths": asdict(SitePaths.of(fl_ctx)),
                "message": messages.header_of(dxo),
                "most_samples": fl_ctx.get_prop(MOST_SAMPLES),
            }
            tensors = {name: raw_tensors.raw(tensor) for name, tensor in dxo.data.items()}
            return self._trainer.ask(asked, tensors, lambda: abort_signal.triggered)
        except (trainer_link.TrainerLostError, raw_tensors.RawTensorError, ValueError) as error:
            self.log_info(fl_ctx, f"answers in this process: {error}")
            return None

    def _reply_of_trainer(self, task_name: str, said: trainer_link.Answer, fl_ctx: FLContext) -> Shareable:
        if said.aborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        if said.failure is not None:
            kind, text, public = said.failure
            self.log_error(fl_ctx, f"{task_name} failed: {text}")
            return messages.send_failure(Failure(FailureKind(kind), text, public))
        if said.ahead:
            self.log_info(fl_ctx, f"{task_name} was answered ahead")
        fl_ctx.set_prop(BEHIND, _behind(said.behind), private=True, sticky=False)
        return DXO(DataKind.WEIGHTS, data=dict(said.tensors), meta={messages.KEY: said.update}).to_shareable()


def _experiment(fields: dict[str, Any]) -> Experiment:
    from fedvlp.run.experiment import Experiment

    return Experiment(**fields)


def _with_torch(task: Shareable) -> Shareable:
    """The task with tensors of torch. A process that began as a visit is brought bytes for as long as it lives."""
    dxo = from_shareable(task)
    if any(isinstance(value, raw_tensors.RawTensor) for value in dxo.data.values()):
        dxo.data = raw_tensors.with_torch(dxo.data)
        task = dxo.update_shareable(task)
    return task


def _behind(counted: dict[str, Any] | None) -> Behind | None:
    """The records behind the trainer's update, where the site has an envelope."""
    if counted is None:
        return None
    from fedvlp.deploy.envelope import Behind

    return Behind(**counted)
