"""The site's guard on incoming messages: which sender may ask the site's FLARE process for what.

FLARE's server forwards messages between all accounts of a consortium, and a site's FLARE process carries out what
arrives on the channel ``admin`` without asking who sent it. ``Perimeter`` stands before that, at both ends;
``MAY_SEND`` is its table of who may send what.

Who sends is told by the connection, whose other end has a certificate, and by no word of the message. A process of a
job has its kit's: at a site it speaks for the site, at the server for that job. What comes to a site through the server
has to carry the server's own token, too: a second look, as the server passes nothing on. With ``side`` "server", at the
server, ``Perimeter`` looks at every message that came with a certificate from outside: it has the sender's own token
and origin, and goes no further than the table says. The console needs no more: it sends every command to the server,
which asks the sites itself. A site relies on that: a server that is itself taken over passes.

Other accounts of the same machine do not come so far (flare/inner_port.py). Where FLARE does not ask its own processes
for a certificate, it does not start.

It also holds the kit for one FLARE process: two servers on one kit would share a job store, and the second process of a
site would put the first one out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ConnectionSecurity, FLContextKey, ReservedTopic, ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import (
    CellChannel,
    CellChannelTopic,
    MessageHeaderKey,
    MessagePropKey,
    MessageType,
    ReturnCode,
)
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.comm_config import CommConfigurator
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL
from nvflare.fuel.f3.streaming.stream_const import (
    STREAM_ACK_TOPIC,
    STREAM_CHANNEL,
    STREAM_DATA_TOPIC,
    STREAM_ERROR_TOPIC,
    StreamHeaderKey,
)
from nvflare.fuel.utils.admin_name_utils import is_valid_admin_client_name
from nvflare.private.defs import (
    AUTH_CLIENT_NAME_FOR_SJ,
    CellMessageHeaderKeys,
    ClientType,
    InfoCollectorTopic,
    RequestHeader,
    SysCommandTopic,
    TrainingTopic,
)
from nvflare.private.stream_runner import TOPIC_STREAM_ABORT, TOPIC_STREAM_REQUEST
from nvflare.widgets.fed_event import FED_EVENT_TOPIC

from fedvlp.flare.audit_log import RefusedLines, write_single_lines
from fedvlp.flare.console import bound_commands
from fedvlp.flare.inner_port import watch_inner_ports
from fedvlp.flare.job_check import bound_submissions, unfit_archive, unfit_meta
from fedvlp.flare.job_failures import pass_on
from fedvlp.run.lock import FolderInUseError, only_writer

PARENTS = ("nvflare.private.fed.app.server.server_train", "nvflare.private.fed.app.client.client_train")
"""The programs of FLARE that begin in the folder of the kit. Those of jobs build the same components later."""

_until_the_end = ExitStack()

SERVER, SERVER_JOB, SITE, ACCOUNT = "server", AUTH_CLIENT_NAME_FOR_SJ, "site", "account"
"""Who sends and receives: FLARE's server, a job's process at the server, a site with its jobs, a person's console. The
first two are also the names to which FLARE's server issues its own tokens."""

ANY = None
STREAM_TOPICS = frozenset({STREAM_ACK_TOPIC, STREAM_ERROR_TOPIC})
"""What is said about a stream. What a stream carries has a channel and a topic of its own."""

ADMIN_TOPICS = frozenset(
    {
        # a job: asked for, sent, started, watched and ended
        TrainingTopic.CHECK_RESOURCE,
        TrainingTopic.CANCEL_RESOURCE,
        TrainingTopic.DEPLOY,
        TrainingTopic.START_JOB,
        TrainingTopic.ABORT,
        TrainingTopic.ABORT_TASK,
        TrainingTopic.DELETE_RUN,
        TrainingTopic.CHECK_STATUS,
        TrainingTopic.NOTIFY_JOB_STATUS,
        TrainingTopic.CONFIGURE_JOB_LOG,
        InfoCollectorTopic.SHOW_STATS,
        InfoCollectorTopic.SHOW_ERRORS,
        InfoCollectorTopic.RESET_ERRORS,
        # the site itself, as console commands of an operator ask the server
        TrainingTopic.SHUTDOWN,
        TrainingTopic.RESTART,
        TrainingTopic.GET_SCOPES,
        SysCommandTopic.SYS_INFO,
        SysCommandTopic.REPORT_RESOURCES,
        SysCommandTopic.REPORT_ENV,
        SysCommandTopic.REPORT_VERSION,
        SysCommandTopic.CONFIGURE_SITE_LOG,
    }
)
"""What the server may ask of a site. ``sys.shell`` is not among it."""

