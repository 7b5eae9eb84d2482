"""Every topic that FLARE's console, server and jobs have, from every kind of sender."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessagePropKey, MessageType
from nvflare.fuel.f3.message import Message
from nvflare.fuel.sec.audit import AuditService
from nvflare.private import admin_defs
from nvflare.private.defs import CellMessageHeaderKeys, ControlCommandTopic, SysCommandTopic, TrainingTopic

from fedvlp.flare.perimeter import ADMIN_TOPICS, REFUSED, SERVER, Perimeter

JOB = "0c7d1f2a-0000-4000-8000-000000000002"
TOPICS = [
    topic
    for group in (TrainingTopic, SysCommandTopic, ControlCommandTopic)
    for name, topic in vars(group).items()
    if name.isupper()
]
STRANGERS = {
    "no signature": (SERVER, SERVER, ""),
    "forged": (SERVER, SERVER, "forged"),
    "an admin": ("member", "token-m", "signed"),
    "another site": ("site-2", "token-2", "signed"),
}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    written: list[dict[str, str]] = []
    monkeypatch.setattr(AuditService, "add_event", lambda **line: written.append(line))
    return written


def guard(**args: bool) -> Perimeter:
    verifier = SimpleNamespace(verify=lambda name, token, signature: signature == "signed")
    made = Perimeter(**args)
    link = SimpleNamespace(client_name="site-1", token="token-1", token_verifier=verifier)
    made._site = SimpleNamespace(communicator=link)
    return made


def asked(topic: str, sender: tuple[str, str, str], job: str = JOB) -> Message:
    """A request that says it comes from the server."""
    body = admin_defs.Message(topic, "")
    body.set_header("job_id", job)
    keys = (CellMessageHeaderKeys.CLIENT_NAME, CellMessageHeaderKeys.TOKEN, CellMessageHeaderKeys.TOKEN_SIGNATURE)
    headers = {MessageHeaderKey.MSG_TYPE: MessageType.REQ, MessageHeaderKey.CHANNEL: CellChannel.CLIENT_MAIN}
    return Message({**headers, MessageHeaderKey.ORIGIN: SERVER, **dict(zip(keys, sender, strict=True))}, body)


@pytest.mark.parametrize("sender", STRANGERS)
@pytest.mark.parametrize("topic", TOPICS)
def test_a_stranger_is_refused(topic: str, sender: str, lines: list[dict[str, str]]) -> None:
    message = asked(topic, STRANGERS[sender])
    assert guard().check_sender(message)
    assert guard().check_request(message)
    assert lines[0]["action"] == REFUSED


@pytest.mark.parametrize("topic", TOPICS)
def test_the_server_asks_what_the_table_says(topic: str, lines: list[dict[str, str]]) -> None:
    message = asked(topic, (SERVER, SERVER, "signed"))
    assert not guard().check_sender(message)
    assert (guard().check_request(message) is None) == (SERVER in ADMIN_TOPICS.get(topic, ()))


def test_a_shell_only_where_the_site_asks_for_it(lines: list[dict[str, str]]) -> None:
    message = asked(SysCommandTopic.SHELL, (SERVER, SERVER, "signed"))
    assert guard().check_request(message)
    assert not guard(allow_shell=True).check_request(message)


@pytest.mark.parametrize("job", ["data", "privacy", "../x", "", JOB + "/.."])
def test_only_a_job_is_deleted(job: str, lines: list[dict[str, str]]) -> None:
    assert guard().check_request(asked(TrainingTopic.DELETE_RUN, (SERVER, SERVER, "signed"), job))


def test_the_server_lets_nobody_outside_use_its_token(lines: list[dict[str, str]]) -> None:
    message = asked(TrainingTopic.ABORT, (SERVER, SERVER, "signed"))
    assert not Perimeter("server").check_at_server(message)
    message.set_prop(MessagePropKey.COMMON_NAME, "site-2")
    assert Perimeter("server").check_at_server(message)
