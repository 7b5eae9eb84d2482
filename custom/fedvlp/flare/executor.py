"""A site's executor at a hospital: a task is answered in a child process that may die without harm.

The one that answers in the job's own process is in flare/site_executor.py. Both call flare/task_handler.py. No line
here knows a method's name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode, ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
from nvflare.client.config import ExchangeFormat
from nvflare.fuel.f3.cellnet.defs import CellChannel

from fedvlp.core.types import Failure, FailureKind
from fedvlp.deploy.site_config import SiteConfigError, envelope_at, processes_at
from fedvlp.flare import child_protocol, messages
from fedvlp.flare.messages import BEHIND, MOST_SAMPLES
from fedvlp.flare.paths import SitePaths
from fedvlp.flare.site_executor import SiteExecutor as SiteExecutor  # where job files of before name it
from fedvlp.run.experiment import Experiment


def command(processes: int) -> list[str]:
    """How the training child is started: alone, or as so many processes by torchrun."""
    module = ["-m", "fedvlp.flare.child"]
    if processes == 1:
        return [sys.executable, "-u", *module]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, "-u", *torchrun, *module]


CHILD_LOST = Failure(
    FailureKind.LOST,
    "the training process ended or fell silent before it answered (killed for lack of memory, crashed or hung); this "
    "site's log has its last lines. A smaller training.batch_size needs less memory",
)


class ChildExecutor(ClientAPIExecutor):
    """Trains every task in a fresh child process (flare/child.py), so that a crash costs a task and not the job.

    FLARE fails a whole job when a site's job process dies; a child that is killed (out of memory), crashes in native
    code or hangs is an error reply of one site. FLARE would let the child fetch and serve tensors past the job's
    process; here that process holds them before the child starts and after it has answered. So the site's filters see
    them, and a child that dies late takes no accepted update with it (which FLARE answers by failing the job).
    """

    def __init__(
        self, task_timeout: float = 3600.0, silence: float = 120.0, processes: int = 1, **experiment: Any
    ) -> None:
        """A child is given up after ``task_timeout`` seconds, or ``silence`` seconds without a sign of life.

        ``processes`` train together, one per GPU, unless the site's own ``local/fedvlp.json`` says how many.
        """
        super().__init__(
            execution_mode="external_process",
            command=command(processes),
            launch_once=False,
            heartbeat_timeout=silence,
            shutdown_timeout=10.0,  # what a site remembers is written before the child answers,
            stop_grace_period=5.0,  # so one that hangs is not waited for
            task_wait_timeout=task_timeout,
            result_wait_timeout=task_timeout,
            params_exchange_format=ExchangeFormat.PYTORCH,
            server_expected_format=ExchangeFormat.PYTORCH,
        )
        messages.register()
        self._processes = processes
        self.experiment = Experiment(**experiment)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            self._command = command(self._processes_here(Path(SitePaths.of(fl_ctx).local)))
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            tasks = (CellChannel.SERVER_COMMAND, ServerCommandNames.GET_TASK)
            fl_ctx.get_engine().get_cell().decode_pass_through_topics.discard(tasks)

    def _processes_here(self, local: Path) -> int:
        """As many as the site says; else as the job asks for, up to the site's limit."""
        try:
            envelope = envelope_at(local.parent)
        except SiteConfigError:  # the task says what is wrong with the file
            envelope = None
        asked = min(self._processes, envelope.processes) if envelope else self._processes
        return processes_at(local) or asked

    @staticmethod
    def _requires_materialized_result(task_name: str, fl_ctx: FLContext) -> bool:
        return True

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        most = fl_ctx.get_prop(MOST_SAMPLES)
        task = child_protocol.to_child(shareable, self.experiment, SitePaths.of(fl_ctx), most)
        reply = super().execute(task_name, task, fl_ctx, abort_signal)
        code = reply.get_return_code(ReturnCode.OK)
        if code == ReturnCode.TASK_ABORTED:
            return reply
        if code != ReturnCode.OK:
            return messages.send_failure(CHILD_LOST)
        fl_ctx.set_prop(BEHIND, child_protocol.behind(reply), private=True, sticky=False)
        answer = child_protocol.from_child(reply, fl_ctx.get_identity_name())
        if isinstance(answer, Failure):
            self.log_error(fl_ctx, f"{task_name} failed: {answer.text}")
            return messages.send_failure(answer)
        return messages.send_update(answer)