MAY_SEND: dict[tuple[str, str], dict[str, frozenset[str] | None]] = {
    # sender, receiver: channel, topics
    (ACCOUNT, SERVER): {
        CellChannel.SERVER_MAIN: frozenset({CellChannelTopic.Challenge, CellChannelTopic.Register}),  # the login
        CellChannel.HCI: ANY,  # the console's commands, for which FLARE asks authorization.json
        CellChannel.AUX_COMMUNICATION: frozenset({TOPIC_STREAM_REQUEST, TOPIC_STREAM_ABORT}),  # a job, there and back
        OBJ_DOWNLOADER_CHANNEL: ANY,  # the files of a job
        CellChannel.RETURN_ONLY: ANY,  # answers
        CellChannel.CELLNET: frozenset({CellChannelTopic.Bye}),
        STREAM_CHANNEL: STREAM_TOPICS,
    },
    (SITE, SERVER): {
        CellChannel.SERVER_MAIN: ANY,  # login, heartbeat, the end of a job
        CellChannel.CELLNET: frozenset({CellChannelTopic.Bye}),
    },
    (SITE, SERVER_JOB): {
        CellChannel.SERVER_COMMAND: frozenset({ServerCommandNames.GET_TASK, ServerCommandNames.SUBMIT_UPDATE}),
        CellChannel.AUX_COMMUNICATION: frozenset(
            {
                ReservedTopic.SYNC_RUNNER,
                ReservedTopic.JOB_HEART_BEAT,
                ReservedTopic.TASK_CHECK,
                FED_EVENT_TOPIC,  # figures; ``curves.only_figures`` drops other events
            }
        ),
        OBJ_DOWNLOADER_CHANNEL: ANY,  # the tensors of a task and of a result
        CellChannel.RETURN_ONLY: ANY,
        STREAM_CHANNEL: STREAM_TOPICS,
    },
    (SERVER, SITE): {CellChannel.CLIENT_MAIN: ADMIN_TOPICS},
    (SITE, SITE): {  # a job's process there
        CellChannel.CLIENT_MAIN: frozenset({TrainingTopic.NOTIFY_JOB_STATUS}),
        "*": ANY,  # the other channels
    },
}
"""Who may send what to whom. What is not listed is refused: all that leads from one account or site to another, too."""

STARTS = (TrainingTopic.DEPLOY, TrainingTopic.START_JOB)
"""Topics that come with the job's ``meta.json``."""

JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A job's id, a UUID. FLARE deletes the folder of this name, and the kit has other folders."""

LOGIN = (CellChannel.SERVER_MAIN, CellChannelTopic.Register)

LONGEST = 100  # characters of what a sender says of itself that are quoted


