"""A site's executor at a hospital: a task is answered in a child process that may die without harm.

The one that answers in the job's own process is in flare/site_executor.py. Both call flare/task_handler.py. No line
here knows a method's name.
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import asdict
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
from fedvlp.core.validate import require
from fedvlp.deploy.named_data import SiteConfigError
from fedvlp.deploy.site_config import FILE, envelope_at, processes_at
from fedvlp.flare import child_protocol, messages
from fedvlp.flare.messages import BEHIND, CHILD_LOST, MOST_SAMPLES
from fedvlp.flare.paths import SitePaths
from fedvlp.flare.retrying_cell import send_again
from fedvlp.flare.worker import worker_of
from fedvlp.run.experiment import Experiment


def command(processes: int, stays: bool = False) -> list[str]:
    """How the child of a task is started: alone, beside a worker that ``stays``, or as several by torchrun."""
    if stays and processes == 1:
        return [sys.executable, "-u", "-m", "fedvlp.flare.relay"]
    module = ["-m", "fedvlp.flare.child"]
    if processes == 1:
        return [sys.executable, "-u", *module]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, "-u", *torchrun, *module]


LOG = "worker.log"
"""In the job's folder at the site: what its worker wrote."""

LOST = Failure(FailureKind.LOST, CHILD_LOST, CHILD_LOST)


class ChildExecutor(ClientAPIExecutor):
    """Trains in child processes, so that a crash costs a task and not the job.

    FLARE fails a whole job when a site's job process dies; a child that is killed (out of memory), crashes in native
    code or hangs is an error reply of one site. FLARE would let the child fetch and serve tensors past the job's
    process; here that process holds them before the child starts and after it has answered. So the site's filters see
    them, and a child that dies late takes no accepted update with it (which FLARE answers by failing the job).

    FLARE starts a child for every task. Alone on its GPU or CPU it hands the task to a worker that stays for the whole
    job (flare/worker.py), which has data, tokens and model ready; another takes its place after a crash, after
    ``tasks_per_trainer`` tasks, and when ``local/fedvlp.json`` has changed. With several processes, or with 1 task per
    trainer, each child trains by itself (flare/child.py) and ends.
    """

    def __init__(
        self,
        task_timeout: float = 3600.0,
        silence: float = 120.0,
        processes: int = 1,
        tasks_per_trainer: int = 0,
        delivery: float = 300.0,
        **experiment: Any,
    ) -> None:
        """A child is given up after ``task_timeout`` seconds, or ``silence`` seconds without a sign of life.

        FLARE does not listen for signs of life while a child takes its task. That is bounded by ``delivery`` seconds,
        tensors included, which this process holds on the same machine.
        ``processes`` train together, one per GPU, unless the site's own ``local/fedvlp.json`` says how many.
        ``tasks_per_trainer``: 0 = any number.
        """
        require(
            tasks_per_trainer >= 0, f"tasks_per_trainer is {tasks_per_trainer}; 0 = any number, 1 = a fresh one each"
        )
        super().__init__(
            execution_mode="external_process",
            command=command(processes, tasks_per_trainer != 1),
            launch_once=False,
            heartbeat_timeout=silence,
            shutdown_timeout=10.0,  # what a site remembers is written before the child answers,
            stop_grace_period=5.0,  # so one that hangs is not waited for
            task_wait_timeout=min(delivery, task_timeout),
            result_wait_timeout=task_timeout,
            params_exchange_format=ExchangeFormat.RAW,  # both sides register tensors by themselves (flare/messages.py),
            server_expected_format=ExchangeFormat.RAW,  # and a child may do without torch
        )
        messages.register()
        self._processes = processes
        self._silence = silence
        self._tasks = tasks_per_trainer
        self.experiment = Experiment(**experiment)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            send_again(fl_ctx)
            processes = self._processes_here(Path(SitePaths.of(fl_ctx).local))
            self._command = command(processes, processes == 1 and self._worker(fl_ctx) is not None)
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

    def _worker(self, fl_ctx: FLContext) -> dict[str, Any] | None:
        """How a child of this job finds its worker, and when the worker is replaced; None: there is no worker."""
        if self._tasks == 1:
            return None
        settings = Path(SitePaths.of(fl_ctx).local) / FILE
        content = settings.read_bytes() if settings.is_file() else b""
        folder = Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))
        made_of = hashlib.blake2b(content, digest_size=8).hexdigest()
        limits = {"log": str(folder / LOG), "made_of": made_of, "tasks": self._tasks, "silence": self._silence}
        worker = worker_of(os.getpid(), "job", **limits)
        return None if worker is None else asdict(worker)

    @staticmethod
    def _requires_materialized_result(task_name: str, fl_ctx: FLContext) -> bool:
        return True

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        most = fl_ctx.get_prop(MOST_SAMPLES)
        task = child_protocol.to_child(shareable, self.experiment, SitePaths.of(fl_ctx), most, self._worker(fl_ctx))
        reply = super().execute(task_name, task, fl_ctx, abort_signal)
        code = reply.get_return_code(ReturnCode.OK)
        if code == ReturnCode.TASK_ABORTED:
            return reply
        if code != ReturnCode.OK:
            return messages.send_failure(LOST)
        fl_ctx.set_prop(BEHIND, child_protocol.behind(reply), private=True, sticky=False)
        answer = child_protocol.from_child(reply, fl_ctx.get_identity_name())
        if isinstance(answer, Failure):
            self.log_error(fl_ctx, f"{task_name} failed: {answer.text}")
            return messages.send_failure(answer)
        return messages.send_update(answer)
