"""Every message for which FLARE has a handler, from everybody, to everybody: what passes is what is meant to.

The console's commands, which all are one message here, are in tests/flare/test_console.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, MessageType
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from nvflare.fuel.sec.audit import AuditService
from nvflare.private import admin_defs
from nvflare.private.defs import CellMessageHeaderKeys, ClientType
from support.flare_registry import ANY, registered, topics

from fedvlp.flare.perimeter import SERVER, Perimeter

JOB = "0c7d1f2a-0000-4000-8000-000000000002"
OTHER = "0c7d1f2a-0000-4000-8000-000000000003"
CONSOLE = f"_admin_{JOB}"
Pairs = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Sender:
    """What a guard can see of who sends a message: the connection, and what the message says."""

    cell: str
    certificate: str = ""
    token: tuple[str, str, str] = ("", "", "")  # name, token, signature
    joins_as: str = ClientType.REGULAR


def account(name: str) -> Sender:
    return Sender(CONSOLE, name, (name, "t", "signed"), ClientType.ADMIN)


NOBODY = {
    "nobody": Sender("anything"),
    "nobody, as the server's job": Sender(f"server.{JOB}", "", (SERVER, SERVER, "signed")),
    "nobody, as the site": Sender("site-1", "", ("site-1", "t", "signed")),
    "nobody, as the site's job": Sender(f"site-1.{JOB}", "", ("site-1", "t", "signed")),
    "nobody, as a console": Sender(CONSOLE, "", ("lead", "t", "signed"), ClientType.ADMIN),
}
AT_SERVER = NOBODY | {
    "member": account("member"),
    "lead": account("lead"),
    "org_admin of another site": account("it@northgate"),
    "altered site": Sender("site-3", "site-3", ("site-3", "t", "signed")),
    "altered site, with the server's token": Sender("site-3", "site-3", (SERVER, SERVER, "signed")),
    "altered site, in another's name": Sender("site-1", "site-3", ("site-1", "t", "signed")),
    "member, with the server's token": Sender(CONSOLE, "member", (SERVER, SERVER, "signed"), ClientType.ADMIN),
    "the server's other job": Sender(f"server.{OTHER}", "the server's", ("server_job", OTHER, "signed")),
}
AT_SITE = {name: sender for name, sender in NOBODY.items() if name != "nobody, as the site"} | {
    "member": Sender(SERVER, "the server's", ("member", "t", "signed")),
    "lead": Sender(SERVER, "the server's", ("lead", "t", "signed")),
    "org_admin of another site": Sender(SERVER, "the server's", ("it@northgate", "t", "signed")),
    "altered site": Sender(SERVER, "the server's", ("site-3", "t", "signed")),
    "altered site, at this machine": Sender("site-3", "site-3", (SERVER, SERVER, "signed")),
    "altered site, as this site's job": Sender(f"site-1.{JOB}", "site-3", ("site-1", "t", "signed")),
    "a forged signature": Sender(SERVER, "the server's", (SERVER, SERVER, "forged")),
    "the server's job": Sender(SERVER, "the server's", ("server_job", JOB, "signed")),
}

LOGIN = {("task", "challenge"), ("task", "register"), ("cellnet.channel", "bye")}
STREAM = {("sm__STREAM", "sm__ACK"), ("sm__STREAM", "sm__ERROR")}
FILES = {
    ("download_service__", "download_service__download"),
    ("download_service__", "download_service__source_failure"),
}
ANSWERS = {("return_only", topic) for topic in topics()}


def of(channel: str, *names: str) -> set[tuple[str, str]]:
    return {(channel, topic) for topic in names}


CONSOLES = LOGIN | STREAM | FILES | ANSWERS | of("hci_channel", "SESSION_EXPIRED", *topics())
CONSOLES |= of("aux_communication", "ObjectStreamer.Request", "ObjectStreamer.Abort")
MEANT: dict[tuple[str, str], set[tuple[str, str]]] = {
    **dict.fromkeys([(who, SERVER) for who in ("member", "lead", "org_admin of another site")], CONSOLES),
    ("altered site", SERVER): LOGIN | of("task", "heart_beat", "quit", "report_job_failure"),
    # the site's own task and result, as of every site of the job, which the gate looks at (core/gate.py)
    ("altered site", f"server.{JOB}"): STREAM | FILES | ANSWERS | of("server_command", "get_task", "submit_update")
    | of("aux_communication", "__sync_runner__", "__job_heartbeat__", "__task_check__", "fed.event"),
}  # fmt: skip
"""Who may send whom what; all else is refused. A console's commands are then authorized by FLARE."""