class Perimeter(FLComponent):
    """A component of ``local/resources.json``, before the process's messages from the first one on.

    Where another process runs this kit already, FLARE does not start.

    Args:
        side: "client" at a site, "server" at the server.
        allow_shell: whether the server may send ``sys.shell``, the console's ``cat``, ``grep``, ``head`` and the like.
    """

    def __init__(self, side: str = "client", allow_shell: bool = False) -> None:
        super().__init__()
        if side not in ("client", "server"):
            raise ValueError(f"Perimeter: side is {side!r}; it is one of client, server")
        self.side, self.allow_shell = side, allow_shell
        self._cell, self._own_name = "", ""  # of this process, and the name in its certificate
        self._audit, self._watches = RefusedLines(), False
        self._site: Any = None  # FLARE's own object of this process, which holds cell, token and verifier
        write_single_lines()
        watch_inner_ports(self._refuse_account)
        if hold_kit():
            ask_for_certificates()
            before_it_starts(self._watch)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Learns at a site whose signature is the server's. FLARE logs in only after this event."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            self._site = fl_ctx.get_prop(FLContextKey.SITE_OBJ)
            if not self._watches:  # somebody starts FLARE by another program
                self._watch(self._site.cell.core_cell)
            if self.side == "server":
                pass_on(self._site)

    def _watch(self, core: CoreCell) -> None:
        """Checks every message of this process, from the first on."""
        self._watches = True
        self._cell = core.get_fqcn()
        self._own_name = core.identity_resolver.resolve(self._cell)
        if self.side == "server":
            core.add_incoming_filter("*", "*", self.check_at_server)
            core.add_outgoing_reply_filter("*", "*", self.without_token)
            bound_submissions()
            bound_commands()
        elif core.secure:  # without certificates nobody signs anything
            core.add_incoming_filter("*", "*", self.check_sender)
            core.add_incoming_request_filter("*", "*", self.check_request)

    # at a site

    def check_sender(self, message: Message) -> Message | None:
        """Refuses a request that is neither of the server nor of this site, before its content is decoded."""
        if self._is_own(message):
            return self._check_own_job(message)
        if message.get_header(MessageHeaderKey.MSG_TYPE) != MessageType.REQ or self._server_leaves(message):
            return None
        if self._sender(message):
            return None
        return self._refuse(message, "it is neither this site's nor the server's own")

    def check_request(self, message: Message) -> Message | None:
        """Refuses what this sender may not ask of the site's process."""
        asked, sender = message.payload, self._sender(message)
        channel, topic = _asked(message)
        if channel == CellChannel.CLIENT_MAIN:  # FLARE takes the topic from the content
            topic = getattr(asked, "topic", "")
            if topic == SysCommandTopic.SHELL and self.allow_shell and sender == SERVER:
                return None
        elif self._server_leaves(message):
            return None
        if not _may_send(sender or "", SITE, channel, topic):
            return self._refuse(message, f"{_quoted(topic)} is not for this sender")
        if channel == CellChannel.CLIENT_MAIN and topic == TrainingTopic.DELETE_RUN:
            job = asked.get_header(RequestHeader.JOB_ID)
            if not (isinstance(job, str) and JOB_ID.fullmatch(job)):
                return self._refuse(message, f"{topic} names no job")
        if channel == CellChannel.CLIENT_MAIN and topic == TrainingTopic.DEPLOY and (why := unfit_archive(asked.body)):
            return self._refuse(message, why)
        meta = asked.get_header(RequestHeader.JOB_META) if topic in STARTS else None
        if meta and (why := unfit_meta(meta)):
            return self._refuse(message, why)
        return None

    def _sender(self, message: Message) -> str | None:
        """Who sent the message, by its connection; of what the server sends or passes on, by the token, too."""
        if self._is_own(message):
            return SITE
        name, token, signature = _credentials(message)
        link = self._site.communicator if self._site else None
        if _cell(message) != SERVER or not (name and token and signature and link and link.token_verifier):
            return None  # there is no verifier before the login
        if not link.token_verifier.verify(name, token, signature):
            return None
        if name == SERVER and token == SERVER:
            return SERVER
        return SERVER_JOB if name == SERVER_JOB and JOB_ID.fullmatch(token) else None

    def _server_leaves(self, message: Message) -> bool:
        """Whether the server tells this process that it disconnects, which FLARE sends without a token."""
        said = (message.get_header(MessageHeaderKey.CHANNEL), message.get_header(MessageHeaderKey.TOPIC))
        ends = (message.get_header(MessageHeaderKey.ORIGIN), message.get_header(MessageHeaderKey.DESTINATION))
        bye = (CellChannel.CELLNET, CellChannelTopic.Bye)
        return said == bye and ends == (SERVER, self._cell) and _cell(message) == SERVER

    # at the server

    def check_at_server(self, message: Message) -> Message | None:
        """Refuses what a certificate from outside may not send, to whomever it is."""
        peer, cell = message.get_prop(MessagePropKey.COMMON_NAME), _cell(message)
        if self._is_own(message):
            return self._check_own_job(message)
        if not peer:
            return self._refuse(message, "it has no certificate; the server's connection_security is to be mtls")
        account = is_valid_admin_client_name(cell)
        name, _, _ = _credentials(message)
        origin = message.get_header(MessageHeaderKey.ORIGIN)
        if (name and name != peer) or (origin != cell if account else _family(origin) != peer):
            return self._refuse(message, "it speaks for another")
        family, *child = FQCN.split(str(message.get_header(MessageHeaderKey.DESTINATION)))
        if family != SERVER or (account and child):
            return self._refuse(message, f"nobody but the server sends to {_quoted(FQCN.join([family, *child]))}")
        if message.get_header(MessageHeaderKey.MSG_TYPE) != MessageType.REQ:
            return None
        channel, topic = _asked(message)
        sender = ACCOUNT if account else SITE
        if not _may_send(sender, SERVER_JOB if child else SERVER, channel, topic):
            return self._refuse(message, f"{_quoted(topic)} is not for this sender")
        joins_as = message.get_header(CellMessageHeaderKeys.CLIENT_TYPE)
        if (channel, topic) == LOGIN and (joins_as == ClientType.ADMIN) != account:
            return self._refuse(message, f"it may not join as {_quoted(joins_as)}")
        return None

    def without_token(self, reply: Message) -> Message | None:
        """Ends the filters of a reply to another process before FLARE's own adds the server's token, which it needs."""
        return None if reply.get_header(MessageHeaderKey.DESTINATION) == self._cell else reply

    # at both

    def _is_own(self, message: Message) -> bool:
        """Whether this process sent it to itself, or a process of a job sent it, which has this kit's certificate.

        FLARE lets nobody connect under this process's own name, and with a certificate under no other's.
        """
        peer, cell = message.get_prop(MessagePropKey.COMMON_NAME), _cell(message)
        if not peer:
            return cell == self._cell
        return bool(peer == self._own_name and cell.startswith(f"{self._cell}."))

    def _check_own_job(self, message: Message) -> Message | None:
        """Refuses what the process of a job sends to that of another job. This process itself may send anything."""
        _, *job = FQCN.split(_cell(message))
        _, *child = FQCN.split(str(message.get_header(MessageHeaderKey.DESTINATION)))
        if not job or not child or child[0] == job[0]:
            return None
        return self._refuse(message, "it is a message of one job to another")

    def _refuse_account(self, account: str) -> None:
        """Writes the audit line of a connection that was closed."""
        said = "a connection to a port for this process's own children: another account of the machine opened it"
        self._audit.write(account, user=account, msg=said)

    def _refuse(self, message: Message, why: str) -> Message:
        """Writes the audit line; FLARE drops the message for the reply."""
        name, _, _ = _credentials(message)
        peer = message.get_prop(MessagePropKey.COMMON_NAME)
        origin = message.get_header(MessageHeaderKey.ORIGIN)
        channel, _ = _asked(message)
        said = f"channel {_quoted(channel)}, origin {_quoted(origin)}, through certificate {_quoted(peer)}: {why}"
        self._audit.write(_quoted(peer), user=_quoted(name), msg=said)
        return make_reply(ReturnCode.UNAUTHENTICATED, error=why)


