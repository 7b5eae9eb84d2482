"""Every topic that FLARE's console, server and jobs have, from every kind of sender.

The slow tests send such messages to two provisioned hospitals, from the accounts' own sessions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessagePropKey, MessageType
from nvflare.fuel.f3.message import Message
from nvflare.fuel.flare_api.api_spec import JobNotFound, JobNotRunning
from nvflare.fuel.flare_api.flare_api import Session
from nvflare.fuel.sec.audit import AuditService
from nvflare.private import admin_defs
from nvflare.private.defs import (
    CellMessageHeaderKeys,
    ControlCommandTopic,
    SysCommandTopic,
    TrainingTopic,
    new_cell_message,
)
from support.hospitals import MEMBER, Hospitals, joined, opened, submitted
from support.provisioned import until
from support.short_jobs import committed

from fedvlp.deploy.site_config import NamedData
from fedvlp.flare.jobs import write_job
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


# Two provisioned hospitals

PAIR = ("site-1", "site-2")
TWO = {"data__sites": 2, "data__size": 400, "partition__sites": 2, "extra__sites": 2}
"""Settings of a job for them."""
HARM = (
    (SysCommandTopic.SHELL, "ls", {}),
    (TrainingTopic.DELETE_RUN, "", {"job_id": "keep"}),
    (TrainingTopic.ABORT, "", {"job_id": JOB}),
    (TrainingTopic.SHUTDOWN, "", {}),
    (SysCommandTopic.CONFIGURE_SITE_LOG, "DEBUG", {}),
    (SysCommandTopic.REPORT_ENV, "", {}),
    (TrainingTopic.CHECK_STATUS, "", {}),
)
"""What any account could have a site's process do: topic, body, headers."""

system = pytest.mark.slow(seconds=110)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospitals]:
    with Hospitals(tmp_path_factory.mktemp("perimeter") / "consortium", PAIR) as hospitals:
        until(lambda: joined(hospitals) == set(PAIR), "both sites have joined")
        for site in PAIR:
            (hospitals.kits / site / "keep").mkdir()
        yield hospitals


def refusals(here: Hospitals, name: str) -> list[str]:
    """The perimeter's audit lines of a kit."""
    file = here.kits / name / "audit.log"
    return [line for line in file.read_text().splitlines() if REFUSED in line] if file.exists() else []


@contextmanager
def member(here: Hospitals) -> Iterator[Callable[..., str]]:
    """A session of the member, as a function that sends one message to a site's cell and returns what came of it.

    With ``replayed`` the message says that it is the server's, with the signature of the server's own messages.
    """
    session = opened(here, MEMBER)
    core = session.api.cell.core_cell
    keys = (CellMessageHeaderKeys.CLIENT_NAME, CellMessageHeaderKeys.TOKEN, CellMessageHeaderKeys.TOKEN_SIGNATURE)
    seen: dict[str, Any] = {}
    worn: dict[str, Any] = {}
    core.add_incoming_filter("*", "*", lambda message: seen.update({key: message.get_header(key) for key in keys}))
    core.add_outgoing_request_filter("*", "*", lambda message: message.add_headers(worn))

    def send(site: str, topic: str, body: str, headers: dict[str, str], replayed: bool = False) -> str:
        asked = admin_defs.Message(topic, body)
        for key, value in headers.items():
            asked.set_header(key, value)
        if replayed:
            session.get_system_info()
            assert seen[CellMessageHeaderKeys.CLIENT_NAME] == SERVER
            worn.update(seen)
            worn.update({MessageHeaderKey.ORIGIN: SERVER, MessageHeaderKey.SERVER_TRANSIT_REQUIRED: False})
        message = new_cell_message({}, asked)
        try:
            reply = core.send_request(CellChannel.CLIENT_MAIN, topic, site, message, timeout=0.5)
        finally:
            worn.clear()
        return str(reply.get_header(MessageHeaderKey.RETURN_CODE))

    try:
        yield send
    finally:
        session.close()


def unharmed(here: Hospitals, processes: dict[str, int]) -> bool:
    """Whether both sites run as they did, and still have their folders."""
    return all((here.kits / site / "keep").is_dir() and here.parent(site).pid == processes[site] for site in PAIR)


@system
@pytest.mark.parametrize("replayed", [False, True])
def test_a_members_messages_do_nothing_at_a_site(here: Hospitals, replayed: bool) -> None:
    """With the member's own token, and with the server's, which every account receives with each answer."""
    running = {site: here.parent(site).pid for site in PAIR}
    where = ["localhost"] if replayed else list(PAIR)
    before = {name: len(refusals(here, name)) for name in where}
    with member(here) as send:
        for site in PAIR:
            for topic, body, headers in HARM:
                assert send(site, topic, body, headers, replayed) != "ok", (site, topic)
    assert unharmed(here, running)
    for name in where:
        lines = refusals(here, name)[before[name] :]
        assert len(lines) == len(HARM) * len(PAIR) // len(where), lines
        assert all("channel admin" in line for line in lines)
        if replayed:
            assert all(f"through certificate {MEMBER}" in line for line in lines)


def told(session: Session, job_id: str) -> str:
    """What the sites say of a job; "" before it runs."""
    with suppress(JobNotFound, JobNotRunning):
        return str(session.show_stats(job_id, "client"))
    return ""


@system
def test_what_an_operator_needs_still_works(here: Hospitals) -> None:
    before = {name: len(refusals(here, name)) for name in ("localhost", *PAIR)}
    jobs = {
        name: write_job(
            replace(committed("fedavg", **TWO, rounds__rounds=rounds), data=NamedData("pretrain")),
            here.folder / name, sites=PAIR, custom=False, child=True,
        )
        for name, rounds in (("long", 50), ("short", 1))
    }  # fmt: skip
    session = opened(here)
    try:
        for command in ("check_status client", "report_env site-1", "sys_info client site-1"):
            said = json.dumps(session.api.do_command(command), default=str)
            assert "site-1" in said, said
            assert "timeout" not in said.lower(), said
        assert "site-1" in str(session.report_resources("client"))
        ended = session.submit_job(str(jobs["long"]))
        until(lambda: "site-1" in told(session, ended), "the sites tell figures")
        session.abort_job(ended)
        until(lambda: str(session.get_job_status(ended)).startswith("FINISHED:ABORT"), "the job has been aborted")
    finally:
        session.close()
    assert submitted(here, {"short": jobs["short"]})["short"][1]["status"] == "FINISHED:COMPLETED"
    assert {name: len(refusals(here, name)) for name in before} == before, "no honest message is refused"
