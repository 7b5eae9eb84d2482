"""Whose fault it is that FLARE ends a job: the server's parent process tells the job before it aborts it.

FLARE fails the whole job when a site's job process ends badly. The site reports that to the server's parent process,
and all that the job's own process ever hears is the abort, the same as for an operator's command. ``pass_on`` stands
before FLARE's handler of the report and tells the job first; ``hear`` is the other end, in the job's process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.fuel.f3.cellnet.defs import CellChannel, CellChannelTopic, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.private.defs import CellMessageHeaderKeys, JobFailureMsgKey, new_cell_message

CHANNEL, TOPIC = "fedvlp_job", "job_process_failed"

FAILURES = {
    JobReturnCode.EXCEPTION: "job process died",
    JobReturnCode.UNSAFE_COMPONENT: "job process refused a component",
    JobReturnCode.CONFIG_ERROR: "job process could not use the job's configuration",
    JobReturnCode.INFRASTRUCTURE_ERROR: "job process could not be started",
    JobReturnCode.ABORTED: "job process was aborted at the site",
}
"""The codes for which FLARE ends a job, in words. A process that was killed has the first one."""

HEARD_WITHIN = 5.0
"""Seconds that the job has to acknowledge; it does so at once, unless it hangs."""


def pass_on(server: Any) -> None:
    """Has FLARE's ``server``, its parent process, tell a job which site's process failed, before it ends the job."""
    core = server.cell.core_cell

    def tell(report: Message) -> None:
        said, site = report.payload, str(report.get_header(CellMessageHeaderKeys.CLIENT_NAME))
        code = said.get(JobFailureMsgKey.CODE) if isinstance(said, dict) else None
        if not isinstance(code, int) or code not in FAILURES:
            return
        job = str(said.get(JobFailureMsgKey.JOB_ID))
        # FLARE drops the report of a site that it no longer expects one from; the job then continues.
        if server.engine.job_runner.is_client_outcome_pending(job, site):
            told = new_cell_message({}, {"site": site, "code": code})
            target = FQCN.join([FQCN.ROOT_SERVER, job])
            core.send_request(CHANNEL, TOPIC, target, told, timeout=HEARD_WITHIN, optional=True)

    core.add_incoming_request_filter(CellChannel.SERVER_MAIN, CellChannelTopic.REPORT_JOB_FAILURE, tell)


def hear(engine: Any, listener: Callable[[str, str], None]) -> None:
    """Calls ``listener`` in the job's process with what became of which site's process. Strangers are not believed."""

    def heard(message: Message) -> Message:
        site = message.payload["site"]
        if site in {client.name for client in engine.get_clients()}:
            listener(f"{site}'s {FAILURES[message.payload['code']]}", site)
        return make_reply(ReturnCode.OK)

    engine.get_cell().core_cell.register_request_cb(CHANNEL, TOPIC, heard)