def ask_for_certificates() -> None:
    """Exits unless FLARE asks the processes of its jobs for a certificate."""
    given = CommConfigurator().get_config() or {}
    resources = given.get("internal", {}).get("resources", {})
    if resources.get(DriverParams.CONNECTION_SECURITY.value) != ConnectionSecurity.MTLS:
        sys.exit(
            "not started: any account of this machine could speak for the processes of jobs; local/comm_config.json is "
            'to say "connection_security": "mtls" in the resources of "internal", as a provisioned kit does'
        )


def before_it_starts(watch: Callable[[CoreCell], None]) -> None:
    """Calls ``watch`` with this process's cell before it opens a port; FLARE has no event that early."""
    start = CoreCell.start

    def watched(core: CoreCell) -> None:
        watch(core)
        start(core)

    CoreCell.start = watched


def _credentials(message: Message) -> tuple[str, str, str]:
    """Name, token and signature that the message carries, "" where there is none."""
    keys = (CellMessageHeaderKeys.CLIENT_NAME, CellMessageHeaderKeys.TOKEN, CellMessageHeaderKeys.TOKEN_SIGNATURE)
    values = [message.get_header(key) for key in keys]
    name, token, signature = (value if isinstance(value, str) else "" for value in values)
    return name, token, signature


def _asked(message: Message) -> tuple[str, str]:
    """Channel and topic of a request; each piece of a stream names those of what the stream carries."""
    channel, topic = message.get_header(MessageHeaderKey.CHANNEL), message.get_header(MessageHeaderKey.TOPIC)
    if (channel, topic) == (STREAM_CHANNEL, STREAM_DATA_TOPIC):
        channel, topic = message.get_header(StreamHeaderKey.CHANNEL), message.get_header(StreamHeaderKey.TOPIC)
    return str(channel), str(topic)


def _may_send(sender: str, receiver: str, channel: str, topic: Any) -> bool:
    """Whether the table lists it."""
    channels = MAY_SEND.get((sender, receiver), {})
    topics = channels.get(channel, channels.get("*", frozenset()))
    return topics is ANY or (isinstance(topic, str) and topic in topics)


def _cell(message: Message) -> str:
    """The directly connected cell. FLARE lets no other certificate than a site's connect under the site's name."""
    endpoint = message.get_prop(MessagePropKey.ENDPOINT)
    return str(endpoint.name) if endpoint else ""


def _family(cell: Any) -> str:
    """The first part of a cell's name: a site, or the server."""
    return str(FQCN.split(cell)[0]) if isinstance(cell, str) and cell else ""


def _quoted(value: Any) -> str:
    """What a sender says, as one line of a log may hold it."""
    return re.sub(r"[^A-Za-z0-9@._-]", "?", value)[:LONGEST] if isinstance(value, str) and value else "unknown"


def hold_kit() -> bool:
    """Holds the kit until this process ends, if it is one of ``PARENTS``, and says so.

    Exits where another holds it, on this machine or on another that shares the folder.
    """
    program = getattr(sys.modules["__main__"], "__spec__", None)
    if program is None or program.name not in PARENTS:
        return False
    try:
        _until_the_end.enter_context(only_writer(Path.cwd(), what=f"the kit of {Path.cwd().name}"))
    except FolderInUseError as error:
        sys.exit(f"not started: {error}")
    except OSError as error:
        sys.exit(
            f"not started: the kit cannot be written ({error.strerror}); make it this account's, on a disk with room"
        )
    return True