def message(sender: Sender, to: str, channel: str, topic: str) -> Message:
    name, token, signature = sender.token
    headers = {
        MessageHeaderKey.MSG_TYPE: MessageType.REQ, MessageHeaderKey.CHANNEL: channel, MessageHeaderKey.TOPIC: topic,
        MessageHeaderKey.ORIGIN: sender.cell, MessageHeaderKey.DESTINATION: to,
        CellMessageHeaderKeys.CLIENT_NAME: name, CellMessageHeaderKeys.TOKEN: token,
        CellMessageHeaderKeys.TOKEN_SIGNATURE: signature, CellMessageHeaderKeys.CLIENT_TYPE: sender.joins_as,
    }  # fmt: skip
    made = Message(headers, admin_defs.Message(topic, "") if channel == "admin" else None)
    made.set_prop(MessagePropKey.ENDPOINT, Endpoint(sender.cell))
    made.set_prop(MessagePropKey.COMMON_NAME, sender.certificate)
    return made


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written: list[str] = []
    monkeypatch.setattr(AuditService, "add_event", lambda msg, **line: written.append(msg))
    monkeypatch.setattr("fedvlp.flare.audit_log.Allowance.take", lambda self, sender: 0)  # a line for each
    return written


def guard(side: str, cell: str, certificate: str) -> Perimeter:
    made = Perimeter(side)
    made._cell, made._own_name = cell, certificate
    verifier = SimpleNamespace(verify=lambda name, token, signature: signature == "signed")
    made._site = SimpleNamespace(communicator=SimpleNamespace(token_verifier=verifier))
    return made


def test_flares_registrations_are_found() -> None:
    """A few that each part of FLARE has, and those that were meant above."""
    assert {("task", "register"), ("_net_manager", "stop_cell"), ("client_api", "client_api.hello")} <= registered()
    assert {channel for channel, topic in registered() if topic == ANY} >= {"admin", "hci_channel", "client_command"}
    assert {pair for pairs in MEANT.values() for pair in pairs} <= registered()


@pytest.mark.parametrize("who", AT_SERVER)
def test_what_the_server_takes_is_what_is_meant(who: str, lines: list[str]) -> None:
    made = guard("server", SERVER, "the server's")
    for to in (SERVER, f"server.{JOB}", "site-2", f"site-2.{JOB}", f"_admin_{OTHER[::-1]}"):
        passed = set()
        for channel, topic in registered():
            before = len(lines)
            refused = made.check_at_server(message(AT_SERVER[who], to, channel, topic))
            assert (len(lines) - before) == bool(refused), "an audit line for each that is refused"
            passed |= set() if refused else {(channel, topic)}
        if who == "the server's other job" and to in (SERVER, "site-2", f"_admin_{OTHER[::-1]}"):
            continue  # its own process's and, at a site, refused there
        assert passed == MEANT.get((who, to), set()), to


@pytest.mark.parametrize("who", AT_SITE)
def test_a_site_takes_nothing_but_the_servers_own(who: str, lines: list[str]) -> None:
    """And passes on to its own jobs what a job's process at the server sends them.

    FLARE's server says goodbye without a token; the test above shows that nobody else gets that past the server.
    """
    made = guard("client", "site-1", "site-1")
    for to in ("site-1", f"site-1.{JOB}"):
        for channel, topic in registered():
            sent = message(AT_SITE[who], to, channel, topic)
            refused = made.check_sender(sent) or (made.check_request(sent) if to == "site-1" else None)
            goodbye = AT_SITE[who].cell == SERVER and (to, channel, topic) == ("site-1", "cellnet.channel", "bye")
            assert bool(refused) != (goodbye or (who == "the server's job" and to != "site-1")), (to, channel, topic)
            assert not refused or lines.pop()
